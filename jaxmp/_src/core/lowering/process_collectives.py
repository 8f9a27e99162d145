"""Collectives of a call through memory that the processes of one machine share.

Each device writes to the memory of its process and waits at the barrier of the call. Once all devices have come, each
reads what the others wrote. XLA's collectives (gloo) use sockets even between processes of one machine.

Such a call is pending until all ranks have come. In a loop or branch, XLA's collectives after the loop could then start
before those inside it, in a different order on each rank. So a loop or branch has two calls that do not wait: the first
writes, XLA's all-gather tells every rank where the others have written, and the run, and the second reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._src.core.lowering import process_barrier
from jaxmp._src.core.lowering.process_barrier import Site
from jaxmp._src.core.spec import wire
from jaxmp._src.platform.runtime import native

# Types that can be summed: csrc/ffi/process_calls.cc.
_SUMMED = ("float32", "float64", "complex64", "complex128", "int32", "uint32", "int64", "uint64")
# In an all-reduce of at most this many bytes every rank reads all, instead of a reduce-scatter and an all-gather.
_FEW_BYTES = 32 << 10


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """The collectives of the call at `site`. `call`: its name for messages. `fields`: values equal on all processes.
    Sums need a type that `sums` takes."""

    site: Site
    call: str
    fields: Mapping[str, Any]

    def all_gather(self, x: jax.Array, axes: tuple[str, ...], dimension: int) -> jax.Array:
        """Returns the tiled `lax.all_gather` over axes of the call's group."""
        return wire.moved(lambda x: self._run(x, axes, dimension), x, "")

    def psum_scatter(self, x: jax.Array, axes: tuple[str, ...], dimension: int) -> jax.Array:
        """Returns the tiled `lax.psum_scatter`, summed in the order of the ranks."""
        return self._run(x, axes, dimension, is_sum=True)

    def psum(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Returns `lax.psum`, summed in the order of the ranks: few bytes by an all-gather, else scattered first."""
        if x.size * x.dtype.itemsize <= _FEW_BYTES:
            first, *others = self._run(x[None], axes, 0)
            total: jax.Array = sum(others, first)
            return total
        flat = jnp.pad(x.reshape(-1), (0, -x.size % self._nranks(axes)))
        return self._run(self._run(flat, axes, 0, is_sum=True), axes, 0)[: x.size].reshape(x.shape)

    def rows(self, x: jax.Array, m: int, written: jax.Array, table: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Returns an array (m, ...) of rows that this rank takes from x (rows, ...) of all ranks. `written` (ranks,):
        how many rows each rank writes, from its first row on. `table` (n, 4): the rows to take, as (rank, first row,
        number of rows, first row in the result). Other rows of the result are undefined."""

        def run(x: jax.Array) -> jax.Array:
            tables = written.astype(np.int32), table.astype(np.int32)
            return self._run(x, axes, 0, extent=m, tables=tables)

        return wire.moved(run, x, "")

    def sums(self, dtype: np.dtype) -> bool:
        """True if elements of this type can be summed."""
        return np.dtype(dtype).name in _SUMMED

    def _nranks(self, axes: tuple[str, ...]) -> int:
        sizes = dict(self.site.axes)
        return math.prod(sizes[name] for name in axes)

    def _run(
        self,
        x: jax.Array,
        axes: tuple[str, ...],
        dimension: int,
        *,
        is_sum: bool = False,
        extent: int | None = None,
        tables: tuple[jax.Array, ...] = (),
    ) -> jax.Array:
        """All-gathers x along a dimension, reduce-scatters it if `is_sum`, or collects `extent` rows by `tables`, the
        `written` and `table` of `rows`. Returns x for one rank, and zeros if x or the result has no elements."""
        nranks = self._nranks(axes)
        if extent is None:
            extent = x.shape[dimension] // nranks if is_sum else x.shape[dimension] * nranks
        shape = (*x.shape[:dimension], extent, *x.shape[dimension + 1 :])
        if 0 in (*x.shape, *shape):
            return jnp.zeros(shape, x.dtype)
        if nranks == 1:  # nothing to read from other ranks
            return x
        native.register()
        # Over only some axes of the call's group, as in a grid, smaller groups communicate.
        others = [name for name, _ in self.site.axes if name not in axes]
        position = self.site.position()
        attributes = {
            "groups": process_barrier.numbered(self.site.axes, others).reshape(-1),
            "ranks": process_barrier.numbered(self.site.axes, axes).reshape(-1),
            "outer": np.int64(math.prod(x.shape[:dimension])),
            "sums": np.int64(is_sum),
            "picks": np.int64(len(tables) > 0),
        }

        def run(part: str, of: jax.ShapeDtypeStruct, *operands: jax.Array) -> jax.Array:
            # XLA must not repeat, merge or drop one of the two halves: each write is read exactly once.
            call = jax.ffi.ffi_call(native.COLLECTIVE_TARGET, of, has_side_effect=part != "all")
            all_attributes = self.site.attributes(self.call, self.fields) | attributes
            result: jax.Array = call(*operands, *tables, position, part=part, **all_attributes)
            return result

        whole = jax.ShapeDtypeStruct(shape, x.dtype)
        with jax.enable_x64(True):  # attributes are 64-bit
            if not self.site.is_in_body:
                return run("all", whole, x)
            (x,) = self.site.barrier(self.call, self.fields, [x])
            place = run("write", jax.ShapeDtypeStruct((2,), np.uint64), x)
            return run("read", whole, x, lax.all_gather(place, axes, tiled=True))
