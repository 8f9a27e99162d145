"""`matmul` and `linear`: products of global arrays, whose shardings decide how devices share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxmp._src.ops import activated, block_cyclic
from jaxmp._src.ops.block_cyclic import BlockCyclicArray
from jaxmp._src.ops.einsum import contract
from jaxmp._src.ops.signatures import (
    AuxEpilog,
    BlockCyclicOptions,
    LinearOptions,
    MatmulOptions,
    PlainEpilog,
    ShardingPair,
    WithResults,
)
from jaxmp._src.sharding import eager_calls, meshes
from jaxmp._src.sharding.sharded_call import make_call, product
from jaxmp._src.spec import activations, epilogs
from jaxmp._src.spec.caller import Caller
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.low_precision import Scaling
from jaxmp._src.spec.matmul_spec import result_shape
from jaxmp._src.spec.options import (
    Activation,
    CommOptions,
    Determinism,
    Implementation,
    Mesh,
    Precision,
    Scalar,
    Sharding,
)
from jaxmp._src.spec.process_grid import BlockCyclic
from jaxmp._src.validation import result_types
from jaxmp._src.validation.arguments import SPEC_OPTIONS, validated
from jaxmp._src.validation.operand_checks import as_array, check_array, check_conjugate, check_flag
from jaxmp._src.validation.public import public


@overload
def matmul(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    epilog: PlainEpilog = ...,
    scaling: None = None,
    **options: Unpack[MatmulOptions],
) -> jax.Array: ...
@overload
def matmul(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    epilog: AuxEpilog,
    scaling: Scaling | None = None,
    **options: Unpack[MatmulOptions],
) -> WithResults: ...
@overload
def matmul(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    epilog: Epilog | int = ...,
    scaling: Scaling | None = None,
    **options: Unpack[MatmulOptions],
) -> Any: ...
@overload
def matmul(
    a: BlockCyclicArray, b: BlockCyclicArray, c: BlockCyclicArray | None = None, **options: Unpack[BlockCyclicOptions]
) -> BlockCyclicArray: ...
@public
def matmul(
    a: ArrayLike | BlockCyclicArray,
    b: ArrayLike | BlockCyclicArray,
    c: ArrayLike | BlockCyclicArray | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    conjugate_a: bool = False,
    conjugate_b: bool = False,
    epilog: Epilog | int = Epilog.NONE,
    epilog_inputs: Mapping[str, ArrayLike] | None = None,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Sharding | BlockCyclic | None = None,
    in_shardings: ShardingPair | None = None,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
    determinism: Determinism = "run_to_run",
    scaling: Scaling | None = None,
    comm: CommOptions | None = None,
) -> jax.Array | WithResults | BlockCyclicArray:
    """Distributed matrix product, `d = epilog(alpha * op(a) @ op(b) + beta * c)`.

    The shardings of a, b and d decide how devices share the work. Nothing moves that they do not ask for. A pure
    function: jit, grad, vmap, remat, scan and export apply. Inside `jax.shard_map` the product is local.

        contraction sharded, out_sharding without that axis         all-reduce
        contraction sharded, out_sharding with it on the rows       reduce-scatter
        rows sharded, out_sharding without that axis on the rows    all-gather of a's rows (b's columns sharded over it)
        a, b and d on the same two axes                             2-D grid
        rows, columns or batch dimensions in place                  local
        any other that `jnp.matmul` takes                           the cheapest reshards, then one of these

    Args:
      a: (..., m, k), or (..., k, m) with `transpose_a`; leading dimensions are batch dimensions of a and d.
      b: (k, n), or (n, k) with `transpose_b`. Vectors, and a b with batch dimensions, are as in `jnp.matmul`, without
        alpha, beta, c, epilog, scaling and comm.
      c: (..., m, n), sharded like d, with `beta`; or None.
      alpha, beta: Python numbers or scalar arrays.
      transpose_a, transpose_b, conjugate_a, conjugate_b: how the operand is stored, and whether to conjugate it.
      epilog, epilog_inputs: a `jaxmp.Epilog`, and its inputs by name, as `{"bias": (n,)}`.
      precision, preferred_element_type: how products are summed (by default in full precision), and d's type.
      out_sharding: sharding of d; required where the contraction is sharded in both operands.
      in_shardings, mesh: shardings of a and b for a mesh with auto axes. With explicit axes the types have them.
      implementation: "host", "xla" or "cublasmp"; None: chosen by rule, see `jaxmp.explain`.
      determinism: what d's bits may depend on: "run_to_run", "batch" (in a row, its own inputs alone) or "topology"
        (nor on the mesh); see docs/determinism.md.
      scaling, comm: a `jaxmp.Scaling` for float8 and float4 operands, a `jaxmp.CommOptions` for cuBLASMp.

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
    given = locals()
    are_blocks = isinstance(a, BlockCyclicArray) or isinstance(b, BlockCyclicArray)
    if not are_blocks and (getattr(a, "ndim", 2) < 2 or getattr(b, "ndim", 2) != 2):
        return _contract(**given)
    result: jax.Array | WithResults | BlockCyclicArray = _multiply("matmul", **given)
    return result


def _contract(a: Any, b: Any, out_sharding: Any, in_shardings: Any, mesh: Any, **options: Any) -> jax.Array:
    """The product where a or b is a vector, or b has batch dimensions, with the shapes of `jnp.matmul`: an einsum."""
    arrays, indices = [], []
    for name, x, vector, matrix in (("a", a, "k", "mk"), ("b", b, "k", "kn")):
        x = as_array(x)
        check_array("matmul", name, x, at_least=1)
        is_transposed = check_flag("matmul", f"transpose_{name}", options[f"transpose_{name}"])
        is_conjugated = check_conjugate("matmul", f"conjugate_{name}", options[f"conjugate_{name}"], x)
        arrays.append(jnp.conj(x) if is_conjugated else x)
        indices.append(vector if x.ndim == 1 else f"...{matrix[::-1] if is_transposed else matrix}")
    for name, default in _OF_MATRICES.items():
        value = options[name]
        if value is not default and not (isinstance(value, int | float) and value == default):
            raise NotImplementedError(
                f"matmul: {name} is available for an a of 2 or more dimensions and a b of 2, got shapes "
                f"{arrays[0].shape} and {arrays[1].shape}; leave it out, or use jax.vmap"
            )
    free = "m" * (arrays[0].ndim > 1) + "n" * (arrays[1].ndim > 1)
    subscripts = f"{indices[0]},{indices[1]}->...{free}"
    options = {name: options[name] for name in _OF_CONTRACTIONS}
    return contract("matmul", subscripts, tuple(arrays), options, out_sharding, in_shardings, mesh)


# Options that such a product does not take, with their defaults, and those that it takes.
_OF_MATRICES = {
    "c": None,
    "alpha": 1.0,
    "beta": None,
    "epilog": Epilog.NONE,
    "epilog_inputs": None,
    "scaling": None,
    "comm": None,
}
_OF_CONTRACTIONS = ("precision", "preferred_element_type", "implementation", "determinism")


def _multiply(
    name: str,
    a: Any,
    b: Any,
    c: Any,
    epilog_inputs: Any,
    out_sharding: Any,
    in_shardings: Any,
    mesh: Any,
    **options: Any,
) -> Any:
    """The product of a public function `name`, from every argument of `matmul`."""
    if isinstance(a, BlockCyclicArray) or isinstance(b, BlockCyclicArray):
        given = options | {"epilog_inputs": epilog_inputs, "in_shardings": in_shardings, "mesh": mesh}
        level = None if options["determinism"] == "run_to_run" else options["determinism"]
        options["refused"] = {"determinism": level, **{name: given[name] for name in _OF_ARRAYS}}
        del options["determinism"], options["scaling"]
        return block_cyclic.matmul(a, b, c, out_layout=out_sharding, **options)
    a, b, c = map(as_array, (a, b, c))
    given = eager_calls.given_operands(a, b, c, epilog_inputs)
    decided = eager_calls.decided(given, options, (out_sharding, in_shardings, mesh))
    if decided:
        return decided[0](*given.values())

    return product(name, a, b, c, epilog_inputs, options, out_sharding, in_shardings, mesh, decided)


# Options that block-cyclic operands do not take.
_OF_ARRAYS = ("epilog_inputs", "in_shardings", "mesh", "scaling")


@overload
def linear(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
    scaling: None = None,
    **options: Unpack[LinearOptions],
) -> jax.Array: ...
@overload
def linear(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
    scaling: Scaling | None = None,
    **options: Unpack[LinearOptions],
) -> Any: ...
@public
def linear(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation | None = None,
    alpha: Scalar = 1.0,
    transpose_a: bool = False,
    transpose_b: bool = False,
    conjugate_a: bool = False,
    conjugate_b: bool = False,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Sharding | None = None,
    in_shardings: ShardingPair | None = None,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
    determinism: Determinism = "run_to_run",
    scaling: Scaling | None = None,
    comm: CommOptions | None = None,
) -> jax.Array | WithResults:
    """Dense layer `act(x @ w + bias)`, one call whose epilog has the bias, and "relu" and "gelu".

    XLA applies any other activation to the product and its bias as they were summed, and rounds once.

    Args:
      x: (..., k).
      w: (k, n).
      bias: (n,) or None.
      activation: None, "relu", "gelu" (tanh form), "gelu_exact" (erf), "silu" (or "swish"), "tanh", "sigmoid", or an
        elementwise function of an array.

    The other options are those of `matmul`.

    Returns:
      (..., n), sharded as `out_sharding` says.

    Raises: as `matmul`; ValueError for an unknown activation.

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.linear(jnp.ones((2, 3)), jnp.ones((3, 4)), -2 * jnp.ones(4), activation="relu")[0]
    Array([1., 1., 1., 1.], dtype=float32)
    """
    given = locals()
    options = {name: given[name] for name in (*SPEC_OPTIONS, *_SHARDINGS, "mesh") if name in given}
    if getattr(x, "ndim", 0) == 1:
        options |= {name: meshes.of_one_row(options[name]) for name in _SHARDINGS}
        row: Any = x
        matrix: jax.Array = linear(row[None], w, bias, activation=activation, **options)
        return matrix[0]
    inputs = None if bias is None else {"bias": bias}
    found = activations.find("linear", activation)
    epilog = epilogs.for_activation(found if isinstance(found, str) else None, bias is not None)
    if callable(found):
        return _activated(x, w, inputs, found, options | {"epilog": epilog})
    operands = {"a": x, "b": w, "c": None, "beta": None, "epilog": epilog, "epilog_inputs": inputs}
    result: jax.Array | WithResults = _multiply(_LINEAR, **operands, **options)
    return result


def _activated(x: Any, w: Any, inputs: Any, f: activations.Function, options: dict[str, Any]) -> jax.Array:
    """`f` of the product and its bias."""
    x, w = map(as_array, (x, w))

    def multiply(x: Any, w: Any, c: None, inputs: Any, options: dict[str, Any]) -> jax.Array:
        spec, operands = validated(_LINEAR, x, w, None, inputs, options)
        activated.check_spec(_LINEAR, spec)
        shape = result_shape(spec, x, w)
        shardings = (options["out_sharding"], options["in_shardings"], options["mesh"])
        call = make_call(spec, meshes.place(_LINEAR, x, w, shape, *shardings), operands, shape, _LINEAR)
        return activated.activated_call(call, f, operands)

    are_rows = options["transpose_b"] and not options["transpose_a"]
    result: jax.Array = result_types.converted(_LINEAR, multiply, x, w, None, inputs, options, are_rows=are_rows)
    return result


_LINEAR = Caller("linear", a="x", b="w")
_SHARDINGS = ("out_sharding", "in_shardings")
