"""The fallback for a bare `jit` over auto axes: XLA's partitioner hands over the shardings it has chosen.

Its limits: eager calls and partial-manual regions never consult it, and the partitioner may settle on another pattern
than the user has in mind (the gradient of an all-gather comes out as an all-reduce). Explicit axes or `in_shardings`
have none of these.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.lowering import rules
from jaxmp._src.lowering.resolve import resolve
from jaxmp._src.primitive import bias_grad, collectives
from jaxmp._src.primitive.primitives import activation_grad, bind, global_amax
from jaxmp._src.runtime import jax_lowering
from jaxmp._src.runtime.jax_lowering import LoweringRule
from jaxmp._src.runtime.jax_partitioner import Global
from jaxmp._src.runtime.types import Shape
from jaxmp._src.sharding import partitioned_call
from jaxmp._src.sharding.partitioned_call import Placed
from jaxmp._src.sharding.patterns import Dim, Dims, to_dims
from jaxmp._src.spec import process_grid
from jaxmp._src.spec.fields import from_fields, to_fields
from jaxmp._src.spec.matmul_spec import MatmulSpec, Pattern
from jaxmp._src.spec.matmul_spec import dims as spanned
from jaxmp._src.spec.options import Mesh
from jaxmp._src.validation.operand_checks import check_all_reduce

T = TypeVar("T")
# Who watches the partitioner, which may call back on any thread.
Observer = Callable[[MatmulSpec, Sequence[Any] | None], None]
_observers: list[Observer] = []
_observers_lock = threading.Lock()


@contextlib.contextmanager
def observe(callback: Observer) -> Iterator[None]:
    """While open, `callback(spec, operand types)` sees every call that the partitioner settles, and with None for the
    types every batch of products that it has to place."""
    with _observers_lock:
        _observers.append(callback)
    try:
        yield
    finally:
        with _observers_lock:
            _observers.remove(callback)


def _settle(a: Dims, b: Dims, out: Dims, spec: MatmulSpec) -> tuple[Pattern, Dim, Dims, Dims, Dims]:
    """(pattern, group, shardings of a, b, d as stored) that this call will use, nearest to what was proposed."""
    rows, k_a = a[::-1] if spec.transpose_a else a
    k_b, cols = b[::-1] if spec.transpose_b else b
    group = k_a if k_a and k_a == k_b else ()
    if group:
        rows, cols = _without(rows, group), _without(cols, group, rows)
        if out[0] == rows + group:
            pattern, result = Pattern.REDUCE_SCATTER, (rows + group, cols)
        else:
            pattern, result = Pattern.ALL_REDUCE, (rows, cols)
    elif rows and not out[0] and set(rows) <= set(cols):
        pattern, group, result = Pattern.ALL_GATHER, rows, ((), cols)
    else:
        pattern, result = Pattern.LOCAL, (out[0], _without(out[1], out[0]))
        rows, cols = result
    contracted = group if pattern in (Pattern.REDUCE_SCATTER, Pattern.ALL_REDUCE) else ()
    a = (contracted, rows) if spec.transpose_a else (rows, contracted)
    b = (cols, contracted) if spec.transpose_b else (contracted, cols)
    return pattern, group, a, b, result


def _without(dim: Dim, *others: Dim) -> Dim:
    return tuple(axis for axis in dim if all(axis not in other for other in others))


def _place_matmul(spec: MatmulSpec, mesh: Mesh, args: Sequence[Global], results: Sequence[Global]) -> Placed:
    """A product in the pattern that is nearest to the shardings that XLA proposes."""
    dims = []
    for x in (args[0], args[1], results[0]):
        proposed = x.sharding_on(mesh)
        if proposed is None:
            return _place_whole(spec, mesh, args, results)
        found = to_dims("matmul", "operand", proposed.spec, len(x.shape), mesh.shape)
        dims.append(_dividing(found, x.shape, mesh.shape))
    if (
        "relu_aux" in (*spec.operand_names, *spec.output_names)
        and _shard(results[0].shape[1], dims[2][1], mesh.shape) % process_grid.RELU_AUX_BITS
    ):
        # The mask is padded per shard; under the partitioner its shape cannot depend on the shards.
        columns = dims[2][1]
        dims = [tuple(_without(dim, columns) for dim in operand) for operand in dims]
    pattern, group, a, b, out = _settle(dims[0], dims[1], dims[2], spec)
    if pattern == Pattern.REDUCE_SCATTER and not _divides(results[0].shape[0], out[0], mesh.shape):
        pattern, out = Pattern.ALL_REDUCE, (a[1] if spec.transpose_a else a[0], out[1])
    local = spec.regroup(pattern=pattern, row_axes=group, mesh=tuple(mesh.shape.items()))
    local = check_all_reduce("jaxmp.matmul", local)
    outside = _without(out[0], group)
    where_of_operand = {"scale_a": {"m": a[0], "w": a[0], "u": a[1]}, "scale_b": {"n": b[0], "x": b[0], "v": b[1]}}

    def placed(name: str) -> NamedSharding:
        where = {"m": outside if name == "bgrada" else out[0], "n": out[1], "p": out[1], "q": out[1]}
        where = where_of_operand.get(name, where)
        return _sharding(mesh, tuple(where[dim] for dim in spanned(spec, name)))

    def on_shards(*shards: jax.Array) -> Sequence[jax.Array]:
        _tell(local, shards)
        outputs = _body(local, *shards)
        if bias_grad.summed(spec.output_names[-1]) != "d" or not outside:
            return outputs
        *rest, gradient = outputs
        return (*rest, collectives.psum(gradient, outside, source_line=spec.source_line))

    return (
        on_shards,
        [_sharding(mesh, a), _sharding(mesh, b), *map(placed, spec.operand_names)],
        [placed(name) for name in spec.output_names],
    )


def _place_whole(spec: MatmulSpec, mesh: Mesh, args: Sequence[Global], results: Sequence[Global]) -> Placed:
    """Every operand is whole on every device, as one that the program makes itself, of which no mesh may be known."""
    if not all(x.hlo_sharding.is_replicated() for x in args):
        raise NotImplementedError(
            "jaxmp.matmul: XLA shards an operand over what is no axis of the program's mesh (auto axes inside a "
            "partial-manual shard_map, or a sharding without a mesh); make every mesh axis manual, or pass "
            "in_shardings and mesh outside of the shard_map"
        )

    def on_shards(*operands: jax.Array) -> Sequence[jax.Array]:
        _tell(spec, operands)
        return _body(spec, *operands)

    whole = NamedSharding(mesh, P())
    return on_shards, [whole] * len(args), [whole] * len(results)


def _tell(spec: MatmulSpec, shards: Sequence[jax.Array]) -> None:
    for callback in list(_observers):
        callback(spec, [jax.typeof(x) for x in shards])


def _dividing(dims: Dims, shape: Shape, mesh: Mapping[str, int]) -> Dims:
    return tuple(dim if _divides(n, dim, mesh) else () for dim, n in zip(dims, shape, strict=True))


def _shard(extent: int, dim: Dim, mesh: Mapping[str, int]) -> int:
    return extent // math.prod(mesh[axis] for axis in dim)


def _divides(extent: int, dim: Dim, mesh: Mapping[str, int]) -> bool:
    for axis in dim:
        if extent % mesh[axis]:
            return False
        extent //= mesh[axis]
    return True


def _sharding(mesh: Mesh, dims: Dims) -> NamedSharding:
    return NamedSharding(mesh, P(*(dim or None for dim in dims)))


def _body(spec: MatmulSpec, a: jax.Array, b: jax.Array, *extra: jax.Array) -> tuple[jax.Array, ...]:
    named = bind(spec, a, b, dict(zip(spec.operand_names, extra, strict=True)))
    return tuple(global_amax(spec, named, tuple(axis for axis, _ in spec.group.mesh)).values())


def _sharding_rule(spec: MatmulSpec) -> str:
    # The packed relu mask has its own extent over n, so n cannot be propagated into it.
    operands = ["k m" if spec.transpose_a else "m k", "n k" if spec.transpose_b else "k n"]
    operands += [" ".join(spanned(spec, name)) for name in spec.operand_names]
    results = [" ".join(spanned(spec, name)) for name in spec.output_names]
    return ", ".join(_led(spec, operands)) + " -> " + ", ".join(results)


def _led(spec: MatmulSpec, operands: Sequence[T]) -> Sequence[T]:
    """The operands with the first operand of JAX's own product in front; and the inverse."""
    a, b, *rest = operands
    return (b, a, *rest) if spec.b_leads else operands


def _place(call: dict[str, Any], mesh: Mesh, args: Sequence[Global], results: Sequence[Global]) -> Placed:
    """How XLA's partitioner is to compute a call, by its description."""
    spec = from_fields(MatmulSpec, call["spec"])
    activation = call.get("activation")
    if activation is None:
        on_shards, operands, outputs = _place_matmul(spec, mesh, _led(spec, args), results)
        return lambda *shards: on_shards(*_led(spec, shards)), _led(spec, operands), outputs
    # Element by element, so every shard is a call of its own, on the sharding of the result.
    where = results[0].sharding_on(mesh)
    return lambda aux, t: [activation_grad(activation, aux, t, spec)], (where, where), (where,)


def matmul_rule(platform: str) -> LoweringRule:
    """The lowering of a product. Unsettled, one of global arrays becomes a call that XLA partitions."""
    return _rule(rules.matmul_rule(platform), _sharding_rule)


def activation_grad_rule(platform: str) -> LoweringRule:
    """As `matmul_rule`."""
    return _rule(rules.activation_grad_rule(platform), lambda spec: "m n, m n -> m n")


def _rule(on_shards: LoweringRule, sharding_rule: Callable[[MatmulSpec], str]) -> LoweringRule:
    def rule(ctx: jax_lowering.LoweringContext, *nodes: Any, spec: MatmulSpec | None, **params: Any) -> Any:
        if spec is None or not spec.is_unsettled:
            return on_shards(ctx, *nodes, spec=spec, **params)
        spec = spec.settled()
        if jax_lowering.is_on_shards(ctx):
            return on_shards(ctx, *nodes, spec=spec, **params)
        types = jax_lowering.operand_types(ctx)
        is_symbolic = not all(isinstance(extent, int) for x in types for extent in x.shape)
        if spec.is_batch or is_symbolic:  # XLA's own product of global arrays, which XLA partitions
            if not spec.is_batch:
                resolve(spec, types[0], types[1], jax_lowering.platform(ctx), 1)  # raises where a library was asked for
            spec = spec.replace(implementation="xla")
            for callback in list(_observers):
                callback(spec, None)
            return on_shards(ctx, *nodes, spec=spec, **params)
        if jax_lowering.partitions_without_shardy(ctx):
            raise NotImplementedError(
                "jaxmp.matmul: on automatic axes it is XLA's Shardy partitioner that chooses, and "
                "jax_use_shardy_partitioner is off; turn it on, pass in_shardings, or use explicit axes"
            )
        call = {"spec": to_fields(spec), **params}
        return partitioned_call.lower(ctx, _led(spec, nodes), call, sharding_rule(spec))

    return rule


partitioned_call.register(_place)
