"""Compare the time of a product with XLA's under the same shardings, here and now."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxmp import testing
from jaxmp._src.core.ops.matmul import matmul
from jaxmp._src.core.spec.matmul_spec import accumulator
from jaxmp._src.platform.hardware.clock import interleaved
from jaxmp._src.tools.cli.output import CommandError, Result, counted, dtype_of, require_devices, table
from jaxmp._src.tools.cli.selftest import place
from jaxmp._src.tools.explain.explain import explain
from jaxmp.testing import Layout

_PATTERNS = ("local", "all_gather", "reduce_scatter", "all_reduce", "grid")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, text in (("m", "rows of a"), ("k", "columns of a, rows of b"), ("n", "columns of b")):
        parser.add_argument(name, type=int, help=text)
    parser.add_argument("--mesh", type=int, default=4, help="how many devices share the product (4)")
    parser.add_argument("--dtype", default="f32", help="type of the operands: f32, bf16, f64, ... (f32)")
    parser.add_argument("--pattern", choices=("all", *_PATTERNS), default="all", help="how they share it (all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contender of each pattern (1)")


def run(options: argparse.Namespace) -> Result:
    """Compares jaxmp's and XLA's product of each pattern, and times both if their results agree. The status is 1 if
    some do not. Raises CommandError if no pattern takes the extents, and for too few devices."""
    extents, dtype = (options.m, options.k, options.n), dtype_of(options.dtype)
    product = "x".join(map(str, extents))
    layouts = list(_layouts(options.mesh, extents, options.pattern))
    if not layouts:
        raise CommandError(f"{options.mesh} devices do not divide {product} for --pattern {options.pattern}")
    require_devices(options.mesh)
    results, wrong = [], []
    with jax.enable_x64(True):
        for layout in counted("bench", layouts):
            name, (calls, implementation) = _pattern(layout), contenders(layout, extents, dtype)
            if error := disagreement(calls, options.k, dtype):
                wrong.append(f"{name}: {error}")
            else:
                seconds = interleaved(calls, options.seconds)
                results.append({"pattern": name, "implementation": implementation, "seconds": seconds})
    flops = 2 * math.prod(extents) * (4 if jnp.issubdtype(dtype, jnp.complexfloating) else 1)
    head = "pattern", "by", "ms", "XLA ms", "Gflop/s", "XLA / jaxmp"
    lines = table([head, *(_cells(x, flops) for x in results)]) + [f"WRONG {each}" for each in wrong]
    text = "\n".join([f"{product} {dtype} on {options.mesh} devices", *lines])
    value = {"flops": flops, "dtype": dtype, "devices": options.mesh, "rows": results, "wrong": wrong}
    return Result(text, value, int(bool(wrong)))


def _cells(result: dict[str, Any], flops: int) -> tuple[str, ...]:
    ours, theirs = result["seconds"]["jaxmp"], result["seconds"]["xla"]
    numbers = (f"{ours * 1e3:.3f}", f"{theirs * 1e3:.3f}", f"{flops / ours / 1e9:.0f}", f"{theirs / ours:.2f}")
    return result["pattern"], result["implementation"], *numbers


def _pattern(layout: Layout) -> str:
    return layout.name.replace("-", "_")


def _layouts(ndevices: int, extents: tuple[int, int, int], pattern: str) -> Iterator[Layout]:
    """Yields the layouts of `pattern`, or of all `_PATTERNS`, on meshes of `ndevices` devices that divide operands and
    result; no grid of one column."""
    m, k, n = extents
    for layout in testing.layouts(ndevices) if min(ndevices, *extents) > 0 else ():
        sizes, specs = dict(layout.mesh), (layout.a, layout.b, layout.d)
        shards = [
            (extent, sizes[axis])
            for spec, shape in zip(specs, ((m, k), (k, n), (m, n)), strict=True)
            for axis, extent in zip(spec, shape, strict=True)
            if isinstance(axis, str)
        ]
        is_mesh = math.prod(sizes.values()) == ndevices and sizes.get("y") != 1
        is_asked = _pattern(layout) in _PATTERNS and pattern in ("all", _pattern(layout))
        if is_mesh and is_asked and all(extent % size == 0 for extent, size in shards):
            yield layout


def contenders(
    layout: Layout, extents: tuple[int, int, int], dtype: str
) -> tuple[dict[str, Callable[[], jax.Array]], str]:
    """Returns ({"jaxmp" and "xla": a function that runs its product, already compiled, on the same random operands},
    jaxmp's implementation). `extents`: (m, k, n)."""
    (m, k, n), mesh, rng, kind = extents, layout.make_mesh(), np.random.default_rng(0), jnp.dtype(dtype)
    specs = (layout.a, layout.b)
    draw = (
        functools.partial(rng.uniform, -1) if jnp.issubdtype(kind, jnp.inexact) else functools.partial(rng.integers, 0)
    )
    operands = [
        place(np.asarray(draw(2, shape), kind), mesh, spec) for shape, spec in zip(((m, k), (k, n)), specs, strict=True)
    ]
    ours = functools.partial(matmul, in_shardings=specs, out_sharding=layout.d, mesh=mesh)
    row = explain(ours, quiet=True)(*operands).rows[-1]
    theirs = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, layout.d))
    calls = {"jaxmp": jax.jit(ours).lower(*operands).compile(), "xla": theirs.lower(*operands).compile()}
    return {each: functools.partial(call, *operands) for each, call in calls.items()}, row.implementation


def disagreement(calls: dict[str, Callable[[], Any]], k: int, dtype: str) -> str:
    """Explains a difference of the two results, on this process's devices, that is more than rounding; "" if none is.
    Operands are at most 1, so each of the sums errs by at most some u k, and each result by u |D|."""
    results = [np.concatenate([np.ravel(x.data) for x in call().addressable_shards]) for call in calls.values()]
    types = accumulator(dtype), results[0].dtype
    u_sum, u = (float(jnp.finfo(x).eps) / 2 if jnp.issubdtype(x, jnp.inexact) else 0.0 for x in types)
    ours, theirs = (x.astype(np.complex128) for x in results)
    error = float(np.max(np.abs(ours - theirs), initial=0))
    allowed = 4 * u_sum * k + 4 * u * float(np.max(np.abs(theirs), initial=0))
    return "" if error <= allowed else f"the results differ by {error:.3g}, and rounding explains {allowed:.3g}"
