"""Code as users write it, with the types that a checker has to find. `make lint` runs `mypy --strict` over it. Without
it a wider annotation, or an overload that no longer matches, would turn results into Any and go unseen."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import CommOptions, Epilog, Scaling, quantize
from jaxmp.testing import assert_bitwise_equal

WithResults = tuple[jax.Array, dict[str, jax.Array]]


def use(x: jax.Array, y: np.ndarray[Any, np.dtype[Any]], mesh: Mesh, rows: P, cols: P, tiles: NamedSharding) -> None:
    """Every public function."""
    bias = {"bias": jnp.ones(4)}
    scaling = Scaling(a=jnp.ones(()), b=np.float32(2), aux_dtype=jnp.float8_e4m3fn, result_amax=True)
    comm = CommOptions(dtype="float32", algorithm="split_p2p", sm_count=8)

    # The epilog decides what a product returns.
    assert_type(jaxmp.matmul(x, y), jax.Array)
    assert_type(jaxmp.matmul(x, y, x, alpha=x[0, 0], beta=np.float32(2), transpose_a=True), jax.Array)
    assert_type(jaxmp.matmul(x, y, transpose_b=True, conjugate_a=True, conjugate_b=True), jax.Array)
    assert_type(jaxmp.matmul(x, y, epilog=Epilog.GELU_BIAS, epilog_inputs=bias), jax.Array)
    assert_type(jaxmp.matmul(x, y, epilog=Epilog.DEFAULT), jax.Array)
    assert_type(jaxmp.matmul(x, y, epilog=Epilog.RELU_AUX), WithResults)
    assert_type(jaxmp.matmul(x, y, epilog=Epilog.GELU_AUX, scaling=scaling), WithResults)
    d, aux = jaxmp.matmul(x, y, epilog=Epilog.RELU_AUX)
    assert_type(jaxmp.matmul(d, y, epilog=Epilog.DRELU_BGRAD, epilog_inputs=aux)[1]["drelu_bgrad"], jax.Array)

    # With scales, or with an epilog that is known at run time only, either is possible.
    assert_type(jaxmp.matmul(x, y, scaling=scaling), Any)
    assert_type(jaxmp.matmul(x, y, epilog=Epilog.ALLREDUCE | Epilog.BIAS, epilog_inputs=bias), Any)

    # The sharding, the method and the implementation.
    assert_type(jaxmp.matmul(x, y, in_shardings=(rows, cols), out_sharding=cols, mesh=mesh, comm=comm), jax.Array)
    assert_type(jaxmp.matmul(x, y, in_shardings=[tiles, tiles], out_sharding=tiles, determinism="batch"), jax.Array)
    assert_type(jaxmp.matmul(x, y, implementation="host", precision=jax.lax.Precision.HIGHEST), jax.Array)
    assert_type(jaxmp.matmul(x, y, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32), jax.Array)
    assert_type(jaxmp.matmul(x, y, precision="32F_FAST_TF32", preferred_element_type=jnp.float32), jax.Array)

    # Layers.
    assert_type(jaxmp.linear(x, y, bias["bias"], activation="gelu", out_sharding=rows, comm=comm), jax.Array)
    assert_type(jaxmp.linear(x, y, scaling=scaling), Any)
    assert_type(jaxmp.linear(x, y, activation="silu"), jax.Array)
    assert_type(jaxmp.linear(x, y, activation=jax.nn.elu), jax.Array)
    assert_type(jaxmp.gated_mlp(x, y, y, y, b_up=bias["bias"], activation=jnp.tanh, out_sharding=rows), jax.Array)
    assert_type(
        jaxmp.mlp(x, y, None, y, None, activation="relu", in_shardings=(rows, cols, rows), mesh=mesh), jax.Array
    )

    # Inside shard_map.
    assert_type(jaxmp.all_gather_matmul(x, y, "x", determinism="topology"), jax.Array)
    assert_type(jaxmp.matmul_reduce_scatter(x, y, ("x", "y"), x, beta=1.0, epilog=Epilog.RELU_AUX), WithResults)
    assert_type(jaxmp.matmul_all_reduce(x, y, "x", scaling=scaling), Any)
    assert_type(jaxmp.block_matmul(x, y, ("x", "y"), comm=comm), jax.Array)

    # Contractions.
    assert_type(jaxmp.dot_general(x, y, (((1,), (0,)), ((), ()))), jax.Array)
    assert_type(jaxmp.dot_general(x, y, (([1], [0]), ([], [])), None, jnp.float32, determinism="batch"), jax.Array)
    assert_type(jaxmp.einsum("ij,jk->ik", x, y, out_sharding=rows, precision="highest"), jax.Array)
    assert_type(jaxmp.ragged_dot(x, y, x, determinism="topology"), jax.Array)

    # Low precision.
    assert_type(quantize.tensor(x, scale=None), tuple[jax.Array, jax.Array])
    assert_type(quantize.dequantize(*quantize.mxfp8(y)), jax.Array)

    # Block-cyclic matrices.
    laid = jaxmp.to_block_cyclic(x, jaxmp.BlockCyclic(grid=(1, 1), block=(2, 2)), mesh=mesh, axes=("x", ("y",)))
    assert_type(jaxmp.matmul(laid, laid, laid, beta=2.0, out_sharding=laid.layout), jaxmp.BlockCyclicArray)
    assert_type(laid @ laid, jaxmp.BlockCyclicArray)
    assert_type(jaxmp.from_block_cyclic(laid), jax.Array)
    assert_type(laid.dtype, np.dtype[Any])

    # Everything else.
    assert_type(jaxmp.explain(jaxmp.matmul)(x, y).rows[0].flops, int)
    assert_type(jaxmp.explain(jaxmp.matmul, compiled=True)(x, y).calls.rows[0].flops, int)
    machine = jaxmp.Hardware("mine", {"float32": 1e13}, memory_bandwidth=1e12, link_bandwidth=1e11)
    assert_type(jaxmp.explain(jaxmp.matmul, hardware=machine)(x, y).seconds, float)
    assert_type(jaxmp.advise(8, 8, 8, 2, hardware="h100-8", dtype=jnp.float32).best.a, P)
    assert_type(jaxmp.advise(jaxmp.matmul, devices=2, quiet=True)(x, y).best.products[0].seconds, float)
    assert_type(jaxmp.draw(jaxmp.matmul)(x, y).svg, str)
    assert_type(jaxmp.audit(jaxmp.matmul, vary="mesh")(x, y).compared, int)
    assert_type(jaxmp.profile(jaxmp.matmul, quiet=True)(x, y).calls[0].seconds, float)
    assert_type(jaxmp.plan_cache_info(), dict[str, int])
    assert_bitwise_equal(x, y)
    jaxmp.distributed.initialize("127.0.0.1:9999", 2, 0, local_device_ids=[0], timeout=5.0)
    jaxmp.distributed.shutdown()
