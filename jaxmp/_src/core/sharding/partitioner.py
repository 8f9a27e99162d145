"""Lowers calls in a bare `jit` over automatic axes: XLA's partitioner chooses the shardings.

A product is a custom call. XLA's partitioner asks this module to replace the call by one device's part of it.
`jax.experimental.custom_partitioning` does the same, but names a call by the address of a Python object. A program with
such a call cannot be exported or found again in a persistent compilation cache. Here a call is named by its
description, so any process that has imported jaxmp can partition it.

Limits: eager calls and partially manual regions never use the partitioner. It may also choose another pattern than the
user expects (the gradient of an all-gather becomes an all-reduce). Explicit axes and `in_shardings` avoid both limits.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxmp._src.core.contraction import contraction
from jaxmp._src.core.contraction.contraction import Dim, Layout
from jaxmp._src.core.contraction.moves import size_of
from jaxmp._src.core.lowering import decide, grouped
from jaxmp._src.core.primitive import bias_grad
from jaxmp._src.core.primitive.grouped import GroupedSpec
from jaxmp._src.core.primitive.primitives import activation_grad, over_batch
from jaxmp._src.core.sharding import ragged, sharded_call
from jaxmp._src.core.sharding.factored_mesh import factored
from jaxmp._src.core.sharding.meshes import partition_spec
from jaxmp._src.core.sharding.shard_local import bind_plan
from jaxmp._src.core.spec import low_precision, process_grid
from jaxmp._src.core.spec.extents import spans
from jaxmp._src.core.spec.fields import from_fields, to_fields
from jaxmp._src.core.spec.matmul_spec import Group, MatmulSpec, ScaleModes
from jaxmp._src.core.spec.options import Mesh
from jaxmp._src.core.spec.refusal import naming
from jaxmp._src.core.validation.epilog_checks import check_all_reduce
from jaxmp._src.platform.jax_internals import jax_compat, jax_lowering, jax_partitioner, jax_tracing
from jaxmp._src.platform.jax_internals.jax_lowering import LoweringRule
from jaxmp._src.platform.jax_internals.jax_partitioner import Global, OnShards
from jaxmp._src.platform.runtime import native
from jaxmp._src.platform.runtime.types import is_symbolic

TARGET = "jaxmp_partitioned_matmul"
# The error message that stops XLA during `explain`.
STOPPED = "jaxmp: explain wants no more than the shardings"

T = TypeVar("T")
# (a function of one device's shards, the shardings of the operands, the shardings of the results).
Placed = tuple[Callable[..., Any], Sequence[NamedSharding], Sequence[NamedSharding]]
# Set while `explain` lowers a program: collects what XLA partitions, "calls" of jaxmp and "batches" of XLA's own.
# With "stop", XLA fails with STOPPED at the first call, after it has chosen the shardings.
_explained: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("explained", default=None)


@contextlib.contextmanager
def explaining(*, stops: bool) -> Iterator[set[str]]:
    """Yields a set that collects "calls" and "batches" when this thread lowers programs inside the context with calls
    or batches that XLA is to partition. If it `stops`, XLA fails with STOPPED at the first call, and the set has "stop"
    from the start."""
    token = _explained.set(found := {"stop"} if stops else set())
    try:
        yield found
    finally:
        _explained.reset(token)


def _place_matmul(spec: MatmulSpec, mesh: Mesh, args: Sequence[Global], results: Sequence[Global]) -> Placed:
    """Plans a product, or a batch of them, with the shardings that XLA proposes: returns (the function of shards, the
    operands' shardings, the results'). a, b and d lose the axes of the batch, axes of columns that would pad a relu
    mask, and at "topology" the axes of rows if there is a bias gradient of d."""
    mesh, dims = factored(mesh, [*args[:2], results[0]])
    front, (rows, columns) = dims[2][: spec.batch], dims[2][spec.batch :]
    left_out: Dim = sum(front, ())
    has_mask = "relu_aux" in (*spec.operand_names, *spec.output_names)
    if has_mask and results[0].shape[-1] // size_of(mesh.shape, columns) % process_grid.RELU_AUX_BITS:
        left_out += columns  # each shard of the mask is padded, and the shape here cannot depend on the shards
    if spec.global_order and bias_grad.summed(spec.rule.gradient) == "d":
        left_out += rows  # XLA would complete the sums over these axes
    matrices = [jax.ShapeDtypeStruct(x.shape[spec.batch :], x.dtype) for x in (*args[:2], results[0])]
    left_out += _undivided(spec, matrices, [each[spec.batch :] for each in dims], mesh)
    dims = [tuple(tuple(axis for axis in dim if axis not in left_out) for dim in each[spec.batch :]) for each in dims]
    flags = {"transpose_a": spec.transpose_a, "transpose_b": spec.transpose_b}
    given = contraction.of_matrices(2, Layout(*dims), **flags)
    names, where = spec.names, (results[0].shape[spec.batch :], mesh.shape)
    # Under a level, a call that shares columns has no gradient epilog. XLA can move operands instead.
    plan = sharded_call.planned(spec, given, matrices[:2], *where, shares_columns=not spec.fixed_reduction_order)
    local = check_all_reduce(spec.replace(group=Group.of(plan, tuple(mesh.shape.items())), batch=0))

    def multiply(*shards: jax.Array) -> Sequence[jax.Array]:
        return tuple(bind_plan(plan, local, dict(zip(names, shards, strict=True))).values())

    def placed(name: str) -> NamedSharding:
        return NamedSharding(mesh, partition_spec((*front, *sharded_call.dims_of(spec, plan, name))))

    return over_batch(multiply, spec.batch), [*map(placed, names)], [*map(placed, spec.output_names)]


def _undivided(spec: MatmulSpec, matrices: Sequence[Any], dims: Sequence[Sequence[Dim]], mesh: Mesh) -> Dim:
    """Returns the axes that shard m, n or k of float8 and float4 operands into parts that are no multiples of their
    units (`low_precision.check_units`). None for float8 without scales, which `bind_operands` converts. `matrices`: a,
    b and d; `dims`: the axes of their dimensions."""
    a, b, _ = matrices
    dtype = low_precision.operand_type(a.dtype, b.dtype)
    if not low_precision.is_scaled(dtype) or (spec.implementation is None and spec.scales == ScaleModes()):
        return ()
    texts = "km" if spec.transpose_a else "mk", "nk" if spec.transpose_b else "kn", "mn"
    every = [
        (i, n, axes)
        for text, x, each in zip(texts, matrices, dims, strict=True)
        for i, n, axes in zip(text, x.shape, each, strict=True)
    ]
    found: Dim = ()
    for index, extent in {i: n for i, n, _ in every}.items():
        axes = tuple({axis for i, _, dim in every if i == index for axis in dim})
        try:
            low_precision.check_units(dtype, spec.scales.a, spec.scales.b, {index: extent // size_of(mesh.shape, axes)})
        except ValueError:
            found += axes
    return found


def _place_grouped(spec: GroupedSpec, mesh: Mesh, args: Sequence[Global], results: Sequence[Global]) -> Placed:
    """Plans a product of groups of rows for the shardings that XLA proposes."""
    arrays = [*args, *results]
    mesh, dims = factored(mesh, arrays)
    spec = dataclasses.replace(spec, is_global=False)
    call, found = ragged.placed(spec, mesh, [x.shape for x in arrays], dims)
    *operands, out = (NamedSharding(mesh, partition_spec(dim)) for dim in found)
    return (lambda *shards: [call.of_bounds(*shards)]), operands, [out]


def sharding_rule_of(spec: MatmulSpec) -> str:
    """Returns the sharding rule of a product, such as "m k, k n -> m n", with operands in the order of `_led`."""
    blocks = map("b{}".format, itertools.count())

    def factors(name: str) -> str:
        # A dimension of blocks has an extent of its own, so no sharding can be propagated into it.
        matrix = (span.dim if span.size == 1 else next(blocks) for span in spans(spec, name))
        return " ".join((*(f"batch{i}" for i in range(spec.batch)), *matrix))

    operands = [factors(name) for name in spec.names]
    results = [factors(name) for name in spec.output_names]
    return ", ".join(_led(spec, operands)) + " -> " + ", ".join(results)


def _led(spec: MatmulSpec, operands: Sequence[T]) -> Sequence[T]:
    """Exchanges the first two operands if `spec.first_operand_is_b`; a second application restores the order."""
    a, b, *rest = operands
    return (b, a, *rest) if spec.first_operand_is_b else operands


def _place(
    spec: MatmulSpec, activation: str | None, mesh: Mesh, args: Sequence[Global], results: Sequence[Global]
) -> Placed:
    """Returns how XLA's partitioner is to compute a call: a product, or `activation_grad` if `activation` is given."""
    if activation is None:
        on_shards, operands, outputs = _place_matmul(spec, mesh, _led(spec, args), results)
        return lambda *shards: on_shards(*_led(spec, shards)), _led(spec, operands), outputs
    # Elementwise, so every shard is computed by itself, in the sharding of the result.
    mesh, (dims,) = factored(mesh, results)
    where = NamedSharding(mesh, partition_spec(dims))
    return lambda aux, t: [activation_grad(activation, aux, t, spec)], (where, where), (where,)


def partitioned_rule(on_shards: LoweringRule, sharding_rule: Callable[[MatmulSpec], str]) -> LoweringRule:
    """Returns a lowering rule. On shards, and for a settled spec, it is `on_shards`. Global arrays get a call that XLA
    partitions by this `sharding_rule`, with two exceptions: XLA itself multiplies batches (unless a library is asked
    for) and symbolic extents. If a library is asked for symbolic extents, the rule raises NotImplementedError."""

    def rule(ctx: jax_lowering.LoweringContext, *nodes: Any, spec: MatmulSpec | None, **params: Any) -> Any:
        if spec is None or not spec.is_unsettled:
            return on_shards(ctx, *nodes, spec=spec, **params)
        spec = spec.settled()
        if jax_lowering.is_on_shards(ctx):
            return on_shards(ctx, *nodes, spec=spec, **params)
        types: Any = ctx.avals_in
        is_of_xla = spec.batch and not spec.asked_of_library
        if is_of_xla or is_symbolic(*types):  # XLA's own product of global arrays, which XLA partitions
            if not is_of_xla:  # raises if a library was asked for
                decide.product(spec, types[0], types[1], decide.Where(jax_lowering.platform(ctx)))
            spec = spec.replace(implementation="xla")
            _note("batches" if spec.batch else "")
            return on_shards(ctx, *nodes, spec=spec, **params)
        call = {"spec": to_fields(spec), **params}
        return _lower(ctx, _led(spec, nodes), call, sharding_rule(spec))

    return rule


def _note(what: str) -> set[str]:
    """Adds `what` to the set of `explaining` and returns the set; returns an empty set outside `explaining`."""
    found = _explained.get()
    if found is None:
        return set()
    found.add(what)
    return found


def grouped_rule(platform: str) -> LoweringRule:
    """Returns the lowering rule of a product of groups of rows. A product of global arrays becomes a call that XLA
    partitions, unless `decide.why_xla` has a reason (as on all but CPU devices) or extents are symbolic."""
    on_shards = grouped.grouped_rule(platform)

    def rule(ctx: jax_lowering.LoweringContext, *nodes: Any, spec: GroupedSpec) -> Any:
        types: Any = ctx.avals_in
        where = decide.in_rule(ctx, platform, (), ())
        why = decide.why_xla(spec.implementation, spec.level, where, is_global=True)
        if not spec.is_global or where.is_on_shards or why or is_symbolic(*types):
            return on_shards(ctx, *nodes, spec=spec)
        indices = ragged.indices_of(spec, [x.shape for x in (*types, *ctx.avals_out)])
        units = map("u{}".format, itertools.count())  # a batch of one shares its sharding with no array
        *operands, result = (" ".join(next(units) if i == "u" else i for i in text) for text in indices)
        sharding_rule = f"{', '.join(operands)} -> {result}"
        return _lower(ctx, nodes, {"grouped": to_fields(spec)}, sharding_rule, "m" if spec.is_contraction else "k")

    return rule


def _lower(
    ctx: jax_lowering.LoweringContext,
    operands: Sequence[Any],
    call: dict[str, Any],
    sharding_rule: str,
    contracted: str = "k",
) -> Sequence[Any]:
    """Lowers a call that XLA is to partition, and returns its results. `call` describes it in JSON values. XLA
    propagates shardings along the index `contracted` last. Registers jaxmp's handlers, and notes the call."""
    native.register()  # the executable may come from a cache, and XLA then does not ask
    mesh = jax_lowering.global_mesh(ctx)
    described: dict[str, Any] = {
        "call": call,
        "platform": jax_lowering.platform(ctx),
        "mesh": list(mesh.shape.items()),
        "x64": bool(jax.config.read("jax_enable_x64")),
    }
    if native.has_barrier:  # so that processes can tell the calls of a program apart
        described["index"] = jax_lowering.next_index(ctx, native.BARRIER_TARGET)
        described["program"] = jax_lowering.program_name(ctx)
        described["is_in_body"] = jax_lowering.is_in_body()
    if isinstance(mesh, jax.sharding.Mesh) and not jax_lowering.is_for_export(ctx):
        described["devices"] = [device.id for device in mesh.devices.flat]
    if "stop" in _note("calls"):
        described["stop"] = True
    text = json.dumps(described, sort_keys=True)
    return jax_partitioner.partitioned_call(
        ctx, operands, target=TARGET, text=text, sharding_rule=sharding_rule, contracted=contracted
    )


def _mesh_of(described: dict[str, Any]) -> Mesh:
    """Returns the mesh of a described call, without devices if they are not named or not all present."""
    names, sizes = tuple(name for name, _ in described["mesh"]), tuple(size for _, size in described["mesh"])
    wanted = described.get("devices", ())
    devices = {device.id: device for device in jax.devices(described["platform"])} if wanted else {}
    if not wanted or not devices.keys() >= {*wanted}:  # a program may be compiled for more
        return jax.sharding.AbstractMesh(sizes, names)
    return jax.sharding.Mesh(np.array([devices[id] for id in wanted]).reshape(sizes), names)


def _partition(text: str, operands: Sequence[Global], results: Sequence[Global]) -> OnShards:
    """Returns the call of this description on one device's shards. Raises STOPPED if the description says so."""
    described = json.loads(text)
    if "stop" in described:
        raise RuntimeError(STOPPED)
    return _on_shards(described, operands, results)


class Settled(NamedTuple):
    """An equation in one device's part of a call: the mesh, the axes along which each operand differs between devices,
    the dimensions that several axes shard, how often it runs, and into how many parts the mesh divides a batch."""

    eqn: Any
    mesh: Mesh
    varying: list[frozenset[str]]
    dims: tuple[Dim, ...]
    times: int
    parts: int


def settled(text: str, operands: Sequence[Global], results: Sequence[Global]) -> list[Settled]:
    """Returns the equations in one device's part of the call that `text` describes, and in its loops."""
    described = json.loads(text)
    call, front = _on_shards(described, operands, results), described["call"].get("spec", {}).get("batch", 0)
    part, found = jax_partitioner.part_of(call, operands), []
    specs = [() if sharding is None else tuple(sharding.spec) for sharding in (*call.operands, *call.results)]
    parts = size_of(call.results[0].mesh.shape, tuple(jax.tree.leaves(specs[len(operands)][:front])))
    dims = tuple(dim for spec in specs for dim in spec if isinstance(dim, tuple) and len(dim) > 1)
    axes: dict[Any, frozenset[str]] = {}
    axes |= {v: frozenset(jax.tree.leaves(spec)) for v, spec in zip(part.invars, specs, strict=False)}
    for eqn, count in _with_bodies(part, axes):
        read = [frozenset() if jax_tracing.is_literal(v) else axes.get(v, frozenset()) for v in eqn.invars]
        axes |= dict.fromkeys(eqn.outvars, frozenset().union(*read))
        found.append(Settled(eqn, call.operands[0].mesh, read, dims, count, parts))
    return found


def _with_bodies(part: jax_compat.Jaxpr, axes: dict[Any, frozenset[str]], count: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields the equations of a part and of its loops, and how often each runs. Adds to `axes` the axes along which
    the operands of a loop differ."""
    for eqn in part.eqns:
        for body in jax_compat.subjaxprs(eqn.params) if eqn.primitive.name == "scan" else ():
            pairs = zip(body.invars, eqn.invars, strict=True)
            axes |= {v: axes[x] for v, x in pairs if not jax_tracing.is_literal(x) and x in axes}
            yield from _with_bodies(body, axes, count * eqn.params["length"])
        yield eqn, count


def _on_shards(described: dict[str, Any], operands: Sequence[Global], results: Sequence[Global]) -> OnShards:
    """Plans a described call for the shardings of the arrays; returns its function of shards, with its shardings."""
    call, mesh = described["call"], _mesh_of(described)
    name = f"{jax_partitioner.PARTITIONED}{described.get('program', '')}_{described.get('index', 0)}"
    if "grouped" in call:
        groups = from_fields(GroupedSpec, call["grouped"])
        with naming(groups.function):
            placed = _place_grouped(groups, mesh, operands, results)
    else:
        spec = from_fields(MatmulSpec, call["spec"])
        with naming(spec.source_line):
            placed = _place(spec, call.get("activation"), mesh, operands, results)
    return OnShards(*placed, described["platform"], described["x64"], name, described.get("is_in_body", False))


jax_partitioner.register_partitioner(TARGET, _partition)
