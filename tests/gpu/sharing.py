"""One of several processes that share a GPU: `python sharing.py RANK RANKS PORT`, started by test_sharing.py.

Products, gradients and epilogs as the tests of many processes have them on CPUs, but over cuBLASMp. A quick run
(GPU_SESSION_QUICK) has one case of each.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent), str(HERE.parent / "process")]

import conftest  # settings of every test
import jax

import jaxmp

rank, nranks, port = map(int, sys.argv[1:])
jaxmp.distributed.initialize(f"127.0.0.1:{port}", nranks, rank, local_device_ids=[0], timeout=120)

import products
from gpu import among

from jaxmp import Epilog
from jaxmp._src.runtime import native

IS_QUICK = bool(os.environ.get("GPU_SESSION_QUICK"))


def main():
    assert jax.device_count() == nranks
    assert native.why_no_cublasmp() == ""
    # cuBLASMp multiplies contiguous shards on square grids only.
    found = [among(case, nranks) for case in products.FOUR if case.pattern != "grid" or nranks == 4]
    plain = [case for case in found if case.name in ("ag-data", "rs-data", "ar-data", "grid")]
    for case in plain if IS_QUICK else found:
        products.placed(case, "explicit", implementation="cublasmp")
    for case in plain[:1] if IS_QUICK else plain:
        for transposition in ("NT",) if IS_QUICK else ("NT", "TN", "TT"):
            products.placed(
                case.replace(transposition=transposition, per_shard=(8, 16, 24)), "explicit", implementation="cublasmp"
            )
        products.placed(case, "shard_map", implementation="cublasmp")
        products.placed(case, "explicit", implementation="xla")
        for dtype in ("bfloat16", "float16", "complex64")[: 1 if IS_QUICK else None]:
            products.rounded(case, dtype)
        products.transformed(case)
        products.empty(case)
        products.has_the_bits_of_one_device(case)
        if not IS_QUICK:
            # Rows and columns at other places of a call than on one device, and in several of them
            # (lowering/fixed_shape).
            products.has_the_bits_of_one_device(case.replace(dtype="bfloat16"), per_shard=(300, 2200, 64))
        for epilog in (Epilog.BIAS, Epilog.RELU_AUX, Epilog.GELU_AUX_BIAS)[: 1 if IS_QUICK else None]:
            products.with_epilog(case, epilog)
    print("RAN", dict(products.RAN), flush=True)


main()
