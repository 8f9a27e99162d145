"""Compare the time of a product with XLA's under the same shardings, here and now."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.ops.matmul import matmul
from jaxmp._src.core.spec.matmul_spec import accumulator
from jaxmp._src.platform.hardware.clock import interleaved
from jaxmp._src.tools.cli.output import CommandError, counted, dtype_of, print_json, print_table, require_devices
from jaxmp._src.tools.cli.selftest import place
from jaxmp._src.tools.explain.explain import explain

# Shardings of a (m, k), b (k, n) and d, on the axes x, or x and y of a grid.
PATTERNS = {
    "local": (P("x", None), P(None, None), P("x", None)),
    "all_gather": (P("x", None), P(None, "x"), P(None, "x")),
    "reduce_scatter": (P(None, "x"), P("x", None), P("x", None)),
    "all_reduce": (P(None, "x"), P("x", None), P(None, None)),
    "grid": (P("x", "y"), P("x", "y"), P("x", "y")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, text in (("m", "rows of a"), ("k", "columns of a, rows of b"), ("n", "columns of b")):
        parser.add_argument(name, type=int, help=text)
    parser.add_argument("--mesh", type=int, default=4, help="how many devices share the product (4)")
    parser.add_argument("--dtype", default="f32", help="type of the operands: f32, bf16, f64, ... (f32)")
    parser.add_argument("--pattern", choices=("all", *PATTERNS), default="all", help="how they share it (all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contender of each pattern (1)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Compares jaxmp's and XLA's product of each pattern, times both if their results agree, and prints. Returns 1 if
    some do not, else 0. Raises CommandError if no pattern takes the extents, and for too few devices."""
    extents, dtype = (options.m, options.k, options.n), dtype_of(options.dtype)
    product = "x".join(map(str, extents))
    names = [x for x in PATTERNS if options.pattern in ("all", x) and _divides(x, options.mesh, extents)]
    if not names:
        raise CommandError(f"{options.mesh} devices do not divide {product} for --pattern {options.pattern}")
    devices = require_devices(options.mesh)
    results, wrong = [], []
    with jax.enable_x64(True):
        for name in counted("bench", names):
            calls, implementation = contenders(name, devices, extents, dtype)
            if error := disagreement(calls, options.k, dtype):
                wrong.append(f"{name}: {error}")
            else:
                seconds = interleaved(calls, options.seconds)
                results.append({"pattern": name, "implementation": implementation, "seconds": seconds})
    flops = 2 * math.prod(extents) * (4 if jnp.issubdtype(dtype, jnp.complexfloating) else 1)
    if options.json:
        print_json({"flops": flops, "dtype": dtype, "devices": options.mesh, "rows": results, "wrong": wrong})
    else:
        print(f"{product} {dtype} on {options.mesh} devices")
        print_table([("pattern", "by", "ms", "XLA ms", "Gflop/s", "XLA / jaxmp"), *(_cells(x, flops) for x in results)])
        for each in wrong:
            print(f"WRONG {each}")
    return int(bool(wrong))


def _cells(result: dict[str, Any], flops: int) -> tuple[str, ...]:
    ours, theirs = result["seconds"]["jaxmp"], result["seconds"]["xla"]
    numbers = (f"{ours * 1e3:.3f}", f"{theirs * 1e3:.3f}", f"{flops / ours / 1e9:.0f}", f"{theirs / ours:.2f}")
    return result["pattern"], result["implementation"], *numbers


def _divides(name: str, ndevices: int, extents: tuple[int, int, int]) -> bool:
    """True if the devices divide the operands and the result of a pattern, and for a grid, if they make one."""
    m, k, n = extents
    if min(ndevices, *extents) < 1:
        return False
    sizes = _axes(name, ndevices)
    return sizes.get("y") != 1 and all(
        extent % sizes[axis] == 0
        for spec, shape in zip(PATTERNS[name], ((m, k), (k, n), (m, n)), strict=True)
        for axis, extent in zip(spec, shape, strict=True)
        if axis
    )


def _axes(name: str, ndevices: int) -> dict[str, int]:
    """Returns the axes of the mesh: one, or for a grid two as equal as they can be, the larger one first."""
    if name != "grid":
        return {"x": ndevices}
    columns = max(i for i in range(1, math.isqrt(ndevices) + 1) if ndevices % i == 0)
    return {"x": ndevices // columns, "y": columns}


def contenders(
    name: str, devices: list[jax.Device], extents: tuple[int, int, int], dtype: str
) -> tuple[dict[str, Callable[[], jax.Array]], str]:
    """Returns ({"jaxmp" and "xla": a function that runs its product, already compiled, on the same random operands},
    jaxmp's implementation). `name`: a key of `PATTERNS`. `extents`: (m, k, n)."""
    (m, k, n), (*of_operands, of_d), axes = extents, PATTERNS[name], _axes(name, len(devices))
    kinds = (AxisType.Explicit,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)
    rng, to, kind = np.random.default_rng(0), NamedSharding(mesh, of_d), jnp.dtype(dtype)
    draw: Callable[..., Any] = functools.partial(rng.integers, 0, 2)
    if jnp.issubdtype(kind, jnp.inexact):
        draw = functools.partial(rng.uniform, -1, 1)
    operands = [
        place(draw(size=shape).astype(kind), mesh, spec)
        for shape, spec in zip(((m, k), (k, n)), of_operands, strict=True)
    ]
    ours = functools.partial(matmul, out_sharding=to)
    row = explain(ours, quiet=True)(*operands).rows[-1]

    def theirs(a: jax.Array, b: jax.Array) -> jax.Array:
        if name == "grid":  # jnp takes no contraction that is sharded over two axes
            a, b = jax.sharding.reshard(a, P("x", None)), jax.sharding.reshard(b, P(None, "y"))
        return jnp.matmul(a, b, out_sharding=to)

    with jax.set_mesh(mesh):
        calls = {each: jax.jit(f).lower(*operands).compile() for each, f in (("jaxmp", ours), ("xla", theirs))}
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
