"""The tasks of a session that are no tests: `python programs.py NAME [ARGUMENT ...]`. Each records what it finds.

load                what is loaded from where, and one NCCL in the process
words               what the library says it does, for each pattern and storage on one rank
conformance RANKS   the conformance suite on hostmp and on cuBLASMp, in shares
death               of two processes on the GPU one is killed; the other has to end with an error that says so
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TASK = os.environ.get("GPU_SESSION_TASK", "")
IS_QUICK = bool(os.environ.get("GPU_SESSION_QUICK"))
IS_REHEARSAL = bool(os.environ.get("JAXMP_FAKES"))


def load() -> None:
    import jax

    from jaxmp._src.runtime import cuda_libraries, native

    why = native.why_no_cublasmp()
    loaded = {name: cuda_libraries.mapped_files(name) for name in ("libnccl.so", "libcublas.so", "libcublasLt.so")}
    device = jax.devices()[0]
    found = {
        "libraries": native.cublasmp_info(),
        "loaded": loaded,
        "card": [device.device_kind, str(device.compute_capability)],
        "jax": jax.__version__,
        "why_not": why,
    }
    print(json.dumps(found, indent=1))
    is_right = not why and len(loaded["libnccl.so"]) <= 1
    record.add(TASK, "libraries", record.PASSED if is_right else record.FAILED, **found)
    sys.exit(not is_right)


def words() -> None:
    """Each pattern and storage with the lines that the library has logged for it."""
    os.environ["JAXMP_LOG"] = "cublasmp"
    import functools

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    import jaxmp
    from jaxmp._src.runtime import native

    mesh = jax.make_mesh((1,), ("y",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
    patterns = {
        "local": (P(), P(), P()),
        "all_gather": (P("y", None), P(None, "y"), P(None, "y")),
        "reduce_scatter": (P(None, "y"), P("y", None), P("y", None)),
        "all_reduce": (P(None, "y"), P("y", None), P(None, None)),
    }
    is_right = True
    for name, (spec_a, spec_b, out) in patterns.items():
        for storage in ("NN", "NT", "TN", "TT"):
            ta, tb = (letter == "T" for letter in storage)
            a = np.arange(64 * 48, dtype=np.float32).reshape(64, 48) % 5
            b = np.arange(48 * 80, dtype=np.float32).reshape(48, 80) % 7
            with jax.set_mesh(mesh):
                x = jax.device_put(a.T.copy() if ta else a, jax.NamedSharding(mesh, _turned(spec_a, ta)))
                w = jax.device_put(b.T.copy() if tb else b, jax.NamedSharding(mesh, _turned(spec_b, tb)))
                product = functools.partial(
                    jaxmp.matmul, transpose_a=ta, transpose_b=tb, out_sharding=out, implementation="cublasmp"
                )
                native.cublasmp_log()
                d = jax.block_until_ready(jax.jit(product)(x, w))
            is_equal = bool(jnp.all(d == a @ b))
            said = native.cublasmp_log()
            is_right = is_right and is_equal
            status = record.PASSED if is_equal else record.FAILED
            record.add(TASK, f"{name} {storage}", status, said=said, is_equal=is_equal)
    sys.exit(not is_right)


def _turned(spec, is_transposed: bool):
    from jax.sharding import PartitionSpec as P

    return P(*reversed(spec)) if is_transposed else spec


def conformance(ranks: str) -> None:
    """Share by share, so that what one of them ends in does not end the others."""
    nshares = 64 if IS_QUICK else 16
    ended, is_right = record.ended(TASK), True
    known = "fakes" if IS_REHEARSAL else "cublasmp"
    for share in range(1 if IS_QUICK else nshares):
        case = f"share {share}/{nshares}"
        if case in ended:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(ROOT / "tests" / "conformance" / "run.py"), "--ranks", ranks]
            command += [
                "--binary",
                os.environ["GPU_SESSION_CONFORMANCE"],
                "--share",
                f"{share}/{nshares}",
                "--out",
                folder,
            ]
            command += ["--known", str(ROOT / "tests" / "conformance" / f"known_of_{'the_' * IS_REHEARSAL}{known}.txt")]
            command += [] if IS_REHEARSAL or ranks == "1" else ["--processes"]  # over the fakes a rank is a thread here
            done = subprocess.run(command, capture_output=True, text=True)
            lines = [line for file in sorted(Path(folder).glob("cublasmp-*.jsonl")) for line in record.read(file)]
        print(done.stdout, done.stderr, sep="", flush=True)
        status = record.PASSED if done.returncode == 0 else record.FAILED
        is_right = is_right and status == record.PASSED
        said = (done.stdout + done.stderr)[-20000:]
        record.add(TASK, case, status, seconds=round(time.monotonic() - started, 1), said=said, lines=lines)
    sys.exit(not is_right)


def death() -> None:
    from job import free_port

    port, limit = free_port(), 60.0
    env = os.environ | {"JAXMP_TIMEOUT": "10"}
    command = [sys.executable, str(HERE / "programs.py"), "die"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port)], env=env, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    started = time.monotonic()
    try:
        said = [rank.communicate(timeout=limit)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    statuses = [rank.returncode for rank in ranks]
    print(statuses, *said, sep="\n")
    is_right = "SAW" in said[0] and statuses[1] == -signal.SIGKILL
    found = {"statuses": statuses, "said": said, "seconds": round(time.monotonic() - started, 1)}
    record.add(TASK, "a rank is killed", record.PASSED if is_right else record.FAILED, **found)
    sys.exit(not is_right)


def die(rank: str, port: str) -> None:
    """Rank 1 is killed between two products; what rank 0 sees, it prints."""
    import functools

    import jax
    import numpy as np
    from jax.sharding import PartitionSpec as P

    import jaxmp

    jaxmp.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank), local_device_ids=[0], timeout=10)
    mesh = jax.make_mesh((2,), ("y",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = np.ones((256, 256), np.float32)
    with jax.set_mesh(mesh):
        a, b = (jax.make_array_from_callback(x.shape, jax.NamedSharding(mesh, spec), lambda at: x[at])
                for spec in (P("y", None), P(None, "y")))  # fmt: skip
        product = jax.jit(functools.partial(jaxmp.matmul, out_sharding=P(None, "y"), implementation="cublasmp"))
        jax.block_until_ready(product(a, b))
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            for _ in range(3):
                jax.block_until_ready(product(a, b))
        except Exception as error:
            print(f"SAW {time.monotonic() - started:.1f} s: {type(error).__name__}: {error}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    {"load": load, "words": words, "conformance": conformance, "death": death, "die": die}[sys.argv[1]](*sys.argv[2:])
