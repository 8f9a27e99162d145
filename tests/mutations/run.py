"""Seed every fault of `faults.py` in a copy of the sources, and see which test notices it.

    make mutations                                     every fault, on the small suite
    make mutations ARGS="--only transposed-conjugation" some of them
    make mutations ARGS="--suite exhaustive"           the faults that the small suite has not noticed

The copy and its build lie in build/mutations; the checkout is only read. A fault of C++ is built into the extension of
the copy, incrementally. The tests that a fault names run first, then the rest of the suite, and the first failure ends
it. Before, the suite runs once without a fault: a test that fails then cannot notice anything, and is left out.

Results are added to results.json beside this file, and results.md is made of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from faults import FAULTS, Fault

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / "build" / os.environ.get("MUTATIONS_WORK", "mutations")  # another folder lets two runs go side by side
TREE, BUILD, SITE = WORK / "tree", WORK / "cpp", WORK / "site"
RESULTS = HERE / "results.json"
SUITES = {"small": [], "exhaustive": ["--exhaustive"]}
# Suites of their own.
APART = ("process", "gpu", "xla_gpu")
# Broad and quick first; the other files follow by name.
BROAD = (
    "sharding/test_placement.py",
    "ops/test_suite.py",
    "ops/test_drawn.py",
    "spec/test_epilogs.py",
    "validation/test_errors.py",
    "sharding/test_hlo.py",
)
# A test that runs longer than this, in seconds, counts as failed: a fault may end in a deadlock.
TIMEOUT = 240
# The editable installation of the environment would find the checkout's jaxmp; in the copy it must not.
SITECUSTOMIZE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
"""


def copy_sources() -> None:
    """Bring the copy up to date; files that are equal keep their time, so that a build stays incremental."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for old in [path for path in TREE.rglob("*") if path.is_file() and path.suffix in (".py", ".cc", ".h")]:
        if str(old.relative_to(TREE)) not in names:
            old.unlink()
    for name in names:
        source, target = ROOT / name, TREE / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    SITE.mkdir(parents=True, exist_ok=True)
    (SITE / "sitecustomize.py").write_text(SITECUSTOMIZE)


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(SITE), str(TREE)])
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PATH": tools}


def command(*words, timeout: float | None = None) -> tuple[int, str]:
    """(exit status, output); the status of a command that runs too long is 124."""
    try:
        done = subprocess.run(
            list(map(str, words)),
            cwd=TREE,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        return 124, str(error)
    return done.returncode, done.stdout


def build(*targets: str) -> str:
    """Build targets of the copy, and put the extension where Python finds it; what went wrong, or nothing."""
    if not (BUILD / "build.ninja").exists():
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DJAXMP_BUILD_MODULE=ON", "-DJAXMP_BUILD_TESTS=ON"]
        made = ["cmake", "-S", TREE, "-B", BUILD, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", *options]
        status, output = command(*made)
        if status:
            return output
    status, output = command("cmake", "--build", BUILD, "--target", "_jaxmp", *targets)
    if status:
        return output
    for extension in BUILD.glob("_jaxmp*.so"):
        shutil.copyfile(extension, TREE / "jaxmp" / extension.name)
    return ""


def take_extension() -> None:
    """Put the environment's own extension, which is built of the sources without a fault, into the copy."""
    origin = Path(importlib.util.find_spec("jaxmp._jaxmp").origin)
    shutil.copyfile(origin, TREE / "jaxmp" / origin.name)


def check_copy() -> None:
    """End the run unless the copy is what the tests import, and every file of tests can be collected."""
    status, output = command(sys.executable, "-c", "import jaxmp, jaxmp._jaxmp as x; print(jaxmp.__file__, x.__file__)")
    if status or output.count(str(TREE)) != 2:
        sys.exit(f"the copy does not import its own jaxmp: {output}")
    status, output = command(sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider")
    if status:
        sys.exit(f"the tests of the copy cannot be collected: {output[-2000:]}")


def run_pytest(paths: list[str], options: list[str]) -> str:
    """The first test that fails, or nothing."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", f"--timeout={TIMEOUT}"]
    status, output = command(*words, *options, *(f"tests/{path}" for path in paths), timeout=3600)
    if status in (0, 5):  # passed, or nothing to run
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - .*)?$", output, flags=re.M)
    if found:
        return found[1]
    last = [line for line in output.splitlines() if line.strip()][-1:]
    return f"the process ended with status {status}: {''.join(last)[:80]}"


def run_ctest(names: list[str] | None) -> str:
    """The first C++ test that fails, or nothing; None for all of them."""
    pattern = [] if names is None else ["-R", f"^({'|'.join(names)})(_with_\\w+)?$"]
    words = ["ctest", "--test-dir", BUILD, "--parallel", "2", "--stop-on-failure", *pattern]
    status, output = command(*words, timeout=600)
    if status == 0:
        return ""
    found = re.search(r"Test\s+#\d+: (\w+) \.*[\w ]*\*\*\*", output)
    return f"cpp:{found[1]}" if found else f"ctest ended with status {status}"


def files_of_tests() -> list[str]:
    folder = TREE / "tests"
    names = sorted(
        str(path.relative_to(folder)) for path in folder.glob("*/test_*.py") if path.parent.name not in APART
    )
    left_out = ("project/test_mutations.py", "project/test_documents.py")  # about the sources as text
    return [*BROAD, *(name for name in names if name not in (*BROAD, *left_out))]


def hunt(fault: Fault, options: list[str], is_quick: bool) -> tuple[str, str]:
    """(status, test) of one fault in the copy: "killed" and by what, "survived", or "invalid" and why; "open" where
    only the tests that it names have run."""
    named_cpp = [name.removeprefix("cpp:") for name in fault.first if name.startswith("cpp:")]
    named = [name for name in fault.first if not name.startswith("cpp:")]
    if fault.is_cpp and (error := build(*named_cpp)):
        return "invalid", "does not compile: " + error[-300:]
    if named_cpp and (test := run_ctest(named_cpp)):
        return "killed", test
    if named and (test := run_pytest(named, options)):
        return "killed", test
    if is_quick:
        return "open", ""
    if fault.is_cpp:
        if error := build("all"):
            return "invalid", "does not compile: " + error[-300:]
        if test := run_ctest(None):
            return "killed", test
    test = run_pytest([name for name in files_of_tests() if name not in named], options)
    return ("killed", test) if test else ("survived", "")


def seed(fault: Fault, options: list[str], is_quick: bool) -> dict:
    """One row of the results."""
    path, started = TREE / fault.file, time.monotonic()
    text = path.read_text()
    if text.count(fault.old) != 1:
        return {"status": "invalid", "by": f"the old text occurs {text.count(fault.old)} times", "seconds": 0}
    path.write_text(text.replace(fault.old, fault.new))
    try:
        status, test = hunt(fault, options, is_quick)
    finally:
        path.write_text(text)
    return {"status": status, "by": test, "seconds": round(time.monotonic() - started)}


def read_results() -> dict:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def table(results: dict) -> str:
    """results.md."""
    counts = {
        suite: {name: sum(row["status"] == name for row in rows.values()) for name in ("killed", "survived", "open")}
        for suite, rows in results.items()
    }
    lines = [
        "# Seeded faults and the tests that notice them",
        "",
        "Made by `make mutations` (tests/mutations/run.py); the faults are in tests/mutations/faults.py. The",
        "exhaustive suite holds every case of the small one, so it runs only where the small one has noticed nothing.",
        "Seconds are wall time, the build included, of a machine with two cores that others use too.",
        "",
    ]
    for suite, count in counts.items():
        missing = sum(fault.id not in results[suite] for fault in FAULTS)
        rest = f", {missing} not run" if suite == "small" else ""
        opened = f", {count['open']} open: not noticed by the tests that they name, and the rest has not run"
        lines.append(f"- {suite} suite: {count['killed']} killed, {count['survived']} survived{opened}{rest}")
    lines += ["", "| Fault | File | What it breaks | Small suite | Exhaustive suite |", "|---|---|---|---|---|"]
    for fault in FAULTS:
        cells = []
        for suite in SUITES:
            row = results.get(suite, {}).get(fault.id)
            if row is None:
                done = results.get("small", {}).get(fault.id, {}).get("status") == "killed"
                cells.append("as the small one" if suite != "small" and done else "not run")
            else:
                test = row["by"].replace("tests/", "").replace("|", "\\|")[:120]
                cells.append(f"{row['status']}{f' by `{test}`' if test else ''}, {row['seconds']} s")
        lines.append(f"| {fault.id} | {fault.file.rpartition('/')[2]} | {fault.breaks} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="small")
    parser.add_argument("--only", help="ids, separated by commas")
    parser.add_argument("--kind", choices=("python", "cpp"), help="faults of one language")
    parser.add_argument("--missing", action="store_true", help="faults that have no result yet")
    parser.add_argument("--quick", action="store_true", help="run the tests that a fault names, and no others")
    parser.add_argument("--no-baseline", action="store_true", help="trust that the suite passes without a fault")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further fault after this long")
    args = parser.parse_args()
    started = time.monotonic()
    results = read_results()
    rows = results.setdefault(args.suite, {})
    faults = [fault for fault in FAULTS if args.only is None or fault.id in args.only.split(",")]
    faults = [fault for fault in faults if args.kind in (None, "cpp" if fault.is_cpp else "python")]
    settled = {name for name, row in rows.items() if row["status"] in ("killed", "survived")}
    faults = [fault for fault in faults if not args.missing or fault.id not in settled]
    if args.suite == "exhaustive" and args.only is None:
        survivors = {name for name, row in results.get("small", {}).items() if row["status"] == "survived"}
        faults = [fault for fault in faults if fault.id in survivors]
    copy_sources()
    if not any(fault.is_cpp for fault in faults):
        take_extension()
    elif error := build("all"):
        sys.exit(error)
    check_copy()
    options = list(SUITES[args.suite])
    if not args.no_baseline:
        status, output = command(sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *options)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - .*)?$", output, flags=re.M)
        print(f"without a fault: status {status}, {len(failed)} failures", *failed, sep="\n  ", flush=True)
        options += [f"--deselect={test}" for test in failed]
    for fault in faults:
        if time.monotonic() - started > 60 * args.minutes:
            break
        row = seed(fault, options, args.quick)
        print(f"{fault.id}: {row}", flush=True)
        results = read_results()  # another run may have added to them
        results.setdefault(args.suite, {})[fault.id] = row
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        (HERE / "results.md").write_text(table(results))
    if any(fault.is_cpp for fault in faults):
        build("all")  # without a fault again


if __name__ == "__main__":
    main()
