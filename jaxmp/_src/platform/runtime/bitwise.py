"""Compares two arrays bit by bit, and measures how far different elements are apart."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike


def assert_bitwise_equal(actual: ArrayLike, expected: ArrayLike, err_msg: str = "") -> None:
    """Raises AssertionError unless two arrays have the same shape, dtype and bits.

    Stricter than equality: 0 and -0 differ, and so do NaNs of different sign or payload. NaNs of equal bits are equal.

    Args:
      actual, expected: arrays, or anything that `numpy.asarray` takes.
      err_msg: the beginning of the message.

    Raises:
      AssertionError: says how many elements differ, and shows the first of them and the two that are farthest apart,
        with both values in hexadecimal and their distance in units in the last place (the count of numbers of the type
        between them, plus one).

    >>> import numpy as np
    >>> assert_bitwise_equal(np.float32([1, 2]), np.float32([1, 2]))
    >>> assert_bitwise_equal(np.float32([1, 0]), np.float32([1, -0.0]), "loss")
    Traceback (most recent call last):
      ...
    AssertionError: loss: 1 of 2 elements differ; the first at (1,): 0.0 (0x00000000) instead of -0.0 (0x80000000), ...
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    head = f"{err_msg}: " if err_msg else ""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{head}{actual.dtype}{list(actual.shape)} instead of {expected.dtype}{list(expected.shape)}"
        )
    have, want = bits_of(actual), bits_of(expected)
    differs = (have != want).any(axis=-1)
    if not differs.any():
        return
    places = np.argwhere(differs)
    first = tuple(map(int, places[0]))
    text = f"{head}{len(places)} of {actual.size} elements differ; the first at {first}: "
    text += _describe(actual, expected, first)
    distances = np.max(distance(actual[differs], expected[differs]), axis=-1)
    worst = tuple(map(int, places[np.argmax(distances)]))
    if worst != first:
        text += f"; the farthest apart at {worst}: " + _describe(actual, expected, worst)
    raise AssertionError(text)


def bits_of(x: np.ndarray) -> np.ndarray:
    """Returns the bits of `x` as unsigned integers, one per real number: shape (*x.shape, 1 or 2)."""
    parts = 2 if np.iscomplexobj(x) else 1
    size = x.dtype.itemsize // parts
    return np.ascontiguousarray(x).reshape(-1).view(f"u{size}").reshape(*x.shape, parts)


def distance(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns the units in the last place between two arrays of one type, per real number, in the shape of
    `bits_of`."""
    have, want = places(actual), places(expected)
    return np.asarray(np.maximum(have, want) - np.minimum(have, want))


def places(x: np.ndarray) -> np.ndarray:
    """Returns the rank of each real number among all numbers of its type, as unsigned integers; -0 is just below 0."""
    bits = bits_of(x)
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return np.where(bits & sign, ~bits, bits | sign)
    return bits ^ sign if jnp.issubdtype(x.dtype, jnp.signedinteger) else bits


def _describe(actual: np.ndarray, expected: np.ndarray, index: tuple[int, ...]) -> str:
    """Returns "x (0x...) instead of y (0x...), 3 ulps apart" for one element; without the distance if one is NaN."""

    def show(x: np.ndarray) -> str:
        width = 2 * bits_of(x).dtype.itemsize
        return f"{x[index]} ({' '.join(f'0x{int(bits):0{width}x}' for bits in bits_of(x)[index])})"

    text = f"{show(actual)} instead of {show(expected)}"
    if np.isnan(actual[index]) or np.isnan(expected[index]):
        return text
    ulps = int(np.max(distance(actual[index], expected[index])))
    return f"{text}, {ulps} ulp{'s' * (ulps != 1)} apart"
