"""The public functions name the same options, in one order, with one default and one type each.

Silently wrong without these: an option that one function does not pass on, and another default in one place.
tests/typing has the overloads.
"""

import importlib
import inspect
import typing

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp._src.spec import activations, options, request
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.low_precision import Scaling
from jaxmp._src.validation.comm_options import ALGORITHMS

IN_SHARD_MAP = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "block_matmul"]
PLACEMENT = {"out_sharding", "in_shardings", "mesh"}
NO_OPTIONS = {"function", "a", "b", "c", "epilog_inputs", "takes_transposed", "b_leads"}
SPEC_OPTIONS = [name for name in request.Request._fields if name not in NO_OPTIONS | PLACEMENT]
# What a function leaves out of matmul's options, what it has beside them, and what has another type there.
DIFFERENCES = {
    **{name: (PLACEMENT, set(), set()) for name in IN_SHARD_MAP},
    "linear": ({"beta", "epilog", "epilog_inputs"}, {"activation"}, {"out_sharding"}),
    **dict.fromkeys(
        ("mlp", "gated_mlp"),
        (
            set(SPEC_OPTIONS) - {"precision", "implementation", "determinism"} | {"epilog_inputs"},
            {"activation", "axis_name", "hidden_sharding"},
            {"out_sharding", "in_shardings"},
        ),
    ),
    "einsum": (
        set(SPEC_OPTIONS) - {"precision", "preferred_element_type", "implementation", "determinism"}
        | {"epilog_inputs"},
        {"optimize"},
        {"out_sharding", "determinism"},
    ),
}


def options_of(name):
    """Keyword-only parameters, in order."""
    parameters = inspect.signature(getattr(jaxmp, name)).parameters
    return {key: x for key, x in parameters.items() if x.kind == x.KEYWORD_ONLY}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_options_are_those_of_matmul(name):
    missing, own, of_another_type = DIFFERENCES[name]
    want, have = options_of("matmul"), options_of(name)
    assert list(want) == [*dict.fromkeys(want)]
    assert own <= have.keys()
    assert [key for key in have if key not in own] == [key for key in want if key not in missing]
    for key in have.keys() - own - of_another_type:
        assert (have[key].default, have[key].annotation) == (want[key].default, want[key].annotation), key


def test_matmul_passes_every_option_on():
    assert {*SPEC_OPTIONS, *PLACEMENT, "epilog_inputs"} == options_of("matmul").keys()


@pytest.mark.parametrize("epilog", [epilog for epilog in Epilog if epilog != Epilog.ALLREDUCE], ids=lambda x: x.name)
def test_overloads_know_what_each_epilog_returns(epilog):
    returns_more = bool(jaxmp._src.spec.epilogs.RULES[epilog].outputs)
    assert (epilog in typing.get_args(request.AuxEpilog)) == returns_more
    assert (epilog in typing.get_args(request.PlainEpilog)) != returns_more


def test_literals_are_what_the_checks_take():
    assert typing.get_args(options.Algorithm) == tuple(ALGORITHMS)
    assert typing.get_args(options.ActivationName) == tuple(activations.FUNCTIONS)


@pytest.mark.parametrize("name", [name for name in jaxmp.__all__ if inspect.isfunction(getattr(jaxmp, name))])
def test_every_annotation_can_be_resolved(name):
    """By tools that read types at run time."""
    function = getattr(jaxmp, name)
    assert typing.get_type_hints(function).keys() >= {"return"}
    assert importlib.import_module(function.__module__)


def test_groups_of_options_are_values():
    """A group is a key of caches, or a pytree whose flags are static."""
    comm = jaxmp.CommOptions(dtype="float32", algorithm="fused", sm_count=4)
    assert {comm: 1}[jaxmp.CommOptions(dtype="float32", algorithm="fused", sm_count=4)] == 1
    scaling = Scaling(a=jnp.float32(2), result_amax=True, aux_dtype=jnp.float8_e4m3fn, aux_amax=True)
    leaves, tree = jax.tree.flatten(scaling)
    assert len(leaves) == 1
    doubled = jax.jit(lambda scaling: jax.tree.map(lambda x: 2 * x, scaling))(scaling)
    assert (doubled.a, doubled.b, doubled.result_amax, doubled.aux_amax) == (4, None, True, True)
    assert tree != jax.tree.structure(Scaling(a=jnp.float32(2)))
