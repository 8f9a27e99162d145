"""`audit`: which operations of a program give other bits in variants that should not matter."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.validation.operand_checks import check_function, is_array
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.tools.audit import bits, operations, together, variation
from jaxmp._src.tools.audit.report import Output, Report
from jaxmp._src.tools.audit.side import Side
from jaxmp._src.tools.audit.table import Audit
from jaxmp._src.tools.audit.variation import Variation
from jaxmp._src.tools.audit.walk import Walk


@public
def audit(
    fn: Callable[..., Any],
    *args: Any,
    vary: Literal["batch", "mesh", "processes"] = "batch",
    batch_argnums: int | Sequence[int] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Callable[..., Audit]:
    """Print which operations of `fn` give other bits in another batch or on another mesh, and return them.

    `audit(fn)(*args, **kwargs)` runs `fn` equation by equation, each compiled alone, on its arguments and in variants
    of them. It names each equation if its inputs have equal bits in both but its outputs do not, and continues from
    equal bits, so that it finds all of them; then it compares the outputs of `fn` as a whole. If these differ, it
    tries remedies; if only these differ, it names a few operations that differ when they are compiled together.
    docs/audit.md says more.

    Args:
      fn: a function of arrays, jitted or not; a gradient function for the backward pass. Its arguments are pytrees of
        arrays, and other values, which stay as they are.
      args: deprecated: `audit(fn, *args)` is the old form of `audit(fn)(*args)`.
      vary: "batch": each row has to have the same bits in batches of other sizes, at other places. "mesh": the arrays
        that a mesh holds have to give the same bits on smaller meshes, down to one device; `fn` finds its mesh in its
        operands or in `jax.sharding.get_mesh()`. "processes": the arrays of a mesh over several processes have to give
        the same bits on devices of one process; every process calls it with equal arguments and gets one result.
      batch_argnums: for "batch", the numbers of the arguments with arrays that have the batch as first dimension. By
        default all arguments with arrays that begin with the extent of the last argument's arrays. The keyword
        arguments together count as one last argument.
      compiler_options: as of `jax.jit`.
      quiet: whether to return without printing. Of several processes the first prints.

    Returns:
      A function of the same arguments that prints the table and returns an `Audit`: `.rows`, one per culprit,
      `.uncompared`, `.outputs`, `.together`, `.trials`; `str` gives the table.

    Raises: TypeError and ValueError where the arguments do not fit `vary`, NotImplementedError for mutable arrays; and
    what `fn` raises.

    >>> import functools, jax.numpy as jnp, numpy as np, jaxmp
    >>> x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    >>> invariant = functools.partial(jaxmp.matmul, determinism="batch")
    >>> jaxmp.audit(invariant, vary="batch", batch_argnums=0, quiet=True)(x, x.T @ x)
    Audit(0 of 1 operations differ, vary='batch')
    >>> print(jaxmp.audit(lambda x: jnp.sin(x) + 1, quiet=True)(x).rows)
    ()
    """
    check_function("audit", fn)
    if vary not in operations.LEVELS:
        raise ValueError(f'audit: vary has to be "batch", "mesh" or "processes", got {vary!r}')
    if batch_argnums is not None and vary != "batch":
        raise ValueError(f'audit: batch_argnums is for vary="batch", got vary={vary!r}; leave it out')

    @jax_compat.hides_frames
    @jax_compat.under_known_flags
    def audited(*args: Any, **kwargs: Any) -> Audit:
        line = jax_compat.user_line()
        fn_of_arrays, arrays = _of_arrays(fn, args, kwargs, is_of_processes=vary == "processes")
        trace = functools.partial(Side, fn_of_arrays, compiler_options=compiler_options)
        if vary == "batch":
            sides = _batches(trace, (*args, kwargs) if kwargs else args, arrays, batch_argnums)
        else:
            sides = (_meshes if vary == "mesh" else _processes)(trace, arrays)
        found = _audit(vary, sides, line)
        if not quiet and (vary != "processes" or jax.process_index() == 0):
            print(found)
        return found

    if not args:
        return audited
    # The user's line is four frames up, after the wrappers of `public`.
    warnings.warn("audit(fn, *args) is deprecated; write audit(fn)(*args)", DeprecationWarning, stacklevel=5)
    return cast(Callable[..., Audit], audited(*args))  # an Audit, which the new form's type does not tell


def _of_arrays(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, is_of_processes: bool
) -> tuple[Callable[..., Any], list[Any]]:
    """Returns (`fn` as a function of a list of its arrays, this list as JAX arrays). The function gets other arguments
    as they are here, and returns None for results that are no arrays. Raises TypeError for tracers and shapes without
    values, and ValueError for arrays that other processes hold a part of, unless `is_of_processes`."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if is_array(leaf)}
    for leaf in arrays.values():
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
            raise TypeError(
                f"audit: runs fn, so it takes arrays, got {type(leaf).__name__} of shape {leaf.shape}; pass values, and"
                " call it outside of jit"
            )
        if bits.is_shared(leaf) and not is_of_processes:
            raise ValueError(
                f"audit: got an array of shape {leaf.shape} that other processes hold a part of; pass"
                ' vary="processes", or arrays of this process'
            )

    def fn_of_arrays(given: Sequence[Any]) -> Any:
        all_leaves = dict(enumerate(leaves)) | dict(zip(arrays, given, strict=True))
        args, kwargs = jax.tree.unflatten(tree, all_leaves.values())
        return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, fn(*args, **kwargs))

    # Arrays as JAX takes them: without 64-bit types a float64 of NumPy becomes float32.
    return fn_of_arrays, [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays.values()]


def _audit(vary: str, sides: Iterator[tuple[Variation, Side]], line: str) -> Audit:
    """Runs the first of `sides`, the reference, next to each of the others, and returns what differs in operations and
    in outputs of the whole program. If outputs differ, it has tried remedies, and if no operation differs alone, also
    looked for small groups that differ. `line`: of equations without a line of their own."""
    report, outputs, differing, variants = Report(), list[Output](), list[Walk](), list[str]()
    first, reference = next(sides)
    whole = reference.whole()
    for varied, side in sides:
        variants.append(varied.name)
        walk = Walk(varied, reference, side, report)
        walk.follow(line)
        differences = walk.differences(whole, side.whole())
        named = zip(reference.outputs, differences, strict=True)
        outputs += [Output(name, varied.name, one) for name, one in named if one is not None]
        if any(differences):
            differing.append(walk)
        if walk not in differing[:1]:
            walk.bodies.clear()
    groups, trials = list[together.Together](), list[together.Trial]()
    if differing:
        groups = [] if report.rows else together.pieces(differing[0], reference.jaxpr, line)
        trials = list(together.trials(differing, vary, has_rows=bool(report.rows)))
    found = report.rows, report.uncompared, tuple(outputs), report.compared, tuple(groups), tuple(trials)
    return Audit(vary, first.name, tuple(variants), *found)


# Batches ---------------------------------------------------------------------------------------------------------


def _batches(
    trace: Callable[..., Side], args: Sequence[Any], arrays: Sequence[Any], argnums: int | Sequence[int] | None
) -> Iterator[tuple[Variation, Side]]:
    """Yields (variation, side) of the batch unchanged, and for each of `variation.batches`. `args`: positional
    arguments, and the dict of keyword arguments as the last if there are any. Raises ValueError if `trace`, which makes
    a side of arrays and a mesh, fails for another batch, or as `_batch` does."""
    chosen, nrows = _batch(args, argnums)
    is_batched = [i in chosen for i, arg in enumerate(args) for x in jax.tree.leaves(arg) if is_array(x)]
    mesh = jax_compat.ambient_mesh()
    yield Variation(f"{nrows} rows"), trace(arrays, mesh)
    # The rows of the batch have to be divisible by the numbers of shards along them.
    batched = [x for x, is_one in zip(arrays, is_batched, strict=True) if is_one]
    multiple = math.lcm(*(nrows // x.sharding.shard_shape(x.shape)[0] for x in batched))
    for varied in variation.batches(nrows, multiple):
        rows = np.array(varied.rows)
        taken = [bits.push(bits.pull(x)[rows], x) if i else x for x, i in zip(arrays, is_batched, strict=True)]
        try:
            side = trace(taken, mesh)
        except Exception as error:
            raise ValueError(
                f"audit: fn takes {nrows} rows but not {len(rows)} in the arguments {chosen}; pass"
                " batch_argnums= to say which arguments have the batch as the first dimension of all their arrays"
            ) from error
        yield varied, side


def _batch(args: Sequence[Any], argnums: int | Sequence[int] | None) -> tuple[tuple[int, ...], int]:
    """Returns (numbers of the arguments of the batch, number of rows). Without `argnums` these are all arguments with
    the first extents of the last argument with arrays. Raises ValueError if there are no arrays, if `argnums` are out
    of range, or unless all arrays of the chosen arguments begin with one extent of at least 2."""
    extents = [{x.shape[:1] for x in jax.tree.leaves(arg) if is_array(x)} for arg in args]
    if not any(extents):
        raise ValueError('audit: vary="batch" needs an argument with arrays, got none; pass the batch as an argument')
    if argnums is None:
        last = next(filter(None, reversed(extents)))
        chosen = tuple(i for i, one in enumerate(extents) if one == last)
    else:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        if not numbers or not all(isinstance(i, int) and -len(args) <= i < len(args) for i in numbers):
            raise ValueError(f"audit: batch_argnums has to number some of the {len(args)} arguments, got {argnums!r}")
        chosen = tuple(i % len(args) for i in numbers)
    found = sorted(set().union(*(extents[i] for i in chosen)))
    if len(found) != 1 or not found[0] or found[0][0] < 2:
        raise ValueError(
            f"audit: the arguments {chosen} have to begin with one batch of at least 2 rows, got first extents"
            f" {[extent[0] if extent else 'none' for extent in found]}; pass batch_argnums= to say which arguments have"
            " the batch as the first dimension of all their arrays"
        )
    return chosen, found[0][0]


# Meshes and processes --------------------------------------------------------------------------------------------


def _meshes(trace: Callable[..., Side], arrays: Sequence[Any]) -> Iterator[tuple[Variation, Side]]:
    """Yields (variation, side) for one device, and for larger meshes up to the mesh of the operands (`_mesh_of`), as
    `_smaller` gives them. `trace` makes a side of arrays and a mesh. Raises ValueError if the mesh of the operands has
    fewer than 2 devices or there is none, or as `_side` does."""
    mesh = _mesh_of(arrays)
    if mesh is None or mesh.size < 2:
        raise ValueError(
            f'audit: vary="mesh" needs operands on one mesh of at least 2 devices, got {_described(mesh)}; place them'
            ' with jax.device_put(x, NamedSharding(mesh, spec)), or pass vary="batch"'
        )
    for sizes in _smaller(tuple(mesh.shape.values())):
        part = _with_devices(mesh, mesh.devices[tuple(slice(size) for size in sizes)])
        yield Variation(_name(part)), _side(trace, part, arrays)


def _processes(trace: Callable[..., Side], arrays: Sequence[Any]) -> Iterator[tuple[Variation, Side]]:
    """Yields two (variation, side): for the largest of `_smaller` meshes that this process's devices alone can form,
    and for the mesh of the operands. Raises ValueError unless that mesh has devices of every process of a job of
    several."""
    mesh = _mesh_of(arrays)
    owners = {device.process_index for device in mesh.devices.flat} if mesh is not None else set()
    if len(owners) < 2 or len(owners) < jax.process_count():
        raise ValueError(
            'audit: vary="processes" needs operands on one mesh with devices of every process of a job of several, got'
            f" {_described(mesh)} of {len(owners)} of {jax.process_count()}; start the job with jaxmp.distributed, or"
            ' pass vary="mesh" to compare meshes of one process'
        )
    assert mesh is not None
    local = jax.local_devices(backend=mesh.devices.flat[0].platform)
    sizes = max((one for one in _smaller(tuple(mesh.shape.values())) if np.prod(one) <= len(local)), key=np.prod)
    alone = _with_devices(mesh, np.array(local[: np.prod(sizes)]).reshape(sizes))
    yield Variation(f"{_name(alone)} of one process"), _side(trace, alone, arrays)
    yield Variation(f"{_name(mesh)} of {len(owners)} processes", across=True), _side(trace, mesh, arrays)


def _mesh_of(arrays: Sequence[Any]) -> Mesh | None:
    """Returns the mesh of the operands, or else of `jax.set_mesh`, or None. Raises ValueError for several meshes."""
    found: set[Any] = {x.sharding.mesh for x in arrays if isinstance(x.sharding, NamedSharding)}
    if len(found) > 1:
        raise ValueError(
            f"audit: the operands have to be on one mesh, got {', '.join(sorted(map(_described, found)))}; place them"
            " with jax.device_put(x, NamedSharding(mesh, spec))"
        )
    return next(iter(found), None) or jax_compat.ambient_mesh()


def _side(trace: Callable[..., Side], mesh: Mesh, arrays: Sequence[Any]) -> Side:
    """Copies the arrays to `mesh`, with the spec that each has, or replicated without one, and traces there. Raises
    ValueError if that fails on another mesh than the operands'; on theirs, raises the program's error."""
    try:
        hosts = [bits.pull(x) for x in arrays]
        with jax.set_mesh(mesh):
            specs = (getattr(x.sharding, "spec", P()) for x in arrays)
            placed = [bits.place(host, NamedSharding(mesh, spec)) for host, spec in zip(hosts, specs, strict=True)]
            for i, x in enumerate(arrays):
                if bits.is_key(x):
                    placed[i] = jax.random.wrap_key_data(placed[i], impl=jax.random.key_impl(x))
        return trace(placed, mesh)
    except Exception as error:
        if mesh == _mesh_of(arrays):
            raise  # it fails without audit too
        raise ValueError(
            f"audit: fn cannot be traced on the mesh {dict(mesh.shape)}; it has to take every array that is on a"
            " mesh as an argument, and its mesh from jax.sharding.get_mesh() or from its operands"
        ) from error


def _with_devices(mesh: Mesh, devices: np.ndarray) -> Mesh:
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _described(mesh: Mesh | None) -> str:
    return "no mesh" if mesh is None else str(dict(mesh.shape))


def _name(mesh: Mesh) -> str:
    name = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"{mesh.size} device{'s' * (mesh.size != 1)} ({name})" if len(mesh.shape) > 1 else name


def _smaller(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns sizes of meshes, from all ones up to `sizes`; each step back divides all by their least prime factor."""
    found = [sizes]
    while max(found[0]) > 1:
        factors = (next((n for n in range(2, size) if size % n == 0), size) for size in found[0])
        found.insert(0, tuple(size // factor for size, factor in zip(found[0], factors, strict=True)))
    return found
