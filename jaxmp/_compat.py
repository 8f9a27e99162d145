"""The only user of `jax._src` and of JAX version tests."""

from __future__ import annotations

import functools

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src.interpreters import partial_eval as _pe
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

MINIMUM_JAX = (0, 10, 2)

if jax.__version_info__ < MINIMUM_JAX:
    raise ImportError(
        f"jaxmp needs jax {'.'.join(map(str, MINIMUM_JAX))} or later, found {jax.__version__}; run `pip install -U jax`"
    )


def make_primitive(name: str, *, multiple_results: bool, needs_devices: bool = False) -> Primitive:
    """A primitive whose eager evaluation compiles it; `needs_devices` where its lowering asks for them."""
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    if needs_devices:
        _dispatch.prim_requires_devices_during_lowering.add(primitive)
    return primitive


def varying_axes(x) -> frozenset[str]:
    """Manual axes over which `x` varies; empty under check_vma=False and outside shard_map."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def with_shape(aval, shape, dtype, varying):
    """`aval` with another shape, dtype and set of varying axes; the rank stays."""
    vma = aval.manual_axis_type.update(varying=frozenset(varying))
    return aval.update(shape=tuple(shape), dtype=dtype, manual_axis_type=vma, weak_type=False)


def is_vma_checked() -> bool:
    """Whether the enclosing shard_map runs with check_vma=True."""
    return bool(_config._check_vma.value)


def subjaxprs(params: dict):
    """Every jaxpr among an equation's parameters."""
    return _core.jaxprs_in_params(params)


def without_dead_code(jaxpr):
    """`jaxpr` less the equations that no output needs, in itself and in what it calls."""
    return _pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def is_concrete(x) -> bool:
    """Whether `x` is a value rather than a tracer."""
    return not isinstance(x, _core.Tracer)


__all__ = [
    "Primitive",
    "batching",
    "is_concrete",
    "is_vma_checked",
    "make_primitive",
    "mlir",
    "subjaxprs",
    "varying_axes",
    "with_shape",
    "without_dead_code",
]
