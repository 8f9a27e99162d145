"""Logging, by Python's `logging`: a logger for each topic, "jaxmp.plan" and others.

A program that configures `logging` gets the lines where it sends others. JAXMP_LOG is a shortcut: the topics that it
names are logged from DEBUG on, on stderr where nobody has said where to.
"""

from __future__ import annotations

import functools
import logging

from jaxmp._src.platform.runtime.config import LOG_TOPICS, config

# A library prints nothing that nobody asked for, but warnings; `logging.lastResort` shows those.
_FORMAT = "%(name)s: %(message)s"


@functools.cache  # asked at every call that is lowered
def logger(topic: str) -> logging.Logger:
    """The logger of one of `config.LOG_TOPICS`."""
    assert topic in LOG_TOPICS, topic
    set_up()
    return logging.getLogger(f"jaxmp.{topic}")


@functools.cache
def set_up() -> None:
    """What JAXMP_LOG asks for, once."""
    for topic in config().log:
        named = logging.getLogger(f"jaxmp.{topic}")
        named.setLevel(logging.DEBUG)
        if not named.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter(_FORMAT))
            named.addHandler(handler)
            named.propagate = False  # or a root handler that comes later would print each line again
