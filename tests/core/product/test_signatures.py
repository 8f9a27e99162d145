"""Promises of the public functions' types beyond tests/typing."""

import importlib
import inspect
import typing

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp._src.core.spec import activations, options, request
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.low_precision import Scaling
from jaxmp._src.core.validation.comm_options import ALGORITHMS


@pytest.mark.parametrize("epilog", [epilog for epilog in Epilog if epilog != Epilog.ALLREDUCE], ids=lambda x: x.name)
def test_overloads_know_what_each_epilog_returns(epilog):
    returns_more = bool(jaxmp._src.core.spec.epilogs.RULES[epilog].outputs)
    assert (epilog in typing.get_args(request.AuxEpilog)) == returns_more
    assert (epilog in typing.get_args(request.PlainEpilog)) != returns_more


def test_literals_are_what_the_checks_take():
    assert typing.get_args(options.Algorithm) == tuple(ALGORITHMS)
    assert typing.get_args(options.ActivationName) == tuple(activations.FUNCTIONS)


@pytest.mark.parametrize("name", [name for name in jaxmp.__all__ if inspect.isfunction(getattr(jaxmp, name))])
def test_every_annotation_can_be_resolved(name):
    """Tools that read types at run time need this."""
    function = getattr(jaxmp, name)
    assert typing.get_type_hints(function).keys() >= {"return"}
    assert importlib.import_module(function.__module__)


def test_groups_of_options_are_values():
    """CommOptions is hashable and a cache key; Scaling is a pytree with static flags."""
    comm = jaxmp.CommOptions(dtype="float32", algorithm="fused", sm_count=4)
    assert {comm: 1}[jaxmp.CommOptions(dtype="float32", algorithm="fused", sm_count=4)] == 1
    scaling = Scaling(a=jnp.float32(2), result_amax=True, aux_dtype=jnp.float8_e4m3fn, aux_amax=True)
    leaves, tree = jax.tree.flatten(scaling)
    assert len(leaves) == 1
    doubled = jax.jit(lambda scaling: jax.tree.map(lambda x: 2 * x, scaling))(scaling)
    assert (doubled.a, doubled.b, doubled.result_amax, doubled.aux_amax) == (4, None, True, True)
    assert tree != jax.tree.structure(Scaling(a=jnp.float32(2)))
