"""The fallback for a bare `jit` over auto axes: XLA's partitioner hands over the shardings it has chosen.

Its limits: eager calls and partial-manual regions never consult it, and the partitioner may settle on another pattern
than the user has in mind (the gradient of an all-gather comes out as an all-reduce). Explicit axes or `in_shardings`
have none of these.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.contraction import contraction, planner
from jaxmp._src.contraction.contraction import Dim, Layout
from jaxmp._src.contraction.moves import size_of
from jaxmp._src.jax_internals import jax_lowering
from jaxmp._src.jax_internals.jax_lowering import LoweringRule
from jaxmp._src.jax_internals.jax_partitioner import Global
from jaxmp._src.lowering import rules
from jaxmp._src.lowering.resolve import resolve
from jaxmp._src.primitive import bias_grad
from jaxmp._src.primitive.primitives import activation_grad, bind, by_settled, global_amax, matmul_p
from jaxmp._src.sharding import partitioned_call, sharded_call
from jaxmp._src.sharding.meshes import partition_spec
from jaxmp._src.sharding.partitioned_call import Placed
from jaxmp._src.sharding.shard_local import bind_plan
from jaxmp._src.sharding.shardings import to_dims
from jaxmp._src.spec import process_grid
from jaxmp._src.spec.fields import from_fields, to_fields
from jaxmp._src.spec.matmul_spec import Group, MatmulSpec, spans
from jaxmp._src.spec.options import Mesh
from jaxmp._src.spec.refusal import NotAvailable, naming
from jaxmp._src.validation.epilog_checks import check_all_reduce

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


def _place_matmul(spec: MatmulSpec, mesh: Mesh, args: Sequence[Global], results: Sequence[Global]) -> Placed:
    """A product as planned for the shardings that XLA proposes."""
    dims = []
    for x in (args[0], args[1], results[0]):
        proposed = x.sharding_on(mesh)
        if proposed is None:
            return _place_whole(spec, mesh, args, results)
        found = to_dims("operand", proposed.spec, len(x.shape), mesh.axis_names)
        dims.append(tuple(_dividing(dim, extent, mesh.shape) for dim, extent in zip(found, x.shape, strict=True)))
    rows, columns = dims[2]
    left_out: Dim = ()
    has_mask = "relu_aux" in (*spec.operand_names, *spec.output_names)
    if has_mask and results[0].shape[1] // size_of(mesh.shape, columns) % process_grid.RELU_AUX_BITS:
        left_out += columns  # the mask is padded per shard, and its shape here cannot depend on the shards
    if spec.determinism == "topology" and bias_grad.summed(spec.rule.gradient) == "d":
        left_out += rows  # over which XLA would complete the sums
    dims = [tuple(tuple(axis for axis in dim if axis not in left_out) for dim in each) for each in dims]
    flags = {"transpose_a": spec.transpose_a, "transpose_b": spec.transpose_b}
    given = contraction.of_matrices(2, Layout(*dims), **flags)
    terms = functools.partial(sharded_call.terms, spec, given, args[:2], results[0].shape, mesh.shape)
    gathers_k = sharded_call.gathers_k(spec, args[0].dtype, args[1].dtype)
    # Under a level, a call that shares columns has no gradient's epilog. XLA can move operands instead.
    plan = planner.plan(given, terms, gathers_k=gathers_k, shares_columns=not spec.fixed_reduction_order)
    group = Group.of(plan, tuple(mesh.shape.items()))
    local = check_all_reduce(spec.replace(group=group))

    def body(*shards: jax.Array) -> Sequence[jax.Array]:
        names = ("a", "b", *spec.operand_names)
        return _global_results(local, bind_plan(plan, local, dict(zip(names, shards, strict=True))))

    def placed(name: str) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(sharded_call.dims_of(spec, plan, name)))

    a, b = (NamedSharding(mesh, partition_spec(each)) for each in plan.layout[:2])
    return _observed(body), [a, b, *map(placed, spec.operand_names)], [placed(name) for name in spec.output_names]


def _place_whole(spec: MatmulSpec, mesh: Mesh, args: Sequence[Global], results: Sequence[Global]) -> Placed:
    """Every operand is whole on every device, as one that the program makes itself, of which no mesh may be known."""
    if not all(x.hlo_sharding.is_replicated() for x in args):
        raise NotAvailable(
            "XLA shards an operand over what is no axis of the program's mesh (auto axes inside a "
            "partial-manual shard_map, or a sharding without a mesh); make every mesh axis manual, or pass "
            "in_shardings and mesh outside of the shard_map"
        )

    def body(a: jax.Array, b: jax.Array, *extra: jax.Array) -> Sequence[jax.Array]:
        return _global_results(spec, bind(spec, a, b, dict(zip(spec.operand_names, extra, strict=True))))

    whole = NamedSharding(mesh, P())
    return _observed(body), [whole] * len(args), [whole] * len(results)


def _observed(body: Callable[..., Sequence[jax.Array]]) -> Callable[..., Sequence[jax.Array]]:
    """`body`, whose products the observers see as they are bound."""

    def on_shards(*shards: jax.Array) -> Sequence[jax.Array]:
        if _observers:
            for eqn in jax.make_jaxpr(body)(*shards).eqns:
                if eqn.primitive is matmul_p:
                    for callback in list(_observers):
                        callback(eqn.params["spec"], [x.aval for x in eqn.invars])
        return body(*shards)

    return on_shards


def _global_results(spec: MatmulSpec, outputs: dict[str, jax.Array]) -> Sequence[jax.Array]:
    """The results in their order, with the largest absolute values over all devices."""
    return tuple(global_amax(spec, outputs, tuple(axis for axis, _ in spec.group.mesh)).values())


def _dividing(dim: Dim, extent: int, mesh: Mapping[str, int]) -> Dim:
    """The axes of a dimension, or none if they do not divide its extent."""
    return dim if extent % size_of(mesh, dim) == 0 else ()


def _sharding_rule(spec: MatmulSpec) -> str:
    blocks = map("b{}".format, itertools.count())

    def factors(name: str) -> str:
        # A dimension of blocks has an extent of its own, so no sharding can be propagated into it.
        return " ".join(span.dim if span.size == 1 else next(blocks) for span in spans(spec, name))

    operands = [factors(name) for name in ("a", "b", *spec.operand_names)]
    results = [factors(name) for name in spec.output_names]
    return ", ".join(_led(spec, operands)) + " -> " + ", ".join(results)


def _led(spec: MatmulSpec, operands: Sequence[T]) -> Sequence[T]:
    """The operands with the first operand of JAX's own product in front; and the inverse."""
    a, b, *rest = operands
    return (b, a, *rest) if spec.b_leads else operands


def _place(call: dict[str, Any], mesh: Mesh, args: Sequence[Global], results: Sequence[Global]) -> Placed:
    """How XLA's partitioner is to compute a call, by its description."""
    spec = from_fields(MatmulSpec, call["spec"])
    with naming(spec.function):
        return _place_call(spec, call.get("activation"), mesh, args, results)


def _place_call(
    spec: MatmulSpec, activation: str | None, mesh: Mesh, args: Sequence[Global], results: Sequence[Global]
) -> Placed:
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
    def rule(ctx: jax_lowering.LoweringContext, *nodes: Any, spec: MatmulSpec, **params: Any) -> Any:
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
            raise NotAvailable(
                "on automatic axes it is XLA's Shardy partitioner that chooses, and "
                "jax_use_shardy_partitioner is off; turn it on, pass in_shardings, or use explicit axes"
            )
        call = {"spec": to_fields(spec), **params}
        return partitioned_call.lower(ctx, _led(spec, nodes), call, sharding_rule(spec))

    return by_settled(on_shards, rule)


partitioned_call.register(_place)
