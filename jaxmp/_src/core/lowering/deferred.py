"""Computes a product between machines in chunks: our threads multiply one while XLA's collective moves another.

XLA:CPU computes nothing of a call while gloo keeps its thread waiting. So one custom call starts the product of a chunk
and returns a ticket at once, and another one collects it and waits only for our thread:

    gather 0, start 0, gather 1, start 1, ..., collect 0, collect 1, ...     chunks of what is gathered
    start 0, start 1, ..., collect 0, sum 0, collect 1, sum 1, ...           chunks of what is summed

No call is pending, and each collective depends on the previous one, so that XLA keeps their order. Both custom calls
are functions of their operands: a ticket only saves time (csrc/ffi/deferred_product.h).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._src.core.contraction.moves import in_call
from jaxmp._src.core.lowering.ffi_call import call_attributes, profile_name
from jaxmp._src.core.lowering.xla_matmul import Barrier, Gather
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.extents import extents, operations
from jaxmp._src.core.spec.matmul_spec import MatmulSpec, accumulator
from jaxmp._src.platform.hardware import hardware
from jaxmp._src.platform.hardware.call_time import best_chunks, kind_of
from jaxmp._src.platform.runtime import native
from jaxmp._src.platform.runtime.types import ArrayType

# The largest number of chunks.
_MOST = 8


def chunks_of(spec: MatmulSpec, a: ArrayType, b: ArrayType) -> int:
    """Returns the number of chunks for a product of these shards over gloo, equal on every process of the job: at most
    `_MOST`, and 1 unless chunks save time (`best_chunks`). Returns 1 if all processes share memory, the job's rates are
    unknown, operands are converted (booleans, 8 bits, or of two types), or nothing can be cut."""
    machine, kind = hardware.of_job(), kind_of(a.dtype.name)
    which, dimension, nranks = _cut(spec)
    if machine is None or kind not in machine.rates or jax.process_count() == len(native.shared_processes):
        return 1  # through shared memory
    is_converted = a.dtype == np.bool_ or a.dtype != b.dtype or low_precision.is_low_precision(a.dtype)
    if not which or is_converted:
        return 1
    extent = (a if which == "a" else b).shape[dimension]
    possible = [count for count in range(2, _MOST + 1) if extent % (count * nranks) == 0]
    acc = accumulator(a.dtype)
    a_size, b_size = (math.prod(x.shape) * x.dtype.itemsize for x in (a, b))
    d_size = math.prod(extents(spec, a.shape, b.shape).d) * acc.itemsize
    transfers = in_call(spec.contraction, dict(spec.group.mesh), a_size, b_size, d_size)
    flops = operations(spec, a.shape, b.shape) // spec.group.nranks
    # The buffers of the partial sums. A reduce-scatter begins with the whole product, which XLA copies.
    is_scattered = spec.contraction.scattered is not None
    sums = [d_size * spec.group.nranks] * 2 if is_scattered else [d_size] * spec.contraction.sums
    copied = a_size + b_size + 2 * d_size + sum(each.nbytes for each in transfers)
    return best_chunks(
        machine,
        possible,
        flops=flops,
        kind=kind,
        nbytes=copied,
        transfers=transfers,
        ndevices=jax.local_device_count(),
        sums=sums,
    )


def _cut(spec: MatmulSpec) -> tuple[str, int, int]:
    """Returns (the operand to cut, its dimension, the number of parts of it that each chunk takes rows from). A
    gathered operand is cut along its rows or columns, in 1 part. If ranks sum, a is cut along its rows, or b along its
    columns if sums are scattered over columns; the parts are the ranks of a scatter, else 1. ("", 0, 1) if nothing can
    be cut: for one rank, a grid, and a gather along k."""
    rows, cols = ("a", int(spec.transpose_a)), ("b", int(not spec.transpose_b))
    contraction = spec.contraction
    if spec.group.nranks == 1 or spec.distributions or contraction.is_block_grid:
        return "", 0, 1
    if contraction.sums:
        parts = 1 if contraction.scattered is None else spec.group.nranks
        return (*(cols if contraction.scattered == 1 else rows), parts)
    return (*contraction.gathered, 1) if contraction.gathered in (rows, cols) else ("", 0, 1)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A product in `count` chunks. `spec`: of the product. `local`: of a chunk. `is_conjugated`: conjugate (a, b)
    first."""

    count: int
    spec: MatmulSpec
    local: MatmulSpec
    is_conjugated: tuple[bool, bool]

    def gathered(self, a: jax.Array, b: jax.Array, barrier: Barrier, gather: Gather) -> jax.Array:
        """Returns the product; multiplies chunks of the gathered operand while other chunks are being gathered by
        `gather(x, axes, dimension)`, the first one after the barrier."""
        which, dimension, _ = _cut(self.spec)
        x, other = (a, b) if which == "a" else (b, a)
        rows = x.shape[dimension] // self.count
        ticket, (first,) = _no_ticket(), barrier([jnp.int32(0)])
        started = []
        for i in range(self.count):
            chunk = lax.dynamic_slice_in_dim(x, first, rows, dimension)
            chunk = gather(chunk, self.spec.group.axes, dimension)
            pair = low_precision.widened(*((chunk, other) if which == "a" else (other, chunk)))
            ticket, first = self._start(*pair, ticket, (i + 1) * rows)
            started.append((*pair, ticket))
        parts = [self._collect(*each, ticket) for each in started]
        return _interleaved(parts, int(which == "b"), self.spec.group.nranks)

    def summed(self, a: jax.Array, b: jax.Array, barrier: Barrier, add: Callable[..., jax.Array]) -> jax.Array:
        """Returns the product summed over ranks, or this rank's part of it if `add` scatters. `add(z)` sums the product
        z of a chunk, the first one after the barrier, while other chunks are being multiplied."""
        which, dimension, nparts = _cut(self.spec)
        ticket, started = _no_ticket(), []
        for i in range(self.count):
            chunk = _every(a if which == "a" else b, i, self.count, dimension, nparts)
            pair = (chunk, b) if which == "a" else (a, chunk)
            ticket, _ = self._start(*pair, ticket, 0)
            started.append((*pair, ticket))
        sums: list[jax.Array] = []
        for i, each in enumerate(started):
            z = self._collect(*each, sums[-1] if sums else ticket)
            sums.append(add(z if i else barrier([z])[0]))
        return jnp.concatenate(sums, int(which == "b"))

    def _start(self, a: jax.Array, b: jax.Array, ahead: jax.Array, following: int) -> tuple[jax.Array, jax.Array]:
        """Starts a product after `ahead`, the ticket of the one before. Returns its ticket, and the number `following`
        as an array that XLA gets once the product has started."""
        native.register()
        results = (jax.ShapeDtypeStruct((1,), np.uint64), jax.ShapeDtypeStruct((), np.int32))
        ticket, number = self._call(native.START_TARGET, results, a, b, ahead, jnp.int32(following))
        return ticket, number

    def _collect(self, a: jax.Array, b: jax.Array, ticket: jax.Array, after: jax.Array) -> jax.Array:
        """Returns the product of `ticket`, once `after` has been computed."""
        shape = extents(self.local, a.shape, b.shape).d
        d: jax.Array = self._call(
            native.COLLECT_TARGET, jax.ShapeDtypeStruct(shape, self.local.out_dtype), a, b, ticket, after
        )
        return d

    def _call(self, target: str, results: Any, a: jax.Array, b: jax.Array, *rest: jax.Array) -> Any:
        """Calls a target of the extension with a and b, conjugated if `is_conjugated` says so."""
        a, b = (lax.conj(x) if conjugated else x for x, conjugated in zip((a, b), self.is_conjugated, strict=True))
        kept = "a" if _cut(self.spec)[0] == "a" else "b"  # JAX's a is the library's b
        found = extents(self.local, a.shape, b.shape)
        with jax.enable_x64(True), jax.named_scope(profile_name(self.local, found, a, b)):  # attributes are 64-bit
            call: Callable[..., Any] = jax.ffi.ffi_call(target, results)
            return call(b, a, *rest, kept=kept, **call_attributes(self.local, a, b))


def _no_ticket() -> jax.Array:
    with jax.enable_x64(True):
        return jnp.zeros(1, np.uint64)


def _every(x: jax.Array, i: int, count: int, dimension: int, nparts: int) -> jax.Array:
    """Cuts each of `nparts` parts of x along `dimension` into `count` chunks. Returns chunk i of all parts, joined."""
    before, after = x.shape[:dimension], x.shape[dimension + 1 :]
    split = x.reshape(*before, nparts, count, -1, *after)
    return lax.index_in_dim(split, i, dimension + 1, keepdims=False).reshape(*before, -1, *after)


def _interleaved(chunks: Sequence[jax.Array], dimension: int, nparts: int) -> jax.Array:
    """Inverts `_every`: returns x from its results for all i."""
    before, after = chunks[0].shape[:dimension], chunks[0].shape[dimension + 1 :]
    split = [x.reshape(*before, nparts, -1, *after) for x in chunks]
    return jnp.concatenate(split, dimension + 1).reshape(*before, -1, *after)
