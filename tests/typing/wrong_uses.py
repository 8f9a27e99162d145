"""Wrong uses that a checker must refuse: each has its error code, and `mypy --strict` reports an unused `ignore`."""

import jax
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import CommOptions, Epilog, Scaling


def use(x: jax.Array, laid: jaxmp.BlockCyclicArray, spec: P) -> None:
    """Every public function."""
    # Operands.
    jaxmp.matmul("abc", x)  # type: ignore[call-overload]
    jaxmp.matmul(x, [[1.0]])  # type: ignore[call-overload]
    jaxmp.matmul(laid, x)  # type: ignore[call-overload]
    jaxmp.linear(x, None)  # type: ignore[call-overload]
    jaxmp.mlp(x, x, None, x, "b", activation="relu")  # type: ignore[arg-type]
    jaxmp.all_gather_matmul("abc", x, "x")  # type: ignore[call-overload]
    jaxmp.dot_general(x, "abc", (((1,), (0,)), ((), ())))  # type: ignore[arg-type]
    jaxmp.einsum("ij,jk", x, "abc")  # type: ignore[arg-type]
    jaxmp.quantize.tensor("abc")  # type: ignore[arg-type]
    jaxmp.from_block_cyclic(x)  # type: ignore[arg-type]
    jaxmp.to_block_cyclic(x, (2, 2))  # type: ignore[arg-type]

    # Options with few values.
    jaxmp.matmul(x, x, determinism="typo")  # type: ignore[call-overload]
    jaxmp.matmul(x, x, implementation="cuda")  # type: ignore[call-overload]
    jaxmp.linear(x, x, activation="elu")  # type: ignore[call-overload]
    jaxmp.mlp(x, x, None, x, None, activation="elu")  # type: ignore[arg-type]
    jaxmp.gated_mlp(x, x, x, x, activation="elu")  # type: ignore[arg-type]
    jaxmp.matmul_all_reduce(x, x, "x", determinism="typo")  # type: ignore[call-overload]
    jaxmp.dot_general(x, x, (((1,), (0,)), ((), ())), determinism="topology")  # type: ignore[arg-type]
    jaxmp.einsum("ij,jk", x, x, determinism="topology")  # type: ignore[arg-type]
    CommOptions(algorithm="fuse")  # type: ignore[arg-type]

    # Options of a wrong type, or in a wrong place.
    jaxmp.matmul(x, x, transpose_a="N")  # type: ignore[call-overload]
    jaxmp.matmul(x, x, out_sharding=("x", None))  # type: ignore[call-overload]
    jaxmp.matmul(x, x, in_shardings=spec)  # type: ignore[call-overload]
    jaxmp.matmul(x, x, scaling=(x, x))  # type: ignore[call-overload]
    jaxmp.matmul(x, x, comm={"algorithm": "fused"})  # type: ignore[call-overload]
    jaxmp.block_matmul(x, x, "x")  # type: ignore[call-overload]
    Scaling(a=1.0)  # type: ignore[arg-type]
    CommOptions(sm_count="8")  # type: ignore[arg-type]
    jaxmp.matmul(laid, laid, epilog=Epilog.RELU)  # type: ignore[call-overload]

    # Options that do not exist, or no longer do.
    jaxmp.matmul(x, x, scales=None)  # type: ignore[call-overload]
    jaxmp.matmul(x, x, algorithm="fused")  # type: ignore[call-overload]
    jaxmp.linear(x, x, epilog=Epilog.RELU)  # type: ignore[call-overload]
    jaxmp.mlp(x, x, None, x, None, activation="relu", alpha=2.0)  # type: ignore[call-arg]
    jaxmp.matmul_reduce_scatter(x, x, "x", out_sharding=spec)  # type: ignore[call-overload]
    jaxmp.einsum("ij,jk", x, x, transpose_a=True)  # type: ignore[call-arg]

    # Results.
    _ = jaxmp.matmul(x, x, epilog=Epilog.RELU_AUX).shape  # type: ignore[attr-defined]
    jaxmp.matmul(laid, laid).sum()  # type: ignore[attr-defined]
