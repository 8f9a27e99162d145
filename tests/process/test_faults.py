"""What every live rank sees when another one is wrong, slow or dead: the rows of docs/faults.md.

A job that hangs costs a cluster; an error that names no rank costs its users a day.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from job import SIGINT, TIMEOUT, Job, free_port, run


def call_at(mark):
    """The matmul in ranks.py whose line ends with `# mark`, as messages name it."""
    lines = (Path(__file__).parent / "ranks.py").read_text().splitlines()
    return f"matmul at ranks.py:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"


CALL, STEP = call_at("THE CALL"), call_at("THE STEP")
# Beyond the deadline itself: two processors that four ranks and other work share.
SLACK = 3.0
GLOO = {"all": {"JAXMP_SHARED_MEMORY": "off"}}  # XLA's collectives, also between processes of one machine


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


@pytest.mark.parametrize("scenario", ["killed-before", "killed-after", "killed-during", "killed-and-caught"])
def test_a_killed_rank_is_named_at_once(tmp_path, scenario):
    job, ranks = run(tmp_path, scenario, 3)
    see(job, ranks, (0, 1), rf"{CALL}: rank 2 has ended without a word", 2.0)


def test_killed_rank_0_takes_nobody_along(tmp_path):
    """It holds JAX's coordination service, whose clients would abort."""
    job, ranks = run(tmp_path, "killed-of-rank-0", 3)
    see(job, ranks, (1, 2), rf"{CALL}: rank 0 has ended without a word", 2.0)


@pytest.mark.parametrize("scenario", ["stopped-before", "stopped-after"])
def test_a_stopped_rank_is_missing_at_the_deadline(tmp_path, scenario):
    job, ranks = run(tmp_path, scenario, 3, stopped=(2,))
    see(job, ranks, (0, 1), rf"{CALL}: rank 2 has not come and does not answer", TIMEOUT + SLACK)
    assert min(ranks[i].seconds for i in (0, 1)) > TIMEOUT - 0.5


def test_stopped_rank_0_is_missing_at_the_deadline(tmp_path):
    job, ranks = run(tmp_path, "stopped-of-rank-0", 3, stopped=(0,))
    see(job, ranks, (1, 2), rf"{CALL}: rank 0 has not come and does not answer", TIMEOUT + SLACK)


def test_a_rank_that_others_wait_for_is_named_too(tmp_path):
    """Otherwise the one that is stopped goes unnamed by those that it keeps waiting at second hand."""
    job, ranks = run(tmp_path, "stopped-behind", 4, stopped=(0, 1, 2))
    message = rf"{CALL}: rank 2 has not come; it is alive, .*, rank 0 does not answer; rank 3 has waited"
    see(job, ranks, (3,), message, TIMEOUT + SLACK)


# Ahead of the first step there is no transport yet, and every rank still has to compile.
COMPILES = 10.0


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("first-killed", "rank 2 has ended without a word"),
        ("first-killed-of-rank-0", "rank 0 has ended without a word"),
        ("first-raised", "rank 2 has ended: it raised ValueError: bad luck"),
    ],
)
def test_a_rank_that_ends_ahead_of_the_first_step_is_named_at_once(tmp_path, scenario, message):
    """The gradient's own gather has no order with the product's barrier, so it needs one of its own."""
    job, ranks = run(tmp_path, scenario, 3)
    see(job, ranks, (1, 2) if scenario.endswith("0") else (0, 1), f"{STEP}: {message}", COMPILES)


@pytest.mark.parametrize("scenario", ["first-stopped", "first-stopped-of-rank-0"])
def test_a_rank_stopped_ahead_of_the_first_step_is_missing_at_the_deadline(tmp_path, scenario):
    victim = 0 if scenario.endswith("0") else 2
    job, ranks = run(tmp_path, scenario, 3, stopped=(victim,))
    live = [i for i in range(3) if i != victim]
    see(job, ranks, live, f"{STEP}: rank {victim} has not come and does not answer", TIMEOUT + COMPILES)


def test_rank_0_ends_while_the_transport_opens(tmp_path):
    """XLA then waits for JAX's store, which was rank 0's, without end."""
    job, ranks = run(tmp_path, "opening", 2, env=GLOO)
    see(job, ranks, (1,), f"{CALL}: rank 0 has ended", TIMEOUT + SLACK)


def test_rank_0_ends_while_the_backends_start(tmp_path):
    job, ranks = run(tmp_path, "backend", 3)
    for rank in ranks[1:]:
        assert rank.status == 1, job.all_logs()
        assert "DistributedError: rank 0 has ended" in re.sub(r"rank [12]: .*?: rank 0", "rank 0", rank.log)


def test_rank_0_ends_while_all_meet(tmp_path):
    job, ranks = run(tmp_path, "joining", 3)
    see(job, ranks, (1, 2), "initialize: rank 0 has ended, and JAX's coordination service with it", 2.0)


@pytest.mark.parametrize(
    ("scenario", "difference"),
    [
        ("step-rows", r"rank 2 has .*(m=96|\(32, 48\))|has .*(m=48|\(16, 48\)), rank 2"),
        ("step-k", r"rank 2 has .*(k=96|\(16, 96\))|has .*(k=48|\(16, 48\)), rank 2"),
        ("step-dtype", "rank 2 has .*dtype=bfloat16|has .*dtype=float32.*, rank 2"),
    ],
)
def test_ranks_with_different_gradients_are_told_the_difference(tmp_path, scenario, difference):
    """Where the transport meets it first, it ends the process."""
    job, ranks = run(tmp_path, scenario, 3)
    see(job, ranks, (0, 1, 2), f"{STEP}: .*({difference})", 60.0)


def test_a_rank_stopped_inside_the_transport_is_named(tmp_path):
    job, ranks = run(tmp_path, "stopped-during", 2, stopped=(1,), env=GLOO)
    see(job, ranks, (0,), rf"{CALL}: rank 1 .*does not answer", TIMEOUT + SLACK)


def test_a_rank_that_raises_is_named_with_its_error(tmp_path):
    job, ranks = run(tmp_path, "raised", 3)
    see(job, ranks, (0, 1), rf"{CALL}: rank 2 has ended: it raised ValueError: bad luck", 2.0)
    assert ranks[2].status == 1
    assert "ValueError: bad luck" in ranks[2].log


@pytest.mark.parametrize("scenario", ["raised-and-went-on", "forked"])
def test_an_exception_that_does_not_end_a_rank_ends_no_job(tmp_path, scenario):
    job, ranks = run(tmp_path, scenario, 2)
    assert [rank.status for rank in ranks] == [0, 0], job.all_logs()
    seen = {"raised-and-went-on": ["NameError", "ValueError: printed"], "forked": ["KeyboardInterrupt", "CHILD "]}
    assert all(text in ranks[1].log for text in seen[scenario]), job.all_logs()


def test_a_killed_rank_is_named_at_once_though_a_child_of_it_lives(tmp_path):
    job, ranks = run(tmp_path, "killed-with-a-child", 2)
    assert re.search(rf"{CALL}: rank 1 has ended without a word", ranks[0].saw), job.all_logs()
    assert ranks[0].seconds < 2.0, job.all_logs()


def test_memory_that_runs_out_is_named_on_every_rank(tmp_path):
    job, ranks = run(tmp_path, "limited", 3, env={2: {"LIMIT": f"FSIZE {1 << 20}"}})
    see(job, ranks, (0, 1, 2), r"rank 2 has no memory to share \d+ bytes with the others \(File too large\)", 60.0)


def test_a_typo_at_a_prompt_is_no_end():
    program = (
        f"import jaxmp; jaxmp.distributed.initialize('127.0.0.1:{free_port()}', 1, 0)\nmisspelt\nprint('WENT ON')\n"
    )
    ran = subprocess.run([sys.executable, "-i"], input=program, capture_output=True, text=True, timeout=60, check=False)
    assert "NameError: name 'misspelt' is not defined" in ran.stderr
    assert (ran.returncode, ran.stdout) == (0, "WENT ON\n")


def test_a_rank_that_leaves_early_is_named(tmp_path):
    job, ranks = run(tmp_path, "left", 3)
    see(job, ranks, (0, 1), rf"{CALL}: rank 2 has ended", 2.0)


def test_a_slow_rank_is_waited_for(tmp_path):
    job, ranks = run(tmp_path, "slow", 2, env={"all": {"JAXMP_TIMEOUT": "10"}})
    assert [rank.status for rank in ranks] == [0, 0], job.all_logs()


@pytest.mark.parametrize(
    ("scenario", "difference"),
    [
        ("shape", "k=96, rank [01] has k=48|k=48, rank 2 has k=96"),
        ("dtype", "dtype=bfloat16 .*, rank [01] has dtype=float32|dtype=float32 .*, rank 2 has dtype=bfloat16"),
        ("epilog", "epilog=RELU, rank [01] has epilog=NONE|epilog=NONE, rank 2 has epilog=RELU"),
        ("alpha", "alpha=2.0, rank [01] has alpha=1.0|alpha=1.0, rank 2 has alpha=2.0"),
    ],
    ids=["shape", "dtype", "epilog", "alpha"],
)
def test_ranks_with_different_calls_are_told_the_difference(tmp_path, scenario, difference):
    job, ranks = run(tmp_path, scenario, 3)
    see(job, ranks, (0, 1, 2), rf"matmul at ranks.py:\d+: rank \d has ({difference})", 60.0)
    _see_within_a_second_of_the_last(job, ranks)


def test_a_rank_with_another_mesh_is_told_the_difference(tmp_path):
    job, ranks = run(tmp_path, "mesh", 4)
    see(job, ranks, range(4), r"mesh=\(\('x', 2\), \('y', 2\)\)", 60.0)
    _see_within_a_second_of_the_last(job, ranks, 1.5)


def test_ranks_in_different_programs_are_told_the_difference(tmp_path):
    job, ranks = run(tmp_path, "program", 3)
    message = r"different programs: rank \d waits in matmul at ranks.py:\d+, rank \d in matmul .*pattern=(ALL|REDUCE)"
    see(job, ranks, (0, 1, 2), message, 60.0)
    _see_within_a_second_of_the_last(job, ranks, 1.5)


@pytest.mark.parametrize("ndevices", [1, 2])
def test_equal_programs_under_two_names_run(tmp_path, ndevices):
    job, ranks = run(tmp_path, "two-names", 2, ndevices=ndevices)
    assert [rank.status for rank in ranks] == [0, 0], job.all_logs()


def _see_within_a_second_of_the_last(job, ranks, within=1.0):
    """Ranks start and compile at their own pace; what counts is the time from the last one's arrival."""
    seen = sorted(rank.seconds for rank in ranks)
    assert seen[-1] - seen[0] < within, f"seen at {seen}\n{job.all_logs()}"


def test_without_agreement_equal_meaning_is_not_asked_for(tmp_path):
    job, ranks = run(tmp_path, "alpha", 2, env={"all": {"JAXMP_AGREEMENT": "off"}})
    assert [rank.status for rank in ranks] == [0, 0], job.all_logs()


def test_another_version_is_refused_at_the_start(tmp_path):
    job, ranks = run(tmp_path, "version", 3)
    see(job, ranks, (0, 1, 2), r"initialize: rank 2 has jaxmp 9.9.9, rank 0 has jaxmp|rank 2 has jaxmp 9.9.9", 60.0)


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
