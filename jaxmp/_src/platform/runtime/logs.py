"""Logging by Python's `logging`, with a logger for each topic: "jaxmp.plan" and others.

The lines go to the handlers that the program configures. JAXMP_LOG is a shortcut: its topics are logged from DEBUG on,
to stderr if no handler is configured.
"""

from __future__ import annotations

import functools
import logging

from jaxmp._src.platform.runtime.config import LOG_TOPICS, config

# Unless asked, a library prints only warnings; `logging.lastResort` shows them.
_FORMAT = "%(name)s: %(message)s"


@functools.cache  # asked at every call that is lowered
def logger(topic: str) -> logging.Logger:
    """Returns the logger of one of `config.LOG_TOPICS`."""
    assert topic in LOG_TOPICS, topic
    set_up()
    return logging.getLogger(f"jaxmp.{topic}")


@functools.cache
def set_up() -> None:
    """Sets up the loggers of the topics in JAXMP_LOG, once."""
    for topic in config().log:
        named = logging.getLogger(f"jaxmp.{topic}")
        named.setLevel(logging.DEBUG)
        if not named.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter(_FORMAT))
            named.addHandler(handler)
            named.propagate = False  # else a root handler that is added later would print each line again
