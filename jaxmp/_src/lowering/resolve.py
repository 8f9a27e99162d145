"""One resolved call: what a product is, who computes it, in which form, and why.

`resolve` decides all of it, once and before anything is lowered, from the spec, the shards' types and the platform.
`rules` emits what it says, and `explain` prints it.
"""

from __future__ import annotations

import dataclasses

import jax

from jaxmp._src.lowering import backend
from jaxmp._src.lowering.backend import Choice
from jaxmp._src.lowering.legalize import (
    PADDED_K,
    Form,
    find_form,
    takes_mixed,
    transposed_reduce_scatter,
    whole_shapes,
    why_too_long,
    with_k,
    without_conjugation,
)
from jaxmp._src.primitive import bias_grad
from jaxmp._src.runtime import logs
from jaxmp._src.runtime.types import ArrayType, Shape
from jaxmp._src.spec import low_precision
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import MatmulSpec, Pattern, ScaleModes, accumulator, axes_text, extents
from jaxmp._src.spec.refusal import NotAvailable
from jaxmp._src.validation.comm_options import fit_comm_options
from jaxmp._src.validation.operand_checks import check_gathered_scales


@dataclasses.dataclass(frozen=True)
class ResolvedCall:
    """One product on one platform, hashable.

    `spec` is the product in this form, for shards converted to the types `a` and `b`; `is_conjugated` says which of the
    two are conjugated ahead of it. `implementation` is "host", "cublasmp", "host+xla" or "xla", chosen because of
    `why`; `library` makes the calls ("host", "cublasmp", or "" for XLA). `form` is taken because of `form_why`. `inner`
    is the call that the form contains, where it is not the library's call itself.
    """

    spec: MatmulSpec
    a: jax.ShapeDtypeStruct
    b: jax.ShapeDtypeStruct
    implementation: str
    why: str
    library: str
    form: Form
    form_why: str = ""
    is_conjugated: tuple[bool, bool] = (False, False)
    inner: ResolvedCall | None = None


def resolve(spec: MatmulSpec, a: ArrayType, b: ArrayType, platform: str, nprocesses: int) -> ResolvedCall:
    """The call for shards like `a` and `b`; the ranks of its group spread over `nprocesses` processes.

    Raises as `backend.choose_implementation`, and NotImplementedError for what the form cannot keep.
    """
    call = resolve_chosen(spec, a, b, backend.choose_implementation(spec, platform, nprocesses, (a.dtype, b.dtype)))
    if logs.is_on("backend"):
        _log(call)
    return call


def _log(call: ResolvedCall) -> None:
    shards = f"{call.a.dtype.name}{list(call.a.shape)} x {call.b.dtype.name}{list(call.b.shape)}"
    form = f"; {call.form}" + (f" ({call.form_why})" if call.form_why else "")
    logs.logger("backend").debug(
        "%s of shards %s: %s, %s%s", call.spec.group.pattern, shards, call.implementation, call.why, form
    )


def resolve_chosen(spec: MatmulSpec, a: ArrayType, b: ArrayType, choice: Choice) -> ResolvedCall:
    """As `resolve`, for the implementation that was chosen."""
    a, b = _types(a.shape, b.shape, a, b)
    implementation = choice.implementation
    wide = low_precision.operand_type(a.dtype, b.dtype)
    if low_precision.is_mixed(a.dtype, b.dtype) and not takes_mixed(spec, wide, implementation):
        a, b = (jax.ShapeDtypeStruct(x.shape, wide) for x in (a, b))
    if not all(isinstance(extent, int) for extent in (*a.shape, *b.shape)):
        return _of_any_extent(spec, a, b, choice)
    if implementation == "cublasmp":
        spec = spec.replace(implementation="cublasmp")
    if implementation == "cublasmp" and not spec.fixed_reduction_order and 0 in (*a.shape, *b.shape):
        return _xla(spec, a, b, choice, "nothing to multiply, so XLA writes d")
    if implementation in ("host", "cublasmp"):
        return _in_library(spec, a, b, choice, implementation)
    if spec.fixed_reduction_order:
        return _gathered(spec, a, b, choice, "host", "ranks share no call, and the order of XLA's sums is its own")
    if implementation == "host+xla":
        return _xla(spec, a, b, choice, "hostmp multiplies what a device has gathered", "host")
    return _xla(spec, a, b, choice)


def _types(
    a_shape: Shape, b_shape: Shape, a: ArrayType, b: ArrayType
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct(a_shape, a.dtype), jax.ShapeDtypeStruct(b_shape, b.dtype)


def _xla(
    spec: MatmulSpec, a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct, choice: Choice, why: str = "", library: str = ""
) -> ResolvedCall:
    return ResolvedCall(spec, a, b, choice.implementation, choice.why, library, Form.XLA, why)


def _of_any_extent(spec: MatmulSpec, a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct, choice: Choice) -> ResolvedCall:
    """XLA's own product of operands with symbolic extents, which a custom call does not take."""
    if asked := _asked_of_library(spec):
        raise NotAvailable(
            f"{asked} takes numbers for extents, got operands of {a.shape} and {b.shape}; export for numbers, "
            "or leave it out to have XLA multiply"
        )
    if spec.implementation == "xla":
        return _xla(spec, a, b, choice)
    return _xla(spec, a, b, Choice("xla", "extents are symbolic, and a custom call takes numbers"))


def _asked_of_library(spec: MatmulSpec) -> str:
    """The option that asks for a library's product, or the empty string."""
    if spec.implementation in ("host", "cublasmp"):
        return f"implementation={spec.implementation!r}"
    return f"determinism={spec.determinism!r}" if spec.fixed_reduction_order else ""


def _of_long_rows(spec: MatmulSpec, a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct, why: str) -> ResolvedCall:
    """XLA's own product of operands that are too long for hostmp."""
    if asked := _asked_of_library(spec):
        raise NotAvailable(
            f"{asked} is not available here: {why}; shard the operands further, or leave it out to have XLA multiply"
        )
    return _xla(spec, a, b, Choice("xla", why))


def _in_library(
    spec: MatmulSpec, a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct, choice: Choice, library: str
) -> ResolvedCall:
    """The call in the form that the library takes."""
    if library == "host" and (why := why_too_long(spec, a.shape, b.shape)):
        return _of_long_rows(spec, a, b, why)
    if spec.rule.gradient and 0 in extents(spec, a.shape, b.shape).d:
        return _xla(spec, a, b, choice, "nothing to multiply, but sums to be written")
    asked = spec
    if spec.conjugate_a or spec.conjugate_b:
        spec = without_conjugation(spec)
    is_conjugated = asked.conjugate_a != spec.conjugate_a, asked.conjugate_b != spec.conjugate_b
    capabilities = backend.capabilities_of(library)
    form, why = find_form(spec, a.shape, b.shape, a.dtype.itemsize, capabilities)
    if form == Form.GATHERED:
        return dataclasses.replace(_gathered(spec, a, b, choice, library, why), is_conjugated=is_conjugated)

    def inner(spec: MatmulSpec, a: jax.ShapeDtypeStruct = a, b: jax.ShapeDtypeStruct = b) -> ResolvedCall:
        return _in_library(spec, a, b, choice, library)

    found = None
    if form == Form.TRANSPOSED_COPY:
        stored = jax.ShapeDtypeStruct(a.shape[::-1], a.dtype) if spec.transpose_a else a
        copied = spec.replace(transpose_a=False, transpose_b=True, conjugate_a=False)
        found = inner(copied, stored, b if spec.transpose_b else jax.ShapeDtypeStruct(b.shape[::-1], b.dtype))
    elif form == Form.PADDED_K:
        shape_a, shape_b = with_k(spec, a.shape, b.shape, PADDED_K)
        found = inner(spec, *_types(shape_a, shape_b, a, b))
    elif form == Form.REDUCE_SCATTER_ALL_GATHER:
        found = inner(spec.regroup(pattern=Pattern.REDUCE_SCATTER))
    elif form == Form.GATHERED_OPERAND:
        shapes = whole_shapes(spec, a.shape, b.shape)
        found = inner(fit_comm_options(spec.local()), *_types(*shapes, a, b))
    elif form == Form.REDUCE_SCATTER:
        if spec.group.row_axes:
            found = inner(spec.regroup(pattern=Pattern.REDUCE_SCATTER))
        else:
            found = inner(transposed_reduce_scatter(spec), b, a)
    elif form == Form.SEPARATE_EPILOG:
        scales = ScaleModes(a=spec.scales.a, b=spec.scales.b)
        out = accumulator(low_precision.operand_type(a.dtype, b.dtype))
        found = inner(spec.bilinear(out_dtype=out, scales=scales))
    return ResolvedCall(spec, a, b, choice.implementation, choice.why, library, form, why, is_conjugated, found)


def _gathered(
    spec: MatmulSpec, a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct, choice: Choice, library: str, why: str
) -> ResolvedCall:
    """A call with a fixed order of sums, where ranks do not share one: each gathers what its part of D needs."""
    # Over these axes the ranks have other rows of D.
    axes = spec.contraction.sharded("d", "m")
    if bias_grad.summed(spec.rule.gradient) == "d" and spec.group.size(axes) > 1:
        raise NotAvailable(
            f"determinism={spec.determinism!r} has no epilog {spec.epilog.name} where operands are gathered and the "
            f"rows of the result lie over {axes_text(axes)}, for XLA would complete {spec.rule.gradient}; take the "
            "gradient of a bias, or pass another level"
        )
    whole = a, b
    if spec.group.nranks > 1:
        check_gathered_scales(spec, f"where operands are gathered over {spec.group.nranks} ranks")
        found = extents(spec, a.shape, b.shape)
        (rows, cols), k = found.d, found.k
        shape_a = (k, rows) if spec.transpose_a else (rows, k)
        whole = _types(shape_a, (cols, k) if spec.transpose_b else (k, cols), a, b)
    inner = _in_library(fit_comm_options(spec.local()), *whole, choice, library)
    return ResolvedCall(spec, a, b, choice.implementation, choice.why, library, Form.GATHERED, why, inner=inner)


def resolve_tile(spec: MatmulSpec, a: ArrayType, b: ArrayType, library: str) -> ResolvedCall:
    """One of the calls of one shape that a local product comes to."""
    a, b = _types(a.shape, b.shape, a, b)
    return _in_library(spec, a, b, Choice(library, "a tile of a fixed shape"), library)


def resolve_activation_grad(spec: MatmulSpec, t: ArrayType, platform: str) -> ResolvedCall:
    """The product by an activation's derivative, of `t` as the C of a product over nothing: -0 * 0 is -0, and -0 + t is
    t, also for t = -0."""
    choice = backend.choose_implementation(spec, platform, 1, (t.dtype, t.dtype))
    library = choice.implementation if choice.implementation == "cublasmp" else "host"
    spec = spec.replace(implementation=choice.implementation, epilog=Epilog.DGELU, alpha=-0.0, beta=1.0, has_c=True)
    a, b = jax.ShapeDtypeStruct((t.shape[0], 0), t.dtype), jax.ShapeDtypeStruct((0, t.shape[1]), t.dtype)
    return _in_library(spec, a, b, choice, library)
