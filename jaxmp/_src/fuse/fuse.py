"""`fuse`: a function whose products, and the communication around them, are jaxmp's calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from jaxmp._src.fuse.emit import Options
from jaxmp._src.fuse.rewrite import Rewriter
from jaxmp._src.runtime import jax_tracing
from jaxmp._src.spec.options import Determinism, Implementation
from jaxmp._src.validation.operand_checks import check_determinism, check_implementation
from jaxmp._src.validation.public import public

Args = ParamSpec("Args")
Result = TypeVar("Result")


@public
def fuse(
    fn: Callable[Args, Result],
    *,
    determinism: Determinism = "run_to_run",
    implementation: Implementation | None = None,
    epilogs: bool = True,
) -> Callable[Args, Result]:
    """A function that computes what `fn` does, with its products and what stands around them as calls of jaxmp.

    `fn` is traced and knows nothing of jaxmp. A product becomes a call where it communicates (gathers, sums over
    devices; by explicit shardings or inside `jax.shard_map`), where its bias, activation or addition become its epilog,
    where jaxmp is faster, or where `determinism` asks for its bits. Everything else stays as it is: `jaxmp.explain` of
    the function names each product that does, and why.

    It composes with jit, grad, vmap, scan, cond, remat and custom rules. `grad(fuse(fn))` fuses more than
    `fuse(grad(fn))`: bias gradients, and gathers that the backward pass repeats. Call it under `jax.jit`: each call
    traces `fn`.

    Args:
      fn: a function of arrays and pytrees of them.
      determinism, implementation: as in `jaxmp.matmul`, for every product of `fn`.
      epilogs: whether to take in biases, activations, additions and scalar factors.

    Returns:
      A function with the signature, results, types and shardings of `fn`.

    Raises: TypeError where `fn` is no function; ValueError for an unknown option; and what `fn` raises.

    >>> import jax, jax.numpy as jnp, jaxmp
    >>> def layer(x, w):
    ...     return jax.nn.gelu(x @ w)
    >>> jaxmp.explain(jaxmp.fuse(layer), quiet=True)(jnp.ones((2, 3)), jnp.ones((3, 4))).rows[0].epilog
    'GELU'
    """
    if not callable(fn):
        raise TypeError(f"fuse: takes a function, got {type(fn).__name__}; write fuse(fn)(*args)")
    check_determinism("fuse", determinism)
    check_implementation("fuse", implementation)
    options = Options(determinism, implementation, epilogs)

    @functools.wraps(fn)
    def fused(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
        out_tree: Any = None

        def of_arrays(*arrays: Any) -> list[Any]:
            nonlocal out_tree
            given = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
            args, kwargs = jax.tree.unflatten(tree, given.values())
            results, out_tree = jax.tree.flatten(fn(*args, **kwargs))
            return results

        arrays = [leaves[i] for i in places]
        jaxpr, consts = jax_tracing.open_jaxpr(jax.make_jaxpr(of_arrays)(*arrays))
        results = Rewriter(options).evaluate(jaxpr, consts, *arrays)
        result: Result = jax.tree.unflatten(out_tree, results)
        return result

    return fused
