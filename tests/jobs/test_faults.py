"""The view of every live rank when another one is wrong, slow or dead: the rows of docs/faults.md. A job that hangs
costs a cluster; an error that names no rank costs its users a day."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from job import SIGINT, TIMEOUT, Job, free_port, run


def call_at(mark):
    """Returns the matmul in ranks.py on the line that ends with `# mark`, as messages name it."""
    lines = (Path(__file__).parent / "ranks.py").read_text().splitlines()
    return f"matmul at ranks.py:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"


CALL, STEP = call_at("THE CALL"), call_at("THE STEP")
ROWS = call_at("THE ROWS")
# Beyond the deadline itself: two processors that four ranks and other work share.
LATE = TIMEOUT + 3.0
# Ahead of the first step there is no transport yet, and every rank still has to compile.
COMPILES = 10.0
CHUNKS = {"all": {"JAXMP_SHARED_MEMORY": "off", "CHUNKS": "1"}}
GLOO = {"all": {"JAXMP_SHARED_MEMORY": "off"}}  # XLA's collectives, also between processes of one machine


@dataclasses.dataclass(frozen=True)
class Fault:
    """The message of each live rank in a scenario of ranks.py, `within` so many seconds of the fault. The victim is
    rank 0 or the last one; with `spread` every rank lives, and sees it within so many seconds of the first one, for
    ranks start and compile at their own pace."""

    message: str
    within: float = 2.0
    nprocesses: int = 3
    stopped: tuple[int, ...] = ()
    spread: float | None = None
    env: dict | None = None


def other(field, mine, theirs):
    """A difference, as the rank that has it and as another one tell it."""
    return f"{field}={mine}.*, rank [01] has {field}={theirs}|{field}={theirs}.*, rank 2 has {field}={mine}"


KILLED, STOPPED = "has ended without a word", "has not come and does not answer"
DIFFERS = r"matmul at ranks.py:\d+: rank \d has "
FAULTS = {
    "killed-before": Fault(f"{CALL}: rank 2 {KILLED}"),
    "killed-during": Fault(f"{CALL}: rank 2 {KILLED}"),
    # A product is under way after the failed run has given its operands back.
    "killed-during-chunks": Fault(f"{CALL}: rank 2 {KILLED}", env=CHUNKS),
    "killed-during-gathers": Fault(f"{ROWS}: rank 2 {KILLED}", env=CHUNKS),
    "stopped-during-gathers": Fault(f"{ROWS}: rank 1 .*does not answer", LATE, nprocesses=2, stopped=(1,), env=CHUNKS),
    "killed-after": Fault(f"{CALL}: rank 2 {KILLED}"),
    "killed-and-caught": Fault(f"{CALL}: rank 2 {KILLED}"),
    # Rank 0 holds JAX's coordination service, and its clients would abort.
    "killed-of-rank-0": Fault(f"{CALL}: rank 0 {KILLED}"),
    "stopped-before": Fault(f"{CALL}: rank 2 {STOPPED}", LATE, stopped=(2,)),
    "stopped-during": Fault(f"{CALL}: rank 1 .*does not answer", LATE, nprocesses=2, stopped=(1,), env=GLOO),
    "stopped-after": Fault(f"{CALL}: rank 2 {STOPPED}", LATE, stopped=(2,)),
    "stopped-of-rank-0": Fault(f"{CALL}: rank 0 {STOPPED}", LATE, stopped=(0,)),
    # Otherwise ranks that wait for the stopped one indirectly would not name it.
    "stopped-behind": Fault(rf"{CALL}: rank 2 has not come; it is alive, .*, rank 0 does not answer; rank 3 has waited",
        LATE, nprocesses=4, stopped=(0, 1, 2)),
    # The gradient's own gather has no order with the product's barrier, so it needs one of its own.
    "first-killed": Fault(f"{STEP}: rank 2 {KILLED}", COMPILES),
    "first-killed-of-rank-0": Fault(f"{STEP}: rank 0 {KILLED}", COMPILES),
    "first-raised": Fault(f"{STEP}: rank 2 has ended: it raised ValueError: bad luck", COMPILES),
    "first-stopped": Fault(f"{STEP}: rank 2 {STOPPED}", TIMEOUT + COMPILES, stopped=(2,)),
    "first-stopped-of-rank-0": Fault(f"{STEP}: rank 0 {STOPPED}", TIMEOUT + COMPILES, stopped=(0,)),
    # XLA then waits for JAX's store, which was rank 0's, without end.
    "opening": Fault(f"{CALL}: rank 0 has ended", LATE, nprocesses=2, env=GLOO),
    "joining": Fault("initialize: rank 0 has ended, and JAX's coordination service with it"),
    "raised": Fault(f"{CALL}: rank 2 has ended: it raised ValueError: bad luck"),
    "left": Fault(f"{CALL}: rank 2 has ended"),
    # The others wait in a collective of the program's own for a rank that waits for their end.
    "left-a-sum": Fault(f"{CALL}: rank 2 has ended", env={"all": {"JAXMP_TIMEOUT": "30"}}),
    "limited": Fault(r"rank 2 has no memory to share \d+ bytes with the others \(File too large\)", 60.0, spread=60.0,
        env={2: {"LATER_LIMIT": f"FSIZE {1 << 20}"}}),
    "shape": Fault(f"{DIFFERS}({other('k', 96, 48)})", 60.0, spread=1.0),
    "dtype": Fault(f"{DIFFERS}({other('dtype', 'bfloat16', 'float32')})", 60.0, spread=1.0),
    "epilog": Fault(f"{DIFFERS}({other('epilog', 'RELU', 'NONE')})", 60.0, spread=1.0),
    "alpha": Fault(f"{DIFFERS}({other('alpha', '2.0', '1.0')})", 60.0, spread=1.0),
    "rounded-weights": Fault(other("comm.weights", "float8_e4m3fn", "int8"), 60.0, spread=1.0),
    "rounded-gradients": Fault(other("comm.gradients", "None", "bfloat16"), 60.0, spread=1.0),
    "mesh": Fault(r"mesh=\(\('x', 2\), \('y', 2\)\)", 60.0, nprocesses=4, spread=1.5),
    "program": Fault(
        r"different programs, or their programs in different orders: rank \d waits in matmul at ranks.py:\d+, "
        r"rank \d in matmul .*pattern=(ALL|REDUCE)",
        60.0,
        spread=1.5,
    ),
    # Where the transport meets it first, it ends the process.
    "step-rows": Fault(rf"{STEP}: .*(rank 2 has .*(m=96|\(32, 48\))|has .*(m=48|\(16, 48\)), rank 2)", 60.0,
        spread=60.0),
    "version": Fault("rank 2 has jaxmp 9.9.9", 60.0, spread=60.0),
    "count": Fault("rank 2 has num_processes 4, rank 0 has 3", 60.0, spread=60.0),
}  # fmt: skip


@pytest.mark.parametrize("scenario", FAULTS)
def test_live_ranks_name_the_fault(tmp_path, scenario):
    fault = FAULTS[scenario]
    job, ranks = run(tmp_path, scenario, fault.nprocesses, env=fault.env, stopped=fault.stopped)
    victim = 0 if re.search("rank 0 (has ended|has not)", fault.message) else fault.nprocesses - 1
    dead = fault.stopped or ((victim,) if fault.spread is None else ())
    live = [i for i in range(fault.nprocesses) if i not in dead]
    see(job, ranks, live, fault.message, fault.within)
    seconds = [ranks[i].seconds for i in live]
    assert max(seconds) - min(seconds) < (fault.spread or fault.within), f"seen at {seconds}\n{job.all_logs()}"
    assert scenario != "raised" or (ranks[2].status == 1 and "ValueError: bad luck" in ranks[2].log), job.all_logs()
    assert scenario != "left-a-sum" or "rank 2: it ended while rank " in ranks[2].log, job.all_logs()
    if fault.within == LATE and fault.stopped:
        assert min(seconds) > TIMEOUT - 0.5


def see(job, ranks, live, message, within):
    """Every live rank ends by itself, not with 0, after an error or with a last line that has `message`, `within` so
    many seconds; the error's cause says the same."""
    for i in live:
        rank = ranks[i]
        shown = re.sub(r"^SAW .*$", "", rank.log, flags=re.M)
        assert re.search(rf"DistributedError: .*({message})", shown), f"rank {i} did not show it\n{job.all_logs()}"
        assert rank.saw.startswith("DistributedError: "), f"rank {i}: {rank.saw!r}\n{job.all_logs()}"
        assert re.search(message, rank.saw), f"rank {i} saw {rank.saw!r}, not {message!r}\n{job.all_logs()}"
        assert rank.status == 1, f"rank {i} ended with {rank.status}\n{job.all_logs()}"
        assert rank.seconds is not None
        assert rank.seconds < within, f"rank {i} saw it after {rank.seconds:.1f} s\n{job.all_logs()}"
    print(f"{job.scenario}: seen after " + ", ".join(f"{ranks[i].seconds:.2f} s" for i in live))
    assert not job.orphans()


def test_a_killed_rank_with_a_living_child_is_named_at_once(tmp_path):
    job, ranks = run(tmp_path, "killed-with-a-child", 2)
    assert re.search(rf"{CALL}: rank 1 {KILLED}", ranks[0].saw), job.all_logs()
    assert ranks[0].seconds < 2.0, job.all_logs()


def test_rank_0_ends_while_the_backends_start(tmp_path):
    job, ranks = run(tmp_path, "backend", 3)
    for rank in ranks[1:]:
        assert rank.status == 1, job.all_logs()
        assert re.search(r"DistributedError: .*rank 0 has ended", rank.log), job.all_logs()


@pytest.mark.parametrize("scenario", ["absent", "absent-of-rank-0"])
def test_a_rank_that_never_starts_is_an_error(tmp_path, scenario):
    """JAX's own deadline would abort the process."""
    job, ranks = run(tmp_path, scenario, 3)
    absent = 0 if scenario.endswith("0") else 2
    for rank in (rank for i, rank in enumerate(ranks) if i != absent):
        assert rank.status == 1, job.all_logs()
        want = (
            "did not meet all 3 processes at 127.0.0.1:"
            if absent == 0
            else "2 of 3 processes are here after 3 s; missing: 2"
        )
        assert want in rank.saw, job.all_logs()
        assert rank.seconds < 8, job.all_logs()


# Scenarios that end well, and what the last rank writes.
NO_FAULTS = {
    "raised-and-went-on": ["NameError", "ValueError: printed"],
    "forked": ["KeyboardInterrupt", "CHILD ", "CHILD 3"],
    "slow": [],
    "early-end": [],  # what a rank has dispatched runs before it ends
    "alpha": [],  # without agreement equal meaning is not asked for
}
ENVIRONMENTS = {
    "slow": {"JAXMP_TIMEOUT": "10"},
    "early-end": {"JAXMP_TIMEOUT": "20"},
    "alpha": {"JAXMP_AGREEMENT": "off"},
}


@pytest.mark.parametrize("scenario", NO_FAULTS)
def test_what_is_no_fault_ends_no_job(tmp_path, scenario):
    job, ranks = run(tmp_path, scenario, 2, env={"all": ENVIRONMENTS.get(scenario, {})})
    assert [rank.status for rank in ranks] == [0, 0], job.all_logs()
    assert all(text in ranks[1].log for text in NO_FAULTS[scenario]), job.all_logs()


def test_a_typo_at_a_prompt_is_no_end():
    program = (
        f"import jaxmp; jaxmp.distributed.initialize('127.0.0.1:{free_port()}', 1, 0)\nmisspelt\nprint('WENT ON')\n"
    )
    ran = subprocess.run([sys.executable, "-i"], input=program, capture_output=True, text=True, timeout=60, check=False)
    assert "NameError: name 'misspelt' is not defined" in ran.stderr
    assert (ran.returncode, ran.stdout) == (0, "WENT ON\n")


def test_an_interrupted_rank_ends_and_is_named(tmp_path):
    job = Job(tmp_path, "signal", 3)
    for i in range(3):
        job.wait_for(i, "READY")
    job.signal(2, SIGINT)
    ranks = job.wait()
    see(job, ranks, (0, 1), rf"{CALL}: rank 2 has ended: it raised KeyboardInterrupt", 60.0)
    assert ranks[2].status not in (0, None)


def test_an_interrupt_reaches_a_rank_that_waits_in_a_call(tmp_path):
    job = Job(tmp_path, "signal", 2, env={"all": {"JAXMP_TIMEOUT": "30"}})
    for i in range(2):
        job.wait_for(i, "READY")
    job.wait_for(0, "FAULT")
    job.signal(0, SIGINT)
    job.signal(1, SIGINT)
    ranks = job.wait(15)
    assert all(rank.status not in (0, None) for rank in ranks), job.all_logs()
    assert all("KeyboardInterrupt" in rank.log for rank in ranks), job.all_logs()


# With counts across runs, the second call of each step after a fault multiplied one rank's step by another rank's.
LEFT_EARLY = [("none", 0), ("interrupt", 0), ("none", 0), ("raise first", 1), ("none", 0), ("raise between", 0)]
OVERLAPPING = [("late", 0), ("none", 0), ("late", 1), ("none", 0)]
DRAWN = {"schedules": int(os.environ.get("JAXMP_FUZZ", "0")) or 3, "seed": int(os.environ.get("JAXMP_FUZZ_SEED") or 0)}


@pytest.mark.parametrize("ndevices", [1, 2])
def test_a_run_that_ends_early_meets_no_other_run(ndevices, tmp_path):
    given = [{"program": name, "how": "steps", "steps": LEFT_EARLY} for name in ("two", "gradient")]
    given += [{"program": "two", "how": how, "steps": OVERLAPPING} for how in ("ahead", "threads")]
    env = {"all": {"RUNS": json.dumps(DRAWN | {"given": given}), "JAXMP_TIMEOUT": "5"}}
    job, ranks = run(tmp_path, "runs", 2, ndevices=ndevices, env=env, deadline=120 + DRAWN["schedules"])
    assert [rank.status for rank in ranks] == [0, 0], job.all_logs()
    assert "step 2: KeyboardInterrupt" in ranks[0].log, job.all_logs()
    assert "step 2: " not in ranks[1].log, job.all_logs()
    message = (
        r"step 4: .*: rank 1 has come to run 5 of the program and not to this call in run 4, in which rank 0 waits"
    )
    assert re.search(message, ranks[0].log), job.all_logs()


def test_an_interrupt_of_shutdown_that_a_rank_catches_ends_the_job(tmp_path):
    """Otherwise a second shutdown would wait forever, and all other ranks with it."""
    job, ranks = run(tmp_path, "signal-in-shutdown", 2)
    assert [rank.status for rank in ranks] == [1, 1], job.all_logs()
    assert ranks[0].saw == "DistributedError: shutdown: it was interrupted", job.all_logs()
    assert ranks[1].saw.endswith("rank 0 has ended: it was interrupted"), job.all_logs()


@pytest.mark.parametrize("wait", ["block_until_ready", "asarray", "float"])
def test_an_interrupt_that_a_rank_catches_is_one_exception(wait, tmp_path):
    """The call goes on, as in JAX: the interrupted rank has one KeyboardInterrupt, and no rank has an error."""
    job = Job(tmp_path, "signal-and-caught", 2, env={"all": {"JAXMP_TIMEOUT": "30", "WAIT": wait}})
    for i in range(2):
        job.wait_for(i, "READY")
    job.wait_for(0, "FAULT")
    job.signal(0, SIGINT)
    ranks = job.wait(30)
    assert re.findall("CAUGHT .*", ranks[0].log) == ["CAUGHT KeyboardInterrupt"], job.all_logs()
    assert "CAUGHT" not in ranks[1].log, job.all_logs()
    assert [rank.status for rank in ranks] == [0, 0], job.all_logs()
