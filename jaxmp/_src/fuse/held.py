"""Emits sums and elementwise operations in forms that have the same bits in every program.

XLA sums a dimension in an order that depends on its sharding, and merges elementwise operations with their neighbours:
it divides by a root or a broadcast in other ways, and contracts a product and a sum into one rounding. Neighbours
depend on the mesh, because XLA moves data between operations. So, under a level of determinism,

- a sum is a product with ones, a call of jaxmp's;
- the result of each operation that XLA may merge passes through `fence`, and so does a divisor;
- so does a sum of two numbers or a cast that rounds to 16 bits;
- an operation that XLA approximates is alone between barriers;
- products, quotients, powers, `exp` and `abs` of complex numbers are operations on their real and imaginary parts;
- under a global order, a scatter that adds or multiplies, a product of elements and a cumulative sum or product get
  whole operands on every device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.ops.matmul import matmul
from jaxmp._src.core.primitive.collectives import whole_p
from jaxmp._src.core.sharding import meshes
from jaxmp._src.fuse import emit
from jaxmp._src.fuse.operands import axes_of_type, is_explicit
from jaxmp._src.platform.jax_internals import jax_tracing

SUM = "reduce_sum"
SCATTERS = frozenset(("scatter-add", "scatter-mul"))
# XLA splits these over the devices that share the dimension along which they add or multiply.
WHOLE = SCATTERS.union(
    ("cumsum", "cumprod", "cumlogsumexp", "reduce_prod", "reduce", "select_and_scatter_add", "reduce_window_sum")
)
# XLA contracts, reassociates or rewrites the results of these.
FENCED = frozenset(
    (
        *("mul", "div", "rem", "pow", "integer_pow", "square", "sqrt", "rsqrt", "cbrt", "exp", "exp2", "expm1", "log"),
        *("log1p", "logistic", "tanh", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh"),
        *("acosh", "atanh", "erf", "erfc", "erf_inv", "lgamma", "digamma"),
        *("reduce_max", "reduce_min"),  # exact, but YNNPACK takes exp after them, with other bits
    )
)
# XLA:CPU approximates these in one way in vector loops and in another in scalar loops. The extents of a fusion decide
# which, but a kernel of one operation has vector loops.
ALONE = frozenset(("exp", "log", "log1p", "logistic", "rsqrt", "tanh"))
# XLA may leave out the rounding of these to 16 bits, where a wider operation reads them.
ROUNDED = frozenset(("add", "add_any", "sub", "convert_element_type"))
HELD = FENCED | WHOLE | ROUNDED | {SUM, "abs"}
# Operations that stay XLA's, with bits that depend on the mesh, and what to write instead.
PARTED = {
    **dict.fromkeys(
        ("psum", "psum_invariant", "psum_invariant_done", "reduce_scatter", "reduce_scatter_done"),
        "let a product take it in, or sum outside shard_map",
    ),
    "conv_general_dilated": "shard no dimension along which it or its gradient sums",
}


def is_held(eqn: Any) -> bool:
    """True if `evaluate` evaluates an equation at a level: its primitive is in HELD, and its result is inexact, of 16
    bits or more. Not held are `abs` of real numbers, a sum of at most one term, a scatter of one update or of updates
    marked as unique, and operations in ROUNDED that round nothing to 16 bits."""
    name = _name(eqn)
    if name not in HELD or (name == "abs" and not _is_complex(eqn)):
        return False
    dtypes = [v.aval.dtype for v in eqn.outvars]
    if not any(jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 2 for dtype in dtypes):
        return False
    if name in ROUNDED:
        is_cast, dtype = name == "convert_element_type", eqn.invars[0].aval.dtype
        return dtypes[0].itemsize == 2 and (not is_cast or dtype in (np.float32, np.float64))
    if name == SUM:
        return math.prod(eqn.invars[0].aval.shape[i] for i in eqn.params["axes"]) not in (0, 1)
    return name not in SCATTERS or _may_collide(eqn)


def _name(eqn: Any) -> str:
    """Returns the name of an equation's primitive; SUM for a `psum` over dimensions alone, which `vmap` makes."""
    is_of_dimensions = eqn.primitive.name == "psum" and not any(isinstance(axis, str) for axis in eqn.params["axes"])
    return SUM if is_of_dimensions else str(eqn.primitive.name)


def remedy(eqn: Any) -> str:
    """Returns what to write instead of an equation with inexact results that depend on the mesh; "" for others."""
    name = _name(eqn)
    if name in FENCED and _is_complex(eqn) and name not in _OF_PARTS:
        return "compute it from real and imaginary parts"
    is_inexact = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
    return PARTED.get(name, "") if is_inexact else ""


def evaluate(eqn: Any, operands: Sequence[Any], options: emit.Options) -> Sequence[Any]:
    """Returns the results of an equation that `is_held`, in the form that the module's docstring gives for it. A
    division x / y becomes x * (1 / y), which rounds twice, if y is no literal and has fewer elements than x, or as
    many in fewer dimensions: rows of a batch of one are divided like others."""
    name = _name(eqn)
    if name == SUM:
        return [_sum(eqn, x, options) for x in operands]
    if name in WHOLE:
        results = _whole(eqn, operands) if options.level.global_order else jax_tracing.evaluate(eqn, operands)
        return [fence(d) for d in results]  # XLA would scatter into what is added to it
    if name in _OF_PARTS and _is_complex(eqn):
        return [_OF_PARTS[name](*map(jnp.asarray, operands), **eqn.params)]
    if name in ALONE:
        return [fence(_alone(name, operands[0], lambda x: jax_tracing.evaluate(eqn, [x])[0]))]
    if name == "div" and not jax_tracing.is_literal(eqn.invars[1]):
        x, y = operands
        if (jnp.size(y), jnp.ndim(y)) < (jnp.size(x), jnp.ndim(x)):
            # XLA may divide once for each element of y, and multiply
            return [fence(x * fence(1 / y))]
        operands = [x, fence(y)]
    return [fence(x) for x in jax_tracing.evaluate(eqn, operands)]


@functools.partial(jax.jit, inline=True)  # an eager NaN would be an error under `jax.debug_nans`
def fence(x: jax.Array) -> jax.Array:
    """Returns `x`, rounded to its type, through a choice between `x` and NaN that neither XLA nor LLVM looks through.
    Integers are returned as they are."""
    if jnp.iscomplexobj(x):
        return lax.complex(fence(lax.real(x)), fence(lax.imag(x)))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if x.dtype.itemsize == 2:
        info = jnp.finfo(x.dtype)
        x = lax.reduce_precision(x, info.nexp, info.nmant)
    return lax.select(lax.ne(x, x), lax.full_like(x, jnp.nan), x)


def _alone(name: str, x: jax.Array, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns the result of an operation in ALONE, computed in a kernel of its own, for 16-bit types in float32, as XLA
    does. logistic is 1 / (1 + exp(-x)), with only the exp in such a kernel."""
    is_logistic = name == "logistic"
    wide = x.astype(np.float32) if x.dtype.itemsize == 2 else x
    d = lax.optimization_barrier(-wide if is_logistic else wide)
    d = lax.optimization_barrier(lax.exp(d) if is_logistic else function(d)).astype(x.dtype)
    result: jax.Array = 1 / fence(1 + fence(d)) if is_logistic else d
    return result


def _sum(eqn: Any, x: jax.Array, options: emit.Options) -> jax.Array:
    """Returns a sum as products with ones. Each of the last dimensions is summed by itself: a long row alone would be
    one sum after another, and devices exchange the sums of a row, not the row."""
    units = [i for i in eqn.params["axes"] if x.shape[i] == 1]
    axes = sorted(i - sum(unit < i for unit in units) for i in eqn.params["axes"] if i not in units)
    d, wide = lax.squeeze(x, units), np.float32 if x.dtype.itemsize == 2 else x.dtype
    while len(axes) > 1 and axes[-1] == d.ndim - 1:
        d = _sum_at_once(d, (axes.pop(),), wide, options)
    return _sum_at_once(d, tuple(axes), x.dtype, options)


def _sum_at_once(x: jax.Array, axes: tuple[int, ...], dtype: Any, options: emit.Options) -> jax.Array:
    """Returns a sum along `axes` as one product with ones. On explicit axes, free dimensions stay sharded, and of
    summed dimensions only the first."""
    mesh = jax.typeof(x).sharding.mesh
    free = tuple(i for i in range(x.ndim) if i not in axes)
    is_typed = is_explicit(jax.typeof(x))
    found = axes_of_type(jax.typeof(x)) if is_typed else ((),) * x.ndim
    kept = [each if i == axes[0] or i in free else () for i, each in enumerate(found)]
    entries = [each or None for each in kept]
    if kept != list(found):
        x = _resharded(x, P(*entries))
    of_k, of_free = entries[axes[0]], [entries[i] for i in free]
    k, extents = math.prod(x.shape[i] for i in axes), [x.shape[i] for i in free]

    def shaped(y: jax.Array, shape: Sequence[int], spec: Sequence[Any]) -> jax.Array:
        return lax.reshape(y, shape, out_sharding=NamedSharding(mesh, P(*spec)) if is_typed else None)

    def product(a: jax.Array, b: jax.Array, spec: Sequence[Any]) -> jax.Array:
        d: jax.Array = matmul(
            a,
            b,
            out_sharding=P(*spec) if is_typed else None,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=dtype,
            implementation=options.implementation,
            **options.level.option,
        )
        return d

    if free and axes == tuple(range(len(axes))) and not any(of_free[1:]):
        a = shaped(x, (k, math.prod(extents)), (of_k, of_free[0]))
        d = product(jnp.ones((1, k), x.dtype), a, (None, of_free[0]))
    else:
        a = shaped(lax.transpose(x, (*free, *axes)), (*(extents or [1]), k), (*(of_free or [None]), of_k))
        d = product(a, jnp.ones((k, 1), x.dtype), (*(of_free or [None]), None))
    return shaped(d, extents, of_free)


def _may_collide(eqn: Any) -> bool:
    """True if several updates of a scatter may go to one element: more than one update, not marked as unique."""
    numbers, indices = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
    batch = numbers.scatter_indices_batching_dims
    return not eqn.params["unique_indices"] and math.prod(n for i, n in enumerate(indices[:-1]) if i not in batch) != 1


def _whole(eqn: Any, operands: Sequence[Any]) -> list[jax.Array]:
    """Returns the results of an operation that gets whole operands on every device. On explicit axes the results are
    sharded as the equation's types say, otherwise whole."""
    if any(is_explicit(jax.typeof(x)) for x in operands):
        results = jax_tracing.evaluate(eqn, [_resharded(x, P()) for x in operands])
        return [_resharded(d, v.aval.sharding.spec) for d, v in zip(results, eqn.outvars, strict=True)]
    return [whole_p.bind(d) for d in jax_tracing.evaluate(eqn, [whole_p.bind(x) for x in operands])]


def _resharded(x: jax.Array, spec: P) -> jax.Array:
    """Returns `x` resharded to `spec` if its mesh has explicit axes, else `x` itself."""
    if not is_explicit(kind := jax.typeof(x)):
        return x
    return meshes.reshard(x, kind.sharding.mesh, kind.sharding.spec, spec, is_explicit=True)


# Complex numbers -------------------------------------------------------------------------------------------------


def _is_complex(eqn: Any) -> bool:
    return any(jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in eqn.invars)


def _parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.real(x), lax.imag(x)


def _times(x: jax.Array, y: jax.Array, **_: Any) -> jax.Array:
    (a, b), (c, d) = _parts(x), _parts(y)
    return lax.complex(fence(a * c) - fence(b * d), fence(a * d) + fence(b * c))


def _over(x: jax.Array, y: jax.Array, **_: Any) -> jax.Array:
    """Returns x / y by Smith's method: both are multiplied by -i where that gives y the larger real part."""
    is_real = jnp.abs(y.real) >= jnp.abs(y.imag)
    (a, b), (c, d) = (_parts(jnp.where(is_real, z, lax.complex(z.imag, -z.real))) for z in (x, y))
    ratio = fence(d / c)
    scale = fence(c + fence(d * ratio))
    quotient = lax.complex(fence((a + fence(b * ratio)) / scale), fence((b - fence(a * ratio)) / scale))
    return _if_finite(quotient, x / y)


def _power(x: jax.Array, *, y: int = 2) -> jax.Array:
    """Returns x to the power of an integer, by squares."""
    if y < 0:
        return _over(jnp.ones_like(x), _power(x, y=-y))
    if y < 2:
        return x if y else jnp.ones_like(x)
    half = _power(x, y=y // 2)
    return _times(_times(half, half), x) if y % 2 else _times(half, half)


def _exponential(x: jax.Array, **_: Any) -> jax.Array:
    size, angle = fence(_alone("exp", lax.real(x), lax.exp)), lax.imag(x)
    return _if_finite(lax.complex(*(fence(size * fence(f(angle))) for f in (lax.cos, lax.sin))), lax.exp(x))


def _size(x: jax.Array) -> jax.Array:
    a, b = map(jnp.abs, _parts(x))
    large, ratio = lax.max(a, b), fence(lax.min(a, b) / lax.max(a, b))
    return _if_finite(fence(large * fence(lax.sqrt(1 + fence(ratio * ratio)))), lax.abs(x))


def _if_finite(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns `x` where it is finite, and elsewhere `other`, which has JAX's infinities and NaN."""
    return jnp.where(jnp.isfinite(x), x, other)


_OF_PARTS: Mapping[str, Callable[..., jax.Array]] = {
    "mul": _times,
    "div": _over,
    "exp": _exponential,
    "abs": _size,
    **dict.fromkeys(("square", "integer_pow"), _power),
}
