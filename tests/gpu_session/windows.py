"""The four windows of a session: what each of them runs, in order, and how long that may take.

1. loading: one NCCL, the library's own words, its answers on one rank against hostmp's
2. the tests of one GPU, in parallel processes; the promises about bits; memory over 10,000 calls
3. speed, with nothing beside it
4. two ranks on the GPU, each a process: the library's answers, products and gradients, a rank that dies
"""

import dataclasses
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# In a command and its environment: the folder that the session writes.
OUT = "{out}"
# The case that says how a whole task has ended.
WHOLE = "(whole)"


@dataclasses.dataclass(frozen=True)
class Task:
    """What Python is to run; `seconds` at most, and not begun where less than `least` is left."""

    name: str
    command: tuple[str, ...]
    seconds: float = 300.0
    least: float = 20.0
    env: tuple[tuple[str, str], ...] = ()


def _program(name: str, *arguments: str, **options) -> Task:
    return Task(" ".join((name, *arguments)), (str(HERE / "programs.py"), name, *arguments), **options)


def _tests(name: str, file: str, *arguments: str, **options) -> Task:
    command = ("-P", "-m", "pytest", "-p", "recorded_tests", str(ROOT / "tests" / "gpu" / file), "-q", *arguments)
    return Task(name, (*command, "-p", "no:cacheprovider", "--timeout=300"), **options)


def _bench(**options) -> Task:
    """It has a file of its own, which it goes on with."""
    command = (str(ROOT / "benchmarks" / "bench_gpu.py"), "--resume", "--json", f"{OUT}/window3-speed.json")
    return Task("speed", command, **options)


# Several processes on one GPU, as tests/gpu/gpu.py has them.
_SHARING = (("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_NVLS_ENABLE", "0"), ("NCCL_MAX_CTAS", "1"))
_WORKERS = ("-n", "8", "--dist", "worksteal")

WINDOWS = {
    1: [
        _program("load", seconds=120),
        _program("words", seconds=120),
        _program("conformance", "1", seconds=500),
    ],
    2: [
        _tests("calls", "test_calls.py", "-k", "not test_transform and not promise and not ten_thousand", *_WORKERS),
        _tests("memory", "test_calls.py", "-k", "ten_thousand", seconds=200),
        _tests("bits", "test_calls.py", "-k", "promise", seconds=300),
        _tests("transforms", "test_calls.py", "-k", "test_transform", *_WORKERS, seconds=500),
    ],
    3: [_bench(seconds=530, least=60)],
    4: [
        _program("conformance", "2", seconds=300, env=_SHARING),
        _tests("sharing", "test_sharing.py", "-k", "2", seconds=240),
        _program("death", seconds=120, env=_SHARING),
    ],
}
# Tasks of processes that are ranks of one job. Over the fakes they share the memory of their devices by a file.
_JOBS = ("sharing", "death")
# What a quick run takes of a task.
_QUICK = {
    "calls": ("--share", "1/60", "-n", "2"),
    "bits": ("--share", "0/54"),
    "transforms": ("--share", "1/400", "-n", "2"),
    "speed": ("--quick", "--skip", "float8", "float64", "TF32"),
}


def tasks(window: int, *, is_quick: bool, is_rehearsal: bool) -> list[Task]:
    """Those of a window; with `is_quick` a few cases of each."""
    found = [_over_fakes(task) if is_rehearsal else task for task in WINDOWS[window]]
    return [_quick(task) for task in found] if is_quick else found


def _over_fakes(task: Task) -> Task:
    job = (("FAKE_CUDA_JOB", f"{OUT}/{task.name}.job"),) if task.name in _JOBS else ()
    return dataclasses.replace(task, env=(*task.env, *job))


def _quick(task: Task) -> Task:
    env = (*task.env, ("GPU_SESSION_QUICK", "1"))
    return dataclasses.replace(task, command=(*task.command, *_QUICK.get(task.name, ())), env=env, least=5.0)
