"""What a resolved call costs, and which plan serves it; `explain` prints it."""

from __future__ import annotations

import math

from jaxmp._src.hardware.call_time import Transfer
from jaxmp._src.lowering import ffi_call, fixed_shape
from jaxmp._src.lowering.legalize import Form, along_one_axis
from jaxmp._src.lowering.resolve import ResolvedCall
from jaxmp._src.runtime import native
from jaxmp._src.runtime.types import ArrayType
from jaxmp._src.spec import low_precision
from jaxmp._src.spec.matmul_spec import MatmulSpec, Pattern, accumulator, extents

# What provides the levels of determinism beyond "run_to_run".
_ORDER = "each element is one sum over k in ascending order, in fixed K blocks, then its epilog"


def plan_facts(call: ResolvedCall) -> tuple[str, int]:
    """(algorithm, workspace bytes per rank) of the plan that serves a call.

    Which of its algorithms cuBLASMp takes, and its workspace, show when it runs; this is what it is expected to do.
    """
    if call.form == Form.XLA:
        return _xla_facts(call)
    if call.form == Form.FIXED_SHAPE_TILES:
        return fixed_shape.describe(call.spec, call.a.shape, call.b.shape, call.library), 0
    if call.form == Form.DIRECT:
        return _library_facts(call)
    named = f"{call.form} ({call.form_why})"
    contained = (Form.GATHERED, Form.PADDED_K, Form.GATHERED_OPERAND, Form.REDUCE_SCATTER)
    if call.inner is None or call.form not in contained:
        return named, 0
    algorithm, workspace = plan_facts(call.inner)
    if call.form == Form.GATHERED:
        named = "each rank gathers what its part of d needs" if call.spec.group.nranks > 1 else ""
    return "; ".join(filter(None, (named, algorithm))), workspace


def _xla_facts(call: ResolvedCall) -> tuple[str, int]:
    if call.implementation in ("host", "cublasmp"):
        return call.form_why, 0
    if call.library:
        return "hostmp local Matmul and lax collectives", 0
    return ("lax.dot_general and lax collectives" if call.spec.group.nranks > 1 else "lax.dot_general"), 0


def _library_facts(call: ResolvedCall) -> tuple[str, int]:
    plan = native.describe_plan(ffi_call.call_attributes(call.spec, call.a, call.b), call.library)
    if call.library == "cublasmp":
        return f"{plan['library']} {plan['algorithm']}; workspace from its first run on", 0
    workspace = max(d + h for d, h in zip(plan["device_workspace"], plan["host_workspace"], strict=True))
    order = f"; {_ORDER}" if call.spec.fixed_reduction_order else ""
    return f"{plan['library']} {plan['algorithm']} ({plan['kernel']}){order}", workspace


def bytes_moved(spec: MatmulSpec, a: ArrayType, b: ArrayType, implementation: str) -> int:
    """Bytes that one rank reads from its peers' memory, by the pattern's own minimum."""
    return sum(each.nbytes for each in transfers(spec, a, b, implementation))


def transfers(spec: MatmulSpec, a: ArrayType, b: ArrayType, implementation: str) -> tuple[Transfer, ...]:
    """What one rank receives, and among which ranks.

    AG: the other ranks' rows. RS and AR by partial sums (ring): (P-1)/P of D in the accumulator's type, twice for AR.
    The host implementation reads the operands of its peers instead. A grid: the blocks of its row and its column.
    """
    group = spec.group
    if group.pattern == Pattern.LOCAL:
        return ()
    axis = along_one_axis(spec)
    if group.pattern == Pattern.GRID and not (axis is not None and axis.scattered is not None):
        sides = ((a, group.col_axes), (b, group.row_axes))
        found = ((math.prod(x.shape) * x.dtype.itemsize * (group.size(axes) - 1), axes) for x, axes in sides)
        return tuple(Transfer(nbytes, group.size(axes), _stride(spec, axes)) for nbytes, axes in found if nbytes)
    return (Transfer(_bytes_along_one_axis(spec, a, b, implementation), group.nranks, _stride(spec, group.axes)),)


def _stride(spec: MatmulSpec, axes: tuple[str, ...]) -> int:
    """By how many devices neighbours along these axes lie apart, in a mesh whose last axis varies fastest."""
    names = [name for name, _ in spec.group.mesh]
    last = max((names.index(axis) for axis in axes), default=0)
    return math.prod(size for _, size in spec.group.mesh[last + 1 :])


def _bytes_along_one_axis(spec: MatmulSpec, a: ArrayType, b: ArrayType, implementation: str) -> int:
    """Bytes that one rank receives in a gather, or a sum, over the one axis (or axes) of its group."""
    p = spec.group.nranks
    rows, cols = extents(spec, a.shape, b.shape).d
    bytes_a, bytes_b = (math.prod(x.shape) * x.dtype.itemsize for x in (a, b))
    if spec.group.pattern == Pattern.ALL_GATHER:
        return (p - 1) * bytes_a
    axis = along_one_axis(spec)
    is_all_reduced = spec.group.pattern == Pattern.ALL_REDUCE
    # Of which each rank needs its own part, and all.
    part, whole = (bytes_b, bytes_a) if axis is not None and axis.dimension == 1 else (bytes_a, bytes_b)
    if implementation == "host":
        # Each rank computes 1/P of the rows from all ranks' shards.
        return (p - 1) * (part // p + whole)
    if spec.fixed_reduction_order:
        return (p - 1) * (part // (1 if is_all_reduced else p) + whole)
    sums = accumulator(low_precision.operand_type(a.dtype, b.dtype))
    full = rows * cols * (1 if is_all_reduced else p) * sums.itemsize
    return full * (p - 1) // p * (2 if is_all_reduced else 1)
