"""Decides once how a product, a batch of products or a product of groups of rows is computed, and what it moves.

Lowering emits a `Decision`. `explain` prints it, and `draw`, `profile` and `advise` read it from there. XLA's
partitioner, the plans of groups of rows and `fuse` ask `why_xla` and `shares_rows`. No other module asks which
platform, type or process a product is for.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxmp._src.core.contraction import moves
from jaxmp._src.core.contraction.contraction import Dim
from jaxmp._src.core.lowering import backend, forms, process_barrier
from jaxmp._src.core.lowering.process_barrier import MeshAxes
from jaxmp._src.core.primitive import bias_grad
from jaxmp._src.core.primitive.batching import may_batch
from jaxmp._src.core.primitive.grouped import GroupedSpec, batch_of
from jaxmp._src.core.primitive.primitives import of_one_index
from jaxmp._src.core.spec import low_precision, precisions
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.extents import extents, operations
from jaxmp._src.core.spec.levels import Level
from jaxmp._src.core.spec.matmul_spec import INTEGERS, MatmulSpec, accumulator
from jaxmp._src.core.spec.options import CommOptions, GroupedImplementation
from jaxmp._src.core.spec.refusal import NotAvailable
from jaxmp._src.platform.hardware.call_time import Transfer
from jaxmp._src.platform.jax_internals import jax_compat, jax_lowering
from jaxmp._src.platform.runtime import logs
from jaxmp._src.platform.runtime.types import ArrayType, is_symbolic


@dataclasses.dataclass(frozen=True)
class Where:
    """The platform and the processes of a call's ranks.

    `unshared` says why CPU devices of a group share no call, or is "". `shares_memory`: all processes of the mesh share
    memory. `is_on_shards`: the operands are one device's shards; otherwise XLA's partitioner chooses shardings.
    """

    platform: str
    unshared: str = ""
    shares_memory: bool = False
    is_on_shards: bool = True


def here(axes: MeshAxes = (), group_axes: Dim = (), mesh: Any = None) -> Where:
    """Returns where a call over `group_axes` that is being traced will run, as far as is known: on shards, on the
    default platform, and on the devices of `mesh` or, if that has none, of the mesh of the context."""
    known = mesh if isinstance(mesh, jax.sharding.Mesh) else jax_compat.ambient_mesh()
    return Where(jax_compat.default_platform(), *process_barrier.unshared_reason(axes, group_axes, known))


def in_rule(ctx: jax_lowering.LoweringContext, platform: str, axes: MeshAxes, group_axes: Dim) -> Where:
    """Returns where a call that is being lowered will run."""
    mesh, is_for_export = jax_lowering.lowering_mesh(ctx), jax_lowering.is_for_export(ctx)
    found = process_barrier.unshared_reason(axes, group_axes, mesh, is_for_export=is_for_export)
    return Where(platform, *found, jax_lowering.is_on_shards(ctx))


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a call is computed, and what it moves.

    Attributes:
      implementation, why: "host", "cublasmp", "host+xla", "xla" or the name of a user's function, and the rule that
        chose it.
      form: for a product, the name of its form (`forms`). For a batch, "groups" or "xla" (one product for all of it),
        "each" (one call per index) or "together" (collectives of the whole batch, and one local call per index). For
        groups of rows, "local", "shared" (ranks read each other's rows), "exchange" (processes exchange rows) or
        "gather" (ranks gather matrices, or scatter their sums).
      transfers: the transfers that a rank receives per call, or per index of a batch.
      links: the same for devices that do not share memory.
      call: the resolved call of a product, or of one index of a batch; None for groups.
    """

    implementation: str
    why: str
    form: str
    transfers: tuple[Transfer, ...] = ()
    links: tuple[Transfer, ...] = ()
    call: forms.ResolvedCall | None = None

    def facts(self) -> tuple[str, int]:
        """Returns (the algorithm in words, or the name of a user's function; the workspace bytes per rank). The bytes
        are 0 without a plan by hostmp."""
        if self.call is not None:
            return self.call.facts()
        if self.form == "groups":
            return "tiles of all groups, one for each index" + " and lax collectives" * bool(self.transfers), 0
        known = {"host": "tiles of all groups", "xla": "lax.ragged_dot_general"}
        return known.get(self.implementation, self.implementation), 0


# Products --------------------------------------------------------------------------------------------------------


def product(spec: MatmulSpec, a: Any, b: Any, where: Where) -> Decision:
    """Decides a product of shards like `a` and `b`, or a batch of products if `spec.batch` is not 0. Raises the errors
    of `backend.choose_implementation`, and NotImplementedError if the form cannot keep what the spec asks for. Logs the
    decision about a single product at DEBUG."""
    if spec.batch:
        return _batch(spec, a, b, where)
    choice = backend.choose_implementation(spec, where.platform, where.unshared, (a.dtype, b.dtype))
    call = _resolve(spec, a, b, choice)
    if logs.logger("backend").isEnabledFor(logging.DEBUG):
        shards = f"{call.a.dtype.name}{list(call.a.shape)} x {call.b.dtype.name}{list(call.b.shape)}"
        form = f"{call.why}; {call.name}" + (f" ({call.form_why})" if call.form_why else "")
        pattern, name = call.spec.contraction.pattern, call.implementation
        logs.logger("backend").debug("%s of shards %s: %s, %s", pattern, shards, name, form)
    return _decision(call.name, spec, a, b, call)


def _batch(spec: MatmulSpec, a: Any, b: Any, where: Where) -> Decision:
    """Decides a batch: one product for all of it ("groups" by hostmp, or "xla") if `batching.may_batch` and
    `backend.choose_for_batch` allow it. Otherwise "together" if ranks of CPU devices communicate outside of the
    library's call, or "each"."""
    is_known = all(isinstance(extent, int) for extent in a.shape[: spec.batch])
    (a, b), spec = of_one_index(spec, a, b), spec.replace(batch=0)
    work = operations(spec, a.shape, b.shape)
    types = a.dtype, b.dtype
    # One call per index is a loop, and ranks share no call in a loop of a program of several processes.
    unshared = where.unshared or process_barrier.IN_BODY * where.shares_memory
    choice, is_one_product = backend.choose_implementation(spec, where.platform, unshared, types), False
    if may_batch(spec):
        choice, is_one_product = backend.choose_for_batch(spec, where.platform, where.unshared, types, work)
    if is_one_product and choice.implementation != "xla" and is_known:
        moved = transfers(spec, a, b, "xla")
        return Decision(choice.implementation, choice.why, "groups", moved, moved)
    if is_one_product:
        choice = dataclasses.replace(choice, implementation="xla")
    call = _resolve(spec, a, b, choice)
    if is_one_product:
        return _decision("xla", spec, a, b, call)
    # XLA keeps no order between the collectives of a loop over the batch and others of the program.
    has_collectives = spec.group.nranks > 1 and isinstance(call, forms.Gathered | forms.Xla)
    return _decision("together" if has_collectives and where.platform == "cpu" else "each", spec, a, b, call)


def _resolve(spec: MatmulSpec, a: ArrayType, b: ArrayType, choice: backend.Choice) -> forms.ResolvedCall:
    """Returns the call for shards like `a` and `b` by the chosen implementation, in the form that its library takes.
    XLA computes symbolic and empty extents; the other exceptions are named by their reasons. A narrow operand next to a
    wide one is converted, unless hostmp multiplies in float32. Raises NotImplementedError if a form cannot keep what
    the caller asks for, and if a library is asked for symbolic extents."""
    implementation, types = choice.implementation, (a.dtype, b.dtype)
    if low_precision.is_mixed(*types):  # hostmp decodes the narrow operand; for other implementations it is converted
        wide = low_precision.operand_type(*types)
        compute = precisions.compute_type(spec.precision, wide)
        is_decoded = implementation == "host" and compute in ("32F", "32F_PEDANTIC")
        types = types if is_decoded else (wide, wide)
    product = forms.RequestedCall(spec, *map(jax.ShapeDtypeStruct, (a.shape, b.shape), types))
    if is_symbolic(a, b):
        if spec.asked_of_library:
            raise NotAvailable(
                f"{spec.asked_of_library} takes numbers for extents, got operands of {a.shape} and {b.shape}; export "
                "for numbers, or leave it out to have XLA multiply"
            )
        if spec.implementation != "xla":
            choice = backend.Choice("xla", "extents are symbolic, and a custom call takes numbers")
        return forms.in_form(forms.Xla, "", product, choice)
    if implementation == "cublasmp":
        product = product._replace(spec=spec.replace(implementation="cublasmp"))
        if 0 in (*a.shape, *b.shape) and not spec.fixed_reduction_order:
            return forms.in_form(forms.Xla, "nothing to multiply, so XLA writes d", product, choice)
        gathered = spec.contraction.gathered
        is_narrow = gathered is not None and (a if gathered[0] == "a" else b).dtype != types[0]
        if is_narrow and spec.comm == CommOptions() and not spec.rule.gradient:
            why = "a narrow operand crosses as it is stored, and cuBLASMp takes none next to a wide one"
            return forms.in_form(forms.Gathered, why, product, choice, "cublasmp")
    if implementation in ("host", "cublasmp"):
        return forms.in_library(product, choice, implementation)
    if spec.fixed_reduction_order:
        why = "ranks share no call, and the order of XLA's sums is its own"
        return forms.in_form(forms.Gathered, why, product, choice, "host")
    if implementation == "host+xla":
        return forms.in_form(forms.Xla, "hostmp multiplies what a device has gathered", product, choice, "host")
    return forms.in_form(forms.Xla, "", product, choice)


def activation_grad(spec: MatmulSpec, t: ArrayType, platform: str) -> forms.ResolvedCall:
    """Returns the call that multiplies `t` (m, n) by gelu's derivative, by cuBLASMp if it is chosen, else by hostmp.
    The call is a product of a (m, 0) and b (0, n) with `t` as C, and takes gelu_aux too. alpha is -0: -0 * 0 is -0, and
    -0 + t is t, even for t = -0. Raises as `product` does."""
    choice = backend.choose_implementation(spec, platform, "", (t.dtype, t.dtype))
    library = choice.implementation if choice.implementation == "cublasmp" else "host"
    spec = spec.replace(implementation=choice.implementation, epilog=Epilog.DGELU, alpha=-0.0, beta=1.0, has_c=True)
    a, b = jax.ShapeDtypeStruct((t.shape[0], 0), t.dtype), jax.ShapeDtypeStruct((0, t.shape[1]), t.dtype)
    return forms.in_library(
        forms.RequestedCall(spec, a, b), choice, library, backend.capabilities_of(library).of_tiles()
    )


def _decision(form: str, spec: MatmulSpec, a: ArrayType, b: ArrayType, call: forms.ResolvedCall) -> Decision:
    """Builds the decision for `call`. The links of a call of hostmp are the transfers that cuBLASMp's would have."""
    name = call.implementation
    # The library gathers converted operands.
    a, b = (call.a, call.b) if name == "cublasmp" and not isinstance(call, forms.Gathered) else (a, b)
    moved = transfers(spec, a, b, name)
    links = transfers(spec, a, b, "cublasmp") if name == "host" else moved
    return Decision(name, call.why, form, moved, links, call)


def transfers(spec: MatmulSpec, a: ArrayType, b: ArrayType, implementation: str) -> tuple[Transfer, ...]:
    """Returns the transfers that a rank receives in a product of shards like `a` and `b` by `implementation`. The host
    implementation, and every one in a fixed order, moves operands instead of partial sums: a rank computes 1/P of the
    rows (or columns) from the shards of all ranks, or gathers the operands of its part of d. XLA also completes bias
    gradients."""
    call, mesh, p = spec.contraction, dict(spec.group.mesh), spec.group.nranks
    of_a, of_b = (math.prod(x.shape) * x.dtype.itemsize for x in (a, b))
    is_by_xla = implementation in ("xla", "host+xla") and not spec.fixed_reduction_order
    if spec.distributions or (is_by_xla and call.is_block_grid):
        flags = spec.transpose_a, spec.transpose_b
        is_whole = [is_by_xla and (bool(spec.distributions) or is_transposed) for is_transposed in flags]
        return moves.in_grid(call, mesh, of_a, of_b, is_whole)
    if call.sums and (implementation == "host" or spec.fixed_reduction_order):
        part, whole = (of_b, of_a) if call.scattered == 1 else (of_a, of_b)
        needed = part if call.is_reduced and implementation != "host" else part // p
        return (Transfer.over(mesh, spec.group.axes, (p - 1) * (needed + whole)),)
    rows, cols = extents(spec, a.shape, b.shape).d
    acc = accumulator(low_precision.operand_type(a.dtype, b.dtype))
    moved = moves.in_call(call, mesh, of_a, of_b, rows * cols * acc.itemsize)
    return (*moved, *_sums_of_bias(spec, (rows, cols), acc.itemsize)) if is_by_xla else moved


def _sums_of_bias(spec: MatmulSpec, d: tuple[int, int], itemsize: int) -> Iterator[Transfer]:
    """Yields the collectives that complete a bias gradient, if there is one, in XLA (`bias_grad.bias_gradient`). `d`:
    the shape of a rank's d. `itemsize`: bytes of an element of the sums."""
    name, mesh, axes = spec.rule.gradient, dict(spec.group.mesh), spec.contraction.sharded
    if not name:
        return
    which = bias_grad.summed(name)
    summed, held = axes(which, "m" if which == "d" else "k"), itemsize * (d[0] if which == "a" else d[1])
    p = moves.size_of(mesh, summed)
    if p > 1:
        yield Transfer.over(mesh, summed, 2 * held * (p - 1) // p, "all_reduce")
    rows = axes("a", "m") if which == "a" else ()
    if (p := moves.size_of(mesh, rows)) > 1:
        yield Transfer.over(mesh, rows, held * (p - 1), "all_gather")


# Groups of rows --------------------------------------------------------------------------------------------------


def why_xla(
    implementation: GroupedImplementation | None,
    level: Level,
    where: Where,
    *,
    dtype: str = "",
    is_global: bool = False,
) -> str:
    """Returns why XLA or a user's function multiplies groups of rows, or "" if hostmp does. `dtype`: the type of the
    rows; "" tests none. `is_global`: the operands are global arrays. Then hostmp may multiply although XLA's
    partitioner chooses the shardings, except at "topology"."""
    if where.platform != "cpu":
        return f"the platform is {where.platform!r}"
    if not where.is_on_shards and (not is_global or level.global_order):
        return "XLA's partitioner chooses the shardings"
    if dtype in INTEGERS:
        return "XLA multiplies integers other than int8"
    if callable(implementation):
        return "a function is asked for"
    return "XLA is asked for" if implementation == "xla" else ""


def shares_rows(spec: GroupedSpec, mesh: Any, axes: Dim) -> bool:
    """True if ranks over `axes` of a mesh read or exchange the rows of their groups, so that no matrix moves."""
    where = here(tuple(mesh.shape.items()), axes, mesh)
    return not why_xla(spec.implementation, spec.level, where) and (not where.unshared or where.shares_memory)


def grouped(spec: GroupedSpec, types: Sequence[Any], where: Where) -> Decision:
    """Decides a product of groups of rows. `types`: the types of x, w, bounds and the result. Raises
    NotImplementedError if the caller asks for hostmp, or the level needs it, and it cannot compute the call; and at
    "topology" for a contraction between ranks that exchange no rows. The transfers assume that each rank's rows are
    spread evenly over all groups."""
    x, w, bounds, d = types
    why = why_xla(spec.implementation, spec.level, where, dtype=x.dtype.name)
    if why and spec.implementation == "host":
        raise NotAvailable(f'implementation="host" is not available, because {why}; pass implementation=None')
    if why and spec.level.fixed_order and x.dtype.name not in INTEGERS:  # their sums are exact in any order
        raise spec.level.refusal(f"is not available, because {why}")
    given, nranks, unshared = spec.implementation, spec.nranks, where.unshared
    name = getattr(given, "__name__", "a function") if callable(given) else "xla" if why else "host"
    by = name if callable(given) else "XLA"
    words = f"{by} multiplies groups of rows here" if why else "CPU devices multiply groups of rows"
    if nranks == 1:
        return Decision(name, words if why else f"{words}, each device its own", "local")
    over = functools.partial(Transfer.over, dict(spec.mesh), spec.experts)
    if not why and (not unshared or (where.shares_memory and batch_of((x, w, bounds)) == 1)):
        other = w if spec.is_contraction else d  # read or written on other ranks, as x is
        row = x.shape[2] * x.dtype.itemsize + d.shape[-1] * other.dtype.itemsize
        moved = (over(x.shape[0] * x.shape[1] * row * (nranks - 1) // nranks),)
        words = "CPU devices of one process read the rows of their groups where they are"
        words = f"CPU devices exchange the rows of their groups, because {unshared}" if unshared else words
        return Decision(name, words, "exchange" if unshared else "shared", moved, moved)
    if spec.is_contraction and spec.level.global_order:
        raise spec.level.mesh_refusal(f"is not available, because {unshared}", "run it on one machine, not exported")
    if spec.is_contraction:
        what, nbytes, kind = "sums over ranks", math.prod(d.shape) * accumulator(x.dtype).itemsize, "reduce_scatter"
    else:
        what, nbytes, kind = "gathers", math.prod(w.shape) * w.dtype.itemsize, "all_gather"
    words += f"; each rank {what} the matrices of all groups" + f", because {unshared}" * bool(unshared)
    moved = (over(nbytes * (nranks - 1), kind),)
    return Decision(name, words, "gather", moved, moved)
