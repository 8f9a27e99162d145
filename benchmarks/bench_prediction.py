"""Compares the time that `jaxmp.explain(fn, hardware="this")` predicts with the measured one.

The rates of this machine are measured first, as `jaxmp info --calibrate` does, and once more at the end: what they
changed by meanwhile, no prediction can know.
"""

import contextlib
import functools
import itertools
import statistics

import bench_matmul
import jax
import jax.numpy as jnp
from common import interleaved, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jaxmp
from jaxmp._src.tools.cli import calibrate

PATTERNS = {**bench_matmul.PATTERNS, "local": (P("x", None), P(None, None), P("x", None))}
SHAPES = [shape for shape in bench_matmul.SHAPES if min(shape) >= 512]
TYPES = [types for types in bench_matmul.TYPES if types[0] != "int8"]
RANKS = bench_matmul.RANKS
CLOSE = 1.05  # two patterns with times that differ by less count as equally fast


def contender(pattern, ranks, shape, types, hardware):
    """A call without arguments, and its predicted seconds."""
    (m, k, n), (dtype, out) = shape, types
    mesh = jax.make_mesh((ranks,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:ranks])
    spec_a, spec_b, spec_d = PATTERNS[pattern]
    is_narrow = jnp.dtype(dtype).itemsize == 1
    where_b = ((n, k), P(*reversed(spec_b))) if is_narrow else ((k, n), spec_b)
    a, b = (
        bench_matmul.operand(extents, dtype, NamedSharding(mesh, spec), seed)
        for seed, (extents, spec) in enumerate([((m, k), spec_a), where_b])
    )
    call = functools.partial(
        jaxmp.matmul,
        preferred_element_type=jnp.dtype(out),
        transpose_b=is_narrow,
        out_sharding=NamedSharding(mesh, spec_d),
    )
    explained = jaxmp.explain(call, quiet=True, hardware=hardware)(a, b)
    return functools.partial(jax.jit(call), a, b), explained.seconds


def cases_of(shape, types, ranks, hardware, seconds, rounds):
    """The patterns of one product, measured in turns."""
    calls, predicted = {}, {}
    for pattern in PATTERNS:
        calls[pattern], predicted[pattern] = contender(pattern, ranks, shape, types, hardware)
    measured = interleaved(calls, seconds, rounds)
    return [
        {
            "pattern": pattern,
            "ranks": ranks,
            "shape": shape,
            "types": types,
            "predicted": predicted[pattern],
            "measured": measured[pattern],
        }
        for pattern in PATTERNS
    ]


def is_close(one, other):
    return max(one, other) < CLOSE * min(one, other)


def ordered(group):
    """Counts the pairs of patterns of one product: all, the pairs predicted in the right order, and the pairs of
    either kind that were measured apart."""
    told = [
        (a["measured"] < b["measured"]) == (a["predicted"] < b["predicted"])
        or (is_close(a["measured"], b["measured"]) and is_close(a["predicted"], b["predicted"]))
        for a, b in itertools.combinations(group, 2)
    ]
    apart = [not is_close(a["measured"], b["measured"]) for a, b in itertools.combinations(group, 2)]
    return len(told), sum(told), sum(apart), sum(t and p for t, p in zip(told, apart, strict=True))


def summary(groups):
    rows = []
    for types in [*TYPES, None]:
        chosen = [group for group in groups if types is None or tuple(group[0]["types"]) == types]
        if not chosen:
            continue
        ratios = [case["predicted"] / case["measured"] for group in chosen for case in group]
        pairs, told, apart, told_apart = (sum(each) for each in zip(*map(ordered, chosen), strict=True))
        within = sum(0.75 <= ratio <= 1.25 for ratio in ratios)
        rows.append(
            {
                "types": "all" if types is None else bench_matmul.label_of_types(types),
                "median": statistics.median(ratios),
                "range": f"{min(ratios):.2f}-{max(ratios):.2f}",
                "within 25 %": f"{within}/{len(ratios)}",
                "pairs in order": f"{told}/{pairs}",
                "apart": f"{told_apart}/{apart}",
            }
        )
    return rows


def detail(group):
    """A row of one product: each pattern's times."""
    shape, types, ranks = (group[0][key] for key in ("shape", "types", "ranks"))
    row = {"m x k x n": bench_matmul.label_of_shape(shape), "types": bench_matmul.label_of_types(types)}
    times = {f"{c['pattern']} {kind} ms": c[kind] * 1e3 for c in group for kind in ("predicted", "measured")}
    return row | {"devices": ranks} | times


def measure(quick):
    seconds, rounds = (0.1, (5, 9)) if quick else (0.4, (9, 31))
    shapes = SHAPES[:1] if quick else SHAPES
    before = calibrate.measure()
    hardware = jaxmp.Hardware(**before)
    grid = list(itertools.product(TYPES, shapes, RANKS))
    with contextlib.redirect_stdout(None):
        groups = [
            cases_of(shape, types, ranks, hardware, seconds, rounds)
            for types, shape, ranks in tqdm(grid, "prediction", disable=None)
        ]
    after = calibrate.measure()
    drift = {name: after["rates"][name] / rate for name, rate in before["rates"].items()}
    note = "Rates of one device at the end over those at the start: "
    note += ", ".join(f"{name} {ratio:.2f}" for name, ratio in drift.items()) + "."
    return {"prediction": {"means": summary(groups), "rows": [detail(group) for group in groups], "note": note}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(RANKS))
    main(measure)
