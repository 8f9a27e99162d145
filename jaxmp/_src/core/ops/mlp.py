"""Two dense layers as one function; its backward pass goes through the activation inside a call.

With z = x @ w_in + b_in, h = act(z), y = h @ w_out + b_out, the tangent of h never exists on its own:
dy = (act'(z) * (dx @ w_in + x @ dw_in + db_in)) @ w_out + h @ dw_out + db_out. Its first term is one primitive,
`activated_matmul_p`; the transpose of that is one product, with DGELU_BGRAD or DRELU_BGRAD as its epilog.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jaxmp._src.core.contraction.contraction import Contraction
from jaxmp._src.core.ops import activated
from jaxmp._src.core.ops.matmul import dense
from jaxmp._src.core.primitive.collectives import cast_reduced, cast_varying
from jaxmp._src.core.primitive.primitives import activated_matmul, completes_sums, fold_rows
from jaxmp._src.core.sharding import sharded_call
from jaxmp._src.core.sharding.layer_plans import Label, Layers, plan_layers
from jaxmp._src.core.sharding.on_shards import Frame, on_shards
from jaxmp._src.core.sharding.shard_local import bind_plan
from jaxmp._src.core.sharding.sharded_call import ShardedCall
from jaxmp._src.core.spec import activations, epilogs
from jaxmp._src.core.spec.activations import Function
from jaxmp._src.core.spec.matmul_spec import MatmulSpec
from jaxmp._src.core.spec.options import Activation, AxisName, Sharding
from jaxmp._src.core.spec.refusal import InvalidValue
from jaxmp._src.core.spec.request import LayerOptions
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import Operands

FIRST, SECOND = Label("mlp", "x", "w_in", "b_in"), Label("mlp", "hidden", "w_out", "b_out")


@public
def mlp(
    x: ArrayLike,
    w_in: ArrayLike,
    b_in: ArrayLike | None,
    w_out: ArrayLike,
    b_out: ArrayLike | None,
    *,
    activation: Activation,
    axis_name: AxisName | None = None,
    hidden_sharding: Sharding | None = None,
    **options: Unpack[LayerOptions],
) -> jax.Array:
    """Two dense layers, `act(x @ w_in + b_in) @ w_out + b_out`, with a fused backward pass.

    The value is the same as with two `linear`s. The gradient of a "relu" or "gelu" takes the cotangent of y through
    w_out, the activation and the hidden bias in one call (epilog DRELU_BGRAD or DGELU_BGRAD), except under XLA's
    partitioner (auto axes without `in_shardings`). Other activations have no such epilog.

    If x's rows and w_in's columns are sharded over one axis, the first layer is an all-gather; if y's rows are too, the
    second is a reduce-scatter (sequence parallelism). If x and y are replicated, they are local and an all-reduce.

    Args:
      x: (..., k).
      w_in: (k, h); b_in: (h,) or None.
      w_out: (h, n); b_out: (n,) or None.
      activation: as in `linear`, but not None.
      axis_name: inside `jax.shard_map`, a mesh axis or a tuple of them: x's rows (the next to last dimension) are
        gathered over it and y's are scattered; each rank holds its columns of w_in and b_in, its rows of w_out and all
        of b_out. None: both layers are local there.
      hidden_sharding: sharding of the hidden layer (..., h). By default its columns are sharded as w_in's columns, its
        rows as the rows of x without those axes.
      out_sharding: sharding of y.
      in_shardings: a triple of shardings for x, w_in and w_out (auto axes).

    The other options are as in `matmul`.

    Returns:
      (..., n), sharded as `out_sharding`.

    Raises: as `matmul`; the message names the product. NotImplementedError for float8 and float4, and int8 x and w_in.

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.mlp(jnp.ones((2, 3)), jnp.ones((3, 4)), None, jnp.ones((4, 1)), jnp.ones(1), activation="relu")
    Array([[13.],
           [13.]], dtype=float32)
    """
    if getattr(x, "ndim", 0) == 1 and axis_name is None:
        layer = functools.partial(mlp, activation=activation)
        return activated.of_vector(layer, x, w_in, b_in, w_out, b_out, hidden_sharding=hidden_sharding, **options)
    found = activations.parse(activation)
    if found is None:
        raise InvalidValue("activation must be a name or a function, got None; call jaxmp.linear twice")
    fused = found if isinstance(found, str) else None
    first = FIRST.request(x, w_in, b_in, fused, **options)._replace(out_sharding=hidden_sharding)
    second = SECOND.request(None, w_out, b_out, **options)
    layers = plan_layers((FIRST, SECOND), first, second, axis_name)
    if fused is None:
        with FIRST.naming():
            activated.check_spec(layers.calls[0].spec)
    if layers.plans:
        return _planned(layers, found)
    with FIRST.naming():  # if XLA's partitioner decides, the two layers are separate calls
        h = dense(first._replace(in_shardings=None), activation)
        h = jax_compat.convert(h, h.dtype)  # strongly typed, as in a plan
    with SECOND.naming():
        return dense(second._replace(a=h, in_shardings=None), None)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer on shards: its spec and plan, and its operands' names among the operands of both layers."""

    spec: MatmulSpec
    plan: Contraction
    weight: str
    bias: str

    def apply(
        self, x: jax.Array, operands: Operands, activation: str | None = None, keeps_aux: bool = False
    ) -> Operands:
        """Returns the results of the layer on shards by name: "d", with the `activation` applied. With `keeps_aux` and
        an activation returns second its mask "relu_aux" or z "gelu_aux". `operands`: both layers' operands."""
        layer = {"a": x, "b": operands[self.weight]}
        layer |= {"bias": operands[self.bias]} if self.bias in operands else {}
        epilog = epilogs.for_activation(activation, "bias" in layer)
        epilog = (keeps_aux and epilogs.RULES[epilog].with_aux) or epilog
        return bind_plan(self.plan, self.spec.replace(epilog=epilog), layer)


@dataclasses.dataclass(frozen=True)
class _Mlp:
    """Both layers, hashable. `activation`: "relu" or "gelu". `frame`: the frame of global arrays."""

    first: _Layer
    second: _Layer
    activation: str
    frame: Frame | None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _layers(mlp: _Mlp, operands: Operands) -> jax.Array:
    """Computes y on shards from x, w_in, b_in, w_out, b_out, by name; a bias may be missing."""
    h = mlp.first.apply(operands["x"], operands, mlp.activation)["d"]
    return mlp.second.apply(h, operands)["d"]


@jax_compat.as_traced
def _layers_jvp_rule(
    mlp: _Mlp, primals: tuple[Operands], tangents: tuple[dict[str, Any]]
) -> tuple[jax.Array, jax.Array]:
    """Returns (y, y's tangent: the sum of a term for w_out and b_out, and of `_activated` for x, w_in and b_in). The
    `tangents` by name may be `SymbolicZero`s; if all are, y's tangent is an array of zeros."""
    operands, moved = primals[0], {k: t for k, t in tangents[0].items() if not isinstance(t, SymbolicZero)}
    h, aux = mlp.first.apply(operands["x"], operands, mlp.activation, keeps_aux=True).values()
    y = mlp.second.apply(h, operands)["d"]
    weights = {name: operands[name] for name in ("x", "w_in")}

    def first(varied: Operands) -> jax.Array:
        return mlp.first.apply((weights | varied)["x"], weights | varied)["d"]

    def second(varied: Operands) -> jax.Array:
        return mlp.second.apply(h, operands | varied)["d"]

    def tangent(f: Callable[[Operands], jax.Array], names: tuple[str, ...]) -> jax.Array | None:
        varied = {name: operands[name] for name in names if name in moved}
        return jax.jvp(f, (varied,), ({name: moved[name] for name in varied},))[1] if varied else None

    tz, terms = tangent(first, ("x", "w_in")), [tangent(second, ("w_out", "b_out"))]
    if tz is not None or "b_in" in moved:
        tz = jnp.zeros_like(h) if tz is None else tz
        terms.append(_activated(mlp, tz, moved.get("b_in"), aux, operands["w_out"]))
    axes = jax_compat.varying_axes(y)
    moving = [cast_varying(x, axes) for x in terms if x is not None]
    return y, functools.reduce(jnp.add, moving) if moving else jnp.zeros_like(y)


_layers.defjvp(_layers_jvp_rule, symbolic_zeros=True)


def _activated(mlp: _Mlp, tz: jax.Array, tbias: jax.Array | None, aux: jax.Array, w: jax.Array) -> jax.Array:
    """Computes (act'(z) * (tz + tbias)) @ w on shards of any rank, in one call: a term of y's tangent. `aux`: the
    stored z, or its signs for "relu". `tbias` may be None. The result has the dimensions of `tz`; the one that the
    second layer scatters is as many times shorter as there are ranks, and the last is w's."""
    spec = mlp.second.spec.bilinear(is_typed=jax_compat.is_vma_checked())
    scatters, ahead, shape = spec.contraction.scatters, mlp.second.plan.dimension, list(tz.shape[:-1])
    fold = functools.partial(fold_rows, ndim=len(shape), ahead=ahead, nranks=spec.group.nranks if scatters else 1)
    y = activated_matmul(spec, mlp.activation, fold(tz), fold(aux), w, tbias=tbias)
    if scatters:
        shape[ahead] //= spec.group.nranks
    return y.reshape(*shape, y.shape[-1])


# Where it runs ---------------------------------------------------------------------------------------------------


# The operands of both layers, by their names in each call; the second call's a is the hidden layer.
_NAMES = {"a": "x", "b": "w_in", "bias": "b_in"}, {"b": "w_out", "bias": "b_out"}


def _planned(layers: Layers, activation: str | Function) -> jax.Array:
    """Computes y in the patterns of `layers.plans`, by two calls or by `jaxmp_mlp`. `jaxmp_mlp` differentiates both
    layers as a whole. It needs a "relu" or "gelu", another level than "topology", one type of h and both results,
    kernels that may sum bias gradients over ranks (`completes_sums`), and no extent of 0. For global arrays the second
    layer must also take h as the first shards it, without a gather, not transposed and without `col_axes`."""
    (ins, outs), plans, (first, second) = layers.operands, layers.plans, layers.calls
    h, spec, next_spec = outs["a"], first.spec, second.spec
    shapes = *ins["a"].shape, *ins["b"].shape, *outs["b"].shape
    is_fused = h.dtype == spec.out_dtype == next_spec.out_dtype and 0 not in shapes
    # Calls sum the gradient of a hidden bias over data-parallel ranks.
    is_fused = is_fused and not spec.global_order and completes_sums(spec) and completes_sums(next_spec)
    frame = None
    if isinstance(first, ShardedCall) and isinstance(second, ShardedCall):
        is_fused = is_fused and first.frame.asked is None and not plans[1].is_transposed
        is_fused = is_fused and plans[1].layout.a == plans[0].layout.d
        is_fused = is_fused and not dict(second.frame.entries)["a"].gathers
        # Each device has its rows of the hidden layer.
        is_fused = is_fused and not plans[1].gathers and not plans[1].col_axes
        given = [dict(each.frame.entries) for each in (first, second)]
        frame = dataclasses.replace(second.frame, entries=tuple(_named(*given).items()))
    if isinstance(activation, str) and is_fused:
        both = _Layer(spec, plans[0], "w_in", "b_in"), _Layer(next_spec, plans[1], "w_out", "b_out")
        return jaxmp_mlp(_Mlp(*both, activation, frame), _named(ins, outs))
    if isinstance(activation, str):
        y = sharded_call.jaxmp_call(first, ins)["d"]
    else:
        y = activated.activated_call(first, activation, ins)
    return sharded_call.jaxmp_call(second, outs | {"a": y.astype(h.dtype)})["d"]


def _named(*of_calls: dict[str, Any]) -> dict[str, Any]:
    """Returns what each call has for its operands, by their names among the operands of both layers."""
    pairs = zip(_NAMES, of_calls, strict=True)
    return {names[name]: x for names, each in pairs for name, x in each.items() if name in names}


@functools.partial(jax.jit, static_argnums=0)
def jaxmp_mlp(mlp: _Mlp, operands: Operands) -> jax.Array:
    """Computes y from x, w_in, b_in, w_out and b_out, by name, in one body that is differentiated as a whole."""
    body = functools.partial(_layers, mlp)
    if mlp.frame is None:
        return body(cast_reduced(operands))
    return on_shards(mlp.frame, lambda shards: {"d": body(shards)}, operands, mlp.first.spec.source_line)["d"]
