"""The cotangents of a product's operands, written as further products.

With d = alpha * A @ B, A = op(a), B = op(b), cotangent t of D:  dA = alpha * t @ B^T,  dB = alpha * A^T @ t.
(JAX's transposes do not conjugate; a conjugated operand conjugates its own cotangent.)

`cotangent_of_a` and `cotangents_of_b_and_bias` say which pattern each cotangent has. Each is a pattern of calls, except
for dB of a gathered or scattered product: cuBLASMp cannot fuse its gather, because it contracts over gathered rows.

dbias is t summed over its rows. An operand of dB's product is t, and its rows are the contraction there. So one call
with the epilog BGRADB (BGRADA if b is stored transposed) returns both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxmp._src.core.primitive import collectives, grouped, row_order
from jaxmp._src.core.primitive.collectives import cast_varying
from jaxmp._src.core.primitive.primitives import bind, completes_sums, summed_over
from jaxmp._src.core.spec import epilogs, low_precision
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.extents import axes_text
from jaxmp._src.core.spec.matmul_spec import Group, MatmulSpec, SummationOrder, accumulator
from jaxmp._src.core.spec.refusal import NotAvailable
from jaxmp._src.core.validation.comm_options import fit_comm_options
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import Aval, Operand, Tangent


def matmul_transpose_rule(
    cts: Sequence[Tangent], a: Any, b: Any, *extra: Any, spec: MatmulSpec
) -> list[jax.Array | None]:
    """Returns the cotangents of a, b and bias: None for operands that are not linear, and for all if the cotangent of d
    is zero. `extra` is empty, or the bias of d = alpha * A@B + bias, which the JVP rule binds to differentiate b and
    bias. Raises NotImplementedError for all other calls."""
    if spec.operand_names not in ((), ("bias",)) or spec.output_names != ("d",) or spec.rule.activation:
        raise NotAvailable(f"epilog {spec.epilog.name} with operands {spec.operand_names} has no transpose")
    (ct,), product = cts, spec.bilinear()
    ct_a = ct_b = ct_bias = None
    bias = next((x for x in extra if isinstance(x, ad.UndefinedPrimal)), None)
    if isinstance(ct, ad.Zero):
        return [None] * (2 + len(extra))
    if isinstance(a, ad.UndefinedPrimal):
        ct_a = cotangent_of_a(ct, a, b, spec=product)
    if isinstance(b, ad.UndefinedPrimal):
        ct_b, ct_bias = cotangents_of_b_and_bias(ct, a, b, bias, spec=product)
    if bias is not None and ct_bias is None:
        ct_bias = cotangent_of_bias(ct, bias.aval, spec)
    return [ct_a, ct_b, *[ct_bias] * len(extra)]


def cotangent_of_a(ct: jax.Array, a: ad.UndefinedPrimal, b: jax.Array, *, spec: MatmulSpec) -> jax.Array:
    """Returns the cotangent of the stored a, for `ct` of d. dA = alpha * t @ B^T: a reduce-scatter if rows of A were
    gathered, an all-gather if sums were scattered, local if they were all-reduced, a grid for a grid. Refuses a complex
    a stored (k, m) on a grid in the global order."""
    product, group, layout = spec.contraction, group_of_a(spec), ((1, spec.order.cols),)
    if product.is_reduced:
        ct = reduced_cotangent(spec, ct)
    # A complex product and its transpose add the two terms of an imaginary part in opposite orders. In the global order
    # every pattern has to use the same one, and only the blocks of a grid cannot be transposed afterwards.
    is_symmetric = not spec.global_order or not jnp.issubdtype(ct.dtype, jnp.complexfloating)
    if spec.transpose_a and product.is_grid and not is_symmetric:
        raise spec.level.mesh_refusal(
            "has no gradient of a complex a that is stored transposed on a 2-D grid", "store it (m, k)"
        )
    is_alone = not product.cotangent("a").communicates
    if spec.transpose_a and (product.is_grid or (is_alone and is_symmetric)):
        # dA^T = B @ t^T, because a is stored transposed
        flags = {"transpose_a": spec.transpose_b, "conjugate_a": spec.conjugate_b, "transpose_b": True}
        call = _derived(spec, group, "bda", dataclasses.replace(spec.order, is_transposed=True), **flags)
        result, _ = _product_and_sums(spec, call, b, ct, a, layout=layout)
    else:
        # dA = t @ B^T
        flags = {"transpose_b": not spec.transpose_b, "conjugate_b": spec.conjugate_b}
        call = _derived(spec, group, "dba", spec.order, **flags)
        result, _ = _product_and_sums(spec, call, ct, b, a, layout=layout)
        result = result.T if spec.transpose_a else result
    return lax.conj(result) if spec.conjugate_a else result


def group_of_a(spec: MatmulSpec) -> Group:
    """Returns the group of devices that computes the cotangent of a."""
    return spec.group if spec.is_unsettled else Group.of(spec.contraction.cotangent("a"), spec.group.mesh)


def cotangents_of_b_and_bias(
    ct: jax.Array, a: jax.Array, b: ad.UndefinedPrimal, bias: ad.UndefinedPrimal | None, *, spec: MatmulSpec
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the cotangents of b and of a bias that is added to the rows of d. The latter is None if there is no bias,
    or if the product of b's cotangent cannot sum it. dB = alpha * A^T @ t: a grid for a grid, otherwise local, on the
    gathered rows of A or t."""
    product = spec.contraction
    group = spec.group if product.is_grid else spec.ungrouped().group
    if product.is_reduced:
        ct = reduced_cotangent(spec, ct)
    elif product.gathers:  # dB = gather(A)^T @ t
        a = _gather_rows(spec, a, product.a.index("m"))
    elif product.scatters:  # dB = A^T @ gather(t); with a bias, t is known to be equal on every rank
        ct = _gather_rows(spec, ct, 0, "invarying" if spec.is_typed and bias is not None else "varying")
    layout, order = spec.order.rows, dataclasses.replace(spec.order, outer_rows=1)
    if product.gathers or product.scatters:
        a, ct = row_order.unfolded(spec, a, product.a.index("m")), row_order.unfolded(spec, ct, 0)
    if spec.transpose_b:
        # dB^T = t^T @ A, because b is stored transposed
        flags = {"transpose_a": True, "transpose_b": spec.transpose_a, "conjugate_b": spec.conjugate_a}
        call = _derived(spec, group, "dab", order, **flags)
        result, sums = _product_and_sums(spec, call, ct, a, b, layout=layout, bias=bias)
    else:
        # dB = A^T @ t
        flags = {"transpose_a": not spec.transpose_a, "conjugate_a": spec.conjugate_a}
        call = _derived(spec, group, "adb", order, **flags)
        result, sums = _product_and_sums(spec, call, a, ct, b, layout=layout, bias=bias)
    return lax.conj(result) if spec.conjugate_b else result, sums


def cotangent_of_bias(ct: jax.Array, bias: Aval, spec: MatmulSpec) -> jax.Array:
    """Returns `ct`, the t above, summed over its rows and over the axes that it varies over and the bias does not."""
    want = frozenset(bias.manual_axis_type.varying)
    total = jnp.sum(ct.astype(accumulator(ct.dtype)), 0, dtype=accumulator(ct.dtype))
    axes = tuple(sorted(jax_compat.varying_axes(ct) - want))
    total = collectives.psum(total, axes, source_line=spec.source_line) if axes else total
    return cast_varying(total, want).astype(bias.dtype)


def reduced_cotangent(spec: MatmulSpec, ct: jax.Array) -> jax.Array:
    """Returns the cotangent of a sum over ranks. Under check_vma=False it is summed, because shard_map divided it."""
    return ct if spec.is_typed else collectives.psum(ct, spec.group.row_axes, source_line=spec.source_line)


def _derived(spec: MatmulSpec, group: Group, names: str, order: SummationOrder, **flags: bool) -> MatmulSpec:
    """Returns the spec of a rule's product, without C and epilog. `names`: which of a, b and d of `spec` its a, b and d
    are, as "dba" for t @ B^T. Transpositions and conjugations that are not in `flags` are False."""
    distributions = spec.distributions and tuple(
        dict(zip("abd", spec.distributions, strict=True))[name] for name in names
    )
    is_b_first = spec.is_unsettled and names[1] == "d"  # JAX's own products have the cotangent first
    stored = dict.fromkeys(("transpose_a", "transpose_b", "conjugate_a", "conjugate_b"), False) | flags
    return spec.bilinear(group=group, order=order, distributions=distributions, first_operand_is_b=is_b_first, **stored)


def _gather_rows(spec: MatmulSpec, x: jax.Array, dimension: int, to: str = "varying") -> jax.Array:
    """All-gathers `x` over the group, under a name that `explain` looks for."""
    with jax.named_scope("jaxmp_gather_rows"):
        return collectives.all_gather(x, spec.group.row_axes, axis=dimension, to=to, source_line=spec.source_line)


def _product_and_sums(
    spec: MatmulSpec,
    call: MatmulSpec,
    left: jax.Array,
    right: jax.Array,
    operand: ad.UndefinedPrimal,
    *,
    layout: row_order.Layout,
    bias: ad.UndefinedPrimal | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (the cotangent of `operand`, in its type; the cotangent of `bias`, or None if there is none or the call
    cannot sum it). The first is the product `call` of `left` and `right`; under check_vma it is summed over the axes
    that one of these varies over and the operand does not. `layout`: the layout of the contraction in the global array.
    Raises as `_check_ordered` in the global order."""
    common = grouped.type_of(left, right)
    if not low_precision.is_mixed(left.dtype, right.dtype):
        left, right = left.astype(common), right.astype(common)
    call = fit_comm_options(call.replace(out_dtype=common))
    have = jax_compat.varying_axes(left) | jax_compat.varying_axes(right) | frozenset(call.group.axes)
    want = frozenset(operand.aval.manual_axis_type.varying)
    summed = tuple(axis for axis, _ in call.group.mesh if axis in have - want) if spec.is_typed else ()
    if spec.global_order and not spec.is_unsettled:
        _check_ordered(spec, call, summed)
        call = call.reorder(rows=(), cols=())
    scattered: tuple[str, ...] = ()
    if spec.global_order and summed and call.contraction.gathers:
        left, call = _gather_rows(spec, left, 0), call.ungrouped()
    elif spec.global_order and summed and call.contraction.scatters:
        scattered, summed, call = call.group.row_axes, call.group.row_axes + summed, call.ungrouped()
    if summed and not call.contraction.communicates:
        # dA or dB of an operand that was equal on several ranks (weights under data parallelism, activations before a
        # column-parallel layer) is the sum of these ranks' cotangents: an all-reduced product.
        (call, left, right), summed = row_order.summed_over(call, left, right, summed, layout), ()
    call = call if bias is None else call.replace(epilog=_gradient_epilog(spec, call, left, right, bias))
    d, *sums = bind(call, left, right).values()
    d = collectives.own_part(d, 0, scattered) if scattered else d
    d = collectives.psum(d, summed, source_line=spec.source_line) if summed else d
    of_bias = None
    if bias is not None and sums:
        of_bias = cast_varying(sums[0], bias.aval.manual_axis_type.varying).astype(bias.aval.dtype)
    return cast_varying(d, want).astype(operand.aval.dtype), of_bias


def _gradient_epilog(
    forward: MatmulSpec, call: MatmulSpec, left: jax.Array, right: jax.Array, bias: ad.UndefinedPrimal
) -> Epilog:
    """Returns the epilog with which the product of b's gradient also computes the bias gradient, or NONE if it cannot.
    The call must sum over exactly the ranks on which t differs and the bias does not. Under check_vma=False shard_map
    sums the results of all ranks, so the forward call must gather or be local. NONE unless the call `completes_sums`. A
    grid with b stored transposed has NONE, and every grid under check_vma=False."""
    if not completes_sums(call):
        return Epilog.NONE
    is_transposed = forward.transpose_b  # then t is the left operand, transposed
    if call.contraction.is_grid and (is_transposed or not forward.is_typed):
        return Epilog.NONE
    if not forward.is_typed:
        is_fit = forward.contraction.gathers or not forward.contraction.communicates
    else:
        ct = left if is_transposed else right
        needed = jax_compat.varying_axes(ct) - frozenset(bias.aval.manual_axis_type.varying)
        is_fit = needed == frozenset(call.group.row_axes)
    return Epilog.NONE if not is_fit else Epilog.BGRADA if is_transposed else Epilog.BGRADB


def _check_ordered(spec: MatmulSpec, call: MatmulSpec, summed: tuple[str, ...]) -> None:
    """Raises NotImplementedError if a gradient would be a sum over ranks outside our calls: under check_vma=False on
    several ranks, and for an operand of a grid that is equal along axes (`summed` is not empty). Raises at every level,
    so callers first check that the level has the global order."""
    if not spec.is_typed and math.prod(size for _, size in spec.group.mesh) > 1:
        raise spec.level.mesh_refusal(
            "has no gradients under shard_map with check_vma=False, where JAX itself sums the cotangents over ranks",
            "leave check_vma=True",
        )
    if call.contraction.is_grid and summed:
        raise spec.level.mesh_refusal(
            f"has no gradient of an operand of a 2-D grid that is the same along {axes_text(summed)}, because "
            "the sum over it would come after the grid's sum",
            "shard the operand over it",
        )


def activated_matmul_transpose_rule(
    ct: Tangent, t: Operand, *rest: Any, spec: MatmulSpec, activation: str
) -> list[jax.Array | None]:
    """Returns dt = act'(z) * (ct @ w^T), dbias = dt summed over its rows if there is a bias, and None for aux and w. An
    operand that is not linear also has None, and all operands if `ct` is zero."""
    if isinstance(ct, ad.Zero):
        return [None] * (1 + len(rest))
    *bias, aux, w = rest
    wants_sums = any(map(ad.is_undefined_primal, bias))
    if spec.contraction.is_reduced:
        ct = reduced_cotangent(spec, ct)
    call = spec.bilinear(transpose_b=not spec.transpose_b, group=group_of_a(spec))
    epilog = epilogs.Epilog[f"D{activation.upper()}{'_BGRAD' * wants_sums}"]
    outputs = bind(call.replace(epilog=epilog), ct, w, {f"{activation}_aux": aux})
    axes = jax_compat.varying_axes(aux)  # t varies over the same axes; for the bias see `activated_matmul`
    dt, *sums = outputs.values()
    sums = [cast_varying(x, axes - summed_over(spec)) for x in sums]
    of_bias: Sequence[jax.Array | None] = sums or [None] * len(bias)
    return [cast_varying(dt, axes) if isinstance(t, ad.UndefinedPrimal) else None, *of_bias, None, None]
