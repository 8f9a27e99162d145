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
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.ops.matmul import matmul
from jaxmp._src.core.spec.matmul_spec import accumulator
from jaxmp._src.platform.hardware.clock import interleaved
from jaxmp._src.tools.cli.output import CommandError, dtype_of, print_json, print_table, progress, require_devices, rich
from jaxmp._src.tools.explain.explain import explain

# Shardings of a (m, k), b (k, n) and d, on the axes x, or x and y of a grid.
PATTERNS = {
    "local": (P("x", None), P(None, None), P("x", None)),
    "all_gather": (P("x", None), P(None, "x"), P(None, "x")),
    "reduce_scatter": (P(None, "x"), P("x", None), P("x", None)),
    "all_reduce": (P(None, "x"), P("x", None), P(None, None)),
    "grid": (P("x", "y"), P("x", "y"), P("x", "y")),
}
_SHORT = {"ag": "all_gather", "rs": "reduce_scatter", "ar": "all_reduce"}
# Rates that differ by less are called equal: two runs on a machine with other load differ by as much.
_EQUAL = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, text in (("m", "rows of a"), ("k", "columns of a, rows of b"), ("n", "columns of b")):
        parser.add_argument(name, type=int, help=text)
    parser.add_argument("--mesh", type=int, default=4, help="how many devices share the product (4)")
    parser.add_argument("--dtype", default="f32", help="type of the operands: f32, bf16, f64, ... (f32)")
    parser.add_argument("--pattern", default="all", help=f"all, or one of {', '.join(PATTERNS)} (all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contender of each pattern (1)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Compares jaxmp's and XLA's product of each pattern, times both if their results agree, and prints. Returns 1 if
    some do not, else 0. Raises CommandError as `_patterns` does, and for too few devices."""
    if not options.json:
        rich("progress")  # raises before the work where rich is missing
    dtype, names = dtype_of(options.dtype), _patterns(options)
    devices = require_devices(options.mesh)
    results, wrong = [], []
    with jax.enable_x64(True), progress("bench", len(names), is_quiet=options.json) as step:
        for name in names:
            calls, reason = contenders(name, devices, (options.m, options.k, options.n), dtype)
            if error := disagreement(calls, options.k, dtype):
                wrong.append(f"{name}: {error}")
            else:
                times = interleaved(calls, options.seconds)
                results.append({"pattern": name, "implementation": reason, "seconds": times})
            step(name)
    flops = 2 * options.m * options.k * options.n * (4 if jnp.issubdtype(dtype, jnp.complexfloating) else 1)
    if options.json:
        print_json({"flops": flops, "dtype": dtype, "devices": options.mesh, "rows": results, "wrong": wrong})
    else:
        _print(options, dtype, flops, results)
        for each in wrong:
            print(f"WRONG {each}")
    return int(bool(wrong))


def _patterns(options: argparse.Namespace) -> list[str]:
    """Returns the pattern asked for, or all that extents and devices allow. Raises CommandError if there is none, if
    the pattern asked for does not exist or fit, and for numbers below 1."""
    if options.mesh < 1 or min(options.m, options.k, options.n) < 1:
        raise CommandError("M, K, N and --mesh must be at least 1")
    if options.pattern != "all":
        name = _SHORT.get(options.pattern, options.pattern)
        if name not in PATTERNS:
            raise CommandError(f"there is no pattern {options.pattern!r}; pass all or one of {', '.join(PATTERNS)}")
        if why := _why_not(name, options):
            raise CommandError(f"{name}: {why}")
        return [name]
    found = [name for name in PATTERNS if not _why_not(name, options)]
    if not found:
        raise CommandError(f"no pattern takes {options.m}x{options.k}x{options.n} on {options.mesh} devices")
    return found


def _why_not(name: str, options: argparse.Namespace) -> str:
    """Returns why a pattern cannot run: the devices make no grid, or do not divide an operand or the result; else
    ""."""
    sizes = dict(zip("xy", _grid(name, options.mesh), strict=False))
    if name == "grid" and sizes["y"] == 1:
        return f"{options.mesh} devices make no grid of two dimensions"
    extents = ((options.m, options.k), (options.k, options.n), (options.m, options.n))
    for spec, shape in zip(PATTERNS[name], extents, strict=True):
        for axis, extent in zip(spec, shape, strict=True):
            if axis and extent % sizes[axis]:
                return f"{extent} is not a multiple of {sizes[axis]}, the devices along {axis}"
    return ""


def _grid(name: str, ndevices: int) -> tuple[int, ...]:
    """Returns the shape of the mesh: a line, or for a grid the nearest to a square, with more rows than columns."""
    if name != "grid":
        return (ndevices,)
    columns = max(i for i in range(1, math.isqrt(ndevices) + 1) if ndevices % i == 0)
    return ndevices // columns, columns


def _mesh(name: str, devices: list[jax.Device]) -> Mesh:
    shape = _grid(name, len(devices))
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=(AxisType.Explicit,) * len(shape), devices=devices)


def contenders(
    name: str, devices: list[jax.Device], extents: tuple[int, int, int], dtype: str
) -> tuple[dict[str, Callable[[], jax.Array]], str]:
    """Returns ({"jaxmp" and "xla": a function that runs its product, already compiled, on the same random operands},
    jaxmp's implementation). `name`: a key of `PATTERNS`. `extents`: (m, k, n)."""
    (m, k, n), (of_a, of_b, of_d), mesh = extents, PATTERNS[name], _mesh(name, devices)
    operands = [
        _operand(shape, dtype, NamedSharding(mesh, spec), seed)
        for seed, (shape, spec) in enumerate((((m, k), of_a), ((k, n), of_b)))
    ]
    to = NamedSharding(mesh, of_d)
    ours = functools.partial(matmul, out_sharding=to)
    row = explain(ours, quiet=True)(*operands).rows[-1]

    def theirs(a: jax.Array, b: jax.Array) -> jax.Array:
        if name == "grid":  # jnp takes no contraction that is sharded over two axes
            a, b = jax.sharding.reshard(a, P("x", None)), jax.sharding.reshard(b, P(None, "y"))
        return jnp.matmul(a, b, out_sharding=to)

    with jax.set_mesh(mesh):
        calls = {each: jax.jit(f).lower(*operands).compile() for each, f in (("jaxmp", ours), ("xla", theirs))}
    return {each: functools.partial(call, *operands) for each, call in calls.items()}, row.implementation


def _operand(shape: tuple[int, int], dtype: str, sharding: NamedSharding, seed: int) -> jax.Array:
    """Returns random values from -1 to 1, made on the devices in their sharding."""
    key = jax.random.key(seed)
    drawn = jnp.bfloat16 if jnp.dtype(dtype).itemsize == 1 else jnp.finfo(dtype).dtype
    draw = jax.jit(lambda: jax.random.uniform(key, shape, drawn, -1, 1).astype(dtype), out_shardings=sharding)
    operand: jax.Array = draw()
    return operand


def disagreement(calls: dict[str, Callable[[], Any]], k: int, dtype: str) -> str:
    """Explains a difference of the two results, on this process's devices, that is more than rounding; "" if none is.
    Operands are at most 1, so each of the sums errs by at most some u k, and each result by u |D|."""
    results = [np.concatenate([np.ravel(x.data) for x in call().addressable_shards]) for call in calls.values()]
    u_sum, u = (float(jnp.finfo(x).eps) / 2 for x in (accumulator(dtype), results[0].dtype))
    ours, theirs = (x.astype(np.complex128) for x in results)
    error = float(np.max(np.abs(ours - theirs), initial=0))
    allowed = 4 * u_sum * k + 4 * u * float(np.max(np.abs(theirs), initial=0))
    return "" if error <= allowed else f"the results differ by {error:.3g}, and rounding explains {allowed:.3g}"


def _print(options: argparse.Namespace, dtype: str, flops: int, results: list[dict[str, Any]]) -> None:
    """Prints a table of `results`, and the `verdict` unless `results` is empty."""
    rows, ratios = [], []
    for result in results:
        ours, theirs = result["seconds"]["jaxmp"], result["seconds"]["xla"]
        ratios.append(theirs / ours)
        times = [f"{each * 1e3:.3f}" for each in (ours, theirs)]
        rates = [f"{flops / each / 1e9:.0f}" for each in (ours, theirs)]
        rows.append((result["pattern"], result["implementation"], *times, *rates, f"{theirs / ours:.2f}"))
    columns = ("pattern", "by", "ms", "XLA ms", "Gflop/s", "XLA's", "XLA / jaxmp")
    print_table(f"{options.m}x{options.k}x{options.n} {dtype} on {options.mesh} devices", columns, rows, numbers=5)
    if ratios:
        print(verdict([str(result["pattern"]) for result in results], ratios))


def verdict(names: list[str], ratios: list[float]) -> str:
    """Returns a sentence about one or more ratios of XLA's time to jaxmp's: the geometric mean, and the patterns
    (`names`) where jaxmp is slower. Ratios within `_EQUAL` of 1 count as equal."""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    slower = [name for name, ratio in zip(names, ratios, strict=True) if ratio < 1 - _EQUAL]
    text = f"{mean:.2f} times XLA's rate" if abs(mean - 1) > _EQUAL else "XLA's rate"
    of = f" (geometric mean of {len(ratios)} patterns)" if len(ratios) > 1 else ""
    return f"jaxmp runs at {text}{of}{'; slower in ' + ', '.join(slower) if slower else ''}."
