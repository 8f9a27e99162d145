"""From a spec to one custom call, or to the "xla" implementation.

The only place where row-major becomes column-major. A row-major matrix read as column-major is its transpose,
and D = op(A) @ op(B) is D^T = op(B)^T @ op(A)^T, so the operands swap, m and n swap, and transposition flags stay:
JAX's b (k, n) is cuBLASMp's A (n x k, "N"), its a (m, k) is cuBLASMp's B (k x m, "N"), and d (m, n) is D (n x m).
A grid swaps its two directions for the same reason.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp import _bgrad, _choice, _chunks, _compat, _epilog, _layout, _narrow, _native, _precision, _processes, _xla
from jaxmp._activation import multiply_by_slope
from jaxmp._checks import check_gathered_scales
from jaxmp._compat import mlir
from jaxmp._epilog import Epilog
from jaxmp._hints import fit_hints
from jaxmp._primitive import (
    AMAXES,
    activated_matmul_p,
    activated_matmul_parts,
    activation_grad_p,
    has_rows,
    matmul_epilog_p,
    matmul_p,
)
from jaxmp._route import Capabilities, find_route
from jaxmp._spec import (
    DIMS,
    SCALE_NAMES,
    MatmulSpec,
    Pattern,
    accumulator,
    aux_dtype,
    axes_text,
    global_extents,
    operand_names,
    output_names,
    output_shape,
)

_DTYPES = {
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "float16": "f16",
    "complex64": "c64",
    "complex128": "c128",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "float4_e2m1fn": "f4e2m1",
    "int8": "s8",
    "int32": "s32",
}


def call_attributes(spec: MatmulSpec, a, b, devices: tuple[int, ...] = ()) -> dict:
    """Attributes of the custom call, in cuBLASMp's column-major terms; `a` and `b` are JAX's shards or their types.

    `devices` are the ids of the mesh's devices by their place in it, by which the call finds its communicator; empty
    where they are not known, and where no communicator spans them.
    """
    m, n, k = global_extents(spec, a.shape, b.shape)
    row = _epilog.rule(spec.epilog)
    out = _DTYPES[np.dtype(spec.out_dtype).name]
    names = [name for name, _ in spec.mesh]
    grid = spec.pattern == Pattern.GRID
    axes_row, axes_col = (spec.col_axes, spec.row_axes) if grid else (spec.row_axes, ())
    return {
        "pattern": spec.pattern.value,
        "m": np.int64(n),
        "n": np.int64(m),
        "k": np.int64(k),
        "trans_a": _transposition(spec.transpose_b, spec.conjugate_b),
        "trans_b": _transposition(spec.transpose_a, spec.conjugate_a),
        "dtype_a": _DTYPES[b.dtype.name],
        "dtype_b": _DTYPES[a.dtype.name],
        "dtype_c": _DTYPES[np.dtype(spec.c_dtype or spec.out_dtype).name] if spec.has_c else "none",
        "dtype_d": out,
        "dtype_bias": _DTYPES[np.dtype(spec.bias_dtype or spec.out_dtype).name]
        if row.has_bias or row.gradient
        else "none",
        "dtype_aux": {"": "none", "relu_aux": "u8", "gelu_aux": _DTYPES[aux_dtype(spec).name]}[
            row.aux or row.aux_input
        ],
        "compute": compute_of(spec, a.dtype).name,
        "alpha": _complex_pair(spec.alpha),
        "beta": _complex_pair(spec.beta),
        "scale_mode_a": spec.scale_b,
        "scale_mode_b": spec.scale_a,
        "scale_mode_c": spec.scale_c,
        "scale_mode_d": spec.scale_d,
        "scale_mode_aux": spec.scale_aux,
        "d_out_scale_mode": spec.d_out_scale,
        "amax_d": np.int64(spec.amax_d),
        "amax_aux": np.int64(spec.aux_amax),
        "epilog": np.int64(_epilog.SWAPPED.get(spec.epilog, spec.epilog)),
        "mesh_shape": np.array([size for _, size in spec.mesh], np.int64),
        "axes_row": np.array([names.index(axis) for axis in axes_row], np.int64),
        "axes_col": np.array([names.index(axis) for axis in axes_col], np.int64),
        "devices": np.array(devices, np.int64),
        "determinism": spec.determinism,
        "communication_dtype": _DTYPES[spec.communication_dtype] if spec.communication_dtype else "none",
        "algorithm": spec.algorithm,
        "comm_sm_count": np.int64(spec.comm_sm_count),
        **_layouts(spec),
    }


def compute_of(spec: MatmulSpec, operand) -> _precision.Compute:
    """How the custom call computes; `_choice` has let a sum in 16 bits pass only where it is ignored."""
    compute = _precision.find(spec.precision, operand)
    return _precision.full(operand) if compute.is_narrow else compute


def _layouts(spec: MatmulSpec) -> dict:
    """(mb, nb, rsrc, csrc) of A, B and D as stored, each pair turned round; empty where shards are contiguous."""
    a, b, d = (
        np.array([*x.layout.block[::-1], *x.layout.first[::-1]] if x else [], np.int64)
        for x in spec.cyclic or (None,) * 3
    )
    return {"layout_a": b, "layout_b": a, "layout_d": d}


def _transposition(is_transposed: bool, is_conjugated: bool) -> str:
    if is_transposed:
        return "C" if is_conjugated else "T"
    return "N"


def _complex_pair(value) -> np.ndarray:
    return np.array([complex(value).real, complex(value).imag], np.float64)


def without_conjugation(spec: MatmulSpec) -> MatmulSpec:
    """The spec less the conjugations that precede the call: cuBLASMp conjugates only what it transposes, and sums
    only what it does not conjugate."""
    return spec.replace(
        conjugate_a=spec.conjugate_a and spec.transpose_a and spec.epilog != Epilog.BGRADA,
        conjugate_b=spec.conjugate_b and spec.transpose_b,
    )


def _fused_matmul(a, b, *extra, spec: MatmulSpec, capabilities: Capabilities, devices: tuple[int, ...] = ()):
    """The results through the custom call, in the forms that the library takes; `devices` as in `call_attributes`."""
    if _epilog.rule(spec.epilog).gradient and 0 in output_shape(spec, a.shape, b.shape):
        # Nothing to multiply, but sums to be written.
        return _xla.matmul(a, b, *extra, spec=spec, platform="cpu")
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
        a, b = _chunks.padded_along_k(a, b, spec)
        return _fused_matmul(a, b, *extra, spec=spec, capabilities=capabilities, devices=devices)
    elif kind == "reduce_scatter_all_gather":
        return _scatter_then_gather(a, b, *extra, spec=spec, devices=devices)
    elif kind == "separate_epilog":
        plain = spec.bilinear(out_dtype=accumulator(a.dtype), scale_a=spec.scale_a, scale_b=spec.scale_b)
        named = dict(zip(operand_names(spec), extra, strict=True))
        scales = (named[name] for name in operand_names(plain))
        z = _fused_matmul(a, b, *scales, spec=plain, capabilities=capabilities, devices=devices)[0]
        return _xla.apply_epilog(z, extra, spec.replace(alpha=1.0), a, b)
    return _custom_call(a, b, *extra, spec=spec, devices=devices)


def _in_chunks(a, b, *extra, spec: MatmulSpec, capabilities: Capabilities):
    """The results by local calls of one shape, of what this rank has gathered for its part of D."""
    if spec.pattern != Pattern.LOCAL:
        return _gathered_matmul(a, b, *extra, spec=spec, capabilities=capabilities)
    call = functools.partial(_fused_matmul, capabilities=capabilities)
    with jax.named_scope(f"jaxmp {spec.determinism} by calls of one shape"):
        return _chunks.matmul(a, b, *extra, spec=spec, call=call)


def _scatter_then_gather(a, b, *extra, spec: MatmulSpec, devices: tuple[int, ...]):
    """An all-reduced product as a reduce-scattered one whose rows are then gathered."""
    # What has rows is cut as the scattered rows are.
    extra = tuple(
        _xla.own_part(x, 0, spec.row_axes) if has_rows(name) else x
        for name, x in zip(operand_names(spec), extra, strict=True)
    )
    outputs = _custom_call(a, b, *extra, spec=spec.replace(pattern=Pattern.REDUCE_SCATTER), devices=devices)
    return [
        lax.all_gather(x, spec.row_axes, axis=0, tiled=True)
        if has_rows(name)
        else (_narrow.amax_of_ranks(x, spec.row_axes) if name in AMAXES else x)
        for name, x in zip(output_names(spec), outputs, strict=True)
    ]


def _gathered_matmul(a, b, *extra, spec: MatmulSpec, capabilities: Capabilities):
    """The results where bits are promised and the ranks of a group do not share a call: what this rank's part of D
    needs is gathered, and local calls make it. XLA's own products promise nothing."""
    local = fit_hints(spec.replace(pattern=Pattern.LOCAL, mesh=(), row_axes=(), col_axes=()))
    # Over these axes the ranks have other rows of D.
    axes = spec.row_axes if spec.pattern in (Pattern.REDUCE_SCATTER, Pattern.GRID) else ()
    gradient = _epilog.rule(spec.epilog).gradient
    if _bgrad.summed(gradient) == "d" and spec.axis_size(axes) > 1:
        raise NotImplementedError(
            f"determinism={spec.determinism!r} has no epilog {spec.epilog.name} where operands are gathered and the "
            f"rows of the result lie over {axes_text(axes)}, for XLA would complete {gradient}; take the gradient of a "
            "bias, or pass another level"
        )
    if spec.nranks > 1:
        check_gathered_scales("matmul", spec, f"where operands are gathered over {spec.nranks} ranks")
        a, b = _xla.gather_for_part(spec, a, b)
    outputs = _fused_matmul(a, b, *extra, spec=local, capabilities=capabilities)
    if gradient != "bgrada" or not axes:
        return outputs
    return [
        lax.all_gather(x, axes, axis=0, tiled=True) if name == gradient else x
        for name, x in zip(output_names(spec), outputs, strict=True)
    ]


def _custom_call(a, b, *extra, spec: MatmulSpec, devices: tuple[int, ...] = ()):
    """The results of one custom call."""
    _native.register()
    if not all(isinstance(extent, int) for extent in (*a.shape, *b.shape)):
        raise NotImplementedError(
            f"matmul: the custom call takes numbers for extents, got operands of {a.shape} and {b.shape}; export for "
            'numbers, or pass implementation="xla"'
        )
    rows, cols = output_shape(spec, a.shape, b.shape)
    stored = {
        "d": jax.ShapeDtypeStruct((rows, cols), spec.out_dtype),
        "relu_aux": jax.ShapeDtypeStruct((rows, _layout.relu_aux_bytes(cols)), jnp.uint8),
        "gelu_aux": jax.ShapeDtypeStruct((rows, _layout.gelu_aux_ld(cols)), aux_dtype(spec)),
        **dict.fromkeys(AMAXES, jax.ShapeDtypeStruct((), jnp.float32)),
    }
    for name in output_names(spec):
        if DIMS[name] in ("m", "n"):
            size = cols if DIMS[name] == "n" else global_extents(spec, a.shape, b.shape)[0]
            stored[name] = jax.ShapeDtypeStruct((size,), spec.out_dtype)
    if np.dtype(spec.out_dtype).name == _narrow.FLOAT4:
        stored["d"] = jax.ShapeDtypeStruct((rows, cols // 2), jnp.uint8)
    blocks = cols // _narrow.BLOCK.get(spec.d_out_scale, 1)
    if spec.d_out_scale != _narrow.NONE:
        size = _layout.round_up(rows, 128) * _layout.round_up(blocks, 4)
        stored["d_out_scale"] = jax.ShapeDtypeStruct((size,), jnp.uint8)
    names = output_names(spec)
    named = dict(zip(operand_names(spec), extra, strict=True))
    operands = [_narrow.as_bytes(x) if x.dtype.name == _narrow.FLOAT4 else x for x in (b, a)]
    operands += [_as_stored(name, x) for name, x in named.items() if name not in SCALE_NAMES]
    for name in ("scale_b", "scale_a", "scale_c", "scale_d", "scale_aux"):  # a and b have swapped
        if name in named:
            operands.append(_narrow.for_library(named[name], getattr(spec, name)))
    if spec.nranks > 1:
        # Which device of the mesh this is: the call's own way to know its rank, on any device assignment.
        operands.append(lax.axis_index(tuple(name for name, _ in spec.mesh)).astype(jnp.int32))
    with jax.enable_x64(True), jax.named_scope(profile_name(spec, a, b)):  # attributes are 64-bit
        call = jax.ffi.ffi_call(_native.TARGET, [stored[name] for name in names], input_output_aliases=_aliases(spec))
        outputs = call(*operands, **call_attributes(spec, a, b, devices))
    if spec.cyclic:
        return [_xla.without_padding(spec, outputs[0])]  # the library leaves it alone
    final = {
        "d": lambda x: _narrow.from_bytes(x, spec.out_dtype) if x.dtype == jnp.uint8 else x,
        "gelu_aux": lambda x: x[:, :cols],
        "d_out_scale": lambda x: _narrow.from_bytes(
            _narrow.unswizzle(x, rows, blocks), _narrow.scale_dtype(spec.d_out_scale)
        ),
    }
    return [final.get(name, lambda x: x)(x) for name, x in zip(names, outputs, strict=True)]


def profile_name(spec: MatmulSpec, a, b) -> str:
    """The range of a call in profiles and in HLO metadata: pattern, global m x k x n, types, level, kernel."""
    m, n, k = global_extents(spec, a.shape, b.shape)
    types = f"{_DTYPES[a.dtype.name]}*{_DTYPES[b.dtype.name]}->{_DTYPES[np.dtype(spec.out_dtype).name]}"
    if spec.implementation == "cublasmp":
        kernel = "cuBLASMp"
    else:
        kernel = "one order of sums" if spec.is_invariant else _native.kernel_of(_DTYPES[a.dtype.name])
    return f"jaxmp {spec.pattern.value} {m}x{k}x{n} {types} {spec.determinism} ({kernel})"


def _as_stored(name: str, x):
    """A gelu_aux input with its rows padded as cuBLASLt wants them."""
    if name != "gelu_aux":
        return x
    return jnp.pad(x, ((0, 0), (0, _layout.gelu_aux_ld(x.shape[1]) - x.shape[1])))


def _aliases(spec: MatmulSpec) -> dict[int, int]:
    """D takes the memory of C, so c that is donated, carried by a loop or not used again is updated in place.

    XLA copies c ahead of the call where it is used again or was not donated, and without the alias it copies D after
    the call where c was donated: one pass over D in either case. Those who add to a large C mostly accumulate, so the
    side that saves the memory as well is the better one.
    """
    if not spec.has_c or spec.beta == 0:  # C that is not read is not worth a copy
        return {}
    if np.dtype(spec.c_dtype or spec.out_dtype) != np.dtype(spec.out_dtype):  # C of a float8 result is wider than it
        return {}
    return {2 + operand_names(spec).index("c"): 0}


def _activation_grad(aux, t, *, activation: str, spec: MatmulSpec | None, platform: str):
    if spec is None:
        return multiply_by_slope(activation, aux, t)
    choice = _choice.choose_implementation(spec, platform, 1, (t.dtype, t.dtype))
    capabilities = _choice.capabilities_of(choice.implementation)
    # The derivative epilog of a product over nothing, with t as its C: -0 * 0 is -0, and -0 + t is t, also for t = -0.
    changes = {"epilog": Epilog.DGELU, "alpha": -0.0, "beta": 1.0, "has_c": True}
    spec = spec.replace(implementation=choice.implementation, **changes)
    a, b = jnp.zeros((t.shape[0], 0), t.dtype), jnp.zeros((0, t.shape[1]), t.dtype)
    return _fused_matmul(a, b, t, aux, spec=spec, capabilities=capabilities)[0]


def _rule(platform: str, is_multiple: bool):
    def rule(ctx, *nodes, spec: MatmulSpec):
        mesh = _compat.lowering_mesh(ctx)
        nprocesses = _processes.group_processes(spec, mesh)
        choice = _choice.choose_implementation(
            spec, platform, nprocesses, tuple(aval.dtype for aval in ctx.avals_in[:2])
        )
        capabilities = functools.partial(_choice.capabilities_of, choice.implementation)  # "xla" does without a library
        devices = _devices_of(spec, mesh) if choice.implementation == "cublasmp" else ()
        site = _processes.site(ctx, spec) if platform == "cpu" and choice.implementation != "host" else None

        def lower(a, b, *extra):
            if choice.implementation == "host":
                outputs = _fused_matmul(a, b, *extra, spec=spec, capabilities=capabilities())
            elif choice.implementation == "cublasmp" and (spec.is_invariant or 0 not in (*a.shape, *b.shape)):
                chosen = spec.replace(implementation="cublasmp")
                outputs = _fused_matmul(a, b, *extra, spec=chosen, capabilities=capabilities(), devices=devices)
            elif spec.is_invariant:
                if site:
                    moved = site.roll_call(spec, a, b, [_narrow.as_moved(x) for x in (a, b)])
                    a, b = (_narrow.from_moved(x, like.dtype) for x, like in zip(moved, (a, b), strict=True))
                outputs = _gathered_matmul(a, b, *extra, spec=spec, capabilities=capabilities())
            else:
                local_product = _host_product if choice.implementation == "host+xla" else None
                ahead = functools.partial(site.roll_call, spec, a, b) if site else None
                outputs = _xla.matmul(
                    a, b, *extra, spec=spec, platform=platform, local_product=local_product, ahead=ahead
                )
            return outputs if is_multiple else outputs[0]

        with _compat.off_explicit_mesh():
            return mlir.lower_fun(lower, multiple_results=is_multiple)(ctx, *nodes)

    return rule


def _devices_of(spec: MatmulSpec, mesh) -> tuple[int, ...]:
    """The devices of a call that is to run in this process, for which alone its lowering serves from now on.

    Under a level of determinism cuBLASMp's calls are local ones.
    """
    if spec.nranks == 1 or spec.is_invariant or not _native.cuda_devices():
        return ()
    devices = _processes.mesh_devices(spec, mesh)
    if devices:
        _compat.require_devices((matmul_p, matmul_epilog_p))
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
    return _fused_matmul(a, b, spec=local, capabilities=_choice.host_capabilities())[0]


def register_matmul_lowerings(bilinear_p, epilog_p) -> None:
    """Register the rules of this module for a pair of primitives."""
    for primitive in (bilinear_p, epilog_p):
        mlir.register_lowering(primitive, _rule("other", primitive.multiple_results))
        for platform in ("cpu", "cuda"):
            mlir.register_lowering(primitive, _rule(platform, primitive.multiple_results), platform=platform)


register_matmul_lowerings(matmul_p, matmul_epilog_p)
for _platform in ("other", "cpu", "cuda"):
    mlir.register_lowering(
        activation_grad_p,
        mlir.lower_fun(functools.partial(_activation_grad, platform=_platform), multiple_results=False),
        platform=None if _platform == "other" else _platform,
    )
mlir.register_lowering(activated_matmul_p, mlir.lower_fun(activated_matmul_parts, multiple_results=False))
