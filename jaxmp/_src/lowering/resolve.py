"""One resolved call: what a product is, who computes it, in which form, and why.

`resolve` decides all of it, once and before anything is lowered, from the spec, the shards' types and the platform.
`rules` emits what it says, and `explain` prints it.
"""

from __future__ import annotations

import logging

import jax

from jaxmp._src.lowering import backend
from jaxmp._src.lowering.backend import Choice
from jaxmp._src.lowering.forms import Gathered, Product, ResolvedCall, Xla, in_form, in_library
from jaxmp._src.lowering.legalize import asked_of_library, takes_mixed
from jaxmp._src.runtime import logs
from jaxmp._src.runtime.types import ArrayType
from jaxmp._src.spec import low_precision
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import MatmulSpec
from jaxmp._src.spec.refusal import NotAvailable


def resolve(spec: MatmulSpec, a: ArrayType, b: ArrayType, platform: str, apart: str) -> ResolvedCall:
    """The call for shards like `a` and `b`; `apart` says why the ranks of its group share no call, or "".

    Raises as `backend.choose_implementation`, and NotImplementedError for what the form cannot keep.
    """
    call = resolve_chosen(spec, a, b, backend.choose_implementation(spec, platform, apart, (a.dtype, b.dtype)))
    if logs.logger("backend").isEnabledFor(logging.DEBUG):
        _log(call)
    return call


def _log(call: ResolvedCall) -> None:
    shards = f"{call.a.dtype.name}{list(call.a.shape)} x {call.b.dtype.name}{list(call.b.shape)}"
    form = f"; {call.form.name}" + (f" ({call.form_why})" if call.form_why else "")
    logs.logger("backend").debug(
        "%s of shards %s: %s, %s%s", call.spec.group.pattern, shards, call.implementation, call.why, form
    )


def resolve_chosen(spec: MatmulSpec, a: ArrayType, b: ArrayType, choice: Choice) -> ResolvedCall:
    """As `resolve`, for the implementation that was chosen."""
    implementation = choice.implementation
    types, wide = (a.dtype, b.dtype), low_precision.operand_type(a.dtype, b.dtype)
    if low_precision.is_mixed(*types) and not takes_mixed(spec, wide, implementation):
        types = wide, wide
    product = Product(spec, *map(jax.ShapeDtypeStruct, (a.shape, b.shape), types))
    extents = *a.shape, *b.shape
    if not all(isinstance(extent, int) for extent in extents):
        return _of_any_extent(product, choice)
    if implementation == "cublasmp":
        product = product._replace(spec=spec.replace(implementation="cublasmp"))
    if implementation == "cublasmp" and not spec.fixed_reduction_order and 0 in extents:
        return in_form(Xla, "nothing to multiply, so XLA writes d", product, choice)
    if implementation in ("host", "cublasmp"):
        return in_library(product, choice, implementation)
    if spec.fixed_reduction_order:
        why = "ranks share no call, and the order of XLA's sums is its own"
        return in_form(Gathered, why, product, choice, "host")
    if implementation == "host+xla":
        return in_form(Xla, "hostmp multiplies what a device has gathered", product, choice, "host")
    return in_form(Xla, "", product, choice)


def _of_any_extent(product: Product, choice: Choice) -> ResolvedCall:
    """XLA's own product of operands with symbolic extents, which a custom call does not take."""
    spec, a, b = product
    if asked := asked_of_library(spec):
        raise NotAvailable(
            f"{asked} takes numbers for extents, got operands of {a.shape} and {b.shape}; export for numbers, "
            "or leave it out to have XLA multiply"
        )
    if spec.implementation != "xla":
        choice = Choice("xla", "extents are symbolic, and a custom call takes numbers")
    return in_form(Xla, "", product, choice)


def resolve_activation_grad(spec: MatmulSpec, t: ArrayType, platform: str) -> ResolvedCall:
    """The product by an activation's derivative, of `t` as the C of a product over nothing: -0 * 0 is -0, and -0 + t is
    t, also for t = -0."""
    choice = backend.choose_implementation(spec, platform, "", (t.dtype, t.dtype))
    library = choice.implementation if choice.implementation == "cublasmp" else "host"
    spec = spec.replace(implementation=choice.implementation, epilog=Epilog.DGELU, alpha=-0.0, beta=1.0, has_c=True)
    a, b = jax.ShapeDtypeStruct((t.shape[0], 0), t.dtype), jax.ShapeDtypeStruct((0, t.shape[1]), t.dtype)
    return in_library(Product(spec, a, b), choice, library)
