"""A few programs of `benchmarks/bench_training.py` have the bits of one device on two meshes; plain JAX does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_training.py"


@pytest.mark.timeout(900)
def test_training_steps_at_a_level_do_not_know_the_mesh(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, str(SCRIPT), "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    columns, *rows = json.loads(next(tmp_path.iterdir()).read_text())["training"]["rows"]
    rows = [dict(zip(columns, row, strict=True)) for row in rows]
    assert len(rows) == 4, rows
    assert {row["level"] for row in rows} == {"equal"}, rows
    assert any(row["plain"] != "equal" for row in rows), rows
