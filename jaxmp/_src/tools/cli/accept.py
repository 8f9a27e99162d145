"""Prove cuBLASMp on a node with GPUs, in one process and in a process for each GPU: every pattern, type, epilog and
algorithm with exact integers, sequences of calls, the death of a rank, and rates next to XLA's."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmp import distributed, testing
from jaxmp._src.core.ops.matmul import matmul
from jaxmp._src.core.spec import epilogs
from jaxmp._src.core.spec.options import CommOptions
from jaxmp._src.core.validation.comm_options import ALGORITHMS
from jaxmp._src.platform.hardware.clock import interleaved
from jaxmp._src.platform.runtime import config, native
from jaxmp._src.tools.cli import bench, output
from jaxmp._src.tools.cli.selftest import check_placement, place, product_of, require_equal
from jaxmp.testing import ON_GPUS, Check, Layout

_DEATH = "death of a rank"
_KINDS = ("types", "epilogs", "algorithms", "sequences", "microbatches", "rates", _DEATH)
_BATCH = 60  # calls of a sequence that are dispatched before the first is waited for
_IN_FLIGHT = 8  # calls of a timed product


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("accept.json"), help="the JSON file (accept.json)")
    parser.add_argument("--minutes", type=float, default=15.0, help="when it ends at the latest (15)")
    parser.add_argument("--quick", action="store_true", help="small products, few calls and cases, to try the command")
    parser.add_argument("--rank", type=int, nargs=4, help=argparse.SUPPRESS)  # rank, ranks, port, first check


def run(options: argparse.Namespace) -> output.Result:
    """Runs the checks in one process and, with several GPUs, in one per GPU. Writes the JSON file --out. The text is a
    table, the failures and a sentence; the status is 1 if a check fails. With --rank it only runs the checks of one
    rank of such a job, without a text. Raises CommandError as `_job` does."""
    if options.rank:
        _run_rank(options.rank, options.quick)
        return output.Result("", None)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [_job(1, Path(folder), options.quick, start + 30 * options.minutes)]
        if (count := jobs[0]["machine"]["gpus"]) > 1:
            jobs.append(_job(count, Path(folder), options.quick, start + 60 * options.minutes))
    said, failed = _sentence(jobs), [x | {"in": job["name"]} for job in jobs for x in job["checks"] if x.get("error")]
    value = {"passed": not failed, "sentence": said, "jobs": jobs}
    options.out.write_text(json.dumps(value, indent=1) + "\n")
    rows = [(kind, *(_cell(job, kind) for job in jobs)) for kind in _KINDS]
    lines = output.table([("", *(job["name"] for job in jobs)), *rows])
    lines += [f"FAILED in {x['in']}: {x['check']}, {x['of']}: {x['error']}" for x in failed]
    return output.Result("\n".join([*lines, said]), value, int(bool(failed)))


# ---- processes


def _job(nranks: int, folder: Path, is_quick: bool, end: float) -> dict[str, Any]:
    """Runs a job of `nranks` processes until `end`, a `time.monotonic()`. Returns its "name", "machine", "checks" (a
    dict of each check that ended, in order) and "not run because" (why other checks did not run; a text even if all
    ran). A check fails if it does on any rank, or ends its process (except the death of a rank, with the right errors).
    After such an end the next checks run in new processes. If these begin no check, returns what there is. Raises
    CommandError without CUDA devices, or if the first processes write nothing."""
    found: dict[int, dict[str, Any]] = {}
    first, total, head, why = 0, 1, dict[str, Any](), ""
    while first < total:
        here = folder / f"{nranks}.{first}"
        statuses = _start(nranks, first, here, is_quick, end)
        logs = [(here / f"{rank}.log").read_text().strip().rpartition("\n")[2] for rank in range(nranks)]
        files = [here / f"{rank}.jsonl" for rank in range(nranks)]
        written = [file.read_text().splitlines() if file.is_file() else [] for file in files]
        ended = f"a process ended: {'; '.join(filter(None, logs))}"
        why = "the time was over" if None in statuses else ended
        if not first and (not written[0] or "no CUDA" in written[0][0]):
            raise output.CommandError(json.loads(written[0][0])["why"] if written[0] else why)
        head = head or json.loads(written[0][0])
        for line in map(json.loads, (line for lines in written for line in lines[1:])):
            error = found.get(line["index"], {}).get("error") or line.get("error")
            found[line["index"]] = line | ({"error": error} if error else {})
        begun = max(found, default=-1)
        if None in statuses or begun < first:
            break
        first, total = begun + 1, head["total"]
        if "seconds" not in (last := found[begun]):
            alive = [log for log, status in zip(logs, statuses, strict=True) if status != -signal.SIGKILL]
            is_right = all(log.startswith("jaxmp.DistributedError: ") for log in alive) and len(alive) == nranks - 1
            last |= {"error": "" if last["check"] == _DEATH and is_right else ended, "seconds": None}
    else:
        why = "it needs several GPUs"
    name = "one process" if nranks == 1 else f"{nranks} processes"
    checks = [found[i] for i in sorted(found) if "seconds" in found[i]]
    return {"name": name, "machine": head["machine"], "not run because": head["why"] or why, "checks": checks}


def _start(nranks: int, first: int, folder: Path, is_quick: bool, end: float) -> list[int | None]:
    """Runs the checks from `first` on in new processes, which write to `folder`, and waits for them until `end`, a
    `time.monotonic()`. Then it kills the processes that still run. Returns the exit statuses, by rank; None for a
    process that it killed."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(map(os.path.abspath, sys.path))  # the folder of a process is another one
    environment = config.of_child(PYTHONPATH=path, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    processes, statuses = [], []
    for rank in range(nranks):
        command = [sys.executable, "-m", "jaxmp", "accept", *["--quick"] * is_quick, "--rank"]
        command += map(str, (rank, nranks, port, first))
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log))
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        statuses.append(process.poll())
    for process in processes:
        process.kill()
        process.wait()
    return statuses


def _cell(job: dict[str, Any], kind: str) -> str:
    """Returns a cell of the table: how many checks of a kind passed, were refused or failed, or "not run"; "-" for the
    death of a rank in one process."""
    if kind == _DEATH and job["name"] == "one process":
        return "-"
    found = [check for check in job["checks"] if check["check"] == kind]
    failed, refused = (sum(bool(check.get(what)) for check in found) for what in ("error", "refused"))
    counts = ((len(found) - failed - refused, "passed"), (refused, "refused"), (failed, "FAILED"))
    return ", ".join(f"{count} {what}" for count, what in counts if count) or "not run"


def _sentence(jobs: list[dict[str, Any]]) -> str:
    """Returns what a person can paste: machine, versions, counts, rates, and what did not run."""
    machine, parts = jobs[0]["machine"], []
    for job in jobs:
        parts.append(
            f"in {job['name']} " + ", ".join(f"{kind} {cell}" for kind in _KINDS if (cell := _cell(job, kind)) != "-")
        )
        rates = [x["found"] for x in job["checks"] if x["check"] == "rates" and x.get("found")]
        if ratios := [rate["jaxmp"] / rate["xla"] for rate in rates]:
            parts[-1] += f", at {min(ratios):.2f} to {max(ratios):.2f} of XLA's rate"
        parts[-1] += f" (not run because {job['not run because']})" * ("not run" in parts[-1])
    libraries = ", ".join(f"{name} {machine.get(f'{name}_version')}" for name in ("cublasmp", "nccl", "driver"))
    head = f"jaxmp {importlib.metadata.version('jaxmp')} on {machine['gpus']} x {machine['kind']} ({libraries})"
    return f"{head}: {'; '.join(parts)}."


# ---- checks, in the order of every rank


def _run_rank(place_in_job: list[int], is_quick: bool) -> None:
    """Runs the checks of one rank. `place_in_job`: the rank, the number of ranks, the coordinator's port, and the
    number of the first check to run. Writes a head to RANK.jsonl, and two lines per check, before and after it. A check
    that raises is recorded as refused or as an error, and the next one runs. Without cuBLASMp or a CUDA device there is
    only the head, which says why."""
    rank, nranks, port, first = place_in_job
    if nranks > 1:
        distributed.initialize(f"127.0.0.1:{port}", nranks, rank, local_device_ids=[rank])
    why = native.why_no_cublasmp() if native.cuda_devices() else "JAX has no CUDA device"
    count = max(count for count in (1, 2, 4, 8) if count <= jax.device_count())
    with Path(f"{rank}.jsonl").open("w", buffering=1) as file, jax.enable_x64(True):
        found = [] if why else list(_checks(count, nranks, is_quick))
        machine = {"gpus": count, "kind": jax.devices()[0].device_kind, "jax": importlib.metadata.version("jax")}
        head = {"machine": machine | native.cublasmp_info(), "total": len(found), "why": why}
        print(json.dumps(head), file=file)
        for i, check in enumerate(found[first:], first):
            line = {"index": i, "check": check.promise, "of": check.subject}
            print(json.dumps(line), file=file)
            started = time.perf_counter()
            try:
                line["found"] = check.run()
            except Exception as error:  # a check that cannot run is a result as well
                is_refused = isinstance(error, NotImplementedError) or "UNIMPLEMENTED" in str(error)
                line["refused" if is_refused else "error"] = f"{type(error).__name__}: {error}"[:2000]
            print(json.dumps(line | {"seconds": round(time.perf_counter() - started, 3)}), file=file)


def _checks(ndevices: int, nranks: int, is_quick: bool) -> Iterator[Check]:
    """Yields the checks of every kind, or a few of each if `is_quick`. With one device it leaves out sequences,
    microbatches, algorithms, meshes of two axes, and rates of other patterns than "local"; with one rank, the death of
    a rank."""
    layouts, extents = list(testing.layouts(ndevices)), (64, 64, 64) if is_quick else (512, 256, 768)
    exact = functools.partial(check_placement, implementation=ON_GPUS)
    if lines := [layout for layout in layouts if layout.name.startswith("data")]:
        # Along the other axis of the mesh, too.
        lines += [dataclasses.replace(x, mesh=tuple(zip("yx", dict(x.mesh).values(), strict=True))) for x in lines]
        calls = _BATCH * (2 if is_quick else 168)
        yield Check("sequences", f"{calls} calls", functools.partial(_check_sequence, lines, calls, is_quick))
        yield Check("microbatches", "checkpoints", functools.partial(_check_microbatches, ndevices, extents))
    plain = [layout for layout in layouts if layout.name in ("local", "all-gather", "reduce-scatter", "all-reduce")]
    layouts, types = (plain[1:3], ("float32",)) if is_quick else (layouts, ("bfloat16", "float32"))
    for layout, dtype in itertools.product(layouts, types if is_quick else (*testing.DTYPES, "float8_e4m3fn")):
        run = functools.partial(exact, layout, dtype, extents=extents, has_gradients=True)
        yield Check("types", f"{layout.name}, {dtype}", run)
    for layout, dtype, (name, patterns) in itertools.product(layouts, types, ALGORITHMS.items()):
        if ndevices > 1 and layout.name.removeprefix("data x ").replace("-", "_") in patterns:
            run = functools.partial(exact, layout, dtype, extents=extents, comm=CommOptions(algorithm=name))  # type: ignore[arg-type]
            yield Check("algorithms", f"{layout.name}, {dtype}, {name}", run)
    some = list(epilogs.RULES)[1 :: 13 if is_quick else 1]
    for layout, dtype, epilog in itertools.product(plain[:2] if is_quick else plain, types, some):
        run = functools.partial(exact, layout, dtype, extents=(32, 64, 64), epilog=epilog)
        yield Check("epilogs", f"{layout.name}, {dtype}, {epilog.name}", run)
    for layout in plain[: 1 if ndevices == 1 else 2 if is_quick else None]:
        yield Check("rates", layout.name, functools.partial(_check_rate, layout, 16 if is_quick else 8192, types[0]))
    if nranks > 1:
        yield Check(_DEATH, "between two products", functools.partial(_check_death, plain[1]))


# The library takes b as (n, k) in every pattern.
_product_of = functools.partial(product_of, transpose_b=True, implementation=ON_GPUS)


def _line(ndevices: int) -> jax.sharding.Mesh:
    return jax.make_mesh((ndevices,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:ndevices])


def _check_sequence(layouts: list[Layout], calls: int, is_quick: bool) -> int:
    """Compares `calls` calls in a row, each of other integers, and returns `calls`. Raises AssertionError if one is
    wrong. The calls come in batches of `_BATCH`; in every other batch XLA's all-to-alls are between them. Ranks take
    turns in being late on their device: every tenth call follows a delay, a short one if `is_quick`."""
    rng, ndevices, products = np.random.default_rng(0), layouts[0].make_mesh().size, list(map(_product_of, layouts))
    mesh = _line(ndevices)
    move = jax.jit(lambda x: jax.sharding.reshard(x, P(None, "x")))
    delay = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, x: x @ x, x))
    for start in range(0, calls, _BATCH):
        results = []
        for i in range(start, start + _BATCH):
            late, which = jax.devices()[i // 10 % ndevices], (5 * i + i // 7) % len(layouts)
            if i % 10 == 0 and late.process_index == jax.process_index():
                delay(jax.device_put(np.eye(4 if is_quick else 1024, dtype=np.float32), late))
            a, b = (rng.integers(-1, 2, shape).astype(jnp.bfloat16) for shape in ((64, 64), (128, 64)))
            results.append((f"call {i}, {layouts[which].name}", products[which](a, b), a.astype(int) @ b.T.astype(int)))
            if start // _BATCH % 2 and i % 3 == 0:
                with jax.set_mesh(mesh):
                    results.append((f"XLA's all-to-all {i}", move(place(a, mesh, P("x", None))), a))
        for name, got, want in results:
            require_equal(got, want, name)
    return calls


def _check_microbatches(ndevices: int, extents: tuple[int, int, int]) -> int:
    """Compares sums of gradients of microbatches under checkpoints with exact sums, and returns how many microbatches.
    Raises AssertionError if one is wrong. Calls follow each other without the host's wait."""
    mesh, (m, k, n), rng = _line(ndevices), extents, np.random.default_rng(1)
    shapes, specs = ((4, m, k), (k, n), (n, k)), (P(None, "x", None), P(None, "x"), P("x", None))
    xs, up, down = operands = [rng.integers(-1, 2, shape).astype(np.float32) for shape in shapes]

    product: Any = functools.partial(matmul, implementation=ON_GPUS)

    @jax.checkpoint
    def layer(weights: Any, x: jax.Array) -> Any:
        h = product(x, weights[0], out_sharding=P(None, "x"))
        return product(h, weights[1], out_sharding=P("x", None))

    @jax.jit
    def step(xs: jax.Array, *weights: jax.Array) -> Any:
        def add(total: Any, x: jax.Array) -> Any:
            grads = jax.grad(lambda weights: jnp.sum(layer(weights, layer(weights, x))))(weights)
            return jax.tree.map(jnp.add, total, grads), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), xs)[0]

    with jax.set_mesh(mesh):
        got = step(*(place(x, mesh, spec) for x, spec in zip(operands, specs, strict=True)))
    want = [np.zeros_like(up), np.zeros_like(down)]
    for x in xs:
        cotangent = np.ones_like(x)
        for given in (x @ up @ down, x):
            want[0] += given.T @ (cotangent @ down.T)
            want[1] += (given @ up).T @ cotangent
            cotangent = cotangent @ down.T @ up.T
    for name, gradient, expected in zip(("up", "down"), got, want, strict=True):
        require_equal(gradient, expected, f"gradient in {name}")
    return len(xs)


def _check_rate(layout: Layout, extent: int, dtype: str) -> Any:
    """Returns {"by": implementation, "jaxmp" and "xla": TFLOP/s}. Raises AssertionError if their results differ by more
    than rounding. Ranks have `_IN_FLIGHT` calls at once."""
    calls, implementation = bench.contenders(layout, (extent,) * 3, dtype)
    if error := bench.disagreement(calls, extent, dtype):
        raise AssertionError(error)
    several = {name: lambda call=call: [call() for _ in range(_IN_FLIGHT)] for name, call in calls.items()}
    seconds = interleaved(several, rounds=(7, 7), turn=0)
    return {"by": implementation} | {name: 2e-12 * extent**3 * _IN_FLIGHT / each for name, each in seconds.items()}


def _check_death(layout: Layout) -> int:
    """Kills the last rank between two products. Every other rank has to end with the reason. Never returns, but raises
    AssertionError on a rank that survives."""
    product, ones = _product_of(layout), np.ones((64, 64), np.float32)
    jax.block_until_ready(product(ones, ones))
    if jax.process_index() == jax.process_count() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    jax.block_until_ready([product(ones, ones) for _ in range(3)])
    raise AssertionError("the products have ended without one of their ranks")
