"""The relu's mask, and what is computed from it, on grids of every form with operands stored either way.

A mask has eight columns of d in a byte. Where b is stored transposed, its columns are shared by another number of
devices than d's, so the pieces of a product end anywhere within a byte. What would be silently wrong without this: bits
of one piece in the place of another's, and with them half of every gradient, beside a relu that is right.
"""

import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
import test_epilogs

from jaxmp import Epilog

# Process rows and columns, and m, n and k per shard: columns per device that are no multiple of 8, 16 or 128.
GRIDS = (
    (1, 2, (3, 5, 2)),
    (2, 1, (3, 13, 2)),
    (4, 1, (2, 33, 3)),
    (1, 4, (3, 9, 2)),
    (7, 1, (8, 1, 2)),
    (3, 2, (2, 11, 2)),
    (2, 4, (3, 65, 1)),
    (2, 2, (3, 129, 2)),
)
EPILOGS = (Epilog.RELU_AUX, Epilog.RELU_AUX_BIAS, Epilog.DRELU, Epilog.DRELU_BGRAD)
EXPLICIT = modes.BY_ID["explicit"]


def on_grid(nprow, npcol, per_shard, transposition):
    mesh = (("x", nprow), ("y", npcol))
    return cases.BY_NAME["grid"].replace(mesh=mesh, per_shard=per_shard, transposition=transposition)


def parametrize(test):
    grids = [pytest.param(*grid, id=f"{grid[0]}x{grid[1]}") for grid in GRIDS]
    test = pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)(test)
    return pytest.mark.parametrize(("nprow", "npcol", "per_shard"), grids)(test)


def bits_of(mask, shards, columns):
    """The mask as (m, n) booleans; what pads it has to be zero."""
    bits = np.unpackbits(np.asarray(mask).reshape(mask.shape[0], shards, -1), axis=-1, bitorder="little")
    assert not bits[..., columns:].any()
    return bits[..., :columns].reshape(mask.shape[0], -1).astype(bool)


def wanted(case, epilog, x, keep):
    """d, its bias gradient and the gradients of sum(w d), of small integers: exact."""
    a, b = (np.asarray(y) for y in case.op(x["a"], x["b"]))
    z = a @ b + (x["bias"] if "BIAS" in epilog.name else 0)
    kept = keep if epilog.name.startswith("DRELU") else z > 0
    d, dz = z * kept, x["w"] * kept
    da, db = dz @ b.T, a.T @ dz
    turn = case.transposition
    gradients = {"a": da.T if turn[0] == "T" else da, "b": db.T if turn[1] == "T" else db}
    if "BIAS" in epilog.name:
        gradients["bias"] = dz.sum(0)
    return z, d, d.sum(0), gradients


def results(case, epilog, x, **options):
    """(d, aux, gradients) of one call on placed operands."""
    f = EXPLICIT.product(case, epilog=epilog, **options)
    more = {"relu_aux": x["relu_aux"]} if epilog.name.startswith("DRELU") else {}

    def outputs(operands):
        out = f(operands["a"], operands["b"], **{n: v for n, v in operands.items() if n == "bias"}, **more)
        return out if isinstance(out, tuple) else (out, {})

    names = ("a", "b", "bias") if "BIAS" in epilog.name else ("a", "b")
    operands = {name: x[name] for name in names}
    return *outputs(operands), jax.grad(lambda operands: jnp.sum(x["w"] * outputs(operands)[0]))(operands)


def check(case, rng, **options):
    m, n, _ = case.extents
    shards = case.column_shards
    a, b = case.integers(rng)
    x = {"a": a, "b": b, "relu_aux": test_epilogs.mask((m, n), rng, shards)}
    x |= {name: rng.integers(-3, 4, s).astype(np.float32) for name, s in (("bias", (n,)), ("w", (m, n)))}
    packed = x["relu_aux"].reshape(m, shards, -1)
    keep = np.unpackbits(packed, axis=-1, count=n // shards, bitorder="little").reshape(m, n).astype(bool)
    with EXPLICIT.scope(case):
        stored = dict(zip(("a", "b"), case.stored, strict=True))
        specs = stored | {name: case.spec_of(name) for name in ("bias", "relu_aux", "w")}
        placed = {name: EXPLICIT.put(case, value, specs[name]) for name, value in x.items()}
        got = EXPLICIT.run(lambda x: {e.name: results(case, e, x, **options) for e in EPILOGS}, placed)
    for epilog in EPILOGS:
        d, aux, gradients = got[epilog.name]
        z, want, bgrad, want_gradients = wanted(case, epilog, x, keep)
        np.testing.assert_array_equal(d, want, err_msg=epilog.name)
        if "relu_aux" in aux:
            np.testing.assert_array_equal(bits_of(aux["relu_aux"], shards, n // shards), z > 0, err_msg=epilog.name)
        if "bgrad" in aux:
            np.testing.assert_array_equal(aux["bgrad"], bgrad, err_msg=epilog.name)
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, want_gradients[name], err_msg=f"{epilog.name} {name}")


@parametrize
def test_masks_and_gradients_are_exact(nprow, npcol, per_shard, transposition, rng):
    cases.require(None)
    check(on_grid(nprow, npcol, per_shard, transposition), rng)


@pytest.mark.small("values")
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
@pytest.mark.parametrize("grid", [GRIDS[i] for i in (1, 4, 5)], ids=lambda g: f"{g[0]}x{g[1]}")
def test_masks_and_gradients_are_exact_xla(grid, transposition, rng):
    check(on_grid(*grid, transposition), rng, implementation="xla")


@pytest.mark.parametrize("transposition", ["NT", "TT"])
@pytest.mark.parametrize("name", ["ag-data", "rs-data", "ar-data", "ag-transposed", "rs-transposed"])
def test_masks_and_gradients_are_exact_in_other_patterns(name, transposition, rng):
    cases.require(None)
    check(cases.BY_NAME[name].replace(per_shard=(3, 13, 2), transposition=transposition), rng)


@pytest.mark.parametrize("determinism", ["batch", "topology"])
@pytest.mark.parametrize("transposition", ["NT", "TT"])
def test_masks_and_gradients_are_exact_in_one_order_of_sums(transposition, determinism, rng):
    cases.require(None)
    check(on_grid(3, 2, (2, 11, 2), transposition), rng, determinism=determinism)


@pytest.mark.small("values")
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
@pytest.mark.parametrize("grid", [GRIDS[i] for i in (1, 4, 5)], ids=lambda g: f"{g[0]}x{g[1]}")
def test_masks_of_batches_are_exact(grid, transposition, rng):
    cases.require(None)
    case = on_grid(*grid, transposition)
    n, shards = case.extents[1], case.column_shards
    pairs = [case.integers(rng) for _ in range(2)]
    with EXPLICIT.scope(case):
        placed = [
            EXPLICIT.put(case, np.stack(x), spec, ahead=1)
            for x, spec in zip(zip(*pairs, strict=True), case.stored, strict=True)
        ]
        d, aux = EXPLICIT.run(jax.vmap(EXPLICIT.product(case, epilog=Epilog.RELU_AUX)), *placed)
    for i, (a, b) in enumerate(pairs):
        z = np.matmul(*case.op(a, b))
        np.testing.assert_array_equal(d[i], np.maximum(z, 0))
        np.testing.assert_array_equal(bits_of(np.asarray(aux["relu_aux"])[i], shards, n // shards), z > 0)


GELU = (Epilog.GELU_AUX, Epilog.GELU_AUX_BIAS, Epilog.DGELU, Epilog.DGELU_BGRAD)


@pytest.mark.small("values")
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
@pytest.mark.parametrize("grid", [GRIDS[i] for i in (1, 4, 5)], ids=lambda g: f"{g[0]}x{g[1]}")
def test_gelu_and_its_gradients(grid, transposition, rng):
    cases.require(None)
    for epilog in GELU:
        test_epilogs.check(EXPLICIT, on_grid(*grid, transposition), epilog, rng)


def test_the_gradient_of_relu_through_a_layer(rng):
    """As a user meets it: x @ w.T, relu, a loss."""
    cases.require(None)
    case = on_grid(7, 1, (8, 1, 2), "NT")
    a, b = case.integers(rng)
    with EXPLICIT.scope(case):
        placed = [EXPLICIT.put(case, x, s) for x, s in zip((a, b), case.stored, strict=True)]
        f = EXPLICIT.product(case, epilog=Epilog.RELU)
        got = EXPLICIT.run(jax.grad(lambda a, b: jnp.sum(f(a, b)), argnums=(0, 1)), *placed)
    dz = (a @ b.T > 0).astype(np.float32)
    np.testing.assert_array_equal(got[0], dz @ b)
    np.testing.assert_array_equal(got[1], dz.T @ a)


def test_the_judge_of_masks_sees_a_bit_beyond_the_last_column():
    mask = np.zeros((2, 16), np.uint8)
    mask[0, 1] = 1 << 5
    bits_of(mask, 1, 14)
    with pytest.raises(AssertionError):
        bits_of(mask, 1, 13)
