"""What a resolved call costs, and which plan serves it; `explain` prints it."""

from __future__ import annotations

import math

from jaxmp._src.contraction import moves
from jaxmp._src.hardware.call_time import Transfer
from jaxmp._src.lowering import ffi_call, fixed_shape
from jaxmp._src.lowering.legalize import Form
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


def transfers(spec: MatmulSpec, a: ArrayType, b: ArrayType, implementation: str) -> tuple[Transfer, ...]:
    """What one rank receives, and among which ranks.

    The host implementation, and any under a level of determinism, read operands of peers where others move partial
    sums: each rank computes 1/P of the rows (or columns) from all ranks' shards, or gathers what its part of d needs.
    """
    call, mesh, p = spec.contraction, dict(spec.group.mesh), spec.group.nranks
    of_a, of_b = (math.prod(x.shape) * x.dtype.itemsize for x in (a, b))
    is_all_reduced = call.pattern == Pattern.ALL_REDUCE
    if (is_all_reduced or call.pattern == Pattern.REDUCE_SCATTER) and (
        implementation == "host" or spec.fixed_reduction_order
    ):
        part, whole = (of_b, of_a) if call.is_transposed else (of_a, of_b)
        needed = part if is_all_reduced and implementation != "host" else part // p
        return (Transfer.over(mesh, spec.group.axes, (p - 1) * (needed + whole)),)
    rows, cols = extents(spec, a.shape, b.shape).d
    sums = rows * cols * accumulator(low_precision.operand_type(a.dtype, b.dtype)).itemsize
    return moves.in_call(call, mesh, of_a, of_b, sums)
