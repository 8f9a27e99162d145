"""The public functions: arguments to a spec, to a bind, to the result."""

from __future__ import annotations

from typing import Any

import jax

from jaxmp._src.ops import block_cyclic
from jaxmp._src.ops import mlp as mlp_lib
from jaxmp._src.sharding import meshes
from jaxmp._src.sharding.sharded_call import collective, product
from jaxmp._src.spec import epilogs
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import Pattern
from jaxmp._src.validation import operand_checks
from jaxmp._src.validation.arguments import SPEC_OPTIONS


def matmul(
    a,
    b,
    c=None,
    *,
    alpha=1.0,
    beta=None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    conjugate_a: bool = False,
    conjugate_b: bool = False,
    epilog: Epilog | int = Epilog.NONE,
    epilog_inputs=None,
    precision=None,
    preferred_element_type=None,
    scales=None,
    result_amax: bool = False,
    aux_dtype=None,
    aux_amax: bool = False,
    out_sharding=None,
    in_shardings=None,
    mesh=None,
    implementation: str | None = None,
    communication_dtype=None,
    algorithm: str | None = None,
    comm_sm_count: int | None = None,
    determinism: str = "run_to_run",
) -> Any:
    """Distributed matrix product with an epilog, `d = epilog(alpha * op(a) @ op(b) + beta * c)`.

    A pure function: jit, grad, jvp, vmap, remat, scan and `jax.export` apply. The shardings of the operands and of the
    result decide how devices share the work; nothing is gathered that `out_sharding` does not ask for.

        contraction sharded, out_sharding without that axis         all-reduce
        contraction sharded, out_sharding with it on the rows       reduce-scatter
        rows sharded, out_sharding without that axis on the rows    all-gather of a's rows (b's columns sharded over it)
        a, b and d on the same two axes                             2-D grid
        everything else in place                                    local

    Where the shardings come from: on a mesh with explicit axes from the types of a and b; on a mesh with auto axes from
    `in_shardings`; without those XLA's partitioner chooses (see docs/architecture.md for its limits). Inside
    `jax.shard_map` the product is local; the functions that name an axis communicate.

    Args:
      a: (..., m, k), or (..., k, m) with `transpose_a`; float32, float64, bfloat16, float16, complex64 or complex128;
        or, of 8 bits and fewer, float8_e4m3fn, float8_e5m2, float4_e2m1fn or int8 (see "Narrow types").
        Leading dimensions are batch dimensions of a and of the result.
      b: (k, n), or (n, k) with `transpose_b`.
      c: (..., m, n), sharded like the result, or None. It is not read where beta is the number 0.
      alpha, beta: Python numbers, or scalar arrays and tracers, by which one can differentiate; they take no part in
        type promotion. `beta` goes with `c` and only with it. Where alpha is the number 0, NaN and infinities of a and
        b may or may not reach d, as in BLAS. cuBLASMp takes its scalars from the host, so with an array the call
        computes the plain product in the accumulator's type, and scaling, c and epilog follow it.
      transpose_a, transpose_b: the operand is stored transposed.
      conjugate_a, conjugate_b: conjugate the (complex) operand.
      epilog: a `jaxmp.Epilog`: NONE, BIAS, RELU, GELU (tanh form), RELU_BIAS, GELU_BIAS, and the AUX form of each
        activation; DRELU and DGELU, which multiply z by the derivative of the activation whose AUX output they take,
        and their BGRAD forms; BGRADA (with `transpose_a` and a of 2 dimensions) and BGRADB (without `transpose_b`).
        `Epilog.ALLREDUCE`, alone or or-ed with another, asserts that the call all-reduces and changes nothing.
      epilog_inputs: `{"bias": (n,)}` for the epilogs with a bias; for the derivatives `{"relu_aux": ...}` or
        `{"gelu_aux": ...}`, of the shape, dtype and sharding that the AUX epilog returned.
      precision: None, a `jax.lax.Precision`, a `jax.lax.DotAlgorithmPreset`, the name of one, a pair of the first, or
        a compute type of cuBLAS ("32F_FAST_TF32", "64F_EMULATED_FIXEDPOINT", ...). None and every `jax.lax.Precision`
        are the operands' full type: products are summed in float32 for 16-bit operands, which are rounded once, else
        in the operands' own type. Presets may round operands first; see the table in `jaxmp/_src/spec/precisions.py`.
      preferred_element_type: type of the result; float32 is available for bfloat16 and float16 operands.
      scales: a `jaxmp.Scales` for float8 and float4 operands.
      result_amax: also return the largest absolute value of a float8 result ahead of its scale, over all devices (in
        shard_map over the named axis), as "result_amax"; it has no derivative.
      aux_dtype: the type of gelu_aux for float8 operands. None: that of the result, or for a float8 result that of c
        (float16 without c). float8_e4m3fn: multiplied with `scales.aux`, with epilog GELU_AUX, operands and a result of
        float8_e4m3fn, tensor-wide scales, and c of float16 or none.
      aux_amax: also return the largest absolute value of a float8 gelu_aux ahead of its scale, as "gelu_aux_amax"; as
        `result_amax`.
      out_sharding: `PartitionSpec` or `NamedSharding` of the result; required where the contraction is sharded. For
        block-cyclic operands the `jaxmp.BlockCyclic` of the result.
      in_shardings: a pair of `PartitionSpec`s or `NamedSharding`s for a and b (auto axes).
      mesh: the mesh of those specs; the ambient mesh by default.
      implementation: None (chosen by rule, see `jaxmp.explain`), "host", "xla" or "cublasmp".
      communication_dtype, algorithm, comm_sm_count: hints to cuBLASMp, which "host" checks and "xla" ignores: the type
        in which partial sums travel (reduce-scatter and all-reduce only; no smaller than d's, no larger than the
        accumulator's), how communication overlaps with products ("split_p2p", "split_multicast", "atomic_p2p",
        "atomic_multicast", "no_overlap", "fused"; None lets the library choose), and how many multiprocessors
        communicate. Gradients, whose patterns are others, keep those that apply.
      determinism: what the bits of the result may depend on (docs/determinism.md). "run_to_run": the same call with
        the same operands gives the same bits. "batch": besides, a row of d depends only on its own row of a, on b and
        on the epilog's inputs, not on how many rows there are or where it stands. "topology": besides, the bits do not
        depend on the mesh, and gradients keep that. On GPUs both need cuBLASMp, and no GPU has proved them yet.

    Returns:
      d of shape (..., m, n), sharded as `out_sharding` says; with an AUX or a BGRAD epilog the pair `(d, {name: x})`:
      "gelu_aux" is the value ahead of the activation, (..., m, n) in d's dtype (see `aux_dtype`); "relu_aux" is a bit
      mask of uint8, (..., m, shards * ld): per shard of the columns ld = 16 * ceil(columns / 128) bytes a row, bit
      i % 8 of byte i // 8 set where the value ahead of the activation is positive. Bias gradients have d's dtype and
      are complete on every rank: "drelu_bgrad" and "dgelu_bgrad" (n,) are d summed over all its rows, leading
      dimensions included, sharded like d's columns; "bgradb" (n,) is op(b) summed over k, sharded likewise; "bgrada"
      (m,) is op(a) summed over k, whole in each group. Inside shard_map they are complete over the call's group, not
      over other axes.

    Narrow types. float8 goes with float8 (float8_e5m2 not with itself) and float4 with float4, into bfloat16, float16,
    float32 or their own type, which `preferred_element_type` names; a is stored (m, k) and b (n, k), with
    `transpose_b=True`; m, n and k are multiples of 16 on each device (float4 and MXFP8: 128, k of float4: 64).
    Products are exact and summed in float32, d = scales.d * epilog(alpha * scales.a * a @ b + beta * scales.c * c +
    bias), and what exceeds the type saturates. A float8 result of MXFP8 operands and a float4 result are quantized in
    blocks, whose scales are returned as "d_out_scale". c has the result's type, or for a float8 or float4 result
    float16 or bfloat16; the bias has c's type, for a float32 result bfloat16. int8 goes with int8 into int32, modulo
    2^32, alpha and beta integers. Source: cuBLAS documentation, "Narrow Precision Data Types Usage".

    Raises:
      TypeError: an operand is not an array, is integer but not int8, or does not convert to the result's type.
      ValueError: shapes, shardings, epilog inputs, hints or c and beta do not fit; the message names the argument.
      NotImplementedError: a type, precision or implementation that does not exist, or a transposition that
        cuBLASMp does not sum (named).

    Block-cyclic operands (`jaxmp.to_block_cyclic`): a, b and c may be `BlockCyclicArray`s on one grid, whose blocks
    along each of m, n and k are of one size; then d is one too, in c's layout or in a's rows and b's columns. There is
    no epilog.

    Every process of a multi-process program calls this with equal arguments. Epilogs and their numbers are those of
    cuBLASMp (cublasmp.h 0.10, cublasMpMatmulEpilogue_t).

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), alpha=2.0)[0, 0]
    Array(6., dtype=float32)
    """
    given = locals()
    options = {name: given[name] for name in SPEC_OPTIONS}
    if isinstance(a, block_cyclic.BlockCyclicArray) or isinstance(b, block_cyclic.BlockCyclicArray):
        refused = {"epilog_inputs": epilog_inputs, "in_shardings": in_shardings, "mesh": mesh}
        defaults = {"scales": None, "result_amax": False, "aux_dtype": None, "aux_amax": False}
        for name, default in (defaults | {"determinism": "run_to_run"}).items():
            value = options.pop(name)
            refused[name] = None if value == default else value
        return block_cyclic.matmul(a, b, c, out_layout=out_sharding, refused=refused, **options)
    return product(a, b, c, epilog_inputs, options, out_sharding, in_shardings, mesh)


def linear(x, w, bias=None, *, activation: str | None = None, out_sharding=None, **options) -> Any:
    """Dense layer `act(x @ w + bias)`, one call with a fused epilog.

    Args:
      x: (..., k).
      w: (k, n).
      bias: (n,) or None.
      activation: None, "relu" or "gelu" (tanh form).
      out_sharding: as in `matmul`.
      options: the other options of `matmul` but `c`, `beta`, `epilog` and `epilog_inputs`.

    Returns:
      (..., n), sharded as `out_sharding` says.

    Raises: as `matmul`, in whose messages x is a and w is b; ValueError for an unknown activation.

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.linear(jnp.ones((2, 3)), jnp.ones((3, 4)), -2 * jnp.ones(4), activation="relu")[0]
    Array([1., 1., 1., 1.], dtype=float32)
    """
    own = [name for name in ("c", "beta", "epilog", "epilog_inputs") if name in options]
    if own:
        raise TypeError(
            f"linear: takes no {' and '.join(own)}, its epilog follows from bias and activation; call matmul"
        )
    if getattr(x, "ndim", 0) == 1:
        given = {"in_shardings": options.pop("in_shardings", None), "out_sharding": out_sharding}
        shardings = {name: meshes.of_one_row(sharding) for name, sharding in given.items()}
        return linear(x[None], w, bias, activation=activation, **shardings, **options)[0]
    inputs = None if bias is None else {"bias": bias}
    epilog = epilogs.for_activation(activation, bias is not None)
    return matmul(x, w, epilog=epilog, epilog_inputs=inputs, out_sharding=out_sharding, **options)


def mlp(
    x,
    w_in,
    b_in,
    w_out,
    b_out,
    *,
    activation: str,
    axis_name=None,
    hidden_sharding=None,
    out_sharding=None,
    in_shardings=None,
    mesh=None,
    **options,
) -> jax.Array:
    """Two dense layers, `act(x @ w_in + b_in) @ w_out + b_out`, with a fused backward pass.

    The value is that of two `linear`s. Its gradient takes the cotangent of y through w_out, the activation and the
    hidden bias in one call (epilog DGELU_BGRAD or DRELU_BGRAD). Under XLA's partitioner (auto axes without
    `in_shardings`) it is two `linear`s also in its gradient.

    Where x's rows and w_in's columns lie on one axis the first layer is an all-gather, and with y's rows on it again
    the second one a reduce-scatter (sequence parallelism); with x whole and y whole, they are local and an all-reduce.

    Args:
      x: (..., k).
      w_in: (k, h); b_in: (h,) or None.
      w_out: (h, n); b_out: (n,) or None.
      activation: "relu" or "gelu" (tanh form).
      axis_name: inside `jax.shard_map`, a mesh axis or a tuple of them: x's rows (the next to last dimension) are
        gathered over it and y's are scattered; each rank holds its columns of w_in and b_in, its rows of w_out and all
        of b_out. None: both layers are local there.
      hidden_sharding: `PartitionSpec` or `NamedSharding` of the hidden layer (..., h); by default the rows of x less
        the axes of w_in's columns, and those.
      out_sharding: as in `matmul`, of y.
      in_shardings: a triple of `PartitionSpec`s or `NamedSharding`s for x, w_in and w_out (auto axes).
      mesh, options: as in `matmul`; of the options precision, implementation and determinism.

    Returns:
      (..., n), sharded as `out_sharding` says.

    Raises: as `matmul`; the message says which of the two products is meant.

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.mlp(jnp.ones((2, 3)), jnp.ones((3, 4)), None, jnp.ones((4, 1)), jnp.ones(1), activation="relu")
    Array([[13.],
           [13.]], dtype=float32)
    """
    x, w_in, b_in, w_out, b_out = map(operand_checks.as_array, (x, w_in, b_in, w_out, b_out))
    if getattr(x, "ndim", 0) == 1:
        raise ValueError(f"mlp: x must have at least 2 dimensions, got 1 (shape {tuple(x.shape)}); pass x[None]")
    unknown = sorted(set(options) - {"precision", "implementation", "determinism"})
    if unknown:
        raise TypeError(
            f"mlp: unexpected keyword arguments {unknown}; known are ['determinism', 'implementation', 'precision']"
        )
    if in_shardings is not None and (isinstance(in_shardings, str) or len(in_shardings) != 3):
        raise ValueError(
            f"mlp: in_shardings must be a triple, one sharding each for x, w_in and w_out, got {in_shardings!r}"
        )
    shardings = {"hidden": hidden_sharding, "out": out_sharding, "ins": in_shardings, "mesh": mesh}
    y = mlp_lib.mlp(x, w_in, b_in, w_out, b_out, activation, axis_name, shardings, options)
    if y is not None:
        return y
    hidden = linear(x, w_in, b_in, activation=activation, out_sharding=hidden_sharding, mesh=mesh, **options)
    return linear(hidden, w_out, b_out, out_sharding=out_sharding, mesh=mesh, **options)


def all_gather_matmul(x, w, axis_name, c=None, *, epilog_inputs=None, **options) -> Any:
    """Gather x's rows over an axis and multiply: `concat(x of every rank) @ w`.

    Inside a full-manual `jax.shard_map`; collective over `axis_name`: every rank calls it with an equal spec.

    Args:
      x: (..., m/P, k); the next to last dimension is gathered.
      w: (k, n/P): this rank's columns.
      axis_name: a mesh axis, or a tuple of them (slowest first) that together form the group of P ranks. Each
        combination of the other axes' indices is a group of its own.
      c: like the result, with `beta`.
      epilog_inputs, options: as in `matmul` (transpositions, alpha, epilog, types, implementation); `bias` holds
        this rank's n/P values.

    Returns:
      (..., m, n/P).

    Raises: as `matmul`, in whose messages x is a and w is b; ValueError outside shard_map, in a partial-manual one, or
      for an axis not in the mesh.

    Source: cuBLASMp's AllGather + Matmul (docs.nvidia.com/cuda/cublasmp, "Tensor parallelism").

    >>> import jax, jax.numpy as jnp, jaxmp
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> call = jax.shard_map(
    ...     lambda x, w: jaxmp.all_gather_matmul(x, w, "x"),
    ...     mesh=mesh,
    ...     in_specs=(P("x", None), P(None, "x")),
    ...     out_specs=P(None, "x"),
    ... )
    >>> call(jnp.ones((4, 2)), jnp.ones((2, 3))).shape
    (4, 3)
    """
    return collective("all_gather_matmul", Pattern.ALL_GATHER, x, w, axis_name, c, epilog_inputs, options)


def matmul_reduce_scatter(x, w, axis_name, c=None, *, epilog_inputs=None, **options) -> Any:
    """Multiply and sum over an axis, each rank keeping its part of the rows.

    Inside a full-manual `jax.shard_map`; collective over `axis_name`: every rank calls it with an equal spec.

    Args:
      x: (..., m, k/P); w: (k/P, n): this rank's part of the contraction. P divides m.
      axis_name: a mesh axis, or a tuple of them (slowest first) that together form the group of P ranks. Each
        combination of the other axes' indices is a group of its own.
      c: like the result, with `beta`.
      epilog_inputs, options: as in `matmul` (transpositions, alpha, epilog, types, implementation); `bias` holds
        all n values, the same on every rank.

    Returns:
      (..., m/P, n): rank r has the r-th part of the rows of `sum over ranks of x @ w`, rounded once.

    Raises: as `matmul`, in whose messages x is a and w is b; ValueError outside shard_map, in a partial-manual one, or
      for an axis not in the mesh.

    Source: cuBLASMp's Matmul + ReduceScatter (docs.nvidia.com/cuda/cublasmp, "Tensor parallelism").

    >>> import jax, jax.numpy as jnp, jaxmp
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> call = jax.shard_map(
    ...     lambda x, w: jaxmp.matmul_reduce_scatter(x, w, "x"),
    ...     mesh=mesh,
    ...     in_specs=(P(None, "x"), P("x", None)),
    ...     out_specs=P("x", None),
    ... )
    >>> call(jnp.ones((4, 2)), jnp.ones((2, 3))).shape
    (4, 3)
    """
    return collective("matmul_reduce_scatter", Pattern.REDUCE_SCATTER, x, w, axis_name, c, epilog_inputs, options)


def matmul_all_reduce(x, w, axis_name, c=None, *, epilog_inputs=None, **options) -> Any:
    """Multiply and sum over an axis: `sum over ranks of x @ w` on every rank.

    Inside a full-manual `jax.shard_map`; collective over `axis_name`: every rank calls it with an equal spec.

    Args:
      x: (..., m, k/P); w: (k/P, n): this rank's part of the contraction.
      axis_name: a mesh axis, or a tuple of them (slowest first) that together form the group of P ranks. Each
        combination of the other axes' indices is a group of its own.
      c: like the result, with `beta`.
      epilog_inputs, options: as in `matmul` (transpositions, alpha, epilog, types, implementation); `bias` holds
        all n values, the same on every rank; c likewise, and it is added once.

    Returns:
      (..., m, n), the same bits on every rank.

    Raises: as `matmul`, in whose messages x is a and w is b; ValueError outside shard_map, in a partial-manual one, or
      for an axis not in the mesh.

    Source: cuBLASMp's Matmul + AllReduce (docs.nvidia.com/cuda/cublasmp, "Tensor parallelism").

    >>> import jax, jax.numpy as jnp, jaxmp
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> call = jax.shard_map(
    ...     lambda x, w: jaxmp.matmul_all_reduce(x, w, "x"),
    ...     mesh=mesh,
    ...     in_specs=(P(None, "x"), P("x", None)),
    ...     out_specs=P(),
    ... )
    >>> call(jnp.ones((4, 2)), jnp.ones((2, 3))).shape
    (4, 3)
    """
    return collective("matmul_all_reduce", Pattern.ALL_REDUCE, x, w, axis_name, c, epilog_inputs, options)


def block_matmul(a, b, axis_names, c=None, *, epilog_inputs=None, **options) -> Any:
    """Product of matrices in 2-D blocks on a p x q mesh.

    Inside a full-manual `jax.shard_map`; collective over both axes: every rank calls it with an equal spec.

    Args:
      a: (m/p, k/q): block (i, j) of a on the rank with index i on the first axis and j on the second; with
        `transpose_a` the stored matrix is (k, m) and its block (k/p, m/q).
      b: (k/p, n/q), or (n/p, k/q) with `transpose_b`.
      axis_names: (axis of the rows, axis of the columns); each may be a tuple of axes, slowest first.
      c: (m/p, n/q), with `beta`.
      epilog_inputs, options: as in `matmul`; `bias` holds the n/q values of this rank's columns.

    Returns:
      (m/p, n/q): block (i, j) of d.

    Raises: as `matmul`; ValueError outside shard_map, in a partial-manual one, or for axes that are no pair.

    Source: cuBLASMp's 2-D matmul (cublasMpMatmul, "generic"), after van de Geijn and Watts, SUMMA (1997).

    >>> import jax, jax.numpy as jnp, jaxmp
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> tiles = P("x", "y")
    >>> call = jax.shard_map(
    ...     lambda a, b: jaxmp.block_matmul(a, b, ("x", "y")), mesh=mesh, in_specs=(tiles, tiles), out_specs=tiles
    ... )
    >>> call(jnp.ones((4, 2)), jnp.ones((2, 3))).shape
    (4, 3)
    """
    return collective("block_matmul", Pattern.GRID, a, b, axis_names, c, epilog_inputs, options)
