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
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxmp import _compat, _epilog
from jaxmp._activation import gelu_second_derivative
from jaxmp._primitive import (
    AUTO_TWIN,
    activation_grad,
    activation_grad_p,
    bind,
    cast_varying,
    matmul_epilog_p,
    matmul_p,
)
from jaxmp._spec import MatmulSpec, Pattern, operand_names, output_names


def gather_rows(spec: MatmulSpec, x, dimension: int):
    """All-gather of `x` over the group, under a name that `explain` finds."""
    with jax.named_scope("jaxmp_all_gather"):
        return lax.all_gather(x, spec.row_axes, axis=dimension, tiled=True)


def _product(spec: MatmulSpec, left, right, operand, *, auto, **changes):
    """The product of a rule, in the type and over the varying axes of the operand whose cotangent it is."""
    with jax.numpy_dtype_promotion("standard"):  # float32 cotangents of 16-bit operands, where the user may be strict
        common = jnp.promote_types(left.dtype, right.dtype)
    flags = {"transpose_a": False, "transpose_b": False, "conjugate_a": False, "conjugate_b": False}
    call = spec.bilinear(**{"out_dtype": common, **flags, **changes})
    have = _compat.varying_axes(left) | _compat.varying_axes(right) | frozenset(call.group_axes)
    want = frozenset(operand.aval.manual_axis_type.varying)
    summed = tuple(axis for axis, _ in call.mesh if axis in have - want) if spec.is_typed else ()
    if call.pattern == Pattern.LOCAL and summed:
        # An operand that was the same on several ranks gets the sum of their cotangents: an all-reduced product.
        call, summed = call.replace(pattern=Pattern.ALL_REDUCE, row_axes=summed), ()
    d = bind(call, left.astype(common), right.astype(common), auto=auto)["d"]
    d = lax.psum(d, summed) if summed else d
    return cast_varying(d, want).astype(operand.aval.dtype)


def _matmul_transpose_lhs(ct, a, b, *, spec: MatmulSpec, auto: bool):
    pattern = {Pattern.ALL_GATHER: Pattern.REDUCE_SCATTER, Pattern.REDUCE_SCATTER: Pattern.ALL_GATHER}
    flags: dict[str, Any] = {"pattern": pattern.get(spec.pattern, spec.pattern)}
    if spec.pattern == Pattern.ALL_REDUCE:
        ct, flags = _reduced_cotangent(spec, ct), _LOCAL
    if spec.transpose_a and flags["pattern"] in (Pattern.LOCAL, Pattern.GRID):
        flags = flags | {"transpose_a": spec.transpose_b, "conjugate_a": spec.conjugate_b, "transpose_b": True}
        result = _product(spec, b, ct, a, auto=auto, **flags)
    else:
        flags = flags | {"transpose_b": not spec.transpose_b, "conjugate_b": spec.conjugate_b}
        result = _product(spec, ct, b, a, auto=auto, **flags)
        result = result.T if spec.transpose_a else result
    return lax.conj(result) if spec.conjugate_a else result


def _matmul_transpose_rhs(ct, a, b, *, spec: MatmulSpec, auto: bool):
    flags: dict[str, Any] = _LOCAL if spec.pattern != Pattern.GRID else {"pattern": Pattern.GRID}
    if spec.pattern == Pattern.ALL_REDUCE:
        ct = _reduced_cotangent(spec, ct)
    elif spec.pattern == Pattern.ALL_GATHER:
        a = gather_rows(spec, a, 1 if spec.transpose_a else 0)
    elif spec.pattern == Pattern.REDUCE_SCATTER:
        ct = gather_rows(spec, ct, 0)
    if spec.transpose_b:
        flags = flags | {"transpose_a": True, "transpose_b": spec.transpose_a, "conjugate_b": spec.conjugate_a}
        result = _product(spec, ct, a, b, auto=auto, **flags)
    else:
        flags = flags | {"transpose_a": not spec.transpose_a, "conjugate_a": spec.conjugate_a}
        result = _product(spec, a, ct, b, auto=auto, **flags)
    return lax.conj(result) if spec.conjugate_b else result


def _reduced_cotangent(spec: MatmulSpec, ct):
    """The cotangent of a sum over ranks: the same on all of them; untyped, shard_map has divided it."""
    return ct if spec.is_typed else lax.psum(ct, spec.row_axes)


_LOCAL: dict[str, Any] = {"pattern": Pattern.LOCAL, "row_axes": (), "col_axes": ()}


def _matmul_epilog_jvp_rule(primals, tangents, *, spec: MatmulSpec, auto: bool):
    """y = act(z), z = alpha*A@B + beta*c + bias:  dy = act'(z) * (alpha*dA@B + alpha*A@dB + beta*dc + dbias)."""
    row = _epilog.rule(spec.epilog)
    kept = spec if row.with_aux is None else spec.replace(epilog=row.with_aux)
    primitive = AUTO_TWIN[matmul_epilog_p] if auto else matmul_epilog_p
    stored = dict(zip(output_names(kept), primitive.bind(*primals, spec=kept), strict=True))
    names = output_names(spec)
    tz = _preactivation_tangent(primals, tangents, spec, auto, stored["d"])
    moved = {}
    if tz is not None:
        aux = _epilog.rule(kept.epilog).aux
        moved["d"] = activation_grad(row.activation, stored[aux], tz) if aux else tz
        moved["gelu_aux"] = tz
    outputs = [stored[name] for name in names]
    return outputs, [moved.get(name, _zero_tangent(stored[name])) for name in names]


def _zero_tangent(x):
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _preactivation_tangent(primals, tangents, spec: MatmulSpec, auto: bool, like):
    (a, b, *_), (ta, tb, *rest) = primals, tangents
    textra = dict(zip(operand_names(spec), rest, strict=True))
    product = spec.bilinear()
    terms = []
    if type(ta) is not ad.Zero:
        terms.append(bind(product, ta, b, auto=auto)["d"])
    if type(tb) is not ad.Zero:
        terms.append(bind(product, a, tb, auto=auto)["d"])
    tc, tbias = textra.get("c"), textra.get("bias")
    if tc is not None and type(tc) is not ad.Zero and spec.beta != 0:
        terms.append(tc if spec.beta == 1 else tc * jnp.asarray(spec.beta, tc.dtype))
    if tbias is not None and type(tbias) is not ad.Zero:
        # Cast ahead of the broadcast, so that the transpose sums over rows before it sums over ranks.
        tbias = cast_varying(tbias, _compat.varying_axes(like))
        terms.append(lax.broadcast_in_dim(tbias, like.shape, (1,)))
    return sum(terms[1:], terms[0]) if terms else None


def _activation_grad_jvp_rule(primals, tangents, *, activation: str):
    """Linear in t; in aux, d(t * act'(z)) = t * act''(z) * dz, which for relu is nought."""
    (aux, t), (taux, tt) = primals, tangents
    y = activation_grad(activation, aux, t)
    terms = [] if type(tt) is ad.Zero else [activation_grad(activation, aux, tt)]
    if activation == "gelu" and type(taux) is not ad.Zero:
        terms.append((t * gelu_second_derivative(aux).astype(t.dtype)) * taux.astype(t.dtype))
    return y, sum(terms[1:], terms[0]) if terms else _zero_tangent(y)


def _activation_grad_transpose_rule(ct, aux, t, *, activation: str):
    return [None, activation_grad(activation, aux, ct)]


def _register(primitive, epilog_primitive, auto: bool) -> None:
    def lhs(ct, a, b, *, spec):
        return _matmul_transpose_lhs(ct, a, b, spec=spec, auto=auto)

    def rhs(ct, a, b, *, spec):
        return _matmul_transpose_rhs(ct, a, b, spec=spec, auto=auto)

    def jvp(primals, tangents, *, spec):
        return _matmul_epilog_jvp_rule(primals, tangents, spec=spec, auto=auto)

    ad.defbilinear(primitive, lhs, rhs)
    ad.primitive_jvps[epilog_primitive] = jvp


_register(matmul_p, matmul_epilog_p, auto=False)
_register(AUTO_TWIN[matmul_p], AUTO_TWIN[matmul_epilog_p], auto=True)
ad.primitive_jvps[activation_grad_p] = _activation_grad_jvp_rule
ad.primitive_transposes[activation_grad_p] = _activation_grad_transpose_rule
