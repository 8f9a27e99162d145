"""Gated layers: `(act(x @ w_gate) * (x @ w_up)) @ w_down`; the first two products share x.

A device gathers x once and multiplies it by its columns of either weight. So the gradient sums both products'
cotangents of x over devices once. The weights are not concatenated: one product with both would gather x inside the
call, but it would copy the weights, before the call and in the gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxmp._src.core.contraction.contraction import LOCAL, Contraction
from jaxmp._src.core.ops import activated
from jaxmp._src.core.ops.activated import Preactivations
from jaxmp._src.core.ops.matmul import dense
from jaxmp._src.core.primitive import collectives
from jaxmp._src.core.primitive.collectives import cast_varying
from jaxmp._src.core.sharding import meshes
from jaxmp._src.core.sharding.layer_plans import Label, Layers, groups_on_axes, plan_layers
from jaxmp._src.core.sharding.on_shards import Entry, on_shards
from jaxmp._src.core.sharding.shard_local import bind_plan
from jaxmp._src.core.sharding.sharded_call import Call, ShardedCall, jaxmp_call
from jaxmp._src.core.spec import activations, epilogs
from jaxmp._src.core.spec.activations import Function
from jaxmp._src.core.spec.matmul_spec import MatmulSpec
from jaxmp._src.core.spec.options import Activation, AxisName, Sharding
from jaxmp._src.core.spec.refusal import InvalidValue, NotAvailable
from jaxmp._src.core.spec.request import LayerOptions, Request
from jaxmp._src.core.validation.arguments import validated
from jaxmp._src.core.validation.operand_checks import has_numbers
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import Operands

GATE, UP, DOWN = (Label("gated_mlp", "x", f"w_{name}", f"b_{name}") for name in ("gate", "up", "down"))
DOWN = dataclasses.replace(DOWN, a="hidden")


@public
def gated_mlp(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    b_gate: ArrayLike | None = None,
    b_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    *,
    activation: Activation | None = "silu",
    axis_name: AxisName | None = None,
    hidden_sharding: Sharding | None = None,
    **options: Unpack[LayerOptions],
) -> jax.Array:
    """A gated layer, `(act(x @ w_gate + b_gate) * (x @ w_up + b_up)) @ w_down + b_down`.

    With "silu" SwiGLU, with "gelu" GEGLU, with "relu" ReGLU, with "sigmoid" GLU (Shazeer, arXiv:2002.05202).

    x is gathered once for both products, and its gradient summed over devices once. Activation and product are taken
    in the accumulator's type, and rounded once. Shardings are as in `mlp`; w_up has the sharding of w_gate.

    Args:
      x: (..., k).
      w_gate, w_up: (k, h), with the same sharding; b_gate, b_up: (h,) or None.
      w_down: (h, n); b_down: (n,) or None.
      activation: as in `linear`; None for the product only.
      axis_name: inside `jax.shard_map`, as in `mlp`.
      hidden_sharding: sharding of the hidden layer (..., h), as in `mlp`.
      out_sharding: sharding of y.
      in_shardings: a triple of shardings for x, w_gate and w_up, and w_down (auto axes).
      determinism: "run_to_run"; XLA computes the hidden layer.

    The other options are as in `matmul`.

    Returns:
      (..., n), sharded as `out_sharding`.

    Raises: as `matmul`; the message names the product. NotImplementedError for another determinism, for
    float8 and float4, and for int8 x and weights.

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.gated_mlp(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones((3, 4)), jnp.ones((4, 1)), activation="relu")
    Array([[36.],
           [36.]], dtype=float32)
    """
    if getattr(x, "ndim", 0) == 1 and axis_name is None:
        weights = w_gate, w_up, w_down, b_gate, b_up, b_down
        layer = functools.partial(gated_mlp, activation=activation)
        return activated.of_vector(layer, x, *weights, hidden_sharding=hidden_sharding, **options)
    found = activations.parse(activation)
    act = activations.FUNCTIONS[found] if isinstance(found, str) else found
    shared: list[Any] = [x, w_gate, w_up]
    if all(hasattr(operand, "dtype") for operand in shared):  # anything but an array is refused later, by name
        dtype = jnp.result_type(*shared)
        x, w_gate, w_up = (operand if operand.dtype == dtype else operand.astype(dtype) for operand in shared)
    gate = GATE.request(x, w_gate, b_gate, **options)._replace(out_sharding=hidden_sharding)
    typed: list[Any] = [x, b_up]
    if all(map(has_numbers, typed)) and jnp.result_type(*typed) != typed[0].dtype:  # the call already sees b_gate
        typed += [b_gate] if has_numbers(b_gate) else []
        gate = gate._replace(preferred_element_type=jnp.result_type(*typed))
    down = DOWN.request(None, w_down, b_down, **options)
    layers = plan_layers((GATE, DOWN), gate, down, axis_name)
    if down.level.fixed_order:
        raise NotAvailable(
            f'determinism must be "run_to_run", got {down.determinism!r}: XLA computes act(gate) * up; call '
            "jaxmp.linear for each product, and multiply the results by jnp, with XLA's bits"
        )
    operands = {
        "x": layers.operands[0]["a"],
        **_pair("gate", layers.operands[0]),
        **_up(layers, UP.request(x, w_up, b_up, **options), axis_name),
    }
    if found != "relu":
        activated.refuse_integers(layers.calls[0].spec)
    h: jax.Array = activated.compiled(jaxmp_gated, act)(*_static(layers, operands), act, operands)
    with DOWN.naming():
        if not layers.plans:
            return dense(down._replace(a=h, in_shardings=None), None)
        shards = layers.operands[1] | {"a": h.astype(layers.operands[1]["a"].dtype)}
        return jaxmp_call(layers.calls[1], shards)["d"]


def _pair(name: str, operands: dict[str, Any]) -> Operands:
    """Returns the weight and bias of a call's operands under new names: "w_gate" and "b_gate" if `name` is "gate". A
    bias may be missing; other operands are left out."""
    names = {"b": f"w_{name}", "bias": f"b_{name}"}
    return {names[key]: x for key, x in operands.items() if key in names}


def _up(layers: Layers, request: Request, axis_name: AxisName | None) -> Operands:
    """Returns w_up, and b_up if there is one, by name, in the types of their call. `layers` has the plan of the gate,
    `request` is the product with w_up. Raises ValueError if w_up has another shape than w_gate, or another sharding on
    explicit axes. Raises as `validated` for other errors."""
    like = layers.operands[0]["b"]
    shape = tuple(getattr(request.b, "shape", like.shape))
    if shape[:1] == like.shape[:1] and shape != like.shape:
        raise InvalidValue(f"w_up must have w_gate's shape {tuple(like.shape)}, got {shape}")
    with UP.naming():
        _, operands, _ = validated(request, groups_on_axes(axis_name)[0])
    call = layers.calls[0]
    if isinstance(call, ShardedCall) and call.frame.is_explicit:
        meshes.check_alike(w_up=operands["b"], w_gate=like)
    return _pair("up", operands)


# The hidden layer ------------------------------------------------------------------------------------------------


def _static(layers: Layers, operands: Operands) -> tuple[Call, Contraction, bool]:
    """Returns (the gate's call, its plan, whether a device gets x once for both products). The plan is LOCAL if XLA
    partitions the products. A device gets x once if a plan by jaxmp brings whole rows of x to it, except for a
    transposed plan, an empty operand, and a result that is resharded after `shard_map`."""
    call, plan = layers.calls[0], layers.plans[0] if layers.plans else LOCAL
    # Other patterns do not bring x to a device, or bring a part of its columns.
    brings_x = bool(layers.plans) and (not plan.communicates or plan.gathers or (plan.is_grid and not plan.col_axes))
    shares_x = brings_x and not plan.is_transposed and not any(0 in x.shape for x in operands.values())
    if isinstance(call, ShardedCall):
        shares_x = shares_x and call.frame.asked is None
        # The product with w_up may have a bias even if the gate's has none.
        entries = dict(call.frame.entries) | {"bias": Entry(meshes.partition_spec((plan.layout.d[-1],)))}
        call = dataclasses.replace(call, frame=dataclasses.replace(call.frame, entries=tuple(entries.items())))
    return call, plan, shares_x


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def jaxmp_gated(call: Call, plan: Contraction, shares_x: bool, act: Function | None, operands: Operands) -> jax.Array:
    """The hidden layer, `act(x @ w_gate + b_gate) * (x @ w_up + b_up)`."""
    return activated.activate(act, _preactivations(call, plan, shares_x, operands))


def _preactivations(call: Call, plan: Contraction, shares_x: bool, operands: Operands) -> Preactivations:
    """Computes x @ w_gate + b_gate and x @ w_up + b_up, as `activated.preactivations` returns them. If `shares_x`, x is
    gathered once for both, on shards; else they are two calls."""
    spec = call.spec

    def multiply(spec: MatmulSpec, layer: Operands) -> Operands:
        return jaxmp_call(dataclasses.replace(call, spec=spec), layer)

    if not shares_x:
        return activated.preactivations(functools.partial(_products, multiply, spec), spec.out_dtype, operands)
    body = functools.partial(_preactivations_on_shards, spec, plan)
    if not isinstance(call, ShardedCall):
        return body(operands)
    entries, kinds = dict(call.frame.entries), {"x": "a", "w": "b", "b": "bias"}
    frame = dataclasses.replace(call.frame, entries=tuple((name, entries[kinds[name[0]]]) for name in operands))
    return on_shards(frame, lambda shards: {"d": body(shards)}, operands, spec.source_line)["d"]


def _products(
    multiply: Callable[[MatmulSpec, Operands], Operands], spec: MatmulSpec, dtype: np.dtype, operands: Operands
) -> list[jax.Array]:
    """Returns [x @ w_gate, x @ w_up] in `dtype` with their biases, each by `multiply(spec, operands of the product)`,
    which returns results by name."""
    products = []
    for name in _NAMES:
        layer = {"a": operands["x"], "b": operands[f"w_{name}"]}
        layer |= {"bias": operands[f"b_{name}"]} if f"b_{name}" in operands else {}
        each = spec.replace(epilog=epilogs.for_activation(None, "bias" in layer))
        products.append(multiply(*activated.in_type(each, layer, dtype))["d"])
    return products


_NAMES = ("gate", "up")


def _preactivations_on_shards(spec: MatmulSpec, plan: Contraction, operands: Operands) -> Preactivations:
    """Computes both products on one device's shards, as `activated.preactivations` returns them. If the plan gathers x,
    x is gathered once, and the products are local. On a grid x stays as it is, and each product gathers its weight."""
    x = operands["x"]
    inner, inner_plan = (spec, plan) if plan.is_grid else (spec.ungrouped(), LOCAL)
    with jax.named_scope("jaxmp_shared_operand"):
        if plan.gathers:
            x = collectives.all_gather(x, spec.group.row_axes, axis=plan.dimension, source_line=spec.source_line)
        # Varying over these axes, so that both cotangents are added before they are summed over devices.
        axes = frozenset().union(*(jax_compat.varying_axes(operands[f"w_{name}"]) for name in _NAMES))
        x = cast_varying(x, axes, source_line=spec.source_line)
    products = functools.partial(_products, functools.partial(bind_plan, inner_plan), inner)
    return activated.preactivations(products, spec.out_dtype, operands | {"x": x})
