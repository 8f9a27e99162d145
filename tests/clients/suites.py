"""Runs the tests of other packages, from their source distributions, plain and with jaxmp in two ways. `python
suites.py NAME` downloads the sources of the installed release, runs a share of their tests in each mode of `plugin`,
and prints the outcomes as JSON. Exits with 1 if a test passes plain and fails in another mode, unless KNOWN gives the
reason."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "clients"


@dataclasses.dataclass(frozen=True)
class Suite:
    """Files of tests in a source distribution; one in `share` tests runs."""

    package: str
    files: tuple[str, ...]
    share: int = 1
    kind: str = ""

    @property
    def name(self):
        return f"{self.package} {self.kind}".strip()


SUITES = {
    suite.name: suite
    for suite in (
        Suite("flax", ("tests/linen", "tests/nnx/nn"), 40, "layers"),
        Suite("flax", ("tests/nnx/integration_test.py", "tests/nnx/optimizer_test.py"), 6, "training"),
        Suite("optax", ("optax/contrib/_muon_test.py", "optax/_src/linear_algebra_test.py"), 8),
        Suite("optax", ("optax/losses", "optax/projections", "optax/microbatching", "optax/assignment"), 40, "losses"),
        Suite("chex", ("chex",), 40),
        Suite("numpyro", ("test/test_flows.py", "test/test_nn.py", "test/test_distributions.py"), 100),
        Suite("dm-haiku", ("haiku/_src/basic_test.py", "haiku/_src/attention_test.py"), 4),
        Suite("haliax", ("tests/test_dot.py", "tests/test_einsum.py", "tests/test_nn.py", "tests/test_fp8.py"), 4),
        Suite("penzai", ("tests/nn/linear_and_affine_test.py", "tests/models/simple_mlp_test.py"), 4),
    )
}

# Parts of a test's name, the only mode that it may fail in, and the reason.
KNOWN = {
    ("LinearTest::test_precision", "fused"): "haiku reads the operation dot in a compiled program, where a call stands"
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SUITES)
    parser.add_argument("--share", type=int, help="run one test in this many, instead of the suite's share")
    arguments = parser.parse_args()
    suite = SUITES[arguments.name]
    suite = dataclasses.replace(suite, share=arguments.share or suite.share)
    root = sources(suite.package)
    plain = outcomes(suite, root, "plain")
    passed = {name for name, (outcome, *_) in plain["outcomes"].items() if outcome == "passed"}
    failed, met = not passed, 0
    for mode in ("products", "fused"):
        found = outcomes(suite, root, mode)
        worse = {name: found["outcomes"].get(name, ["not run"]) for name in sorted(passed)}
        worse = {name: outcome for name, outcome in worse.items() if outcome[0] != "passed"}
        known = {name: reason for name in worse if (reason := reason_of(name, mode))}
        for name in worse.keys() - known.keys():
            print(f"{mode}: {name}: {' '.join(worse[name])}")
        failed |= bool(worse.keys() - known.keys())
        met += found["met"]
        seen = {"mode": mode, "run": len(plain["outcomes"]), "passed": len(passed), "met": found["met"]}
        print("RESULT", json.dumps(seen | {"calls": found["calls"], "known": known}), flush=True)
    sys.exit(failed or not met)


def reason_of(name, mode):
    return next((why for (part, where), why in KNOWN.items() if part in name and mode == where), None)


def sources(package):
    """Returns the folder with the sources of the installed release."""
    version = importlib.metadata.version(package)
    folder = BUILD / f"{package.replace('-', '_')}-{version}"
    if not folder.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        download = ("download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", package)
        subprocess.run([sys.executable, "-m", "pip", *download, f"{package}=={version}", "-d", str(BUILD)], check=True)
        with tarfile.open(next(BUILD.glob(f"{folder.name}*.tar.gz"))) as archive:
            archive.extractall(BUILD, filter="data")
        settings = folder / "pyproject.toml"
        if not (settings.exists() and "[tool.pytest" in settings.read_text()):
            (folder / "pytest.ini").touch()  # otherwise pytest would use ours, from a parent folder
    return folder


def outcomes(suite, root, mode):
    """Returns the outcome of each test in a mode, and the counts of products."""
    report = BUILD / f"{suite.name}-{mode}.json"
    report.unlink(missing_ok=True)
    options = ["-p", "plugin", f"--jaxmp={mode}", f"--jaxmp-report={report}"]
    options += ["-p", "no:cacheprovider", "-q", "--tb=short"]
    options += [f"--jaxmp-share={suite.share}"]
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{root}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", *options, *suite.files]
    run = subprocess.run(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if not report.exists():
        sys.exit(f"{' '.join(command)}\n{run.stdout}")
    (report.with_suffix(".log")).write_text(run.stdout)
    return json.loads(report.read_text())


if __name__ == "__main__":
    main()
