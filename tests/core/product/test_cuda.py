"""Reaching the real cuBLASMp, tested without a GPU: when it is chosen, and the program that calls it. Without these
tests, a rank could choose another library than its peers and leave them waiting, or an attribute that only a GPU reads
could be wrong."""

import contextlib
import functools
import re

import cases
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import require_devices
from cuda_programs import cards, number, texts
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog
from jaxmp._src.core.lowering import backend
from jaxmp._src.core.lowering.backend import why_card_refuses
from jaxmp._src.core.spec.matmul_spec import Group, MatmulSpec, Pattern, ScaleModes
from jaxmp._src.platform.jax_internals import jax_lowering
from jaxmp._src.platform.runtime import native

__all__ = ["cards"]  # a fixture


SPEC = MatmulSpec(np.dtype("float32"), Group(Pattern.ALL_GATHER, (("y", 4),), ("y",)))
GRID = MatmulSpec(np.dtype("float32"), Group(Pattern.GRID, (("x", 2), ("y", 4)), ("x",), ("y",)))
FLOATS = (np.dtype("float32"),) * 2
choose = functools.partial(backend.choose_implementation, platform="cuda", unshared_reason="", operands=FLOATS)


def test_cublasmp_is_the_default_where_it_is_open(cards):
    cards("9.0")
    for spec in (SPEC, SPEC.local()):
        chosen = choose(spec)
        assert (chosen.implementation, chosen.why) == ("cublasmp", "CUDA devices, cuBLASMp is open")
        assert choose(spec, unshared_reason="the ranks of a group live in 4 processes") == chosen, (
            "NCCL crosses processes"
        )
    assert choose(SPEC.replace(implementation="cublasmp")) == backend.Choice("cublasmp", "asked for")
    assert choose(SPEC.replace(implementation="xla")) == backend.Choice("xla", "asked for")


def test_a_library_that_cannot_be_opened_leaves_xla_and_says_why(cards):
    cards("9.0", why="cuBLASMp is 0.8.0, jaxmp needs 0.10")
    assert choose(SPEC) == backend.Choice("xla", "cuBLASMp is 0.8.0, jaxmp needs 0.10")
    with pytest.raises(RuntimeError, match=r'^implementation="cublasmp": cuBLASMp is 0\.8\.0, jaxmp needs 0\.10$'):
        choose(SPEC.replace(implementation="cublasmp"))


def test_without_a_gpu_the_library_is_called_only_on_request(monkeypatch):
    monkeypatch.setattr(native, "cuda_devices", list)
    chosen = choose(SPEC)
    assert chosen.implementation == "xla"
    assert 'lowered without a GPU, where cuBLASMp cannot be looked for; pass implementation="cublasmp"' in chosen.why
    assert choose(SPEC.replace(implementation="cublasmp")).implementation == "cublasmp"


@pytest.mark.parametrize(
    ("spec", "operands", "why"),
    [
        pytest.param(GRID, FLOATS, "cuBLASMp multiplies contiguous shards on square grids only, not 2x4", id="grid"),
        pytest.param(
            SPEC.replace(precision="F16_F16_F16"),
            (np.dtype("float16"),) * 2,
            "precision=F16_F16_F16 sums in 16 bits, which jaxmp does not ask of cuBLASMp",
            id="sum in 16 bits",
        ),
        pytest.param(
            SPEC, (np.dtype("int8"),) * 2, "cuBLASMp multiplies int8 to float32 only, not to int32", id="int8"
        ),
        pytest.param(
            SPEC.replace(scales=ScaleModes("vec32_ue8m0", "vec32_ue8m0")),
            (jnp.dtype("float8_e4m3fn"),) * 2,
            "MXFP8 needs compute capability 10.0 or later, this card has 9.0",
            id="card",
        ),
    ],
)
def test_calls_that_cublasmp_lacks_go_to_xla_or_are_refused(cards, spec, operands, why):
    cards("10.0", "9.0")  # the lowest capability decides, so that all processes choose the same
    assert choose(spec, operands=operands) == backend.Choice("xla", why)
    with pytest.raises(NotImplementedError, match=re.escape(f'"cublasmp": {why}; pass implementation=None or "xla"')):
        choose(spec.replace(implementation="cublasmp"), operands=operands)


FP8, FP4 = jnp.dtype("float8_e4m3fn"), jnp.dtype("float4_e2m1fn")


@pytest.mark.parametrize(
    ("dtype", "mode", "lowest", "highest", "what"),
    [
        (FP8, "none", (9, 0), None, "float8_e4m3fn needs compute capability 9.0 or later"),
        (FP8, "scalar_fp32", (9, 0), None, "float8_e4m3fn needs compute capability 9.0 or later"),
        (FP8, "outer_vec_fp32", (9, 0), (9, 0), "scales of outer_vec_fp32 need compute capability 9.0"),
        (FP8, "vec128_fp32", (9, 0), (9, 0), "scales of vec128_fp32 need compute capability 9.0"),
        (FP8, "blk128x128_fp32", (9, 0), (9, 0), "scales of blk128x128_fp32 need compute capability 9.0"),
        (FP8, "vec32_ue8m0", (10, 0), None, "MXFP8 needs compute capability 10.0 or later"),
        (FP4, "vec16_ue4m3", (10, 0), None, "NVFP4 needs compute capability 10.0 or later"),
    ],
)
def test_what_a_card_does_not_multiply(dtype, mode, lowest, highest, what):
    """The capabilities are from cublasmp.h 0.10, cublasMpMatmul and cublasMpMatmulMatrixScale_t."""
    spec = SPEC.replace(scales=ScaleModes(mode, mode))
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        is_fit = lowest <= capability <= (highest or capability)
        why = why_card_refuses(spec, (dtype, dtype), capability)
        assert why == ("" if is_fit else f"{what}, this card has {capability[0]}.{capability[1]}")
    assert why_card_refuses(spec, (dtype, dtype), None) == ""
    assert why_card_refuses(SPEC, FLOATS, (7, 5)) == ""


@pytest.fixture
def sharded(mesh_of):
    """Sets a mesh of four devices; yields a function that returns operand types on it."""
    mesh = mesh_of({"y": 4})
    with jax.set_mesh(mesh):
        yield functools.partial(cases.typed, mesh)


ask = functools.partial(jaxmp.matmul, implementation="cublasmp")


def test_a_program_for_cuda_calls_the_library(sharded):
    a, b = sharded((8, 16), "y", None), sharded((16, 12), None, "y")
    (line,) = texts(functools.partial(ask, out_sharding=P(None, "y"), epilog=Epilog.RELU), a, b)
    assert 'pattern = "all_gather"' in line
    assert [number(line, name) for name in "mnk"] == [12, 8, 16], "columns come first"
    assert number(line, "epilog") == 2
    assert 'determinism = "run_to_run"' in line
    assert "devices = dense<> " in line, "the program is for other devices than these"


@pytest.mark.parametrize("comm", [None, jaxmp.CommOptions(algorithm="no_overlap")])
def test_narrow_weights_are_gathered_as_they_are_stored(sharded, cards, monkeypatch, comm):
    """Options of the library's own gather are kept, and the weights cross as bfloat16."""
    a, b = sharded((8, 16), "y", None).update(dtype="bfloat16"), sharded((16, 12), None, "y").update(dtype="int8")
    f = functools.partial(ask, out_sharding=P("y", None), preferred_element_type="bfloat16", comm=comm)
    text = jax.jit(f).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if "@jaxmp_matmul" in line)
    gathered = re.findall(r"all_gather.* -> tensor<4x16x3x(\w+)>", text)
    assert (gathered, 'pattern = "local"' in line) == ((["ui8"], True) if comm is None else ([], False))
    cards("9.0")
    monkeypatch.setattr(native.jax_compat, "default_platform", lambda: "cuda")
    (row,) = jaxmp.explain(f, quiet=True)(a, b).rows
    assert row.bytes_moved == 3 * 16 * 3 * (1 if comm is None else 2)


def test_a_profile_says_that_cublasmp_multiplies(sharded):
    a, b = sharded((8, 16), "y", None), sharded((16, 12), None, "y")
    f = jax.jit(functools.partial(ask, out_sharding=P(None, "y")))
    text = f.trace(a, b).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "jaxmp all_gather 8x16x12 f32*f32->f32 run_to_run (cuBLASMp)/" in text


@pytest.fixture
def required(cards, monkeypatch):
    """Returns the list of primitives that require known devices at lowering, in a process with CUDA devices."""
    primitives = []
    cards("9.0")
    monkeypatch.setattr(native, "register", lambda: None)
    monkeypatch.setattr(jax_lowering, "require_devices", primitives.extend)
    return primitives


def test_what_runs_here_names_its_devices(sharded, required):
    """A communicator belongs to certain devices, so a program that is lowered for them cannot run on others."""
    a, b = sharded((8, 16), "y", None), sharded((16, 12), None, "y")
    ids = ", ".join(str(device.id) for device in jax.devices()[:4])
    (line,) = texts(functools.partial(jaxmp.matmul, out_sharding=P(None, "y")), a, b)
    assert f"devices = dense<[{ids}]>" in line
    text = jax.jit(functools.partial(jaxmp.matmul, out_sharding=P(None, "y"))).trace(a, b)
    text = text.lower(lowering_platforms=("cuda",)).as_text()
    assert "partition_id" not in text, "a position is work on the device at every run"
    assert {primitive.name for primitive in required} == {"jaxmp_matmul"}


@pytest.mark.parametrize("scope", [jax.set_mesh, contextlib.nullcontext], ids=["set_mesh", "operands alone"])
def test_meshes_of_one_shape_have_lowerings_of_their_own(scope, cards, monkeypatch):
    """Otherwise JAX would give the second mesh the program and the communicator of the first."""
    require_devices(8)
    cards("9.0")
    monkeypatch.setattr(native, "register", lambda: None)
    dispatch = jax_lowering._dispatch
    monkeypatch.setattr(dispatch, "prim_requires_devices_during_lowering", set())  # as in a fresh process
    product = jax.jit(functools.partial(jaxmp.matmul, out_sharding=P(None, "y")))
    for order in ([0, 1, 2, 3], [4, 5, 6, 7], [3, 2, 1, 0], [0, 1, 2, 3]):
        mesh = Mesh(np.array(jax.devices())[order], ("y",), axis_types=(AxisType.Explicit,))
        a, b = (cases.typed(mesh, (8, 8), *spec) for spec in (("y", None), (None, "y")))
        with scope(mesh):
            text = product.trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
        assert f"devices = dense<[{', '.join(map(str, order))}]>" in text


def test_one_rank_needs_no_devices(required):
    (line,) = texts(jaxmp.matmul, *(jax.ShapeDtypeStruct((4, 4), jnp.float32),) * 2)
    assert "devices = dense<> " in line
    assert {primitive.name for primitive in required} == {"jaxmp_partitioned_matmul"}  # may have several ranks


@pytest.mark.parametrize("shapes", [((8, 0), (0, 12)), ((0, 16), (16, 12))], ids=["k", "m"])
def test_nothing_to_multiply_is_no_call(shapes):
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    assert not texts(ask, a, b)


def test_gradients_for_cuda_are_calls_of_the_library(sharded):
    a, b = sharded((8, 16), None, "y"), sharded((16, 12), "y", None)

    def loss(a, b):
        return jnp.sum(ask(a, b, out_sharding=P("y", None)))

    lines = texts(jax.grad(loss, (0, 1)), a, b)
    assert sorted(re.search(r'pattern = "(\w+)"', line)[1] for line in lines) == ["all_gather", "local"]


def exported(f, operands):
    names = ("jaxmp_matmul", "jaxmp_partitioned_matmul")
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    return jax.export.export(jax.jit(f), platforms=("cpu", "cuda"), disabled_checks=checks)(*operands)


def test_one_export_serves_both_platforms(sharded, mesh_of):
    """On automatic axes XLA's partitioner asks for the call of each platform; this test checks the one for CPUs."""
    operands = sharded((8, 16), "y", None), sharded((16, 12), None, "y")
    module = exported(functools.partial(jaxmp.matmul, out_sharding=P(None, "y")), operands).mlir_module()
    assert module.count("@jaxmp_matmul") == 1
    assert "stablehlo.all_gather" in module
    mesh = mesh_of({"y": 4}, AxisType.Auto)
    a, b = (np.ones(shape, np.float32) for shape in ((8, 16), (16, 12)))
    placed = cases.put(a, mesh, P(None, "y")), cases.put(b, mesh, P("y", None))
    with jax.set_mesh(mesh):
        program = exported(jaxmp.matmul, placed)
        assert sorted(re.findall(r"platform\\22: \\22(\w+)", program.mlir_module())) == ["cpu", "cuda"]
        np.testing.assert_array_equal(jax.jit(program.call)(*placed), a @ b)


def test_explain_tells_what_cublasmp_will_be_asked(sharded, cards, monkeypatch):
    cards("9.0")
    monkeypatch.setattr(native.jax_compat, "default_platform", lambda: "cuda")
    monkeypatch.setattr(native, "cublasmp_log", lambda: ["[cublasMpMatmul] Using AllGather + Matmul"])
    a, b = sharded((8, 16), "y", None), sharded((16, 12), None, "y")
    explanation = jaxmp.explain(functools.partial(jaxmp.matmul, out_sharding=P(None, "y")))(a, b)
    (row,) = explanation.rows
    assert (row.implementation, row.why) == ("cublasmp", "CUDA devices, cuBLASMp is open")
    assert row.algorithm == "cublasmp AllGather + Matmul; workspace from its first run on"
    assert (row.workspace, row.bytes_moved) == (0, 3 * 2 * 16 * 4)
    assert explanation.logged == ("[cublasMpMatmul] Using AllGather + Matmul",)
    assert str(explanation).endswith("cuBLASMp logged: [cublasMpMatmul] Using AllGather + Matmul")
