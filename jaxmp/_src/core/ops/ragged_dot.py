"""Products of groups of rows, each with a matrix of its own: a mixture of experts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.typing import ArrayLike

from jaxmp._src.core.ops import activated
from jaxmp._src.core.primitive.grouped import GroupedSpec
from jaxmp._src.core.sharding import meshes, ragged, shardings
from jaxmp._src.core.spec import activations, levels, precisions
from jaxmp._src.core.spec.activations import Function
from jaxmp._src.core.spec.low_precision import Scaling
from jaxmp._src.core.spec.matmul_spec import INTEGERS
from jaxmp._src.core.spec.options import Activation
from jaxmp._src.core.spec.refusal import InvalidOperands, InvalidType, InvalidValue, NotAvailable
from jaxmp._src.core.spec.request import GroupOptions, Request
from jaxmp._src.core.validation import arguments, operand_checks, result_types
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.runtime.types import Operands, Shape


@public
def ragged_dot(
    x: ArrayLike,
    w: ArrayLike,
    group_sizes: ArrayLike,
    group_offset: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    scaling: Scaling | None = None,
    **options: Unpack[GroupOptions],
) -> jax.Array:
    """Multiplies each group of rows by the group's own matrix, as `lax.ragged_dot`.

        d[i] = activation(x[i] @ w[g] + bias[g])    for each row i of group g

    The rows of a group are adjacent, the first group's come first, and `group_sizes` says how many each has. Rows
    after the last group are `activation(0)`, zero by default. A row depends on its own group only: a weight that is
    infinite or NaN reaches no row of another group. On CPU devices the work is 2 m k n operations for any group sizes.

    Sizes are data. Invalid sizes are clamped: a negative size counts as 0, and groups end with the last row.

    Args:
      x: (m, k), of any type that `lax.ragged_dot` takes. XLA multiplies integers other than int8.
      w: (groups, k, n), of the type of x or another.
      group_sizes: (groups,), an array of integers. With `group_offset` it may list more groups than w has.
      group_offset: the index in `group_sizes` of the group of w[0], an integer of shape () or (1,). Rows of groups
        that w does not have are like rows after the last group. Default 0, and a negative one counts as 0.
      bias: (groups, n), a vector for each matrix of w.
      activation: as in `linear`. XLA adds the bias and applies the activation in the accumulator's type, and rounds
        once. With `determinism="batch"` None or "relu"; of integers None.
      precision: checked as in `matmul`. A preset may convert the operands; without one, products have the
        operands' full precision, on GPUs too.
      preferred_element_type: as in `lax.ragged_dot`; with `scaling` by default float32.
      scaling: float32 scales of narrow operands. XLA multiplies the sums by them, and adds the bias. `Scaling.a` is (),
        or (m,) for the rows of x. `Scaling.b` is (), (groups,), (groups, n) for the columns of each matrix, or
        (groups, blocks, n) for the columns of each block of k: XLA adds the sums of blocks, blocks times m times n.
      out_sharding: sharding of the result; required if k is sharded in both operands.
      in_shardings: a pair of shardings for x and w (auto axes).
      mesh: as in `matmul`.
      implementation: "host" on CPU devices, else "xla", which is `lax.ragged_dot`; None chooses. Or a function with the
        arguments of `lax.ragged_dot_general`, which multiplies a device's shards, in derivatives too.
      determinism: "run_to_run", "batch" or "topology". "batch": the bits of a row depend only on the row and its
        matrix, not on sizes, on the row's place or on other rows. k is then never split over devices; in gradients XLA
        chooses the order of sums over devices. "topology": in addition, gradients have the bits of one device, on one
        device and where all axes that the call splits shard rows of x and matrices of w.

    Returns:
      (m, n), sharded as `out_sharding`; by default along m as x, and along n as w.

    Raises: ValueError for shapes and shardings that do not fit, TypeError for sizes that are not integers,
    NotImplementedError for `implementation="cublasmp"` and for a level that shardings do not allow.

    Source: `jax.lax.ragged_dot` (docs.jax.dev).

    >>> import jax.numpy as jnp, jaxmp
    >>> w = jnp.array([[[1.0]], [[10.0]]])
    >>> jaxmp.ragged_dot(jnp.ones((4, 1)), w, jnp.array([1, 2])).tolist()
    [[1.0], [10.0], [10.0], [0.0]]
    """
    request = Request("ragged_dot", x, w, **options)
    if scaling is None:
        return product(request, group_sizes, group_offset, bias, activation)
    return _scaled(request, scaling, (group_sizes, group_offset), bias, activation)


def _scaled(request: Request, scaling: Scaling, groups: tuple[Any, Any], bias: Any, activation: Any) -> jax.Array:
    """Computes `jaxmp.ragged_dot` with `scaling`; `groups`: (sizes, offset or None). XLA multiplies the sums by the
    scales, and adds the bias. Raises NotImplementedError for an unreduced or reduced `out_sharding`, and with
    `determinism` "batch" or "topology" for a bias and for scales of blocks."""
    of_x, of_w = _scales(request, scaling)
    if meshes.is_partial(request.out_sharding):
        raise NotAvailable("scaling is not available with an out_sharding that is unreduced; scale the sum")
    out = operand_checks.check_preferred(request.preferred_element_type) or np.dtype(np.float32)
    spec = GroupedSpec(out, determinism=request.determinism, function=request.function)
    f, biases = activation_of(spec, activation), bias_of(spec, bias, request.b)
    if spec.level.fixed_order and (biases or of_w.ndim == 3):
        raise spec.level.refusal("takes no bias with scales and no scales of blocks, because XLA would add them")
    is_int8 = all(y.dtype == np.int8 for y in (request.a, request.b))
    request = request._replace(preferred_element_type=np.int32 if is_int8 else np.float32)

    def multiply(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        d = product(request._replace(a=x, b=w), *groups).astype(np.float32)
        return d * (_within(groups, scale, d, w) if scale.ndim == 0 else _of_rows(request, groups, scale, d))

    if of_w.ndim == 3:
        blocks = of_w.shape[1]
        x, w = (jnp.asarray(y).reshape(y.shape[0], blocks, -1, *y.shape[2:]) for y in (request.a, request.b))
        d = jax.vmap(multiply, 1)(x, w, of_w).sum(0)
    else:
        d = multiply(request.a, request.b, of_w)
    d = d * _within(groups, of_x, d, request.b)
    for each in biases.values():
        d = d + _of_rows(request, groups, each.astype(np.float32), d)
    return (d if f is None else f(d)).astype(out)


def _within(groups: tuple[Any, Any], scale: jax.Array, d: jax.Array, w: jax.Array) -> jax.Array:
    """Returns the `scale`, () or (m,), of each row of d as (m, 1): 0 for rows that are in none of w's groups, even if
    `scale` is infinite or NaN there."""
    sizes, offset = groups
    offset = None if offset is None else jnp.asarray(offset).reshape(())
    bounds = ragged.bounds_of(jnp.asarray(sizes), offset, d.shape[0], w.shape[0])
    at = jnp.arange(d.shape[0])
    return jnp.where((bounds[0] <= at) & (at < bounds[-1]), scale, 0)[:, None]


def _of_rows(request: Request, groups: tuple[Any, Any], values: jax.Array, d: jax.Array) -> jax.Array:
    """Expands `values`, (groups,) or (groups, n), to (m, n) by a product with k = 1: each row of d gets its group's, or
    0 if it is in none. On explicit axes the result has d's sharding."""
    matrices = jnp.broadcast_to(values.reshape(len(values), 1, -1), (len(values), 1, d.shape[1]))
    kind = jax.typeof(d).sharding
    request = request._replace(
        a=jnp.ones((d.shape[0], 1), np.float32),
        b=matrices,
        preferred_element_type=None,
        precision=None,
        in_shardings=None,
        out_sharding=kind.spec if AxisType.Explicit in kind.mesh.axis_types else None,
    )
    return product(request, *groups)


def _scales(request: Request, scaling: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the float32 scales of x, () or (m,), and of w, (), (g,), (g, n) or (g, blocks of k, n). A scale that is
    None is 1. Raises TypeError unless `scaling` is a Scaling of a and b alone, ValueError for another scale."""
    if not isinstance(scaling, Scaling) or dataclasses.replace(scaling, a=None, b=None) != Scaling():
        raise InvalidType(f"scaling must be a jaxmp.Scaling with scales a and b alone, got {scaling!r}")
    x, w, found = request.a, request.b, []
    operand_checks.check_array("{a}", x, 2)
    operand_checks.check_array("{b}", w, 3)
    g, k, n = w.shape
    of_b: Shape = getattr(scaling.b, "shape", ())
    blocks = of_b[1] if len(of_b) == 3 and k % max(1, of_b[1]) == 0 else 1
    wanted = {"a": ((), x.shape[:1]), "b": ((), (g,), (g, n), (g, blocks, n))}
    for name, shapes in wanted.items():
        scale = getattr(scaling, name)
        scale = jnp.float32(1) if scale is None else jnp.asarray(scale)
        if scale.shape not in shapes or scale.dtype != np.float32:
            raise InvalidValue(
                f"scaling.{name} must be float32 of shape {' or '.join(map(str, shapes))}, got {scale.dtype} "
                f"{scale.shape}" + f"; its blocks must divide k={k}" * (name == "b" and scale.ndim == 3)
            )
        found.append(scale)
    return found[0], found[1]


def product(
    request: Request, group_sizes: Any, group_offset: Any = None, bias: Any = None, activation: Any = None
) -> jax.Array:
    """Computes `jaxmp.ragged_dot` of the request's a and b, without scaling."""
    conversion, request = converted(request, group_sizes)
    spec, operands = validated(request, group_sizes, group_offset)
    (m, _), (*_, n) = shapes = operands["a"].shape, operands["b"].shape
    placement = meshes.place(request._replace(a=operands["a"], b=operands["b"]), (m, n))
    call = ragged.RaggedCall(of_global(spec, placement))
    if placement.mode == meshes.Mode.SHARDED:
        given = shardings.with_dims(ragged.PRODUCT, placement.dims, (*shapes, (m, n)), placement.mesh.shape)
        given = dataclasses.replace(given, unreduced=placement.unreduced)
        call = ragged.planned(spec, (placement.mesh, placement.is_explicit), given, shapes)
    f = activation_of(spec, activation)
    if f is not None:
        meshes.check_summed(placement)
    operands |= bias_of(spec, bias, operands["b"])
    run: Callable[[Operands], jax.Array] = functools.partial(activated.compiled(jaxmp_ragged_dot, f), call, f)
    if placement.mode == meshes.Mode.XLA:
        of_x, of_w = (meshes.type_dims(f"{{{name}}}", operands[name]) for name in "ab")
        dims = of_x, of_w, None if placement.out_sharding is None else ((), ())
        given = shardings.with_dims(ragged.PRODUCT, dims, (*shapes, (m, n)), placement.mesh.shape)
        run = meshes.on_automatic_axes(run, placement, given.layout.d)
    d: jax.Array = conversion.of_result(run(operands))
    return d if placement.constraint is None else lax.with_sharding_constraint(d, placement.constraint)


@functools.partial(jax.jit, static_argnums=(0, 1))
def jaxmp_ragged_dot(call: ragged.RaggedCall, f: Function | None, operands: Operands) -> jax.Array:
    """Computes the product with its bias, if any, and applies `f` (None: nothing) before the result is rounded."""
    if f is None and "bias" not in operands:
        return call(operands)

    def products(dtype: np.dtype, operands: Operands) -> list[jax.Array]:
        return [dataclasses.replace(call, spec=dataclasses.replace(call.spec, out_dtype=dtype))(operands)]

    zs = activated.preactivations(products, call.spec.out_dtype, operands)
    return activated.activate(f, zs)


def of_global(spec: GroupedSpec, placement: meshes.Placement) -> GroupedSpec:
    """Returns the spec, with `is_global` set if XLA's partitioner chooses the shardings. Raises NotImplementedError at
    "topology" inside a `shard_map` over axes of several devices, where XLA sums gradients."""
    if placement.mode == meshes.Mode.MANUAL:
        ragged.check_order(spec, tuple(axis for axis, size in placement.axes if size > 1))
    return dataclasses.replace(spec, is_global=placement.mode in (meshes.Mode.AUTO, meshes.Mode.XLA))


def activation_of(spec: GroupedSpec, activation: Any) -> Function | None:
    """Returns the function that XLA applies, or None. Raises ValueError for an unknown activation, NotImplementedError
    for any activation if the result is of integers, and for any but "relu" with `determinism` "batch" or "topology"."""
    found = activations.parse(activation)
    if found is not None and spec.out_dtype.name in INTEGERS:
        raise NotAvailable(
            f"with a result of {spec.out_dtype} activation is None; convert an operand, for example with "
            ".astype(jnp.float32)"
        )
    if spec.level.fixed_order and found not in (None, "relu"):
        raise spec.level.refusal('takes activation=None or "relu", because XLA determines the bits of others')
    return activations.FUNCTIONS[found] if isinstance(found, str) else found


def bias_of(spec: GroupedSpec, bias: Any, w: jax.Array) -> dict[str, jax.Array]:
    """Returns {"bias": bias in the result's type}, or {} if `bias` is None. Raises ValueError unless it is (groups, n),
    and TypeError unless its type and the result's promote to the result's."""
    if bias is None:
        return {}
    operand_checks.check_array("{bias}", bias)
    if bias.shape != (w.shape[0], w.shape[2]):
        raise InvalidValue(
            f"{{bias}} must have shape {(w.shape[0], w.shape[2])}, a vector for each matrix of {{b}}, got {bias.shape}"
        )
    operand_checks.check_widens("{bias}", bias, spec.out_dtype)
    return {"bias": jnp.asarray(bias).astype(spec.out_dtype)}


def converted(request: Request, group_sizes: Any) -> tuple[result_types.Conversion, Request]:
    """Returns (conversions to lax's types around a product, request with converted operands). The result is weakly
    typed only if both operands and `group_sizes` are."""
    conversion, call = arguments.converted(request._replace(implementation=None), are_rows=False, is_lax=True)
    if conversion.are_weak and not (operand_checks.is_array(group_sizes) and jax.typeof(group_sizes).weak_type):
        conversion = dataclasses.replace(conversion, is_weak=False, are_weak=False)
        call = call._replace(a=conversion.of("a", request.a), b=conversion.of("b", request.b))
    return conversion, call._replace(implementation=request.implementation)


def validated(request: Request, group_sizes: Any, group_offset: Any) -> tuple[GroupedSpec, dict[str, jax.Array]]:
    """Checks the arguments and returns (spec, operands). The operands are "a" and "b" in the call's types, "sizes", and
    "offset", of shape (), if it is given. Raises a `Refusal` for what does not fit."""
    x, w = request.a, request.b
    for name, operand, ndim in (("{a}", x, 2), ("{b}", w, 3)):
        operand_checks.check_array(name, operand, ndim)
    if x.shape[1] != w.shape[1]:
        raise InvalidOperands(
            f"{{b}} has k={w.shape[1]} but {{a}} has k={x.shape[1]} (global shapes {tuple(x.shape)}, {tuple(w.shape)})"
        )
    check_integers("group_sizes", group_sizes)
    groups, listed = w.shape[0], group_sizes.shape
    if len(listed) != 1 or (listed[0] != groups if group_offset is None else listed[0] < groups):
        wanted = f"({groups},)" if group_offset is None else f"(n,) with n of at least {groups}"
        raise InvalidOperands(f"group_sizes must have shape {wanted}, one size for each matrix of {{b}}, got {listed}")
    operands = {"sizes": jnp.asarray(group_sizes)}
    if group_offset is not None:
        group_offset = np.asarray(group_offset) if type(group_offset) is int else group_offset
        check_integers("group_offset", group_offset)
        if group_offset.shape not in ((), (1,)):
            raise InvalidOperands(f"group_offset must have shape () or (1,), got {group_offset.shape}")
        operands["offset"] = jnp.asarray(group_offset).reshape(())
    spec, converted = spec_and_operands(request)
    return spec, operands | converted


def spec_and_operands(request: Request) -> tuple[GroupedSpec, dict[str, jax.Array]]:
    """Returns the spec, and the operands {"a", "b"} in the type of their multiplication, but a b of 8 bits or fewer
    with a wider a stays so. `determinism` has no effect on integers. Raises NotImplementedError for "cublasmp" and for
    types without a product."""
    x, w = jnp.asarray(request.a), jnp.asarray(request.b)
    for name, operand in (("{a}", x), ("{b}", w)):
        operand_checks.check_operand(name, operand)
    preferred = operand_checks.check_preferred(request.preferred_element_type)
    types = result_types.of_call(arguments.types_of(x, w), preferred, False)
    if request.precision is not None:
        precisions.resolve(request.precision, types.operand, types.out)
    given = request.implementation
    implementation = given if callable(given) else operand_checks.check_implementation(given)
    if implementation == "cublasmp":
        raise NotAvailable('implementation="cublasmp": it has no product of groups; pass implementation=None or "xla"')
    # Sums of integers are exact in any order.
    level = levels.ANY_ORDER if types.operand.name in INTEGERS else levels.parse(request.determinism)
    spec = GroupedSpec(types.out, **level.option, implementation=implementation, function=request.function)
    x = x if x.dtype == types.operand else x.astype(types.operand)
    w = w if w.dtype == types.operand or types.is_mixed else w.astype(types.operand)  # the call decodes a narrow w
    return spec, {"a": x, "b": w}


def check_integers(argument: str, x: Any) -> None:
    """Raises TypeError unless x is an array of integers."""
    operand_checks.check_array(argument, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise InvalidType(f"{argument} must be an array of integers, got dtype {x.dtype}")
