"""`einsum` of two operands, as one `dot_general`: from subscripts to dimension numbers."""

from __future__ import annotations

from typing import Literal

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike
from opt_einsum.parser import parse_einsum_input

from jaxmp._src.ops.dot_general import dot_general
from jaxmp._src.ops.signatures import ShardingPair
from jaxmp._src.sharding.meshes import partition_spec
from jaxmp._src.sharding.patterns import to_dims
from jaxmp._src.spec.options import Implementation, Mesh, Precision, Sharding
from jaxmp._src.validation.operand_checks import as_array, check_array


def einsum(
    subscripts: str,
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Sharding | None = None,
    in_shardings: ShardingPair | None = None,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
    determinism: Literal["run_to_run", "batch"] = "run_to_run",
) -> jax.Array:
    """Distributed `jnp.einsum` of two operands, such as `einsum("bsd,dhk->bshk", x, w)`.

    Args:
      subscripts: as in `jnp.einsum`, with or without "->" and "...". An index that occurs twice in one operand, or in
        one operand and not in the result, is refused.
      a, b: the operands; types as in `dot_general`.
      out_sharding, in_shardings: as in `dot_general`, for the result and the operands as they are written here.

    The other options are those of `dot_general`.

    Returns:
      The result, with its dimensions in the order of `subscripts`, sharded as `out_sharding` says.

    Raises: as `dot_general`; ValueError for subscripts that do not fit; NotImplementedError for the refused ones.

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.einsum("bsd,dhk->bhsk", jnp.ones((2, 3, 4)), jnp.ones((4, 5, 6))).shape
    (2, 5, 3, 6)
    """
    arrays: list[jax.Array] = [as_array(x) for x in (a, b)]
    a, b = arrays
    for argument, x in (("a", a), ("b", b)):
        check_array("einsum", argument, x)
    left, right, output = _parse(subscripts, a, b)
    batch = "".join(x for x in output if x in left and x in right)
    free = "".join(x for x in left + right if x in output and x not in batch)
    free_swapped = "".join(x for x in right + left if x in output and x not in batch)
    if output != batch + free and output == batch + free_swapped:
        # The product of the operands in the other order is the one that needs no transposition.
        a, b, left, right, free = b, a, right, left, free_swapped
        in_shardings = in_shardings and (in_shardings[1], in_shardings[0])
    contracted = "".join(x for x in left if x not in batch + free)
    numbers = (_places(contracted, left, right), _places(batch, left, right))
    given = batch + free
    result = dot_general(
        a,
        b,
        numbers,
        precision,
        preferred_element_type,
        out_sharding=_permuted(out_sharding, output, given),
        in_shardings=in_shardings,
        mesh=mesh,
        implementation=implementation,
        determinism=determinism,
    )
    return lax.transpose(result, tuple(map(given.index, output)))


def _places(indices: str, left: str, right: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of a and of b that have these indices."""
    return tuple(map(left.index, indices)), tuple(map(right.index, indices))


def _parse(subscripts: str, a: jax.Array, b: jax.Array) -> tuple[str, str, str]:
    """(indices of a, of b, of the result), one letter a dimension."""
    if not isinstance(subscripts, str):
        raise TypeError(f"einsum: subscripts must be a string such as 'ij,jk->ik', got {type(subscripts).__name__}")
    try:
        inputs, output, _ = parse_einsum_input((subscripts, a, b))
    except ValueError as error:
        raise ValueError(f"einsum: subscripts {subscripts!r} are not valid: {error}") from None
    left, right = inputs.split(",")
    extents: dict[str, int] = {}
    for argument, letters, x in (("a", left, a), ("b", right, b)):
        if len(letters) != x.ndim:
            raise ValueError(
                f"einsum: subscripts {subscripts!r} give {argument} {len(letters)} indices, but it has {x.ndim} "
                f"dimensions (shape {tuple(x.shape)})"
            )
        for letter, extent in zip(letters, x.shape, strict=True):
            if letters.count(letter) > 1:
                raise NotImplementedError(
                    f"einsum: index {letter!r} occurs twice in {argument} (subscripts {subscripts!r}); take the "
                    "diagonal first (jnp.diagonal)"
                )
            if letter not in output and letter not in (right if argument == "a" else left):
                raise NotImplementedError(
                    f"einsum: index {letter!r} occurs in {argument} only and is summed (subscripts {subscripts!r}); "
                    f"sum {argument} over it first (jnp.sum)"
                )
            if extents.setdefault(letter, extent) != extent:
                raise ValueError(
                    f"einsum: index {letter!r} has extent {extents[letter]} in a but {extent} in b (shapes "
                    f"{tuple(a.shape)}, {tuple(b.shape)}); nothing is broadcast"
                )
    return left, right, output


def _permuted(sharding: Sharding | None, have: str, want: str) -> Sharding | None:
    """The sharding of dimensions `have` for the same ones in the order `want`."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if not isinstance(spec, P):
        return sharding
    dims = to_dims("einsum", "the result", spec, len(have), None)
    spec = partition_spec(tuple(dims[have.index(letter)] for letter in want))
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec
