"""The layers of experts: `(act(x @ w_gate[g]) * (x @ w_up[g])) @ w_down[g]` for the rows x of each group g.

On a mesh all products run in one `shard_map`, and the ranks of an axis split the same index, rows, groups or hidden
features, in each product. So a hidden row stays where it is made, and nothing moves between the products.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmp._src.core.contraction.contraction import Dim, Dims
from jaxmp._src.core.ops import activated, ragged_dot
from jaxmp._src.core.primitive.collectives import cast_varying
from jaxmp._src.core.primitive.grouped import GroupedSpec
from jaxmp._src.core.sharding import meshes, ragged, shardings
from jaxmp._src.core.sharding.on_shards import on_shards
from jaxmp._src.core.sharding.ragged import RaggedCall
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.activations import Function
from jaxmp._src.core.spec.matmul_spec import accumulator
from jaxmp._src.core.spec.options import Activation
from jaxmp._src.core.spec.refusal import InvalidValue, naming
from jaxmp._src.core.spec.request import ExpertOptions, Request
from jaxmp._src.core.validation import operand_checks
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime.types import Operands


@public
def moe_mlp(
    x: ArrayLike,
    w_gate: ArrayLike | None,
    w_up: ArrayLike,
    w_down: ArrayLike,
    group_sizes: ArrayLike,
    group_offset: ArrayLike | None = None,
    *,
    b_gate: ArrayLike | None = None,
    b_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    activation: Activation | None = "silu",
    **options: Unpack[ExpertOptions],
) -> jax.Array:
    """Computes the layers of a mixture of experts, on rows that are sorted by expert.

        d[i] = (act(x[i] @ w_gate[g]) * (x[i] @ w_up[g])) @ w_down[g]    for each row i of group g

    or, if w_gate is None, `act(x[i] @ w_up[g]) @ w_down[g]`; biases are added to each product. Groups are as in
    `ragged_dot`: rows of a group are adjacent, and rows after the last group are zero.

    On a mesh the ranks of an axis split the same index, rows, experts or hidden features, in all products, and nothing
    is exchanged between the products. If rows and experts are sharded over one axis, nothing moves on CPU devices of
    one process, as in `ragged_dot`. Otherwise rows of x are gathered, and the ranks' terms of d are summed; or the
    weights are gathered, if rows are sharded too and the weights are smaller than x and d.

    Args:
      x: (m, k).
      w_gate, w_up: (groups, k, h), with the same sharding; b_gate, b_up: (groups, h) or None.
      w_down: (groups, h, n); b_down: (groups, n) or None. Weights may be narrower than x, as int8 with bfloat16.
      group_sizes, group_offset: as in `ragged_dot`.
      activation: as in `ragged_dot`; the activation and its product with the other branch are taken in the
        accumulator's type, and rounded once. A function may not close over arrays that a mesh shards.
      out_sharding: sharding of the result.
      in_shardings: a triple of shardings for x, w_gate and w_up, and w_down (auto axes).
      determinism: as in `ragged_dot`; h is then never split over devices.

    The other options are as in `ragged_dot`.

    Returns:
      (m, n), sharded as `out_sharding`; by default along m as x, and along n as w_down.

    Raises: as `ragged_dot`; the message names the product. ValueError for a b_gate without w_gate.

    Source: Jiang et al., Mixtral of Experts (arXiv:2401.04088); Gale et al., MegaBlocks (arXiv:2211.15841).

    >>> import jax.numpy as jnp, jaxmp
    >>> w = jnp.array([[[1.0]], [[10.0]]])
    >>> jaxmp.moe_mlp(jnp.ones((4, 1)), w, w, w, jnp.array([1, 2]), activation="relu").tolist()
    [[1.0], [1000.0], [1000.0], [0.0]]
    """
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    groups = {"sizes": group_sizes, "offset": group_offset}
    return layers(x, weights, groups, {"gate": b_gate, "up": b_up, "down": b_down}, activation, **options)


def layers(
    x: Any,
    weights: Mapping[str, Any],
    groups: Mapping[str, Any],
    biases: Mapping[str, Any],
    activation: Any,
    **options: Unpack[ExpertOptions],
) -> jax.Array:
    """Computes `jaxmp.moe_mlp`. `weights`: "w_gate" (or None), "w_up" and "w_down"; `biases`: "gate", "up" and "down",
    each may be missing or None.

    `groups` has "sizes" and "offset" (or None) for rows that are sorted by expert. For rows in any order it has
    "experts" and "gates" instead, both (m, top_k): each row of x goes through its experts, and the results times its
    gates are summed."""
    arrays = {"x": x} | {name: w for name, w in weights.items() if w is not None or name != "w_gate"}
    for name, array in arrays.items():
        operand_checks.check_array(name, array)
    wide = [y for y in arrays.values() if np.dtype(y.dtype).name not in low_precision.NARROW]
    dtype = jnp.result_type(*(wide or arrays.values()))
    operands: Operands = {
        name: y if name != "x" and low_precision.is_mixed(y.dtype, dtype) else y.astype(dtype)  # calls decode y
        for name, y in ((name, jnp.asarray(array)) for name, array in arrays.items())
    }
    ins = options.get("in_shardings")
    request = Request("moe_mlp", operands["x"], operands["w_up"], takes_transposed=False, **options)
    request = request._replace(preferred_element_type=dtype if operands["w_up"].dtype != dtype else None)
    is_routed = "experts" in groups
    with naming("moe_mlp", b="w_up"):
        sizes = np.zeros(jnp.shape(request.b)[:1], int) if is_routed else groups["sizes"]
        spec, found = ragged_dot.validated(request, sizes, groups.get("offset"))
        f = ragged_dot.activation_of(spec, activation)
    _check_weights(operands)
    operands |= groups if is_routed else {name: found[name] for name in ("sizes", "offset") if name in found}
    for name, bias in biases.items():
        if bias is not None and f"w_{name}" not in operands:
            raise InvalidValue("b_gate needs w_gate, which is None; pass it as b_up")
        if bias is not None:
            with naming("moe_mlp", b=f"w_{name}", bias=f"b_{name}"):
                operands[f"b_{name}"] = ragged_dot.bias_of(spec, bias, operands[f"w_{name}"])["bias"]
    products, place = _placed(request, spec, ins, operands)
    run: Callable[[Operands], jax.Array] = functools.partial(activated.compiled(jaxmp_moe_mlp, f), *products, f)
    if place.mode == meshes.Mode.XLA:
        rows = meshes.type_dims("x", operands["x"])[0]
        columns = meshes.type_dims("w_down", operands["w_down"])[2]
        run = meshes.on_automatic_axes(run, place, (rows, tuple(axis for axis in columns if axis not in rows)))
    d: jax.Array = run(operands)
    return d if place.constraint is None else lax.with_sharding_constraint(d, place.constraint)


def _check_weights(weights: Operands) -> None:
    """Raises ValueError unless w_down has the groups and h of w_up, and w_gate, if there is one, the shape of w_up and
    on explicit axes the sharding of w_up."""
    groups, _, h = weights["w_up"].shape
    if weights["w_down"].ndim != 3 or weights["w_down"].shape[:2] != (groups, h):
        raise InvalidValue(f"w_down must have shape ({groups}, {h}, n), got {weights['w_down'].shape}")
    if "w_gate" not in weights:
        return
    gate, up = weights["w_gate"], weights["w_up"]
    if gate.shape != up.shape:
        raise InvalidValue(f"w_gate must have w_up's shape {up.shape}, got {gate.shape}")
    meshes.check_alike(w_gate=gate, w_up=up)


# Where it runs ---------------------------------------------------------------------------------------------------

# Products on one device's shards of x, and of the hidden rows; all run in the `shard_map` of the second.
_Products = tuple[RaggedCall, RaggedCall]


def _placed(request: Request, spec: GroupedSpec, ins: Any, operands: Operands) -> tuple[_Products, meshes.Placement]:
    """Returns ((call of gate and up, call of down), the placement of down). Unless the mode is SHARDED, both calls are
    the same, without a frame. `request`: the options. `ins`: the user's `in_shardings` for x, w_up and w_down, or None.
    Raises ValueError for other `ins` and for shardings that do not fit, NotImplementedError for a level that the
    shardings do not allow."""
    x, w_up, w_down = (operands[name] for name in ("x", "w_up", "w_down"))
    shardings.check_each(ins, 3, "each of x, w_up and w_down")
    places = []
    for i, name in enumerate(("w_up", "w_down"), 1):
        with naming("moe_mlp", b=name):
            each = request._replace(b=operands[name], in_shardings=None if ins is None else (ins[0], ins[i]))
            places.append(meshes.place(each, (x.shape[0], w_down.shape[2])))
    first, second = places
    if first.mode != meshes.Mode.SHARDED:
        call = RaggedCall(ragged_dot.of_global(spec, first))
        return (call, call), second
    (of_x, of_up, _), (_, of_down, out) = first.dims, second.dims
    rows = of_x[0]
    out = (rows, tuple(axis for axis in of_down[2] if axis not in rows)) if out is None else out
    dims = of_x, of_up, of_down, out
    shapes = x.shape, w_up.shape, w_down.shape, first.shape
    for name, where, shape in zip(("x", "w_up", "w_down", "the result"), dims, shapes, strict=True):
        shardings.check_dims(name, where, shape, first.mesh.shape)
    extents = (*w_up.shape, *first.shape)
    return planned(spec, (first.mesh, first.is_explicit), dims, extents, second.unreduced), second


@functools.lru_cache(maxsize=4096)
def planned(
    spec: GroupedSpec, where: tuple[Any, bool], dims: tuple[Dims, ...], extents: tuple[int, ...], unreduced: Dim
) -> _Products:
    """Returns the calls (of gate and up, of down) on shards; only the second has a frame for `shard_map`. `where`: (the
    mesh, whether its axes are explicit). `dims`: the shardings of x, w_up (and w_gate), w_down and d. `extents`: of g,
    k, h, m, n. `unreduced`: d's unreduced axes."""
    (mesh, _), (g, k, h, m, n) = where, extents
    larger = g * h * (2 * k + n) > m * (k + n)
    choose = functools.partial(_split, is_w_larger=larger, keeps_h=spec.level.fixed_order)
    x, w_in, w_down, d = dims
    arrays: ragged.Arrays = {
        "x": ("mk", x),
        "w_up": ("gkh", w_in),
        "w_gate": ("gkh", w_in),
        "w_down": ("ghn", w_down),
        "b_up": ("gh", None),
        "b_gate": ("gh", None),
        "b_down": ("gn", None),
        "experts": ("mr", None),
        "gates": ("mr", None),
        "d": ("mn", d),
    }
    sizes = dict(zip("gkhmn", extents, strict=True)) | {"r": 1}  # no axis divides the experts chosen for a row
    experts = ragged.shared_axes(spec, mesh, x[0], w_in[0]) if w_in[0] == w_down[0] else ()
    second = dataclasses.replace(spec, whole=(g, m, h, n), experts=experts)
    call = ragged.split_call(second, where, choose, sizes, arrays, unreduced)
    rows, groups, hidden, columns = call.rows, call.groups, call.contracted, dict(call.spec.splits)["n"]
    of_both = ("m", rows), ("g", groups)
    first = dataclasses.replace(call.spec, whole=(g, m, k, h), splits=(*of_both, ("k", ()), ("n", hidden)))
    of_second = dataclasses.replace(call.spec, splits=(*of_both, ("k", hidden), ("n", columns)))
    call = dataclasses.replace(call, spec=of_second)
    return RaggedCall(first, rows=call.rows, groups=call.groups), call


def _split(x: str, w_in: str, _: str, w_down: str, d: str, *, is_w_larger: bool, keeps_h: bool) -> str:
    """Returns the index that the ranks of an axis split in all products. The five strings: the index along which the
    axis shards x, w_up, w_gate, w_down and d, or "". `is_w_larger`: the weights have more elements than x and d.
    `keeps_h`: h is not split.

    It is "m" if the axis shards rows of x or d, except if it also shards "g" or "h" of a weight and `is_w_larger`.
    Then, and if it shards no rows, it is that "g" or "h", or "h" if it shards neither. With `keeps_h` h counts as not
    sharded, and "m" replaces "h". It is never k, because the first products would be summed before the activation."""
    own = next((index for index in (w_in, w_down) if index == "g" or (index == "h" and not keeps_h)), "")
    if "m" in (x, d) and not (own and is_w_larger):
        return "m"
    return own or ("m" if keeps_h else "h")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def jaxmp_moe_mlp(first: RaggedCall, second: RaggedCall, f: Function | None, operands: Operands) -> jax.Array:
    """Computes d from the arrays of `layers`, by name: in the `shard_map` of `second`, if it has a frame."""
    local = dataclasses.replace(second, frame=None)
    body = functools.partial(_on_shards, first, local, f)
    if second.frame is None:
        return body(operands)["d"]
    return on_shards(second.frame, body, operands, "moe_mlp")["d"]


def _on_shards(first: RaggedCall, second: RaggedCall, f: Function | None, operands: Operands) -> Operands:
    """Returns {"d": the result} on one device's shards. With "experts" in the operands rows are in any order, and the
    ranks' terms of the result are summed; otherwise rows are sorted by expert."""
    # Varying over these axes, so that cotangents of x are added before they are summed over devices.
    axes = jax_compat.varying_axes(operands["w_up"])
    operands = operands | {"x": cast_varying(operands["x"], axes, source_line="moe_mlp")}
    if "experts" in operands:
        return {"d": second.summed(_routed(first, second, f, operands))}
    return {"d": _products(first, second, f, operands)}


def _products(first: RaggedCall, second: RaggedCall, f: Function | None, operands: Operands) -> jax.Array:
    """Returns d of rows x that are sorted by expert: `down(f(gate) * up)`, or `down(f(up))` without w_gate. An `f` of
    None is the identity."""
    names = [name for name in ("gate", "up") if f"w_{name}" in operands]

    def product(call: RaggedCall, x: jax.Array, name: str, operands: Operands) -> jax.Array:
        kinds = {"b": f"w_{name}", "bias": f"b_{name}", "sizes": "sizes", "offset": "offset"}
        return call({"a": x} | {kind: operands[each] for kind, each in kinds.items() if each in operands})

    def products(dtype: np.dtype, operands: Operands) -> list[jax.Array]:
        call = dataclasses.replace(first, spec=dataclasses.replace(first.spec, out_dtype=dtype))
        return [product(call, operands["x"], name, operands) for name in names]

    hidden = activated.activate(f, activated.preactivations(products, first.spec.out_dtype, operands))
    return product(second, hidden, "down", operands)


def _routed(first: RaggedCall, second: RaggedCall, f: Function | None, operands: Operands) -> jax.Array:
    """Returns each row's sum of gate times result over this rank's experts, in the row's order of experts and in the
    accumulator's type. It is a term of the result if ranks split experts or hidden features. A device sorts its own
    rows by expert, so rows never move between ranks of data."""
    x, experts, gates = (operands[name] for name in ("x", "experts", "gates"))
    (m, top_k), groups = experts.shape, operands["w_up"].shape[0] * math.prod(map(lax.axis_size, second.groups))
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = (experts.reshape(-1, 1) == jnp.arange(groups, dtype=experts.dtype)[None]).sum(0, dtype=np.int32)
    out = accumulator(second.spec.out_dtype)
    here = dataclasses.replace(second, rows=(), sums=(), scatters=((), ()))
    here = dataclasses.replace(here, spec=_with_choices(dataclasses.replace(second.spec, out_dtype=out), top_k))
    first = dataclasses.replace(first, rows=(), spec=_with_choices(first.spec, top_k))
    rows = _permuted(jnp.repeat(x, top_k, 0), order)
    d = _products(first, here, f, operands | {"x": rows, "sizes": sizes})
    d = _permuted(d, jnp.argsort(order)).reshape(m, top_k, d.shape[-1])
    terms = [gates[:, i : i + 1].astype(out) * d[:, i] for i in range(top_k)]
    return sum(terms[1:], terms[0])


def _with_choices(spec: GroupedSpec, top_k: int) -> GroupedSpec:
    """Returns the spec with `top_k` times as many rows in `whole`, the extents of the global product."""
    whole = (spec.whole[0], spec.whole[1] * top_k, *spec.whole[2:]) if spec.whole else ()
    return dataclasses.replace(spec, whole=whole)


def _permuted(x: jax.Array, order: jax.Array) -> jax.Array:
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")
