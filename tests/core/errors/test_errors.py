"""Every wrong argument is found before a launch; the message names it, the requirement, the given value and a remedy.
Each message is matched with its values. `launches` checks the "before": a call that reaches a lowering fails the
test."""

import contextlib
import functools
import re

import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import CommOptions, Epilog, quantize
from jaxmp._src.core.lowering import backend


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Fails each test of this file that reaches a lowering."""

    def refuse(*args, **kwargs):
        raise AssertionError("the call was lowered ahead of its error")

    monkeypatch.setattr(backend, "choose_implementation", refuse)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


class Box:
    """A parameter in a library's object."""

    def __init__(self, value):
        self.value = value


class Tensor:
    """An array of another library, which JAX does not take."""

    shape, ndim, dtype = (4, 6), 2, "torch.float32"


A, B, C, BIAS = zeros(4, 6), zeros(6, 8), zeros(4, 8), zeros(8)
COMPLEX = (A.astype(np.complex64), B.astype(np.complex64))
K_SHARDED = (P(None, "y"), P("y", None))
COLLECTIVES = (jaxmp.all_gather_matmul, jaxmp.matmul_reduce_scatter, jaxmp.matmul_all_reduce)
OVER = [(axis, TypeError, f"takes the name of a mesh axis or a tuple of names, got {axis}") for axis in (None, 0)]
OVER += [(("y", "y"), ValueError, "axis names ('y', 'y') repeat"), ("z", ValueError, " ... ('x', 'y')")]


def manual(fn, in_specs=K_SHARDED, a=A, b=B, **options):
    mesh = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False, **options)(a, b)


# id: (arguments, keywords, exception, message)
WRONG = {
    "a is no array": (([[1.0]], B), {}, TypeError, "matmul: a must be an array, got list; convert it with jnp.asarray"),
    "a is another library's": ((Tensor(), B), {}, TypeError, "matmul: a must be an array, got Tensor; convert it with jnp.asarray"),
    "a holds objects": ((A.astype(object), B), {}, TypeError, "matmul: a must be an array of numbers, got ndarray of dtype object"),
    "a is masked": ((np.ma.masked_array(A, A > 0), B), {}, TypeError, "matmul: a must be an array of numbers, got MaskedArray of dtype float32; pass a.filled()"),
    "b is big-endian": ((A, B.astype(">f4")), {}, TypeError, "matmul: b must be an array of numbers, got ndarray of dtype >f4; its bytes have another order than this machine's: pass b.astype('float32')"),
    "a holds float0": ((np.zeros((4, 6), jax.dtypes.float0), B), {}, TypeError, "matmul: a must be an array of numbers, got dtype [('float0', 'V')]"),
    "transposition as in BLAS": ((A, B), {"transpose_a": "N"}, TypeError, "matmul: transpose_a must be True or False, got 'N'"),
    "epilog is no integer": ((A, B), {"epilog": 2.5}, ValueError, "matmul: epilog must be a jaxmp.Epilog, got 2.5"),
    "epilog is a bool": ((A, B), {"epilog": True}, ValueError, "matmul: epilog must be a jaxmp.Epilog, got True"),
    "result type is none": ((A, B), {"preferred_element_type": "float33"}, TypeError, "matmul: preferred_element_type must be a dtype, such as jnp.float32, got 'float33'"),
    "alpha beyond float64": ((A, B), {"alpha": 10**400}, ValueError, "matmul: alpha must fit a float64, got an integer beyond 1.8e308"),
    "alpha beyond float64, of integers": ((A.astype(np.int32), B.astype(np.int32)), {"alpha": 10**400}, ValueError, "matmul: alpha must fit a float64, got an integer beyond 1.8e308"),
    "algorithm is a list": ((A, B), {"comm": CommOptions(algorithm=["fused"])}, ValueError, "matmul: comm.algorithm must be None or one of default"),
    "comm is a dict": ((A, B), {"comm": {"algorithm": "fused"}}, TypeError, "matmul: comm must be a jaxmp.CommOptions, got dict; pass comm=jaxmp.CommOptions(dtype=..., algorithm=..., sm_count=...)"),
    "a is a scalar": ((zeros(), B), {}, ValueError, "matmul: a must have at least 1 dimension, got 0 (shape ())"),
    "a is a vector with an epilog": ((zeros(6), B), {"epilog": Epilog.RELU}, NotImplementedError, "matmul: epilog is available if a has 2 or more dimensions and b has 2, got shapes (6,) and (6, 8); leave it out, or use jax.vmap"),
    "b has a batch and alpha": ((A, zeros(2, 6, 8)), {"alpha": jnp.float32(1)}, NotImplementedError, "matmul: alpha is available if a has 2 or more dimensions and b has 2, got shapes (4, 6) and (2, 6, 8)"),
    "b is a vector of another extent": ((A, zeros(5)), {}, ValueError, "matmul: index 'k' has extent 6 in a but 5 in b (shapes (4, 6), (5,))"),
    "conjugate a real vector": ((zeros(6), B), {"conjugate_a": True}, TypeError, "matmul: conjugate_a=True needs a complex operand, got dtype float32"),
    "b is all parameters": ((A, {"kernel": B, "bias": BIAS}), {}, TypeError, "matmul: b must be an array, got dict; pass one of its arrays, which it has under 'kernel', 'bias'"),
    "b is in a box": ((A, Box(B)), {}, TypeError, "matmul: b must be an array, got Box; pass the array in it, b.value"),
    "b is a layer": ((A, lambda x: x), {}, TypeError, "matmul: b must be an array, got function; pass one of its arrays"),
    "a is sparse": ((BCOO((jnp.ones(1), jnp.zeros((1, 2), int)), shape=(4, 6)), B), {}, TypeError, "matmul: a must be an array, got BCOO; a sparse array has to be dense: pass a.todense()"),
    "a is a key": ((jax.random.key(0), B), {}, TypeError, "matmul: a must be an array of numbers, got dtype key<fry>; draw numbers with it, as jax.random.normal does"),
    "float8 beside float32": ((A, B.astype(jnp.float8_e5m2)), {}, TypeError, "matmul: a is float32 and b is float8_e5m2; float8 goes with float8 (float8_e5m2 not with itself), float4_e2m1fn with its own type: convert one of them"),
    "narrower integers": ((A.astype(np.int32), B.astype(np.int32)), {"preferred_element_type": jnp.int16}, NotImplementedError, "matmul: preferred_element_type int16 is not available for int32 operands; available: int32, int64"),
    "gelu of integers": ((A.astype(np.int32), B.astype(np.int32)), {"epilog": Epilog.GELU}, NotImplementedError, "matmul: epilog GELU is not available for a result of int32; available: NONE, BIAS, RELU, RELU_BIAS. Convert an operand"),
    "fraction of integers": ((A.astype(np.int32), B.astype(np.int32)), {"alpha": 0.5}, TypeError, "matmul: alpha=0.5 is not an integer but the result has dtype int32"),
    "alpha beyond uint8": ((A.astype(np.uint8), B.astype(np.uint8)), {"alpha": -1}, ValueError, "matmul: alpha=-1 does not fit uint8, the type of the result"),
    "c wider than integers": ((A.astype(np.int32), B.astype(np.int32), C), {"beta": 1.0}, TypeError, "matmul: c has dtype float32 but the result has dtype int32; convert c to int32"),
    "fp8 operands": ((A.astype(jnp.float8_e4m3fnuz), B.astype(jnp.float8_e4m3fnuz)), {"implementation": "host"}, NotImplementedError, "operands of dtype float8_e4m3fnuz (a float8_e4m3fnuz, b float8_e4m3fnuz) are not supported; supported are float32, float64, complex64, complex128, bfloat16, float16"),
    "contraction": ((A, zeros(5, 8)), {}, ValueError, "matmul: b has k=5 but a has k=6 (shapes (4, 6), (5, 8)); the contracted extents must be equal"),
    "b stored transposed": ((A, zeros(8, 6)), {}, ValueError, "matmul: b has k=8 but a has k=6 (shapes (4, 6), (8, 6)); pass transpose_b=True if b is stored (n, k)"),
    "b not stored transposed": ((A, zeros(6, 9)), {"transpose_b": True}, ValueError, "b has k=9 but a has k=6 (shapes (4, 6), (6, 9)); pass transpose_b=False if b is stored (k, n)"),
    "a stored transposed": ((zeros(6, 4), zeros(6, 9)), {}, ValueError, "b has k=6 but a has k=4 (shapes (6, 4), (6, 9)); pass transpose_a=True if a is stored (k, m)"),
    "epilog_inputs is the bias": ((A, B), {"epilog": Epilog.BIAS, "epilog_inputs": BIAS}, TypeError, "matmul: epilog_inputs must be a dict such as {'bias': bias}, got ndarray"),
    "a mesh that is none": ((A, B), {"mesh": "x"}, TypeError, "matmul: mesh must be a jax.sharding.Mesh, got str"),
    "a list of three precisions": ((A, B), {"precision": ["high"] * 3}, ValueError, "matmul: precision must be one value or a pair, got ['high', 'high', 'high']"),
    "beta without c": ((A, B), {"beta": 0.5}, ValueError, "matmul: beta=0.5 was given without c; pass c of shape (4, 8) or drop beta"),
    "c without beta": ((A, B, C), {}, ValueError, "matmul: c was given without beta; pass beta=1.0 to add c as it is"),
    "shape of c": ((A, B, zeros(8, 4)), {"beta": 1.0}, ValueError, "matmul: c must have the result's shape (4, 8), got (8, 4)"),
    "c is wider": ((A, B, C.astype(np.complex64)), {"beta": 1.0}, TypeError, "matmul: c has dtype complex64 but the result has dtype float32; convert c to float32, or ask for a wider result with preferred_element_type"),
    "alpha is an array": ((A, B), {"alpha": zeros(1)}, TypeError, "matmul: alpha must be a Python number or a scalar array, got ndarray of shape (1,) and dtype float32; multiply by anything else outside of the call"),
    "alpha is a truth value": ((A, B), {"alpha": True}, TypeError, "matmul: alpha must be a Python number or a scalar array, got bool"),
    "alpha is a boolean array": ((A, B), {"alpha": jnp.array(True)}, TypeError, "matmul: alpha must be a Python number or a scalar array, got ArrayImpl of shape () and dtype bool"),
    "complex array alpha of real operands": ((A, B), {"alpha": jnp.array(2j)}, TypeError, "matmul: alpha has dtype complex64 but the result has dtype float32"),
    "float array alpha of integers": ((A.astype(np.int32), B.astype(np.int32)), {"alpha": jnp.array(0.5)}, TypeError, "matmul: alpha has dtype float32 but the result has dtype int32"),
    "array alpha with a bias gradient": ((A, B), {"alpha": jnp.array(2.0), "epilog": Epilog.BGRADB}, NotImplementedError, "matmul: with epilog BGRADB alpha and beta are Python numbers, got an array for alpha; scale an operand, or the gradient that comes in"),
    "complex alpha of real operands": ((A, B), {"alpha": 2j}, TypeError, "matmul: alpha=2j is complex but the result has dtype float32"),
    "conjugate a real a": ((A, B), {"conjugate_a": True}, TypeError, "matmul: conjugate_a=True needs a complex operand, got dtype float32"),
    "unknown epilog": ((A, B), {"epilog": 8}, ValueError, "matmul: epilog must be a jaxmp.Epilog, got 8"),
    "epilog by name": ((A, B), {"epilog": "relu"}, ValueError, "matmul: epilog must be a jaxmp.Epilog, got 'relu'; pass jaxmp.Epilog.RELU"),
    "unknown epilog by name": ((A, B), {"epilog": "silu"}, ValueError, "matmul: epilog must be a jaxmp.Epilog, got 'silu'; there are NONE, DEFAULT, ALLREDUCE, RELU, RELU_AUX, BIAS"),
    "BGRADB of a transposed b": ((A, zeros(8, 6)), {"epilog": Epilog.BGRADB, "transpose_b": True}, NotImplementedError, "matmul: epilog BGRADB needs transpose_b=False, because cuBLASMp sums b only if it is stored (k, n); store b that way"),
    "BGRADA of a plain a": ((A, B), {"epilog": Epilog.BGRADA}, NotImplementedError, "matmul: epilog BGRADA needs transpose_a=True, because cuBLASMp sums a only if it is stored (k, m); store a that way"),
    "BGRADA of a batch": ((zeros(2, 6, 4), B), {"epilog": Epilog.BGRADA, "transpose_a": True}, ValueError, "matmul: epilog BGRADA needs a with 2 dimensions, (k, m), got 3; use jax.vmap for the others"),
    "mask of another type": ((A, B), {"epilog": Epilog.DRELU, "epilog_inputs": {"relu_aux": zeros(4, 16)}}, TypeError, "matmul: relu_aux must be the uint8 array that a RELU_AUX epilog returned, got float32"),
    "mask that is no array": ((A, B), {"epilog": Epilog.DRELU, "epilog_inputs": {"relu_aux": 1}}, TypeError, "relu_aux must be the uint8 array that a RELU_AUX epilog returned, got int"),
    "rows of a mask": ((A, B), {"epilog": Epilog.DRELU, "epilog_inputs": {"relu_aux": zeros(5, 16).astype(np.uint8)}}, ValueError, "matmul: relu_aux must have the rows of the result, shape (4, '...'), got (5, 16)"),
    "unpacked mask": ((A, B), {"epilog": Epilog.DRELU, "epilog_inputs": {"relu_aux": zeros(4, 8).astype(np.uint8)}}, ValueError, "matmul: relu_aux must have 16 bytes a row, a bit for each of the result's 8 columns, padded to 16 bytes in each of their 1 shards, got shape (4, 8)"),
    "shape of gelu_aux": ((A, B), {"epilog": Epilog.DGELU, "epilog_inputs": {"gelu_aux": zeros(8, 4)}}, ValueError, "matmul: gelu_aux must have the result's shape (4, 8), got (8, 4)"),
    "type of gelu_aux": ((A, B), {"epilog": Epilog.DGELU, "epilog_inputs": {"gelu_aux": C.astype(jnp.bfloat16)}}, TypeError, "matmul: gelu_aux must have the result's dtype float32, got bfloat16"),
    "missing bias": ((A, B), {"epilog": Epilog.GELU_BIAS}, ValueError, "matmul: epilog GELU_BIAS needs epilog_inputs ['bias'], missing ['bias']; pass epilog_inputs={'bias': ...}"),
    "unknown epilog input": ((A, B), {"epilog": Epilog.RELU, "epilog_inputs": {"bias": BIAS}}, ValueError, "matmul: epilog RELU takes epilog_inputs [], got unknown ['bias']; drop them or choose an epilog that uses them"),
    "length of bias": ((A, B), {"epilog": Epilog.BIAS, "epilog_inputs": {"bias": zeros(4)}}, ValueError, "matmul: bias must have shape (8,), one value per column of the result, got (4,)"),
    "rank of bias": ((A, B), {"epilog": Epilog.BIAS, "epilog_inputs": {"bias": zeros(1, 8)}}, ValueError, "matmul: bias must have 1 dimension, got 2 (shape (1, 8))"),
    "bias is no array": ((A, B), {"epilog": Epilog.BIAS, "epilog_inputs": {"bias": [0.0] * 8}}, TypeError, "matmul: bias must be an array, got list"),
    "activation of complex": (COMPLEX, {"epilog": Epilog.RELU}, TypeError, "matmul: epilog RELU is defined for real types, the result is complex64"),
    "unknown implementation": ((A, B), {"implementation": "cuda"}, ValueError, "matmul: implementation must be one of (None, 'host', 'xla', 'cublasmp'), got 'cuda'"),
    "unknown determinism": ((A, B), {"determinism": "bits"}, ValueError, "matmul: determinism must be one of ('run_to_run', 'batch', 'topology'), got 'bits'"),
    "determinism and a traced alpha": ((A, B), {"determinism": "topology", "alpha": jnp.float32(2)}, NotImplementedError, "matmul: determinism='topology' takes alpha and beta as Python numbers, got an array for alpha, after which XLA would apply the epilog; scale an operand, or pass"),
    "unknown precision": ((A, B), {"precision": "best"}, ValueError, "64F_EMULATED_FIXEDPOINT, 16F; got 'best'"),
    "precision of other operands": ((A, B), {"precision": "64F"}, NotImplementedError, "matmul: precision=64F takes operands of float64, complex128, got float32; convert them, or pass precision=None"),
    "a wide result of a narrow sum": ((A.astype(np.float16), B.astype(np.float16)), {"precision": "16F", "preferred_element_type": np.float32}, NotImplementedError, "precision=16F sums in float16, so the result cannot be float32"),
    "precision as an algorithm": ((A, B), {"precision": jax.lax.DotAlgorithm(np.float32, np.float16, np.float32)}, NotImplementedError, "is not implemented; pass one of F32_F32_F32"),
    "in_shardings are no pair": ((A, B), {"in_shardings": P("x", None)}, ValueError, "matmul: in_shardings must be a pair, one sharding for a and one for b, got P"),
    "in_shardings without mesh": ((A, B), {"in_shardings": (P("x", None), P())}, ValueError, "matmul: in_shardings need a mesh; pass mesh=, NamedShardings, or call under jax.set_mesh(mesh)"),
    "out_sharding without mesh": ((A, B), {"out_sharding": P("x", None)}, ValueError, "matmul: out_sharding P('x', None) needs a mesh; pass mesh=, a NamedSharding, or use jax.set_mesh(mesh)"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "keywords", "exception", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_argument(arguments, keywords, exception, message, standard_promotion):
    with pytest.raises(exception, match=re.escape(message)):
        jaxmp.matmul(*arguments, **keywords)


# Other functions use their own names of operands in such messages; and old keywords say what replaces them.
# " ... " stands for any text.
CALLS = {
    "keyword, nothing alike": (lambda: jaxmp.einsum(A, B, colour=None), TypeError, "einsum() got an unexpected keyword argument 'colour'; it takes subscripts, operands, optimize, precision, preferred_element_type"),
    "keyword, shorter": (lambda: jaxmp.linear(A, B, act=None), TypeError, "linear() got an unexpected keyword argument 'act'; did you mean activation=?"),
    "keyword, misspelt": (lambda: jaxmp.dot_general(A, B, precison=None), TypeError, "dot_general() got an unexpected keyword argument 'precison'; did you mean precision=?"),
    "keyword bias": (lambda: jaxmp.matmul(A, B, bias=None), TypeError, "matmul() got an unexpected keyword argument 'bias'; pass epilog=jaxmp.Epilog.BIAS, epilog_inputs={\"bias\": bias}, or call jaxmp.linear"),
    "keyword activation": (lambda: jaxmp.block_matmul(A, B, activation=None), TypeError, "block_matmul() got an unexpected keyword argument 'activation'; pass epilog=jaxmp.Epilog.RELU or another, or call jaxmp.linear"),
    "keyword epilog": (lambda: jaxmp.linear(A, B, epilog=Epilog.BIAS), TypeError, "linear() got an unexpected keyword argument 'epilog'; pass activation=, or call jaxmp.matmul"),
    "keyword dtype": (lambda: jaxmp.matmul(A, B, dtype=None), TypeError, "matmul() got an unexpected keyword argument 'dtype'; did you mean preferred_element_type=?"),
    "assert_no_collectives string": (lambda: jaxmp.assert_no_collectives(abs, allowed="all-reduce"), TypeError, "assert_no_collectives: allowed must be a list of kinds, got 'all-reduce'; pass ['all-reduce']"),
    "explain compiled": (lambda: jaxmp.explain(abs, compiled="yes"), TypeError, "explain: compiled must be True or False, got 'yes'"),
    "quantize to a type of scales": (lambda: quantize.tensor(A, jnp.float8_e8m0fnu), TypeError, "quantize: dtype must be int8, a float8 or a float4 type, got float8_e8m0fnu"),
    "quantize no array": (lambda: quantize.amax("x"), TypeError, "quantize: takes an array of real numbers, got 'x'"),
    "pack_fp4 type": (lambda: quantize.pack_fp4(A), TypeError, "quantize.pack_fp4: takes float4_e2m1fn, got float32[4,6]"),
    "pack_fp4 odd": (lambda: quantize.pack_fp4(A[:, :5].astype("float4_e2m1fn")), ValueError, "quantize.pack_fp4: the last dimension must be a multiple of 2, got shape (4, 5)"),
    "unpack_fp4 type": (lambda: quantize.unpack_fp4(A), TypeError, "quantize.unpack_fp4: takes uint8, got float32[4,6]"),
    "swizzle type": (lambda: quantize.swizzle(A), ValueError, "quantize.swizzle: scale must be (rows, blocks) of one byte each, got float32[4,6]"),
    "rows of a scalar": (lambda: quantize.rows(A[0, 0]), ValueError, "quantize.rows: x must have rows, got a scalar"),
    "fuse epilogs": (lambda: jaxmp.fuse(abs, epilogs="no"), TypeError, "fuse: epilogs must be True or False, got 'no'"),
    "to_block_cyclic mesh": (lambda: jaxmp.to_block_cyclic(A, jaxmp.BlockCyclic(grid=(1, 1), block=(2, 2)), mesh=3), TypeError, "to_block_cyclic: mesh must be a jax.sharding.Mesh, got int"),
    "advise dtype": (lambda: jaxmp.advise(4, 4, 4, 4, dtype="zz"), TypeError, "advise: dtype must be a dtype, such as jnp.bfloat16, got 'zz'"),
    "linear w": (lambda: jaxmp.linear(A, zeros(8, 6)), ValueError, "linear: w has k=8 but x has k=6 (shapes (4, 6), (8, 6)); pass transpose_b=True if w is stored (n, k)"),
    "linear vector": (lambda: jaxmp.linear(A, zeros(6)), ValueError, "linear: w must have 2 dimensions, got 1 (shape (6,)); pass w[:, None]"),
    "linear batch": (lambda: jaxmp.linear(A, zeros(2, 6, 8)), ValueError, "linear: w must have 2 dimensions, got 3 (shape (2, 6, 8)); jaxmp.einsum and jax.vmap take a batch of matrices"),
    "linear activation": (lambda: jaxmp.linear(A, B, activation="silux"), ValueError, "sigmoid, or a function of an array, got 'silux'; did you mean 'silu'?"),
    "linear of integers": (lambda: jaxmp.linear(A.astype(np.int32), B.astype(np.int32), activation=jnp.tanh), NotImplementedError, 'linear: with a result of int32 activation is "relu" or None'),
    "mlp": (lambda: jaxmp.mlp(A, B, zeros(4), C.T, None, activation="relu"), ValueError, "mlp (x @ w_in): b_in must have shape (8,)"),
    "mlp of float8": (lambda: jaxmp.mlp(A.astype("float8_e4m3fn"), B, None, B.T, None, activation="relu"), NotImplementedError, "mlp: x has dtype float8_e4m3fn;  ... call jaxmp.matmul for each product"),
    "mlp, second product": (lambda: jaxmp.mlp(A, B, None, B[:2], None, activation="relu"), ValueError, "mlp (hidden @ w_out): w_out has k=2 but hidden has k=8"),
    "mlp outside of shard_map": (lambda: jaxmp.mlp(A, B, None, B.T, None, activation="relu", axis_name="y"), ValueError, "mlp:  ... where an axis is named; outside, leave axis_name out, and pass out_sharding"),
    "einsum": (lambda: jaxmp.einsum("ij,jk->ki", A.astype(jnp.int16), jnp.full(B.shape, 1)), NotImplementedError, "einsum: operands of dtype int16 (b int32, a int16) are not supported, because JAX has no product of integers that is narrower"),
    "explain": (lambda: jaxmp.explain(C), TypeError, "explain: takes a function, got ndarray; write explain(fn)(*args)"),
    "fuse": (lambda: jaxmp.fuse(jnp.ones(2)), TypeError, "fuse: takes a function, got ArrayImpl; write fuse(fn)(*args)"),
    "fuse, determinism": (lambda: jaxmp.fuse(jnp.sin, determinism="typo"), ValueError, "fuse: determinism must be one of  ... got 'typo'"),
    "advise, no number": (lambda: jaxmp.advise(8, 8.0, 8, 8), TypeError, "advise: k must be an integer, got 8.0"),
    "advise, below 1": (lambda: jaxmp.advise(8, 8, 8, 0), ValueError, "advise: devices must be at least 1, got 0"),
    "advise, a type with a function": (lambda: jaxmp.advise(jnp.sin, devices=8, dtype="float32"), TypeError, "describe one product; leave"),
    "explain, an argument": (lambda: jaxmp.explain(jnp.sin, A), TypeError, "write explain(fn)(x) instead of explain(fn, x)"),
    "linear, a keyword by place": (lambda: jaxmp.linear(A, B, A[0], "gelu"), TypeError, "linear() takes 3 positional arguments; pass others by name, such as activation="),
    "advise, no product": (lambda: jaxmp.advise(jnp.tanh, devices=8)(jnp.ones(8)), ValueError, "tanh has no product with a predicted time"),
    "rate of 0": (lambda: jaxmp.Hardware("x", {"float32": 0}, 1.0, 1.0), ValueError, "rates['float32'] must be positive, got 0"),
    "rate of nothing": (lambda: jaxmp.Hardware("x", {"fp32": 1}, 1.0, 1.0), ValueError, "rates has fp32; it takes float64"),
    "latency": (lambda: jaxmp.Hardware("x", {}, 1.0, 1.0, latency=-1), ValueError, "latency must not be negative, got -1"),
    "hardware": (lambda: jaxmp.explain(jaxmp.matmul, hardware="h100"), ValueError, "explain: hardware must be one of 'this', 'h100-8'"),
    "hardware, a number": (lambda: jaxmp.explain(jaxmp.matmul, hardware=3), TypeError, "hardware must be a name or a jaxmp.Hardware, got int"),
    # Inside shard_map messages have the shapes per device.
    "all_gather_matmul": (lambda: manual(lambda a, b: jaxmp.all_gather_matmul(a[0], b, "x")), ValueError, "all_gather_matmul: x must have at least 2 dimensions, got 1 (shape (3,)); pass x[None]"),
    "contraction of shards": (lambda: manual(lambda a, b: jaxmp.matmul_all_reduce(a, b, "y"), (P(None, "y"), P())), ValueError, "matmul_all_reduce: w has k=6 but x has k=3 (shapes (4, 3), (6, 8) per device)"),
    "rows of the result": (lambda: jaxmp.matmul(zeros(5, 6), B, in_shardings=(P(None, "x"), P("x", None)), out_sharding=P("x", None), mesh=cases.BY_NAME["local"].jax_mesh(AxisType.Auto)), ValueError, "dimension 0 of the result has extent 5, which axis 'x' of size 2 does not divide (global shape (5, 8))"),
    "rows that ranks do not divide": (lambda: manual(lambda a, b: jaxmp.matmul_reduce_scatter(a, b, "y"), a=zeros(5, 6)), ValueError, "matmul_reduce_scatter: x has 5 rows, which the 2 ranks of axis 'y' do not divide (shape per device (5, 3)); pad the rows to a multiple of 2"),
    **{f"axes {axes} of block_matmul": (lambda axes=axes: manual(lambda a, b: jaxmp.block_matmul(a, b, axes), (P("x", "y"),) * 2), ValueError, f"got {axes!r}") for axes in ("x", ("x",), ("x", "y", "z"), None, 3)},
    **{f"{name} in shard_map": (lambda name=name, value=value: manual(lambda a, b: jaxmp.matmul(a, b, **{name: value()}), (P(), P())), ValueError, f"matmul: {name} was given inside shard_map, where operands are shards") for name, value in {"out_sharding": P, "in_shardings": lambda: (P(), P()), "mesh": lambda: cases.BY_NAME["local"].jax_mesh(AxisType.Auto)}.items()},
    **{f"{f.__name__} outside": (lambda f=f: f(A, B, "y"), ValueError, f"{f.__name__}:  ... shard_map") for f in COLLECTIVES},
    **{f"{f.__name__} over {axis}": (lambda f=f, axis=axis: manual(lambda a, b: f(a, b, axis)), error, f"{f.__name__}: {message}") for f in COLLECTIVES for axis, error, message in OVER},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_wrong_call(name):
    call, exception, message = CALLS[name]
    with pytest.raises(exception) as raised:
        call()
    for part in message.split(" ... "):
        assert part in str(raised.value)


WRONG_CALLS = {
    "eager": lambda: jaxmp.linear(A, zeros(5, 8)),
    "jit": lambda: jax.jit(jaxmp.matmul)(A, zeros(5, 8)),
    "keyword": lambda: jaxmp.mlp(A, B, None, C.T, None, act="relu"),
}


@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_traceback_ends_at_the_users_line(call):
    """Like JAX's tracebacks; its option brings the frames back."""
    files = {}
    for filtering in ("quiet_remove_frames", "off"):
        jax.config.update("jax_traceback_filtering", filtering)
        try:
            with pytest.raises((TypeError, ValueError)) as raised:
                call()
        finally:
            jax.config.update("jax_traceback_filtering", "auto")
        files[filtering] = [str(entry.path) for entry in raised.traceback]
    assert set(files["quiet_remove_frames"]) == {__file__}
    assert any("/jaxmp/_src/" in name for name in files["off"])


@pytest.mark.parametrize("is_jitted", [False, True])
def test_operands_in_host_memory(is_jitted):
    """jnp refuses them, too; otherwise a GPU's library would receive a pointer to the host."""
    float8, mask = jnp.zeros((128, 128), jnp.float8_e4m3fn), zeros(4, 16).astype(np.uint8)
    wide = {"transpose_b": True, "preferred_element_type": jnp.float32}
    calls = {
        "a": (lambda x: jaxmp.matmul(x, B), A),
        "relu_aux": (lambda x: jaxmp.matmul(A, B, epilog=Epilog.DRELU, epilog_inputs={"relu_aux": x}), mask),
        "bias": (functools.partial(with_bias, A, B), BIAS),
        "scaling.a": (lambda x: jaxmp.matmul(float8, float8, scaling=jaxmp.Scaling(a=x), **wide), np.float32(1)),
    }
    for name, (call, x) in calls.items():
        x = jax.device_put(x)
        x = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
        message = f"matmul: {name} is in host memory, but products run in device memory; move it there first"
        with pytest.raises(ValueError, match=re.escape(message)):
            (jax.jit(call) if is_jitted else call)(x)
        if name == "a":
            moved = jax.eval_shape(lambda a: jaxmp.matmul(jax.device_put(a, jax.memory.Space.Device), B), x)
            assert moved.shape == (4, 8)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_reference_is_no_array(is_jitted):
    functions = {
        r"matmul: a must be an array, got a jax.Ref; pass what it holds, a\[...\]": lambda r: jaxmp.matmul(r, B),
        "matmul: b must be an array, got a jax.Ref": lambda r: jaxmp.matmul(B, r),
        "linear: bias must be an array, got a jax.Ref": lambda r: jaxmp.linear(A, B, r),
        "dot_general: rhs must be an array, got a jax.Ref": lambda r: jaxmp.dot_general(B, r, (((1,), (0,)), ((), ()))),
        r"einsum: operands\[2\] must be an array, got a jax.Ref": lambda r: jaxmp.einsum("ij,jk,kl->il", A, B, r),
    }
    for message, call in functions.items():
        with pytest.raises(TypeError, match=message):
            (jax.jit(call) if is_jitted else call)(jax.new_ref(A))


def with_bias(a, b, bias):
    return jaxmp.matmul(a, b, epilog=Epilog.BIAS, epilog_inputs={"bias": bias})


@pytest.mark.parametrize("name", ["x", "w", "bias"])
def test_a_sum_that_is_not_taken(name, mesh_of):
    def call():
        given = {"x": jnp.ones((2, 2)), "w": jnp.ones((2, 2)), "bias": jnp.ones(2)}
        terms = jax.lax.axis_index("x").astype(jnp.float32) * given[name]
        return jaxmp.linear(**given | {name: jax.lax.pcast(terms, "x", to="unreduced")})

    message = rf"linear: {name} is unreduced: each device holds a term of a sum over \['x'\]; take the sum first"
    with pytest.raises(ValueError, match=message):
        jax.shard_map(call, mesh=mesh_of({"x": 2}), in_specs=(), out_specs=P("x"))()


# id: (specs of a and b, out_sharding, keywords, message); a is (4, 6), b (6, 8), on a 2 x 2 mesh.
WRONG_SHARDINGS = {
    "axis not in the mesh": ((P("z", None), P()), P(), {}, "matmul: the sharding of a names axis 'z', the mesh has ('x', 'y')"),
    "axis used twice": ((P("x", "x"), P()), P(), {}, "matmul: the sharding of a uses axis 'x' for two dimensions"),
    "too many entries": ((P("x", None, "y"), P()), P(), {}, "matmul: the sharding of a, P('x', None, 'y'), has 3 entries for 2 dimensions"),
    "a is not divided": ((P(None, ("x", "y")), P()), P(), {}, "matmul: dimension 1 of a has extent 6, which axis ('x', 'y') of size 4 does not divide (global shape (4, 6)); pad it to 8, or shard it differently"),
    "b is not divided": ((P(), P(("x", "y"), None)), P(), {}, "matmul: dimension 0 of b has extent 6, which axis ('x', 'y') of size 4 does not divide (global shape (6, 8)); pad it to 8"),
    "contraction without out_sharding": ((P(None, "x"), P("x", None)), None, {}, "matmul: the contraction is sharded over axis 'x' and it is ambiguous how the result should be sharded; pass out_sharding (without 'x' to all-reduce, with it on the rows to reduce-scatter)"),
    "contractions disagree": ((P(None, "x"), P("y", None)), None, {}, "matmul: the contraction is sharded over axis 'x' in a and 'y' in b and it is ambiguous how the result should be sharded; pass out_sharding"),
    "rows and columns on one axis": ((P("x", None), P(None, "x")), None, {}, "matmul: rows of a and columns of b are both sharded over axis 'x'; pass out_sharding, without 'x' on the rows to gather a, or without it on the columns to gather b"),
    "an out_sharding that is none": ((P(), P()), "x", {}, "matmul: out_sharding must be a PartitionSpec or a NamedSharding, got str"),
    "an in_sharding that is none": (("x", P()), P(), {}, "matmul: in_shardings must be a PartitionSpec or a NamedSharding, got str"),
    "an out_sharding that is a tuple": ((P(), P()), ("x", None), {}, "NamedSharding, got tuple; write P('x', None)"),
}  # fmt: skip


@pytest.mark.parametrize(("specs", "out", "keywords", "message"), WRONG_SHARDINGS.values(), ids=WRONG_SHARDINGS.keys())
def test_wrong_sharding(specs, out, keywords, message):
    mesh = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=re.escape(message)):
        jaxmp.matmul(A, B, in_shardings=specs, out_sharding=out, mesh=mesh, **keywords)


def test_operands_and_calls_of_two_meshes():
    mesh, other = cases.BY_NAME["local"].jax_mesh(), cases.BY_NAME["rs"].jax_mesh()
    auto = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    a, b, elsewhere = cases.put(A, mesh, P()), cases.put(B, mesh, P()), cases.put(B, other, P())
    einsum = jax.jit(jaxmp.einsum, static_argnums=0)
    around = "the operands live on mesh {'x': 2, 'y': 2} (explicit, explicit), but the mesh around them is {'x': 2, 'y': 2} (a"
    for call, ambient, message in (
        (lambda: jaxmp.matmul(a, elsewhere), None, "a lives on mesh {'x': 2, 'y': 2} but b on {'y': 4}; use one mesh"),
        (lambda: jaxmp.matmul(a, b, mesh=other), None, "mesh names mesh {'y': 4} but the call runs on {'x': 2"),
        (lambda: jaxmp.matmul(a, b), auto, around),
        (lambda: einsum("ij,jk->ik", a, b), auto, around),
    ):
        scope = jax.set_mesh(ambient) if ambient else contextlib.nullcontext()
        with scope, pytest.raises(ValueError, match=re.escape(message)):
            call()


OTHER_MESHES = {"wider": (slice(4), "{'x': 4}"), "in another order": (slice(1, None, -1), "a mesh of devices [1, 0]")}


@pytest.mark.small("values", of=lambda axis_type, argument, devices, message: ((axis_type, argument), message))
@pytest.mark.parametrize(("devices", "message"), OTHER_MESHES.values(), ids=OTHER_MESHES)
@pytest.mark.parametrize("argument", ["mesh", "in_shardings", "out_sharding"])
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_a_sharding_of_another_mesh_is_not_taken_for_the_calls(axis_type, argument, devices, message):
    here, other = (
        jax.make_mesh((len(x),), ("x",), axis_types=(axis_type,), devices=x)
        for x in (jax.devices()[:2], jax.devices()[devices])
    )
    whole, elsewhere = NamedSharding(here, P()), NamedSharding(other, P())
    options = {
        "mesh": {"mesh": other, "in_shardings": (elsewhere, elsewhere), "out_sharding": whole},
        "in_shardings": {"mesh": here, "in_shardings": (whole, elsewhere)},
        "out_sharding": {"mesh": here, "out_sharding": elsewhere},
    }[argument]
    a, b = cases.put(A, here, P()), cases.put(B, here, P())
    with pytest.raises(ValueError, match=re.escape(message) if argument != "mesh" else "out_sharding names .*mesh"):
        jaxmp.matmul(a, b, **options)


@pytest.mark.parametrize("f", COLLECTIVES, ids=lambda f: f.__name__)
def test_collectives_in_a_partial_manual_region(f):
    message = (
        rf"{f.__name__}: the enclosing shard_map is manual over \('y',\) but not over \('x',\); .*make every axis manual "
        r"\(leave out axis_names\), put the call into a second shard_map, with axis_names=\{'x'\}, or use jaxmp.matmul"
    )
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda a, b: manual(lambda a, b: f(a, b, "y"), axis_names={"y"}, a=a, b=b))(A, B)


def test_bias_of_an_all_reduce_that_differs_between_ranks():
    """Each rank's bias would be added to a sum that all ranks must share."""

    def call(a, b, bias):
        return jaxmp.matmul_all_reduce(a, b, "y", epilog=Epilog.BIAS, epilog_inputs={"bias": bias})

    mesh = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    f = jax.shard_map(call, mesh=mesh, in_specs=(P(None, "y"), P("y", None), P("y")), out_specs=P())
    with pytest.raises(
        ValueError,
        match=r"matmul_all_reduce: c and epilog inputs must be equal on every rank of axis .*'y'.*, but one varies over",
    ):
        f(A, B, zeros(16))


@pytest.mark.parametrize("name", ["local", "ag-data", "rs-data", "grid"])
def test_all_reduce_belongs_to_its_pattern(name, rng):
    """Refused before a launch in every mode that knows the pattern, and by the partitioner, which chooses the pattern."""
    case = cases.BY_NAME[name].replace(per_shard=(4, 4, 4))
    epilog = Epilog.ALLREDUCE | Epilog.BIAS
    bias = np.zeros(case.extents[1], np.float32)
    for mode in (modes.BY_ID["explicit"], modes.BY_ID["shard_map"]):
        if not mode.serves(case):
            continue
        with mode.scope(case):
            a, b = (mode.put(case, x, s) for x, s in zip(case.integers(rng), case.stored, strict=True))
            message = f"epilog ALLREDUCE belongs to the all_reduce pattern, but this call's pattern is {case.pattern}; "
            message += "shard the contraction and pass an out_sharding without its axis, call matmul_all_reduce"
            with pytest.raises(ValueError, match=message):
                mode.product(case, epilog=epilog)(a, b, bias=mode.put(case, bias, P(case.out[1])))


def test_the_partitioner_refuses_all_reduce_of_another_pattern(rng):
    case, mode = cases.BY_NAME["rs-data"].replace(per_shard=(4, 4, 4)), modes.BY_ID["partitioner"]
    a, b = (mode.put(case, x, s) for x, s in zip(case.integers(rng), case.stored, strict=True))
    with pytest.raises(Exception, match="epilog ALLREDUCE belongs to the all_reduce pattern"):
        jax.jit(mode.product(case, epilog=Epilog.ALLREDUCE))(a, b)


def test_a_mask_is_packed_per_shard(rng):
    case, mode = cases.BY_NAME["local"].replace(per_shard=(4, 4, 4)), modes.BY_ID["explicit"]
    mask = np.zeros((case.extents[0], 16), np.uint8)
    with mode.scope(case):
        a, b = (mode.put(case, x, s) for x, s in zip(case.integers(rng), case.stored, strict=True))
        with pytest.raises(ValueError, match=r"relu_aux must have 32 bytes a row.*in each of their 2 shards"):
            mode.product(case, epilog=Epilog.DRELU)(a, b, relu_aux=mode.put(case, mask, case.out))
