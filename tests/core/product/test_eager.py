"""Eager calls are validated once: an equal second call is not validated again, and a different call is. Without these
tests, a call could return the result of an earlier call with other options, types, shardings or configuration; an
argument could pass because an equal one was validated before (1 == True, 0.0 == -0.0)."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import require_devices
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import CommOptions, Epilog, Scaling, testing
from jaxmp._src.core.sharding import eager_calls, sharded_call


@pytest.fixture(autouse=True)
def cold():
    eager_calls.kept.cache_clear()
    eager_calls.kept_traced.cache_clear()


@pytest.fixture
def operands(rng):
    """Small integers: any order of sums gives the same products."""
    return tuple(jnp.asarray(rng.integers(-4, 5, (8, 8)), jnp.float32) for _ in range(3))


def misses():
    return eager_calls.kept.cache_info().misses


def judged(monkeypatch):
    """Returns a list that grows by the name of each call that is validated from now on."""
    names = []
    monkeypatch.setattr(sharded_call, "validated", lambda name, *args: names.append(name) or validated(name, *args))
    return names


validated = sharded_call.validated


def test_a_call_like_an_earlier_one_is_not_judged_again(operands, monkeypatch):
    a, b, c = operands
    calls = judged(monkeypatch)
    for inputs in (types.MappingProxyType({"bias": b[0]}), {"bias": b[0]}) * 25:  # any mapping names inputs
        got = jaxmp.matmul(a, b, c, beta=2.0, epilog=Epilog.BIAS, epilog_inputs=inputs)
    info = eager_calls.kept.cache_info()
    assert len(calls) == misses() == info.currsize == 1
    assert info.maxsize == eager_calls.CAPACITY
    bias = {"epilog": Epilog.BIAS, "epilog_inputs": {"bias": b[0]}}
    other = jaxmp.matmul(b, a, c, beta=2.0, **bias)
    assert len(calls) == 1, "other values of one type are one kind"
    product = jax.jit(lambda a, b, c: jaxmp.matmul(a, b, c, beta=2.0, **bias))
    testing.assert_bitwise_equal(got, product(a, b, c))
    testing.assert_bitwise_equal(other, product(b, a, c))


def test_layers_of_a_traced_program_are_judged_once(operands, monkeypatch):
    a, b, c = operands
    calls = judged(monkeypatch)

    def layers(x, **options):
        for _ in range(3):
            x = jaxmp.matmul(x, b, c, beta=0.5, **options)
        return x

    got = jax.jit(layers)(a)
    assert len(calls) == 1
    assert misses() == 0, "traced calls leave those of eager ones alone"
    jax.jit(functools.partial(layers, determinism="batch"))(a)
    jax.vmap(layers, in_axes=0)(a[None])
    assert len(calls) == 2
    testing.assert_bitwise_equal(got, layers(a))


OPTIONS = {
    "plain": {},
    "alpha 1": {"alpha": 1},
    "alpha 2": {"alpha": 2.0},
    "alpha 0": {"alpha": 0.0},
    "alpha -0": {"alpha": -0.0},
    "transpose_a": {"transpose_a": True},
    "transpose_b": {"transpose_b": True},
    "relu": {"epilog": Epilog.RELU},
    "gelu with aux": {"epilog": Epilog.GELU_AUX},
    "xla": {"implementation": "xla"},
    "batch": {"determinism": "batch"},
    "bf16": {"precision": "BF16_BF16_F32"},
    "one multiprocessor": {"comm": CommOptions(sm_count=1)},
    "two multiprocessors": {"comm": CommOptions(sm_count=2)},
}


def test_options_are_not_mixed_up(operands):
    a, b, _ = operands
    calls = {name: functools.partial(jaxmp.matmul, **options) for name, options in OPTIONS.items()}
    want = jax.jit(lambda a, b: {name: f(a, b) for name, f in calls.items()})(a, b)
    for _ in range(2):
        for name, f in calls.items():
            jax.tree.map(functools.partial(testing.assert_bitwise_equal, err_msg=name), f(a, b), want[name])
        assert misses() == len(OPTIONS) - 1, "JAX keeps a call without options"


def test_types_are_not_mixed_up(operands, standard_promotion):
    a, b, _ = operands
    for _ in range(2):
        for x, y in ((a, b), (a.astype("bfloat16"), b), (a.astype("bfloat16"), b.astype("bfloat16")), (a[:4], b)):
            for options in ({}, {"alpha": 1.0}):
                d, want = jaxmp.matmul(x, y, **options), jax.jit(jaxmp.matmul)(x, y)
                testing.assert_bitwise_equal(d, want, f"{x.dtype} x {y.dtype}")
    assert misses() == 4
    with jax.numpy_dtype_promotion("strict"), pytest.raises(Exception, match="no available implicit dtype"):
        jaxmp.matmul(a.astype("bfloat16"), b)


def test_an_equal_option_of_another_type_is_judged(operands):
    a, b, c = operands
    jaxmp.matmul(a, b, alpha=1)
    with pytest.raises(TypeError, match="alpha must be a Python number or a scalar array, got bool"):
        jaxmp.matmul(a, b, alpha=True)
    jaxmp.matmul(a, b, comm=CommOptions(sm_count=1))
    with pytest.raises(TypeError, match=r"comm\.sm_count must be an integer, got bool"):
        jaxmp.matmul(a, b, comm=CommOptions(sm_count=True))
    for wrong in ((1,), [1], {"sm_count": 1}, 1):
        for _ in range(2):
            with pytest.raises(TypeError, match=r"comm must be a jaxmp\.CommOptions, got"):
                jaxmp.matmul(a, b, comm=wrong)
    jaxmp.matmul(a, b, c, beta=1.0)
    with pytest.raises(ValueError, match="got unknown"):
        jaxmp.matmul(a, b, c, beta=1.0, epilog_inputs={"c": c})
    with pytest.raises(ValueError, match=re.escape("beta=1.0 was given without c")):
        jaxmp.matmul(a, b, beta=1.0, epilog_inputs={"c": c})
    with pytest.raises(TypeError, match="epilog_inputs must be a dict"):
        jaxmp.matmul(a, b, epilog_inputs=[c])


@pytest.mark.parametrize(
    "alpha", [jnp.float32(2), np.float32(2), np.asarray(2, np.float32)], ids=["jax", "np", "array"]
)
def test_scalars_that_are_no_python_numbers_are_judged_each_time(operands, alpha, monkeypatch):
    a, b, _ = operands
    calls = judged(monkeypatch)
    for _ in range(2):
        testing.assert_bitwise_equal(jaxmp.matmul(a, b, alpha=alpha), jaxmp.matmul(a, b, alpha=2.0))
    assert len(calls) == 3


def test_a_call_that_names_its_line_is_judged_each_time(operands, monkeypatch):
    a, b, _ = operands
    monkeypatch.setattr(eager_calls.native, "has_barrier", True)
    calls = judged(monkeypatch)
    for _ in range(3):
        jaxmp.matmul(a, b)
    assert (len(calls), misses()) == (3, 0)


def test_calls_with_scales_are_judged_each_time(monkeypatch):
    """A group of options without arrays is validated each time, too."""
    a = b = jnp.ones((16, 16), jnp.float8_e4m3fn)
    product = functools.partial(jaxmp.matmul, a, b, transpose_b=True, preferred_element_type=jnp.float8_e4m3fn)
    calls = judged(monkeypatch)
    for _ in range(2):
        for scale, want in ((np.float32(2), 32.0), (jnp.float32(4), 64.0)):
            assert np.all(np.asarray(product(scaling=Scaling(a=scale)), np.float32) == want)
    assert (len(calls), misses()) == (4, 0)
    for _ in range(2):
        assert product(scaling=Scaling(result_amax=True))[1]["result_amax"] == 16
        assert isinstance(product(), jax.Array)
    assert (len(calls), misses()) == (6, 2)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_wide_types_follow_their_flag(operands):
    a, b, _ = operands
    wide = functools.partial(jaxmp.matmul, preferred_element_type="float64")
    for _ in range(2):
        assert wide(a, b).dtype == np.float32
        with jax.enable_x64(True):
            assert wide(a, b).dtype == np.float64


def test_the_mesh_around_a_call_counts(operands):
    """Uncommitted operands go to the mesh of `jax.set_mesh`; the cached decision is the same for each mesh."""
    require_devices(8)
    a, b, _ = operands
    want = jaxmp.matmul(a, b)
    for _ in range(2):
        for order in ([0, 1], [2, 3], [1, 0], [0, 1, 2, 3], [*range(8)]):
            devices = np.array(jax.devices())[order]
            with jax.set_mesh(Mesh(devices, ("x",), axis_types=(AxisType.Explicit,))):
                d = jaxmp.matmul(np.asarray(a), b, out_sharding=P("x", None))
                e = jaxmp.matmul(jax.device_put(a, P("x", None)), jax.device_put(b, P()), out_sharding=P("x", None))
            for x in (d, e):
                assert list(x.sharding.mesh.devices.flat) == [*devices]
                np.testing.assert_array_equal(x, want)
        with pytest.raises(ValueError, match="needs a mesh"):
            jaxmp.matmul(a, b, out_sharding=P("x", None))


def test_shardings_are_not_mixed_up(operands):
    require_devices(4)
    a, b, _ = operands
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    for _ in range(2):
        for out in (P("x", None), P(None, None)):
            for ins in ((P(None, "x"), P("x", None)), [P(None, "x"), P("x", None)]):  # a list has no hash
                d = jaxmp.matmul(a, b, in_shardings=ins, out_sharding=out, mesh=mesh)
                assert d.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
    assert misses() == 2


def test_programs_are_those_of_a_cold_call(operands):
    """Tracers are never looked up in the cache, and arrays that a program closes over do not change it."""
    a, b, c = operands

    def programs():
        matmul = functools.partial(jaxmp.matmul, beta=0.5)
        yield jax.make_jaxpr(matmul)(a, b, c)
        yield jax.make_jaxpr(lambda c: matmul(a, b, c))(c)
        yield jax.make_jaxpr(lambda c: c + matmul(a, b, b))(c)
        yield jax.make_jaxpr(jax.grad(lambda a: matmul(a, b, c).sum()))(a)
        yield jax.make_jaxpr(jax.vmap(matmul, (0, None, 0)))(*(x[None] if x is not b else x for x in operands))

    cold = list(map(str, programs()))
    jaxmp.matmul(*operands, beta=0.5)
    jaxmp.matmul(a, b, b, beta=0.5)
    jax.clear_caches()
    for _ in range(2):
        jaxmp.matmul(a, b, b, beta=0.5)
    assert list(map(str, programs())) == cold


CONTRACTIONS = {
    "rows by vector": lambda a, b, **options: jaxmp.matmul(a, b[0], **options),
    "batches": lambda a, b, **options: jaxmp.matmul(a.reshape(2, 4, 8), b.reshape(2, 8, 4), **options),
    "einsum": functools.partial(jaxmp.einsum, "ij,jk->ki"),
    "other subscripts": functools.partial(jaxmp.einsum, "ij,kj->ik"),
    "three operands": lambda a, b, **options: jaxmp.einsum("ij,jk,kl", a, b, a, **options),
    "dot_general": lambda a, b, **options: jaxmp.dot_general(a, b, (((1,), (0,)), ((), ())), **options),
    "other dimensions": lambda a, b, **options: jaxmp.dot_general(a, b, (((0,), (1,)), ((), ())), **options),
}


def test_contractions_are_kept_and_not_mixed_up(operands, monkeypatch):
    a, b, _ = operands
    every = ({}, {"determinism": "batch"}, {"implementation": "xla"}, {"precision": "BF16_BF16_F32"})
    calls = [functools.partial(f, **options) for options in every for f in CONTRACTIONS.values()]
    program = jax.jit(lambda a, b: [f(a, b) for f in calls])
    for f, want in zip(calls, program(a, b), strict=True):
        testing.assert_bitwise_equal(f(a, b), want)
    kinds = len(calls) - 2  # two matmuls have no options: JAX keeps those
    assert misses() == kinds
    monkeypatch.setattr(sharded_call.meshes, "place", None)  # nothing is planned again
    again = [f(b, a) for f in calls]
    monkeypatch.undo()
    assert misses() == kinds
    for got, want in zip(again, program(b, a), strict=True):
        testing.assert_bitwise_equal(got, want)


def test_contractions_under_a_mesh_are_judged_each_time(operands):
    require_devices(2)
    a, b, _ = operands
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    for _ in range(2):
        with jax.set_mesh(mesh):
            d = jaxmp.einsum("ij,jk->ik", jax.device_put(a, P("x", None)), jax.device_put(b, P()))
            assert d.sharding == NamedSharding(mesh, P("x", None))
            assert len(jaxmp.einsum("ij,jk->ik", a, b).sharding.device_set) == 2
    np.testing.assert_array_equal(d, jaxmp.einsum("ij,jk->ik", a, b))
    assert misses() == 1


def test_an_error_is_raised_again(operands):
    a, b, _ = operands
    for _ in range(2):
        with pytest.raises(ValueError, match="b has k=4 but a has k=8"):
            jaxmp.matmul(a, b[:4])
        with pytest.raises(ValueError, match=re.escape("subscripts 'ij,jk->iz' are not valid")):
            jaxmp.einsum("ij,jk->iz", a, b)
        with pytest.raises(ValueError, match="determinism must be one of"):
            jaxmp.dot_general(a, b, (((1,), (0,)), ((), ())), determinism="typo")
