"""The lowering rules of the primitives. Each resolves its call and emits it in the resolved form."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.contraction.contraction import Dim
from jaxmp._src.core.contraction.moves import WIDE, Narrow
from jaxmp._src.core.lowering import decide, process_barrier, xla_matmul
from jaxmp._src.core.lowering.decide import Decision
from jaxmp._src.core.lowering.forms import Gathered, ResolvedCall, Xla
from jaxmp._src.core.lowering.process_barrier import MeshAxes
from jaxmp._src.core.lowering.process_collectives import SharedMemory
from jaxmp._src.core.primitive.collectives import place
from jaxmp._src.core.primitive.grouped import batch_product
from jaxmp._src.core.primitive.primitives import bind_operands, matmul_p, needs_devices, over_batch
from jaxmp._src.core.spec import low_precision, wire
from jaxmp._src.core.spec.activations import multiply_by_slope
from jaxmp._src.core.spec.matmul_spec import MatmulSpec
from jaxmp._src.core.spec.options import Mesh
from jaxmp._src.platform.jax_internals import jax_compat, jax_lowering
from jaxmp._src.platform.jax_internals.jax_lowering import LoweringContext, LoweringRule, mlir


def matmul_rule(platform: str) -> LoweringRule:
    def rule(ctx: LoweringContext, *nodes: Any, spec: MatmulSpec) -> Any:
        types: Any = ctx.avals_in
        where = decide.in_rule(ctx, platform, spec.group.mesh, spec.group.axes)
        decision = decide.product(spec, types[0], types[1], where)
        lower = (_batch if spec.batch else _product)(ctx, decision, spec, platform)
        with jax_compat.off_explicit_mesh():
            return mlir.lower_fun(lower, multiple_results=True)(ctx, *nodes)

    return rule


def _product(ctx: LoweringContext, decision: Decision, spec: MatmulSpec, platform: str) -> Callable[..., Any]:
    """Returns the function of shards that computes a product and returns its results in the spec's order. Adds the
    barrier of a call that CPU devices of several processes compute outside of hostmp's shared call. Calls
    `require_devices` if a call of cuBLASMp names its devices."""
    call = decision.call
    assert call is not None
    # Naming its devices ties the lowering to this process.
    is_named = call.implementation == "cublasmp" and not jax_lowering.is_for_export(ctx) and needs_devices(spec)
    devices = process_barrier.mesh_devices(spec, jax_lowering.lowering_mesh(ctx)) if is_named else ()
    if devices:  # bind has required them already, unless the backend has started since
        jax_lowering.require_devices([matmul_p])
    site = None
    if platform == "cpu" and call.implementation != "host":
        site = process_barrier.site(ctx, spec.group.mesh, spec.group.axes, is_collective=isinstance(call, Xla))

    def lower(*operands: jax.Array) -> list[jax.Array]:
        named, processes = _named(call, spec, operands), None
        if site:
            fields = process_barrier.fields(spec, named["a"], named["b"])
            barrier = functools.partial(site.barrier, spec.source_line, fields)
            if isinstance(call, Xla):
                memory = SharedMemory(site, spec.source_line, fields) if site.shares_memory else None
                processes = xla_matmul.Processes(barrier, memory, call.chunks())
            else:
                named["a"], named["b"] = barrier([named["a"], named["b"]])
        outputs = call.emit(named, devices=devices, platform=platform, processes=processes)
        return [outputs[name] for name in spec.output_names]

    return lower


def _named(call: ResolvedCall, spec: MatmulSpec, operands: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """Returns the operands by name, a and b in the types of the call, except that `Xla` and `Gathered` gather them in
    their own types first."""
    named = dict(zip(spec.names, operands, strict=True))
    for name, like in (("a", call.a), ("b", call.b)):
        if named[name].dtype != like.dtype and not isinstance(call, Xla | Gathered):  # they gather it as it is
            named[name] = jax_compat.convert(named[name], like.dtype)
    return named


def _batch(ctx: LoweringContext, decision: Decision, spec: MatmulSpec, platform: str) -> Callable[..., Any]:
    """Returns the function of shards with `spec.batch` leading dimensions that computes a batch of products and returns
    their results in order. It binds the primitive in a loop over the batch if the form is "each". In other forms
    (`decide.Decision`), CPU devices of several processes meet at a barrier first."""
    front, spec = spec.batch, spec.replace(batch=0)
    is_barred = platform == "cpu" and decision.form != "each"
    site = process_barrier.site(ctx, spec.group.mesh, spec.group.axes) if is_barred else None
    local = batch_product if decision.form == "groups" else None

    def lower(*operands: jax.Array) -> Any:
        if decision.form == "xla" and not site:  # XLA may shard each dimension
            return over_batch(multiply, front)(*operands)
        sizes = operands[0].shape[:front]
        outputs = of_batch(*(x.reshape(math.prod(sizes), *x.shape[front:]) for x in operands))
        return [x.reshape(*sizes, *x.shape[1:]) for x in outputs]

    def of_batch(*operands: jax.Array) -> Any:
        if decision.form == "each":
            return lax.map(lambda each: bind_operands(spec, *each), operands)
        a, b, *rest = operands
        if site:
            fields = {"batch": a.shape[0], **process_barrier.fields(spec, a[0], b[0])}
            a, b = site.barrier(spec.source_line, fields, [a, b])
        return jax.vmap(multiply)(a, b, *rest)

    def multiply(*operands: jax.Array) -> list[jax.Array]:
        if decision.form == "together":
            assert decision.call is not None
            outputs = decision.call.emit(_named(decision.call, spec, operands), platform=platform)
        else:
            outputs = xla_matmul.matmul(dict(zip(spec.names, operands, strict=True)), spec, platform, local)
        return [outputs[name] for name in spec.output_names]

    return lower


def activation_grad_rule(platform: str) -> LoweringRule:
    """Returns the rule that multiplies t by the slope at `aux`: by XLA without a spec, else gelu's by a library."""

    def grad(aux: jax.Array, t: jax.Array, *, activation: str, spec: MatmulSpec | None) -> jax.Array:
        if spec is None:
            return multiply_by_slope(activation, aux, t)
        call = decide.activation_grad(spec, t, platform)
        nothing = {name: jnp.zeros(like.shape, t.dtype) for name, like in (("a", call.a), ("b", call.b))}
        return call.emit(nothing | {"c": t, "gelu_aux": aux})["d"]

    return mlir.lower_fun(grad, multiple_results=False)


def collective_rule(
    ctx: LoweringContext, x: Any, *, kind: str, mesh: MeshAxes, axis_name: Dim, platform: str, **params: Any
) -> Any:
    """Lowers a collective of `kind`: on CPUs between processes through shared memory, or to a barrier and XLA's
    collective; elsewhere to XLA's. "wait" becomes the barrier before a reshard, "vary" and "pass" become nothing.
    `params`: other arguments of `communicated`."""
    if kind in ("vary", "pass"):
        return [x]
    site = process_barrier.site(ctx, mesh, axis_name, is_collective=kind != "wait") if platform == "cpu" else None
    lower = functools.partial(communicated, site, kind, axes=axis_name, platform=platform, **params)
    with jax_compat.off_explicit_mesh():
        return mlir.lower_fun(lower, multiple_results=False)(ctx, x)


def communicated(
    site: process_barrier.Site | None,
    kind: str,
    x: jax.Array,
    *,
    axes: tuple[str, ...],
    dimensions: tuple[int, ...],
    caller: str,
    platform: str,
    narrow: Narrow = WIDE,
) -> jax.Array:
    """Applies a collective of `kind` to `x`, which keeps its type. At a `site` it goes through shared memory if the
    site has it (for sums, if it can sum the type); if not, XLA's collective follows the site's barrier. Without a site
    it is XLA's. "wait" is the barrier alone, or nothing without a site. Floats of 8 bits are summed in float32.
    `caller`: the function to name in messages. `narrow` is compared at the site, but not applied."""
    is_wait, sums = kind == "wait", kind in ("psum", "reduce_scatter")
    memory, dtype, name = None, x.dtype, "reshard" if is_wait else kind
    if sums and low_precision.is_narrow_float(dtype):
        x = x.astype(np.float32)
    if site is not None:
        fields: dict[str, Any] = {"collective": name, "shape of a shard": x.shape, "dtype": x.dtype.name}
        fields |= {"axes": axes, "mesh": site.axes, "comm.weights": narrow[0], "comm.gradients": narrow[1]}
        call = f"{name} for {caller}"
        memory = SharedMemory(site, call, fields) if site.shares_memory and not is_wait else None
        if memory is None or (sums and not memory.sums(x.dtype)):
            memory, x = None, site.barrier(call, fields, [x])[0]
    if is_wait:
        return x
    return xla_matmul.collective(kind, x, axes, dimensions, platform=platform, memory=memory).astype(dtype)


def reshard_rule(
    ctx: LoweringContext, x: Any, *, mesh: Mesh, have: P, spec: P, is_explicit: bool, platform: str
) -> Any:
    """Places a global array as `have` and then as `spec`, in a type that XLA can move."""

    def lower(x: jax.Array) -> jax.Array:
        def move(x: jax.Array) -> jax.Array:
            return place(place(x, mesh, have, is_explicit=is_explicit), mesh, spec, is_explicit=is_explicit)

        return wire.moved(move, x, platform, mesh.size)

    return mlir.lower_fun(lower, multiple_results=False)(ctx, x)


def whole_rule(ctx: LoweringContext, x: Any) -> Any:
    if jax_lowering.is_on_shards(ctx):
        return [x]
    lower = functools.partial(place, mesh=jax_lowering.global_mesh(ctx), spec=P(), is_explicit=False)
    return mlir.lower_fun(lower, multiple_results=False)(ctx, x)
