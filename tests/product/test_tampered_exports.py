"""An exported program is input: whatever its attributes say, running it is an error or a result, and never a crash.

What would be wrong without it: a block of 2^62 in a changed file ends the process with a division by zero, and one of
2^63 - 1 has the call write beyond its buffers.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("program", "shares"), [("block-cyclic", 20), ("all-gather", 12), ("local", 6), ("partitioned", 8)]
)
def test_a_changed_program_is_refused_or_runs(program, shares):
    ended = subprocess.run(
        [sys.executable, str(HERE / "tampered.py"), program, "0", str(shares)],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    last = ended.stdout.strip().splitlines()[-1:]
    assert ended.returncode == 0, f"ended with {ended.returncode} at {last}\n{ended.stderr[-3000:]}"
    refused, ran = map(int, last[0].split()[1:])
    assert refused >= 10
    print(f"{program}: {refused} refused, {ran} ran")
