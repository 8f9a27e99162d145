"""Turns a function of any arguments into a function of its arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


def split_arrays(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Callable[..., Any]]:
    """Returns (args with None for each leaf that is no array; kwargs in the same way; `fn` as a function of them, with
    the other leaves bound). The function keeps the argument names of `fn` and returns a list of the arrays in the
    result, and of new ones that `fn` has put into its arguments."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    @functools.wraps(fn, updated=())
    def fn_of_arrays(*args: Any, **kwargs: Any) -> list[Any]:
        arrays = jax.tree.leaves((args, kwargs))
        given = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, given.values())
        results = jax.tree.leaves(fn(*args, **kwargs))
        unchanged = {*map(id, arrays)}
        results += [leaf for leaf in jax.tree.leaves((args, kwargs)) if id(leaf) not in unchanged]
        return [leaf for leaf in results if is_array(leaf)]

    args, kwargs = jax.tree.unflatten(tree, [leaf if is_array(leaf) else None for leaf in leaves])
    return args, kwargs, fn_of_arrays


def is_array(leaf: Any) -> bool:
    """True for an array or the type of an array. False for np.float32, which has attributes of the same names."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)
