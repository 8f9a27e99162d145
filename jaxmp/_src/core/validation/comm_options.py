"""Communication options of a call, and the patterns that take them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxmp._src.core.spec.levels import Level
from jaxmp._src.core.spec.low_precision import WIDE
from jaxmp._src.core.spec.matmul_spec import INTEGERS, RESULT_TYPES, MatmulSpec, Pattern, accumulator
from jaxmp._src.core.spec.options import CommOptions
from jaxmp._src.core.spec.refusal import InvalidType, InvalidValue
from jaxmp._src.core.validation.operand_checks import check_dtype
from jaxmp._src.platform.runtime import native

_SUMMING = (Pattern.REDUCE_SCATTER, Pattern.ALL_REDUCE)
# The types of b and of its gradient that may cross between ranks.
_NARROW = {"weights": ("int8", "float8_e4m3fn"), "gradients": ("bfloat16",)}
# cublasMpMatmulAlgoType_t's names, and the patterns on which cuBLASMp has each (cublasmp.h 0.10). hostmp takes the same
# ones; on GPUs the library itself is asked.
ALGORITHMS = {
    "default": tuple(Pattern),
    "split_p2p": (Pattern.ALL_GATHER, *_SUMMING),
    "split_multicast": _SUMMING,
    "atomic_p2p": (Pattern.ALL_GATHER, *_SUMMING),
    "atomic_multicast": (Pattern.REDUCE_SCATTER,),
    "no_overlap": tuple(Pattern),
    "fused": (Pattern.ALL_REDUCE,),
}


def resolve_comm_options(result: DTypeLike, operand: DTypeLike, comm: CommOptions | None, level: Level) -> CommOptions:
    """Returns checked options for a spec, with types by name; the defaults if `comm` is None. The algorithm "default"
    becomes None. `result`, `operand`: the types of D and of a and b.

    Raises TypeError or ValueError for types and values that no pattern takes, and NotImplementedError for `weights` or
    `gradients` at a `level` with a fixed order. `check_comm_options` checks what depends on the pattern."""
    if comm is None:
        return CommOptions()
    if not isinstance(comm, CommOptions):
        raise InvalidType(
            f"comm must be a jaxmp.CommOptions, got {type(comm).__name__}; pass "
            "comm=jaxmp.CommOptions(dtype=..., algorithm=..., sm_count=...)"
        )
    dtype = None if comm.dtype is None else check_dtype("comm.dtype", comm.dtype)
    if dtype is not None:
        scale, out = accumulator(np.dtype(operand)), np.dtype(result)
        is_number = dtype.name in RESULT_TYPES and dtype.name not in INTEGERS
        is_alike = jnp.issubdtype(dtype, jnp.complexfloating) == jnp.issubdtype(out, jnp.complexfloating)
        if not (is_number and is_alike and out.itemsize <= dtype.itemsize <= scale.itemsize):
            raise InvalidValue(
                f"comm.dtype must be no smaller than the result's {out.name} and no larger than "
                f"{scale.name}, the type of the sums, got {dtype.name}"
            )
    algorithm, sm_count = comm.algorithm, comm.sm_count
    narrow = {name: getattr(comm, name) for name in _NARROW if getattr(comm, name) is not None}
    for name, given in narrow.items():
        narrow[name] = check_dtype(f"comm.{name}", given).name
        if narrow[name] not in _NARROW[name]:
            raise InvalidValue(f"comm.{name} must be None or {' or '.join(_NARROW[name])}, got {narrow[name]}")
        if level.fixed_order:
            raise level.refusal(f"has no comm.{name}, which rounds what crosses between ranks", "drop it")
    if algorithm is not None and not (isinstance(algorithm, str) and algorithm in ALGORITHMS):
        raise InvalidValue(f"comm.algorithm must be None or one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    if sm_count is not None:
        if isinstance(sm_count, bool) or not isinstance(sm_count, int | np.integer):
            raise InvalidType(f"comm.sm_count must be an integer, got {type(sm_count).__name__}")
        if not 1 <= sm_count < 2**31:
            raise InvalidValue(
                f"comm.sm_count must be at least 1, the number of multiprocessors that communicate, got "
                f"{sm_count}; None leaves it to the library"
            )
    is_default = algorithm in (None, "default")
    return CommOptions(
        dtype=None if dtype is None else dtype.name,
        algorithm=None if is_default else algorithm,
        sm_count=None if sm_count is None else int(sm_count),
        **narrow,
    )


def check_comm_options(spec: MatmulSpec, columns: int, is_settled: bool = True) -> None:
    """Raises ValueError for an option that the call's pattern does not take. `columns`: of d on a device, which the
    algorithm "fused" restricts.

    Always refuses `weights` and `gradients`, which a call that takes them has removed. Does not check the algorithm of
    a known pattern where cuBLASMp may run on GPUs, because the library does. `is_settled`: the pattern is known; if
    not, refuses all that not every pattern takes."""
    comm, pattern = spec.comm, spec.contraction.pattern
    if comm == CommOptions():
        return
    this, remedy = f"this call is {pattern.value}", "drop it"
    if not is_settled:
        this = "XLA's partitioner has not chosen a pattern yet"
        remedy = "pass in_shardings, out_sharding and a mesh, or use explicit axes"
    if any(comm.narrow):  # a call that gathers such a b has taken these options
        raise InvalidValue(
            f"comm.{'weights' if comm.weights else 'gradients'} needs a {{b}} of {', '.join(WIDE)} that the ranks "
            f"gather as it is sharded, but {this}; {remedy}"
        )
    if comm.dtype is not None and (pattern not in _SUMMING or not is_settled):
        raise InvalidValue(
            f"comm.dtype={comm.dtype} applies to partial sums, so the pattern must be "
            f"reduce_scatter or all_reduce, but {this}; {remedy}"
        )
    # cuBLASMp itself says which algorithms it has: all ranks ask it together, with the first run's workspace query.
    if is_settled and spec.implementation in (None, "cublasmp") and native.has_cuda_devices():
        return
    takes = ALGORITHMS[comm.algorithm or "default"]
    if pattern not in takes or (not is_settled and len(takes) < len(Pattern)):
        raise InvalidValue(
            f"comm.algorithm={comm.algorithm!r} needs the pattern {' or '.join(p.value for p in takes)}, but "
            f"{this}; {remedy}"
        )
    # Source: cublasmp.h 0.10, CUBLASMP_MATMUL_ALGO_TYPE_FUSED.
    dtype = np.dtype(comm.dtype or accumulator(spec.out_dtype))
    if comm.algorithm == "fused" and columns * dtype.itemsize % 16:
        raise InvalidValue(
            f"comm.algorithm='fused' needs rows of the result that are a multiple of 16 bytes of the "
            f"communicated {dtype.name}, a multiple of {16 // dtype.itemsize} columns, got {columns}; pad b, or drop it"
        )


def fit_comm_options(spec: MatmulSpec) -> MatmulSpec:
    """Returns the spec without `comm.dtype` if its pattern sums nothing or the type is smaller than D's, and without
    `comm.algorithm` if its pattern does not have it. Other options stay."""
    comm, pattern = spec.comm, spec.contraction.pattern
    if comm.dtype and (pattern not in _SUMMING or np.dtype(comm.dtype).itemsize < np.dtype(spec.out_dtype).itemsize):
        comm = dataclasses.replace(comm, dtype=None)
    if comm.algorithm and pattern not in ALGORITHMS[comm.algorithm]:
        comm = dataclasses.replace(comm, algorithm=None)
    return spec.replace(comm=comm)


def comm_options_text(spec: MatmulSpec) -> str:
    """Returns the options in `spec.comm` that are not None: "comm.algorithm=fused, comm.sm_count=4"."""
    given = ((f"comm.{field.name}", getattr(spec.comm, field.name)) for field in dataclasses.fields(spec.comm))
    return ", ".join(f"{name}={value}" for name, value in given if value is not None)
