"""Forward differentiation: the tangents of a call are further products, which `transpose` transposes. Also the rule of
Taylor mode (`jax.experimental.jet`), for products without an epilog, which are bilinear."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxmp._src.core.primitive import bias_grad, row_order
from jaxmp._src.core.primitive.collectives import cast_varying
from jaxmp._src.core.primitive.primitives import (
    activated_matmul_parts,
    activation_grad,
    bind,
    bind_named,
    bind_operands,
)
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.activations import gelu_second_derivative
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.matmul_spec import FLAGS, SCALE_NAMES, MatmulSpec
from jaxmp._src.core.spec.refusal import NotAvailable
from jaxmp._src.core.validation.comm_options import fit_comm_options
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import Operands, Tangent


def matmul_jvp_rule(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, spec: MatmulSpec
) -> tuple[list[jax.Array], list[Tangent]]:
    """Returns the results and their tangents: dy for d, dz for gelu_aux, zero for others.

    y = act(z), z = alpha*A@B + beta*c + bias:  dy = act'(z) * dz, dz = alpha*dA@B + alpha*A@dB + beta*dc + dbias.

    Binds the epilog that also stores z or its signs for act'(z); on automatic axes relu's is read from the signs of y.
    Operands of 8 bits or fewer, and epilogs with a derivative or a bias gradient, have rules of their own."""
    if low_precision.is_low_precision(low_precision.operand_type(primals[0].dtype, primals[1].dtype)):
        return _low_precision_jvp(primals, tangents, spec)
    row = spec.rule
    if row.derivative or row.gradient:
        return _derivative_jvp_rule(primals, tangents, spec=spec)
    # XLA's partitioner cannot shard the columns of a packed mask like the columns of d.
    is_partitioned = spec.is_unsettled and not jax.typeof(primals[0]).sharding.mesh.empty
    is_relu = row.activation == "relu" and row.with_aux is not None
    is_by_sign = is_partitioned and is_relu and not spec.fixed_reduction_order
    kept = spec if row.with_aux is None or is_by_sign else spec.replace(epilog=row.with_aux)
    stored = bind_named(kept, dict(zip(spec.names, primals, strict=True)))
    tz = _preactivation_tangent(primals, tangents, spec, stored["d"])
    moved = {}
    if tz is not None:
        aux = kept.rule.aux
        moved["d"] = tz
        if is_by_sign:
            moved["d"] = jnp.where(stored["d"] > 0, tz, jnp.zeros_like(tz))
        elif aux and row.activation:
            moved["d"] = activation_grad(row.activation, stored[aux], tz, spec)
        moved["gelu_aux"] = tz
    return _with_tangents(spec, stored, moved)


def _with_tangents(
    spec: MatmulSpec, stored: Operands, moved: Mapping[str, Tangent]
) -> tuple[list[jax.Array], list[Tangent]]:
    """Returns the results of the spec and their tangents; a result that is not in `moved` has a zero tangent."""
    outputs = {name: stored[name] for name in spec.output_names}
    return list(outputs.values()), [moved.get(name, zero_tangent(x)) for name, x in outputs.items()]


def _derivative_jvp_rule(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, spec: MatmulSpec
) -> tuple[list[jax.Array], list[Tangent]]:
    """d = z * act'(aux), and g = d summed over rows, or op(a) or op(b) summed over the contraction:
    dd = act'(aux) * dz + z * act''(aux) * daux (the second term for gelu only), and g is linear."""
    row = spec.rule
    operands = dict(zip(spec.names, primals, strict=True))
    outputs = bind_named(spec, operands)
    td = _preactivation_tangent(primals, tangents, spec, outputs["d"])
    if row.derivative:
        taux, aux = tangents[-1], operands[row.aux_input]
        td = None if td is None else activation_grad(row.derivative, aux, td, spec)
        if row.derivative == "gelu" and not isinstance(taux, ad.Zero):
            z = bind_named(spec.replace(epilog=Epilog.NONE), operands)["d"]
            curve = z * gelu_second_derivative(aux).astype(z.dtype) * taux
            td = curve if td is None else td + curve
    moved = {} if td is None else {"d": td}
    if row.gradient:
        x = {"a": tangents[0], "b": tangents[1], "d": td}[bias_grad.summed(row.gradient)]
        if x is not None and not isinstance(x, ad.Zero):
            moved[row.gradient] = bias_grad.bias_gradient(row.gradient, spec, x)
    return _with_tangents(spec, outputs, moved)


def _low_precision_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], spec: MatmulSpec
) -> tuple[list[jax.Array], list[Tangent]]:
    """Differentiates a product of 8 bits and fewer as the same product of decoded operands, multiplied by their scales.
    So cotangents are products in the wide type, cast to the types of the operands. Rounding d and gelu_aux counts as
    `astype`, and activations are differentiated at the values before the rounding. The largest absolute values and the
    scales of d's blocks count as constants. In the global order it refuses to differentiate in a scale."""
    fixed = dict(zip(spec.names, primals, strict=True))
    stored = bind_named(spec, fixed)
    moving = _nonzero(spec.names, tangents)
    of_scales = [name for name in SCALE_NAMES if name in moving]
    if of_scales and spec.global_order:
        scale = of_scales[0].removeprefix("scale_")
        raise spec.level.mesh_refusal(
            f"has no derivative in scaling.{scale}, which XLA would sum", "hold it constant (jax.lax.stop_gradient)"
        )

    def wide(given: Operands) -> Operands:
        outputs = _widened(fixed | given, spec)
        return {name: x for name, x in outputs.items() if name in ("d", "gelu_aux")}

    _, moved = jax.jvp(wide, ({name: fixed[name] for name in moving},), (moving,))
    return _with_tangents(spec, stored, moved)


def _widened(operands: Operands, spec: MatmulSpec) -> Operands:
    """Computes a low-precision call on decoded operands: in bfloat16 if d has that type and the scales of a and b are
    exact in it, else in float32. The results have the types of the call."""
    exact = (low_precision.NONE, low_precision.VEC16, low_precision.VEC32)
    is_exact = spec.out_dtype == jnp.bfloat16 and spec.scales.a in exact and spec.scales.b in exact
    dtype = jnp.dtype(jnp.bfloat16 if is_exact else jnp.float32)
    stored = ("a", spec.scales.a, spec.transpose_a), ("b", spec.scales.b, not spec.transpose_b)
    a, b = (
        low_precision.dequantize(operands[name], operands.get(f"scale_{name}"), mode, dtype, is_k_first=is_k_first)
        for name, mode, is_k_first in stored
    )
    call = fit_comm_options(spec.bilinear(out_dtype=dtype, beta=spec.beta, has_c=spec.has_c, epilog=spec.epilog))
    extra = {name: operands[name] for name in call.operand_names}
    extra |= {name: x.astype(dtype) for name, x in extra.items() if name in ("c", "bias")}
    if spec.scales.c != low_precision.NONE:
        extra["c"] = extra["c"] * operands["scale_c"].astype(dtype)
    outputs = bind_named(call, extra | {"a": a, "b": b})
    for name, scale in (("d", "scale_d"), ("gelu_aux", "scale_aux")):
        if scale in spec.operand_names:
            outputs[name] = outputs[name] * operands[scale].astype(dtype)
    dtypes = {"d": spec.out_dtype, "gelu_aux": spec.aux_dtype or spec.out_dtype}
    return {name: x.astype(dtypes.get(name, x.dtype)) for name, x in outputs.items()}


def _nonzero(names: Sequence[str], tangents: Sequence[Tangent]) -> Operands:
    """Returns the tangents by name, without zeros."""
    return {name: t for name, t in zip(names, tangents, strict=True) if not isinstance(t, ad.Zero)}


def zero_tangent(x: jax.Array) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _preactivation_tangent(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], spec: MatmulSpec, like: jax.Array
) -> jax.Array | None:
    """Returns alpha*dA@B + alpha*A@dB + beta*dc + dbias without zero terms; None if all are zero. `like`: the result
    d."""
    (a, b, *_), moving = primals, _nonzero(spec.names, tangents)
    ta, tb, tc, tbias = map(moving.get, ("a", "b", "c", "bias"))
    terms = []
    product = spec if spec.is_bilinear else spec.bilinear()
    if ta is not None:
        terms.append(bind(product, ta, b)["d"])
    if tbias is not None and spec.global_order:
        terms.append(_bias_in_rows(spec, tbias, like))
        tbias = None
    if tb is not None and tbias is not None:
        # One call for both; its transpose gives both gradients.
        terms.append(bind(product.replace(epilog=Epilog.BIAS), a, tb, {"bias": tbias})["d"])
        tbias = None
    elif tb is not None:
        terms.append(bind(product, a, tb)["d"])
    if tc is not None and spec.beta != 0:
        terms.append(tc if spec.beta == 1 else tc * jnp.asarray(spec.beta, tc.dtype))
    if tbias is not None:
        # Cast before the broadcast, so that the transpose sums over rows before it sums over ranks.
        tbias = cast_varying(tbias, jax_compat.varying_axes(like))
        terms.append(lax.broadcast_in_dim(tbias, like.shape, (1,)))
    return sum(terms[1:], terms[0]) if terms else None


def _bias_in_rows(spec: MatmulSpec, bias: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcasts the bias to every row as a product with ones, so that the transpose sums the rows in a fixed order."""
    ones = cast_varying(jnp.ones((like.shape[0], 1), bias.dtype), jax_compat.varying_axes(like))
    order = dataclasses.replace(spec.order, rows=row_order.rows_of_result(spec), outer_rows=1)
    given = {"group": spec.ungrouped().group, "order": order, "alpha": 1.0, "out_dtype": bias.dtype}
    local = spec.bilinear(**dict.fromkeys(FLAGS, False), **given)
    return row_order.folded(spec, bind(local, ones, bias[None])["d"])


def activation_grad_jvp_rule(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, activation: str, spec: MatmulSpec | None
) -> tuple[jax.Array, Tangent]:
    """d(t * act'(z)) = act'(z) * dt + t * act''(z) * dz. The second term is zero for relu."""
    (aux, t), (taux, tt) = primals, tangents
    slope = functools.partial(activation_grad, activation, aux, spec=spec)
    y = slope(t)
    terms = [] if isinstance(tt, ad.Zero) else [slope(tt)]
    if activation == "gelu" and not isinstance(taux, ad.Zero):
        terms.append((t * gelu_second_derivative(aux).astype(t.dtype)) * taux.astype(t.dtype))
    return y, sum(terms[1:], terms[0]) if terms else zero_tangent(y)


def activated_matmul_jvp_rule(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, spec: MatmulSpec, activation: str
) -> tuple[jax.Array, Tangent]:
    """Differentiates the parts: linear in t, bias and w; in z by the second derivative of the activation."""
    moving = {i: t for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)}

    def parts(varied: dict[int, jax.Array]) -> jax.Array:
        operands = (varied.get(i, x) for i, x in enumerate(primals))
        return activated_matmul_parts(*operands, spec=spec, activation=activation)

    return jax.jvp(parts, ({i: primals[i] for i in moving},), (moving,))


def jet_rule(
    primals: Sequence[jax.Array], series: Sequence[Sequence[Any]], *, spec: MatmulSpec
) -> tuple[list[Any], list[list[Any]]]:
    """Returns a product's value and Taylor coefficients: coefficient i is the sum of left[j] @ right[i - j]. Raises
    NotImplementedError if the product has C or an epilog."""
    if not spec.is_bilinear:
        raise NotAvailable(
            f"jax.experimental.jet takes products without C and epilog, got epilog {spec.epilog.name}; nest jax.jvp"
        )
    left, right = ([x, *terms] for x, terms in zip(primals, series, strict=True))
    value, *terms = [sum(bind_operands(spec, left[j], right[i - j])[0] for j in range(i + 1)) for i in range(len(left))]
    return [value], [terms]
