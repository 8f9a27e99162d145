"""`einsum` as `dot_general`s of two operands each: converts subscripts to dimension numbers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from types import EllipsisType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike
from opt_einsum.parser import parse_einsum_input

from jaxmp._src.core.contraction.contraction import Dim
from jaxmp._src.core.ops.dot_general import product
from jaxmp._src.core.sharding import eager_calls, meshes
from jaxmp._src.core.sharding.meshes import partition_spec
from jaxmp._src.core.sharding.shardings import to_dims
from jaxmp._src.core.spec.options import Precision, Sharding
from jaxmp._src.core.spec.refusal import InvalidOperands, InvalidType, InvalidValue, naming
from jaxmp._src.core.spec.request import ContractionOptions, Request
from jaxmp._src.core.validation import result_types
from jaxmp._src.core.validation.operand_checks import check_array, check_preferred
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.jax_internals import jax_compat


@public
def einsum(
    subscripts: str | ArrayLike,
    /,
    *operands: ArrayLike | Sequence[int | EllipsisType],
    optimize: str | bool | Sequence[Sequence[int]] = "auto",
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    **options: Unpack[ContractionOptions],
) -> jax.Array:
    """Distributed `jnp.einsum`, such as `einsum("bsd,dhk->bshk", x, w)`.

    Two operands are one `dot_general`. More operands are multiplied two by two, in the order of opt_einsum's path; if
    one of these products contracts a sharded index, `out_sharding` is needed. One operand is summed and transposed.

    An index that occurs twice in one operand is first reduced to the diagonal; an index that is in no other operand and
    not in the result is first summed. An extent of 1 is broadcast to the extent of the same index in another operand.

    Args:
      subscripts: as in `jnp.einsum`, with or without "->" and "..."; or operands and lists of indices in turn, as in
        `einsum(x, [0, 1], w, [1, 2])`.
      operands: arrays of any rank, or Python numbers; types as in `dot_general`. Messages call two of them a and b.
      optimize: for more than two operands, how opt_einsum chooses the order of products; or the order itself, pairs of
        operands as `jnp.einsum_path` gives them. False: from left to right.
      out_sharding: as in `dot_general`, in the order of the result's dimensions here.
      in_shardings: a pair of shardings for exactly two operands, in the order of their dimensions here (auto axes).

    The other options are as in `dot_general` and apply to each product.

    Returns:
      The result, with its dimensions in the order of `subscripts`, sharded as `out_sharding`.

    Raises: as `dot_general`; ValueError for subscripts that do not fit.

    Source: `jax.numpy.einsum` (docs.jax.dev); `opt_einsum.contract_path` (Smith and Gray, JOSS 2018).

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.einsum("bsd,dhk->bhsk", jnp.ones((2, 3, 4)), jnp.ones((4, 5, 6))).shape
    (2, 5, 3, 6)
    """
    order = _order(optimize)
    request = Request(
        "einsum", None, None, precision=precision, preferred_element_type=preferred_element_type, **options
    )
    entry = eager_calls.find_on_one_device(request, operands, subscripts, order)

    def jaxmp_contraction(*operands: Any) -> jax.Array:
        return contract(request, subscripts, operands, order)

    return eager_calls.run(entry, jaxmp_contraction, *operands)


def _order(optimize: Any) -> str | bool | tuple[tuple[int, ...], ...]:
    """Returns `optimize` as a hashable value: "auto" for None, a path as tuples, and a strategy of opt_einsum, True or
    False unchanged. Raises TypeError for other values."""
    try:
        if optimize is None:
            return "auto"
        is_strategy = isinstance(optimize, str | bool | opt_einsum.paths.PathOptimizer)
        return optimize if is_strategy else tuple(map(tuple, optimize))
    except TypeError:
        raise InvalidType(
            "optimize must be a strategy of opt_einsum, True, False or a pair of operands for each product, "
            f"got {optimize!r}"
        ) from None


def contract(
    request: Request,
    subscripts: Any,
    operands: tuple[Any, ...],
    optimize: str | bool | tuple[tuple[int, ...], ...] = "auto",
) -> jax.Array:
    """Computes `jaxmp.einsum` of `operands`; the request has only the options. `optimize`: a result of `_order`. Raises
    ValueError for `in_shardings` unless there are two operands.

    If there is one operand, and it or `out_sharding` has unreduced or reduced axes, `jnp.einsum` computes the
    result."""
    terms, output = _parse(subscripts, operands)
    out_sharding, in_shardings = request.out_sharding, request.in_shardings
    if in_shardings is not None and len(terms) != 2:
        raise InvalidValue(f"in_shardings takes two operands, got {len(terms)}; write one call for each product")
    dtype, is_weak = result_types.of_jnp(
        [term.array for term in terms], check_preferred(request.preferred_element_type)
    )
    request = request._replace(preferred_element_type=dtype)  # for every intermediate product too
    if len(terms) == 1 and any(map(meshes.is_partial, (meshes.type_spec(terms[0].array), out_sharding))):
        x, indices = _on_diagonals(terms[0].array, terms[0].indices)
        placed = jnp.einsum(f"{indices}->{output}", x, preferred_element_type=dtype, out_sharding=out_sharding)
        return jax_compat.convert(placed, dtype, is_weak)
    rest = _reduced(terms, output, dtype)
    if len(rest) == 1:
        alone = lax.transpose(rest[0].array, tuple(map(rest[0].indices.index, output)))
        return _placed(request, jax_compat.convert(alone, dtype, is_weak))
    if in_shardings is not None:
        request = request._replace(in_shardings=_reduced_shardings(in_shardings, terms, rest))
    for i, j in _path(rest, output, optimize)[:-1]:
        left, right = rest[i], rest[j]
        rest = [term for k, term in enumerate(rest) if k not in (i, j)]
        needed = {*output, *(index for term in rest for index in term.indices)}
        rest.append(_between(request, left, right, needed, output))
    left, right = rest
    d = _multiply(request, left, right, output)
    return jax_compat.convert(d, dtype, is_weak)


@dataclasses.dataclass(frozen=True)
class _Term:
    """An operand: its name in messages, the array, and its indices, one letter a dimension."""

    name: str
    array: jax.Array
    indices: str


# Subscripts ----------------------------------------------------------------------------------------------------


def _parse(subscripts: Any, operands: tuple[Any, ...]) -> tuple[list[_Term], str]:
    """Returns (the operands with their indices, the indices of the result). Python numbers become arrays. Raises
    TypeError or ValueError for what is no subscripts, no array of numbers, or does not fit."""
    written: list[Any] = [subscripts, *operands]
    if isinstance(subscripts, str):
        places = range(1, len(written))
    elif len(written) > 1 and all(isinstance(indices, list | tuple) for indices in written[1::2]):
        places = range(0, len(written) // 2 * 2, 2)  # a last list without an operand belongs to the result
    else:
        raise InvalidType(
            f"subscripts must be a string such as 'ij,jk->ik', got {type(subscripts).__name__}; or pass "
            f"operands and lists of indices in turn, as einsum(a, [0, 1], b, [1, 2])"
        )
    names = "ab" if len(places) < 3 else [f"operands[{i}]" for i in range(len(places))]
    for argument, i in zip(names, places, strict=False):
        if isinstance(written[i], int | float | complex):
            written[i] = jnp.asarray(written[i])
        check_array(argument, written[i])
    text = repr(subscripts) if isinstance(subscripts, str) else f"{written[1::2]}"
    try:
        inputs, output, _ = parse_einsum_input(written)
    except (ValueError, TypeError) as error:
        raise InvalidValue(f"subscripts {text} are not valid: {error}") from None
    terms = [_Term(*each) for each in zip(names, (written[i] for i in places), inputs.split(","), strict=False)]
    _check_extents(text, terms)
    return terms, output


def _check_extents(text: str, terms: Sequence[_Term]) -> None:
    """Raises ValueError if an operand has not one dimension for each index, or an index has two extents except 1."""
    found: dict[str, tuple[str, int]] = {}
    for term in terms:
        shape = tuple(term.array.shape)
        if len(term.indices) != len(shape):
            raise InvalidValue(
                f"subscripts {text} give {term.name} {len(term.indices)} indices, but it has {len(shape)} "
                f"dimensions (shape {shape})"
            )
        for index, extent in zip(term.indices, shape, strict=True):
            first, other = found.setdefault(index, (term.name, extent))
            if other != extent and 1 not in (other, extent):
                raise InvalidOperands(
                    f"index {index!r} has extent {other} in {first} but {extent} in {term.name} (shapes "
                    f"{', '.join(str(tuple(term.array.shape)) for term in terms)})"
                )
            if other == 1:
                found[index] = term.name, extent


def _reduced(terms: Sequence[_Term], output: str, dtype: np.dtype) -> list[_Term]:
    """Returns the operands, reduced. An index that neither the result nor another operand has is summed, in `dtype` or
    in the operand's wider type. An index that occurs twice in an operand is reduced to the diagonal. A dimension of
    extent 1 is dropped if its index has a larger extent in another operand."""
    found_in = Counter(output + "".join(term.indices for term in terms))
    is_plain = all(1 not in term.array.shape and len({*term.indices}) == len(term.indices) for term in terms)
    if is_plain and 1 not in found_in.values():  # the usual case
        return list(terms)
    squeezed = []
    for term in terms:
        extents = [dict(zip(x.indices[::-1], x.array.shape[::-1], strict=True)) for x in terms if x is not term]
        spread = {index for each in extents for index, n in each.items() if n != 1}
        ones = [i for i, n in enumerate(term.array.shape) if n == 1 and term.indices[i] in spread]
        indices = "".join(index for i, index in enumerate(term.indices) if i not in ones)
        squeezed.append(dataclasses.replace(term, array=lax.squeeze(term.array, ones), indices=indices))
    found = []
    for term in squeezed:
        others = {index for other in squeezed if other is not term for index in other.indices}
        kept = "".join(index for index in dict.fromkeys(term.indices) if index in output or index in others)
        if kept != term.indices:
            x, indices = _on_diagonals(term.array, term.indices)
            of_sum = x.dtype if jnp.result_type(x, dtype) == x.dtype else dtype
            summed: jax.Array = jnp.einsum(f"{indices}->{kept}", x, preferred_element_type=of_sum)
            term = dataclasses.replace(term, array=summed, indices=kept)
        found.append(term)
    return found


def _on_diagonals(x: jax.Array, indices: str) -> tuple[jax.Array, str]:
    """Returns `x` with zeros off the diagonals of repeated indices, in its shape, and its new indices.

    A repeated index stays on one dimension. Its other dimensions get letters that are new in this operand alone, so the
    caller sums over them before it joins `x` with another operand. The index has the extent of its last dimension, as
    in `jnp.einsum`. It stays with a sharded dimension of that extent if there is one, so that the sum moves nothing."""
    renamed = list(indices)
    sharding = jax.typeof(x).sharding
    is_explicit = meshes.has_explicit_axes(sharding.mesh)
    where = {"out_sharding": sharding} if is_explicit else {}
    for index in dict.fromkeys(indices):
        dims = [i for i, other in enumerate(indices) if other == index]
        as_last = [i for i in dims if x.shape[i] == x.shape[dims[-1]]]
        kept = next((i for i in as_last if is_explicit and sharding.spec.partitions[i]), as_last[0])
        for i in dims:
            if i != kept:
                places = (lax.broadcasted_iota(np.int32, x.shape, dim, **where) for dim in (kept, i))
                x = lax.select(lax.eq(*places), x, jnp.zeros_like(x))
                renamed[i] = opt_einsum.get_symbol(max(map(ord, renamed)) + 1)
    return x, "".join(renamed)


def _path(terms: Sequence[_Term], output: str, optimize: Any) -> list[tuple[int, int]]:
    """Returns a pair of positions in the list of operands for each product. After a product its two operands are
    removed from the list, and the result is appended. `optimize`: a result of `_order`. Raises ValueError if it is no
    strategy, or no path of pairs for these operands."""
    if len(terms) == 2:
        return [(0, 1)]
    if optimize is False:
        return [(0, 1), *((0, left - 1) for left in range(len(terms) - 1, 1, -1))]
    # The choice needs numbers: a symbolic extent of an export counts as a large one.
    shapes = [tuple(n if isinstance(n, int) else 1024 for n in term.array.shape) for term in terms]
    written = f"{','.join(term.indices for term in terms)}->{output}"
    # jnp.einsum_path gives a path that begins with its own name.
    given = [step for step in optimize if step != tuple("einsum_path")] if isinstance(optimize, tuple) else optimize
    try:
        path, _ = opt_einsum.contract_path(written, *shapes, shapes=True, optimize=given)
        steps = (sorted(i % left for i in step) for left, step in zip(range(len(terms), 0, -1), path, strict=False))
        pairs = [(i, j) for i, j in steps]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise InvalidValue(
            f"optimize must be a strategy of opt_einsum, True, False or a pair of operands for each product,"
            f" got {optimize!r}: {error}"
        ) from None
    if len(pairs) != len(terms) - 1 or any(i == j for i, j in pairs):
        raise InvalidValue(f"optimize must have {len(terms) - 1} pairs for {len(terms)} operands, got {optimize!r}")
    return pairs


# Products ------------------------------------------------------------------------------------------------------


def _between(request: Request, left: _Term, right: _Term, needed: Collection[str], output: str) -> _Term:
    """Multiplies two operands of an einsum that has more, and returns the product as a new operand, summed over indices
    that are not in `needed`. The sharding is chosen by `_toward`, from `output`, the indices of the last result. A
    ValueError also names this product."""
    batch = "".join(index for index in left.indices if index in right.indices)  # in the order of `dot_general`
    indices = "".join(index for index in dict.fromkeys(batch + left.indices + right.indices) if index in needed)
    written = f"{left.indices},{right.indices}->{indices}"
    try:
        where = _toward(left, right, indices, output, request.out_sharding)
        array = _multiply(request._replace(out_sharding=where), left, right, indices)
    except InvalidValue as refusal:
        refusal.args = (
            f"{refusal.args[0]} (this is the product {written!r} of {left.name} and {right.name}; make it a "
            "separate jaxmp.einsum)",
        )
        raise
    return _Term(f"{left.name} * {right.name}", array, indices)


def _multiply(request: Request, left: _Term, right: _Term, output: str) -> jax.Array:
    """Multiplies two operands. The result has the indices `output`, in this order; all others are contracted. The
    operands are exchanged if the result needs no transposition only then."""
    batch = "".join(index for index in output if index in left.indices and index in right.indices)

    def given_order(left: _Term, right: _Term) -> str:
        return batch + "".join(x for x in left.indices + right.indices if x in output and x not in batch)

    if output != given_order(left, right) and output == given_order(right, left):
        # The product of the operands in the other order needs no transposition.
        left, right = right, left
        request = request._replace(in_shardings=request.in_shardings and request.in_shardings[1::-1])
    given = given_order(left, right)
    contracted = "".join(index for index in left.indices if index not in given)
    numbers = tuple(
        (tuple(map(left.indices.index, part)), tuple(map(right.indices.index, part))) for part in (contracted, batch)
    )
    out_sharding = _permuted("the result", request.out_sharding, output, given)
    with naming(request.function, a=left.name, b=right.name):
        request = request._replace(a=left.array, b=right.array, out_sharding=out_sharding)
        result = product(request, (numbers[0], numbers[1]), is_part=True)
    return lax.transpose(result, tuple(map(given.index, output)))


# Shardings -----------------------------------------------------------------------------------------------------


def _placed(request: Request, x: jax.Array) -> jax.Array:
    """Returns `x`, the result of an einsum of one operand, sharded as `out_sharding` if there is one."""
    if request.out_sharding is None:
        return x
    placement = meshes.place(request._replace(a=x, b=x), x.shape)
    if placement.constraint is not None:
        return lax.with_sharding_constraint(x, placement.constraint)
    wanted = placement.out_sharding or NamedSharding(placement.mesh, partition_spec(placement.dims[2] or ()))
    have = partition_spec(meshes.type_dims("the operand", x))
    return meshes.reshard(x, wanted.mesh, have, wanted.spec, is_explicit=True)


def _toward(left: _Term, right: _Term, indices: str, output: str, out_sharding: Any) -> P | None:
    """Returns the sharding for the `indices` of an intermediate product; None (the usual one) without explicit axes or
    `out_sharding`.

    An index keeps the axes that shard it in an operand, the left one first. An index without axes gets the axes that
    `out_sharding` has for it, if they shard an index that this product sums. An axis goes to the first such index
    only."""
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    is_explicit = any(meshes.has_explicit_axes(jax.typeof(term.array).sharding.mesh) for term in (left, right))
    if not is_explicit or not isinstance(spec, P):
        return None
    wanted = dict(zip(output, to_dims("the result", P(*spec.partitions), len(output), None), strict=True))
    dims: dict[str, Dim] = {}
    for term in (left, right):
        for index, dim in zip(term.indices, meshes.type_dims(term.name, term.array), strict=True):
            dims[index] = dims.get(index) or dim
    summed = {axis for index in dims if index not in indices for axis in dims[index]}
    placed: list[Dim] = []
    for index in indices:
        dim = dims[index] or tuple(axis for axis in wanted.get(index, ()) if axis in summed)
        placed.append(tuple(axis for axis in dim if axis not in sum(placed, ())))
    return partition_spec(tuple(placed))


def _reduced_shardings(shardings: Any, terms: Sequence[_Term], reduced: Sequence[_Term]) -> Any:
    """Returns the shardings of the two operands `reduced`, which `_reduced` made of `terms`, from the `shardings` of
    `terms`. Returns anything but a pair unchanged, because it is refused later by name."""
    if not isinstance(shardings, tuple | list) or isinstance(shardings, P) or len(shardings) != 2:
        return shardings
    pairs = zip(shardings, terms, reduced, strict=True)
    return tuple(_permuted(term.name, sharding, term.indices, kept.indices) for sharding, term, kept in pairs)


def _permuted(argument: str, sharding: Sharding | None, have: str, want: str) -> Sharding | None:
    """Returns a sharding for the indices `want`, given the `sharding` for the indices `have`, which include them. Keeps
    unreduced and reduced axes. Returns anything but a PartitionSpec or NamedSharding unchanged. Raises ValueError for
    a sharding that does not fit `have`; the message calls the array `argument`."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if not isinstance(spec, P):
        return sharding
    dims = to_dims(argument, P(*spec.partitions), len(have), None)
    given = partition_spec(tuple(dims[have.index(index)] for index in want))
    spec = spec.update(partitions=given.partitions)  # unreduced and reduced axes stay
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec
