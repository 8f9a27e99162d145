"""Derivatives, written as further matmuls.

With d = alpha * A @ B, A = op(a), B = op(b), cotangent t of D:  dA = alpha * t @ B^T,  dB = alpha * A^T @ t.
(JAX's transposes do not conjugate; a conjugated operand conjugates its own cotangent.)

Per pattern, over the ranks of a group:
    AG   A (m/P, k) gathered, B (k, n/P):   dA = RS(t, B^T)      dB = gather(A)^T @ t
    RS   A (m, k/P), B (k/P, n):            dA = AG(t, B^T)      dB = A^T @ gather(t)
    AR   as RS, t replicated:               dA = t @ B^T         dB = A^T @ t
    grid every operand 2-D:                 dA = grid(t, B^T)    dB = grid(A^T, t)
The set is closed, but for the one gather that cuBLASMp cannot fuse, since it contracts over gathered rows.
An operand that does not vary over some axis (weights under data parallelism, activations ahead of a column-parallel
layer) gets the sum of its cotangents over that axis; where the product is local, it becomes an AR over it.

With a bias, dbias = sum of t over its rows is the sum over the contraction of one operand of dB's product, so both come
from one call with the epilog BGRADB (BGRADA where b is stored transposed).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxmp import _bgrad, _compat, _epilog, _narrow, _order, _xla
from jaxmp._activation import gelu_second_derivative
from jaxmp._epilog import Epilog
from jaxmp._hints import fit_hints
from jaxmp._primitive import (
    AUTO_TWIN,
    activated_matmul,
    activated_matmul_p,
    activation_grad,
    activation_grad_p,
    auto_activation_grad_p,
    bind,
    cast_varying,
    completes_sums,
    matmul_epilog_p,
    matmul_p,
)
from jaxmp._spec import (
    SCALE_NAMES,
    MatmulSpec,
    Pattern,
    accumulator,
    aux_dtype,
    axes_text,
    operand_names,
    output_names,
)


def gather_rows(spec: MatmulSpec, x, dimension: int, to: str = "varying"):
    """All-gather of `x` over the group, under a name that `explain` finds."""
    with jax.named_scope("jaxmp_gather_rows"):
        return lax.all_gather(x, spec.row_axes, axis=dimension, tiled=True, to=to)


def _product(spec: MatmulSpec, left, right, operand, *, auto, **changes):
    """The product of a rule, in the type and over the varying axes of the operand whose cotangent it is."""
    return _product_and_sums(spec, left, right, operand, auto=auto, **changes)[0]


def _product_and_sums(spec: MatmulSpec, left, right, operand, bias=None, *, auto, layout=(), **changes):
    """As `_product`, and the cotangent of `bias` where the call can sum it as well, else None.

    `layout` tells how the contraction lies in the global array (`_order`).
    """
    with jax.numpy_dtype_promotion("standard"):  # float32 cotangents of 16-bit operands, where the user may be strict
        common = jnp.promote_types(left.dtype, right.dtype)
    flags = {"transpose_a": False, "transpose_b": False, "conjugate_a": False, "conjugate_b": False}
    call = fit_hints(spec.bilinear(**{"out_dtype": common, **flags, **changes}))
    have = _compat.varying_axes(left) | _compat.varying_axes(right) | frozenset(call.group_axes)
    want = frozenset(operand.aval.manual_axis_type.varying)
    summed = tuple(axis for axis, _ in call.mesh if axis in have - want) if spec.is_typed else ()
    if spec.determinism == "topology" and not auto:
        _check_ordered(spec, call, summed)
        call = call.replace(rows=(), cols=())
    scattered: tuple[str, ...] = ()
    if spec.determinism == "topology" and summed and call.pattern == Pattern.ALL_GATHER:
        left, call = gather_rows(spec, left, 0), call.replace(**_LOCAL)
    elif spec.determinism == "topology" and summed and call.pattern == Pattern.REDUCE_SCATTER:
        scattered, summed, call = call.row_axes, call.row_axes + summed, call.replace(**_LOCAL)
    if call.pattern == Pattern.LOCAL and summed:
        # An operand that was the same on several ranks gets the sum of their cotangents: an all-reduced product.
        (call, left, right), summed = _order.summed_over(call, left, right, summed, layout), ()
    call = call if bias is None else call.replace(epilog=_gradient_epilog(spec, call, left, right, bias))
    d, *sums = bind(call, left.astype(common), right.astype(common), auto=auto).values()
    d = _xla.own_part(d, 0, scattered) if scattered else d
    d = lax.psum(d, summed) if summed else d
    sums = [cast_varying(x, bias.aval.manual_axis_type.varying).astype(bias.aval.dtype) for x in sums]
    return cast_varying(d, want).astype(operand.aval.dtype), sums[0] if sums else None


def _gradient_epilog(forward: MatmulSpec, call: MatmulSpec, left, right, bias) -> Epilog:
    """The epilog with which the product of a weight gradient also sums the cotangent to that of the bias, or NONE.

    The sum that the call completes must be the one that the bias needs. It has to run over the ranks on which t differs
    and the bias does not; untyped, shard_map sums what each of them returns, so the call may not.
    """
    if not completes_sums(call):
        return Epilog.NONE
    is_transposed = forward.transpose_b  # then t is the left operand, transposed
    if call.pattern == Pattern.GRID and (is_transposed or not forward.is_typed):
        return Epilog.NONE
    if not forward.is_typed:
        is_fit = forward.pattern in (Pattern.LOCAL, Pattern.ALL_GATHER)
    else:
        ct = left if is_transposed else right
        needed = _compat.varying_axes(ct) - frozenset(bias.aval.manual_axis_type.varying)
        is_fit = needed == frozenset(call.row_axes)
    return Epilog.NONE if not is_fit else Epilog.BGRADA if is_transposed else Epilog.BGRADB


def _check_ordered(spec: MatmulSpec, call: MatmulSpec, summed: tuple[str, ...]) -> None:
    """Raise NotImplementedError where a gradient would be a sum that no call of ours takes part in."""
    if not spec.is_typed and math.prod(size for _, size in spec.mesh) > 1:
        raise NotImplementedError(
            'jaxmp: determinism="topology" has no gradients under shard_map with check_vma=False, where JAX itself '
            'sums the cotangents over ranks; leave check_vma=True, or pass determinism="batch"'
        )
    if call.pattern == Pattern.GRID and summed:
        raise NotImplementedError(
            'jaxmp: determinism="topology" has no gradient of an operand of a 2-D grid that is the same along '
            f"{axes_text(summed)}, for the sum over it would follow the grid's; shard the operand over it, or pass "
            'determinism="batch"'
        )


def _matmul_transpose_lhs(ct, a, b, *, spec: MatmulSpec, auto: bool):
    flags = _lhs_pattern(spec)
    if spec.pattern == Pattern.ALL_REDUCE:
        ct = _reduced_cotangent(spec, ct)
    flags = flags | {"layout": ((1, spec.cols),)}
    # A complex product and its transpose take the two terms of an imaginary part in the other order. On "topology"
    # every pattern has to take the same one, and only the blocks of a grid cannot be transposed afterwards.
    is_symmetric = spec.determinism != "topology" or not jnp.issubdtype(ct.dtype, jnp.complexfloating)
    if spec.transpose_a and spec.pattern == Pattern.GRID and not is_symmetric:
        raise NotImplementedError(
            'jaxmp: determinism="topology" has no gradient of a complex a that is stored transposed on a 2-D grid; '
            'store it (m, k), or pass determinism="batch"'
        )
    if spec.transpose_a and (flags["pattern"] == Pattern.GRID or (flags["pattern"] == Pattern.LOCAL and is_symmetric)):
        flags = flags | {"transpose_a": spec.transpose_b, "conjugate_a": spec.conjugate_b, "transpose_b": True}
        result = _product(spec, b, ct, a, auto=auto, cyclic=_cyclic(spec, "bda"), **flags)
    else:
        flags = flags | {"transpose_b": not spec.transpose_b, "conjugate_b": spec.conjugate_b}
        result = _product(spec, ct, b, a, auto=auto, cyclic=_cyclic(spec, "dba"), **flags)
        result = result.T if spec.transpose_a else result
    return lax.conj(result) if spec.conjugate_a else result


def _lhs_pattern(spec: MatmulSpec) -> dict[str, Any]:
    """The pattern of the product that is the cotangent of a."""
    if spec.pattern == Pattern.ALL_REDUCE:
        return _LOCAL
    turned = {Pattern.ALL_GATHER: Pattern.REDUCE_SCATTER, Pattern.REDUCE_SCATTER: Pattern.ALL_GATHER}
    return {"pattern": turned.get(spec.pattern, spec.pattern)}


def _matmul_transpose_rhs(ct, a, b, *, spec: MatmulSpec, auto: bool):
    return _weight_and_bias_cotangents(ct, a, b, None, spec=spec, auto=auto)[0]


def _weight_and_bias_cotangents(ct, a, b, bias, *, spec: MatmulSpec, auto: bool):
    """The cotangents of b and of a bias that is added to the rows of d (or None); that of bias may come out as None,
    where the call cannot sum it."""
    flags: dict[str, Any] = _LOCAL if spec.pattern != Pattern.GRID else {"pattern": Pattern.GRID}
    if spec.pattern == Pattern.ALL_REDUCE:
        ct = _reduced_cotangent(spec, ct)
    elif spec.pattern == Pattern.ALL_GATHER:
        a = gather_rows(spec, a, 1 if spec.transpose_a else 0)
    elif spec.pattern == Pattern.REDUCE_SCATTER:
        # Known to be the same on every rank, as the bias is.
        ct = gather_rows(spec, ct, 0, "invarying" if spec.is_typed and bias is not None else "varying")
    flags = flags | {"layout": spec.rows, "ahead": 1}
    if spec.pattern in (Pattern.ALL_GATHER, Pattern.REDUCE_SCATTER):
        a, ct = _order.unfolded(spec, a, 1 if spec.transpose_a else 0), _order.unfolded(spec, ct, 0)
    if spec.transpose_b:
        flags = flags | {"transpose_a": True, "transpose_b": spec.transpose_a, "conjugate_b": spec.conjugate_a}
        result, sums = _product_and_sums(spec, ct, a, b, bias, auto=auto, cyclic=_cyclic(spec, "dab"), **flags)
    else:
        flags = flags | {"transpose_a": not spec.transpose_a, "conjugate_a": spec.conjugate_a}
        result, sums = _product_and_sums(spec, a, ct, b, bias, auto=auto, cyclic=_cyclic(spec, "adb"), **flags)
    return lax.conj(result) if spec.conjugate_b else result, sums


def _cyclic(spec: MatmulSpec, names: str):
    """The layouts of the three matrices of a derived product, named by the part they had in the given one."""
    return spec.cyclic and tuple(dict(zip("abd", spec.cyclic, strict=True))[name] for name in names)


def _reduced_cotangent(spec: MatmulSpec, ct):
    """The cotangent of a sum over ranks: the same on all of them; untyped, shard_map has divided it."""
    return ct if spec.is_typed else lax.psum(ct, spec.row_axes)


_LOCAL: dict[str, Any] = {"pattern": Pattern.LOCAL, "row_axes": (), "col_axes": ()}


def _matmul_epilog_jvp_rule(primals, tangents, *, spec: MatmulSpec, auto: bool):
    """y = act(z), z = alpha*A@B + beta*c + bias:  dy = act'(z) * (alpha*dA@B + alpha*A@dB + beta*dc + dbias)."""
    if _narrow.is_narrow(primals[0].dtype):
        return _narrow_jvp(primals, tangents, spec, auto)
    row = _epilog.rule(spec.epilog)
    if row.derivative or row.gradient:
        return _derivative_jvp_rule(primals, tangents, spec=spec, auto=auto)
    kept = spec if row.with_aux is None else spec.replace(epilog=row.with_aux)
    primitive = AUTO_TWIN[matmul_epilog_p] if auto else matmul_epilog_p
    stored = dict(zip(output_names(kept), primitive.bind(*primals, spec=kept), strict=True))
    names = output_names(spec)
    tz = _preactivation_tangent(primals, tangents, spec, auto, stored["d"])
    moved = {}
    if tz is not None:
        aux = _epilog.rule(kept.epilog).aux
        moved["d"] = tz
        if aux and row.activation:
            moved["d"] = activation_grad(row.activation, stored[aux], tz, spec, auto=auto)
        moved["gelu_aux"] = tz
    outputs = [stored[name] for name in names]
    return outputs, [moved.get(name, _zero_tangent(stored[name])) for name in names]


def _derivative_jvp_rule(primals, tangents, *, spec: MatmulSpec, auto: bool):
    """d = z * act'(aux), g = sum of d over rows, or of op(a) or op(b) over the contraction:
    dd = act'(aux) * dz + z * act''(aux) * daux, and g is linear."""
    row = _epilog.rule(spec.epilog)
    primitive = AUTO_TWIN[matmul_epilog_p] if auto else matmul_epilog_p
    outputs = dict(zip(output_names(spec), primitive.bind(*primals, spec=spec), strict=True))
    td = _preactivation_tangent(primals, tangents, spec, auto, outputs["d"])
    if row.derivative:
        operands = dict(zip(("a", "b", *operand_names(spec)), primals, strict=True))
        taux, aux = tangents[-1], operands.pop(row.aux_input)
        td = None if td is None else activation_grad(row.derivative, aux, td, spec, auto=auto)
        if row.derivative == "gelu" and type(taux) is not ad.Zero:
            z = bind(spec.replace(epilog=Epilog.NONE), operands.pop("a"), operands.pop("b"), operands, auto=auto)["d"]
            curve = z * gelu_second_derivative(aux).astype(z.dtype) * taux
            td = curve if td is None else td + curve
    moved = {"d": _zero_tangent(outputs["d"]) if td is None else td}
    if row.gradient:
        x = {"a": tangents[0], "b": tangents[1], "d": moved["d"]}[_bgrad.summed(row.gradient)]
        is_zero = type(x) is ad.Zero
        moved[row.gradient] = (
            _zero_tangent(outputs[row.gradient]) if is_zero else _bgrad.bias_gradient(row.gradient, spec, x)
        )
    return list(outputs.values()), [moved[name] for name in outputs]


def _epilog_transpose_rule(cts, a, b, *extra, spec: MatmulSpec, auto: bool):
    """Of d = alpha * A@B + bias, which the JVP rule binds where b and the bias are both differentiated."""
    if operand_names(spec) != ("bias",) or _epilog.rule(spec.epilog).activation:
        raise NotImplementedError(f"epilog {spec.epilog.name} with operands {operand_names(spec)} has no transpose")
    (ct,), (bias,), product = cts, extra, spec.bilinear()
    ct_a = ct_b = ct_bias = None
    if type(ct) is ad.Zero:
        return [None, None, None]
    if ad.is_undefined_primal(a):
        ct_a = _matmul_transpose_lhs(ct, a, b, spec=product, auto=auto)
    if ad.is_undefined_primal(b):
        fused = bias if ad.is_undefined_primal(bias) else None
        ct_b, ct_bias = _weight_and_bias_cotangents(ct, a, b, fused, spec=product, auto=auto)
    if ad.is_undefined_primal(bias) and ct_bias is None:
        ct_bias = _sum_to_bias(ct, bias.aval)
    return [ct_a, ct_b, ct_bias]


def _sum_to_bias(ct, bias):
    """The cotangent of a bias by itself: t summed over its rows, and over the ranks on which the bias is the same."""
    want = frozenset(bias.manual_axis_type.varying)
    total = jnp.sum(ct.astype(accumulator(ct.dtype)), 0, dtype=accumulator(ct.dtype))
    axes = tuple(sorted(_compat.varying_axes(ct) - want))
    total = lax.psum(total, axes) if axes else total
    return cast_varying(total, want).astype(bias.dtype)


def _narrow_jvp(primals, tangents, spec: MatmulSpec, auto: bool):
    """The tangent of an fp8 or fp4 product is that of the same product of its decoded operands times their scales, so
    cotangents are products in the wide type, cast to the operands' own. The rounding of d and of gelu_aux counts as
    `astype` does, and activations are differentiated where they were ahead of it; the largest absolute values and the
    scales of d's blocks count as constants."""
    primitive = AUTO_TWIN[matmul_epilog_p] if auto else matmul_epilog_p
    stored = dict(zip(output_names(spec), primitive.bind(*primals, spec=spec), strict=True))
    names = ("a", "b", *operand_names(spec))
    fixed = dict(zip(names, primals, strict=True))
    moving = {name: t for name, t in zip(names, tangents, strict=True) if type(t) is not ad.Zero}
    of_scales = [name for name in SCALE_NAMES if name in moving]
    if of_scales and spec.determinism == "topology":
        scale = of_scales[0].removeprefix("scale_")
        raise NotImplementedError(
            f'jaxmp: determinism="topology" has no derivative in scales.{scale}, which XLA would sum; hold it constant '
            '(jax.lax.stop_gradient), or pass determinism="batch"'
        )

    def wide(given):
        outputs = _widened(fixed | given, spec, auto)
        return {name: x for name, x in outputs.items() if name in ("d", "gelu_aux")}

    _, moved = jax.jvp(wide, ({name: fixed[name] for name in moving},), (moving,))
    outputs = [stored[name] for name in output_names(spec)]
    return outputs, [moved.get(name, _zero_tangent(stored[name])) for name in output_names(spec)]


def _widened(operands: dict[str, Any], spec: MatmulSpec, auto: bool) -> dict[str, Any]:
    """A narrow call on decoded operands: bfloat16 where all they hold is exact in it, else float32."""
    exact = (_narrow.NONE, _narrow.VEC16, _narrow.VEC32)
    is_exact = spec.out_dtype == jnp.bfloat16 and spec.scale_a in exact and spec.scale_b in exact
    dtype = jnp.dtype(jnp.bfloat16 if is_exact else jnp.float32)
    a = _narrow.dequantize(operands["a"], operands.get("scale_a"), spec.scale_a, dtype)
    b = _narrow.dequantize(operands["b"], operands.get("scale_b"), spec.scale_b, dtype)
    call = fit_hints(spec.bilinear(out_dtype=dtype, beta=spec.beta, has_c=spec.has_c, epilog=spec.epilog))
    extra = {name: operands[name] for name in operand_names(call)}
    extra |= {name: x.astype(dtype) for name, x in extra.items() if name in ("c", "bias")}
    if spec.scale_c != _narrow.NONE:
        extra["c"] = extra["c"] * operands["scale_c"].astype(dtype)
    outputs = bind(call, a, b, extra, auto=auto)
    for name, scale in (("d", "scale_d"), ("gelu_aux", "scale_aux")):
        if scale in operand_names(spec):
            outputs[name] = outputs[name] * operands[scale].astype(dtype)
    dtypes = {"d": spec.out_dtype, "gelu_aux": aux_dtype(spec)}
    return {name: x.astype(dtypes.get(name, x.dtype)) for name, x in outputs.items()}


def _zero_tangent(x):
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _preactivation_tangent(primals, tangents, spec: MatmulSpec, auto: bool, like):
    (a, b, *_), (ta, tb, *rest) = primals, tangents
    textra = dict(zip(operand_names(spec), rest, strict=True))
    product = spec.bilinear()
    terms = []
    if type(ta) is not ad.Zero:
        terms.append(bind(product, ta, b, auto=auto)["d"])
    tc, tbias = textra.get("c"), textra.get("bias")
    if tbias is not None and type(tbias) is not ad.Zero and spec.determinism == "topology":
        terms.append(_bias_in_rows(spec, tbias, like, auto))
        tbias = None
    if type(tb) is not ad.Zero and tbias is not None and type(tbias) is not ad.Zero:
        # One call, whose transpose gives the gradients of both.
        terms.append(bind(product.replace(epilog=Epilog.BIAS), a, tb, {"bias": tbias}, auto=auto)["d"])
        tbias = None
    elif type(tb) is not ad.Zero:
        terms.append(bind(product, a, tb, auto=auto)["d"])
    if tc is not None and type(tc) is not ad.Zero and spec.beta != 0:
        terms.append(tc if spec.beta == 1 else tc * jnp.asarray(spec.beta, tc.dtype))
    if tbias is not None and type(tbias) is not ad.Zero:
        # Cast ahead of the broadcast, so that the transpose sums over rows before it sums over ranks.
        tbias = cast_varying(tbias, _compat.varying_axes(like))
        terms.append(lax.broadcast_in_dim(tbias, like.shape, (1,)))
    return sum(terms[1:], terms[0]) if terms else None


def _bias_in_rows(spec: MatmulSpec, bias, like, auto: bool):
    """The bias in every row, as a product with ones: its transpose sums the rows as one of our calls does, in order."""
    ones = cast_varying(jnp.ones((like.shape[0], 1), bias.dtype), _compat.varying_axes(like))
    local = spec.bare().bilinear(**_LOCAL, alpha=1.0, out_dtype=bias.dtype, rows=_order.rows_of_result(spec), ahead=1)
    return _order.folded(spec, bind(local, ones, bias[None], auto=auto)["d"])


def _activation_grad_jvp_rule(primals, tangents, *, activation: str, spec: MatmulSpec | None, auto: bool):
    """Linear in t; in aux, d(t * act'(z)) = t * act''(z) * dz, which for relu is nought."""
    (aux, t), (taux, tt) = primals, tangents
    slope = functools.partial(activation_grad, activation, aux, spec=spec, auto=auto)
    y = slope(t)
    terms = [] if type(tt) is ad.Zero else [slope(tt)]
    if activation == "gelu" and type(taux) is not ad.Zero:
        terms.append((t * gelu_second_derivative(aux).astype(t.dtype)) * taux.astype(t.dtype))
    return y, sum(terms[1:], terms[0]) if terms else _zero_tangent(y)


def _activation_grad_transpose_rule(ct, aux, t, *, activation: str, spec: MatmulSpec | None, auto: bool):
    return [None, activation_grad(activation, aux, ct, spec, auto=auto)]


def _activated_matmul_jvp_rule(primals, tangents, *, spec: MatmulSpec, activation: str):
    """y = (act'(z) * (t + b)) @ w is linear in (t, b) and in w; in z, dy = (act''(z) * (t + b) * dz) @ w."""
    t, *bias, aux, w = primals
    tt, *tbias, taux, tw = tangents
    y = activated_matmul(spec, activation, t, bias[0] if bias else None, aux, w)
    terms = []
    moved = [x for x in tbias if type(x) is not ad.Zero]
    if type(tt) is not ad.Zero or moved:
        tt = ad.instantiate_zeros(tt)
        terms.append(activated_matmul(spec, activation, tt, moved[0] if moved else None, aux, w))
    whole = t + bias[0][None, :] if bias else t
    if type(tw) is not ad.Zero:
        terms.append(bind(spec, activation_grad(activation, aux, whole, spec), tw)["d"])
    if activation == "gelu" and type(taux) is not ad.Zero:
        terms.append(bind(spec, whole * gelu_second_derivative(aux).astype(t.dtype) * taux, w)["d"])
    if not terms:
        return y, _zero_tangent(y)
    axes = _compat.varying_axes(y)
    return y, functools.reduce(jnp.add, (cast_varying(x, axes) for x in terms))


def _activated_matmul_transpose_rule(ct, t, *rest, spec: MatmulSpec, activation: str):
    """dt = act'(z) * (ct @ w^T) and dbias = the sum of dt over its rows: one call, with a derivative as its epilog."""
    *bias, aux, w = rest
    if type(ct) is ad.Zero:
        return [None] * (1 + len(rest))
    wants_sums = any(map(ad.is_undefined_primal, bias))
    if spec.pattern == Pattern.ALL_REDUCE:
        ct = _reduced_cotangent(spec, ct)
    call = spec.bilinear(transpose_b=not spec.transpose_b, **_lhs_pattern(spec))
    outputs = bind(call.replace(epilog=_DERIVATIVES[activation, wants_sums]), ct, w, {f"{activation}_aux": aux})
    axes = _compat.varying_axes(aux)  # and of t and the bias: see `activated_matmul`
    dt, *sums = (cast_varying(x, axes) for x in outputs.values())
    return [dt if ad.is_undefined_primal(t) else None, *(sums or [None] * len(bias)), None, None]


_DERIVATIVES = {
    ("relu", False): Epilog.DRELU,
    ("relu", True): Epilog.DRELU_BGRAD,
    ("gelu", False): Epilog.DGELU,
    ("gelu", True): Epilog.DGELU_BGRAD,
}


def _register(primitive, epilog_primitive, auto: bool) -> None:
    def lhs(ct, a, b, *, spec):
        return _matmul_transpose_lhs(ct, a, b, spec=spec, auto=auto)

    def rhs(ct, a, b, *, spec):
        return _matmul_transpose_rhs(ct, a, b, spec=spec, auto=auto)

    def jvp(primals, tangents, *, spec):
        return _matmul_epilog_jvp_rule(primals, tangents, spec=spec, auto=auto)

    ad.defbilinear(primitive, lhs, rhs)
    ad.primitive_jvps[epilog_primitive] = jvp

    def transpose(cts, *operands, spec):
        return _epilog_transpose_rule(cts, *operands, spec=spec, auto=auto)

    ad.primitive_transposes[epilog_primitive] = transpose


_register(matmul_p, matmul_epilog_p, auto=False)
_register(AUTO_TWIN[matmul_p], AUTO_TWIN[matmul_epilog_p], auto=True)
ad.primitive_jvps[activated_matmul_p] = _activated_matmul_jvp_rule
ad.primitive_transposes[activated_matmul_p] = _activated_matmul_transpose_rule
for _primitive, _auto in ((activation_grad_p, False), (auto_activation_grad_p, True)):
    ad.primitive_jvps[_primitive] = functools.partial(_activation_grad_jvp_rule, auto=_auto)
    ad.primitive_transposes[_primitive] = functools.partial(_activation_grad_transpose_rule, auto=_auto)
