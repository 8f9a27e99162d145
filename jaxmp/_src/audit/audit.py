"""`audit`: which operations of a program give other bits in variants that should not matter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.audit import bits, operations, variation
from jaxmp._src.audit.report import Output, Report
from jaxmp._src.audit.side import Side
from jaxmp._src.audit.table import Audit
from jaxmp._src.audit.variation import Variation
from jaxmp._src.audit.walk import Walk
from jaxmp._src.runtime import jax_compat
from jaxmp._src.validation.public import public


@public
def audit(
    fn: Callable[..., Any],
    *args: Any,
    vary: Literal["batch", "mesh", "processes"] = "batch",
    batch_argnums: int | Sequence[int] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Audit:
    """Print which operations of `fn(*args)` give other bits in another batch or on another mesh, and return them.

    It runs `fn` equation by equation, each compiled alone, on `args` and in variants of them. It names each equation
    whose inputs have equal bits in both and whose outputs have not, and goes on from equal bits, so that it finds them
    all; then it compares the outputs of `fn` as a whole. docs/audit.md says more.

    Args:
      fn: a function of arrays, jitted or not; a gradient function for the backward pass. Keyword arguments:
        `functools.partial(fn, key=value)`.
      args: its arguments: pytrees of arrays, and other values, which stay as they are.
      vary: "batch": each row has to have the same bits in batches of other sizes, at other places. "mesh": the arrays
        that a mesh holds have to give the same bits on smaller meshes, down to one device; `fn` finds its mesh in its
        operands or in `jax.sharding.get_mesh()`. "processes": not there yet.
      batch_argnums: for "batch", the numbers of the arguments whose arrays have the batch as their first dimension. By
        default those of which all arrays begin with the extent of the last argument's.
      compiler_options: as of `jax.jit`.
      quiet: whether to return without printing.

    Returns:
      An `Audit`: `.rows`, one per culprit, `.uncompared`, `.outputs`; `str` gives the table.

    Raises: TypeError and ValueError where the arguments do not fit `vary`, NotImplementedError for "processes" and for
      arrays that other processes hold; and what `fn` raises.

    >>> import functools, jax.numpy as jnp, numpy as np, jaxmp
    >>> x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    >>> invariant = functools.partial(jaxmp.matmul, determinism="batch")
    >>> jaxmp.audit(invariant, x, x.T @ x, vary="batch", batch_argnums=0, quiet=True)
    Audit(0 of 1 operations differ, vary='batch')
    >>> print(jaxmp.audit(lambda x: jnp.sin(x) + 1, x, quiet=True).rows)
    ()
    """
    if not callable(fn):
        raise TypeError(f"audit: fn has to be a function, got {type(fn).__name__}; write audit(fn, *args)")
    if vary not in operations.LEVELS:
        raise ValueError(f'audit: vary has to be "batch", "mesh" or "processes", got {vary!r}')
    if batch_argnums is not None and vary != "batch":
        raise ValueError(f'audit: batch_argnums is for vary="batch", got vary={vary!r}; leave it out')
    if vary == "processes":
        _refuse_processes()
    line = jax_compat.user_line()
    fn_of_arrays, arrays = _of_arrays(fn, args)
    trace = functools.partial(Side, fn_of_arrays, compiler_options=compiler_options)
    if vary == "batch":
        found = _audit(vary, fn_of_arrays, _batches(trace, args, arrays, batch_argnums), line)
    else:
        found = _audit(vary, fn_of_arrays, _meshes(trace, arrays), line)
    if not quiet:
        print(found)
    return found


def _refuse_processes() -> None:
    if jax.process_count() == 1:
        raise ValueError(
            'audit: vary="processes" needs a job of several processes, found one; start the job with jaxmp.distributed,'
            ' or pass vary="mesh" to compare meshes of this process'
        )
    raise NotImplementedError(
        'audit: vary="processes" is not there yet; run vary="mesh" in one process on as many CPU devices'
    )


def _of_arrays(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """`fn` as a function of the list of its arrays, and these."""
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    for leaf in (leaves[i] for i in places):
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
            raise TypeError(
                f"audit: runs fn, so it takes arrays, got {type(leaf).__name__} of shape {leaf.shape}; pass values, and"
                " call it outside of jit"
            )
        if not getattr(leaf, "is_fully_addressable", True):
            raise NotImplementedError(
                f"audit: compares arrays of one process, got one of shape {leaf.shape} that other processes hold a part"
                " of; run it in one process on as many devices"
            )

    def fn_of_arrays(arrays: Sequence[Any]) -> Any:
        given = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        return fn(*jax.tree.unflatten(tree, [given[i] for i in range(len(leaves))]))

    # As JAX takes them: without 64-bit types a float64 of NumPy is a float32.
    return fn_of_arrays, [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in (leaves[i] for i in places)]


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _audit(vary: str, fn: Callable[..., Any], sides: Iterator[tuple[Variation, Side]], line: str) -> Audit:
    """Runs the reference, which comes first, and each variant."""
    report, outputs = Report(vary), list[Output]()
    reference_name, reference = next(sides)
    whole = reference.whole()
    names = _output_names(fn, reference)
    variants = []
    for varied, side in sides:
        variants.append(varied.name)
        results = Walk(varied, reference, side, report).outputs(line)
        for name, one, other, (_, value, relation) in zip(names, whole, side.whole(), results, strict=True):
            if relation in ("other", "packed") or value.is_mixed:
                continue
            found = bits.difference(other, varied.expected(bits.pull(one), relation))
            if found is not None:
                outputs.append(Output(name, varied.name, found))
    return Audit(
        vary=vary,
        reference=reference_name.name,
        variants=tuple(variants),
        rows=report.rows,
        uncompared=report.uncompared,
        outputs=tuple(outputs),
        compared=report.compared,
    )


def _output_names(fn: Callable[..., Any], side: Side) -> list[str]:
    with side.scope():
        shapes = jax.eval_shape(fn, side.arrays)
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]


# Batches ---------------------------------------------------------------------------------------------------------


def _batches(
    trace: Callable[..., Side], args: Sequence[Any], arrays: Sequence[Any], argnums: int | Sequence[int] | None
) -> Iterator[tuple[Variation, Side]]:
    """The batch as it is, and in other sizes."""
    is_batched, nrows, argnums = _batched_arrays(args, argnums)
    batched = [x for x, is_one in zip(arrays, is_batched, strict=True) if is_one]
    mesh = jax_compat.ambient_mesh()
    reference = trace(arrays, mesh)
    yield Variation(f"{nrows} rows"), reference
    for varied in variation.batches(nrows, _devices_along_rows(batched)):
        assert varied.rows is not None
        taken = [_taken(x, varied.rows) if is_one else x for x, is_one in zip(arrays, is_batched, strict=True)]
        try:
            side = trace(taken, mesh)
        except Exception as error:
            raise ValueError(
                f"audit: fn takes {nrows} rows but not {len(varied.rows)} in the arguments {argnums}; pass"
                " batch_argnums= to say which arguments have the batch as the first dimension of all their arrays"
            ) from error
        yield varied, side


def _batched_arrays(
    args: Sequence[Any], argnums: int | Sequence[int] | None
) -> tuple[list[bool], int, tuple[int, ...]]:
    """(of each array whether it has the batch in front, the number of rows, the arguments that have it)."""
    extents = [{x.shape[:1] for x in jax.tree.leaves(arg) if _is_array(x)} for arg in args]
    if not args or not any(extents):
        raise ValueError('audit: vary="batch" needs an argument with arrays, got none; pass the batch as an argument')
    if argnums is None:
        last = next(i for i in reversed(range(len(args))) if extents[i])
        chosen = tuple(i for i, one in enumerate(extents) if one == extents[last])
    else:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        if not numbers or not all(-len(args) <= i < len(args) for i in numbers):
            raise ValueError(f"audit: batch_argnums has to number some of the {len(args)} arguments, got {argnums}")
        chosen = tuple(i % len(args) for i in numbers)
    found = sorted(set().union(*(extents[i] for i in chosen)))
    if len(found) != 1 or not found[0] or found[0][0] < 2:
        raise ValueError(
            f"audit: the arguments {chosen} have to begin with one batch of at least 2 rows, got first extents"
            f" {[extent[0] if extent else 'none' for extent in found]}; pass batch_argnums= to say which arguments have"
            " the batch as the first dimension of all their arrays"
        )
    is_batched = [i in chosen for i, arg in enumerate(args) for x in jax.tree.leaves(arg) if _is_array(x)]
    return is_batched, found[0][0], chosen


def _devices_along_rows(arrays: Sequence[Any]) -> int:
    """Of how many rows the batch has to be a multiple, so that devices can share it as they do."""
    shards = [
        x.shape[0] // x.sharding.shard_shape(x.shape)[0]
        for x in arrays
        if isinstance(getattr(x, "sharding", None), NamedSharding)
    ]
    return int(np.lcm.reduce(shards)) if shards else 1


def _taken(x: Any, rows: Sequence[int]) -> Any:
    return bits.push(bits.pull(x)[np.array(rows)], x)


# Meshes ----------------------------------------------------------------------------------------------------------


def _meshes(trace: Callable[..., Side], arrays: Sequence[Any]) -> Iterator[tuple[Variation, Side]]:
    """One device, and on up to the mesh of the operands."""
    found = {
        x.sharding.mesh: x.sharding.mesh for x in arrays if isinstance(getattr(x, "sharding", None), NamedSharding)
    }
    mesh = next(iter(found), None) or jax_compat.ambient_mesh()
    if len(found) > 1 or mesh is None or mesh.size < 2:
        have = "no mesh" if mesh is None else ", ".join(str(dict(one.shape)) for one in found or [mesh])
        raise ValueError(
            f'audit: vary="mesh" needs operands on one mesh of at least 2 devices, got {have}; place them with'
            ' jax.device_put(x, NamedSharding(mesh, spec)), or pass vary="batch"'
        )
    for sizes in _smaller(tuple(mesh.shape.values())):
        devices = mesh.devices[tuple(slice(size) for size in sizes)]
        part = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        name = " x ".join(f"{axis}={size}" for axis, size in part.shape.items())
        name = f"{part.size} device{'s' * (part.size != 1)} ({name})" if len(sizes) > 1 else name
        try:
            with jax.set_mesh(part):
                placed = [jax.device_put(x, NamedSharding(part, _spec(x))) for x in arrays]
            yield Variation(name), trace(placed, part)
        except Exception as error:
            raise ValueError(
                f"audit: fn cannot be traced on the mesh {dict(part.shape)}; it has to take every array that lies on a"
                " mesh as an argument, and its mesh from jax.sharding.get_mesh() or from its operands"
            ) from error


def _smaller(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The mesh of one device, and so on up to these sizes: each divided by its least prime factor, time and again."""
    found = [sizes]
    while max(found[0]) > 1:
        found.insert(0, tuple(size // _least_factor(size) for size in found[0]))
    return found


def _least_factor(size: int) -> int:
    return next((factor for factor in range(2, size) if size % factor == 0), size)


def _spec(x: Any) -> P:
    sharding = getattr(x, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else P()
