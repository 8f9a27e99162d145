"""A pytest plugin that runs the tests of any program on jaxmp: `pytest -p plugin --jaxmp=fused`. Modes: plain,
unchanged; products, with jaxmp's matmul, einsum and dot_general instead of JAX's; fused, with `jax.jit(jaxmp.fuse(f))`
instead of every `jax.jit(f)`. The last lines count the products, and `--jaxmp-report` writes each test's outcome as
JSON, so that runs in two modes can be compared."""

import collections
import contextvars
import functools
import json
import pathlib
import sys

import jax
import numpy as np
from counting import counting

inside = contextvars.ContextVar("inside jaxmp", default=False)
MODES = ("plain", "products", "fused")


def pytest_addoption(parser):
    parser.addoption("--jaxmp", choices=MODES, default="plain")
    parser.addoption("--jaxmp-report", type=pathlib.Path)
    parser.addoption("--jaxmp-share", type=int, default=1, help="run one test in this many")


def pytest_configure(config):
    config.pluginmanager.register(Session(config))


def pytest_collection_modifyitems(config, items):
    items[:] = items[:: config.getoption("--jaxmp-share")]


class Session:
    """One run of pytest in one mode."""

    def __init__(self, config):
        self.mode, self.report = config.getoption("--jaxmp"), config.getoption("--jaxmp-report")
        self.outcomes, self.calls = {}, collections.Counter()
        self.counting = counting()
        self.count = self.counting.__enter__()
        if self.mode == "products":
            replace_products(self.calls)
        elif self.mode == "fused":
            replace_jit()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            errors = [line for line in str(report.longrepr).splitlines() if line.startswith("E  ")]
            text = errors[:1] if report.failed else []
            self.outcomes.setdefault(report.nodeid, [report.outcome, *text])

    def pytest_sessionfinish(self):
        self.counting.__exit__(None, None, None)
        met = self.calls.total() if self.mode == "products" else self.count.met
        found = {"outcomes": self.outcomes, "met": met, "calls": self.count.calls, "left": self.count.left}
        if self.report:
            self.report.write_text(json.dumps(found))

    def pytest_terminal_summary(self, terminalreporter):
        met = dict(self.calls) if self.mode == "products" else f"{self.count.met}, {self.count.calls} became calls"
        terminalreporter.line(f"jaxmp, {self.mode}: {len(self.outcomes)} tests run; products met: {met}")


def replace_products(calls):
    """Replaces JAX's functions by jaxmp's in every module, including imported ones."""
    import jaxmp

    pairs = ((jax.numpy, "matmul"), (jax.numpy, "einsum"), (jax.lax, "dot_general"))
    for module, name in pairs:
        original, ours = getattr(module, name), getattr(jaxmp, name)
        replacement = counted(original, ours, name, calls)
        for other in list(sys.modules.values()):
            # JAX and jaxmp stay unchanged inside, because their functions call each other.
            if getattr(other, "__name__", "").split(".")[0] in ("jax", "jaxmp") and other not in (jax.numpy, jax.lax):
                continue
            for key, value in list(getattr(other, "__dict__", {}).items()):
                if value is original:
                    setattr(other, key, replacement)
    operator = with_operator(type(jax.numpy.zeros(())).__matmul__)
    type(jax.numpy.zeros(())).__matmul__ = operator
    jax.core.ShapedArray._matmul = staticmethod(operator)  # the operator of traced arrays


def with_operator(original):
    """Wraps the operator so that `a @ b` is `jnp.matmul(a, b)` if both are arrays."""

    def operator(a, b):
        if inside.get() or not isinstance(b, jax.Array | np.ndarray):
            return original(a, b)
        return jax.numpy.matmul(a, b)

    return operator


def counted(original, ours, name, calls):
    @functools.wraps(original)
    def product(*args, _dot_general=jax.lax.dot_general, **options):
        # jaxmp itself calls JAX, sometimes at lowering, and Flax Linen passes einsum its own product by a private
        # keyword.
        caller = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
        if inside.get() or caller == "jaxmp" or _dot_general.__name__ != "dot_general":
            return original(*args, **options, **({"_dot_general": _dot_general} if name == "einsum" else {}))
        calls[name] += 1
        token = inside.set(True)
        try:
            return ours(*args, **options)
        finally:
            inside.reset(token)

    return product


def replace_jit():
    """Replaces `jax.jit(f)` by `jit(fuse(f, determinism="batch"))` from now on, except in JAX and jaxmp themselves."""
    import jaxmp

    original = jax.jit

    @functools.wraps(original)
    def jit(fun=None, **options):
        if fun is None:
            return functools.partial(jit, **options)
        caller = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
        if caller in ("jax", "jaxmp") or not callable(fun):
            return original(fun, **options)
        # Without a level, float32 products on one device stay JAX's.
        return original(jaxmp.fuse(fun, determinism="batch", strict=False), **options)

    jax.jit = jit
