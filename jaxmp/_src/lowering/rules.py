"""From a spec to one custom call, to several with what comes around them, or to the "xla" implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._src.lowering import backend, fixed_shape, process_barrier, xla_matmul
from jaxmp._src.lowering.ffi_call import custom_call
from jaxmp._src.lowering.legalize import Capabilities, find_route, without_conjugation
from jaxmp._src.primitive import batched_matmul, bias_grad, collectives
from jaxmp._src.primitive.collectives import process_barrier_p
from jaxmp._src.primitive.primitives import (
    AMAXES,
    activated_matmul_p,
    activated_matmul_parts,
    activation_grad_p,
    amax_of_ranks,
    batched_matmul_epilog_p,
    batched_matmul_p,
    has_rows,
    matmul_epilog_p,
    matmul_p,
)
from jaxmp._src.runtime import jax_compat, native
from jaxmp._src.runtime.jax_compat import mlir
from jaxmp._src.spec import epilogs
from jaxmp._src.spec.activations import multiply_by_slope
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import (
    MatmulSpec,
    Pattern,
    accumulator,
    axes_text,
    operand_names,
    operations,
    output_names,
    output_shape,
)
from jaxmp._src.validation.comm_options import fit_hints
from jaxmp._src.validation.operand_checks import check_gathered_scales


def _fused_matmul(a, b, *extra, spec: MatmulSpec, capabilities: Capabilities, devices: tuple[int, ...] = ()):
    """The results through the custom call, in the forms that the library takes; `devices` as in `call_attributes`."""
    if epilogs.rule(spec.epilog).gradient and 0 in output_shape(spec, a.shape, b.shape):
        # Nothing to multiply, but sums to be written.
        return xla_matmul.matmul(a, b, *extra, spec=spec, platform="cpu")
    asked, spec = spec, without_conjugation(spec)
    a = lax.conj(a) if asked.conjugate_a and not spec.conjugate_a else a
    b = lax.conj(b) if asked.conjugate_b and not spec.conjugate_b else b
    kind = find_route(spec, a.shape, b.shape, a.dtype.itemsize, capabilities).kind
    if kind == "fixed_chunks":
        return _in_chunks(a, b, *extra, spec=spec, capabilities=capabilities)
    if kind == "transposed_copy":
        a, b = (a.T if spec.transpose_a else a), (b if spec.transpose_b else b.T)
        # What a transposition also conjugated still has to be.
        a = lax.conj(a) if spec.conjugate_a else a
        spec = spec.replace(transpose_a=False, transpose_b=True, conjugate_a=False)
    elif kind == "padded_k":
        a, b = fixed_shape.padded_along_k(a, b, spec)
        return _fused_matmul(a, b, *extra, spec=spec, capabilities=capabilities, devices=devices)
    elif kind == "reduce_scatter_all_gather":
        return _scatter_then_gather(a, b, *extra, spec=spec, devices=devices)
    elif kind == "separate_epilog":
        plain = spec.bilinear(out_dtype=accumulator(a.dtype), scale_a=spec.scale_a, scale_b=spec.scale_b)
        named = dict(zip(operand_names(spec), extra, strict=True))
        scales = (named[name] for name in operand_names(plain))
        z = _fused_matmul(a, b, *scales, spec=plain, capabilities=capabilities, devices=devices)[0]
        return xla_matmul.apply_epilog(z, extra, spec.replace(alpha=1.0), a, b)
    return custom_call(a, b, *extra, spec=spec, devices=devices)


def _in_chunks(a, b, *extra, spec: MatmulSpec, capabilities: Capabilities):
    """The results by local calls of one shape, of what this rank has gathered for its part of D."""
    if spec.pattern != Pattern.LOCAL:
        return _gathered_matmul(a, b, *extra, spec=spec, capabilities=capabilities)
    call = functools.partial(_fused_matmul, capabilities=capabilities)
    with jax.named_scope(f"jaxmp {spec.determinism} by calls of one shape"):
        return fixed_shape.matmul(a, b, *extra, spec=spec, call=call)


def _scatter_then_gather(a, b, *extra, spec: MatmulSpec, devices: tuple[int, ...]):
    """An all-reduced product as a reduce-scattered one whose rows are then gathered."""
    # What has rows is cut as the scattered rows are.
    extra = tuple(
        collectives.own_part(x, 0, spec.row_axes) if has_rows(name) else x
        for name, x in zip(operand_names(spec), extra, strict=True)
    )
    outputs = custom_call(a, b, *extra, spec=spec.replace(pattern=Pattern.REDUCE_SCATTER), devices=devices)
    return [
        lax.all_gather(x, spec.row_axes, axis=0, tiled=True)
        if has_rows(name)
        else (amax_of_ranks(x, spec.row_axes) if name in AMAXES else x)
        for name, x in zip(output_names(spec), outputs, strict=True)
    ]


def _gathered_matmul(a, b, *extra, spec: MatmulSpec, capabilities: Capabilities):
    """The results where bits are promised and the ranks of a group do not share a call: what this rank's part of D
    needs is gathered, and local calls make it. XLA's own products promise nothing."""
    local = fit_hints(spec.local())
    # Over these axes the ranks have other rows of D.
    axes = spec.row_axes if spec.pattern in (Pattern.REDUCE_SCATTER, Pattern.GRID) else ()
    gradient = epilogs.rule(spec.epilog).gradient
    if bias_grad.summed(gradient) == "d" and spec.axis_size(axes) > 1:
        raise NotImplementedError(
            f"determinism={spec.determinism!r} has no epilog {spec.epilog.name} where operands are gathered and the "
            f"rows of the result lie over {axes_text(axes)}, for XLA would complete {gradient}; take the gradient of a "
            "bias, or pass another level"
        )
    if spec.nranks > 1:
        check_gathered_scales("matmul", spec, f"where operands are gathered over {spec.nranks} ranks")
        a, b = xla_matmul.gather_for_part(spec, a, b)
    outputs = _fused_matmul(a, b, *extra, spec=local, capabilities=capabilities)
    if gradient != "bgrada" or not axes:
        return outputs
    return [
        lax.all_gather(x, axes, axis=0, tiled=True) if name == gradient else x
        for name, x in zip(output_names(spec), outputs, strict=True)
    ]


def _activation_grad(aux, t, *, activation: str, spec: MatmulSpec | None, platform: str):
    if spec is None:
        return multiply_by_slope(activation, aux, t)
    choice = backend.choose_implementation(spec, platform, 1, (t.dtype, t.dtype))
    capabilities = backend.capabilities_of(choice.implementation)
    # The derivative epilog of a product over nothing, with t as its C: -0 * 0 is -0, and -0 + t is t, also for t = -0.
    changes = {"epilog": Epilog.DGELU, "alpha": -0.0, "beta": 1.0, "has_c": True}
    spec = spec.replace(implementation=choice.implementation, **changes)
    a, b = jnp.zeros((t.shape[0], 0), t.dtype), jnp.zeros((0, t.shape[1]), t.dtype)
    return _fused_matmul(a, b, t, aux, spec=spec, capabilities=capabilities)[0]


def _rule(platform: str, is_multiple: bool):
    def rule(ctx, *nodes, spec: MatmulSpec):
        mesh = jax_compat.lowering_mesh(ctx)
        nprocesses = process_barrier.group_processes(spec, mesh)
        choice = backend.choose_implementation(
            spec, platform, nprocesses, tuple(aval.dtype for aval in ctx.avals_in[:2])
        )
        capabilities = functools.partial(backend.capabilities_of, choice.implementation)  # "xla" does without a library
        devices = _devices_of(spec, mesh) if choice.implementation == "cublasmp" else ()
        is_barred = platform == "cpu" and choice.implementation != "host"
        site = process_barrier.site(ctx, spec.mesh, spec.group_axes) if is_barred else None

        def lower(a, b, *extra):
            if choice.implementation == "host":
                outputs = _fused_matmul(a, b, *extra, spec=spec, capabilities=capabilities())
            elif choice.implementation == "cublasmp" and (spec.is_invariant or 0 not in (*a.shape, *b.shape)):
                chosen = spec.replace(implementation="cublasmp")
                outputs = _fused_matmul(a, b, *extra, spec=chosen, capabilities=capabilities(), devices=devices)
            elif spec.is_invariant:
                if site:
                    a, b = _barrier(site, spec, a, b, [a, b])
                outputs = _gathered_matmul(a, b, *extra, spec=spec, capabilities=capabilities())
            else:
                local_product = _host_product if choice.implementation == "host+xla" else None
                ahead = functools.partial(_barrier, site, spec, a, b) if site else None
                outputs = xla_matmul.matmul(
                    a, b, *extra, spec=spec, platform=platform, local_product=local_product, ahead=ahead
                )
            return outputs if is_multiple else outputs[0]

        with jax_compat.off_explicit_mesh():
            return mlir.lower_fun(lower, multiple_results=is_multiple)(ctx, *nodes)

    return rule


def _batched_rule(platform: str, primitive):
    one, is_multiple = batched_matmul.ONE[primitive], primitive.multiple_results

    def rule(ctx, *nodes, spec: MatmulSpec):
        a, b = (jax_compat.without_front(aval) for aval in ctx.avals_in[:2])
        nprocesses = process_barrier.group_processes(spec, jax_compat.lowering_mesh(ctx))
        work = operations(spec, a.shape, b.shape)
        _, is_one_product = backend.choose_for_batch(spec, platform, nprocesses, (a.dtype, b.dtype), work)

        site = process_barrier.site(ctx, spec.mesh, spec.group_axes) if platform == "cpu" and is_one_product else None

        def lower(*operands):
            if not is_one_product:
                return lax.map(lambda each: one.bind(*each, spec=spec), operands)
            if site:
                a, b, *rest = operands
                fields = {"batch": a.shape[0]}
                operands = (*_barrier(site, spec, a[0], b[0], [a, b], fields), *rest)
            outputs = jax.vmap(functools.partial(xla_matmul.matmul, spec=spec, platform=platform))(*operands)
            return outputs if is_multiple else outputs[0]

        with jax_compat.off_explicit_mesh():
            return mlir.lower_fun(lower, multiple_results=is_multiple)(ctx, *nodes)

    return rule


def _barrier(site: process_barrier.Site, spec: MatmulSpec, a, b, operands, fields: Mapping[str, Any] | None = None):
    """`operands` once every process of the group has come to a call of this spec on shards like `a` and `b`; `fields`
    have to be equal too."""
    return site.barrier(spec.line or "matmul", {**(fields or {}), **process_barrier.fields(spec, a, b)}, operands)


def _process_barrier_rule(ctx, x, *, mesh, axes: tuple[str, ...], call: str, is_active: bool):
    site = process_barrier.site(ctx, mesh, axes) if is_active else None
    if site is None:
        return [x]

    def lower(x):
        fields = {"shape of a shard": x.shape, "dtype": x.dtype.name, "axes": axes, "mesh": mesh}
        return site.barrier(call, fields, [x])[0]

    with jax_compat.off_explicit_mesh():
        return mlir.lower_fun(lower, multiple_results=False)(ctx, x)


def _devices_of(spec: MatmulSpec, mesh) -> tuple[int, ...]:
    """The devices of a call that is to run in this process, for which alone its lowering serves from now on.

    Under a level of determinism cuBLASMp's calls are local ones.
    """
    if spec.nranks == 1 or spec.is_invariant or not native.cuda_devices():
        return ()
    devices = process_barrier.mesh_devices(spec, mesh)
    if devices:
        jax_compat.require_devices((matmul_p, matmul_epilog_p, batched_matmul_p, batched_matmul_epilog_p))
    return devices


def _host_product(a, b, spec: MatmulSpec):
    """One device's product in the accumulator's type, through the custom call."""
    local = MatmulSpec(
        accumulator(a.dtype),
        transpose_a=spec.transpose_a,
        transpose_b=spec.transpose_b,
        conjugate_a=spec.conjugate_a,
        conjugate_b=spec.conjugate_b,
        precision=spec.precision,
    )
    return _fused_matmul(a, b, spec=local, capabilities=backend.host_capabilities())[0]


def _register(primitive, rule_of: Callable) -> None:
    for platform in ("other", "cpu", "cuda"):
        mlir.register_lowering(primitive, rule_of(platform), platform=None if platform == "other" else platform)


def _activation_grad_rule(platform: str):
    return mlir.lower_fun(functools.partial(_activation_grad, platform=platform), multiple_results=False)


for _primitive in (matmul_p, matmul_epilog_p):
    _register(_primitive, functools.partial(_rule, is_multiple=_primitive.multiple_results))
for _primitive in (batched_matmul_p, batched_matmul_epilog_p):
    _register(_primitive, functools.partial(_batched_rule, primitive=_primitive))
_register(activation_grad_p, _activation_grad_rule)
mlir.register_lowering(process_barrier_p, lambda ctx, x, **_: [x])
mlir.register_lowering(process_barrier_p, _process_barrier_rule, platform="cpu")
mlir.register_lowering(activated_matmul_p, mlir.lower_fun(activated_matmul_parts, multiple_results=False))
