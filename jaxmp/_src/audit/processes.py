"""Arrays of which other processes hold a part. Each process runs the same audit, and all of them decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_shared(x: Any) -> bool:
    """Whether another process holds a part of the array."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def pull(x: jax.Array) -> np.ndarray:
    """A copy of a shared array on the host; of copies that differ the first."""
    if x.is_fully_replicated:
        return first(np.asarray(x.addressable_data(0)))
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def push(host: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A shared array, of which every process has the whole on its host."""
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def first(host: np.ndarray) -> np.ndarray:
    """What the first process has on its host, to the bit."""
    return np.frombuffer(_of_each(host)[0], host.dtype).reshape(host.shape)


def of_each(numbers: Sequence[int]) -> list[list[int]]:
    """The numbers, below 2**64, that each process gives."""
    return [np.frombuffer(one, np.uint64).tolist() for one in _of_each(np.array(numbers, np.uint64))]


def _of_each(host: np.ndarray) -> list[bytes]:
    raw = np.frombuffer(np.ascontiguousarray(host).tobytes(), np.uint8)
    if not raw.size:
        return [b""] * jax.process_count()
    return [one.tobytes() for one in np.asarray(multihost_utils.process_allgather(raw))]
