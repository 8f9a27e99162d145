"""`explain`: shows how each matmul of a program will be computed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, Literal, overload

import jax

from jaxmp._src.core.sharding import partitioner
from jaxmp._src.core.validation.operand_checks import check_flag, check_function, is_array
from jaxmp._src.core.validation.public import public
from jaxmp._src.platform.hardware.hardware import Hardware, hardware_of
from jaxmp._src.platform.jax_internals import jax_compat
from jaxmp._src.platform.runtime import native
from jaxmp._src.tools.explain.compiled import (
    CompiledExplanation,
    Operation,
    compile_program,
    compiled_explanation,
    settled_program,
)
from jaxmp._src.tools.explain.hlo import COLLECTIVES
from jaxmp._src.tools.explain.rows import UNSETTLED, UNSETTLED_BATCH, rows_of
from jaxmp._src.tools.explain.settled import with_settled
from jaxmp._src.tools.explain.table import Explanation


@overload
def explain(
    fn: Callable[..., Any], *, quiet: bool = ..., hardware: str | Hardware | None = ..., compiled: Literal[False] = ...
) -> Callable[..., Explanation]: ...
@overload
def explain(
    fn: Callable[..., Any], *, quiet: bool = ..., hardware: str | Hardware | None = ..., compiled: Literal[True]
) -> Callable[..., CompiledExplanation]: ...
@overload
def explain(
    fn: Callable[..., Any], *, quiet: bool = ..., hardware: str | Hardware | None = ..., compiled: bool
) -> Callable[..., Any]: ...
@public
def explain(
    fn: Callable[..., Any], *, quiet: bool = False, hardware: str | Hardware | None = None, compiled: bool = False
) -> Callable[..., Any]:
    """Prints and returns one row per jaxmp call of `fn`, forward or (for a gradient function) backward.

    `explain(fn)(*args, **kwargs)` traces `fn` for its arrays (or `jax.ShapeDtypeStruct`s), keeps its other arguments as
    they are, and runs nothing. If XLA's partitioner decides the patterns of calls (auto axes, no shardings given), XLA
    settles the shardings of the lowered program, but compiles nothing.

    Args:
      fn: a function of arrays, jitted or not, or a gradient function.
      quiet: return without printing.
      hardware: predict the time of each call on this machine (docs/cost.md): "this", which
        `jaxmp info --calibrate` measures once, "h100-8", "h200-8", "gb200-nvl72", or a `jaxmp.Hardware`.
      compiled: compile `fn`, and show every collective of the program, including XLA's, with its cause, and the memory
        that the program needs (docs/notebooks/why.md). Works on any program of JAX.

    Returns:
      A function of the same arguments that prints the table and returns an `Explanation` with `.rows`, the totals
      `.flops` and `.bytes_moved`, and the predictions `.times` and `.seconds`. With `compiled` it returns a
      `CompiledExplanation` with `.rows`, `.memory`, and `.calls`, the `Explanation`.

    Raises: TypeError if `fn` is no function; ValueError for unknown hardware; errors of `fn`.

    >>> import jax, jaxmp
    >>> x = jax.ShapeDtypeStruct((8, 16), "float32")
    >>> w = jax.ShapeDtypeStruct((16, 4), "float32")
    >>> explanation = jaxmp.explain(jaxmp.matmul, quiet=True)(x, w)
    >>> explanation
    Explanation(1 call, 1.02e-06 Gflop on all devices together)
    >>> explanation.rows[0].pattern, explanation.rows[0].accumulator
    ('local', 'float32')
    """
    machine = None if hardware is None else hardware_of("explain", hardware)
    check_function("explain", fn)
    return _Explained(fn, quiet, machine, check_flag("compiled", compiled))


@public
def assert_no_collectives(
    fn: Callable[..., Any], *, allowed: Collection[str | tuple[str, str]] = (), inside: str | None = None
) -> Callable[..., CompiledExplanation]:
    """Compiles `fn` and fails if the program has a collective that is not allowed.

    With `inside="loop"` a step of microbatches can be tested for the sums that should wait until after its loop.

    Args:
      fn: a function of arrays, jitted or not.
      allowed: kinds of collectives, "all-reduce", or kinds with the only mesh axis that they may use,
        ("all-reduce", "data").
      inside: "loop" checks only what a loop repeats, and also jaxmp's calls between devices, which are allowed
        otherwise. Collectives of a scalar, such as a loss, are allowed there.

    Returns: a function of the same arguments (arrays or `jax.ShapeDtypeStruct`s), which runs nothing and returns the
      `CompiledExplanation`.
    Raises: AssertionError with the table of the other collectives; TypeError if `fn` is no function or `allowed` is no
      list; ValueError if `allowed` has an unknown kind of collective, or for another `inside`.

    >>> import jax, jaxmp
    >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> jaxmp.assert_no_collectives(lambda x: x @ x)(x)
    CompiledExplanation(0 collectives, 0 B received by each device)
    """
    if isinstance(allowed, str) or not isinstance(allowed, Collection):
        remedy = f"pass [{allowed!r}]" if allowed else "leave it out to allow none"
        raise TypeError(f"assert_no_collectives: allowed must be a list of kinds, got {allowed!r}; {remedy}")
    for each in allowed:
        kind = each[0] if isinstance(each, tuple) and len(each) == 2 else each
        if kind not in COLLECTIVES:
            raise ValueError(
                f"assert_no_collectives: allowed has {each!r}; it takes {', '.join(COLLECTIVES)}, or a pair of one of "
                "them and a mesh axis"
            )
    if inside not in (None, "loop"):
        raise ValueError(f'assert_no_collectives: inside must be "loop" or None, got {inside!r}')
    check_function("assert_no_collectives", fn)
    explained = _Explained(fn, True, None, True)

    def is_wrong(row: Operation) -> bool:
        kind, is_repeated = row.kind.removeprefix("jaxmp "), row.count != 1 and not row.shape.endswith("[]")
        is_allowed = kind in allowed or (len(row.axes) == 1 and (kind, *row.axes) in allowed)
        return (is_repeated if inside else row.kind in COLLECTIVES) and not is_allowed

    @functools.wraps(fn, updated=())
    def checked(*args: Any, **kwargs: Any) -> CompiledExplanation:
        explanation = explained(*args, **kwargs)
        assert isinstance(explanation, CompiledExplanation)
        if rows := tuple(filter(is_wrong, explanation.collectives)):
            found = dataclasses.replace(explanation, rows=rows, calls=Explanation(()), memory=None)
            what = f"the compiled program has collectives{' in a loop' * bool(inside)}"
            raise AssertionError(f"assert_no_collectives: {what}\n{found}")
        return explanation

    return checked


class _Explained:
    """The function that `explain(fn)` returns. Its `repr` says how to call it."""

    def __init__(self, fn: Callable[..., Any], quiet: bool, hardware: Hardware | None, compiled: bool) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._quiet, self._hardware, self._compiled = fn, quiet, hardware, compiled

    def __repr__(self) -> str:
        name = getattr(self._fn, "__name__", type(self._fn).__name__)
        return f"<jaxmp.explain of {name}: call it with the arguments of {name}, as jaxmp.explain({name})(...)>"

    @jax_compat.hides_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Explanation | CompiledExplanation:
        """Traces the function, with `compiled` also compiles it, prints the explanation unless `quiet`, and returns
        it."""
        traced = self._trace(args, kwargs)
        rows = list(rows_of(jax_compat.without_dead_code(traced.jaxpr.jaxpr), jax_compat.user_line()))
        is_open = any(row.pattern in (UNSETTLED, UNSETTLED_BATCH) for row in rows)
        compiled = program = whole = None
        if is_open or self._compiled:
            with partitioner.explaining(stops=not self._compiled) as explained, jax.disable_jit(False):
                lowered = traced.lower()
                if self._compiled:
                    compiled, program = compile_program(lowered)
                    whole = program.whole
                elif "calls" in explained:  # on one device there is nothing to settle
                    whole = settled_program(lowered)
        if is_open:
            rows = with_settled(rows, whole, has_batches="batches" in explained)
        calls = Explanation(tuple(rows), tuple(native.cublasmp_log()), self._hardware)
        explanation = calls if program is None else compiled_explanation(compiled, program, calls)
        if not self._quiet:
            print(explanation)
        return explanation

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Traces the function as a function of its arrays (`split_arrays`). With `compiled`, traces a result of
        `jax.jit` as it is, with its shardings and donation."""
        if self._compiled and isinstance(self._fn, jax.stages.Wrapped):
            traced = self._fn.trace(*args, **kwargs)
            if hasattr(traced, "jaxpr"):  # a jit of nnx has other stages
                return traced
        args, kwargs, fn_of_arrays = split_arrays(self._fn, args, kwargs)
        return jax.jit(fn_of_arrays).trace(*args, **kwargs)


def split_arrays(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Callable[..., Any]]:
    """Returns (args with None for each leaf that is neither an array nor a `jax.Ref`; kwargs in the same way; `fn` as a
    function of them, with the other leaves bound). The function keeps the argument names of `fn` and returns a list of
    the arrays in the result, and of new ones that `fn` has put into its arguments."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_given = [is_array(leaf) or isinstance(leaf, jax.Ref) for leaf in leaves]
    places = [i for i, given in enumerate(is_given) if given]

    @functools.wraps(fn, updated=())
    def fn_of_arrays(*args: Any, **kwargs: Any) -> list[Any]:
        arrays = jax.tree.leaves((args, kwargs))
        given = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, given.values())
        results = jax.tree.leaves(fn(*args, **kwargs))
        unchanged = {*map(id, arrays)}
        results += [leaf for leaf in jax.tree.leaves((args, kwargs)) if id(leaf) not in unchanged]
        return [leaf for leaf in results if is_array(leaf)]

    args, kwargs = jax.tree.unflatten(
        tree, [leaf if given else None for leaf, given in zip(leaves, is_given, strict=True)]
    )
    return args, kwargs, fn_of_arrays
