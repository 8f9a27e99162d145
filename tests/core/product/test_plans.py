"""Decisions before a call, tested without devices: from shardings to patterns, and the forms that are legal. Each has
its own oracle: sharding rules are compared with a brute force over devices, legal forms with the capabilities that they
may use."""

import functools
import itertools
from types import SimpleNamespace

import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog
from jaxmp._src.core.contraction import contraction, planner
from jaxmp._src.core.contraction.contraction import Layout
from jaxmp._src.core.lowering import backend, forms
from jaxmp._src.core.lowering.backend import Capabilities, why_unsupported
from jaxmp._src.core.lowering.fixed_shape import PADDED_K, with_k
from jaxmp._src.core.sharding.factored_mesh import factored
from jaxmp._src.core.sharding.meshes import partition_spec
from jaxmp._src.core.spec.low_precision import VEC128
from jaxmp._src.core.spec.matmul_spec import Group, MatmulSpec, Pattern, ScaleModes

MESH = {"x": 2, "y": 2}
DIMS = ((), ("x",), ("y",), ("x", "y"), ("y", "x"))


def holdings(dims, device):
    """Returns the block of a matrix that a device holds: (position, number of positions) per dimension."""
    return tuple(
        (
            int(np.ravel_multi_index([device[axis] for axis in dim], [MESH[axis] for axis in dim])) if dim else 0,
            int(np.prod([MESH[a] for a in dim])),
        )
        for dim in dims
    )


def covers(have, want):
    """True if the part `have` = (position, parts) of a dimension contains the part `want`."""
    return have[0] * want[1] <= want[0] * have[1] and (want[0] + 1) * have[1] <= (have[0] + 1) * want[1]


def check_plan(plan, devices, out):
    """Asserts that each device finds the rows of a and columns of b for its part of d among the ranks of its group."""
    assert plan.layout.d == out
    group = plan.row_axes + plan.col_axes
    for device in devices:
        peers = [d for d in devices if all(d[axis] == device[axis] for axis in MESH if axis not in group)]
        rows, cols = holdings(out, device)
        row_parts = [holdings(plan.layout.a, peer) for peer in peers]
        col_parts = [holdings(plan.layout.b, peer) for peer in peers]
        for row_part, found in ((rows, [p[0] for p in row_parts]), (cols, [p[1] for p in col_parts])):
            pieces = [p for p in set(found) if covers(row_part, p) or covers(p, row_part)]
            covered = sum(1 / p[1] for p in pieces if covers(row_part, p)) or max((1 / p[1] for p in pieces), default=0)
            assert covered >= 1 / row_part[1], (plan, device)
        # The group holds the whole contraction.
        assert sum(1 / parts for _, parts in {p[1] for p in row_parts}) == 1, (plan, device)
        assert {p[1] for p in row_parts} == {p[0] for p in col_parts} or plan.pattern == Pattern.GRID, (plan, device)


@pytest.mark.parametrize("transposition", ["NN", "TT"])
def test_every_proposal_is_planned_consistently(transposition):
    flags = {"transpose_a": transposition[0] == "T", "transpose_b": transposition[1] == "T"}
    devices = [{"x": i, "y": j} for i in range(2) for j in range(2)]
    extents = (("m", 8), ("k", 8), ("n", 8))
    options = {"keeps_result": False, "gathers_k": not any(flags.values())}
    terms = planner.Terms(extents, tuple(MESH.items()), (4, 4, 4, 4), **options)
    for a0, a1, b0, b1, d0, d1 in itertools.product(DIMS, repeat=6):
        if set(a0) & set(a1) or set(b0) & set(b1) or set(d0) & set(d1):
            continue
        plan = planner.plan(contraction.of_matrices(2, Layout((a0, a1), (b0, b1), (d0, d1)), **flags), terms)
        for dims in plan.layout:
            used = sum(dims, ())
            assert len(used) == len(set(used))
        if not plan.is_block_grid:
            a, b, d = plan.layout
            op = Layout(a[::-1] if flags["transpose_a"] else a, b[::-1] if flags["transpose_b"] else b, d)
            check_plan(contraction.of_matrices(2, op), devices, d)


@pytest.mark.parametrize(("sizes", "parts"), [((8,), (2, 2, 2)), ((2, 4), (2, 2, 2)), ((6,), (3, 2)), ((3, 2), (3, 2))])
def test_parts_of_axes_are_found_in_every_sharding(sizes, parts, mesh_of):
    mesh = mesh_of(dict(zip("xyz", sizes, strict=False)), AxisType.Auto)
    split = mesh_of(dict(zip("abc", parts, strict=False)), AxisType.Auto)
    shape = (24, 24)
    for order in itertools.permutations(split.axis_names):
        for i, j in itertools.combinations_with_replacement(range(len(order) + 1), 2):
            wanted = NamedSharding(split, P(order[:i] or None, order[i:j] or None)).devices_indices_map(shape)
            tiles = {}
            for position, device in enumerate(split.devices.flat):
                tiles.setdefault(tuple(part.start or 0 for part in wanted[device]), []).append(position)
            cuts = [len({start[axis] for start in tiles}) for axis in (0, 1)]
            proposed = SimpleNamespace(
                shape=shape, tiles=np.array([tiles[x] for x in sorted(tiles)]).reshape(*cuts, -1)
            )
            on, (dims,) = factored(mesh, [proposed])
            assert NamedSharding(on, partition_spec(dims)).devices_indices_map(shape) == wanted
    swapped = SimpleNamespace(shape=shape, tiles=np.array([1, 0, *range(2, mesh.size)]).reshape(-1, 1, 1))
    assert factored(mesh, [swapped]) == (mesh, [((), ())])


def test_operands_that_the_program_makes_itself():
    """The partitioner then knows no mesh, even if one is set: initialized parameters, or a carry of zeros."""
    mesh = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)

    def made(epilog):
        a, b = jnp.arange(24.0).reshape(4, 6), jnp.ones((6, 8))
        return jaxmp.matmul(a, b, epilog=epilog)

    def step(x, w):
        return jaxmp.matmul(x, w)

    def in_loops(w):
        start = jax.lax.fori_loop(0, 2, lambda _, x: step(x, jnp.eye(6)), jnp.ones((4, 6)))
        start = jax.lax.while_loop(lambda x: x[0, 0] < 2, lambda x: step(x, 2 * jnp.eye(6)), start) - 1
        carry = jax.lax.scan(lambda x, _: (jax.checkpoint(step)(x, w), None), start, length=2)[0]
        return jnp.sum(jax.lax.cond(start[0, 0] > 0, lambda: step(carry, jnp.ones((6, 6))), lambda: carry))

    want = np.arange(24.0, dtype=np.float32).reshape(4, 6).sum(1, keepdims=True) * np.ones((1, 8), np.float32)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(lambda: made(Epilog.NONE))(), want)
        d, aux = jax.jit(lambda: made(Epilog.RELU_AUX))()
        np.testing.assert_array_equal(d, want)
        assert aux["relu_aux"].shape == (4, 16)
        gradient = jax.jit(lambda: jax.grad(in_loops)(jnp.eye(6)))()
    np.testing.assert_array_equal(gradient, np.full((6, 6), 48.0))


def test_a_result_whose_rows_the_ranks_do_not_divide(rng):
    """The partitioner pads such results itself; the call must not see the padding."""
    mesh = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    a, b = (rng.integers(-3, 4, s).astype(np.float32) for s in ((5, 4), (4, 7)))
    left, right = cases.put(a, mesh, P(None, "y")), cases.put(b, mesh, P("y", None))
    np.testing.assert_array_equal(jax.jit(jaxmp.matmul)(left, right), a @ b)


CUBLASMP = Capabilities()
HOSTMP = Capabilities(
    all_reduce_any_transposition=True,
    grid_any_shape=True,
    grid_epilogs=True,
    complex_epilogs=True,
    precise_gelu=True,
    as_documented=True,
)


def spec_of(case, **changes):
    row_axes, col_axes = (case.group, ()) if case.pattern != "grid" else ((case.group[0],), (case.group[1],))
    group = Group(Pattern(case.pattern), case.mesh, row_axes, col_axes)
    return MatmulSpec(np.dtype("float32"), group, **case.transpose, **changes)


def find_form(spec, a_shape, b_shape, capabilities):
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (a_shape, b_shape))
    return forms.choose(forms.RequestedCall(spec, a, b), capabilities)[0].name


@pytest.mark.parametrize("capabilities", [CUBLASMP.of_tiles(), HOSTMP], ids=["cublasmp", "hostmp"])
@pytest.mark.parametrize("epilog", [Epilog.DRELU, Epilog.DRELU_BGRAD, Epilog.DGELU, Epilog.DGELU_BGRAD])
def test_derivatives_of_one_product_are_padded_along_k(epilog, capabilities):
    for transposition in cases.TRANSPOSITIONS:
        case = cases.BY_NAME["local"].replace(transposition=transposition)
        spec = spec_of(case, epilog=epilog)
        a, b = with_k(spec, (8, 8), (8, 8), 1)
        assert find_form(spec, a, b, capabilities) == "padded_k"
        a, b = with_k(spec, a, b, PADDED_K)
        assert (a, b) == ((2, 8) if spec.transpose_a else (8, 2), (8, 2) if spec.transpose_b else (2, 8))
        assert find_form(spec, a, b, capabilities) == "direct"
    assert find_form(spec_of(cases.BY_NAME["rs"], epilog=epilog), (8, 1), (1, 8), capabilities) == "direct"
    grid = spec_of(cases.BY_NAME["grid"].replace(mesh=(("x", 1), ("y", 1))), epilog=epilog)
    assert find_form(grid, (8, 1), (1, 8), CUBLASMP) == "separate_epilog"
    assert find_form(grid, (8, 1), (1, 8), HOSTMP) == "padded_k"


@pytest.mark.parametrize(
    "changes", [{}, {"has_c": True, "beta": 1.0}, {"epilog": Epilog.BIAS}], ids=["plain", "c", "bias"]
)
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
def test_the_sum_of_one_rank_is_its_product(transposition, changes, monkeypatch):
    monkeypatch.setattr(backend, "capabilities_of", lambda library: CUBLASMP)
    spec = spec_of(cases.BY_NAME["ar"].replace(transposition=transposition, mesh=(("y", 1),)), **changes)
    a, b = (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2
    call = forms.in_library(forms.RequestedCall(spec, a, b), backend.Choice("cublasmp", ""), "cublasmp")
    assert isinstance(call, forms.Direct)
    assert not call.spec.contraction.communicates


F64, BF16, C64 = ({"out_dtype": np.dtype(name)} for name in ("float64", jnp.bfloat16, "complex64"))


@pytest.mark.parametrize(
    ("name", "changes", "form"),
    [
        ("ag", {"epilog": Epilog.RELU_AUX_BIAS}, "mask_of_result"),
        ("ag", {"epilog": Epilog.RELU_BIAS}, "direct"),
        ("local", {"epilog": Epilog.GELU}, "separate_epilog"),
        ("local", {"epilog": Epilog.GELU_AUX_BIAS} | BF16, "direct"),
        ("local", {"epilog": Epilog.DRELU_BGRAD} | F64, "direct"),
        ("ag", {"epilog": Epilog.DRELU_BGRAD} | F64, "separate_epilog"),
        ("rs", {"epilog": Epilog.BGRADA}, "separate_epilog"),
        ("ar", {"epilog": Epilog.BGRADA, "transpose_a": True}, "separate_epilog"),  # and copies no operand
        ("ar", {"epilog": Epilog.BGRADB}, "separate_epilog"),
        ("ag", {"epilog": Epilog.BGRADA} | BF16, "direct"),
        ("ag", {"epilog": Epilog.BGRADA, "out_dtype": np.dtype("float16")}, "separate_epilog"),
        ("rs", {"scales": ScaleModes(a=VEC128, b=VEC128)}, "xla"),
        ("ag", {"scales": ScaleModes(a=VEC128, b=VEC128)}, "direct"),
        ("grid", {"transpose_a": True}, "xla"),
        ("grid", {"transpose_b": True}, "direct"),
        ("ar", {"has_c": True, "beta": 2.0, "transpose_b": True}, "direct"),
        *((name, {"epilog": Epilog.BIAS, "transpose_b": True} | C64, "separate_epilog") for name in ("ag", "ar")),
        ("ar", {"transpose_b": True} | C64, "direct"),
    ],
)
def test_what_cublasmp_gets_wrong_is_computed_otherwise(name, changes, form, monkeypatch):
    """The faults of tests/conformance/cases.cc and similar calls that are right; hostmp has none of the faults."""
    spec = spec_of(cases.BY_NAME[name]).replace(**changes)
    product = forms.RequestedCall(spec, *(jax.ShapeDtypeStruct((256, 256), jnp.float32),) * 2)
    for library, capabilities, want in (("cublasmp", CUBLASMP, form), ("host", HOSTMP, "direct")):
        monkeypatch.setattr(backend, "capabilities_of", lambda library, found=capabilities: found)
        assert forms.in_library(product, backend.Choice(library, ""), library).name == want


def test_cublasmp_has_no_epilogs_of_complex_numbers():
    spec = spec_of(cases.BY_NAME["ag"], epilog=Epilog.BIAS, determinism="batch").replace(**C64)
    why = "cuBLASMp has no epilogs of complex numbers, and XLA's would not keep determinism='batch'"
    assert why_unsupported(spec, CUBLASMP) == why


@pytest.mark.small("values")
@pytest.mark.parametrize("conjugation", [(False, False), (True, True)], ids=["plain", "conjugated"])
@pytest.mark.parametrize("shape", [(2, 3, 2), (1, 1, 512)], ids=["copy", "scatter"])
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
@pytest.mark.parametrize("name", ["ar-data", "ar-two-axes", "grid"])
def test_every_form_gives_the_same_result(name, transposition, shape, conjugation, rng, monkeypatch):
    """Runs the forms that real cuBLASMp takes on hostmp; integers, so bitwise equal."""
    monkeypatch.setattr(backend, "capabilities_of", lambda library: CUBLASMP)
    m, n, k = shape
    case = cases.BY_NAME[name].replace(per_shard=(4 * m, n, k), transposition=transposition)
    case = case.replace(dtype="complex64", conjugation=conjugation) if any(conjugation) else case
    a, b = case.integers(rng)
    m, n, _ = case.extents
    c, bias = (rng.integers(-3, 4, s).astype(a.dtype) for s in ((m, n), (n,)))
    mode = modes.BY_ID["explicit"]
    jax.clear_caches()  # the form is chosen at lowering
    with mode.scope(case):
        f = mode.product(case, alpha=2.0, beta=-1.0, epilog=Epilog.BIAS)
        specs = (*case.stored, case.out, P(case.out[1]))
        d = mode.run(f, *(mode.put(case, x, s) for x, s in zip((a, b, c, bias), specs, strict=True)))
    jax.clear_caches()
    np.testing.assert_array_equal(np.asarray(d), 2 * np.matmul(*case.op(a, b)) - c + bias)


def test_processes_and_other_platforms_communicate_through_xla():
    spec = functools.partial(MatmulSpec, np.dtype("float32"))
    collective = spec(Group(Pattern.ALL_GATHER, (("y", 4),), ("y",)))
    unshared = "the ranks of a group live in 2 processes"
    choose = functools.partial(backend.choose_implementation, platform="cpu", unshared_reason=unshared)
    for chosen, implementation, why in (
        (choose(spec()), "host", "CPU devices of one process"),
        (choose(collective), "host+xla", "the ranks of a group live in 2 processes: each multiplies on its own"),
        (choose(collective, unshared_reason=""), "host", "CPU devices of one process"),
        (choose(collective, platform="rocm"), "xla", "no fused implementation for platform 'rocm'"),
    ):
        assert (chosen.implementation, chosen.why) == (implementation, why)
    with pytest.raises(
        NotImplementedError,
        match="the CPU devices of one process, not platform 'cpu' where the ranks of a group live in 2",
    ):
        choose(collective.replace(implementation="host"))
    with pytest.raises(NotImplementedError, match="\"cublasmp\" is not available on platform 'rocm', it serves CUDA"):
        choose(collective.replace(implementation="cublasmp"), platform="rocm")


def test_long_rows_are_multiplied_by_xla(mesh_of):
    """hostmp counts in 32 bits; this limits the extents that the ranks of a group have together, too."""
    mesh, long = mesh_of({"x": 4}), 2**31

    def layer(x, w, bias):
        return jaxmp.linear(x, w, bias, activation="gelu").sum()

    def explained(fn, *operands, specs=(None, None, None)):
        shardings = [spec if spec is None else NamedSharding(mesh, spec) for spec in specs]
        types = [jax.ShapeDtypeStruct(x, np.float32, sharding=s) for x, s in zip(operands, shardings, strict=False)]
        jax.jit(fn).lower(*types)
        return [(row.implementation, row.why.partition(",")[0]) for row in jaxmp.explain(fn, quiet=True)(*types).rows]

    xla = ("xla", "hostmp counts in 32 bits")
    assert explained(jaxmp.matmul, (2, long - 1), (long - 1, 2)) == [("host", "CPU devices of one process")]
    assert explained(jaxmp.matmul, (2, long), (long, 2)) == [xla]
    assert explained(functools.partial(jaxmp.matmul, transpose_a=True), (long, 2), (long, 2)) == [xla]
    assert explained(jaxmp.matmul, (2, 2), (2, long)) == [xla]
    assert explained(jaxmp.matmul, (2**16, 2**16, 2), (2, 2)) == [xla]
    assert explained(jax.grad(layer, (0, 1, 2)), (long, 2), (2, 2), (2,)) == [xla] * 3
    with jax.set_mesh(mesh):
        reduced = functools.partial(jaxmp.matmul, out_sharding=P("x", None))
        assert explained(reduced, (4, long), (long, 2), specs=(P(None, "x"), P("x", None))) == [xla]
        assert explained(jaxmp.matmul, (long, 2), (2, 2), specs=(P("x", None), P(None, None)))[0][0] == "host"
