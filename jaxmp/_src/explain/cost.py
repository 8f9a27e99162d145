"""What one call costs and which plan serves it, from its spec and its shards' types; `explain` prints it."""

from __future__ import annotations

import math

import jax

from jaxmp._src.lowering import backend, ffi_call, fixed_shape
from jaxmp._src.lowering.legalize import PADDED_K, find_route, with_k, without_conjugation
from jaxmp._src.runtime import native
from jaxmp._src.spec.matmul_spec import MatmulSpec, Pattern, accumulator, global_extents, output_shape
from jaxmp._src.validation.comm_options import fit_hints

# What provides the levels of determinism beyond "run_to_run".
_ORDER = "each element is one sum over k in ascending order, in fixed panels, then its epilog"


def plan_facts(spec: MatmulSpec, a, b, implementation: str) -> tuple[str, int]:
    """(algorithm, workspace bytes per rank) of the plan that serves a call."""
    if implementation != "host" and spec.is_invariant:
        return _gathered_facts(spec, a, b, "cublasmp" if implementation == "cublasmp" else "host")
    if implementation == "host+xla":
        return "hostmp local Matmul and lax collectives", 0
    if implementation in ("host", "cublasmp"):
        return _library_facts(spec, a, b, implementation)
    return ("lax.dot_general and lax collectives" if spec.nranks > 1 else "lax.dot_general"), 0


def _library_facts(spec: MatmulSpec, a, b, library: str) -> tuple[str, int]:
    """As `plan_facts` of a call of hostmp or cuBLASMp.

    Which of its algorithms cuBLASMp takes, and its workspace, show when it runs; this is what it is expected to do.
    """
    if library == "cublasmp" and 0 in (*a.shape, *b.shape) and not spec.is_invariant:
        return "nothing to multiply, so XLA writes d", 0
    spec = without_conjugation(spec)
    route = find_route(spec, a.shape, b.shape, a.dtype.itemsize, backend.capabilities_of(library))
    named = f"{route.kind} ({route.why})"
    if route.kind == "fixed_chunks" and spec.nranks > 1:
        return _gathered_facts(spec, a, b, library)
    if route.kind == "fixed_chunks":
        return fixed_shape.describe(spec, a.shape, b.shape, library), 0
    if route.kind == "padded_k":
        shapes = with_k(spec, a.shape, b.shape, PADDED_K)
        padded_a, padded_b = (jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, (a, b), strict=True))
        algorithm, workspace = _library_facts(spec, padded_a, padded_b, library)
        return f"{named}; {algorithm}", workspace
    if route.kind != "direct":
        return named, 0
    plan = native.describe_plan(ffi_call.call_attributes(spec, a, b), library)
    if library == "cublasmp":
        return f"{plan['library']} {plan['algorithm']}; workspace from its first run on", 0
    workspace = max(d + h for d, h in zip(plan["device_workspace"], plan["host_workspace"], strict=True))
    order = f"; {_ORDER}" if spec.is_invariant else ""
    return f"{plan['library']} {plan['algorithm']}{order}", workspace


def _gathered_facts(spec: MatmulSpec, a, b, library: str) -> tuple[str, int]:
    """As `plan_facts` where bits are promised and the ranks of a group do not share a call."""
    _, _, k = global_extents(spec, a.shape, b.shape)
    rows, cols = output_shape(spec, a.shape, b.shape)
    local = fit_hints(spec.local())
    parts = [(k, rows) if spec.transpose_a else (rows, k), (cols, k) if spec.transpose_b else (k, cols)]
    whole_a, whole_b = (jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(parts, (a, b), strict=True))
    algorithm, workspace = _library_facts(local, whole_a, whole_b, library)
    copied = "each rank gathers what its part of d needs; " if spec.nranks > 1 else ""
    return f"{copied}{algorithm}", workspace


def bytes_moved(spec: MatmulSpec, a, b, implementation: str) -> int:
    """Bytes that one rank reads from its peers' memory, by the pattern's own minimum.

    AG: the other ranks' rows. RS and AR by partial sums (ring): (P-1)/P of D in the accumulator's type, twice for AR.
    The host implementation reads the operands of its peers instead. A grid: the blocks of its row and its column.
    """
    p = spec.nranks
    rows, cols = output_shape(spec, a.shape, b.shape)
    bytes_a, bytes_b = (math.prod(x.shape) * x.dtype.itemsize for x in (a, b))
    if spec.pattern == Pattern.ALL_GATHER:
        return (p - 1) * bytes_a
    if spec.pattern == Pattern.GRID:
        return (spec.axis_size(spec.col_axes) - 1) * bytes_a + (spec.axis_size(spec.row_axes) - 1) * bytes_b
    if spec.pattern == Pattern.LOCAL:
        return 0
    if spec.is_invariant and implementation != "host":
        kept = p if spec.pattern == Pattern.REDUCE_SCATTER else 1
        return (p - 1) * (bytes_a // kept + bytes_b)
    if implementation == "host":
        # Each rank computes 1/P of the rows from all ranks' shards.
        return (p - 1) * (bytes_a // p + bytes_b)
    full = rows * cols * (p if spec.pattern == Pattern.REDUCE_SCATTER else 1) * accumulator(a.dtype).itemsize
    return full * (p - 1) // p * (2 if spec.pattern == Pattern.ALL_REDUCE else 1)
