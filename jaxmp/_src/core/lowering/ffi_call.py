"""Emits a call as the library takes it: its attributes, operands and results.

This is the only place where row-major becomes column-major. A row-major matrix read as column-major is its transpose,
and D = op(A) @ op(B) is D^T = op(B)^T @ op(A)^T. So the operands are exchanged, and m and n are; transposition flags
stay: JAX's b (k, n) is cuBLASMp's A (n x k, "N"), its a (m, k) is cuBLASMp's B (k x m, "N"), and d (m, n) is D (n x m).
A grid exchanges its two directions for the same reason.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir.dialects import stablehlo

from jaxmp._src.core.lowering import xla_matmul
from jaxmp._src.core.spec import epilogs, low_precision, precisions, process_grid, wire
from jaxmp._src.core.spec.extents import Extents, extents, result_type
from jaxmp._src.core.spec.matmul_spec import SCALE_NAMES, MatmulSpec
from jaxmp._src.platform.jax_internals import jax_compat, jax_lowering
from jaxmp._src.platform.jax_internals.jax_lowering import mlir
from jaxmp._src.platform.runtime import native
from jaxmp._src.platform.runtime.types import ArrayType, Operands

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
    "uint8": "u8",
    "int4": "s4",
    "uint4": "u4",
    "float8_e3m4": "f8e3m4",
    "float8_e4m3": "f8e4m3ieee",
    "float8_e4m3b11fnuz": "f8e4m3b11fnuz",
    "float8_e4m3fnuz": "f8e4m3fnuz",
    "float8_e5m2fnuz": "f8e5m2fnuz",
    "float8_e8m0fnu": "f8e8m0",
}


def custom_call(operands: Operands, spec: MatmulSpec, devices: tuple[int, ...] = ()) -> Operands:
    """Returns the results of one custom call on this device's shards, by name, as JAX has them. `devices`: as in
    `call_attributes`; without them a call of several ranks has this device's position in the mesh as an operand."""
    native.register()
    a, b, names = operands["a"], operands["b"], spec.output_names
    found = extents(spec, a.shape, b.shape)
    is_float4 = a.dtype.name == b.dtype.name == low_precision.FLOAT4  # a single one is passed as XLA holds it
    given = [wire.as_bytes(x) if is_float4 else x for x in (b, a)]
    for name in (name for name in spec.operand_names if name not in SCALE_NAMES):
        x = operands[name]  # cuBLASLt wants the rows of a gelu_aux padded
        padding = process_grid.gelu_aux_ld(x.shape[1]) - x.shape[1] if name == "gelu_aux" else 0
        given.append(jnp.pad(x, ((0, 0), (0, padding))) if padding else x)
    for name in ("scale_b", "scale_a", "scale_c", "scale_d", "scale_aux"):  # a and b are exchanged
        if name in operands:
            given.append(wire.for_library(operands[name], spec.scales.of(name)))
    if spec.group.nranks > 1 and not devices:
        # This device's position in the mesh, so that the call knows its rank for any device assignment. On GPUs it
        # costs work on the device in every run, so a call that names its devices goes without it.
        given.append(mesh_position(spec.group.mesh))
    results = [_stored_result(name, spec, found) for name in names]
    with jax.enable_x64(True), jax.named_scope(profile_name(spec, found, a, b)):  # attributes are 64-bit
        aliases = _aliases(spec)
        call = jax.ffi.ffi_call(native.TARGET, results, input_output_aliases=aliases, vmap_method="sequential")
        call = functools.partial(call, **call_attributes(spec, a, b, devices, found))
        if spec.implementation == "cublasmp" and spec.group.nranks > 1:
            call = jax_lowering.on_stream_of_collectives(call)
        outputs = dict(zip(names, call(*given), strict=True))
    if spec.distributions:
        return {"d": xla_matmul.without_padding(spec, outputs["d"])}  # the library does not write it
    return {name: _final(name, spec, found, x) for name, x in outputs.items()}


def _stored_result(name: str, spec: MatmulSpec, found: Extents) -> jax.ShapeDtypeStruct:
    """Returns the shape and type of a result as the library writes it: float4 as bytes of two numbers, gelu_aux with
    padded rows, scales of blocks as bytes in the library's order, others as JAX has them."""
    rows, cols = found.d
    if name == "d" and spec.out_dtype.name == low_precision.FLOAT4:
        return jax.ShapeDtypeStruct((rows, cols // 2), jnp.uint8)
    if name == "d":
        return jax.ShapeDtypeStruct(found.d, spec.out_dtype)
    plain = result_type(name, spec, found)
    if name == "gelu_aux":
        return jax.ShapeDtypeStruct((rows, process_grid.gelu_aux_ld(cols)), plain.dtype)
    if name == "d_out_scale":
        size = process_grid.round_up(rows, 128) * process_grid.round_up(plain.shape[1], 4)
        return jax.ShapeDtypeStruct((size,), jnp.uint8)
    return plain


def _final(name: str, spec: MatmulSpec, found: Extents, x: jax.Array) -> jax.Array:
    """Converts a result from the shape and type of `_stored_result` to JAX's."""
    if name == "gelu_aux":
        return x[:, : found.d[1]]
    if x.dtype != jnp.uint8:
        return x
    plain = result_type(name, spec, found)
    x = wire.unswizzle(x, *plain.shape) if name == "d_out_scale" else x
    return wire.from_bytes(x, plain.dtype)


def _aliases(spec: MatmulSpec) -> dict[int, int]:
    """Returns {place of C among the operands: place of D}: D gets the memory of C, so that a c that is donated, carried
    by a loop or not used again is updated in place. Empty if C is not read or has another type than D. If c is used
    again, or is an argument that is not donated, XLA copies it before the call. Without the alias, XLA copies D after
    the call if c was donated. Either is one pass over D. Programs with a large C mostly accumulate, so the alias, which
    also saves memory, is the better choice."""
    if not spec.has_c or spec.beta == 0:  # C is not read, so it is not worth a copy
        return {}
    if np.dtype(spec.c_dtype or spec.out_dtype) != np.dtype(spec.out_dtype):  # C of a float8 result is wider than it
        return {}
    return {2 + spec.operand_names.index("c"): 0}


def call_attributes(
    spec: MatmulSpec, a: ArrayType, b: ArrayType, devices: tuple[int, ...] = (), found: Extents | None = None
) -> dict[str, Any]:
    """Returns the attributes of the custom call in cuBLASMp's column-major terms; a, b: JAX's shards or their types.
    `devices`: the ids of the mesh's devices by position, with which the call finds its communicator; empty if they are
    unknown or have no communicator. `found`: the call's extents, if they have been computed."""
    found = found or extents(spec, a.shape, b.shape)
    row = spec.rule
    types = (spec.out_dtype, spec.c_dtype, spec.bias_dtype, spec.aux_dtype)
    out, c, bias, aux = (_DTYPES[np.dtype(dtype or spec.out_dtype).name] for dtype in types)
    # hostmp takes cuBLASMp's compute types; no library sums in 16 bits.
    platform = "cpu" if precisions.sums_in_16_bits(spec.precision) else ""
    names = [name for name, _ in spec.group.mesh]
    axes_row, axes_col = (
        (spec.group.col_axes, spec.group.row_axes) if spec.contraction.is_grid else (spec.group.row_axes, ())
    )
    # (mb, nb, rsrc, csrc) of A, B and D as stored, each pair reversed; empty where shards are contiguous.
    layout_a, layout_b, layout_d = (
        np.array([*x.layout.block[::-1], *x.layout.first[::-1]] if x else [], np.int64)
        for x in spec.distributions or (None,) * 3
    )
    return {
        "pattern": spec.contraction.pattern.value,
        "m": np.int64(found.n),
        "n": np.int64(found.m),
        "k": np.int64(found.k),
        "trans_a": _transposition(spec.transpose_b, spec.conjugate_b),
        "trans_b": _transposition(spec.transpose_a, spec.conjugate_a),
        "dtype_a": _DTYPES[b.dtype.name],
        "dtype_b": _DTYPES[a.dtype.name],
        "dtype_c": c if spec.has_c else "none",
        "dtype_d": out,
        "dtype_bias": bias if row.has_bias or row.gradient else "none",
        "dtype_aux": {"": "none", "relu_aux": "u8", "gelu_aux": aux}[row.aux or row.aux_input],
        "compute": precisions.compute_type(spec.precision, low_precision.operand_type(a.dtype, b.dtype), platform),
        "alpha": np.array([complex(spec.alpha).real, complex(spec.alpha).imag], np.float64),
        "beta": np.array([complex(spec.beta).real, complex(spec.beta).imag], np.float64),
        "scale_mode_a": spec.scales.b,
        "scale_mode_b": spec.scales.a,
        "scale_mode_c": spec.scales.c,
        "scale_mode_d": spec.scales.d,
        "scale_mode_aux": spec.scales.aux,
        "d_out_scale_mode": spec.scales.d_out,
        "amax_d": np.int64(spec.scales.amax_d),
        "amax_aux": np.int64(spec.scales.amax_aux),
        "epilog": np.int64(epilogs.TRANSPOSED.get(spec.epilog, spec.epilog)),
        "mesh_shape": np.array([size for _, size in spec.group.mesh], np.int64),
        "axes_row": np.array([names.index(axis) for axis in axes_row], np.int64),
        "axes_col": np.array([names.index(axis) for axis in axes_col], np.int64),
        "devices": np.array(devices, np.int64),
        **spec.level.option,
        "communication_dtype": _DTYPES[np.dtype(spec.comm.dtype).name] if spec.comm.dtype else "none",
        "algorithm": spec.comm.algorithm or "default",
        "comm_sm_count": np.int64(spec.comm.sm_count or 0),
        "layout_a": layout_b,
        "layout_b": layout_a,
        "layout_d": layout_d,
    }


def _transposition(is_transposed: bool, is_conjugated: bool) -> str:
    if is_transposed:
        return "C" if is_conjugated else "T"
    return "N"


def profile_name(spec: MatmulSpec, found: Extents, a: ArrayType, b: ArrayType) -> str:
    """Returns a call's name in profiles and HLO metadata: pattern, m x k x n of all ranks, types, level, kernel."""
    types = f"{_DTYPES[a.dtype.name]}*{_DTYPES[b.dtype.name]}->{_DTYPES[np.dtype(spec.out_dtype).name]}"
    if spec.implementation == "cublasmp":
        kernel = "cuBLASMp"
    else:
        wide = native.kernel_of(_DTYPES[low_precision.operand_type(a.dtype, b.dtype).name])
        kernel = f"decoded; {wide}" if low_precision.is_mixed(a.dtype, b.dtype) else wide
        kernel = "one order of sums" if spec.fixed_reduction_order else kernel
    return f"jaxmp {spec.contraction.pattern.value} {found.m}x{found.k}x{found.n} {types} {spec.level.name} ({kernel})"


# The rank --------------------------------------------------------------------------------------------------------

mesh_position_p = jax_compat.make_primitive("jaxmp_mesh_position", multiple_results=False)


def mesh_position(axes: tuple[tuple[str, int], ...]) -> jax.Array:
    """Returns the index of this device in a mesh with these axes and sizes, a uint32. `lax.axis_index` computes it with
    a few operations. XLA on CPUs starts LLVM for them, which took a third of the compile time of a program with one
    call. Inside a shard_map over all axes the index is XLA's partition id."""
    return cast(jax.Array, mesh_position_p.bind(axes=axes))


def mesh_position_rule(ctx: jax_lowering.LoweringContext, *, axes: tuple[tuple[str, int], ...]) -> Any:
    """Lowers to XLA's partition id inside a shard_map over all axes of the mesh, elsewhere to `lax.axis_index`."""
    mesh = jax_lowering.manual_mesh(ctx)
    if mesh is not None and tuple(mesh.shape.items()) == axes:
        return [stablehlo.partition_id()]

    def index() -> jax.Array:
        return lax.axis_index(tuple(name for name, _ in axes)).astype(np.uint32)

    return mlir.lower_fun(index, multiple_results=False)(ctx)


mesh_position_p.def_abstract_eval(lambda *, axes: jax.core.ShapedArray((), np.dtype(np.uint32)))
