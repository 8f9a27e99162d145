"""Activations that no epilog has: XLA applies them to the unrounded product, and the result is rounded once.

With z the product and its bias in the accumulator's type, d = act(z) rounded once. The derivative is taken at z rounded
to d's type, as for a fused gelu. So products of tangents and cotangents have d's type, and reverse mode keeps only that
z of the activation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxmp._src.core.sharding import meshes
from jaxmp._src.core.sharding.sharded_call import Call, jaxmp_call
from jaxmp._src.core.spec import activations
from jaxmp._src.core.spec.activations import Function
from jaxmp._src.core.spec.matmul_spec import INTEGERS, RESULT_TYPES, MatmulSpec, accumulator
from jaxmp._src.core.spec.refusal import InvalidValue, NotAvailable
from jaxmp._src.core.validation.comm_options import fit_comm_options
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import Operands

# Computes products of one shape, with their biases, in a given type, from the operands by name.
Products = Callable[[np.dtype, Operands], Sequence[jax.Array]]
# The products in d's type, and in the accumulator's type if that is another.
Preactivations = tuple[list[jax.Array], list[jax.Array]]


def of_vector(layer: Callable[..., Any], x: Any, *operands: Any, **options: Any) -> jax.Array:
    """Returns `layer(x[None], *operands, **options)[0]` for a vector `x`. `out_sharding`, `hidden_sharding` and x's
    entry of `in_shardings` in `options` get an entry for the new dimension."""
    names = {"hidden_sharding", "out_sharding", "in_shardings"}.intersection(options)
    rows = layer(x[None], *operands, **options | {name: meshes.of_one_row(options[name]) for name in names})
    return rows[0]


def check_spec(spec: MatmulSpec) -> None:
    """Raises NotImplementedError for products after which XLA cannot apply an activation: with `determinism` "batch" or
    "topology", a result of integers or of 8 bits and fewer, or float8 or float4 with a bias of float16."""
    if spec.fixed_reduction_order:
        raise NotAvailable(
            f'with {spec.level} activation is "relu" or "gelu", which the library computes; take one of them, or apply '
            "another to the result, where its bits are XLA's"
        )
    out, bias = (np.dtype(dtype).name for dtype in (spec.out_dtype, spec.bias_dtype or spec.out_dtype))
    refuse_integers(spec)
    is_narrow_bias = spec.bias_dtype is not None and spec.rule.has_bias and bias == "float16"
    if out not in RESULT_TYPES or is_narrow_bias:
        raise NotAvailable(
            f'with operands of 8 bits and a result of {out} activation is "relu" or "gelu"; take a result of '
            "bfloat16 or float32, or apply another to the result"
        )


def refuse_integers(spec: MatmulSpec) -> None:
    """Raises NotImplementedError for a result of integers, which would truncate the activation."""
    out = np.dtype(spec.out_dtype).name
    if out in INTEGERS:
        raise NotAvailable(
            f'with a result of {out} activation is "relu" or None, because other activations give fractions; '
            "convert an operand, for example with .astype(jnp.float32)"
        )


def activated_call(call: Call, f: Function, operands: Operands) -> jax.Array:
    """Computes a planned call of `operands` and returns f(d) in the type of d; `f` gets the unrounded d."""
    return compiled(jaxmp_activated, f)(call, f, operands)


def compiled(run: Any, f: Function | None) -> Any:
    """Returns the jitted function `run`, or the function that `run` wraps, not jitted, if `f` is a user's own function.
    Such a function may close over what is being traced, which no cache of compiled programs may keep."""
    return run if activations.is_named(f) else run.__wrapped__


@functools.partial(jax.jit, static_argnums=(0, 1))
def jaxmp_activated(call: Call, f: Function, operands: Operands) -> jax.Array:
    def products(dtype: np.dtype, operands: Operands) -> list[jax.Array]:
        spec, operands = in_type(call.spec, operands, dtype)
        return [jaxmp_call(dataclasses.replace(call, spec=spec), operands)["d"]]

    return activate(f, preactivations(products, call.spec.out_dtype, operands))


def in_type(spec: MatmulSpec, operands: Operands, dtype: np.dtype) -> tuple[MatmulSpec, Operands]:
    """Returns the spec and operands of a product that has the result type `dtype` instead. A bias is converted too,
    unless the spec has a `bias_dtype`. Options in `comm` that do not fit the type are dropped (`fit_comm_options`)."""
    if spec.bias_dtype is None and "bias" in operands:
        operands = operands | {"bias": operands["bias"].astype(dtype)}
    return fit_comm_options(spec.replace(out_dtype=np.dtype(dtype))), operands


def preactivations(products: Products, dtype: np.dtype, operands: Operands) -> Preactivations:
    """Returns (products in `dtype`, products in the accumulator's type), as `activate` takes them, by `products(dtype,
    operands)`. The second list is empty if both types are the same. Only the first has derivatives."""
    if accumulator(dtype) == dtype:
        return list(products(dtype, operands)), []
    return _rounded_and_wide(products, dtype, operands)


def activate(f: Function | None, zs: Preactivations) -> jax.Array:
    """Returns `f` (None: the identity) of the first product in `zs`, a result of `preactivations`, times the second if
    there is one, in the type of the rounded products: both are taken in the accumulator's type, and the result is
    rounded. The derivative is taken at the rounded products; reverse mode keeps them, and reruns f. Raises ValueError
    if the result of f has another shape."""
    rounded, wide = zs
    dtype = rounded[0].dtype

    def apply(*zs: jax.Array) -> jax.Array:
        z, *factors = (z.astype(accumulator(dtype)) for z in zs)
        d = z if f is None else f(z)
        if jnp.shape(d) != z.shape:
            raise InvalidValue(f"activation must be elementwise, but {f} makes shape {jnp.shape(d)} of {z.shape}")
        return functools.reduce(jnp.multiply, factors, d).astype(dtype)

    d: jax.Array = jax.checkpoint(apply)(*rounded)
    if not wide:
        return d
    return _with_tangent(lax.stop_gradient(apply(*map(lax.stop_gradient, wide))), d)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _rounded_and_wide(products: Products, dtype: np.dtype, operands: Operands) -> Preactivations:
    wide = list(products(accumulator(dtype), operands))
    return [z.astype(dtype) for z in wide], wide


@jax_compat.as_traced
def _rounded_and_wide_jvp_rule(
    products: Products, dtype: np.dtype, primals: tuple[Operands], tangents: tuple[dict[str, Any]]
) -> tuple[Any, Any]:
    """Differentiates the rounded products, by products of their type; the wide ones have zero tangents."""
    operands, moved = primals[0], {k: t for k, t in tangents[0].items() if not isinstance(t, SymbolicZero)}
    rounded, wide = _rounded_and_wide(products, dtype, operands)
    varied = {name: operands[name] for name in moved}
    _, t = jax.jvp(lambda varied: list(products(dtype, operands | varied)), (varied,), (moved,))
    return (rounded, wide), (t, [jnp.zeros_like(z) for z in wide])


_rounded_and_wide.defjvp(_rounded_and_wide_jvp_rule, symbolic_zeros=True)


@jax.custom_jvp
def _with_tangent(value: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `value`, with the derivatives of `like`."""
    return value


@_with_tangent.defjvp
def _with_tangent_jvp_rule(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _with_tangent(*primals), tangents[1]
