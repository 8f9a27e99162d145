"""Uses `jax._src` and tests JAX's version, which only the `jax_*` modules of this package do."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax._src import util as _util
from jax._src import xla_bridge as _xla_bridge
from jax._src.array import ArrayImpl as ArrayImpl
from jax._src.core import ShardingTypeError as ShardingTypeError
from jax._src.dtypes import TypePromotionError as TypePromotionError
from jax._src.lax import lax as _lax
from jax.extend import backend, core, source_info_util
from jax.extend.core import Primitive as Primitive
from jax.interpreters import batching as batching
from jax.interpreters import partial_eval, xla
from jax.typing import DTypeLike

from jaxmp._src.platform.jax_internals import source_lines

MINIMUM_JAX = (0, 10, 2)

# The folder of jaxmp's own code.
PACKAGE = str(pathlib.Path(__file__).parents[3]) + os.sep

F = TypeVar("F", bound=Callable[..., Any])
Jaxpr = core.Jaxpr

if jax.__version_info__ < MINIMUM_JAX:
    raise ImportError(
        f"jaxmp needs jax {'.'.join(map(str, MINIMUM_JAX))} or later, found {jax.__version__}; run `pip install -U jax`"
    )


def make_primitive(name: str, *, multiple_results: bool) -> Primitive:
    """Makes a primitive that JAX compiles when it is evaluated eagerly."""
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    return primitive


def varying_axes(x: jax.Array | jax.core.AbstractValue) -> frozenset[str]:
    """Returns the varying manual axes in the type of `x`; empty under check_vma=False and outside shard_map."""
    aval: Any = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
    return frozenset(aval.manual_axis_type.varying) if isinstance(aval, jax.core.ShapedArray) else frozenset()


def reduced_axes(x: jax.Array) -> frozenset[str]:
    """Returns the manual axes that `x` is reduced over: equal on every rank, with an unreduced sum as cotangent."""
    return frozenset(cast(Any, jax.typeof(x)).manual_axis_type.reduced)


def unreduced_axes(aval: Any) -> frozenset[str]:
    """Returns the explicit and manual axes along which devices hold terms of a sum; none if `aval` is no array's
    type."""
    if not isinstance(aval, jax.core.ShapedArray):
        return frozenset()
    kind = cast(Any, aval)
    return frozenset([*kind.sharding.spec.unreduced, *kind.manual_axis_type.unreduced])


def with_shape(
    aval: jax.core.ShapedArray, shape: Sequence[int], dtype: DTypeLike, varying: Iterable[str], *others: Any
) -> jax.core.ShapedArray:
    """Returns `aval` with another shape of the same rank and another dtype. The result is not weak, varies over the
    axes `varying`, is reduced over none, and is unreduced over the same axes as `aval`. It keeps the spec and gets the
    one mesh of `aval` and of the types `others`, like the result of JAX's products: an empty mesh if they have several,
    and the mesh being traced if they have none and the result varies."""
    vma = aval.manual_axis_type.update(varying=frozenset(varying), reduced=frozenset())
    meshes = {x.sharding.mesh for x in (aval, *others) if not x.sharding.mesh.empty}
    if not meshes and vma.varying:  # results of callbacks have no mesh
        meshes = {jax.sharding.get_abstract_mesh()}
    sharding: Any = aval.sharding
    if meshes != {sharding.mesh}:
        mesh = meshes.pop() if len(meshes) == 1 else jax.sharding.AbstractMesh((), ())
        sharding = jax.sharding.NamedSharding(mesh, sharding.spec)
    changed: jax.core.ShapedArray = aval.update(
        shape=tuple(shape), dtype=dtype, sharding=sharding, manual_axis_type=vma, weak_type=False
    )
    return changed


def with_sharding(aval: jax.core.ShapedArray, mesh: Any, spec: jax.sharding.PartitionSpec) -> jax.core.ShapedArray:
    """Returns the type of a global array that is sharded as `spec` on a mesh of explicit axes."""
    dims = jax.sharding.PartitionSpec(*spec, *[None] * (aval.ndim - len(spec)))
    sharding = jax.sharding.NamedSharding(getattr(mesh, "abstract_mesh", mesh), dims)
    return cast(jax.core.ShapedArray, aval.update(sharding=sharding))


def without_first_dimension(aval: jax.core.ShapedArray) -> jax.core.ShapedArray:
    """Returns `aval` without its first dimension."""
    return cast(jax.core.ShapedArray, core.mapped_aval(aval.shape[0], 0, aval))


def with_first_dimension(aval: jax.core.ShapedArray, size: int) -> jax.core.ShapedArray:
    """Returns `aval` with a dimension of `size` in front."""
    return cast(jax.core.ShapedArray, core.unmapped_aval(size, 0, aval))


def canonical_dtype(value: DTypeLike, where: str) -> np.dtype:
    """Returns the type that a user names, under JAX's setting of 64-bit types. JAX may warn or raise, with `where`."""
    return np.dtype(_dtypes.check_and_canonicalize_user_dtype(value, where))


def convert(x: Any, dtype: np.dtype, is_weak: bool = False) -> Any:
    """Converts `x` to a type, weak or not, under any setting of 64-bit types; complex numbers may become real parts."""
    return _lax._convert_element_type(x, np.dtype(dtype), is_weak, warn_on_complex_to_real_cast=False)


def with_64_bits_of(avals: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that enables 64-bit types if one of these types has 64 bits. JAX records such types, but not
    whether a function was traced under `jax.enable_x64`."""
    names = {getattr(getattr(aval, "dtype", None), "name", "") for aval in avals}
    return contextlib.nullcontext() if names.isdisjoint(_64_BITS) else jax.enable_x64(True)


_64_BITS = ("float64", "complex128", "int64", "uint64")


def mesh_axes() -> tuple[tuple[str, int], ...]:
    """Returns every axis that is being traced, as (name, size): of the mesh, or of the axis environment without one."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = axis_env().axis_sizes if mesh.empty else mesh.shape
    return tuple(axes.items())


# The environment of the axes that are being traced. `explicit_mesh_axis_names`: the explicit mesh axes that shard
# dimensions mapped by enclosing vmaps.
axis_env: Callable[[], Any] = _core.get_axis_env


def is_jit_disabled() -> bool:
    """True under `jax.disable_jit`."""
    return bool(cast(Any, jax.config).jax_disable_jit)


def is_vma_checked() -> bool:
    """True if the enclosing shard_map runs with check_vma=True."""
    return bool(_config._check_vma.value)


def under_known_flags(fn: F) -> F:
    """Makes `fn` trace under the JAX flags that jaxmp's code expects, instead of the user's flags: operands of one
    operation are cast to vary over the same axes of a shard_map, and values that depend on no operand, such as a
    device's position in the mesh, are not evaluated during tracing."""

    @functools.wraps(fn)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if _config.auto_pcast.value and not _config.eager_constant_folding.value:  # checked in each eager call
            return fn(*args, **kwargs)
        with _config.auto_pcast(True), _config.eager_constant_folding(False):
            return fn(*args, **kwargs)

    return cast(F, traced)


def as_traced(rule: F) -> F:
    """Makes a rule, which JAX calls after tracing, run under the flags that jaxmp's code expects, and with 64-bit types
    if an argument of the rule has 64 bits, or a result of the equation that a lowering rule lowers."""

    @functools.wraps(rule)
    def run(*args: Any, **params: Any) -> Any:
        context, leaves = args[0], jax.tree.leaves(args, is_leaf=lambda x: hasattr(x, "aval"))
        lowered = (*context.avals_in, *context.avals_out) if hasattr(context, "avals_in") else ()
        avals = (getattr(x, "aval", x) for x in (*lowered, *leaves))
        with with_64_bits_of(avals):
            return known(*args, **params)

    known = under_known_flags(rule)
    return cast(F, run)


# (parameters of an equation) -> the jaxprs among them.
subjaxprs: Callable[[dict[str, Any]], Iterable[Jaxpr]] = core.jaxprs_in_params


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Returns `jaxpr` without equations and operands that no output needs, also in the jaxprs that it calls."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def scan_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Returns (number of constants, number of carried values) of a scan; its scanned operands follow them."""
    if "ft_in" not in eqn.params:  # JAX before 0.12
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = map(list, eqn.params["ft_in"].update(eqn.invars).unpack())
    return len(consts), len(carry)


def cache_in_context(capacity: int) -> Callable[[F], F]:
    """Returns a decorator: an LRU cache with keys of the arguments and of every JAX setting that affects tracing. The
    mesh of `jax.set_mesh` counts with its axes, not its devices. `jax.clear_caches` empties it."""
    return cast(Callable[[F], F], _util.cache(max_size=capacity))


def ambient_mesh() -> jax.sharding.Mesh | None:
    """Returns the mesh of `jax.set_mesh` with its devices, or None."""
    mesh = _mesh.get_concrete_mesh()
    return None if mesh is None or mesh.empty else mesh


def default_platform() -> str:
    """Returns the default platform of lowering: "cuda" if `jax.default_backend` says "gpu". Starts the backend."""
    client = backend.get_backend()
    return str(getattr(client, "_raw_platform", client.platform))


def off_explicit_mesh() -> contextlib.AbstractContextManager[Any]:
    """Returns a context without a mesh if an explicit mesh is set, else one that does nothing. The compiler calls back
    with shards of one device, and JAX would take them for global arrays on that mesh."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    is_explicit = any(kind == jax.sharding.AxisType.Explicit for kind in kinds)
    empty = jax.sharding.AbstractMesh((), ())
    return jax.sharding.use_abstract_mesh(empty) if is_explicit else contextlib.nullcontext()


# The user's line -------------------------------------------------------------------------------------------------

_SOURCES = str(pathlib.Path(__file__).parents[2])  # jaxmp/_src
_traceback_util.register_exclusion(_SOURCES)
source_info_util.register_exclusion(_SOURCES + os.sep)


def hides_frames(fn: F) -> F:
    """Removes the frames of jaxmp/_src and of JAX from the tracebacks of errors in `fn`, as JAX's functions do.

    JAX_TRACEBACK_FILTERING=off keeps all frames.
    """
    return _traceback_util.api_boundary(fn)


def traced_line(eqn: core.JaxprEqn) -> str:
    """Returns the line of the user's program at which an equation was traced, "train.py:41"; "" if it is unknown.

    Files of jaxmp and JAX are skipped. Files of libraries of layers are skipped if another file calls them.
    """
    place = _user_place(eqn.source_info.traceback)
    return "" if place is None else source_lines.line_name(*place)


@functools.lru_cache(maxsize=1024)
def _user_place(traceback: Any) -> tuple[str, int] | None:
    frames = _source_info_util.user_frames(traceback)
    places = [(frame.file_name, frame.start_line) for frame in frames if not frame.file_name.startswith(PACKAGE)]
    outside = (place for place in places if not source_lines.is_of_library(place[0]))
    return next(outside, places[0] if places else None)


def user_line() -> str:
    """Returns the line of the user's program that is running, "train.py:41". Skips the same files as `traced_line`. If
    only such files are running, returns the line of the outermost frame."""
    own = (PACKAGE, os.path.dirname(jax.__file__) + os.sep)
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(own) or source_lines.is_of_library(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return source_lines.line_name(frame.f_code.co_filename, frame.f_lineno)


# Processes ------------------------------------------------------------------------------------------------------


# True if JAX has started a backend. It does not learn of other processes after that.
backend_exists: Callable[[], bool] = _xla_bridge.backends_are_initialized


def after_dispatched_programs() -> list[jax.Array]:
    """Returns an array per local device, ready once every program that this thread has dispatched there has run, even
    if the program's results were dropped; [] if no backend has started.

    A device runs the programs that one thread dispatches to it one after another (XLA's `last_enqueue_event` on CPUs,
    streams on GPUs). Programs of few operations run during their dispatch, so this one has more.
    """
    if not backend_exists():
        return []
    last, arrays = jax.jit(lambda x: x + (jax.lax.iota(x.dtype, 1024) * x).sum()), []
    for device in jax.local_devices():
        with jax.set_mesh(jax.sharding.Mesh([device], ("device",))), jax.disable_jit(False):
            arrays.append(last(jax.device_put(np.zeros((), np.int32), device)))
    return arrays


def forget_failed_effects() -> None:
    """Waits for effects and drops their errors. The program has caught them, and JAX's shutdown would stop at them."""
    with contextlib.suppress(Exception):
        jax.effects_barrier()
    _dispatch.runtime_tokens.clear()  # JAX 0.10 keeps the failed ones
