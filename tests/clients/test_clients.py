"""Unchanged programs of others compute the same fused and plain, and tests of others pass on jaxmp. Each runs in its
own process, because some set JAX's configuration on import. Their output is kept for the page docs/works-with.md."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import page
import programs  # noqa: F401  adds its clients
import pytest
import sciences  # noqa: F401  adds its clients
import trainers  # noqa: F401  adds its clients
from models import CLIENTS
from suites import BUILD, SUITES

HERE = Path(__file__).resolve().parent
# Packages that requirements.txt leaves out with some JAX.
NEWEST = ["blackjax", "brax", "diffrax", "gpjax", "jax-md", "lineax", "mctx", "numpyro", "optimistix", "recurrentgemma"]
ABSENT = dict.fromkeys(NEWEST, "is tested on the newest JAX alone") | {
    "maxtext": "MaxText needs Python 3.12, and the oldest JAX is tested on 3.11",
    "haliax": "Haliax calls jax.core.is_constant_dim, which the newest JAX has taken away",
}
FOUND = BUILD / f"found-{jax.__version__}"


def run(script, name, package, *options):
    """Runs a script, keeps the results that it prints, and fails with its output if it fails."""
    if package in ABSENT and not importlib.util.find_spec(package.replace("-", "_")):
        pytest.skip(ABSENT[package])
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    if "CLIENT_TIMES" not in os.environ:  # a quarter less to compile
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, str(HERE / script), name, *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    results = [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-5000:]}"
    FOUND.mkdir(parents=True, exist_ok=True)
    kept = {"version": importlib.metadata.version(package), "results": results}
    (FOUND / f"{script.split('.')[0]}-{name}.json").write_text(json.dumps(kept))


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.timeout(900)
def test_a_client_computes_fused_what_it_computes_plain(name):
    run("run_client.py", name, CLIENTS[name].package, "--times", os.environ.get("CLIENT_TIMES", "0"))


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.timeout(900)
def test_others_tests_pass_on_jaxmp(name):
    run("suites.py", name, SUITES[name].package)


def test_the_page_is_that_of_its_results():
    assert page.PAGE.read_text() == page.page()
