"""Seed each fault of `faults.py`, and see which test notices it.

    make test-python RUN=tests/mutations/run.py                                  every fault
    make test-python RUN=tests/mutations/run.py ARGS="--only slope_of_gelu"      some of them

The tests that a fault names run until one fails; the checkout is only read. A fault of C++ is linked into the extension
and the tests of a build of its own (build/mutations), in place of the function that it stands for. The status is 1 if a
fault has survived.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from faults import FAULTS, Fault

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "mutations"
CPP_TESTS = ("cpp_tests", "conformance")
# A test that runs longer than this, in seconds, counts as failed: a fault may end in a deadlock.
TIMEOUT = 240


def command(*words, **env) -> tuple[int, str]:
    """(exit status, output)."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        list(map(str, words)),
        cwd=ROOT,
        env=os.environ | {"PATH": path} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode, done.stdout


def checked(*words) -> str:
    status, output = command(*words)
    if status:
        sys.exit(f"{words[0]} failed: {output[-2000:]}")
    return output


def build(link: str, *targets: str) -> None:
    """Build targets with these additions to their link."""
    flags = [f"-DCMAKE_{kind}_LINKER_FLAGS={link}" for kind in ("EXE", "MODULE")]
    made = ["-DCMAKE_BUILD_TYPE=Release", "-DJAXMP_BUILD_MODULE=ON", "-DJAXMP_BUILD_TESTS=ON"]
    checked("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", *made, *flags)
    checked("cmake", "--build", BUILD, "--target", *targets)


def linked(name: str, fault: Fault) -> str:
    """The additions to a link that put a fault of C++ in place of its function."""
    library = BUILD / "libjaxmp_core.a"
    shown = checked("nm", "-p", "--defined-only", "--demangle", library).splitlines()
    mangled = checked("nm", "-p", "--defined-only", library).splitlines()
    begin, _, end = (fault.name if "(" in fault.name else f"{fault.name}(").partition("…")
    pairs = [(line[19:], other[19:]) for line, other in zip(shown, mangled, strict=True)]  # after address and kind
    methods = [(text.removesuffix(" const"), symbol) for text, symbol in pairs]
    found = {symbol for text, symbol in methods if text.startswith(begin) and text.endswith(end) and text[-1:] == ")"}
    if len(found) != 1:
        sys.exit(f"{name}: {len(found)} functions are called {fault.name}")
    (symbol,) = found
    compiled = BUILD / f"{name}.o"
    headers = Path(importlib.util.find_spec("jaxlib").origin).parent / "include"
    options = ["-std=c++17", "-O1", "-fPIC", f"-I{ROOT}", f"-I{headers}", f"-DFAULT_{name}"]
    checked("c++", *options, f'-DSYMBOL="{symbol}"', "-c", HERE / "faults.cc", "-o", compiled)
    return f"-Wl,--wrap={symbol} {compiled}"


def run_pytest(test: str, name: str, extension: Path | None) -> str:
    """The first test that fails with a fault, or ""."""
    words = ["-q", "-x", "-p", "no:cacheprovider", "--tb=no", f"--timeout={TIMEOUT}"]
    env = {"SEEDED_FAULT": name, "PYTHONPATH": str(HERE)} | ({"SEEDED_EXTENSION": str(extension)} if extension else {})
    status, output = command(sys.executable, "-m", "pytest", *words, f"tests/{test}", **env)
    if status == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - .*)?$", output, flags=re.M)
    return found[1] if found else f"{test} ended with status {status}: {output[-300:]}"


def noticed(name: str, fault: Fault) -> str:
    """The test that notices a fault, or ""."""
    extension = None
    if fault.replace is None:
        build(linked(name, fault), "_jaxmp", *CPP_TESTS * any(test.startswith("cpp:") for test in fault.tests))
        extension = next(BUILD.glob("_jaxmp*.so"))
    for test in fault.tests:
        if test.startswith("cpp:"):
            status = command("timeout", TIMEOUT, "ctest", "--test-dir", BUILD, "-R", f"^{test[4:]}$")[0]
            seen = (test + ", which does not end" * (status == 124)) if status else ""
        else:
            seen = run_pytest(test, name, extension)
        if seen:
            return seen
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names, separated by commas")
    only = parser.parse_args().only
    faults = {name: fault for name, fault in FAULTS.items() if only is None or name in only.split(",")}
    if any(fault.replace is None for fault in faults.values()):
        build("", "jaxmp_core")
    survived = []
    for name, fault in faults.items():
        started = time.monotonic()
        seen = noticed(name, fault)
        survived += [] if seen else [name]
        print(f"{name}: {f'noticed by {seen}' if seen else 'SURVIVED'}, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{len(faults) - len(survived)} of {len(faults)} faults are noticed")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
