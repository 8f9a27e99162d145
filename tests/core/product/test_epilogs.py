"""Epilogs beyond the table (test_table.py): masks of odd columns on odd grids, extreme values, cuBLASMp's numbers.
Without these tests, a mask bit could come from the neighbouring column, so that gradients are wrong although relu is
right; a gelu could have the wrong form (the erf and the tanh form differ by 5e-4)."""

import functools

import cases
import drawn
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
import suite
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog

EXPLICIT = modes.BY_ID["explicit"]

# Process rows and columns, and m, n and k per shard. A mask has eight columns of d in a byte. If b is stored
# transposed, its columns are split over another number of devices than d's, so pieces end anywhere within a byte.
GRIDS = (
    (2, 1, (3, 13, 2)),
    (7, 1, (8, 1, 2)),
    (3, 2, (2, 11, 2)),
    (2, 4, (3, 65, 1)),
    (2, 2, (3, 129, 2)),
    (2, 1, (2, 128, 2)),
    (1, 2, (2, 300, 2)),
)
OF_MASKS = (Epilog.RELU_AUX, Epilog.RELU_AUX_BIAS, Epilog.DRELU, Epilog.DRELU_BGRAD)
MASKED = [
    pytest.param(
        cases.BY_NAME["grid"].replace(mesh=(("x", rows), ("y", cols)), per_shard=shape, transposition=transposition),
        *(epilog, options),
        id=f"{rows}x{cols}-{transposition}-{epilog.name}-{'-'.join(options.values())}",
    )
    for rows, cols, shape in GRIDS
    for transposition in cases.TRANSPOSITIONS
    for epilog in OF_MASKS
    for options in ({}, {"implementation": "xla"}, {"batch": "both"}, {"determinism": "batch"})
]


def of_masks(case, epilog, options):
    return (case.mesh, case.transposition), (case.mesh, epilog), (case.transposition, str(options))


@pytest.mark.small("values", of=of_masks)
@pytest.mark.parametrize(("case", "epilog", "options"), MASKED)
def test_masks_and_gradients_are_exact(case, epilog, options, rng):
    trial = suite.Trial(case.replace(epilog=epilog), **options)
    drawn.check_on(trial, ["integers"], rng)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
def test_epilogs_of_extreme_values(implementation):
    """Far out, gelu and its derivative are those of relu."""
    z = np.array([[-3e38, -1e19, -1e4, -40.0, 0.0, 40.0, 1e4, 1e19, 3e38, np.nan]], np.float32)
    for epilog in (Epilog.RELU, Epilog.GELU):
        d = jaxmp.matmul(jnp.ones((1, 1)), jnp.asarray(z), epilog=epilog, implementation=implementation)
        np.testing.assert_array_equal(d, np.where(z < 0, 0, z))
    options = {"epilog": Epilog.DGELU, "epilog_inputs": {"gelu_aux": jnp.asarray(z)}, "implementation": implementation}
    d = jaxmp.matmul(jnp.ones((1, 2)), jnp.ones((2, z.size)), **options)
    np.testing.assert_array_equal(d, np.where(np.isnan(z), np.nan, 1 + np.sign(z)))


@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_complex_bias_c_and_scalars(case, rng):
    case = case.replace(per_shard=(3, 5, 2), dtype="complex64", conjugation=(True, False))
    mode = EXPLICIT
    a, b = case.integers(rng)
    m, n, _ = case.extents
    c, bias = (rng.integers(-9, 9, s) + 1j * rng.integers(-9, 9, s) for s in ((m, n), (n,)))
    with mode.scope(case):
        f = mode.product(case, alpha=2 - 1j, beta=1 + 3j, epilog=Epilog.BIAS)
        x = zip((a, b, c.astype(a.dtype), bias.astype(a.dtype)), (*case.stored, case.out, P(case.out[1])), strict=True)
        d = mode.run(f, *(mode.put(case, v, s) for v, s in x))
    np.testing.assert_array_equal(np.asarray(d), (2 - 1j) * (a.conj() @ b) + (1 + 3j) * c + bias)


# Shardings of a stored operand (gathered over an axis that also shards d or the other one), the other one, and d.
GATHERED_AND_SUMMED = (
    (Epilog.BGRADA, P("x", "y"), P("y", "x"), P("y", "x")),
    (Epilog.BGRADA, P(("y", "x"), None), P("y", "x"), P(None, ("x", "y"))),
    (Epilog.BGRADB, P("x", "y"), P("y", "x"), P("y", None)),
)


@pytest.mark.parametrize(("epilog", "summed", "other", "out"), GATHERED_AND_SUMMED)
def test_the_sums_of_an_operand_that_is_gathered(epilog, summed, other, out, rng):
    x, y = cases.integers(rng, 16, 8), cases.integers(rng, 16, 12)
    mesh, is_a = cases.BY_NAME["local"].jax_mesh(), epilog == Epilog.BGRADA

    def product(x, y):
        a, b = (x, y) if is_a else (y.T, x)
        d, sums = jaxmp.matmul(a, b, epilog=epilog, transpose_a=is_a, out_sharding=out)
        return d, sums[epilog.name.lower()]

    with jax.set_mesh(mesh):
        placed = cases.put(x, mesh, summed), cases.put(y, mesh, other)
        results, pull = jax.vjp(jax.jit(product), *placed)
        cotangents = pull(tuple(map(jnp.ones_like, results)))
    d, of_y = (x.T @ y, y) if is_a else (y.T @ x, y)
    wants = (d, x.sum(0), np.ones_like(x) + of_y.sum(1)[:, None], np.broadcast_to(x.sum(1)[:, None], y.shape))
    jax.tree.map(np.testing.assert_array_equal, (*results, *cotangents), wants)


@pytest.mark.parametrize("name", ["ar-data", "local"])
def test_allreduce_is_what_the_pattern_does(name, rng):
    mode = modes.BY_ID["explicit" if name == "ar-data" else "no-mesh"]

    def program(given):
        return [
            mode.product(case, epilog=bit | epilog)(x["a"], x["b"], **{k: x[k] for k in ("bias", *AUX) if k in x})
            for bit in (Epilog.ALLREDUCE, Epilog.NONE)
            for (case, epilog), x in zip(todo, given, strict=True)
        ]

    todo, given = [], []
    for epilog in cases.EPILOGS:
        transposition = "TN" if epilog == Epilog.BGRADA else "NN"
        case = cases.BY_NAME[name].replace(per_shard=(3, 5, 2), transposition=transposition, epilog=epilog)
        trial = suite.Trial(case, mode=mode.id)
        where = suite.specs(trial)
        todo.append((case, epilog))
        given.append({k: mode.put(case, v, where[k]) for k, v in suite.draw(trial, rng).items()})
    with mode.scope(todo[0][0]):
        results = mode.run(program, given)
    jax.tree.map(np.testing.assert_array_equal, results[: len(todo)], results[len(todo) :])


AUX = ("relu_aux", "gelu_aux")


@pytest.mark.parametrize("name", ["local", "rs-transposed", "ag-transposed"])
def test_the_gradients_of_gelu_far_out_are_those_of_relu(name):
    """Also where XLA applies it: to a product that is computed transposed, and to an empty sum (k = 0)."""
    far = np.array([-3e38, -1e19, -40, 40, 1e19, 3e38, np.inf, np.nan], np.float32)
    case, mode = cases.BY_NAME[name].replace(per_shard=(1, len(far), 1)), modes.BY_ID["explicit"]
    m, n, k = case.extents
    z = np.broadcast_to(np.tile(far, n // len(far)), (m, n))

    def program(a, b, nothing, z):
        def d(a, b, z, **options):
            return mode.product(case, beta=1.0, **options)(a, b, c=z).sum()

        def of_aux(aux):
            return mode.product(case, epilog=Epilog.DGELU)(a, b, gelu_aux=aux).sum()

        of_c = functools.partial(jax.grad(d, 2), epilog=Epilog.GELU)
        return of_c(a, b, z), of_c(*nothing, z), jax.grad(of_aux)(z)

    with mode.scope(case):
        a, b = (mode.put(case, np.zeros(s, np.float32), spec) for s, spec in (((m, k), case.a), ((k, n), case.b)))
        nothing = [mode.put(case, np.zeros(s, np.float32), spec) for s, spec in (((m, 0), case.a), ((0, n), case.b))]
        *of_c, of_aux = mode.run(program, a, b, nothing, mode.put(case, z, case.out))
    for got in of_c:
        np.testing.assert_array_equal(got, np.where(np.isnan(z), np.nan, z > 0))
    np.testing.assert_array_equal(of_aux, np.where(np.isnan(z), np.nan, 0))


def test_the_numbers_are_those_of_cublasmp():
    """The numbers are from cublasmp.h 0.10, cublasMpMatmulEpilogue_t."""
    numbers = {
        "DEFAULT": 0, "ALLREDUCE": 1, "RELU": 2, "RELU_AUX": 2 | 128, "BIAS": 4, "RELU_BIAS": 2 | 4,
        "RELU_AUX_BIAS": 2 | 4 | 128, "DRELU": 8 | 128, "DRELU_BGRAD": 8 | 16 | 128, "GELU": 32, "GELU_AUX": 32 | 128,
        "GELU_BIAS": 32 | 4, "GELU_AUX_BIAS": 32 | 4 | 128, "DGELU": 64 | 128, "DGELU_BGRAD": 64 | 16 | 128,
        "BGRADA": 256, "BGRADB": 512,
    }  # fmt: skip
    assert {name: member.value for name, member in Epilog.__members__.items() if name != "NONE"} == numbers
    assert Epilog.NONE is Epilog.DEFAULT


def test_a_bias_that_ranks_share_beside_weights_of_their_own(rng):
    """The call of the weights' gradient does not sum over ranks here, but the bias's gradient must."""
    mesh = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    a, b, bias, w = (rng.integers(-3, 4, s).astype(np.float32) for s in ((5, 3), (2, 3, 4), (4,), (2, 5, 4)))

    def layer(a, b, bias):
        return jaxmp.matmul(a, b[0], epilog=Epilog.BIAS, epilog_inputs={"bias": bias})[None]

    stacked = P("x", None, None)
    f = jax.shard_map(layer, mesh=mesh, in_specs=(P(), stacked, P()), out_specs=stacked)
    db, dbias = jax.jit(jax.grad(lambda b, bias: jnp.sum(w * f(a, b, bias)), (0, 1)))(b, bias)
    np.testing.assert_array_equal(np.asarray(db), a.T @ w)
    np.testing.assert_array_equal(np.asarray(dbias), w.sum((0, 1)))
