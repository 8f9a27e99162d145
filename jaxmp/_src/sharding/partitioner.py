"""The fallback for a bare `jit` over auto axes: XLA's partitioner hands over the shardings it has chosen.

Only here is custom_partitioning used. Its limits: `jax.export` refuses it on more than one device, eager calls and
partial-manual regions never consult it, and the partitioner may settle on another pattern than the user has in
mind (the gradient of an all-gather comes out as an all-reduce). Explicit axes or `in_shardings` have none of these.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.primitive import bias_grad, collectives
from jaxmp._src.primitive.primitives import (
    activation_grad,
    auto_activation_grad_p,
    auto_batched_matmul_epilog_p,
    auto_batched_matmul_p,
    auto_matmul_epilog_p,
    auto_matmul_p,
    batched_matmul_epilog_p,
    batched_matmul_p,
    bind,
    global_amax,
)
from jaxmp._src.runtime import jax_compat
from jaxmp._src.runtime.jax_compat import mlir
from jaxmp._src.runtime.types import Shape
from jaxmp._src.sharding.patterns import Dim, Dims, to_dims
from jaxmp._src.spec import process_grid
from jaxmp._src.spec.matmul_spec import MatmulSpec, Pattern
from jaxmp._src.spec.matmul_spec import dims as spanned
from jaxmp._src.spec.options import Mesh
from jaxmp._src.validation.operand_checks import check_all_reduce

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


def _partition(spec: MatmulSpec, mesh: Mesh, args: Sequence[jax.ShapeDtypeStruct], results: Any) -> Any:
    if not all(isinstance(x.sharding, NamedSharding) for x in args):
        if all(x.sharding.is_fully_replicated for x in args):
            return _partition_whole(spec, mesh, args, results)
        raise NotImplementedError(
            "jaxmp.matmul: auto axes inside a partial-manual shard_map are not supported; make every mesh axis manual, "
            "or pass in_shardings and mesh outside of the shard_map"
        )
    first = results[0] if isinstance(results, tuple | list) else results
    dims = [
        _dividing(to_dims("matmul", "operand", x.sharding.spec, len(x.shape), mesh.shape), x.shape, mesh.shape)
        for x in (args[0], args[1], first)
    ]
    if (
        "relu_aux" in (*spec.operand_names, *spec.output_names)
        and _shard(first.shape[1], dims[2][1], mesh.shape) % process_grid.RELU_AUX_BITS
    ):
        # The mask is padded per shard; under the partitioner its shape cannot depend on the shards.
        columns = dims[2][1]
        dims = [tuple(_without(dim, columns) for dim in operand) for operand in dims]
    pattern, group, a, b, out = _settle(dims[0], dims[1], dims[2], spec)
    if pattern == Pattern.REDUCE_SCATTER and not _divides(first.shape[0], out[0], mesh.shape):
        pattern, out = Pattern.ALL_REDUCE, (a[1] if spec.transpose_a else a[0], out[1])
    local = spec.regroup(pattern=pattern, row_axes=group, mesh=tuple(mesh.shape.items()))
    local = check_all_reduce("jaxmp.matmul", local)
    outside = _without(out[0], group)
    where_of_operand = {"scale_a": {"m": a[0], "w": a[0], "u": a[1]}, "scale_b": {"n": b[0], "x": b[0], "v": b[1]}}

    def placed(name: str) -> NamedSharding:
        where = {"m": outside if name == "bgrada" else out[0], "n": out[1], "p": out[1], "q": out[1]}
        where = where_of_operand.get(name, where)
        return _sharding(mesh, tuple(where[dim] for dim in spanned(spec, name)))

    operands = [_sharding(mesh, a), _sharding(mesh, b), *map(placed, spec.operand_names)]
    outputs = list(map(placed, spec.output_names))

    def lower(*shards: jax.Array) -> Any:
        for callback in list(_observers):
            callback(local, [jax.typeof(x) for x in shards])
        with jax_compat.off_explicit_mesh():
            results = _body(local, *shards)
        if bias_grad.summed(spec.output_names[-1]) != "d" or not outside:
            return results
        *rest, gradient = results
        return (*rest, collectives.psum(gradient, outside, source_line=spec.source_line))

    return mesh, lower, tuple(outputs) if len(outputs) > 1 else outputs[0], tuple(operands)


def _partition_whole(spec: MatmulSpec, mesh: Mesh, args: Sequence[jax.ShapeDtypeStruct], results: Any) -> Any:
    """Every operand is whole on every device, as one that the program makes itself, of which no mesh may be known."""

    def lower(*operands: jax.Array) -> Any:
        for callback in list(_observers):
            callback(spec, [jax.typeof(x) for x in operands])
        with jax_compat.off_explicit_mesh():
            return _body(spec, *operands)

    return mesh, lower, jax.tree.map(lambda x: x.sharding, results), tuple(x.sharding for x in args)


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


def _body(spec: MatmulSpec, a: jax.Array, b: jax.Array, *extra: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
    named = bind(spec, a, b, dict(zip(spec.operand_names, extra, strict=True)))
    outputs = tuple(global_amax(spec, named, tuple(axis for axis, _ in spec.group.mesh)).values())
    return outputs if len(outputs) > 1 else outputs[0]


def _sharding_rule(spec: MatmulSpec) -> str:
    # The packed relu mask has its own extent over n, so n cannot be propagated into it.
    operands = ["k m" if spec.transpose_a else "m k", "n k" if spec.transpose_b else "k n"]
    operands += [" ".join(spanned(spec, name)) for name in spec.operand_names]
    results = [" ".join(spanned(spec, name)) for name in spec.output_names]
    return ", ".join(operands) + " -> " + ", ".join(results)


@functools.lru_cache(maxsize=1024)
def _partitioned(spec: MatmulSpec) -> custom_partitioning:
    fn = custom_partitioning(functools.partial(_body, spec))
    fn.def_partition(functools.partial(_partition, spec), sharding_rule=_sharding_rule(spec))
    return fn


def _lower(*operands: jax.Array, spec: MatmulSpec) -> list[jax.Array]:
    outputs = _partitioned(spec)(*operands)
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


@functools.lru_cache(maxsize=256)
def _partitioned_slope(activation: str, spec: MatmulSpec) -> custom_partitioning:
    """Element by element, so every shard is a call of its own, on the sharding of the result."""

    def body(aux: jax.Array, t: jax.Array) -> jax.Array:
        return activation_grad(activation, aux, t, spec)

    def partition(mesh: Mesh, args: Any, result: jax.ShapeDtypeStruct) -> Any:
        return mesh, body, result.sharding, (result.sharding, result.sharding)

    fn = custom_partitioning(body)
    fn.def_partition(partition, sharding_rule="m n, m n -> m n")
    return fn


def _lower_slope(aux: jax.Array, t: jax.Array, *, activation: str, spec: MatmulSpec) -> Any:
    return _partitioned_slope(activation, spec)(aux, t)


def _register_batched(primitive: jax_compat.Primitive, of_devices: jax_compat.Primitive) -> None:
    """A batch of products of global arrays is XLA's to partition, for custom_partitioning does not go with a batch;
    on one device it is a batch as any other."""

    def rule(ctx: jax_compat.LoweringContext, *nodes: Any, spec: MatmulSpec) -> Any:
        if jax_compat.device_count(ctx) > 1:
            spec = spec.replace(implementation="xla")
            for callback in list(_observers):
                callback(spec, None)
        lower = functools.partial(of_devices.bind, spec=spec)
        return mlir.lower_fun(lower, multiple_results=primitive.multiple_results)(ctx, *nodes)

    mlir.register_lowering(primitive, rule)


def _register(primitive: jax_compat.Primitive, lower: Callable[..., Any]) -> None:
    lowered = mlir.lower_fun(lower, multiple_results=primitive.multiple_results)

    def rule(ctx: jax_compat.LoweringContext, *nodes: Any, **params: Any) -> Any:
        if jax_compat.partitions_without_shardy(ctx):  # GSPMD would end the process
            raise NotImplementedError(
                "jaxmp.matmul: on automatic axes it is XLA's Shardy partitioner that chooses, and "
                "jax_use_shardy_partitioner is off; turn it on, pass in_shardings, or use explicit axes"
            )
        return lowered(ctx, *nodes, **params)

    mlir.register_lowering(primitive, rule)


_register(auto_activation_grad_p, _lower_slope)
_register(auto_matmul_p, lambda *operands, spec: _lower(*operands, spec=spec)[0])
_register(auto_matmul_epilog_p, _lower)
_register_batched(auto_batched_matmul_p, batched_matmul_p)
_register_batched(auto_batched_matmul_epilog_p, batched_matmul_epilog_p)
