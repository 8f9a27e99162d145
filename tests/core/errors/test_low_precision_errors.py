"""Refusals of fp8, fp4 and int8: without these tests a wrong transposition, shape, scale or type could pass."""

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from low_precision_cases import E4M3, E5M2, E8M0, F32, FP4, TN

import jaxmp
from jaxmp import Epilog, Scaling

A8, B8 = np.zeros((32, 64), E4M3), np.zeros((48, 64), E4M3)
BIG = np.zeros((128, 256), E4M3)
A4 = np.zeros((128, 128), FP4)
ONE = np.float32(1)
MX, NV = np.ones((128, 8), E8M0), np.ones((128, 8), E4M3)
HOST = {"implementation": "host"}  # by default operands without a kernel are converted: test_types.py
WRONG = {
    "b not transposed": ((A8, np.zeros((64, 48), E4M3)), {"transpose_b": False, **F32, **HOST}, ValueError, "pass transpose_a=False and transpose_b=True, got transpose_a=False and transpose_b=False"),
    "a transposed": ((A8.T.copy(), B8), {"transpose_a": True, **F32, **HOST}, ValueError, "a stored (m, k) and b stored (n, k)"),
    "no result type": ((A8, B8), HOST, TypeError, "operands of float8_e4m3fn and float8_e4m3fn need preferred_element_type; available: bfloat16, float16, float32, float8_e4m3fn"),
    "e5m2 twice": ((A8.astype(E5M2), B8.astype(E5M2)), F32 | HOST, NotImplementedError, "float8_e5m2 not with itself"),
    "float8 with bfloat16": ((A8, B8.astype(ml_dtypes.bfloat16)), {}, TypeError, "a is float8_e4m3fn and b is bfloat16"),
    "d scale of float16": ((A8, B8), {"preferred_element_type": np.float16, "scaling": Scaling(d=ONE)}, ValueError, "scaling.d scales a result of float8"),
    "an int8 result": ((A8, B8), {"preferred_element_type": np.int8, **HOST}, NotImplementedError, "preferred_element_type int8 is not available for float8_e4m3fn"),
    "k": ((A8[:, :24], B8[:, :24]), F32 | HOST, ValueError, "k must be a multiple of 16 on each device for float8_e4m3fn, got 24; pad it to 32"),
    "m": ((A8[:20], B8), F32 | HOST, ValueError, "m must be a multiple of 16 on each device for float8_e4m3fn, got 20"),
    "n of MXFP8": ((BIG, BIG[:64]), {"scaling": Scaling(a=MX, b=MX[:64]), **F32}, ValueError, "n must be a multiple of 128 on each device for float8_e4m3fn with scales of vec32_ue8m0, got 64"),
    "fp4 without scales": ((A4, A4), {**F32, **HOST}, ValueError, "scaling.a is missing; float4_e2m1fn operands need one a block of 16, shape (128, 8) of float8_e4m3fn"),
    "shape of a scale": ((A8, B8), {"scaling": Scaling(a=np.ones(31, np.float32)), **F32}, ValueError, "scaling.a has shape (31,) and dtype float32; an operand of shape (32, 64) and dtype float8_e4m3fn takes () of float32, (32,) of float32, (32, 2) of float8_e8m0fnu, no scale of blocks of 128, which do not divide its k=64"),
    "block that does not divide": ((A8[:, :48], B8[:, :48]), {"scaling": Scaling(a=np.ones((32, 1), E8M0)), **F32}, ValueError, "an operand of shape (32, 48) and dtype float8_e4m3fn takes () of float32, (32,) of float32, no scale of blocks of 32 or 128, which do not divide its k=48"),
    "two modes": ((BIG, BIG), {"scaling": Scaling(a=MX, b=ONE), **F32}, NotImplementedError, "scaling.a is vec32_ue8m0 and scaling.b is scalar_fp32, which cannot be combined"),
    "blocks of both": ((BIG, BIG), {"scaling": Scaling(a=np.ones((1, 2), np.float32), b=np.ones((1, 2), np.float32)), **F32}, NotImplementedError, "(rows, k/128) with (rows, k/128) or (rows/128, k/128)"),
    "rows and fp8": ((A8, B8), {"scaling": Scaling(a=np.ones(32, np.float32), b=np.ones(48, np.float32)), "preferred_element_type": E4M3}, NotImplementedError, "with scales of outer_vec_fp32 the result must be bfloat16, float16 or float32, got float8_e4m3fn"),
    "c scale of blocks": ((BIG, BIG, np.zeros((128, 128), np.float32)), {"beta": 1.0, "scaling": Scaling(a=MX, b=MX, c=ONE), **F32}, ValueError, "scaling.c goes with tensor-wide scales only"),
    "d scale of blocks": ((BIG, BIG), {"scaling": Scaling(a=MX, b=MX, d=ONE), "preferred_element_type": E4M3}, ValueError, "drop it, blocks get their own"),
    "shape of scaling.d": ((A8, B8), {"scaling": Scaling(d=np.ones(2, np.float32)), "preferred_element_type": E4M3}, ValueError, "scaling.d must be a float32 scalar of shape (), got shape (2,) of float32"),
    "no Scaling": ((A8, B8), {"scaling": (ONE, ONE), **F32}, TypeError, "scaling must be a jaxmp.Scaling, got tuple; pass scaling=jaxmp.Scaling(a=..., b=...)"),
    "result_amax is no bool": ((A8, B8), {"scaling": Scaling(result_amax=1), **F32}, TypeError, "scaling.result_amax must be True or False, got 1"),
    "amax of bfloat16": ((A8, B8), {"scaling": Scaling(result_amax=True), **F32}, NotImplementedError, "scaling.result_amax needs a float8 result with tensor-wide scales; the result is float32"),
    "scales of float32": ((A8.astype(np.float32), B8.astype(np.float32)), {"scaling": Scaling(a=ONE)} | F32, TypeError, "only float8, float4 and int8 operands take scaling, but a has dtype float32 and b float32; drop scaling"),
    "amax of int8": ((A8.astype(np.int8), B8.astype(np.int8)), {"scaling": Scaling(result_amax=True, a=ONE)}, ValueError, "scaling.result_amax applies to float8 and float4 operands only, but a has dtype int8; drop it"),
    "blocks of int8": ((A8.astype(np.int8), B8.astype(np.int8)), {"scaling": Scaling(a=np.ones((32, 1), np.float32))}, ValueError, "scaling.a has shape (32, 1) and dtype float32; an operand of shape (32, 64) and dtype int8 takes () of float32, (32,) of float32"),
    "scales of int8 beside another": ((A8.astype(np.int8), B8.astype(np.float32)), {"scaling": Scaling(a=ONE)} | F32, TypeError, "only float8, float4 and int8 operands take scaling, but a has dtype int8 and b float32; drop scaling"),
    "scaled int8 to int32": ((A8.astype(np.int8), B8.astype(np.int8)), {"scaling": Scaling(a=ONE), "preferred_element_type": np.int32}, NotImplementedError, "preferred_element_type int32 is not available for int8 and int8 operands; available: bfloat16, float16, float32"),
    "BGRADB of int8": ((A8.astype(np.int8), B8.T.astype(np.int8)), {"scaling": Scaling(a=ONE), "epilog": Epilog.BGRADB, "transpose_b": False}, NotImplementedError, "epilog BGRADB is not available for int8 operands and a result of float32; available: NONE"),
    "GELU": ((A8, B8), {"epilog": Epilog.GELU, **F32}, NotImplementedError, "epilog GELU is not available for float8_e4m3fn operands and a result of float32; available: NONE, BIAS, RELU, RELU_BIAS, RELU_AUX, RELU_AUX_BIAS, DRELU, GELU_AUX, GELU_AUX_BIAS"),
    "aux of another type": ((A8, B8), {"epilog": Epilog.GELU_AUX, "scaling": Scaling(aux_dtype=np.float16), **F32}, NotImplementedError, "scaling.aux_dtype float16 is not available for epilog GELU_AUX with float8_e4m3fn and float8_e4m3fn operands, c of float32 and a result of float32; available: float32 (float8_e4m3fn goes with GELU_AUX,"),
    "fp8 aux of e5m2": ((A8, B8.astype(E5M2)), {"epilog": Epilog.GELU_AUX, "scaling": Scaling(aux_dtype=E4M3), "preferred_element_type": E4M3}, NotImplementedError, "with float8_e4m3fn and float8_e5m2 operands, c of float16 and a result of float8_e4m3fn; available: float16 ("),
    "fp8 aux with a bias": ((A8, B8), {"epilog": Epilog.GELU_AUX_BIAS, "epilog_inputs": {"bias": np.zeros(48, np.float16)}, "scaling": Scaling(aux_dtype=E4M3), "preferred_element_type": E4M3}, NotImplementedError, "not available for epilog GELU_AUX_BIAS"),
    "fp8 aux of blocks": ((BIG, BIG), {"epilog": Epilog.GELU_AUX, "scaling": Scaling(aux_dtype=E4M3, a=MX, b=MX), "preferred_element_type": E4M3}, NotImplementedError, "available: float16 (float8_e4m3fn goes with GELU_AUX, operands and a result of float8_e4m3fn, tensor-wide scales"),
    "aux scale of float16": ((A8, B8), {"epilog": Epilog.GELU_AUX, "scaling": Scaling(aux=ONE), "preferred_element_type": E4M3}, ValueError, "scaling.aux applies to a gelu_aux of float8, but it is float16 here; drop it, or set scaling.aux_dtype to jnp.float8_e4m3fn"),
    "aux amax of float32": ((A8, B8), {"epilog": Epilog.GELU_AUX, "scaling": Scaling(aux_amax=True), **F32}, ValueError, "scaling.aux_amax applies to a gelu_aux of float8, but it is float32 here"),
    "aux without GELU": ((A8, B8), {"epilog": Epilog.RELU_AUX, "scaling": Scaling(aux_dtype=E4M3), "preferred_element_type": E4M3}, ValueError, "scaling.aux_dtype applies to gelu_aux, but epilog RELU_AUX has none; drop it, or use GELU_AUX or GELU_AUX_BIAS"),
    "shape of scaling.aux": ((A8, B8), {"epilog": Epilog.GELU_AUX, "scaling": Scaling(aux_dtype=E4M3, aux=np.ones(2, np.float32)), "preferred_element_type": E4M3}, ValueError, "scaling.aux must be a float32 scalar of shape (), got shape (2,) of float32"),
    "aux_dtype of float32": ((A8.astype(np.float32), B8.astype(np.float32)), {"epilog": Epilog.GELU_AUX, "scaling": Scaling(aux_dtype=E4M3)}, TypeError, "only float8, float4 and int8 operands take scaling, but a has dtype float32 and b float32; drop scaling"),
    "bias of float32": ((A8, B8), {"epilog": Epilog.BIAS, "epilog_inputs": {"bias": np.zeros(48, np.float32)}, **F32}, TypeError, "bias has dtype float32"),
    "c beside fp8": ((A8, B8, np.zeros((32, 48), np.float32)), {"beta": 1.0, "preferred_element_type": E4M3}, TypeError, "c has dtype float32 but a result of float8_e4m3fn takes c in float16 or bfloat16"),
    "RELU of int8": ((A8.astype(np.int8), B8.astype(np.int8)), {"epilog": Epilog.RELU, **HOST}, NotImplementedError, "epilog RELU is not available for int8 operands and a result of int32; available: NONE"),
    "range of alpha of int8": ((A8.astype(np.int8), B8.astype(np.int8)), {"alpha": 2.0**31}, ValueError, "alpha=2147483648.0 does not fit int32, the type of the result"),
    "int8 to float32": ((A8.astype(np.int8), B8.astype(np.int8)), F32 | HOST, NotImplementedError, "preferred_element_type float32 is not available for int8 and int8 operands; available: int32"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "message"), WRONG.values(), ids=list(WRONG))
def test_errors(args, options, error, message):
    with pytest.raises(error) as caught:
        jaxmp.matmul(*args, **(TN | options))
    assert message in str(caught.value)


def test_ranks_that_differ_in_the_scale_of_a_tensor_are_told():
    """Inside shard_map each device has its own scalar, but the call can use only one."""
    mesh = cases.BY_NAME["ag"].jax_mesh(AxisType.Auto)

    def local(a, b):
        scale = jax.lax.axis_index("y").astype(jnp.float32) + 1
        options = {"transpose_b": True, "preferred_element_type": jnp.float32, "implementation": "host"}
        return jaxmp.all_gather_matmul(a, b, axis_name="y", scaling=Scaling(a=scale), **options)

    in_specs, out = (P("y", None), P("y", None)), P(None, "y")
    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=False))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"ranks disagree on the scale of B: rank 0 has 1, rank 1 has 2"
    ):
        f(np.ones((64, 32), E4M3), np.ones((64, 32), E4M3)).block_until_ready()
