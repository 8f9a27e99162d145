"""How two libraries are compared, and how the comparison continues after a crash.

The suite itself runs in the C++ tests, on hostmp and over fakes of the real library. Without these tests, a difference
could be missed, a crash could end the list of differences, and an excuse could outlive its reason.
"""

import json
import sys
import textwrap
from pathlib import Path

import pytest

from jaxmp._src.platform.runtime import cuda_libraries

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
import compare
import run


def line(case="x", rank=0, ranks=1, status=0, stage=None, error="", capability="", intact=True, **results):
    """Returns a line of `conformance`; results are (is exact, share of the bound)."""
    stage = stage or ("done" if status == 0 else "Matmul")
    found = {name: {"exact": exact, "worst": worst} for name, (exact, worst) in (results or {"d": (True, 0)}).items()}
    about = {"case": case, "rank": rank, "ranks": ranks, "status": status, "stage": stage, "error": error}
    return about | {"capability": capability, "intact": intact, "results": found if status == 0 else {}}


def kinds(ours, theirs):
    return [difference.kind for difference in compare.compare(ours, theirs)]


def test_equal_lines_are_no_difference():
    refused = line("y", status=3, error="one says it so")
    assert kinds([line(), refused], [line(), refused | {"error": "the other so"}]) == []
    assert compare.report([], []) == ("no difference", False)


@pytest.mark.parametrize(
    ("ours", "theirs", "kind", "detail"),
    [
        (line(), line(status=7, error="no"), "refuses", "Matmul gives status 7: no"),
        (line(capability="grid_epilogs"), line(status=7), "capability", "Matmul gives status 7: "),
        (line(capability="as_documented"), line(d=(False, 9.0)), "capability", "rank 0: d uses 900 % of its bound"),
        (line(capability="grid_epilogs"), line(d=(False, 9.0)), "differs", "rank 0: d uses 900 % of its bound"),
        (line(status=3, error="no"), line(), "accepts", "hostmp says: no"),
        (line(status=3), line(status=7), "reason", "status 7 (), hostmp 3 ()"),
        (line(), line(stage="crash", error="signal SIGSEGV"), "ends", "rank 0: crash: signal SIGSEGV"),
        (line(), line(stage="run", status=5, error="illegal address"), "ends", "rank 0: run: illegal address"),
        (line(), line(d=(False, 1.5)), "differs", "rank 0: d uses 150 % of its bound"),
        (line(), line(d=(False, 0.5)), "rounds", "rank 0: d uses 50 % of its bound"),
        (line(d=(False, 0.1)), line(d=(False, 0.5)), None, ""),
        (line(), line(intact=False), "overwrites", "rank 0"),
        (line(), line(d=(True, 0), aux=(False, 9.0), intact=False), "differs", "rank 0: aux uses 900 %"),
        (line(), line() | {"words": "AllGather + Matmul"}, "detour", "it says 'AllGather + Matmul'"),
        (line(), line() | {"words": "local Matmul"}, None, ""),
        (line("algorithm 1"), line("algorithm 1", status=7), "algorithm", "status 7"),
    ],
)
def test_each_difference_has_its_name(ours, theirs, kind, detail):
    found = compare.compare([ours], [theirs])
    assert [difference.kind for difference in found] == ([kind] if kind else [])
    assert all(detail in difference.detail for difference in found)


def test_ranks_have_to_agree():
    ours = [line(rank=0, ranks=2), line(rank=1, ranks=2)]
    assert kinds(ours, [line(rank=0, ranks=2), line(rank=1, ranks=2, status=3)]) == ["divides"]
    assert kinds(ours, [line(rank=0, ranks=2)]) == ["divides"]
    assert kinds(ours, [line(rank=0, ranks=2), line(rank=1, ranks=2, d=(False, 2.0))]) == ["differs"]


def test_what_one_was_not_asked_is_a_difference():
    assert kinds([line("x"), line("y")], [line("x"), line("z")]) == ["missing", "missing"]
    assert kinds([line(ranks=1)], [line(ranks=2)]) == ["missing", "missing"]
    with pytest.raises(ValueError, match="x was run twice on 1 ranks"):
        compare.compare([line(), line()], [line()])


def test_a_fault_is_excused_by_name_and_no_longer_than_needed(tmp_path):
    file = tmp_path / "known"
    file.write_text("# why\n\nrefuses: plain\n")
    (excuse,) = excuses = compare.known(file)
    assert excuse == ("refuses", "plain")
    refused = compare.Difference("refuses", "a plain case", 2, "status 7")
    text, is_bad = compare.report([refused], excuses)
    assert not is_bad
    assert "known refuses: a plain case (2 ranks): status 7" in text
    assert compare.report([refused], [])[1]
    assert compare.report([compare.Difference("differs", "a plain case", 2, "")], excuses)[1]
    text, is_bad = compare.report([], excuses)
    assert is_bad
    assert "FAULT nothing needs the excuse refuses: plain" in text
    assert not compare.report([], excuses, is_whole=False)[1]
    assert not compare.report([compare.Difference("accepts", "x", 1, "")], [])[1]


# A fake `conformance` program, with cases that end it.
PROGRAM = """\
import json, os, signal, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["--seconds"] == "60"
if options.get("--library") == "none":
    sys.stderr.write("no such library\\n")
    sys.exit(2)
cases = ["one", "aborts", "two", "hangs", "three", "breaks", "four"]
after = options.get("--after")
cases = cases[cases.index(after) + 1 :] if after else cases
ranks, mine = int(options["--ranks"]), options.get("--rank")
for case in cases:
    print(json.dumps({"begins": case, "ranks": ranks}), flush=True)
    if case == "aborts" and mine in (None, "1"):
        sys.stderr.write("the last words\\n")
        sys.stdout.write('{"case": "abo')
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGABRT)
    if case == "aborts":
        time.sleep(600)  # for the peer that is gone
    if case == "hangs":
        sys.exit(3)
    stage = "run" if case == "breaks" else "done"
    for rank in range(ranks) if mine is None else [int(mine)]:
        line = {"case": case, "ranks": ranks, "rank": rank, "stage": stage, "status": 5 if stage == "run" else 0}
        print(json.dumps(line | {"error": "", "capability": "", "intact": True, "results": {}}), flush=True)
    if case == "breaks":
        sys.exit(4)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program"
    path.write_text(f"#!{sys.executable}\n" + textwrap.dedent(PROGRAM))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_a_library_that_crashes_is_asked_the_rest(program, processes, monkeypatch):
    monkeypatch.setattr(run, "_GRACE", 0.2)
    lines = run.run_suite(program, 2, [], processes=processes)
    stages = {}
    for found in lines:
        stages.setdefault(found["case"], set()).add((found["rank"], found["stage"]))
    expected = {"one": "done", "aborts": "crash", "two": "done", "hangs": "hang", "three": "done", "breaks": "run"}
    expected["four"] = "done"
    assert stages == {case: {(0, stage), (1, stage)} for case, stage in expected.items()}
    crash = next(found for found in lines if found["case"] == "aborts")
    assert crash["error"] == "signal SIGABRT the last words"
    assert len(lines) == 14
    assert json.dumps(lines)


def test_a_library_that_cannot_begin_says_why(program):
    with pytest.raises(run.NotStartedError, match="no such library"):
        run.run_suite(program, 1, ["--library", "none"])


def test_the_loader_finds_what_wheels_in_other_folders_bring(tmp_path, monkeypatch):
    """cuBLASMp's RPATH names its neighbours, but cuBLAS is where JAX is."""
    folders = ("unpacked/nvidia/cublasmp/cu13/lib", "unpacked/nvidia/nccl/lib", "site-packages/nvidia/cu13/lib")
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(
        cuda_libraries, "_wheel_roots", lambda: [tmp_path / "unpacked/nvidia", tmp_path / "site-packages/nvidia"]
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    assert run.environment()["LD_LIBRARY_PATH"].split(":") == [*(str(tmp_path / f) for f in folders), "/before"]
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert run.environment()["LD_LIBRARY_PATH"].split(":") == [str(tmp_path / folder) for folder in folders]
