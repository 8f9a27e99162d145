"""Arrays as bits on the host: how they get there and back, and how far apart two of them are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxmp._src.platform.runtime.bitwise import bits_of, distance, places


@dataclasses.dataclass(frozen=True)
class Difference:
    """The differences between two arrays of one type.

    Attributes:
      differing, elements: how many elements have other bits, and how many there are.
      ulps: the largest distance in units in the last place: how many numbers of the type are between two elements,
        plus one. For integers it is the distance itself. Pairs with a NaN are left out.
      absolute: the largest absolute difference; inf where one element of a pair is NaN.
    """

    differing: int
    elements: int
    ulps: int
    absolute: float

    def merge(self, other: Difference) -> Difference:
        """Returns the counts of the larger share of differing elements, with the larger `ulps` and `absolute`."""
        worse = max(self, other, key=lambda one: one.differing / max(one.elements, 1))
        return dataclasses.replace(worse, ulps=max(self.ulps, other.ulps), absolute=max(self.absolute, other.absolute))


def is_shared(x: Any) -> bool:
    """True if another process holds a part of the array."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def is_key(x: Any) -> bool:
    """True if these are random keys, which have no bits of their own on the host."""
    return bool(hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def pull(x: Any) -> np.ndarray:
    """Copies an array to the host; for random keys, their data, which has more dimensions at the end. If several
    processes hold parts of it, each of them has to call this, and gets the whole array."""
    x = jax.random.key_data(x) if is_key(x) else x
    if not is_shared(x):
        return np.asarray(x)
    if x.is_fully_replicated:  # of copies that differ the first
        return first(np.asarray(x.addressable_data(0)))
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def push(host: np.ndarray, like: Any, *, leading: int = 0) -> Any:
    """Returns `host` as an array with the devices and the sharding of the array `like`; on JAX's default device if
    `like` is uncommitted or no JAX array. For random keys, `host` is their data, and the result, keys, is on the
    default device. `leading`: the number of dimensions that `host` has before the dimensions of `like`; negative if it
    has fewer."""
    if is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(host), impl=jax.random.key_impl(like))
    sharding = getattr(like, "sharding", None)
    if sharding is None or not like.committed:
        return jnp.asarray(host)
    if leading:
        sharding = _with_dimensions(sharding, like.ndim, leading)
    return place(host, sharding)


def place(host: np.ndarray, sharding: Any) -> Any:
    """Puts `host`, which every process has, on devices of this process or of several."""
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _with_dimensions(sharding: Any, ndim: int, leading: int) -> Any:
    """Returns `sharding`, of `ndim` dimensions, for arrays with `leading` more, or fewer, dimensions in front. For a
    sharding that is no NamedSharding, returns a sharding on its first device alone."""
    if not isinstance(sharding, NamedSharding):
        return jax.sharding.SingleDeviceSharding(min(sharding.device_set, key=lambda device: device.id))
    spec = sharding.spec
    dims = [None] * max(leading, 0) + [*spec.partitions, *[None] * (ndim - len(spec))][max(-leading, 0) :]
    return NamedSharding(sharding.mesh, spec.update(partitions=dims))


def difference(actual: Any, expected: np.ndarray, *, across: bool = False) -> Difference | None:
    """Compares an array with what it should be, on the devices of this process with a part or a copy of it; None if all
    bits are equal. `differing` counts the elements of the parts, without copies; if the parts are equal, the elements
    of the copy that differs most. `across`: on the devices of all processes; each process has to call this about the
    same array, and gets the same answer. Raises AssertionError if shapes or types differ."""
    shards = [] if is_key(actual) else getattr(actual, "addressable_shards", [])
    if len(shards) <= 1 and not is_shared(actual):
        parts = [(True, _difference(pull(actual), expected))]
    else:
        parts = [(s.replica_id == 0, _difference(np.asarray(s.data), expected[s.index])) for s in shards]
    own, copies = ([one for is_own, one in parts if one is not None and is_own is kind] for kind in (True, False))
    record = [
        sum(one.differing for one in own),
        max((one.differing for one in copies), default=0),
        max((one.ulps for one in own + copies), default=0),
        int(np.float64(max((one.absolute for one in own + copies), default=0.0)).view(np.uint64)),
    ]
    records = [record]
    if across:
        records = [np.frombuffer(one, np.uint64).tolist() for one in _bytes_of_each(np.array(record, np.uint64))]
    # If each process has an array of its own, each counts all elements.
    total = sum if is_shared(actual) else max
    differing = total(one[0] for one in records) or max(one[1] for one in records)
    if not differing:
        return None
    ulps, absolute = (max(one[i] for one in records) for i in (2, 3))  # bits of floats above zero ascend as they do
    return Difference(differing, expected.size, ulps, float(np.uint64(absolute).view(np.float64)))


def ascending(x: np.ndarray) -> np.ndarray:
    """Returns the numbers of an array in one dimension, sorted, -0 before 0; a complex number counts as two."""
    numbers = np.ascontiguousarray(x).reshape(-1)
    numbers = numbers.view(numbers.real.dtype) if np.iscomplexobj(numbers) else numbers
    return np.asarray(numbers[np.argsort(places(numbers)[:, 0])])


def _difference(actual: np.ndarray, expected: np.ndarray) -> Difference | None:
    """Compares two arrays; None if all bits are equal. Raises AssertionError if shapes or types differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(f"{actual.dtype}{actual.shape} compared with {expected.dtype}{expected.shape}")
    differs = (bits_of(actual) != bits_of(expected)).any(axis=-1)
    if not differs.any():
        return None
    have, want = actual[differs], expected[differs]
    wide: Any = np.complex128 if np.iscomplexobj(have) else np.float64
    is_nan, other_is_nan = (np.isnan(x.astype(wide)) for x in (have, want))
    numbers = ~(is_nan | other_is_nan)
    with np.errstate(all="ignore"):
        apart = np.abs(have.astype(wide) - want.astype(wide))
    apart[np.isnan(apart)] = np.inf
    apart[is_nan & other_is_nan] = 0
    ulps = np.max(distance(have[numbers], want[numbers]), initial=0)
    return Difference(int(differs.sum()), actual.size, int(ulps), float(np.max(apart)))


# Several processes, which run the same audit and decide the same ---------------------------------------------------


def first(host: np.ndarray) -> np.ndarray:
    """Returns the first process's array, bit by bit. Every process has to call this, with an array of one type and
    shape."""
    return np.frombuffer(_bytes_of_each(host)[0], host.dtype).reshape(host.shape)


def _bytes_of_each(host: np.ndarray) -> list[bytes]:
    raw = np.frombuffer(np.ascontiguousarray(host).tobytes(), np.uint8)
    if not raw.size:
        return [b""] * jax.process_count()
    return [one.tobytes() for one in np.asarray(multihost_utils.process_allgather(raw))]
