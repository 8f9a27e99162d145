"""The levels of determinism over a library that promises no order of sums; hostmp stands for cuBLASMp. If only
cuBLASMp's documented forms are taken, a product under a level gathers its operands and makes calls of one shape, on
hostmp as on GPUs. These tests show that each element is in its place after cutting, padding and joining, and that all
calls of a product share one plan for any batch and mesh, so bits depend only on a place in a tile. They cannot show
that cuBLASLt's kernels sum in the same order at every place (docs/determinism.md)."""

import functools
import re

import cases
import drawn
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
import suite
from cuda_programs import cards, number, texts
from jax.sharding import PartitionSpec as P
from low_precision_cases import E4M3, SCALE_MODES

import jaxmp
from jaxmp import CommOptions, Epilog, Scaling, testing
from jaxmp._src.core.lowering import backend, fixed_shape, forms
from jaxmp._src.core.lowering.backend import Capabilities
from jaxmp._src.core.primitive import primitives
from jaxmp._src.core.spec import matmul_spec
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime import native

__all__ = ["cards"]  # a fixture
EXPLICIT = modes.BY_ID["explicit"]
LEVELS = testing.LEVELS
ROWS, COLUMNS = 32, 128


@pytest.fixture
def in_tiles(monkeypatch):
    """Returns `in_tiles(f, *args, **options)`: runs f with hostmp limited to cuBLASMp's forms, in tiles of 32 x 128. A
    BLAS may sum elements of one call in different orders, depending on its kernels and the processor, so hostmp's calls
    use a fixed order of sums."""
    monkeypatch.setattr(fixed_shape, "ROWS", ROWS)
    monkeypatch.setattr(fixed_shape, "COLUMNS", COLUMNS)

    def run(f, *args, **options):
        custom_call = forms.custom_call

        def uniform(operands, spec, devices=()):
            return custom_call(operands, spec.replace(determinism="batch"), devices)

        with monkeypatch.context() as patch:
            patch.setattr(forms, "custom_call", uniform)
            patch.setattr(backend, "capabilities_of", lambda library: Capabilities())
            jax.clear_caches()  # the form of the call is chosen at lowering
            try:
                return jax.tree.map(np.asarray, f(*args, **options))
            finally:
                jax.clear_caches()

    with jax.enable_x64(True):
        yield run


def extents_of(text):
    """Returns {(m, n, k) of a call, in cuBLASMp's terms}, and the number of calls."""
    lines = [line for line in text.splitlines() if "@jaxmp_matmul" in line]
    return {tuple(number(line, name) for name in "mnk") for line in lines}, len(lines)


# Extents per device: smaller than a tile, whole tiles and ragged ones, with one and several tiles in each direction.
SHAPES = ((3, 5, 7), (32, 128, 4), (33, 129, 3), (20, 70, 9))
PATTERNS = ("local", "ag-data", "rs-data", "ar-data", "grid", "ag-transposed", "rs-transposed")


@pytest.mark.parametrize(
    ("name", "shape", "transposition"),
    [
        *(("local", shape, transposition) for shape, transposition in zip(SHAPES, cases.TRANSPOSITIONS, strict=True)),
        *((name, SHAPES[3], cases.TRANSPOSITIONS[i % 4]) for i, name in enumerate(PATTERNS[1:])),
        *((name, SHAPES[2], "NT") for name in ("rs-data", "grid")),
    ],
    ids=str,
)
def test_every_element_is_in_its_place(name, shape, transposition, in_tiles, rng):
    case = cases.BY_NAME[name].replace(per_shard=shape, transposition=transposition)
    a, b = case.integers(rng)
    m, n, _ = case.extents
    c, bias = (rng.integers(-3, 4, s).astype(a.dtype) for s in ((m, n), (n,)))
    with EXPLICIT.scope(case):
        specs = (*case.stored, case.out, P(case.out[1]))
        placed = [EXPLICIT.put(case, x, spec) for x, spec in zip((a, b, c, bias), specs, strict=True)]
        f = EXPLICIT.product(case, alpha=2.0, beta=-1.0, epilog=Epilog.BIAS, determinism="topology")
        d = in_tiles(jax.jit(f), *placed)
    np.testing.assert_array_equal(d, 2 * np.matmul(*case.op(a, b)) - c + bias)


@pytest.mark.parametrize(("transposition", "conjugation"), [("NN", (True, False)), ("TT", (True, True))], ids=str)
def test_conjugates_are_in_their_place(transposition, conjugation, in_tiles, rng):
    case = cases.BY_NAME["local"].replace(
        per_shard=(20, 70, 9), transposition=transposition, dtype="complex64", conjugation=conjugation
    )
    a, b = case.integers(rng)
    product = modes.BY_ID["no-mesh"].product(case, determinism="batch")
    np.testing.assert_array_equal(in_tiles(jax.jit(product), a, b), np.matmul(*case.op(a, b)))


# One epilog for each set of inputs and results; how z is transformed is up to the library.
EPILOGS = (Epilog.NONE, Epilog.RELU_AUX_BIAS, Epilog.GELU_AUX_BIAS, *testing.DERIVATIVES)


@pytest.mark.parametrize("epilog", EPILOGS, ids=lambda epilog: epilog.name)
def test_every_epilog_is_that_of_one_call(epilog, in_tiles, rng, monkeypatch):
    """Compares with the ordered sums of one call: integers bitwise, masks with their padding."""
    monkeypatch.setattr(fixed_shape, "COLUMNS", 256)  # then the mask of the last tile is wider than d's
    m, n, k = 70, 300, 9
    transposition = "TN" if epilog == Epilog.BGRADA else "NN"
    case = cases.BY_NAME["local"].replace(per_shard=(m, n, k), mesh=(("x", 1), ("y", 1)), transposition=transposition)
    a, b = case.integers(rng)
    c, z = (rng.integers(-9, 10, (m, n)).astype(np.float32) for _ in range(2))
    inputs = testing._inputs(epilog, np.arange(n, dtype=np.float32)) | testing._aux_inputs(epilog, z)

    def product(a, b, c, inputs):
        options = {"epilog": epilog, "epilog_inputs": inputs, "determinism": "batch"}
        out = jaxmp.matmul(a, b, c, alpha=2.0, beta=-1.0, **case.transpose, **options)
        return {"d": out[0], **out[1]} if isinstance(out, tuple) else {"d": out}

    args = (a, b, c, jax.tree.map(np.asarray, inputs))
    want, got = jax.jit(product)(*args), in_tiles(jax.jit(product), *args)
    assert set(got) == set(want)
    for name in want:
        if name == "dgelu_bgrad":  # slopes are not integers, and 70 of them are summed
            scale = np.abs(np.asarray(want["d"], np.float64)).sum(0)
            assert np.all(np.abs(got[name] - np.asarray(want[name], np.float64)) <= 70 * 2**-24 * scale)
        else:
            testing.assert_bitwise_equal(got[name], want[name], name)


@pytest.mark.parametrize(
    ("name", "epilog"),
    [("ag", Epilog.DRELU_BGRAD), ("rs", Epilog.BGRADA), ("grid", Epilog.BGRADA), ("ar-data", Epilog.BGRADB)],
    ids=str,
)
def test_sums_are_complete_over_the_ranks(name, epilog, in_tiles):
    transposition = "TN" if epilog == Epilog.BGRADA else "NN"
    case = cases.BY_NAME[name].replace(per_shard=(6, 40, 5), transposition=transposition, epilog=epilog)
    in_tiles(drawn.check_on, suite.Trial(case, determinism="batch"), ["normal"], np.random.default_rng(0))


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (40, 3, 0), (0, 0, 0)], ids=str)
def test_nothing_to_multiply(shape, in_tiles):
    """cuBLASMp does not take k = 0, so k is padded, and the library still applies the epilog."""
    m, n, k = shape
    a, b, c, bias = (np.ones(s, np.float32) for s in ((m, k), (k, n), (m, n), (n,)))
    options = {"epilog": Epilog.BIAS, "epilog_inputs": {"bias": bias}, "beta": 3.0, "determinism": "batch"}
    product = jax.jit(functools.partial(jaxmp.matmul, **options))
    np.testing.assert_array_equal(in_tiles(product, a, b, c), np.full((m, n), 4.0, np.float32))


@pytest.mark.parametrize("mode", SCALE_MODES, ids=lambda mode: mode.id)
def test_scales_follow_their_rows_and_blocks(mode, in_tiles, rng, monkeypatch):
    a, b = (rng.integers(-2, 3, (rows, 256)).astype(mode.dtype) for rows in (384, 256))
    out = mode.dtype if mode.a in ("mx", "nv") else jnp.float32

    def product(a, b, scale_a, scale_b):
        options = {"transpose_b": True, "preferred_element_type": out, "determinism": "batch"}
        return jaxmp.matmul(a, b, scaling=Scaling(a=scale_a, b=scale_b), **options)

    monkeypatch.setattr(fixed_shape, "ROWS", 128)
    args = (a, b, *mode.scales(rng, a.shape, b.shape))
    want, got = jax.jit(product)(*args), in_tiles(jax.jit(product), *args)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_a_largest_value_is_not_that_of_padding(in_tiles):
    """The bias, which a padded row of zeros would get, is larger here than any value in d."""
    a, b = np.full((16, 16), -1, E4M3), np.ones((16, 16), E4M3)
    bias = np.full(16, 12, np.float16)
    options = {"transpose_b": True, "preferred_element_type": E4M3, "determinism": "batch"}
    options |= {"scaling": Scaling(result_amax=True)}
    product = functools.partial(jaxmp.matmul, epilog=Epilog.RELU_AUX_BIAS, epilog_inputs={"bias": bias}, **options)
    d, more = in_tiles(jax.jit(product), a, b)
    assert (float(more["result_amax"]), np.abs(d.astype(np.float32)).max()) == (0.0, 0.0)
    assert not more["relu_aux"].any()


@pytest.mark.parametrize(
    ("dtype", "transpose", "only"),
    [
        ("float32", "NN", ("all-gather", "all-reduce")),
        ("float32", "TN", ("reduce-scatter", "grid")),
        ("bfloat16", "TT", ("data x reduce-scatter",)),
    ],
    ids=str,
)
def test_bits_do_not_know_the_mesh(dtype, transpose, only, in_tiles, monkeypatch):
    """Gradients do not know it either, although some are computed transposed on one mesh only. hostmp's sums equal the
    transpose's and cuBLASLt's need not, so each call multiplies its first operand by 1.1."""
    custom_call = forms.custom_call

    def unequal(operands, *options):
        a = operands["a"]
        return custom_call(operands | {"a": (a * 1.1).astype(a.dtype)}, *options)

    monkeypatch.setattr(forms, "custom_call", unequal)
    check = functools.partial(testing.check_meshes, "topology", "host", dtype, (72, 160, 40), [4])
    in_tiles(check, transpose=transpose, only=only)


def test_a_mapped_batch_has_the_bits_of_its_members(in_tiles):
    """A batch of rows transposes an a that is stored transposed; a call of another form may sum in another order."""
    a, b = testing.draw(0, (3, 65, 11), "float32"), testing.draw(1, (65, 130), "float32")
    product = functools.partial(jaxmp.matmul, transpose_a=True, determinism="batch")
    mapped = in_tiles(jax.jit(jax.vmap(product, (0, None))), a, b)
    members = [in_tiles(jax.jit(product), x, b) for x in a]
    testing.assert_bitwise_equal(mapped, np.stack(members))


def test_a_mask_made_of_the_result_has_its_smallest_numbers(in_tiles):
    """cuBLASMp's mask treats 0 differently; 1e-200 is 0 in float32."""
    a, b = np.array([[1e-200], [-1e-200], [0.0], [3.0]]), np.ones((1, 8))
    d, aux = in_tiles(jax.jit(functools.partial(jaxmp.matmul, epilog=Epilog.RELU_AUX)), a, b)
    bits = np.unpackbits(aux["relu_aux"], axis=-1, bitorder="little")[:, :8]
    np.testing.assert_array_equal(bits, d > 0)
    assert d[0, 0] > 0


def test_the_slope_of_a_gelu_is_the_librarys(in_tiles):
    aux, t = testing.draw(0, (70, 140), "float32"), testing.draw(1, (70, 140), "float32")
    t[0, :2] = 0.0, np.inf
    spec = matmul_spec.MatmulSpec(np.dtype("float32"), determinism="batch")
    slope = jax.jit(functools.partial(primitives.activation_grad, "gelu", spec=spec))
    testing.assert_bitwise_equal(in_tiles(slope, aux, t), slope(aux, t))


def test_all_batches_and_meshes_share_a_plan(in_tiles):
    def plans():
        native.plan_cache_clear()
        for m, n in ((1, 1), (31, 7), (70, 300)):
            a, b = testing.draw(0, (m, 40), "float32"), testing.draw(1, (40, n), "float32")
            jaxmp.matmul(a, b, determinism="batch")
            jaxmp.matmul(a.T, b.T, transpose_a=True, transpose_b=True, determinism="topology")
        for name in ("ag", "rs-data", "ar", "grid-2x4"):
            case = cases.BY_NAME[name]
            case = case.replace(per_shard=(8, 20, 40 // (case.extents[2] // case.per_shard[2])))
            assert case.extents[2] == 40
            a, b = case.values(np.random.default_rng(0))
            with EXPLICIT.scope(case):
                placed = [EXPLICIT.put(case, x, s) for x, s in zip((a, b), case.stored, strict=True)]
                jax.block_until_ready(EXPLICIT.product(case, determinism="topology")(*placed))
        return native.plan_cache_info()["misses"]

    assert in_tiles(plans) == 1


ask = functools.partial(jaxmp.matmul, implementation="cublasmp")


@pytest.mark.parametrize("level", LEVELS)
def test_programs_for_cuda_call_one_shape(mesh_of, level):
    mesh = mesh_of({"y": 4})

    def lowered(shapes, specs, out):
        a, b = (cases.typed(mesh, shape, *spec, dtype=jnp.bfloat16) for shape, spec in zip(shapes, specs, strict=True))
        f = functools.partial(ask, determinism=level, out_sharding=P(*out), epilog=Epilog.GELU)
        with jax.set_mesh(mesh):
            program = jax.jit(f).trace(a, b).lower(lowering_platforms=("cuda",))
        assert f"jaxmp {level} by calls of one shape/" in program.as_text(debug_info=True)
        return program.as_text()

    rows, cols, whole = ("y", None), (None, "y"), (None, None)
    for m, specs, out, collectives in (
        (8, (rows, cols), cols, {"all_gather"}),
        (4096, (rows, cols), cols, {"all_gather"}),
        (8, (cols, rows), rows, {"all_to_all", "all_gather"}),
        (1024, (cols, rows), whole, {"all_gather"}),
        (1, (whole, cols), cols, set()),
    ):
        text = lowered(((m, 64), (64, 8192)), specs, out)
        assert extents_of(text) == ({(fixed_shape.COLUMNS, fixed_shape.ROWS, 64)}, 1)
        assert set(re.findall(r"stablehlo\.(all_\w+|reduce_scatter|collective_\w+)\"", text)) == collectives
        assert 'determinism = "run_to_run"' in text
        assert 'pattern = "local"' in text
        assert "mesh_shape = dense<> " in text


def test_a_gathered_pattern_drops_its_communication_options(mesh_of):
    mesh = mesh_of({"y": 4})
    a, b = (cases.typed(mesh, (8, 8), *spec, dtype=jnp.bfloat16) for spec in (P(None, "y"), P("y", None)))
    options = {"comm": CommOptions(algorithm="split_p2p", dtype="float32"), "determinism": "batch"}
    with jax.set_mesh(mesh):
        (line,) = texts(functools.partial(ask, out_sharding=P("y", None), **options), a, b)
    assert 'algorithm = "default"' in line
    assert 'communication_dtype = "none"' in line


def test_explain_says_what_is_gathered_and_called(mesh_of, cards, monkeypatch):
    cards("9.0")
    monkeypatch.setattr(jax_compat, "default_platform", lambda: "cuda")
    mesh = mesh_of({"y": 4})
    a, b = (cases.typed(mesh, shape, *spec) for shape, spec in (((1100, 64), (None, "y")), ((64, 5000), ("y", None))))
    with jax.set_mesh(mesh):
        f = functools.partial(jaxmp.matmul, determinism="topology", out_sharding=P(None, None))
        (row,) = jaxmp.explain(f)(a, b).rows
    assert (row.implementation, row.determinism, row.workspace) == ("cublasmp", "topology", 0)
    assert "cublasmp 6 local Matmul of 512x64x4096 each, padded, instead of an order of sums" in row.algorithm
    assert row.bytes_moved == 3 * 4 * (1100 * 16 + 16 * 5000)
    assert row.flops == 4 * 2 * 1100 * 5000 * 64


@pytest.mark.parametrize("level", LEVELS)
def test_what_keeps_no_level_on_cuda_is_refused_by_name(level, cards):
    plain = matmul_spec.MatmulSpec(np.dtype("float32"), determinism=level)
    choose = functools.partial(backend.choose_implementation, unshared_reason="")
    floats, bytes_ = (np.dtype("float32"),) * 2, (np.dtype("int8"),) * 2
    head = f"determinism='{level}' is not available on platform"
    with pytest.raises(
        NotImplementedError, match=rf"{head} 'cuda' .*lowered without a GPU.*pass implementation=\"cubla"
    ):
        choose(plain, "cuda", operands=floats)
    cards("9.0")
    assert choose(plain, "cuda", operands=floats).implementation == "cublasmp"
    grid = plain.regroup(pattern=matmul_spec.Pattern.GRID, mesh=(("x", 2), ("y", 4)), row_axes=("x",), col_axes=("y",))
    assert choose(grid.replace(epilog=Epilog.GELU), "cuda", operands=floats).implementation == "cublasmp"
    for spec, platform, operands, why in (
        (plain.replace(implementation="xla"), "cuda", floats, r"\(asked for\).*; pass implementation=\"cublasmp\", or"),
        (plain, "cuda", bytes_, r"\(cuBLASMp multiplies int8 to float32 only, not to int32\)"),
        (plain, "rocm", floats, r"\(no fused implementation for platform 'rocm'\)"),
    ):
        with pytest.raises(NotImplementedError, match=f"{head} '{platform}' with implementation='xla' {why}"):
            choose(spec, platform, operands=operands)
    cards("9.0", why="libcublasmp.so.0 cannot be opened")
    with pytest.raises(NotImplementedError, match=rf"{head} 'cuda' .*\(libcublasmp\.so\.0 cannot be opened\)"):
        choose(plain, "cuda", operands=floats)
