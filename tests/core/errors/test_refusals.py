"""jaxmp's refusals begin with the function that the user called, even if they appear after the call."""

import functools
import pickle

import jax
import jax.numpy as jnp
import pytest
from conftest import require_devices
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.core.spec import refusal
from jaxmp._src.platform.jax_internals.jax_compat import ShardingTypeError, TypePromotionError

A = jnp.ones((4, 4))
GPU = {"implementation": "cublasmp"}  # refused when a program for CPUs is lowered
CALLS = {
    "matmul": lambda x: jaxmp.matmul(x, A, **GPU),
    "linear": lambda x: jaxmp.linear(x, A, activation="silu", **GPU),
    "dot_general": lambda x: jaxmp.dot_general(x, A, (((1,), (0,)), ((), ())), **GPU),
    "einsum": lambda x: jaxmp.einsum("ij,jk->ki", x, A, **GPU),
    "mlp (x @ w_in)": lambda x: jaxmp.mlp(x, A, None, A, None, activation="relu", **GPU),
    "gated_mlp (x @ w_gate)": lambda x: jaxmp.gated_mlp(x, A, A, A, **GPU),
}


def on_shards(name, x):
    require_devices(2)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    product = getattr(jaxmp, name)
    return jax.shard_map(lambda x: product(x, A, "x", **GPU), mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)


ON_SHARDS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
CALLS |= {name: functools.partial(on_shards, name) for name in ON_SHARDS}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused_at_lowering_names_the_function(name, jit):
    with pytest.raises(NotImplementedError) as caught:
        jit(CALLS[name])(A)
    assert str(caught.value).startswith(f'{name}: implementation="cublasmp" is not available on platform')


def test_what_a_gradient_refuses_names_the_function():
    sums = {"transpose_a": True, "epilog": jaxmp.Epilog.BGRADA, "determinism": "topology"}
    with pytest.raises(NotImplementedError, match=r'^matmul: determinism="topology" has no epilog BGRADA under vmap'):
        jax.jit(jax.vmap(lambda x: jaxmp.matmul(x, A, **sums)))(jnp.ones((2, 4, 4)))


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (refusal.InvalidValue, ValueError),
        (refusal.InvalidOperands, TypeError),
        (refusal.InvalidSharding, ShardingTypeError),
        (refusal.NoPrecision, ValueError),
        (refusal.InvalidType, TypeError),
        (refusal.NoKernel, TypeError),
        (refusal.NoPromotion, TypePromotionError),
        (refusal.NotAvailable, NotImplementedError),
        (refusal.NotInstalled, RuntimeError),
    ],
)
def test_a_refusal_is_an_error_that_users_know(kind, shown):
    error = kind("{b} is not {a}").of("linear", {"a": "x"})
    assert isinstance(error, refusal.Refusal)
    assert isinstance(error, shown)
    assert repr(kind("no")) == repr(shown("no"))
    assert str(error.of("matmul", {"a": "z", "b": "w"})) == "linear: w is not x", "what is known from inside stays"
    assert repr(pickle.loads(pickle.dumps(error))) == repr(shown("linear: w is not x"))
