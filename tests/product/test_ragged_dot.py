"""`ragged_dot` against a loop of `jnp` products, exactly, on small integers.

What would be silently wrong without it: rows that go to the matrix of another group, a group that the ranks of an axis
count from the wrong row, a partial sum that is taken twice, and weights of a group without rows that reach the result.
"""

import functools
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp


def integers(shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


def reference(x, w, sizes, first=0):
    """A loop over the groups; the sizes are numbers."""
    ends = np.minimum(np.cumsum(np.maximum(np.asarray(sizes, np.int64), 0)), x.shape[0])
    at = [0, *ends.tolist()]
    rows = [jnp.zeros((at[first], w.shape[2]), x.dtype)]
    for i, matrix in enumerate(w):
        begin, end = (at[min(first + j, len(sizes))] for j in (i, i + 1))
        rows.append(jnp.matmul(x[begin:end], matrix, precision="highest"))
    done = sum(len(part) for part in rows)
    return jnp.concatenate([*rows, jnp.zeros((x.shape[0] - done, w.shape[2]), x.dtype)])


def assert_same(got, want):
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def derivatives(f, x, w):
    """The value, a tangent, the cotangents, and the cotangents of a function of cotangents."""
    moved = integers(x.shape, 2, x.dtype), integers(w.shape, 3, w.dtype)
    d, tangent = jax.jvp(f, (x, w), moved)
    ct = integers(d.shape, 4, d.dtype)

    def second(x, w):
        dx, dw = jax.vjp(f, x, w)[1](ct)
        return (dx * x).sum() + (dw * w).sum()

    return d, tangent, jax.vjp(f, x, w)[1](ct), jax.grad(second, (0, 1))(x, w)


# One device ------------------------------------------------------------------------------------------------------

SIZES = {
    "even": (2, 2, 2, 2),
    "empty groups": (0, 5, 0, 1),
    "one has all": (0, 0, 8, 0),
    "no rows": (0, 0, 0, 0),
    "some rows are left": (1, 0, 2, 1),
    "too large": (3, 9, 4, 1),
    "far too large": (2**31 - 1,) * 4,
    "negative": (-3, 4, -1, 2),
}


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("kind", SIZES)
def test_sizes(kind, implementation):
    x, w, sizes = integers((8, 3)), integers((4, 3, 5), 1), SIZES[kind]
    ours = functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array(sizes), implementation=implementation)
    want = derivatives(lambda x, w: reference(x, w, sizes), x, w)
    assert_same(derivatives(ours, x, w), want)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_types_of_sizes(dtype, x64):
    x, w, sizes = integers((300, 2)), integers((3, 2, 2), 1), np.array([100, 50, np.iinfo(dtype).max], dtype)
    ours = jaxmp.ragged_dot(x, w, jnp.array(sizes), jnp.zeros((), dtype))
    assert_same(ours, reference(x, w, np.minimum(sizes.astype(np.uint64), 300)))


def drawn(seed):
    """(x, w, sizes, first group, whether the level is "batch") of a trial."""
    rng = random.Random(seed)
    m, k, n = (rng.choice((0, 1, 2, 5, 7, 16, 33, 130)) for _ in range(3))
    groups, first = rng.choice((1, 2, 3, 8)), rng.choice((0, 0, 0, 1, 2))
    sizes = [rng.choice((0, 0, 1, 3, m // 2, m)) for _ in range(groups + first)]
    dtype = rng.choice((jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64))
    x, w = integers((m, k), seed, dtype), integers((groups, k, n), seed + 1, dtype)
    return (x, w), sizes, first, rng.choice(("run_to_run", "batch"))


@pytest.mark.parametrize("seed", range(40))
def test_drawn(seed):
    operands, sizes, first, level = drawn(seed)
    # Sums are exact in the accumulator, and here in the type of the result too.
    x, w = (y if y.dtype.itemsize > 2 else jnp.sign(y) for y in operands)
    offset = jnp.array([first]) if first else None
    ours = functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array(sizes), group_offset=offset, determinism=level)
    theirs = functools.partial(reference, sizes=sizes, first=first)
    assert_same(ours(x, w), theirs(x, w))
    assert_same(jax.vjp(ours, x, w)[1](ours(x, w)), jax.vjp(theirs, x, w)[1](theirs(x, w)))
    if x.dtype == jnp.float32 and 0 not in x.shape + w.shape:
        assert_same(derivatives(ours, x, w), derivatives(theirs, x, w))


BATCHES = [axes for axes in itertools.product((None, 0, 1), (None, 0, 2), (None, 0)) if axes != (None,) * 3]


@pytest.mark.parametrize("axes", BATCHES)
def test_vmap(axes):
    batch, sizes = 3, np.array([[1, 4], [0, 6], [2, 2]])
    shapes = [(6, 3), (2, 3, 5)]
    x, w = (
        integers(s if a is None else (*s[:a], batch, *s[a:]), i)
        for i, (s, a) in enumerate(zip(shapes, axes[:2], strict=True))
    )
    sizes = jnp.array(sizes if axes[2] == 0 else sizes[0])

    def one(product):
        def cotangents(x, w, sizes):
            d, pull = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
            return d, *pull(d)

        return cotangents

    def each(x, w, sizes):
        found = []
        for i in range(batch):
            at = [y if a is None else jnp.take(y, i, a) for y, a in zip((x, w, sizes), axes, strict=True)]
            found.append(one(reference)(at[0], at[1], at[2].tolist()))
        return [jnp.stack(parts) for parts in zip(*found, strict=True)]

    assert_same(list(jax.vmap(one(jaxmp.ragged_dot), axes)(x, w, sizes)), each(x, w, sizes))

    def total(product, x, w):
        return (product(x, w, sizes) ** 2).sum()

    ours = jax.grad(functools.partial(total, jax.vmap(jaxmp.ragged_dot, axes)), (0, 1))(x, w)
    theirs = jax.grad(functools.partial(total, lambda *operands: _stacked(axes, batch, *operands)), (0, 1))(x, w)
    assert_same(ours, theirs)


def _stacked(axes, batch, x, w, sizes):
    at = [
        [y if a is None else jnp.take(y, i, a) for y, a in zip((x, w, sizes), axes, strict=True)] for i in range(batch)
    ]
    return jnp.stack([reference(x, w, sizes.tolist()) for x, w, sizes in at])


def test_vmap_of_vmap():
    x, w = integers((2, 3, 6, 3)), integers((3, 2, 3, 5), 1)
    sizes = jnp.array([2, 3])
    ours = jax.vmap(jax.vmap(jaxmp.ragged_dot, (0, None, None)), (1, 0, None))(x, w, sizes)
    want = jnp.stack([jnp.stack([reference(x[i, j], w[j], (2, 3)) for i in range(2)]) for j in range(3)])
    assert_same(ours, want)


@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
def test_weights_of_a_group_without_rows_reach_nothing(value):
    x, w = integers((6, 4)), integers((3, 4, 5), 1)
    bad, sizes = w.at[1].set(value), jnp.array([3, 0, 2])
    assert_same(jaxmp.ragged_dot(x, bad, sizes), reference(x, w, (3, 0, 2)))
    dx, dw = jax.grad(lambda x, w: jaxmp.ragged_dot(x, w, sizes).sum(), (0, 1))(x, bad)
    assert_same((dx, dw), jax.grad(lambda x, w: reference(x, w, (3, 0, 2)).sum(), (0, 1))(x, w))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64])
def test_bits_of_a_row_are_those_of_the_row_alone(dtype, x64):
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(70, 300)), dtype), jnp.asarray(rng.normal(size=(3, 300, 40)), dtype)
    product = functools.partial(jaxmp.ragged_dot, determinism="batch")
    many = product(x, w, jnp.array([9, 0, 60]))
    for row, group in ((0, 0), (8, 0), (9, 2), (40, 2), (68, 2)):
        sizes = jnp.zeros(3, jnp.int32).at[group].set(1)
        assert_same(product(x[row : row + 1], w, sizes), many[row : row + 1])
    assert_same(product(x, w, jnp.array([9, 0, 31]))[:40], many[:40])
    assert_same(jaxmp.matmul(x[9:69], w[2], determinism="batch"), many[9:69])
    # Likewise at another place, among other rows, and of the gradient in x.
    moved = jnp.concatenate([2 * x[20:33], x[9:40], x[:9]])
    assert_same(product(moved, w, jnp.array([0, 13, 31]))[13:44], many[9:40])
    ct = jnp.asarray(rng.normal(size=many.shape), dtype)
    dx = jax.vjp(lambda x: product(x, w, jnp.array([9, 0, 60])), x)[1](ct)[0]
    alone = jax.vjp(lambda x: product(x, w, jnp.array([0, 0, 1])), x[40:41])[1](ct[40:41])[0]
    assert_same(alone, dx[40:41])


@pytest.mark.parametrize("preferred", [None, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rounding(dtype, preferred):
    """Sums in float32, rounded once."""
    rng = np.random.default_rng(1)
    x, w = jnp.asarray(rng.normal(size=(300, 513)), dtype), jnp.asarray(rng.normal(size=(4, 513, 260)), dtype)
    sizes = [100, 0, 150, 50]
    d = jaxmp.ragged_dot(x, w, jnp.array(sizes), preferred_element_type=preferred)
    assert d.dtype == (preferred or dtype)
    wide = [np.asarray(y, np.float64) for y in (x, w)]
    at = np.cumsum([0, *sizes])
    parts = [(wide[0][at[i] : at[i + 1]], wide[1][i]) for i in range(4)]
    want = np.concatenate([a @ b for a, b in parts])
    size = np.concatenate([abs(a) @ abs(b) for a, b in parts])
    units = np.finfo(np.float32).eps, float(jnp.finfo(d.dtype).eps)
    assert (abs(np.asarray(d, np.float64) - want) <= 8 * units[0] * size + units[1] * abs(want)).all()


def test_many_tiles():
    x, w, sizes = integers((1000, 40)), integers((3, 40, 700), 1), (700, 1, 250)
    product = functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array(sizes))
    assert_same(
        jax.vjp(product, x, w)[1](product(x, w)), jax.vjp(lambda x, w: reference(x, w, sizes), x, w)[1](product(x, w))
    )


def test_it_is_rematerialized_scanned_exported_and_printed():
    x, w, sizes = integers((6, 4)), integers((2, 4, 4), 1), jnp.array([2, 3])
    product = functools.partial(jaxmp.ragged_dot, w=w, group_sizes=sizes)
    kept = jax.checkpoint(lambda x: product(product(x)).sum(), policy=jaxmp.dots_saveable)
    assert_same(jax.grad(kept)(x), jax.grad(lambda x: reference(reference(x, w, (2, 3)), w, (2, 3)).sum())(x))
    last, _ = jax.lax.scan(lambda x, _: (product(x), None), x, None, length=2)
    assert_same(last, product(product(x)))
    check = jax.export.DisabledSafetyCheck.custom_call("jaxmp_grouped")
    exported = jax.export.deserialize(jax.export.export(jax.jit(product), disabled_checks=[check])(x).serialize())
    assert_same(exported.call(x), product(x))
    assert "is_contraction" not in str(jax.make_jaxpr(product)(x))


# Meshes ----------------------------------------------------------------------------------------------------------

LINE, SQUARE = {"p": 2}, {"p": 2, "q": 2}


def shardings(ndim, axes):
    """Every sharding of an array, the axes of a dimension in the order of the mesh."""
    found = []
    for where in itertools.product(range(-1, ndim), repeat=len(axes)):
        dims = [tuple(axis for axis, at in zip(axes, where, strict=True) if at == i) for i in range(ndim)]
        found.append(P(*(dim or None for dim in dims)))
    return found


def with_bias(x, w, bias, sizes):
    """A loop over the groups, in the type of x."""
    rows = np.repeat(np.arange(len(sizes)), sizes)
    rest = jnp.zeros((x.shape[0] - len(rows), bias.shape[1]), x.dtype)
    return jax.nn.relu(reference(x, w, sizes) + jnp.concatenate([bias[rows], rest]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bias_and_activation(dtype):
    """With the bias of its own group for each row, summed before the one rounding."""
    x, w, sizes = integers((8, 3), 0, dtype), integers((4, 3, 5), 1, dtype), (3, 0, 4, 0)
    bias, ct = integers((4, 5), 2, dtype), integers((8, 5), 3, dtype)
    ours = functools.partial(_activated, sizes=jnp.array(sizes))
    theirs = functools.partial(with_bias, sizes=sizes)
    assert_same(ours(x, w, bias), theirs(x, w, bias))
    assert_same(jax.vjp(ours, x, w, bias)[1](ct), jax.vjp(theirs, x, w, bias)[1](ct))
    many = jax.vmap(ours, (0, None, 0))(jnp.stack([x, 2 * x]), w, jnp.stack([bias, -bias]))
    assert_same(many, jnp.stack([theirs(x, w, bias), theirs(2 * x, w, -bias)]))
    assert_same(ours(x, w, bias, determinism="batch"), theirs(x, w, bias))


def _activated(x, w, bias, sizes, **options):
    return jaxmp.ragged_dot(x, w, sizes, bias=bias, activation="relu", **options)


def test_activations_of_a_product_that_is_rounded_once():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((30, 64), (2, 64, 16)))
    sizes = jnp.array([10, 15])
    for activation in ("silu", jnp.tanh):
        d = jaxmp.ragged_dot(x, w, sizes, activation=activation)
        wide = jaxmp.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
        assert_same(d, (jax.nn.silu if activation == "silu" else activation)(wide).astype(jnp.bfloat16))


BIAS_SPECS = [
    (P("p"), P(), P(), P("p")),
    (P(), P("p"), P("p"), P("p")),
    (P(None, "p"), P(None, "p"), P(None, "p"), P()),
    (P(), P(None, None, "p"), P(), P(None, "p")),
    (P("p"), P("p"), P("p"), P()),
]


@pytest.mark.parametrize("specs", BIAS_SPECS, ids=str)
def test_bias_on_a_mesh(specs):
    x, w, bias, ct = integers((8, 4)), integers((4, 4, 8), 1), integers((4, 8), 2), integers((8, 8), 3)
    theirs = functools.partial(with_bias, sizes=(3, 0, 4, 0))
    want = theirs(x, w, bias), *jax.vjp(theirs, x, w, bias)[1](ct)
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x, w, bias, ct = (
            jax.device_put(y, NamedSharding(mesh, s)) for y, s in zip((x, w, bias, ct), specs, strict=True)
        )
        ours = functools.partial(_activated, sizes=jnp.array([3, 0, 4, 0]), out_sharding=specs[3])
        got = jax.jit(lambda *operands: (ours(*operands), *jax.vjp(ours, *operands)[1](ct)))(x, w, bias)
    assert_same(got, want)


def check_on_mesh(axes, kind, of_x, of_w, of_d):
    mesh = jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(kind,) * len(axes),
        devices=jax.devices()[: math.prod(axes.values())],
    )
    x, w, sizes, ct = integers((8, 4)), integers((4, 4, 8), 1), (3, 0, 4, 0), integers((8, 8), 2)
    theirs = functools.partial(reference, sizes=sizes)
    want = theirs(x, w), *jax.vjp(theirs, x, w)[1](ct)
    options = {"in_shardings": (of_x, of_w)} if kind == AxisType.Auto else {}
    with jax.set_mesh(mesh):
        x, w, ct = (jax.device_put(y, NamedSharding(mesh, s)) for y, s in ((x, of_x), (w, of_w), (ct, of_d)))
        ours = functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array(sizes), out_sharding=of_d, **options)

        @jax.jit
        def run(x, w, ct):
            d, pull = jax.vjp(ours, x, w)
            return d, *pull(ct)

        got = run(x, w, ct)
    assert_same(got, want)
    for y, spec in zip(got, (of_d, of_x, of_w), strict=True):
        assert kind == AxisType.Auto or y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim)


@pytest.mark.parametrize("of_d", shardings(2, LINE), ids=str)
@pytest.mark.parametrize("of_w", shardings(3, LINE), ids=str)
@pytest.mark.parametrize("of_x", shardings(2, LINE), ids=str)
def test_every_sharding_of_a_line(of_x, of_w, of_d):
    check_on_mesh(LINE, AxisType.Explicit, of_x, of_w, of_d)


@pytest.mark.small("values")
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
@pytest.mark.parametrize("of_d", shardings(2, SQUARE), ids=str)
@pytest.mark.parametrize("of_w", shardings(3, SQUARE), ids=str)
@pytest.mark.parametrize("of_x", shardings(2, SQUARE), ids=str)
def test_every_sharding_of_a_square(of_x, of_w, of_d, kind):
    check_on_mesh(SQUARE, kind, of_x, of_w, of_d)


@pytest.mark.parametrize(
    "specs", [(P(None, "p"), P(None, "p"), P("p")), (P("p"), P("p"), P("p")), (P(), P(None, "p"), P())]
)
def test_a_level_on_a_mesh(specs):
    """No device adds what others have summed."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 600), (4, 600, 8)))
    ours = functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array([3, 0, 4, 0]), determinism="batch")
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    assert_same(ours(x, w, mesh=mesh, in_shardings=specs[:2], out_sharding=specs[2]), ours(x, w))


@pytest.mark.parametrize("out_sharding", [None, P("p")])
def test_shardings_that_xla_chooses(out_sharding):
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, w, sizes = integers((8, 4)), integers((2, 4, 6), 1), (3, 4)
    with jax.set_mesh(mesh):
        ours = jax.jit(functools.partial(jaxmp.ragged_dot, group_sizes=jnp.array(sizes), out_sharding=out_sharding))
        assert_same(ours(jax.device_put(x, P("p")), w), reference(x, w, sizes))


def test_it_is_local_inside_shard_map():
    """Expert parallelism by hand: each device has the rows of its own groups."""
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, w, sizes = integers((8, 4)), integers((4, 4, 5), 1), jnp.array([1, 2, 0, 4])

    def ours(x, w):
        return jax.shard_map(jaxmp.ragged_dot, mesh=mesh, in_specs=P("p"), out_specs=P("p"))(x, w, sizes)

    def theirs(x, w):
        return jnp.concatenate([reference(x[:4], w[:2], (1, 2)), reference(x[4:], w[2:], (0, 4))])

    assert_same(derivatives(ours, x, w), derivatives(theirs, x, w))


def test_replicated_weights_inside_shard_map_get_the_sum_of_all_ranks():
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, w, sizes = integers((8, 4)), integers((2, 4, 5), 1), jnp.array([1, 2])
    ours = jax.shard_map(
        lambda x, w: jaxmp.ragged_dot(x, w, sizes), mesh=mesh, in_specs=(P("p"), P()), out_specs=P("p")
    )

    def theirs(x, w):
        return jnp.concatenate([reference(x[:4], w, (1, 2)), reference(x[4:], w, (1, 2))])

    assert_same(derivatives(ours, x, w), derivatives(theirs, x, w))


# Errors ----------------------------------------------------------------------------------------------------------

X, W, S = jnp.ones((6, 4)), jnp.ones((2, 4, 5)), jnp.array([2, 3])

ERRORS = {
    "x is a vector": ((X[0], W, S), {}, ValueError, r"x must have 2 dimensions, got 1 \(shape \(4,\)\)"),
    "x is a list": (([[1.0]], W, S), {}, TypeError, "x must be an array, got list"),
    "w is a matrix": ((X, W[0], S), {}, ValueError, r"w must have 3 dimensions, got 2 \(shape \(4, 5\)\)"),
    "k": ((X[:, :3], W, S), {}, ValueError, r"w has k=4 but x has k=3 \(global shapes \(6, 3\), \(2, 4, 5\)\)"),
    "number of sizes": ((X, W, S[:1]), {}, ValueError, r"group_sizes must have shape \(2,\).* got \(1,\)"),
    "rank of sizes": ((X, W, S[None]), {}, ValueError, r"group_sizes must have shape \(2,\).* got \(1, 2\)"),
    "too few with an offset": ((X, W, S[:1], S[:1]), {}, ValueError, "with n of at least 2.* got"),
    "type of sizes": (
        (X, W, S.astype(float)),
        {},
        TypeError,
        "group_sizes must be an array of integers, got dtype float32",
    ),
    "sizes are a list": ((X, W, [2, 3]), {}, TypeError, "group_sizes must be an array, got list"),
    "type of offset": (
        (X, W, S, X[0, 0]),
        {},
        TypeError,
        "group_offset must be an array of integers, got dtype float32",
    ),
    "shape of offset": ((X, W, S, S), {}, ValueError, r"group_offset must have shape \(\) or \(1,\), got \(2,\)"),
    "integers": (
        (X.astype(int), W.astype(int), S),
        {},
        NotImplementedError,
        "operands of dtype int32 and int32 are not",
    ),
    "bytes": ((X.astype("int8"), W.astype("int8"), S), {}, NotImplementedError, "convert them to bfloat16"),
    "result": ((X, W, S), {"preferred_element_type": "bfloat16"}, NotImplementedError, "available: float32"),
    "level": ((X, W, S), {"determinism": "topology"}, NotImplementedError, 'determinism="topology" is not available'),
    "no level": ((X, W, S), {"determinism": "none"}, ValueError, "determinism must be one of"),
    "library": ((X, W, S), {"implementation": "cublasmp"}, NotImplementedError, "has no product of groups"),
    "implementation": ((X, W, S), {"implementation": "cpu"}, ValueError, "implementation must be one of"),
    "level of XLA": (
        (X, W, S),
        {"implementation": "xla", "determinism": "batch"},
        NotImplementedError,
        "XLA is asked for",
    ),
    "no mesh": ((X, W, S), {"out_sharding": P("p")}, ValueError, "needs a mesh"),
    "keyword": ((X, W, S), {"beta": X}, TypeError, "unexpected keyword argument 'beta'"),
    "rank of the bias": ((X, W, S), {"bias": X[0]}, ValueError, "bias must have 2 dimensions, got 1"),
    "shape of the bias": ((X, W, S), {"bias": X}, ValueError, r"bias must have shape \(2, 5\), .* of w, got \(6, 4\)"),
    "type of the bias": (
        (X.astype("bfloat16"), W.astype("bfloat16"), S),
        {"bias": W[:, 0]},
        TypeError,
        "bias has dtype float32 but the result has dtype bfloat16",
    ),
    "activation": ((X, W, S), {"activation": "softmax"}, ValueError, "activation must be one of relu"),
    "bits of an activation": (
        (X, W, S),
        {"activation": "silu", "determinism": "batch"},
        NotImplementedError,
        'takes activation=None or "relu"',
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_function_and_the_argument(case, standard_promotion):
    args, options, kind, message = ERRORS[case]
    with pytest.raises(kind, match=f"^ragged_dot(: |\\(\\)).*{message}"):
        jaxmp.ragged_dot(*args, **options)


MESH_ERRORS = {
    "k is sharded twice": (P(None, "p"), P(None, "p"), None, "ambiguous.*pass out_sharding"),
    "rows and columns": (P("p"), P(None, None, "p"), None, "rows of x and columns of w are both sharded over axis 'p'"),
    "extent": (P(), P(), P(None, "p"), "dimension 1 of the result has extent 5"),
}


@pytest.mark.parametrize("case", MESH_ERRORS)
def test_errors_of_shardings(case):
    of_x, of_w, of_d, message = MESH_ERRORS[case]
    mesh = jax.make_mesh((2,), ("p",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    w = W if "extent" in case else jnp.ones((2, 4, 6))
    with pytest.raises(ValueError, match=f"^ragged_dot: .*{message}"):
        jaxmp.ragged_dot(X, w, S, mesh=mesh, in_shardings=(of_x, of_w), out_sharding=of_d)


def test_a_mesh_of_two_kinds_is_refused():
    kinds = AxisType.Explicit, AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("p", "q"), axis_types=kinds, devices=jax.devices()[:4])
    refused = pytest.raises(NotImplementedError, match=r"^ragged_dot: the mesh has explicit and automatic axes; make")
    with jax.set_mesh(mesh), refused:
        jaxmp.ragged_dot(X, W, S)
