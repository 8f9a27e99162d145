"""`fuse` turns a function's products, and the communication around them, into calls of jaxmp."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from jaxmp._src.core.spec import levels
from jaxmp._src.core.spec.levels import Determinism
from jaxmp._src.core.spec.options import Implementation
from jaxmp._src.core.validation.operand_checks import check_flag, check_function, check_implementation
from jaxmp._src.core.validation.public import public
from jaxmp._src.fuse.derivatives import evaluated
from jaxmp._src.fuse.emit import Options
from jaxmp._src.platform.jax_internals import jax_tracing

Args = ParamSpec("Args")
Result = TypeVar("Result")

_TAG = "jaxmp.fuse"  # the tag of Flax's context during a call
_REMEDY = "jaxmp.fuse: pass a module to the fused function as an argument; a module that it closes over cannot change"


@public
def fuse(
    fn: Callable[Args, Result],
    *,
    determinism: Determinism = "run_to_run",
    implementation: Implementation | None = None,
    epilogs: bool = True,
    strict: bool = True,
) -> Callable[Args, Result]:
    """Returns a function that computes what `fn` does, with products and operations around them as calls of jaxmp.

    `fn` is traced and needs no change for jaxmp. A product becomes a call in four cases: it communicates (gathers or
    sums over devices, by explicit shardings or inside `jax.shard_map`); its bias, activation or addition become its
    epilog; jaxmp is faster; or `determinism` asks for a level. Everything else stays as it is. `jaxmp.explain` of the
    function names each product that stays, and why.

    It composes with jit, grad, vmap, scan, cond, remat and custom rules. `grad(fuse(fn))` fuses more than
    `fuse(grad(fn))`: bias gradients, and gathers that the backward pass repeats. Call it under `jax.jit`, because
    each call traces `fn` again, as with `jax.checkpoint`. State that `fn` changes has to be an argument and a result, a
    `jax.Ref`, or an object of Flax NNX that is an argument. Under `jax.disable_jit`, `fn` runs as it is.

    Args:
      fn: a function of pytrees, also with objects of Flax NNX. Leaves that are not `jax.Array`s keep their values.
      determinism, implementation: as in `jaxmp.matmul`, for every product of `fn`; under a level also for its sums,
        which become products with ones, and its elementwise operations.
      epilogs: whether calls also do biases, activations, additions and scalar factors.
      strict: whether a product, sum or elementwise operation that does not keep the level of `determinism` is an error.
        If False, JAX computes it, and a warning names its line and the reason.

    Returns:
      A function with the signature, results, types and shardings of `fn`.

    Raises: TypeError if `fn` is no function or a flag is no bool; ValueError for an unknown option. The function raises
      NotImplementedError, with the line of each, for operations that do not keep the level; and what `fn` raises.

    >>> import jax, jax.numpy as jnp, jaxmp
    >>> def layer(x, w):
    ...     return jax.nn.gelu(x @ w)
    >>> jaxmp.explain(jaxmp.fuse(layer), quiet=True)(jnp.ones((2, 3)), jnp.ones((3, 4))).rows[0].epilog
    'GELU'
    """
    check_function("fuse", fn)
    level = levels.parse(determinism)
    check_implementation(implementation)
    options = Options(level, implementation, check_flag("epilogs", epilogs), check_flag("strict", strict))

    @functools.wraps(fn)
    def fused(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if jax_tracing.is_untraced():
            return fn(*args, **kwargs)
        nnx = sys.modules.get("flax.nnx")  # only a program that has imported Flax holds its state
        result: Result = (
            evaluated(fn, args, kwargs, options) if nnx is None else _with_state(nnx, fn, args, kwargs, options)
        )
        return result

    return fused


def _with_state(
    nnx: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> Any:
    """Returns what `evaluated` does, also for arguments and results with objects of Flax NNX, which change in place.
    Flax's errors about an object of another trace get a note with the remedy.

    Flax splits these objects into pytrees before the trace, merges new objects inside it, and updates the caller's
    objects after it. An argument that `fn` does not change is not updated: its objects may belong to another trace, as
    static arguments do. Arguments and results that one of Flax's own transforms has split already stay split."""
    errors = sys.modules["flax.errors"]

    def is_split(tree: Any) -> bool:
        leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.NodeStates))
        return any(isinstance(leaf, nnx.NodeStates) for leaf in leaves)

    def contents(given: Any) -> tuple[Any, list[Any]]:
        graph, state = nnx.split(given)
        return graph, jax.tree.leaves(state)

    def differ(before: tuple[Any, list[Any]], after: tuple[Any, list[Any]]) -> bool:
        return before[0] != after[0] or [*map(id, before[1])] != [*map(id, after[1])]

    @functools.wraps(fn)
    def pure(*args: Any, **kwargs: Any) -> Any:
        given = nnx.from_tree((args, kwargs), is_inner=True, ctxtag=_TAG)
        before = [(each, contents(each)) for each in (*given[0], *given[1].values())]
        result = fn(*given[0], **given[1])
        changed = [each for each, found in before if differ(found, contents(each))]
        aside = [result] if is_split(result) else []
        return nnx.to_tree((changed, None if aside else result), ctxtag=_TAG), aside

    if is_split((args, kwargs)):
        return evaluated(fn, args, kwargs, options)
    try:
        with nnx.update_context(_TAG):
            pure_args, pure_kwargs = nnx.to_tree((args, kwargs), ctxtag=_TAG)
            results, aside = evaluated(pure, pure_args, pure_kwargs, options)
            _, result = nnx.from_tree(results, is_inner=False, ctxtag=_TAG)
            return aside[0] if aside else result
    except (errors.TraceContextError, errors.JaxTransformError) as error:
        if _REMEDY not in getattr(error, "__notes__", ()):
            error.add_note(_REMEDY)
        raise
