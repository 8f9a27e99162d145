"""The public functions: arguments to a spec, to a bind, to the result."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp import _compat, _epilog, _mesh, _sharding, _spec, _xla
from jaxmp._epilog import Epilog
from jaxmp._primitive import bind, bind_rows
from jaxmp._spec import MatmulSpec, Pattern


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
    epilog: Epilog = Epilog.NONE,
    epilog_inputs=None,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    in_shardings=None,
    mesh=None,
    implementation: str | None = None,
):
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
      a: (..., m, k), or (..., k, m) with `transpose_a`; float32, float64, bfloat16, float16, complex64 or complex128.
        Leading dimensions are batch dimensions of a and of the result.
      b: (k, n), or (n, k) with `transpose_b`.
      c: (..., m, n), sharded like the result, or None. It is not read where beta is 0.
      alpha, beta: Python numbers; they take no part in type promotion. `beta` goes with `c` and only with it.
      transpose_a, transpose_b: the operand is stored transposed.
      conjugate_a, conjugate_b: conjugate the (complex) operand.
      epilog: a `jaxmp.Epilog`: NONE, BIAS, RELU, GELU (tanh form), RELU_BIAS, GELU_BIAS, and the AUX form of each
        activation.
      epilog_inputs: `{"bias": (n,)}` for the epilogs with a bias.
      precision: None, a `jax.lax.Precision` or its name. Products are summed in the accumulator's type: float32 for
        16-bit operands, which are rounded once, else the operands' own type.
      preferred_element_type: type of the result; float32 is available for bfloat16 and float16 operands.
      out_sharding: `PartitionSpec` or `NamedSharding` of the result; required where the contraction is sharded.
      in_shardings: a pair of `PartitionSpec`s or `NamedSharding`s for a and b (auto axes).
      mesh: the mesh of those specs; the ambient mesh by default.
      implementation: None (chosen by rule, see `jaxmp.explain`), "host", "xla" or "cublasmp".

    Returns:
      d of shape (..., m, n), sharded as `out_sharding` says; with an AUX epilog the pair `(d, {name: aux})`:
      "gelu_aux" is the value ahead of the activation, (..., m, n) in d's dtype; "relu_aux" is a bit mask of uint8,
      (..., m, shards * ld): per shard of the columns ld = 16 * ceil(columns / 128) bytes a row, bit i % 8 of
      byte i // 8 set where the value ahead of the activation is positive.

    Raises:
      TypeError: an operand is not an array, is integer, or does not convert to the result's type.
      ValueError: shapes, shardings, epilog inputs or c and beta do not fit; the message names the argument.
      NotImplementedError: a type, epilog or implementation that does not exist (named).

    Every process of a multi-process program calls this with equal arguments. Epilogs and their numbers are those of
    cuBLASMp (cublasmp.h 0.10, cublasMpMatmulEpilogue_t).

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), alpha=2.0)[0, 0]
    Array(6., dtype=float32)
    """
    options = {key: value for key, value in locals().items() if key in _SPEC_OPTIONS}
    spec, operands = _validated("matmul", a, b, c, epilog_inputs, options)
    placement = _mesh.place("matmul", a, b, _result_shape(spec, a, b), out_sharding, in_shardings, mesh)
    return _result(jaxmp_call(_call(spec, placement, operands), *operands), spec)


_SPEC_OPTIONS = (
    "alpha beta transpose_a transpose_b conjugate_a conjugate_b epilog precision preferred_element_type implementation"
).split()


def linear(x, w, bias=None, *, activation: str | None = None, out_sharding=None, **options):
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

    Raises: as `matmul`; ValueError for an unknown activation.

    >>> import jax.numpy as jnp, jaxmp
    >>> jaxmp.linear(jnp.ones((2, 3)), jnp.ones((3, 4)), -2 * jnp.ones(4), activation="relu")[0]
    Array([1., 1., 1., 1.], dtype=float32)
    """
    if getattr(x, "ndim", 0) == 1:
        return linear(x[None], w, bias, activation=activation, out_sharding=out_sharding, **options)[0]
    inputs = None if bias is None else {"bias": bias}
    epilog = _epilog.for_activation(activation, bias is not None)
    return matmul(x, w, epilog=epilog, epilog_inputs=inputs, out_sharding=out_sharding, **options)


def all_gather_matmul(x, w, axis_name, c=None, *, epilog_inputs=None, **options):
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

    Raises: as `matmul`; ValueError outside shard_map, in a partial-manual one, or for an axis not in the mesh.

    Source: cuBLASMp's AllGather + Matmul (docs.nvidia.com/cuda/cublasmp, "Tensor parallelism").
    """
    return _collective("all_gather_matmul", Pattern.ALL_GATHER, x, w, axis_name, c, epilog_inputs, options)


def matmul_reduce_scatter(x, w, axis_name, c=None, *, epilog_inputs=None, **options):
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

    Raises: as `matmul`; ValueError outside shard_map, in a partial-manual one, or for an axis not in the mesh.

    Source: cuBLASMp's Matmul + ReduceScatter (docs.nvidia.com/cuda/cublasmp, "Tensor parallelism").
    """
    return _collective("matmul_reduce_scatter", Pattern.REDUCE_SCATTER, x, w, axis_name, c, epilog_inputs, options)


def matmul_all_reduce(x, w, axis_name, c=None, *, epilog_inputs=None, **options):
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

    Raises: as `matmul`; ValueError outside shard_map, in a partial-manual one, or for an axis not in the mesh.

    Source: cuBLASMp's Matmul + AllReduce (docs.nvidia.com/cuda/cublasmp, "Tensor parallelism").
    """
    return _collective("matmul_all_reduce", Pattern.ALL_REDUCE, x, w, axis_name, c, epilog_inputs, options)


def block_matmul(a, b, axis_names, c=None, *, epilog_inputs=None, **options):
    """Product of matrices in 2-D blocks on a p x q mesh.

    Inside a full-manual `jax.shard_map`; collective over both axes: every rank calls it with an equal spec.

    Args:
      a: (m/p, k/q): block (i, j) of a on the rank with index i on the first axis and j on the second; with
        `transpose_a` the stored matrix is (k, m) and its block (k/p, m/q).
      b: (k/p, n/q), or (n/p, k/q) with `transpose_b`.
      axis_names: (axis of the rows, axis of the columns).
      c: (m/p, n/q), with `beta`.
      epilog_inputs, options: as in `matmul`; `bias` holds the n/q values of this rank's columns.

    Returns:
      (m/p, n/q): block (i, j) of d.

    Raises: as `matmul`; ValueError outside shard_map, in a partial-manual one, or for axes that are no pair.

    Source: cuBLASMp's 2-D matmul (cublasMpMatmul, "generic"), after van de Geijn and Watts, SUMMA (1997).
    """
    return _collective("block_matmul", Pattern.GRID, a, b, axis_names, c, epilog_inputs, options)


# From arguments to a bind --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Call:
    """One validated call, hashable: the spec and the mode; for global arrays the plan and every sharding."""

    spec: MatmulSpec
    mode: _mesh.Mode
    plan: _sharding.Plan | None = None
    mesh: Any = None
    in_specs: tuple[P, ...] = ()
    out_specs: tuple[P, ...] = ()
    is_explicit: bool = False
    constraint: NamedSharding | None = None


def _validated(name: str, a, b, c, epilog_inputs, options: dict, pattern: dict | None = None):
    """(spec, operands in the types of the call) from what the user passed."""
    unknown = sorted(set(options) - set(_SPEC_OPTIONS))
    if unknown:
        raise TypeError(f"{name}: unexpected keyword arguments {unknown}; known are {_SPEC_OPTIONS}")
    _spec.check_array(name, "a", a, at_least=2)
    _spec.check_array(name, "b", b, ndim=2)
    operand, out = _spec.resolve_dtypes(name, a, b, options.get("preferred_element_type"))
    _spec.check_implementation(name, options.get("implementation"))
    spec = MatmulSpec(
        out_dtype=out,
        transpose_a=bool(options.get("transpose_a", False)),
        transpose_b=bool(options.get("transpose_b", False)),
        conjugate_a=_spec.check_conjugate(name, "conjugate_a", options.get("conjugate_a", False), a),
        conjugate_b=_spec.check_conjugate(name, "conjugate_b", options.get("conjugate_b", False), b),
        alpha=_spec.check_scalar(name, "alpha", options.get("alpha", 1.0), out),
        precision=_spec.resolve_precision(name, options.get("precision")),
        implementation=options.get("implementation"),
        **(pattern or {}),
    )
    _spec.check_local_shapes(name, spec, a.shape[-2:], b.shape)
    shape = _result_shape(spec, a, b)
    beta = _spec.check_c(name, c, options.get("beta"), out, shape)
    epilog, bias = _spec.check_epilog(name, options.get("epilog", Epilog.NONE), epilog_inputs, out, shape[-1])
    operands = [a.astype(operand), b.astype(operand)]
    operands += [x.astype(out) for x in (c, bias) if x is not None]
    return spec.replace(beta=beta, epilog=epilog, has_c=c is not None), operands


def _result_shape(spec: MatmulSpec, a, b) -> tuple[int, ...]:
    return (*a.shape[:-2], *_spec.output_shape(spec, a.shape[-2:], b.shape))


def _result(outputs, spec: MatmulSpec):
    """What the user gets: d, or (d, {name: aux})."""
    aux = _epilog.rule(spec.epilog).aux
    return (outputs[0], {aux: outputs[1]}) if aux else outputs[0]


def _collective(name: str, pattern: Pattern, a, b, axis_names, c, epilog_inputs, options: dict):
    axes = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    mesh = _mesh.manual_mesh(name)
    if mesh is None:
        raise ValueError(f"{name}: works on the shards inside shard_map; outside, use jaxmp.matmul with out_sharding")
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(f"{name}: axis {axis!r} is not in the mesh, which has {tuple(mesh.axis_names)}")
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: axis names {axes} repeat")
    row_axes, col_axes = axes, ()
    if pattern == Pattern.GRID:
        if len(axes) != 2:
            raise ValueError(f"{name}: axis_names must be a pair, the axis of rows and the axis of columns, got {axes}")
        row_axes, col_axes = axes[:1], axes[1:]
    where = {"pattern": pattern, "mesh": tuple(mesh.shape.items()), "row_axes": row_axes, "col_axes": col_axes}
    spec, operands = _validated(name, a, b, c, epilog_inputs, options, where)
    return _result(_bind_shards(spec, a.ndim - 2, *operands), spec)


def _call(spec: MatmulSpec, placement: _mesh.Placement, operands) -> _Call:
    if placement.mode != _mesh.Mode.SHARDED:
        return _Call(spec.replace(mesh=placement.axes), placement.mode, constraint=placement.constraint)
    plan = _sharding.plan_call("matmul", placement.a, placement.b, placement.out, spec.transpose_a, spec.transpose_b)
    shape = _result_shape(spec, *operands[:2])
    mesh = placement.mesh
    for argument, dims, x in (("a", plan.a, operands[0].shape), ("b", plan.b, operands[1].shape), ("the result", plan.out, shape)):
        _sharding.check_dims("matmul", argument, dims, x, mesh.shape)
    in_specs = [plan.a, plan.b] + [plan.out] * spec.has_c + [plan.out[-1:]] * _epilog.rule(spec.epilog).has_bias
    out_specs = [plan.out] * (2 if _epilog.rule(spec.epilog).aux else 1)
    spec = spec.replace(pattern=plan.pattern, mesh=placement.axes, row_axes=plan.row_axes, col_axes=plan.col_axes)
    return _Call(
        spec, placement.mode, plan, mesh, _partition_specs(in_specs), _partition_specs(out_specs), placement.is_explicit
    )


def _partition_specs(dims) -> tuple[P, ...]:
    return tuple(P(*(dim or None for dim in entry)) for entry in dims)


@functools.partial(jax.jit, static_argnums=0)
def jaxmp_call(call: _Call, *operands):
    if call.mode == _mesh.Mode.MANUAL:
        return _bind_shards(call.spec, 0, *operands)
    if call.mode == _mesh.Mode.AUTO:
        outputs = _bind_shards(call.spec, 0, *operands, auto=True)
        if call.constraint is not None:
            outputs[0] = lax.with_sharding_constraint(outputs[0], call.constraint)
        return outputs
    operands = [_reshard(call, x, spec) for x, spec in zip(operands, call.in_specs, strict=True)]
    shard_map = functools.partial(jax.shard_map, mesh=call.mesh, out_specs=list(call.out_specs))
    if 0 in operands[0].shape[-2:] and 0 in operands[1].shape:
        # Nothing to contract. XLA cannot partition a body whose operands are all empty, so they stay out of it.
        whole = _result_shape(call.spec.replace(pattern=Pattern.LOCAL), *operands[:2])
        shape = NamedSharding(call.mesh, call.out_specs[0]).shard_shape(whole)
        body, rest = functools.partial(_bind_empty, call.spec, shape, operands[0].dtype), (jnp.zeros(()), *operands[2:])
        return shard_map(body, in_specs=(P(), *call.in_specs[2:]))(*rest)
    return shard_map(functools.partial(_bind_plan, call.plan, call.spec), in_specs=call.in_specs)(*operands)


def _reshard(call: _Call, x, spec: P):
    """Bring an explicit operand to the sharding of the plan: a slice, or the gather that was asked for."""
    if not call.is_explicit:
        return x
    have = jax.typeof(x).sharding
    if not have.mesh.empty and _normal(have.spec, x.ndim) == _normal(spec, x.ndim):
        return x
    with jax.named_scope("jaxmp_reshard"):
        return jax.sharding.reshard(x, NamedSharding(call.mesh, spec))


def _normal(spec: P, ndim: int) -> _sharding.Dims:
    return _sharding.to_dims("matmul", "operand", spec, ndim)


def _bind_plan(plan: _sharding.Plan, spec: MatmulSpec, a, b, *extra):
    """One device's part of a planned call: [d] or [d, aux]."""
    if not plan.is_swapped:
        return _bind_shards(spec, plan.dimension, a, b, *extra)
    # D = (op(b)^T @ op(a)^T)^T: the columns of D take the part that rows have in the pattern.
    rows, a, is_transposed = _flat_rows(spec, a)
    swapped = spec.bilinear(
        transpose_a=not spec.transpose_b,
        transpose_b=not is_transposed,
        conjugate_a=spec.conjugate_b,
        conjugate_b=spec.conjugate_a,
        out_dtype=_spec.accumulator(a.dtype),
        is_typed=_compat.is_vma_checked(),
    )
    z = bind(swapped, b, a)[0].T
    extra = [x.reshape(z.shape) if x.ndim > 1 else x for x in extra]
    outputs = _xla.apply_epilog(z, extra, spec.replace(alpha=1.0))
    return [x.reshape(*rows, x.shape[-1]) for x in outputs]


def _flat_rows(spec: MatmulSpec, a):
    """(row extents, a as a matrix, whether it is stored transposed); leading dimensions fold into rows."""
    if a.ndim == 2:
        return (a.shape[1 if spec.transpose_a else 0],), a, spec.transpose_a
    if spec.transpose_a:
        a = a.swapaxes(-1, -2)
    return a.shape[:-1], a.reshape(-1, a.shape[-1]), False


def _bind_empty(spec: MatmulSpec, shape, dtype, _, *extra):
    """The epilog of a sum over nothing."""
    z = jnp.zeros((math.prod(shape[:-1]), shape[-1]), _spec.accumulator(dtype))
    extra = [x.reshape(z.shape) if x.ndim > 1 else x for x in extra]
    return [x.reshape(*shape[:-1], x.shape[-1]) for x in _xla.apply_epilog(z, extra, spec)]


def _bind_shards(spec: MatmulSpec, dimension: int, a, b, *extra, auto: bool = False):
    """[d] or [d, aux] from shards of any rank; `dimension` of a is the one gathered or scattered."""
    spec = spec.replace(is_typed=_compat.is_vma_checked())
    c = extra[0] if spec.has_c else None
    bias = extra[-1] if _epilog.rule(spec.epilog).has_bias else None
    if a.ndim == 2:
        outputs = bind(spec, a, b, c, bias, auto=auto)
        return [x for x in outputs if x is not None]
    if spec.transpose_a:
        a, spec = a.swapaxes(-1, -2), spec.replace(transpose_a=False)
    ordered = spec.pattern in (Pattern.ALL_GATHER, Pattern.REDUCE_SCATTER)
    shape, lead = a.shape[:-1], dimension if ordered else 0
    batch, rows = math.prod(shape[:lead]), math.prod(shape[lead:])
    if c is not None:
        c = c.reshape(batch, -1, c.shape[-1])
    outputs = bind_rows(spec, a.reshape(batch, rows, a.shape[-1]), b, c, bias, auto=auto)
    shape = list(shape)
    if ordered:
        shape[lead] = _spec.output_rows(spec, shape[lead])
    return [x.reshape(*shape, x.shape[-1]) for x in outputs if x is not None]
