"""Registers rules of JAX transformations by primitive, other than derivatives, batches and lowerings. Uses `jax._src`
like `jax_compat`."""

from __future__ import annotations

import functools
import itertools
import os
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src import shard_map as _shard_map
from jax._src.interpreters import partial_eval as _pe
from jax._src.interpreters import remat as _remat
from jax._src.lax import parallel as _parallel
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad

from jaxmp._src.platform.jax_internals import jax_compat

# JAX's rule slices a cotangent without the cast that JAX requires if jax_auto_pcast is off (0.10 to 0.12).
ad.primitive_transposes[_parallel.all_gather_invariant_p] = jax_compat.under_known_flags(
    ad.primitive_transposes[_parallel.all_gather_invariant_p]
)


def register_nan_checks(primitives: Iterable[Primitive]) -> None:
    """Makes the float checks of `jax.experimental.checkify` look for NaN in results of `primitives` and of jaxmp's
    shard_maps.

    Such a shard_map counts as one operation. JAX's rule looks inside, and fails under an explicit mesh or after another
    check (JAX 0.10 to 0.12).
    """
    for primitive in primitives:
        _checkify.error_checks[primitive] = functools.partial(_checkify.nan_error_check, primitive)
    shard_map_p = _shard_map.shard_map_p
    by_user = _checkify.error_checks[shard_map_p]
    by_jaxmp = types.SimpleNamespace(name="jaxmp", multiple_results=True, bind=shard_map_p.bind)

    def check_shard_map(*args: Any, **params: Any) -> Any:
        if not _is_traced_by_jaxmp(source_info_util.current().traceback):
            return by_user(*args, **params)
        return _checkify.nan_error_check(by_jaxmp, *args, **shard_map_p.get_bind_params(params))

    _checkify.error_checks[shard_map_p] = check_shard_map


def register_unread(primitive: Primitive) -> None:
    """Makes JAX leave out operands and results that nothing reads, of a primitive (*values, *results) -> results with
    the numbers of the results in its parameter `places`."""

    def rule(is_read: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
        eqn = rest[-1]  # after the operands that are alive, since JAX 0.12
        if not any(is_read):
            return [False] * len(eqn.invars), None
        kept = [True] * (len(eqn.invars) - len(is_read)) + list(is_read)
        places = tuple(itertools.compress(eqn.params["places"], is_read))
        invars, outvars = [*itertools.compress(eqn.invars, kept)], [*itertools.compress(eqn.outvars, is_read)]
        return kept, eqn.replace(invars=invars, outvars=outvars, params=eqn.params | {"places": places})

    _pe.dce_rules[primitive] = rule


def _is_traced_by_jaxmp(traceback: Any) -> bool:
    """True if the innermost frame outside JAX is in jaxmp."""
    own = os.path.dirname(jax.__file__) + os.sep
    files: list[str] = [] if traceback is None else [frame.file_name for frame in traceback.frames]
    return next((file for file in files if not file.startswith(own)), "").startswith(jax_compat.PACKAGE)


def register_saved(primitives: Iterable[Primitive], ask: Callable[..., Any]) -> None:
    """Makes `jax.checkpoint` call `ask(policy, primitive, *types, **params)` instead of its policy. Without a policy
    `ask` is not called, and nothing is saved. Under jax_remat3, which has rules by primitive, `ask` is called only for
    `primitives`, and only if jax_remat3 has a rule for shard_map (since JAX 0.11)."""
    split = _pe.custom_partial_eval_rules[_ad_checkpoint.remat_p]

    def split_asking(*args: Any, policy: Any, **params: Any) -> Any:
        return split(*args, policy=policy and functools.partial(ask, policy), **params)

    _pe.custom_partial_eval_rules[_ad_checkpoint.remat_p] = split_asking
    if hasattr(_remat.RematTrace, "process_shard_map"):
        for primitive in primitives:
            _remat.rules[primitive] = functools.partial(_saved, primitive, ask)


def _saved(
    primitive: Primitive, ask: Callable[..., Any], trace: Any, *operands: Any, **params: Any
) -> tuple[Any, Any, Callable[..., Any]]:
    """Returns (results, residuals, a function of residuals and operands that returns differentiable results). Residuals
    are the results if the policy saves or offloads them, else (): then the function computes them again."""

    def recompute(_: Any, *operands: Any) -> Any:
        return primitive.bind(*operands, **params)

    results = recompute(None, *operands)
    case: Any = trace.policy and _pe.ensure_enum(ask(trace.policy, primitive, *map(jax.typeof, operands), **params))
    if not isinstance(case, _pe.SaveableType | _pe.Offloadable):
        return results, (), recompute

    def move(kept: Any, end: str) -> Any:
        if not isinstance(case, _pe.Offloadable):
            return kept
        return jax.device_put(kept, _core.mem_kind_to_space(getattr(case, end)), may_alias=False)

    def restore(kept: Any, *operands: Any) -> Any:
        return jax.tree.map(_ad_checkpoint.primal_left_tangent_right, move(kept, "src"), recompute(None, *operands))

    results = jax.tree.map(_remat.reduce_precision, results)
    return results, move(results, "dst"), restore
