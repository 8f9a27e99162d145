"""A NaN stays one in what is computed of largest values: without it a step that has diverged would look sound.

XLA's maximum on CPUs loses a NaN in an array of more than a few thousand elements, and e2m1 has none.
"""

import cases
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Scaling, quantize

E4M3, FP4 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float4_e2m1fn)
TN = {"transpose_b": True}
IMPLEMENTATIONS = ("host", "xla")
QUANTIZERS = (quantize.tensor, quantize.rows, quantize.vec128, quantize.blk128, quantize.mxfp8, quantize.nvfp4)


@pytest.mark.small("values")
@pytest.mark.parametrize("shape", [(2, 128), (128, 256)], ids=str)
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: q.__name__)
def test_a_quantizer_keeps_a_nan(quantizer, shape, rng):
    """Also of an array so large that XLA's maximum loses it, and in e2m1, which has no NaN: its scale has."""
    cases.require(None)
    x = rng.standard_normal(shape).astype(np.float32)
    x[1, 5] = np.nan
    assert np.isnan(quantize.dequantize(*quantizer(x))[1, 5])
    assert np.isnan(quantize.amax(x))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [cases.BY_NAME["local"], cases.BY_NAME["rs"]], ids=lambda case: case.name)
def test_the_amax_of_a_result_with_a_nan_is_one(case, implementation, rng):
    """Whichever device has it."""
    mesh = case.jax_mesh()
    a, b, c = (np.ones((64, 64), dtype) for dtype in (E4M3, E4M3, np.float16))
    c[40, 3] = np.nan
    options = {"scaling": Scaling(result_amax=True), "preferred_element_type": E4M3, "implementation": implementation}
    with jax.set_mesh(mesh):
        a, b, c = (cases.put(x, mesh, P(*spec)) for x, spec in ((a, case.a), (b, tuple(case.b)[::-1]), (c, case.out)))
        d, more = jaxmp.matmul(a, b, c, beta=1.0, out_sharding=case.out, **options, **TN)
    assert np.isnan(more["result_amax"])
    assert np.argwhere(np.isnan(np.asarray(d, np.float32))).tolist() == [[40, 3]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_block_scaled_result_keeps_a_nan(implementation):
    cases.require(None)
    a = np.zeros((128, 128), ml_dtypes.float4_e2m1fn)
    scale = np.ones((128, 8), ml_dtypes.float8_e4m3fn)
    c = np.ones((128, 128), np.float16)
    c[7, 20] = np.nan
    options = {"scaling": Scaling(a=scale, b=scale), "preferred_element_type": FP4, "implementation": implementation}
    d, more = jaxmp.matmul(a, a, c, beta=1.0, **options, **TN)
    decoded = np.asarray(quantize.dequantize(d, more["d_out_scale"]))
    assert np.isnan(decoded[7, 16:32]).all()
    assert np.count_nonzero(np.isnan(decoded)) == 16


@pytest.mark.parametrize("name", ["ag", "rs", "ar", "grid"])
def test_an_alpha_that_is_no_number_is_the_same_on_every_rank(name, rng):
    """Ranks compare their scalars, and a NaN is not equal to itself."""
    cases.require("host")
    case = cases.BY_NAME[name].replace(per_shard=(3, 5, 2))
    mesh = case.jax_mesh()
    with jax.set_mesh(mesh):
        placed = [cases.put(x, mesh, spec) for x, spec in zip(case.integers(rng), case.stored, strict=True)]
        d = jaxmp.matmul(*placed, alpha=float("nan"), out_sharding=case.out, implementation="host")
    assert np.isnan(np.asarray(d)).all()
