"""Every epilog, its aux output and its gradients, on every pattern.

What would be silently wrong without it: a bias added by every rank of a sum, a mask bit of the neighbouring column,
a gelu of the wrong form (the erf and the tanh form differ by 5e-4), a beta that scales c twice.
"""

import functools

import bounds
import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
import reference
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog
from jaxmp._src.spec import epilogs as epilogs_lib

ALPHA, BETA = 1.5, 0.5
MODES = [modes.BY_ID[name] for name in ("explicit", "in_shardings", "shard_map", "shard_map-unchecked", "partitioner")]
EPILOGS = [epilog for epilog in cases.EPILOGS if epilog != Epilog.NONE]


def data(case, rng, column_shards):
    """a, b, c, the epilogs' inputs, and weights of the outputs; 16-bit values are exact in float32."""
    m, n, _ = case.extents
    a, b = case.values(rng)
    shapes = {"c": (m, n), "bias": (n,), "gelu_aux": (m, n), "w": (m, n), "w_columns": (n,), "w_rows": (m,)}
    extra = {name: cases.normal(rng, shape, case.dtype) for name, shape in shapes.items()}
    return {"a": a, "b": b, "relu_aux": mask((m, n), rng, column_shards), **extra}


def mask(shape, rng, column_shards):
    """A random mask of d, packed as a RELU_AUX epilog would; the bits that pad it are set, and must not matter."""
    m, n = shape
    shards = rng.integers(0, 2, (m, column_shards, n // column_shards)).astype(bool)
    pad = -shards.shape[2] % 128
    packed = np.packbits(np.pad(shards, ((0, 0), (0, 0), (0, pad)), constant_values=True), -1, "little")
    return packed.reshape(m, column_shards * packed.shape[-1])


def specs(case):
    a, b = case.stored
    columns = {"w_columns": case.spec_of("bias"), "w_rows": case.spec_of("bgrada")}
    named = {name: case.spec_of(name) for name in ("c", "bias", "relu_aux", "gelu_aux", "w")}
    return {"a": a, "b": b, **named, **columns}


def program(f, epilog, x):
    """Every result, and the gradients of a loss that reads those that have one: the relu mask has none."""
    row = epilogs_lib.RULES[epilog]

    def outputs(operands):
        more = {name: operands[name] for name in row.inputs if name != "relu_aux"}
        more |= {"relu_aux": x["relu_aux"]} if "relu_aux" in row.inputs else {}
        out = f(operands["a"], operands["b"], operands["c"], **more)
        return out if row.outputs else (out, {})

    def loss(operands):
        d, aux = outputs(operands)
        total = jnp.sum(x["w"] * d**2)
        total = total + jnp.sum(x["w"] * aux["gelu_aux"]) if "gelu_aux" in aux else total
        if row.gradient:
            total = total + jnp.sum(x["w_rows" if row.gradient == "bgrada" else "w_columns"] * aux[row.gradient] ** 2)
        return total

    operands = {name: x[name] for name in ("a", "b", "c", *row.inputs) if name != "relu_aux"}
    d, aux = outputs(operands)
    return {"d": d, "gradients": jax.grad(loss)(operands), "aux": aux}


def bound_to(matmul, epilog, case, **options):
    def product(a, b, c, **inputs):
        flags = case.transpose | ({"epilog_inputs": inputs} if inputs else {}) | options
        return matmul(a, b, c, alpha=ALPHA, beta=BETA, epilog=epilog, **flags)

    return product


def fitting(some_cases, epilogs):
    """`parametrize` arguments (case, epilog) with the operands stored as the epilog wants them."""
    return [
        pytest.param(
            case.replace(transposition="TN" if epilog == Epilog.BGRADA else "NN"),
            epilog,
            id=f"{case.name}-{epilog.name}",
        )
        for case in some_cases
        for epilog in epilogs
    ]


def expected(epilog, case, x, shards):
    wide = {name: v if name == "relu_aux" else cases.wide(v) for name, v in x.items()}
    with jax.enable_x64(True):
        want = jax.jit(
            functools.partial(program, bound_to(reference.matmul, epilog, case, relu_aux_shards=shards), epilog)
        )(wide)
        absolute = {name: np.abs(v) for name, v in wide.items()}
        major = jax.jit(functools.partial(program, bound_to(reference.matmul_majorant, epilog, case), epilog))(absolute)
    return jax.tree.map(np.asarray, (want, major))


def check(mode, case, epilog, rng, **options):
    # Under the partitioner a mask is packed before its columns are shared.
    shards = 1 if mode.id == "partitioner" else case.column_shards
    x = data(case, rng, shards)
    with mode.scope(case):
        where = specs(case) | ({"relu_aux": P(case.out[0])} if mode.id == "partitioner" else {})
        placed = {name: mode.put(case, v, where[name]) for name, v in x.items()}
        f = mode.product(case, alpha=ALPHA, beta=BETA, epilog=epilog, **options)
        got = mode.run(functools.partial(program, f, epilog), placed)
        mask = got["aux"].get("relu_aux")
        if mask is not None:
            shards = mask.shape[1] // min(s.data.shape[1] for s in mask.addressable_shards)
    want, major = expected(epilog, case, x, shards)
    if mask is not None:
        assert mask.dtype == jnp.uint8
        np.testing.assert_array_equal(got["aux"].pop("relu_aux"), want["aux"].pop("relu_aux"))
        major["aux"].pop("relu_aux")
    u = bounds.unit_roundoff(case.dtype)
    name = f"{mode.id} {case.name} {epilog.name}"
    paths = jax.tree_util.tree_flatten_with_path(got)[0]
    for (path, g), w, m in zip(paths, jax.tree.leaves(want), jax.tree.leaves(major), strict=True):
        assert g.dtype == case.dtype
        for copy in g.addressable_shards:
            np.testing.assert_array_equal(np.asarray(copy.data), np.asarray(g)[copy.index])
        bounds.judge(name + jax.tree_util.keystr(path), g, w, bounds.PROGRAM * u * m)


@pytest.mark.small("values")
@pytest.mark.parametrize(("case", "epilog"), fitting(cases.MATRIX, EPILOGS))
def test_epilog_and_its_gradients(case, epilog, rng):
    cases.require(None)
    check(modes.BY_ID["explicit"], case.replace(per_shard=(3, 5, 2)), epilog, rng)


@pytest.mark.small("values")
@pytest.mark.parametrize(("case", "epilog"), fitting(cases.MATRIX[:5], EPILOGS))
def test_epilog_and_its_gradients_xla(case, epilog, rng):
    check(modes.BY_ID["explicit"], case.replace(per_shard=(3, 5, 2)), epilog, rng, implementation="xla")


IN_EVERY_MODE = (
    Epilog.RELU_AUX_BIAS,
    Epilog.GELU_AUX_BIAS,
    Epilog.DRELU_BGRAD,
    Epilog.DGELU_BGRAD,
    Epilog.BGRADA,
    Epilog.BGRADB,
)


def columns(mode, case, epilog):
    """What the small suite covers: every pair, and each mode on each pattern with and without a bias."""
    return (mode, case, epilogs_lib.RULES[epilog].has_bias), (mode, epilog), (case, epilog)


@pytest.mark.small("values", of=columns)
@pytest.mark.parametrize("epilog", IN_EVERY_MODE, ids=lambda e: e.name)
@pytest.mark.parametrize(("mode", "case"), modes.pairs(MODES[1:], cases.MATRIX[:7]))
def test_epilog_in_every_mode(mode, case, epilog, rng):
    cases.require(None)
    if epilog == Epilog.BGRADA:
        case = case.replace(transposition="TN")
    check(mode, case.replace(per_shard=(3, 5, 2)), epilog, rng)


@pytest.mark.small("values")
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_epilog_of_every_transposition(case, transposition, rng):
    cases.require(None)
    case = case.replace(per_shard=(3, 5, 2), transposition=transposition)
    for epilog in (Epilog.GELU_AUX_BIAS, Epilog.DGELU_BGRAD, Epilog.BGRADA, Epilog.BGRADB):
        if case.takes(epilog):
            check(modes.BY_ID["explicit"], case, epilog, rng)


@pytest.mark.small("pairs")
@pytest.mark.parametrize("epilog", [Epilog.GELU_AUX_BIAS, Epilog.RELU_BIAS, Epilog.DGELU_BGRAD], ids=lambda e: e.name)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX[:5]))
def test_epilog_of_every_real_type(case, dtype, epilog, rng):
    cases.require(None)
    with jax.enable_x64(dtype == "float64"):
        check(modes.BY_ID["explicit"], case.replace(per_shard=(3, 5, 2), dtype=dtype), epilog, rng)


@pytest.mark.small("values")
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 127, 128, 129, 300])
@pytest.mark.parametrize("case", cases.by_id([cases.BY_NAME[name] for name in ("local", "ag-data", "ar-data", "grid")]))
def test_the_relu_mask_has_one_bit_per_column_and_zeros_behind(case, columns, rng):
    """Columns that end within a byte, at a byte and at the padding to 128 bits."""
    cases.require(None)
    case = case.replace(per_shard=(2, columns, 2))
    mode = modes.BY_ID["explicit"]
    a, b = case.values(rng)
    with mode.scope(case):
        f = mode.product(case, epilog=Epilog.RELU_AUX)
        d, aux = mode.run(f, *(mode.put(case, x, s) for x, s in zip((a, b), case.stored, strict=True)))
    per_device = -(-columns // 128) * 16
    shards = case.extents[1] // columns
    mask = np.asarray(aux["relu_aux"])
    assert mask.shape == (case.extents[0], shards * per_device)
    bits = np.unpackbits(mask.reshape(-1, shards, per_device), axis=-1, bitorder="little")
    z = (cases.wide(a) @ cases.wide(b)).reshape(-1, shards, columns)
    np.testing.assert_array_equal(bits[..., :columns], z > 0)
    assert not bits[..., columns:].any()
    np.testing.assert_array_equal(np.asarray(d).reshape(z.shape) > 0, z > 0)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
def test_relu_of_zero_is_not_marked_and_passes_no_gradient(implementation):
    cases.require(implementation)
    a, b = jnp.zeros((2, 3)), jnp.ones((3, 4))
    f = functools.partial(jaxmp.matmul, epilog=Epilog.RELU_AUX, implementation=implementation)
    d, aux = f(a, b)
    assert not np.any(d)
    assert not np.any(aux["relu_aux"])
    assert not np.any(jax.grad(lambda a: f(a, b)[0].sum())(a))


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("epilog", [Epilog.RELU, Epilog.GELU], ids=lambda e: e.name)
def test_activations_of_extreme_values(epilog, implementation):
    """Large values pass or vanish without overflow; NaN stays NaN."""
    cases.require(implementation)
    z = np.array([[-3e38, -1e4, -20.0, 0.0, 20.0, 1e4, 3e38, np.nan]], np.float32)
    d = jaxmp.matmul(jnp.ones((1, 1)), jnp.asarray(z), epilog=epilog, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(d), np.where(z < 0, 0, z))


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
def test_gelu_is_the_tanh_form(implementation):
    cases.require(implementation)
    z = np.linspace(-6, 6, 1001, dtype=np.float32)[None]
    d = jaxmp.matmul(jnp.ones((1, 1)), jnp.asarray(z), epilog=Epilog.GELU, implementation=implementation)
    z = z.astype(np.float64)
    want = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    # In float32 1 + tanh may cancel for negative z, so the error allowed is relative to z rather than to gelu(z).
    bounds.judge("gelu", d, want, 4 * bounds.unit_roundoff("float32") * np.abs(z))


@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_c_and_bias_are_added_once(case, rng):
    """Integers: a rank that added them again would be off by a whole number."""
    cases.require(None)
    case = case.replace(per_shard=(3, 5, 2))
    mode = modes.BY_ID["explicit"]
    a, b = case.integers(rng)
    m, n, _ = case.extents
    c, bias = rng.integers(-9, 9, (m, n)).astype(np.float32), rng.integers(-9, 9, n).astype(np.float32)
    with mode.scope(case):
        f = mode.product(case, alpha=2.0, beta=-3.0, epilog=Epilog.BIAS)
        placed = [
            mode.put(case, x, s) for x, s in zip((a, b, c, bias), (*case.stored, case.out, P(case.out[1])), strict=True)
        ]
        d = mode.run(f, *placed)
    np.testing.assert_array_equal(np.asarray(d), 2 * (a @ b) - 3 * c + bias)


@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_complex_bias_c_and_scalars(case, rng):
    cases.require(None)
    case = case.replace(per_shard=(3, 5, 2), dtype="complex64", conjugation=(True, False))
    mode = modes.BY_ID["explicit"]
    a, b = case.integers(rng)
    m, n, _ = case.extents
    c, bias = (rng.integers(-9, 9, s) + 1j * rng.integers(-9, 9, s) for s in ((m, n), (n,)))
    with mode.scope(case):
        f = mode.product(case, alpha=2 - 1j, beta=1 + 3j, epilog=Epilog.BIAS)
        x = zip((a, b, c.astype(a.dtype), bias.astype(a.dtype)), (*case.stored, case.out, P(case.out[1])), strict=True)
        d = mode.run(f, *(mode.put(case, v, s) for v, s in x))
    np.testing.assert_array_equal(np.asarray(d), (2 - 1j) * (a.conj() @ b) + (1 + 3j) * c + bias)


@pytest.mark.parametrize("epilog", EPILOGS, ids=lambda e: e.name)
def test_allreduce_is_what_the_pattern_does(epilog, rng):
    """On the pattern that it names, and on a single rank."""
    cases.require(None)
    transposition = "TN" if epilog == Epilog.BGRADA else "NN"
    for name in ("ar-data", "local"):
        case = cases.BY_NAME[name].replace(per_shard=(3, 5, 2), transposition=transposition)
        mode = modes.BY_ID["explicit" if name == "ar-data" else "no-mesh"]
        x = data(case, rng, case.column_shards if mode.axis_type else 1)
        results = []
        with mode.scope(case):
            placed = {key: mode.put(case, v, specs(case)[key]) for key, v in x.items()}
            inputs = {key: placed[key] for key in epilogs_lib.RULES[epilog].inputs}
            for number in (epilog, Epilog.ALLREDUCE | epilog):
                f = mode.product(case, epilog=number)
                out = mode.run(lambda a, b, inputs, f=f: f(a, b, **inputs), placed["a"], placed["b"], inputs)
                results.append(jax.tree.leaves(out))
        for plain, with_bit in zip(*results, strict=True):
            np.testing.assert_array_equal(plain, with_bit)


def test_all_reduce_alone(rng):
    cases.require(None)
    case, mode = cases.BY_NAME["ar"].replace(per_shard=(3, 5, 2)), modes.BY_ID["explicit"]
    a, b = case.integers(rng)
    with mode.scope(case):
        placed = (mode.put(case, x, s) for x, s in zip((a, b), case.stored, strict=True))
        np.testing.assert_array_equal(mode.run(mode.product(case, epilog=Epilog.ALLREDUCE), *placed), a @ b)


@pytest.mark.small("pairs")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("epilog", [e for e in EPILOGS if epilogs_lib.RULES[e].gradient], ids=lambda e: e.name)
@pytest.mark.parametrize("extents", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (4, 5, 1), (0, 5, 0)], ids=str)
def test_bias_gradients_of_empty_and_thin_products(extents, epilog, implementation, rng):
    """Sums over nothing are zero, and are written; an empty d still has the sums of what would have made it."""
    cases.require(implementation)
    m, n, k = extents
    a, b = rng.integers(-3, 4, (m, k)).astype(np.float32), rng.integers(-3, 4, (k, n)).astype(np.float32)
    inputs = {"relu_aux": mask((m, n), rng, 1), "gelu_aux": np.full((m, n), 40, np.float32)}  # of slope 1
    inputs = {name: jnp.asarray(inputs[name]) for name in epilogs_lib.RULES[epilog].inputs}
    turn = epilog == Epilog.BGRADA
    f = functools.partial(
        jaxmp.matmul, epilog=epilog, epilog_inputs=inputs, transpose_a=turn, implementation=implementation
    )
    d, sums = jax.jit(f)(jnp.asarray(a.T if turn else a), jnp.asarray(b))
    z = a @ b
    if "relu_aux" in inputs:
        z = z * np.unpackbits(np.asarray(inputs["relu_aux"]), axis=-1, count=n, bitorder="little")
    np.testing.assert_array_equal(d, z)
    want = {"bgrada": a.sum(1), "bgradb": b.sum(0)}.get(epilogs_lib.RULES[epilog].gradient, z.sum(0))
    np.testing.assert_array_equal(sums[epilogs_lib.RULES[epilog].gradient], want)


def test_the_derivative_of_gelu_far_out_is_that_of_relu():
    z = np.array([-3e38, -1e19, -40, 40, 1e19, 3e38, np.nan], np.float32)
    for implementation in cases.IMPLEMENTATIONS:
        cases.require(implementation)
        d = jaxmp.matmul(
            jnp.ones((1, 2)),
            jnp.ones((2, 7)),
            epilog=Epilog.DGELU,
            epilog_inputs={"gelu_aux": jnp.asarray(z)[None]},
            implementation=implementation,
        )
        np.testing.assert_array_equal(np.asarray(d)[0], np.where(np.isnan(z), np.nan, 2 * (z > 0)))


@pytest.mark.parametrize("name", ["local", "rs-transposed", "ag-transposed"])
def test_the_gradients_of_gelu_far_out_are_those_of_relu(name):
    """Also where XLA applies it: to a product that is computed transposed, and, with k = 0, to a sum over nothing."""
    cases.require(None)
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
        a, b = (
            mode.put(case, np.zeros((m, k), np.float32), case.a),
            mode.put(case, np.zeros((k, n), np.float32), case.b),
        )
        nothing = [mode.put(case, np.zeros(s, np.float32), spec) for s, spec in (((m, 0), case.a), ((0, n), case.b))]
        *of_c, of_aux = mode.run(program, a, b, nothing, mode.put(case, z, case.out))
    for got in of_c:
        np.testing.assert_array_equal(got, np.where(np.isnan(z), np.nan, z > 0))
    np.testing.assert_array_equal(of_aux, np.where(np.isnan(z), np.nan, 0))


@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX))
def test_sums_are_complete_and_exact(case, rng):
    """Integers: a rank, a group or a data-parallel replica whose rows were left out, or counted twice, shows."""
    cases.require(None)
    mode = modes.BY_ID["explicit"]
    for epilog in (Epilog.DRELU_BGRAD, Epilog.BGRADA, Epilog.BGRADB):
        as_stored = case.replace(per_shard=(3, 5, 2), transposition="TN" if epilog == Epilog.BGRADA else "NN")
        a, b = as_stored.integers(rng)
        x = mask(as_stored.extents[:2], rng, as_stored.column_shards)
        inputs = {"relu_aux": x} if epilog == Epilog.DRELU_BGRAD else {}
        with mode.scope(as_stored):
            placed = [mode.put(as_stored, v, s) for v, s in zip((a, b), as_stored.stored, strict=True)]
            inputs = {name: mode.put(as_stored, v, as_stored.out) for name, v in inputs.items()}
            f = mode.product(as_stored, epilog=epilog)
            d, sums = mode.run(lambda a, b, inputs, f=f: f(a, b, **inputs), *placed, inputs)
        (got,) = sums.values()
        op_a, op_b = as_stored.op(a, b)
        want = {Epilog.BGRADA: op_a.sum(1), Epilog.BGRADB: op_b.sum(0)}.get(epilog, np.asarray(d).sum(0))
        np.testing.assert_array_equal(got, want)
        for copy in got.addressable_shards:
            np.testing.assert_array_equal(np.asarray(copy.data), want[copy.index])


@pytest.mark.parametrize("case", cases.by_id(cases.MATRIX[:5]))
def test_complex_sums(case, rng):
    """What is summed is op(a) and op(b), with their conjugation."""
    cases.require(None)
    mode = modes.BY_ID["explicit"]
    for epilog, transposition in ((Epilog.BGRADA, "TN"), (Epilog.BGRADB, "NN")):
        as_stored = case.replace(
            per_shard=(3, 5, 2), dtype="complex64", conjugation=(True, True), transposition=transposition
        )
        a, b = as_stored.integers(rng)
        with mode.scope(as_stored):
            placed = [mode.put(as_stored, v, s) for v, s in zip((a, b), as_stored.stored, strict=True)]
            d, sums = mode.run(mode.product(as_stored, epilog=epilog), *placed)
        op_a, op_b = as_stored.op(a, b)
        np.testing.assert_array_equal(d, op_a @ op_b)
        np.testing.assert_array_equal(*sums.values(), op_a.sum(1) if epilog == Epilog.BGRADA else op_b.sum(0))


def test_the_numbers_are_those_of_cublasmp():
    """cublasmp.h 0.10, cublasMpMatmulEpilogue_t."""
    numbers = {
        "DEFAULT": 0, "ALLREDUCE": 1, "RELU": 2, "RELU_AUX": 2 | 128, "BIAS": 4, "RELU_BIAS": 2 | 4,
        "RELU_AUX_BIAS": 2 | 4 | 128, "DRELU": 8 | 128, "DRELU_BGRAD": 8 | 16 | 128, "GELU": 32, "GELU_AUX": 32 | 128,
        "GELU_BIAS": 32 | 4, "GELU_AUX_BIAS": 32 | 4 | 128, "DGELU": 64 | 128, "DGELU_BGRAD": 64 | 16 | 128,
        "BGRADA": 256, "BGRADB": 512,
    }  # fmt: skip
    assert {name: member.value for name, member in Epilog.__members__.items() if name != "NONE"} == numbers
    assert Epilog.NONE is Epilog.DEFAULT


def test_every_implemented_epilog_is_in_the_table_of_cases():
    assert set(epilogs_lib.RULES) == set(cases.EPILOGS)


def test_a_bias_that_ranks_share_beside_weights_of_their_own(rng):
    """The call of the weights' gradient sums over no ranks here, and the bias's has to."""
    cases.require(None)
    mesh = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    a, b, bias, w = (rng.integers(-3, 4, s).astype(np.float32) for s in ((5, 3), (2, 3, 4), (4,), (2, 5, 4)))

    def layer(a, b, bias):
        return jaxmp.matmul(a, b[0], epilog=Epilog.BIAS, epilog_inputs={"bias": bias})[None]

    stacked = P("x", None, None)
    f = jax.shard_map(layer, mesh=mesh, in_specs=(P(), stacked, P()), out_specs=stacked)
    db, dbias = jax.jit(jax.grad(lambda b, bias: jnp.sum(w * f(a, b, bias)), (0, 1)))(b, bias)
    np.testing.assert_array_equal(np.asarray(db), a.T @ w)
    np.testing.assert_array_equal(np.asarray(dbias), w.sum((0, 1)))


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(activation, has_bias, rng):
    cases.require(None)
    x, w, bias = (rng.standard_normal(s).astype(np.float32) for s in ((3, 5, 7), (7, 11), (11,)))
    operands = (x, w, bias) if has_bias else (x, w)
    with jax.enable_x64(True):
        want = reference.linear(*map(cases.wide, operands), activation=activation)
    major = reference.matmul_majorant(np.abs(x), np.abs(w), epilog=epilogs_lib.for_activation(activation, False))
    allowed = bounds.PROGRAM * bounds.unit_roundoff("float32") * (np.asarray(major) + np.abs(bias))
    for leading in ((), (0,), (0, 0)):  # matrices, rows and single vectors
        got = jaxmp.linear(*(jnp.asarray(v) for v in (x[leading], *operands[1:])), activation=activation)
        bounds.judge(f"linear {leading}", got, np.asarray(want)[leading], allowed[leading])
