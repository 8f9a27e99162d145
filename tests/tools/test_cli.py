"""The command line: what it prints, how it fails, and its exit statuses. Without these tests, a self-test could pass
with a wrong product, a script could take a failure for success, and users could see a stack trace instead of a line
that says what to do. Commands run in this process because each start of JAX takes seconds; one test starts a separate
process."""

import importlib.metadata
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxmp import testing
from jaxmp._src.platform.hardware import processor
from jaxmp._src.tools.cli import accept, bench, explain, main, output, selftest

PROGRAM = """from __future__ import annotations
import dataclasses, jax, jaxmp
from jax.sharding import PartitionSpec as P

def layer(x, w):
    return jaxmp.matmul(x, w, out_sharding=P(None, "x"))

def mlp(x, w, v):
    return jaxmp.linear(jaxmp.linear(x, w, out_sharding=P(None, "x")), v)

def of_a_mesh(x, w, v):
    return mlp(x, w, v) * jax.sharding.get_abstract_mesh().shape["y"]

def plain(x, w, v):
    return (x @ w) @ v

def alone():
    return 1

def broken(x):
    raise ArithmeticError("no product\\nof this")

@dataclasses.dataclass
class Config:
    columns: int = 4

def configured(x):
    from program_of_weights import of
    return jaxmp.matmul(x, of(Config().columns))
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    (tmp_path / "program_of_weights.py").write_text(
        'import numpy as np\n\ndef of(n):\n    return np.ones((8, n), "f")\n'
    )
    return str(file)


def run(capsys, *arguments):
    """Returns (exit status, standard output, standard error)."""
    status = main.main(arguments)
    return status, *capsys.readouterr()


def test_a_process_prints_facts_as_json_and_nothing_else():
    ran = subprocess.run(
        [sys.executable, "-m", "jaxmp", "info", "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    facts = json.loads(ran.stdout)
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["devices"]["platform"] == "cpu"


def test_info_names_what_serves_and_why(capsys):
    status, out, _ = run(capsys, "info", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["implementation of a product"]["bfloat16"] == "host: CPU devices of one process"
    assert facts["available implementations"]["cublasmp"].startswith('no: implementation="cublasmp" is not available')
    assert "openblas" in facts["host implementation"]["BLAS"]
    assert facts["libraries"]["opened"] == "no: JAX has no CUDA device"
    status, out, _ = run(capsys, "info")
    assert status == 0
    for section in facts:
        assert section in out


def test_the_processor_is_read_from_the_systems_text():
    x86 = processor.parse("model name\t: Some Processor\nflags\t\t: fpu avx2 amx_bf16\nmodel name\t: Other\n", "?", 2)
    assert x86 == processor.Processor("Some Processor", 2, ("avx2", "amx_bf16"))
    arm = processor.parse("Features\t: fp asimd bf16 sve2\n", "aarch64", 72)
    assert arm == processor.Processor("aarch64", 72, ("asimd", "bf16", "sve2"))


def test_the_script_is_the_same_command(capsys):
    (script,) = (each for each in importlib.metadata.entry_points(group="console_scripts") if each.name == "jaxmp")
    assert script.load() is main.main
    with pytest.raises(SystemExit) as ended:
        main.main(["inform"])
    assert ended.value.code == 2
    assert "invalid choice: 'inform'" in capsys.readouterr().err


def some_checks(*arguments):
    """Returns one check of each kind."""
    return list({check.promise: check for check in ALL_CHECKS(*arguments)}.values())


ALL_CHECKS = selftest.checks


def test_the_selftest_checks_all_patterns_types_and_levels():
    found = list(selftest.checks(4, None, True))
    assert {check.promise for check in found} == {"placement", "rounding", "batch", "topology"}
    subjects = {check.subject for check in found if check.promise == "placement"}
    assert len(subjects) == len(list(testing.layouts(4))) * 5


def test_the_selftest_passes_here(capsys, monkeypatch):
    monkeypatch.setattr(selftest, "checks", some_checks)
    status, out, _ = run(capsys, "selftest", "--json")
    report = json.loads(out)
    assert (status, report["passed"], len(report["checks"])) == (0, True, 4)


@pytest.mark.parametrize("kind", ["placement", "rounding", "batch"])
def test_the_selftest_fails_where_one_element_is_wrong(kind, capsys, monkeypatch):
    """The error is ten times the rounding of a sum of 264 terms, a wrong place, or a bit; later checks still run."""
    real = selftest.matmul

    def wrong(a, b, **options):
        d = real(a, b, **options)
        return d.at[3, 5].add(1e-3) if kind == "rounding" else d.at[:2].set(d[1::-1])

    def broken():
        testing.assert_bitwise_equal(np.float32(1), np.float32(2), "d of m=3")

    found = [check for check in some_checks(4, None, True) if check.promise == kind]
    if kind == "batch":
        found = [testing.Check("batch", "k=1", broken), testing.Check("batch", "k=2", lambda: 7)]
    monkeypatch.setattr(selftest, "checks", lambda *_: found)
    monkeypatch.setattr(selftest, "matmul", wrong)
    status, out, _ = run(capsys, "selftest", "--json")
    errors = [check["error"] for check in json.loads(out)["checks"]]
    assert (status, [bool(error) for error in errors]) == (1, [True, False][: len(found)])
    assert kind != "batch" or errors[0].startswith("AssertionError: d of m=3: 1 of 1 elements differ")
    assert f"FAILED {kind} of " in run(capsys, "selftest")[1]


def test_a_bench_times_the_patterns_that_the_extents_allow(capsys):
    status, out, _ = run(capsys, "bench", "8", "6", "12", "--seconds", "0.001", "--json")
    report = json.loads(out)
    assert status == 0
    assert [row["pattern"] for row in report["rows"]] == ["local", "all_gather", "grid"]  # 4 does not divide 6
    assert all(set(row["seconds"]) == {"jaxmp", "xla"} for row in report["rows"])
    assert report["flops"] == 2 * 8 * 6 * 12
    assert run(capsys, "bench", "8", "8", "8", "--dtype", "int8", "--seconds", "0.001")[0] == 0


def test_a_bench_prints_its_table_and_fails_of_wrong_products(capsys, monkeypatch):
    arguments = ("bench", "8", "8", "8", "--mesh", "2", "--dtype", "bf16", "--pattern", "local", "--seconds", "0.001")
    status, out, _ = run(capsys, *arguments)
    title, head, row = out.splitlines()
    assert (status, title) == (0, "8x8x8 bfloat16 on 2 devices")
    assert row.index("host") == head.index("by")
    real = bench.matmul
    monkeypatch.setattr(bench, "matmul", lambda a, b, **options: real(a, b, **options) + 1)
    status, out, _ = run(capsys, *arguments)
    assert status == 1
    assert "WRONG local: the results differ by 1" in out


# ---- accept


def job_of(monkeypatch, tmp_path, starts):
    """Returns a job with these lines of each rank, logs and statuses, for each start of its processes."""
    starts = iter(starts)

    def start(nranks, first, folder, *_):
        folder.mkdir()
        lines, logs, statuses = next(starts)
        head = {"machine": {"gpus": nranks}, "total": 4, "why": ""}
        for rank in range(nranks):
            (folder / f"{rank}.log").write_text(logs[rank])
            if lines is None:
                continue
            found = [x | {"check": "types" if x["index"] < 3 else "death of a rank", "of": "f32"} for x in lines[rank]]
            assert not found or found[0]["index"] == first
            (folder / f"{rank}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (head, *found)))
        return statuses

    monkeypatch.setattr(accept, "_start", start)
    return accept._job(2, tmp_path, False, 0.0)


def test_acceptance_goes_on_after_a_process_has_ended(monkeypatch, tmp_path):
    """A check that one rank calls wrong has failed; the last one ends a process by plan."""
    passed, wrong = {"index": 0, "seconds": 1}, {"index": 0, "seconds": 1, "error": "2 elements are wrong"}
    begun, after, death = {"index": 1}, {"index": 2, "seconds": 1, "refused": "by name"}, {"index": 3}
    said = "jaxmp.DistributedError: rank 0 of 2 has waited"
    job = job_of(
        monkeypatch,
        tmp_path,
        [
            ([[passed, begun], [wrong, begun]], ["", "a fault\n"], [1, -11]),
            ([[after, death], [after, death]], [f"noise\n{said}\n", ""], [1, -9]),
        ],
    )
    errors = [check.get("error") for check in job["checks"]]
    assert errors == ["2 elements are wrong", "a process ended: a fault", None, ""]
    assert accept._cell(job, "types") == "1 refused, 2 FAILED"
    assert accept._cell(job, "death of a rank") == "1 passed"


def test_acceptance_wants_the_reason_of_a_death(monkeypatch, tmp_path):
    death = [{"index": 0, "seconds": 1}, {"index": 3}]
    job = job_of(monkeypatch, tmp_path, [([death, death], ["terminated\n", ""], [-6, -9])])
    assert job["checks"][-1]["error"] == "a process ended: terminated"


@pytest.mark.parametrize("lines", [None, [[], []]], ids=["no file", "no check"])
def test_acceptance_says_why_later_processes_began_no_check(lines, monkeypatch, tmp_path):
    begun = [[{"index": 0}]] * 2
    job = job_of(monkeypatch, tmp_path, [(begun, ["a fault", ""], [-11, -9]), (lines, ["", "no card"], [1, 1])])
    assert (len(job["checks"]), job["not run because"]) == (1, "a process ended: no card")


def test_acceptance_names_what_there_was_no_time_for(monkeypatch, tmp_path):
    job = job_of(monkeypatch, tmp_path, [([[{"index": 0, "seconds": 1}, {"index": 1}]] * 2, ["", ""], [None, None])])
    assert (len(job["checks"]), job["not run because"]) == (1, "the time was over")
    assert accept._cell(job, "rates") == "not run"


# ---- explain and advise


def test_explain_prints_the_rows_of_a_function_of_a_file(program, capsys):
    arguments = ("explain", f"{program}:layer", "f32[8@x,16]", "float32[16, 4@x]", "--mesh", "x=4")
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert "all_gather x" in out
    _, out, _ = run(capsys, *arguments, "--json")
    (row,) = json.loads(out)
    assert (row["pattern"], row["local_extents"]) == ("all_gather", [2, 16, 1])
    _, out, _ = run(capsys, *arguments, "--compiled", "--json")
    found = json.loads(out)
    assert found["calls"] == [row]
    assert found["memory"]["peak"] > 0
    assert run(capsys, "explain", f"{program}:configured", "f32[4,8]")[0] == 0


def test_types_are_read_as_jax_prints_them():
    mesh = explain.mesh_of("x=2,y=2")
    for text in ("float32[8@x,16]", "bfloat16[8@(x,y),4]", "float32[]", "int32[3]"):
        found = explain.argument_of(text, mesh)
        assert str(jax.typeof(jax.device_put(np.zeros(found.shape, found.dtype), found.sharding))) == text
    names = {"f32": "float32", "bf16": "bfloat16", "c64": "complex64", "fp8": "float8_e4m3fn", "int8": "int8"}
    names |= {"i8": "int8", "u8": "uint8", "i4": "int4", "f8_e5m2": "float8_e5m2", "bool": "bool"}
    assert {name: output.dtype_of(name) for name in names} == names


def test_advise_of_extents_and_of_functions(program, capsys):
    types = ("bf16[64,256]", "bf16[256,512]", "bf16[512,256]")
    found = []
    for arguments in (
        ("64", "32", "128", "--devices", "8"),
        (f"{program}:plain", *types),
        (f"{program}:mlp", *types, "--mesh", "x=8"),
        (f"{program}:of_a_mesh", *types, "--mesh", "x=2,y=2"),
    ):
        status, out, _ = run(capsys, "advise", *arguments, "--json")
        found.append(json.loads(out))
        assert (status, found[-1][0]["seconds"]) == (0, min(choice["seconds"] for choice in found[-1]))
    assert found[1][0]["steps"][0]["line"] == "program.py:15"
    assert [plan["mesh"] for plans in found[2:] for plan in plans[:1]] == [[["x", 8]], [["x", 2], ["y", 2]]]
    status, out, _ = run(capsys, "advise", f"{program}:plain", *types, "--devices", "8", "--hardware", "h200-8")
    assert status == 0
    assert "data x tensor" in out
    assert "at least" in run(capsys, "advise", "64", "32", "128", "--hardware", "h200-8")[1]


TYPES = ("f32[8,8]",) * 3
ERRORS = {
    "no job": (("info", "--job"), "--job needs a job of processes; start one: mpiexec -n 4 jaxmp info --job"),
    "no file": (("explain", "none.py:f"), "there is no file none.py"),
    "no name": (("explain", "none.py"), "takes FILE.py:FUNCTION, got 'none.py'"),
    "no function": (("explain", "{program}:g"), "{program} has no function g"),
    "no types": (("explain", "{program}:layer"), "missing"),
    "no mesh": (("explain", "{program}:layer", "f32[8@x,4]"), "f32[8@x,4] names mesh axes; pass --mesh, as --mesh x=4"),
    "no type": (("explain", "{program}:layer", "f32(8)"), "takes types such as f32[512@x,1024], got 'f32(8)'"),
    "no extent": (("explain", "{program}:layer", "f32[8,]"), "takes types such as f32[512@x,1024], got 'f32[8,]'"),
    "a mesh": (("explain", "{program}:layer", "--mesh", "4"), "--mesh takes axes as x=2,y=2, got '4'"),
    "raises": (("explain", "{program}:broken", "f32[8]"), "ArithmeticError: no product (--traceback shows where)"),
    "a dtype": (("bench", "8", "8", "8", "--dtype", "f31"), "there is no type 'f31'; pass f32, f64, bf16"),
    "extents": (("bench", "8", "7", "8", "--pattern", "grid"), "4 devices do not divide 8x7x8 for --pattern grid"),
    "below 1": (("bench", "0", "8", "8"), "4 devices do not divide 0x8x8 for --pattern all"),
    "no GPU": (("selftest", "--implementation", "cublasmp"), "cublasmp needs a CUDA device, JAX's backend is cpu"),
    "no GPUs": (("accept",), "JAX has no CUDA device"),
    "fewer": (("selftest", "--devices", "4096"), "needs 4096 devices, but this machine has"),
    "advise, none": (("advise", "7", "7", "7"), "jaxmp advise: no sharding over 8 devices divides m=7"),
    "advise, no product": (("advise", "{program}:alone"), "alone has no product with a predicted time"),
    "advise, dtype": (("advise", "{program}:plain", *TYPES, "--dtype", "f32"), "--dtype applies to one product"),
    "advise, mesh": (("advise", "64", "64", "64", "--mesh", "x=2"), "--mesh applies to a function"),
    "advise, two": (("advise", "64", "64"), "takes M K N or FILE.py:FUNCTION TYPE..., got 64 64"),
    "advise, four": (("advise", "64", "64", "x"), "takes M K N or FILE.py:FUNCTION TYPE..., got 64 64 x"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_one_line_and_status_2(name, program, capsys):
    arguments, message = ERRORS[name]
    status, out, err = run(capsys, *(argument.replace("{program}", program) for argument in arguments))
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"jaxmp {arguments[0]}: ")
    assert message.replace("{program}", program) in err


def test_the_traceback_is_shown_where_it_is_asked_for(program):
    with pytest.raises(ArithmeticError, match="no product"):
        main.main(["explain", f"{program}:broken", "f32[8]", "--traceback"])


def test_an_interrupt_has_its_status(capsys, monkeypatch):

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(main.info, "run", interrupted)
    assert run(capsys, "info") == (130, "", "")
