"""The time that `jaxmp.explain(fn, hardware="this")` predicts, beside the measured one.

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
from common import Report, interleaved, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jaxmp
from jaxmp._src.cli import calibrate

PATTERNS = {**bench_matmul.PATTERNS, "local": (P("x", None), P(None, None), P("x", None))}
SHAPES = [shape for shape in bench_matmul.SHAPES if min(shape) >= 512]
TYPES = bench_matmul.TYPES
RANKS = bench_matmul.RANKS
CLOSE = 1.05  # two patterns whose times differ by less are taken as equally fast


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
    """Of the pairs of patterns of one product: how many there are, how many are told in the right order, and how many
    of either kind were measured apart."""
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
        rows.append(
            [
                "all" if types is None else bench_matmul.label_of_types(types),
                len(ratios),
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{sum(0.75 <= ratio <= 1.25 for ratio in ratios)} of {len(ratios)}",
                f"{told} of {pairs}",
                f"{told_apart} of {apart}",
            ]
        )
    columns = ["types", "rows", "median", "range", "within 25 %", "pairs in order", "of those apart"]
    return columns, rows


def detail(groups):
    return ["m x k x n", "types", "devices", *(f"{pattern} ms" for pattern in PATTERNS)], [
        [bench_matmul.label_of_shape(group[0]["shape"]), bench_matmul.label_of_types(group[0]["types"])]
        + [group[0]["ranks"]]
        + [f"{case['predicted'] * 1e3:.2f} / {case['measured'] * 1e3:.2f}" for case in group]
        for group in groups
    ]


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
    prose = (
        "Predicted over measured time of a product; measured times are medians, and the patterns of one product ran in "
        f"turns. *pairs in order*: two patterns of one product, told in the right order, or within "
        f"{CLOSE - 1:.0%} of each other in both; *of those apart*: the pairs that were measured further apart than "
        "that. Rates of one device at the end over those at the start: "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in drift.items())
        + "."
    )
    return Report(
        "Predicted times",
        prose,
        [("", *summary(groups)), ("Predicted / measured", *detail(groups))],
        {"cases": [case for group in groups for case in group], "hardware": before, "hardware_after": after},
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(RANKS))
    main(measure)
