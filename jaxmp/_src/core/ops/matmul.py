"""`matmul` and `linear`: products of global arrays; shardings decide how devices share them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxmp._src.core.ops import activated, block_cyclic
from jaxmp._src.core.ops.block_cyclic import BlockCyclicArray
from jaxmp._src.core.ops.einsum import contract
from jaxmp._src.core.sharding import eager_calls, meshes
from jaxmp._src.core.sharding.sharded_call import make_call, product
from jaxmp._src.core.spec import activations, epilogs, low_precision
from jaxmp._src.core.spec.options import Activation
from jaxmp._src.core.spec.refusal import NotAvailable
from jaxmp._src.core.spec.request import (
    AnyLinear,
    AnyMatmul,
    AuxMatmul,
    BlockCyclicOptions,
    MatmulOptions,
    PlainLinear,
    PlainMatmul,
    Request,
    WithResults,
)
from jaxmp._src.core.validation.arguments import converted, validated
from jaxmp._src.core.validation.operand_checks import check_array, check_flags, check_preferred, has_numbers
from jaxmp._src.core.validation.public import public


@overload
def matmul(a: ArrayLike, b: ArrayLike, c: ArrayLike | None = None, **options: Unpack[PlainMatmul]) -> jax.Array: ...
@overload
def matmul(a: ArrayLike, b: ArrayLike, c: ArrayLike | None = None, **options: Unpack[AuxMatmul]) -> WithResults: ...
@overload
def matmul(a: ArrayLike, b: ArrayLike, c: ArrayLike | None = None, **options: Unpack[AnyMatmul]) -> Any: ...
@overload
def matmul(
    a: BlockCyclicArray, b: BlockCyclicArray, c: BlockCyclicArray | None = None, **options: Unpack[BlockCyclicOptions]
) -> BlockCyclicArray: ...
@public
def matmul(
    a: ArrayLike | BlockCyclicArray,
    b: ArrayLike | BlockCyclicArray,
    c: ArrayLike | BlockCyclicArray | None = None,
    **options: Unpack[MatmulOptions],
) -> jax.Array | WithResults | BlockCyclicArray:
    """Distributed matrix product, `d = epilog(alpha * op(a) @ op(b) + beta * c)`.

    The shardings of a, b and d decide how devices share the work, and nothing else moves. A pure function: jit, grad,
    vmap, remat, scan and export apply. Inside `jax.shard_map` the product is local.

        contraction sharded, out_sharding without that axis         all-reduce
        contraction sharded, out_sharding with it on the rows       reduce-scatter
        rows sharded, out_sharding without that axis on the rows    all-gather of a's rows (b's columns sharded over it)
        a, b and d on the same two axes                             2-D grid
        rows, columns or batch dimensions in place                  local
        anything else that `jnp.matmul` takes                       the cheapest reshards, then one of these

    Args:
      a: (..., m, k), or (..., k, m) with `transpose_a`; leading dimensions are batch dimensions of a and d.
      b: (k, n), or (n, k) with `transpose_b`. Vectors, and a b with batch dimensions, are as in `jnp.matmul`, without
        alpha, beta, c, epilog, scaling and comm.
      c: (..., m, n), sharded like d, given together with `beta`. All may be `BlockCyclicArray`s, as d is then.
      alpha, beta: Python numbers or scalar arrays.
      transpose_a, transpose_b, conjugate_a, conjugate_b: how an operand is stored; whether a complex one is conjugated.
      epilog, epilog_inputs: a `jaxmp.Epilog`, and its inputs by name, as `{"bias": (n,)}`.
      precision, preferred_element_type: how products are summed (by default in full precision), and d's type.
      out_sharding: sharding of d; required where the contraction is sharded in both operands.
      in_shardings, mesh: shardings of a and b for a mesh with auto axes. With explicit axes the types have them.
      implementation: "host", "xla" or "cublasmp"; None: chosen by rule, see `jaxmp.explain`.
      determinism: what d's bits may depend on: "run_to_run", "batch" (in a row, only on its own inputs) or "topology"
        (also not on the mesh); see docs/determinism.md.
      scaling, comm: a `jaxmp.Scaling` for float8, float4 and int8 operands, a `jaxmp.CommOptions` for cuBLASMp.

    Returns:
      d, (..., m, n); with an AUX or BGRAD epilog, or an amax, `(d, {name: array})`. See docs/matmul.md for all details.

    Raises: TypeError, ValueError or NotImplementedError, which name the argument.

    >>> import jax, jax.numpy as jnp, jaxmp
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((jax.device_count(), 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> a = b = jnp.ones((2 * jax.device_count(), 2 * jax.device_count()))
    >>> rows, cols, tiles = P("x", None), P(None, "x"), P("x", "y")
    >>> local = jaxmp.matmul(a, b)
    >>> gathered = jaxmp.matmul(a, b, in_shardings=(rows, cols), out_sharding=cols, mesh=mesh)
    >>> scattered = jaxmp.matmul(a, b, in_shardings=(cols, rows), out_sharding=rows, mesh=mesh)
    >>> reduced = jaxmp.matmul(a, b, in_shardings=(cols, rows), out_sharding=P(), mesh=mesh)
    >>> on_a_grid = jaxmp.matmul(a, b, in_shardings=(tiles, tiles), out_sharding=tiles, mesh=mesh)
    >>> all(jnp.array_equal(d, local) for d in (gathered, scattered, reduced, on_a_grid))
    True
    """
    if not options and c is None and eager_calls.is_simple(a, b):
        return jaxmp_product(a, b)
    request = Request("matmul", a, b, c, **options)
    if isinstance(a, BlockCyclicArray) or isinstance(b, BlockCyclicArray):
        return block_cyclic.matmul(request)
    operands = eager_calls.operands_of(request)
    entry = eager_calls.look_up(request, operands)
    if entry:
        return entry[0](*operands.values())
    if getattr(a, "ndim", 2) < 2 or getattr(b, "ndim", 2) != 2:
        return _contract(request, entry)
    return product(request, entry, operands)


@functools.partial(jax.jit, inline=True)
def jaxmp_product(a: jax.Array, b: jax.Array) -> Any:
    """Calls `matmul` under jit, because JAX's dispatch finds an eager call in less time than `eager_calls.look_up`."""
    return matmul(a, b)


def _contract(request: Request, entry: eager_calls.Entry | None) -> jax.Array:
    """Multiplies with the shapes of `jnp.matmul` where a or b is a vector, or b has batch dimensions. Raises
    NotImplementedError for c, alpha, beta, an epilog, its inputs, scaling and comm (`_OF_MATRICES`). Uses or fills the
    cache's `entry` only if the arrays are on one device."""
    arrays = request.a, request.b
    for name, x in zip("ab", arrays, strict=True):
        check_array(name, x, at_least=1)
    flags = check_flags(request)
    matrices = "km" if flags["transpose_a"] else "mk", "nk" if flags["transpose_b"] else "kn"
    indices = ["k" if x.ndim == 1 else f"...{matrix}" for x, matrix in zip(arrays, matrices, strict=True)]
    for name in _OF_MATRICES:
        value, default = getattr(request, name), Request._field_defaults[name]
        if value is not default and not (isinstance(value, int | float) and value == default):
            raise NotAvailable(
                f"{name} is available if a has 2 or more dimensions and b has 2, got shapes {arrays[0].shape} and "
                f"{arrays[1].shape}; leave it out, or use jax.vmap"
            )
    free = "m" * (arrays[0].ndim > 1) + "n" * (arrays[1].ndim > 1)
    request = request._replace(a=None, b=None)

    def jaxmp_contraction(a: Any, b: Any) -> jax.Array:
        a, b = jnp.conj(a) if request.conjugate_a else a, jnp.conj(b) if request.conjugate_b else b
        return contract(request, f"{indices[0]},{indices[1]}->...{free}", (a, b))

    entry = entry if eager_calls.is_on_one_device(request, arrays) else None
    return eager_calls.run(entry, jaxmp_contraction, *arrays)


# Options that a product with a vector or a batched b does not take.
_OF_MATRICES = ("c", "alpha", "beta", "epilog", "epilog_inputs", "scaling", "comm")


@overload
def linear(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
    **options: Unpack[PlainLinear],
) -> jax.Array: ...
@overload
def linear(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
    **options: Unpack[AnyLinear],
) -> Any: ...
@public
def linear(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
    **options: Unpack[AnyLinear],
) -> jax.Array | WithResults:
    """Computes the dense layer `act(x @ w + bias)` in one call; the epilog has the bias, and "relu" or "gelu".

    XLA applies any other activation to the unrounded sums of product and bias, and rounds once.

    Args:
      x: (..., k).
      w: (k, n).
      bias: (n,) or None.
      activation: None, "relu", "gelu" (tanh form), "gelu_exact" (erf), "silu" (or "swish"), "tanh", "sigmoid", or an
        elementwise function of an array.

    The other options are as in `matmul`.

    Returns:
      (..., n), sharded as `out_sharding`; if `scaling` asks for an amax, `(y, {name: array})`.

    Raises: as `matmul`; ValueError for an unknown activation; NotImplementedError for one other than "relu" and "gelu"
    with `determinism="batch"` or "topology", and other than "relu" with a result of integers.

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.linear(jnp.ones((2, 3)), jnp.ones((3, 4)), -2 * jnp.ones(4), activation="relu")[0]
    Array([1., 1., 1., 1.], dtype=float32)
    """
    if getattr(x, "ndim", 0) == 1:
        return activated.of_vector(functools.partial(linear, activation=activation), x, w, bias, **options)
    inputs = None if bias is None else {"bias": bias}
    return dense(Request("linear", x, w, epilog_inputs=inputs, **options), activation)


def dense(request: Request, activation: Activation | None) -> Any:
    """Computes `jaxmp.linear`; the request has the bias in `epilog_inputs`, and no epilog. "relu" and "gelu" become the
    epilog, but JAX applies relu if `_wraps`. Other activations are applied to the unrounded product, by XLA. Returns d,
    or (d, {name: array}) if `scaling` asks for an amax. Caches calls with "relu", "gelu" or None."""
    operands = eager_calls.operands_of(request)
    is_named = activation is None or isinstance(activation, str)
    entry = eager_calls.look_up(request, operands, activation) if is_named else None
    if entry:
        return entry[0](*operands.values())
    found = activations.parse(activation)
    if found == "relu" and _wraps(request):
        return jax.nn.relu(dense(request, None))
    epilog = epilogs.for_activation(found if isinstance(found, str) else None, request.epilog_inputs is not None)
    if found == "gelu" and has_numbers(request.a) and low_precision.is_scaled(request.a.dtype):
        # For float8 and float4 operands, the library has this gelu only together with its aux.
        d, results = product(request._replace(epilog=epilogs.RULES[epilog].with_aux or epilog))
        results = {name: x for name, x in results.items() if name != "gelu_aux"}
        return (d, results) if results else d
    request = request._replace(epilog=epilog)
    if not callable(found):
        return product(request, entry, operands)
    conversion, request = converted(request)
    spec, operands, shape = validated(request)
    activated.check_spec(spec)
    placement = meshes.place(request, shape)
    meshes.check_summed(placement)
    d = activated.activated_call(make_call(spec, placement, operands), found, operands)
    if conversion.is_weak:  # constants in the function may make the result strong
        weak = jax.eval_shape(found, jax.typeof(d).update(weak_type=True))
        conversion = dataclasses.replace(conversion, is_weak=weak.weak_type)
    return conversion.of_result(d)


def _wraps(request: Request) -> bool:
    """True if both operands are int8, int4, int2 or bool, and the requested result type, if any, is too: sums wrap
    around before the activation, as in jnp. False for two bools, and if an implementation or scaling is given."""
    if request.implementation is not None or request.scaling is not None:
        return False
    dtypes = [x.dtype for x in (request.a, request.b) if has_numbers(x)]
    if not all(map(_is_narrow, dtypes)) or all(x == np.bool_ for x in dtypes):
        return False
    preferred = check_preferred(request.preferred_element_type)
    return preferred is None or _is_narrow(preferred)


def _is_narrow(dtype: np.dtype) -> bool:
    return dtype == np.bool_ or (jnp.issubdtype(dtype, jnp.signedinteger) and dtype.itemsize == 1)
