"""Sharded products: jaxmp, `jax.jit(jnp.matmul)` under the same shardings, and the best rate of one device.

One device owns all cores here, so its rate is what sharding over devices of the same processor can at best
keep. It is measured for XLA's product and for the BLAS's (jaxmp on one device), in the same rounds.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
from common import interleaved, main
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from tables import means
from tqdm import tqdm

import jaxmp

# Shardings of a (m, k), b (k, n) and the result.
PATTERNS = {
    "AG": (P("x", None), P(None, "x"), P(None, "x")),
    "RS": (P(None, "x"), P("x", None), P("x", None)),
    "AR": (P(None, "x"), P("x", None), P(None, None)),
}
SHAPES = [(n, n, n) for n in (256, 512, 1024, 2048)] + [(512, 4096, 11008)]  # m, k, n
LARGE = (4096, 4096, 4096)  # of integers
FEW_ROWS = [(8, 4096, 4096), (64, 4096, 4096)]  # as in decoding: the weights are the work
TYPES = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float8_e4m3fn", "bfloat16"),
    ("int8", "int32"),
]
RANKS = (2, 4)
# Contenders, and the columns of their rates in GFLOP/s.
CONTENDERS = {
    "jaxmp": "jaxmp",
    "xla": "XLA",
    "one device, xla": "one dev. XLA",
    "one device, jaxmp": "one dev. jaxmp",
}


def operand(shape, dtype, sharding, seed):
    """Random values, made on the devices in their sharding."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    drawn = jnp.int32 if is_integer else jnp.bfloat16 if is_fp8(dtype) else jnp.dtype(dtype)
    of, most = (jax.random.randint, 8) if is_integer else (jax.random.uniform, 1)
    draw = functools.partial(of, jax.random.key(seed), shape, minval=-most, maxval=most, dtype=drawn)
    return jax.jit(lambda: draw().astype(dtype), out_shardings=sharding)()


def is_fp8(dtype):
    return dtype == "float8_e4m3fn"


def contenders(pattern, ranks, shape, types):
    """Name to a call without arguments, and jaxmp's own account of its call."""
    (m, k, n), (dtype, out) = shape, types
    devices = jax.devices()
    mesh = jax.make_mesh((ranks,), ("x",), axis_types=(AxisType.Explicit,), devices=devices[:ranks])
    *in_specs, out_spec = PATTERNS[pattern]
    shapes = (m, k), (k, n)
    if is_fp8(dtype):  # b is stored (n, k), as fp8 is multiplied
        shapes, in_specs = ((m, k), (n, k)), [in_specs[0], P(*reversed(in_specs[1]))]

    def operands(shardings):
        return [operand(s, dtype, to, seed) for seed, (s, to) in enumerate(zip(shapes, shardings, strict=True))]

    sharded = operands([NamedSharding(mesh, spec) for spec in in_specs])
    alone = operands([SingleDeviceSharding(devices[0])] * 2)
    to = NamedSharding(mesh, out_spec)
    ours = functools.partial(jaxmp.matmul, preferred_element_type=jnp.dtype(out), transpose_b=is_fp8(dtype))

    def theirs(a, b, **options):
        return jnp.matmul(a, b.T if is_fp8(dtype) else b, preferred_element_type=jnp.dtype(out), **options)

    calls = {
        "jaxmp": functools.partial(jax.jit(functools.partial(ours, out_sharding=to)), *sharded),
        "xla": functools.partial(jax.jit(functools.partial(theirs, out_sharding=to)), *sharded),
        "one device, xla": functools.partial(jax.jit(theirs), *alone),
        "one device, jaxmp": functools.partial(jax.jit(ours), *alone),
    }
    with contextlib.redirect_stdout(None):  # the table would stand between the progress bar and the results
        row = jaxmp.explain(functools.partial(ours, out_sharding=to))(*sharded).rows[0]
    return calls, row


def check(calls, shape, types):
    """A fast wrong product is worth nothing: compare the contenders, in float32, before they are timed."""
    results = {name: jnp.asarray(jax.device_get(call()), jnp.float32) for name, call in calls.items()}
    unit = {"bfloat16": 2**-8, "float32": 2**-20, "int32": 2**-20}[types[1]]
    for name, result in results.items():
        error = float(jnp.max(jnp.abs(result - results["one device, xla"])))
        bound = 8 * unit * shape[1] ** 0.5
        assert error < bound, f"{name} differs by {error} from XLA on one device, more than {bound}"


def case(pattern, ranks, shape, types, seconds, rounds):
    calls, row = contenders(pattern, ranks, shape, types)
    check(calls, shape, types)
    times = interleaved({name: calls[name] for name in CONTENDERS}, seconds, rounds)
    limit = min(times["one device, xla"], times["one device, jaxmp"])
    m, k, n = shape
    result = {"pattern": pattern, "devices": ranks, "m x k x n": label_of_shape(shape), "types": label_of_types(types)}
    result |= {"sizes": size_of(shape), "way": row.implementation, "jaxmp ms": times["jaxmp"] * 1e3}
    result |= {column: 2e-9 * m * k * n / times[name] for name, column in CONTENDERS.items()}
    return result | {"jaxmp / XLA": times["xla"] / times["jaxmp"], "jaxmp / limit": limit / times["jaxmp"]}


def label_of_shape(shape):
    return f"{shape[0]}^3" if len(set(shape)) == 1 else "x".join(map(str, shape))


def label_of_types(types):
    short = {"float32": "f32", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}
    return " -> ".join(short.get(t, t) for t in types) if types[0] != types[1] or types[0] != "float32" else "f32"


def size_of(shape):
    if shape in FEW_ROWS:
        return "8 and 64 rows"
    return "1024 and above" if max(shape) >= 1024 else "256 and 512"


def measure(quick):
    shapes = [*FEW_ROWS[:1], (256, 256, 256), (1024, 1024, 1024)] if quick else [*FEW_ROWS, *SHAPES, LARGE]
    grid = [
        each
        for each in itertools.product(TYPES, shapes, PATTERNS, RANKS)
        if not is_fp8(each[0][0]) or each[1][0] % (16 * each[3]) == 0  # fp8 has 16 rows on each device, or more
        if each[0][0] == "int8" or each[1] != LARGE
    ]
    seconds, rounds = (0.1, (5, 15)) if quick else (0.5, (9, 41))
    rows = [
        case(pattern, ranks, shape, types, seconds, rounds)
        for types, shape, pattern, ranks in tqdm(grid, "matmul", disable=None)
    ]
    ratios = {"jaxmp / XLA": min, "jaxmp / limit": min}
    return {"matmul": {"means": means(rows, ["types", "sizes"], ratios, across="pattern"), "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(RANKS))
    main(measure)
