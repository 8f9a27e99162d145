"""The primitives of products: their meaning, how to bind them, and the types of their results.

matmul_p(a, b, *operands; spec)     d = epilog(alpha * op(a) @ op(b) + beta * c) on the shards of one device, and the
                                    further results of the epilog; `matmul_spec` names operands and results. Bilinear
                                    without C and epilog. All arrays have spec.batch more dimensions in front
                                    (`batching`). If spec.group is unsettled, a and b are global arrays, and XLA's
                                    partitioner chooses the pattern (`partitioner`).
partitioned_matmul_p                the same for an unsettled spec. It is a primitive of its own because its lowering
                                    needs the devices of the mesh, and JAX looks for that per primitive.
activation_grad_p(aux, t)           t * act'(z), linear in t. It reads the packed aux, so that aux itself is the
                                    residual. In the library's arithmetic if the level asks for it.
activated_matmul_p(t, [tbias], aux, w)  (act'(z) * (t + tbias)) @ w, linear in t and tbias: the tangent of two layers.
                                    Its transpose is one call with a derivative as its epilog.

`jaxmp/_src/core/registration.py` registers the rules.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._src.core.primitive import bias_grad, collectives
from jaxmp._src.core.primitive.collectives import cast_varying
from jaxmp._src.core.primitive.grouped import GROUPED
from jaxmp._src.core.spec import low_precision
from jaxmp._src.core.spec.extents import AMAXES, SPANS, axes_text, check_local_shapes, extents, output_rows, result_type
from jaxmp._src.core.spec.matmul_spec import Group, MatmulSpec, ScaleModes
from jaxmp._src.core.spec.refusal import InvalidValue, naming
from jaxmp._src.platform.jax_internals import jax_compat, jax_lowering, jax_tracing
from jaxmp._src.platform.runtime import native
from jaxmp._src.platform.runtime.types import Aval, Operands, Shape

_CORE = os.path.join(jax_compat.PACKAGE, "_src", "core", "")

matmul_p = jax_compat.make_primitive("jaxmp_matmul", multiple_results=True)
partitioned_matmul_p = jax_compat.make_primitive("jaxmp_partitioned_matmul", multiple_results=True)
activation_grad_p = jax_compat.make_primitive("jaxmp_activation_grad", multiple_results=False)
activated_matmul_p = jax_compat.make_primitive("jaxmp_activated_matmul", multiple_results=False)

MATMULS = (matmul_p, partitioned_matmul_p)
PRODUCTS = (*MATMULS, activated_matmul_p)


def dots_saveable(primitive: jax_compat.Primitive, *args: Any, **params: Any) -> bool:
    """A policy for `jax.checkpoint`: keep the results of products, jaxmp's and JAX's, and recompute the rest.

    `jax.checkpoint_policies.dots_saveable` keeps them too, except for products of groups of rows.

    Args:
      primitive, args, params: the equation that `jax.checkpoint` asks about.

    Returns:
      True if the results of this primitive are kept.

    >>> import jax, jax.numpy as jnp, jaxmp
    >>> layer = jax.checkpoint(lambda x, w: jnp.sin(jaxmp.matmul(x, w)), policy=jaxmp.dots_saveable)
    >>> jax.grad(lambda w: layer(jnp.ones((2, 3)), w).sum())(jnp.zeros((3, 1))).tolist()
    [[2.0], [2.0], [2.0]]
    """
    is_ours = primitive in PRODUCTS or primitive in GROUPED
    return is_ours or bool(jax.checkpoint_policies.dots_saveable(primitive, *args, **params))


def saves_products(policy: Callable[..., Any], primitive: jax_compat.Primitive, *args: Any, **params: Any) -> Any:
    """Returns a checkpoint policy's answer about a primitive; products, except of groups, are shown as
    `lax.dot_general`."""
    if primitive not in PRODUCTS:
        return policy(primitive, *args, **params)
    front = params["spec"].batch
    batch = (*range(front),), (*range(front),)
    contract = (front + 1,), (front,)
    as_dot = {"precision": None, "preferred_element_type": None, "out_sharding": None}
    return policy(lax.dot_general_p, *args[:2], dimension_numbers=(contract, batch), **as_dot)


def bind(spec: MatmulSpec, a: jax.Array, b: jax.Array, extra: Operands | None = None) -> Operands:
    """Binds a product of 2-D shards or batches; returns its results by name. `extra`: the operands after a and b."""
    return bind_named(spec, {**(extra or {}), "a": a, "b": b})


def bind_named(spec: MatmulSpec, operands: Operands) -> Operands:
    """Binds a product with all its operands by name, and returns its results by name. Other names are ignored."""
    outputs = bind_operands(spec, *map(operands.__getitem__, spec.names))
    return dict(zip(spec.output_names, outputs, strict=True))


def bind_operands(spec: MatmulSpec, *operands: jax.Array) -> list[jax.Array]:
    """Binds a product with its operands in the order of `spec.names`, and returns its results in the order of
    `spec.output_names`. Binds `partitioned_matmul_p` for an unsettled spec, except for a batch that is not asked of a
    library. Has JAX note that the lowering needs the devices if `needs_devices`. Converts operands that
    `_lacks_kernel`."""
    if _lacks_kernel(spec, *operands[:2]):
        return _bind_in_bfloat16(spec, *operands)
    is_of_xla = spec.batch and not spec.asked_of_library
    primitive = partitioned_matmul_p if spec.is_unsettled and not is_of_xla else matmul_p
    if needs_devices(spec):  # before the lowering, because JAX looks for it there
        jax_lowering.require_devices([primitive])
    return primitive.bind(*operands, spec=spec)


def _lacks_kernel(spec: MatmulSpec, a: jax.Array, b: jax.Array) -> bool:
    """True if shards of float8 without scales have extents that no kernel takes, and the caller asked for no library.
    The whole operands may have extents that kernels take."""
    is_float8 = all(map(low_precision.is_scaled, (a.dtype, b.dtype)))
    if not is_float8 or spec.implementation is not None or spec.scales != ScaleModes():
        return False
    found = check_local_shapes(spec, a.shape[spec.batch :], b.shape[spec.batch :])
    return any(extent % 16 for extent in found.local)


def _bind_in_bfloat16(spec: MatmulSpec, *operands: jax.Array) -> list[jax.Array]:
    """Binds a product of float8 as one of bfloat16, which holds all their numbers. JAX converts the results."""
    out = spec.out_dtype if spec.out_dtype == jnp.bfloat16 else np.dtype(np.float32)
    types = {"a": jnp.bfloat16, "b": jnp.bfloat16, "c": out, "bias": out}
    types |= {"d": spec.out_dtype, "gelu_aux": spec.aux_dtype or spec.out_dtype}

    def converted(names: Sequence[str], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return [x.astype(types.get(name, x.dtype)) for name, x in zip(names, arrays, strict=True)]

    plain = spec.replace(out_dtype=out, c_dtype=None, bias_dtype=None, aux_dtype=None)
    return converted(spec.output_names, bind_operands(plain, *converted(spec.names, operands)))


def needs_devices(spec: MatmulSpec) -> bool:
    """True if a call may need a cuBLASMp communicator in this process, which is tied to its devices. False without GPUs
    and if all calls are local: on one rank, and in a fixed order of sums."""
    is_local = spec.fixed_reduction_order or (spec.group.nranks == 1 and not spec.is_unsettled)
    return not is_local and native.has_cuda_devices()


def bind_rows(spec: MatmulSpec, operands: Operands, dimension: int = 1) -> Operands:
    """Binds a product and folds the leading dimensions of a, and of operands with d's rows, into the rows of one call.
    Returns the results by name, unfolded. An a that is stored transposed is transposed first. `dimension`: the
    dimension of a that is gathered or scattered, if any. A rank's part is contiguous in the rows of a call, so the rank
    comes before the dimensions in front of it: (P, batch, m/P)."""
    a, b = operands["a"], operands["b"]
    if spec.transpose_a:
        a, spec = jnp.swapaxes(a, -1, -2), spec.replace(transpose_a=False)
    shape, p, scatters, gathers = a.shape[:-1], spec.group.nranks, spec.contraction.scatters, spec.contraction.gathers
    ahead = dimension if scatters or gathers else 0
    of_a, of_d = (len(shape), ahead, p if scatters else 1), (len(shape), ahead, p if gathers else 1)
    if scatters:
        check_local_shapes(spec, (math.prod(shape[ahead:]), a.shape[-1]), b.shape)
    extra = {
        name: fold_rows(x, *of_d) if has_rows(name) else x for name, x in operands.items() if name not in ("a", "b")
    }
    if not low_precision.is_of_tensor(spec.scales.a):
        extra["scale_a"] = fold_rows(extra["scale_a"], *of_a)
    outputs = bind_named(spec, extra | {"a": fold_rows(a, *of_a), "b": b})
    shape = (*shape[:ahead], output_rows(spec, shape[ahead]), *shape[ahead + 1 :]) if scatters or gathers else shape
    return {name: unfold_rows(x, shape, *of_d[1:]) if has_rows(name) else x for name, x in outputs.items()}


def fold_rows(x: jax.Array, ndim: int, ahead: int, nranks: int) -> jax.Array:
    """Merges the first `ndim` dimensions of `x` into one. If `nranks` ranks share dimension number `ahead`, the rank is
    the slowest index of the result."""
    shape, rest = x.shape[:ndim], x.shape[ndim:]
    rows, batch = math.prod(shape), math.prod(shape[:ahead])
    if nranks > 1 and batch > 1:
        x = jnp.swapaxes(x.reshape(batch, nranks, rows // (batch * nranks), *rest), 0, 1)
    return x.reshape(rows, *rest)  # not -1: reshape cannot infer the rows of an array without columns


def unfold_rows(x: jax.Array, shape: Shape, ahead: int, nranks: int) -> jax.Array:
    """Inverts `fold_rows`: splits the first dimension of `x` (2-D) into the dimensions `shape`."""
    batch = math.prod(shape[:ahead])
    if nranks > 1 and batch > 1:
        x = jnp.swapaxes(x.reshape(nranks, batch, math.prod(shape) // (batch * nranks), x.shape[-1]), 0, 1)
    return x.reshape(*shape, x.shape[-1])


def has_rows(name: str) -> bool:
    """True if an operand or result has d's rows and columns, so that leading dimensions fold into its rows."""
    return len(SPANS.get(name, ())) == 2


def global_amax(spec: MatmulSpec, outputs: Operands, axes: tuple[str, ...]) -> Operands:
    """Replaces the largest absolute values in `outputs` by their maxima over `axes`, as constants; cuBLASMp returns one
    per rank. Under check_vma it omits axes that they do not vary over."""
    amaxes = {name: lax.stop_gradient(outputs[name]) for name in spec.output_names if name in AMAXES}
    for name, amax in amaxes.items():
        unequal = tuple(
            axis for axis in axes if axis in jax_compat.varying_axes(amax) or not jax_compat.is_vma_checked()
        )
        if unequal:  # as bits: nonnegative floats have the order of their bits with NaN last; a float pmax may lose NaN
            with jax.named_scope("jaxmp_amax"):
                bits = lax.bitcast_convert_type(jnp.abs(amax), jnp.int32)
                bits = collectives.pmax(bits, unequal, source_line=spec.source_line)
                amaxes[name] = lax.bitcast_convert_type(bits, jnp.float32)
    return outputs | amaxes


def completes_sums(spec: MatmulSpec) -> bool:
    """True if the kernel may reduce the bias gradient across ranks: "host" always (also as the default in a job of one
    process), others on one rank or if the order of sums is not fixed. In a fixed order they gather operands, and every
    rank would reduce it again."""
    is_host = spec.implementation == "host" or (spec.implementation is None and jax.process_count() == 1)
    return is_host or not spec.fixed_reduction_order or spec.group.nranks == 1


# Rules ----------------------------------------------------------------------------------------------------------

Rule = Callable[..., Any]


def is_own_jit(eqn: Any) -> bool:
    """True if an equation is the `jit` or `shard_map` of a function in jaxmp's core. A user's may have any name."""
    return jax_tracing.source_file(eqn).startswith(_CORE)


def by_batch(one: Rule, of_batch: Rule) -> Rule:
    """Returns a rule: `one` for a product, `of_batch` for a batch, with a spec that has one batch dimension less."""

    def rule(*args: Any, spec: MatmulSpec) -> Any:
        return of_batch(*args, spec=spec.replace(batch=spec.batch - 1)) if spec.batch else one(*args, spec=spec)

    return rule


def over_batch(fn: Callable[..., Any], ndim: int) -> Callable[..., Any]:
    """Maps `fn` over the first `ndim` dimensions of its operands."""
    return functools.reduce(lambda mapped, _: jax.vmap(mapped), range(ndim), fn)


def of_one_index(spec: MatmulSpec, *avals: Aval) -> tuple[Aval, ...]:
    """Returns the types of the operands without their batch dimensions."""
    for _ in range(spec.batch):
        avals = tuple(map(jax_compat.without_first_dimension, avals))
    return avals


def naming_by_spec(rule: Rule) -> Rule:
    """Returns `rule` with the name of the public function (`spec.function`, "matmul" without a spec) added to refusals,
    because the rule may run after that function has returned."""

    @functools.wraps(rule)
    def named(*args: Any, spec: MatmulSpec | None, **params: Any) -> Any:
        with naming("matmul" if spec is None else spec.function):
            return rule(*args, spec=spec, **params)

    return named


# Abstract evaluation -------------------------------------------------------------------------------------------


def _output_varying(spec: MatmulSpec, a: Aval, b: Aval, extra: Sequence[Aval] = ()) -> frozenset[str]:
    """Returns the axes that d varies over in shard_map: axes of a and b without the axes of an all-reduce, axes that
    shard d, and axes of `extra`, the types of c and epilog inputs. Raises ValueError if `extra` varies over axes of an
    all-reduce. If operands vary over fewer axes, their transposes sum. Without check_vma, returns axes of a and b."""
    scattered = frozenset(sum(spec.contraction.layout.d, ()))
    summed = frozenset(spec.group.axes) - scattered
    product = a.manual_axis_type.varying | b.manual_axis_type.varying
    if not spec.is_typed:
        return frozenset(product)
    product = product - summed | scattered
    for x in extra:
        added = x.manual_axis_type.varying
        if added & summed:
            raise InvalidValue(
                "c and epilog inputs must be equal on every rank of axis "
                f"{axes_text(spec.group.axes)}, but one varies over {sorted(added & summed)}; "
                "add it after the call, or reduce it first"
            )
        product = product | added
    return frozenset(product)


def output_aval(spec: MatmulSpec, a: Aval, b: Aval, extra: Sequence[Aval] = ()) -> Aval:
    varying = _output_varying(spec, a, b, extra)
    found = check_local_shapes(spec, a.shape, b.shape)
    if low_precision.is_scaled(low_precision.operand_type(a.dtype, b.dtype)):
        m, k, _, n = found.local
        low_precision.check_units(a.dtype, spec.scales.a, spec.scales.b, {"m": m, "n": n, "k": k})
    return jax_compat.with_shape(a, found.d, spec.out_dtype, varying, b)


def matmul_abstract_eval(a: Aval, b: Aval, *extra: Aval, spec: MatmulSpec) -> list[Aval]:
    # Scales of blocks vary like their operands.
    named = zip(spec.operand_names, extra, strict=True)
    d = output_aval(spec, a, b, [x for name, x in named if name not in ("scale_a", "scale_b") or x.ndim == 0])
    return [d, *[_result_aval(name, spec, a, b, d) for name in spec.output_names[1:]]]


def _result_aval(name: str, spec: MatmulSpec, a: Aval, b: Aval, d: Aval) -> Aval:
    """Returns the type of a result other than d. Bias gradients are complete: equal on all ranks that share a sum."""
    found = result_type(name, spec, extents(spec, a.shape, b.shape))
    axes, of = spec.contraction.sharded, bias_grad.summed(name)
    shared = {"a": spec.group.axes, "b": axes("b", "k"), "d": axes("d", "m"), "": ()}[of]
    varying = {"a": a, "b": b}.get(of, d).manual_axis_type.varying - frozenset(shared)
    return jax_compat.with_shape(d, found.shape, found.dtype, varying)


def activation_grad(activation: str, aux: jax.Array, t: jax.Array, spec: MatmulSpec | None = None) -> jax.Array:
    """Returns `t * act'(z)` from the aux result of the forward call. `spec`: the spec of that call. The library
    computes gelu's if the order of sums is fixed, otherwise XLA does."""
    axes = jax_compat.varying_axes(aux) | jax_compat.varying_axes(t)
    aux, t = cast_varying(aux, axes), cast_varying(t, axes)
    # A relu mask only selects. A gelu slope is arithmetic, which XLA may fuse with surrounding operations.
    kept = None
    if spec is not None and spec.fixed_reduction_order and activation == "gelu":
        group = spec.group if spec.is_unsettled else Group()
        kept = spec.plain(t.dtype, group)
    return activation_grad_p.bind(aux, t, activation=activation, spec=kept)


def activated_matmul(
    spec: MatmulSpec, activation: str, t: jax.Array, aux: jax.Array, w: jax.Array, *, tbias: jax.Array | None
) -> jax.Array:
    """Returns `(act'(z) * (t + tbias)) @ w` of 2-D shards in the pattern of `spec`; tbias has shape (columns of t,)."""
    # Vary over the axes of w too, so that the transpose sums over exactly the axes of these casts.
    axes = jax_compat.varying_axes(aux) | jax_compat.varying_axes(t) | jax_compat.varying_axes(w)
    axes = axes if tbias is None else axes | jax_compat.varying_axes(tbias)
    t, aux = cast_varying(t, axes), cast_varying(aux, axes)
    bias = () if tbias is None else (cast_varying(tbias, axes - summed_over(spec)),)
    return activated_matmul_p.bind(t, *bias, aux, w, spec=spec, activation=activation)


def summed_over(spec: MatmulSpec) -> frozenset[str]:
    """Returns the axes that the transpose of `activated_matmul` sums for the bias cotangent: of a grid the rows."""
    return frozenset(spec.group.row_axes if spec.contraction.is_grid else ())


def activated_matmul_parts(t: jax.Array, *rest: jax.Array, spec: MatmulSpec, activation: str) -> jax.Array:
    """Computes `activated_matmul` as an activation gradient and a product. `rest`: ([tbias], aux, w)."""
    *bias, aux, w = rest
    t = t + bias[0][None, :] if bias else t
    return bind(spec, activation_grad(activation, aux, t, spec), w)["d"]
