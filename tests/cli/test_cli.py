"""The command line: what it prints, how it fails, and its exit statuses.

Silently wrong without these: a self-test that passes with a wrong product, a script that takes a failure for success,
and a stack trace where one line says what to do. Commands run in this process, since each start of JAX takes seconds;
one test starts a process of its own.
"""

import importlib.metadata
import json
import re
import subprocess
import sys

import cases
import jax
import numpy as np
import pytest

from jaxmp import testing
from jaxmp._src.cli import bench, explain, main, output, selftest
from jaxmp._src.hardware import processor

PROGRAM = """
import jax, jaxmp
from jax.sharding import PartitionSpec as P

def layer(x, w):
    return jaxmp.matmul(x, w, out_sharding=P(None, "x"))

def alone():
    return jaxmp.matmul(jax.ShapeDtypeStruct((4, 6), "float32"), 1)

def broken(x):
    raise ArithmeticError("no product\\nof this")
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


def run(capsys, *arguments):
    """(exit status, standard output, standard error)."""
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


def test_the_script_is_the_same_command():
    (script,) = (each for each in importlib.metadata.entry_points(group="console_scripts") if each.name == "jaxmp")
    assert script.load() is main.main


def test_info_names_what_serves_and_why(capsys):
    cases.require("host")
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


def test_tables_without_rich_name_the_remedy(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert run(capsys, "info") == (
        2,
        "",
        "jaxmp info: tables need the package rich: pip install 'jaxmp[cli]', or pass --json\n",
    )


# ---- tables

TABLE = (
    ("sharding", "a", "bound by", ""),
    [("reduce-scatter of columns", "y, x", "overhead", "*"), ("all-gather", "-, yx", "link", "")],
)
WORDS = {"sharding", "a", "bound", "by", "reduce-scatter", "of", "columns", "y,", "x", "overhead", "*", "all-gather"}
WORDS |= {"-,", "yx", "link", "an", "advise"}


def printed(capsys, monkeypatch, width, *table):
    """The lines of a table on a terminal of this width, or in a file, without styles and blank lines."""
    monkeypatch.setenv("COLUMNS", str(width or 20))
    monkeypatch.setenv("FORCE_COLOR" if width else "NO_COLOR", "1")  # which rich takes for a terminal
    output.print_table(*table)
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    return [line.rstrip() for line in out.splitlines() if line.strip()]


def test_a_table_in_a_file_is_as_wide_as_its_texts(capsys, monkeypatch):
    title, _, rule, *rows = printed(capsys, monkeypatch, None, "a title that is longer than twenty columns", *TABLE)
    assert title == "a title that is longer than twenty columns"
    assert set(rule) == {" ", "─"}
    assert [row.split("  ")[0].strip() for row in rows] == ["reduce-scatter of columns", "all-gather"]
    assert rows[0].split() == ["reduce-scatter", "of", "columns", "y,", "x", "overhead", "*"]


@pytest.mark.parametrize("width", [200, 51, 50, 44, 35, 34, 30, 12])
def test_a_table_breaks_no_word_and_is_as_narrow_as_the_terminal(width, capsys, monkeypatch):
    lines = printed(capsys, monkeypatch, width, "an advise", *TABLE)
    found = [word for line in lines for word in line.replace("─", "").split()]
    assert set(found) <= WORDS
    for word in ("reduce-scatter", "all-gather", "overhead", "link", "columns", "*"):
        assert found.count(word) == 1
    assert max(map(len, lines)) <= max(width, 34)  # the words beside one another


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_width_is_that_of_the_terminal_if_there_is_one(is_terminal, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    assert main.main(["advise", "4096", "4096", "16384", "--devices", "64"]) == 0
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in capsys.readouterr().out.splitlines()]
    assert (max(map(len, lines)) <= 80) == is_terminal
    assert sum("all_reduce" in line.split() for line in lines) == 1


# ---- selftest


def some_checks(*arguments):
    """One check of each kind."""
    by_kind = {check.promise: check for check in ALL_CHECKS(*arguments)}
    yield from by_kind.values()


ALL_CHECKS = selftest.checks


def test_the_selftest_checks_every_pattern_and_type_and_both_levels():
    found = list(selftest.checks(4, None, True))
    assert {check.promise for check in found} == {"placement", "rounding", "batch", "topology"}
    subjects = {check.subject for check in found if check.promise == "placement"}
    assert len(subjects) == len(list(testing.layouts(4))) * 5


def test_the_selftest_passes_here(capsys, monkeypatch):
    cases.require("host")
    monkeypatch.setattr(selftest, "checks", some_checks)
    status, out, _ = run(capsys, "selftest", "--json")
    report = json.loads(out)
    assert (status, report["passed"], len(report["checks"])) == (0, True, 4)


@pytest.mark.parametrize("kind", ["placement", "rounding"])
def test_the_selftest_fails_where_one_element_is_wrong(kind, capsys, monkeypatch):
    """By some ten times what rounding allows in a sum of 264 terms, or by its place."""
    cases.require("host")
    monkeypatch.setattr(selftest, "checks", lambda *args: [c for c in some_checks(*args) if c.promise == kind])
    real = selftest.matmul

    def wrong(a, b, **options):
        d = real(a, b, **options)
        return d.at[3, 5].add(1e-3) if kind == "rounding" else d.at[:2].set(d[1::-1])

    monkeypatch.setattr(selftest, "matmul", wrong)
    status, out, _ = run(capsys, "selftest")
    assert status == 1
    assert f"FAILED {kind} of " in out
    assert "works on this machine" not in out


def test_the_selftest_goes_on_behind_a_broken_promise(capsys, monkeypatch):
    def broken():
        testing.assert_bitwise_equal(np.float32(1), np.float32(2), "d of m=3")

    good, bad = testing.Check("batch", "k=1", lambda: 7), testing.Check("topology", "k=2", broken)
    monkeypatch.setattr(selftest, "checks", lambda *_: [good, bad, good])
    status, out, _ = run(capsys, "selftest", "--json")
    errors = [check["error"] for check in json.loads(out)["checks"]]
    assert (status, errors[0], errors[2]) == (1, "", "")
    assert errors[1].startswith("AssertionError: d of m=3: 1 of 1 elements differ")


# ---- bench


def test_a_bench_times_the_patterns_that_the_extents_allow(capsys):
    cases.require("host")
    status, out, _ = run(capsys, "bench", "8", "6", "12", "--seconds", "0.001", "--json")
    report = json.loads(out)
    assert status == 0
    assert [row["pattern"] for row in report["rows"]] == ["local", "all_gather", "grid"]  # 6 is no multiple of 4
    assert all(set(row["seconds"]) == {"jaxmp", "xla"} for row in report["rows"])
    assert report["flops"] == 2 * 8 * 6 * 12


def test_a_bench_prints_a_verdict(capsys):
    cases.require("host")
    arguments = ("bench", "8", "8", "8", "--mesh", "2", "--dtype", "bf16", "--pattern", "rs", "--seconds", "0.001")
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert "8x8x8 bfloat16 on 2 devices" in out
    assert "jaxmp runs at " in out
    text = bench.verdict(["local", "grid"], [2.0, 0.5])
    assert text == "jaxmp runs at XLA's rate (geometric mean of 2 patterns); slower in grid."


def test_a_bench_of_wrong_products_fails(capsys, monkeypatch):
    cases.require("host")
    real = bench.matmul
    monkeypatch.setattr(bench, "matmul", lambda a, b, **options: real(a, b, **options) + 1)
    status, out, _ = run(capsys, "bench", "8", "8", "8", "--pattern", "local", "--seconds", "0.001")
    assert status == 1
    assert "WRONG local: the results differ by 1" in out


# ---- explain


def test_explain_prints_the_rows_of_a_function_of_a_file(program, capsys):
    cases.require("host")
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


def test_types_are_read_as_jax_prints_them():
    mesh = explain.mesh_of("x=2,y=2")
    for text in ("float32[8@x,16]", "bfloat16[8@(x,y),4]", "float32[]", "int32[3]"):
        found = explain.argument_of(text, mesh)
        assert str(jax.typeof(jax.device_put(np.zeros(found.shape, found.dtype), found.sharding))) == text


# ---- errors


ERRORS = {
    "no file": (("explain", "none.py:f"), "there is no file none.py"),
    "no name": (("explain", "none.py"), "takes FILE.py:FUNCTION, got 'none.py'"),
    "no function": (("explain", "{program}:g"), "{program} has no function g"),
    "no types": (("explain", "{program}:layer"), "missing a required argument: 'x'; pass one type for each"),
    "no mesh": (("explain", "{program}:layer", "f32[8@x,4]"), "f32[8@x,4] names mesh axes; pass --mesh, as --mesh x=4"),
    "no axis": (("explain", "{program}:layer", "f32[8@y]", "--mesh", "x=4"), "names the axis y, which --mesh does not"),
    "no type": (("explain", "{program}:layer", "f32(8)"), "takes types such as f32[512@x,1024], got 'f32(8)'"),
    "no extent": (("explain", "{program}:layer", "f32[8,]"), "takes types such as f32[512@x,1024], got 'f32[8,]'"),
    "a mesh": (("explain", "{program}:layer", "--mesh", "4"), "--mesh takes axes as x=2,y=2, got '4'"),
    "raises": (("explain", "{program}:broken", "f32[8]"), "ArithmeticError: no product (--traceback shows where)"),
    "a dtype": (("bench", "8", "8", "8", "--dtype", "f31"), "there is no type 'f31'; pass f32, f64, bf16"),
    "a pattern": (("bench", "8", "8", "8", "--pattern", "gr"), "there is no pattern 'gr'; pass all or one of local"),
    "no pattern": (("bench", "7", "7", "7"), "no pattern takes 7x7x7 on 4 devices"),
    "extents": (("bench", "8", "7", "8", "--pattern", "ar"), "all_reduce: 7 is not a multiple of 4, the devices along"),
    "devices": (("bench", "8", "8", "8", "--mesh", "4096"), "no pattern takes 8x8x8 on 4096 devices"),
    "no GPU": (("selftest", "--implementation", "cublasmp"), "cublasmp needs a CUDA device, JAX's backend is cpu"),
    "fewer": (("selftest", "--devices", "4096"), "needs 4096 devices, but this machine has"),
    "below 1": (("bench", "0", "8", "8"), "M, K, N and --mesh must be at least 1"),
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


def test_usage_errors_and_interrupts_have_statuses(capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        main.main(["inform"])
    assert ended.value.code == 2
    assert "invalid choice: 'inform'" in capsys.readouterr().err

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(main.info, "run", interrupted)
    assert run(capsys, "info") == (130, "", "")


def test_short_names_of_types():
    assert [output.dtype_of(x) for x in ("f32", "bf16", "c64", "fp8", "int8")] == [
        "float32",
        "bfloat16",
        "complex64",
        "float8_e4m3fn",
        "int8",
    ]
