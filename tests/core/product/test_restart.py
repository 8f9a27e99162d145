"""Programs that leave the process: through the persistent compilation cache, and through jax.export. Without these
tests, a program could contain a name that only one process understands, such as the address of a Python object that
jax.experimental.custom_partitioning writes. A restarted job would then silently compile everything again, and an
exported program would fail or run on other devices."""

import json
import os
import subprocess
import sys

import pytest
import restart

from jaxmp._src.core.spec.fields import from_fields
from jaxmp._src.core.spec.matmul_spec import MatmulSpec


def run(*args):
    ended = subprocess.run(
        [sys.executable, restart.__file__, *args],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(restart.__file__), *sys.path])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    last = ended.stdout.strip().splitlines()[-1:]
    assert ended.returncode == 0, f"ended with {ended.returncode} at {last}\n{ended.stderr[-3000:]}"
    return ended.stdout


def test_a_second_process_uses_the_cache_and_exported_programs(tmp_path):
    run("write", str(tmp_path))
    found = json.loads(run("read", str(tmp_path)).splitlines()[-1])
    expected = {}
    for name in restart.PROGRAMS:
        exported = [name, f"{name}, any rows"] if name in restart.SYMBOLIC else [name]
        expected[name] = {"cache": ["hit"]} | {f"{which} is right": True for which in ["cache", *exported]}
    assert found == expected


def test_a_changed_program_is_refused_or_runs():
    """An exported program is untrusted input: changes of the description that XLA passes to a product give
    errors or results, and never crash. (tests/cpp/attribute_fuzz.cc changes the calls' attributes.)"""
    run("tamper")


def test_a_description_of_another_version_is_refused():
    with pytest.raises(ValueError, match="a MatmulSpec with tiles, which this version of jaxmp does not know"):
        from_fields(MatmulSpec, {"out_dtype": {"dtype": "float32"}, "tiles": 3})
