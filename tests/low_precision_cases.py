"""Shared parts of the fp8, fp4 and int8 tests: types, operands, scales of every mode and their definition, and a call
with scales on sharded arrays. Placement is tested with small integers and power-of-two scales, so sums are exact;
numerics with the bound of `bounds` and float64 products of the decoded operands."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Scaling

E4M3, E5M2, FP4, E8M0 = (
    np.dtype(t)
    for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu)
)
TN = {"transpose_b": True}
F32 = {"preferred_element_type": jnp.float32}
INT8 = np.dtype(np.int8)
IMPLEMENTATIONS = ("host", "xla")


def by_name(*names):
    return [case for case in cases.CASES if case.name in names]


PATTERNS = by_name("local", "ag-data", "ag-transposed", "rs-data", "rs-transposed", "ar", "grid")


def small(rng, shape, dtype):
    """Returns non-zero integers up to 3, which every low-precision type holds."""
    return (rng.integers(1, 4, shape) * rng.choice([-1, 1], shape)).astype(dtype)


def numbers(seed, shape, dtype, most=3):
    """Returns integers up to `most`; absolute values for unsigned types, powers of two for exponent types."""
    values = np.random.default_rng(seed).integers(-most, most + 1, shape).astype(np.float32)
    name = jnp.dtype(dtype).name
    values = np.exp2(values) if "e8m0" in name else abs(values) if name.startswith("uint") else values
    return values.astype(jnp.dtype(dtype))


def powers(rng, shape, dtype=np.float32):
    return np.exp2(rng.integers(-2, 3, shape)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Mode:
    """A pair of scale modes: the scales of a and b for an operand of shape (rows, k), and the operands' type."""

    id: str
    a: str
    b: str
    dtype: np.dtype = E4M3
    unit: int = 16  # divides m, n and k on each device

    def scales(self, rng, a_shape, b_shape):
        return [make_scale(rng, kind, shape) for kind, shape in ((self.a, a_shape), (self.b, b_shape))]


def make_scale(rng, kind, shape):
    rows, k = shape
    if kind == "none":
        return None
    shapes = {"scalar": (), "rows": (rows,), "vec128": (rows, k // 128), "blk128": (-(-rows // 128), k // 128)}
    if kind == "mx":
        return powers(rng, (rows, k // 32), E8M0)
    if kind == "nv":
        return powers(rng, (rows, k // 16), E4M3)
    return powers(rng, shapes[kind])


def scaled(x, scale):
    """Returns x times its scales in float64, by each mode's definition."""
    wide = np.asarray(x).astype(np.float64)
    if scale is None:
        return wide
    scale = np.asarray(scale).astype(np.float64)
    if scale.ndim == 1:
        return wide * scale[:, None]
    if scale.ndim == 2:
        row_block, col_block = -(-x.shape[0] // scale.shape[0]), x.shape[1] // scale.shape[1]
        row_block = 128 if row_block > 1 else 1
        scale = np.repeat(np.repeat(scale, row_block, 0)[: x.shape[0]], col_block, 1)
    return wide * scale


def saturated(x, dtype):
    most = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -most, most).astype(dtype)


SCALE_MODES = [
    Mode("none", "none", "none"),
    Mode("scalar", "scalar", "scalar"),
    Mode("scalar-of-a", "scalar", "none"),
    Mode("rows", "rows", "rows"),
    Mode("vec128", "vec128", "vec128", unit=128),
    Mode("vec128-blk128", "vec128", "blk128", unit=128),
    Mode("blk128-vec128", "blk128", "vec128", unit=128),
    Mode("mxfp8", "mx", "mx", unit=128),
    Mode("nvfp4", "nv", "nv", FP4, 128),
    Mode("int8", "rows", "rows", INT8, 5),
    Mode("int8-mixture", "scalar", "rows", INT8, 3),
    Mode("int8-rows-of-a", "rows", "none", INT8, 7),
]


def specs_of_scales(case, scales):
    """Returns the shardings of the scales: as the rows of a and the columns of b; P() for scalars."""
    are_turned = case.transposition[0] == "T", case.transposition[1] == "N"
    specs = [tuple(spec)[:: -1 if turned else 1] for spec, turned in zip(case.stored, are_turned, strict=True)]
    return [P(*spec[: np.ndim(scale)]) for scale, spec in zip(scales, specs, strict=True)]


def place_scaled(mesh, case, a, b, *scales):
    """Puts the operands and their scales in the case's shardings."""
    pairs = zip((a, b, *scales), (*case.stored, *specs_of_scales(case, scales)), strict=True)
    return [None if x is None else cases.put(x, mesh, spec) for x, spec in pairs]


def sharded_call(case, a, b, scale_a, scale_b, axis_type, **options):
    flags = case.transpose | options
    if axis_type == AxisType.Auto:
        flags |= {"in_shardings": case.stored, "mesh": case.jax_mesh(axis_type)}
    if scale_a is not None or scale_b is not None:
        flags["scaling"] = Scaling(a=scale_a, b=scale_b)
    return jaxmp.matmul(a, b, out_sharding=case.out, **flags)


def products_of(calls, axis_type=AxisType.Explicit):
    """Returns the products of one layout, for (case, operands and scales, options) each, from one program."""
    mesh = calls[0][0].jax_mesh(axis_type)

    def program(placed):
        return [
            sharded_call(case, *x, axis_type, **options) for (case, _, options), x in zip(calls, placed, strict=True)
        ]

    with jax.set_mesh(mesh):
        return jax.jit(program)([place_scaled(mesh, case, *operands) for case, operands, _ in calls])
