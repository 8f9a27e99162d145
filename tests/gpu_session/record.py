"""What a session has found: one line of JSON for each case, on disk before the next case begins.

The session names its folder and its window by environment variables. A session that goes on from an earlier one has
that one's lines in its own file.
"""

import json
import os
from pathlib import Path

PASSED, FAILED, STOPPED = "passed", "failed", "stopped"


def path(folder: str | Path, window: int) -> Path:
    return Path(folder) / f"window{window}.jsonl"


def read(file: Path) -> list[dict]:
    """The lines of a file; the last may be cut off."""
    lines = []
    for text in file.read_text().splitlines() if file.is_file() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def lines() -> list[dict]:
    """Everything that this window has found, in this call and in earlier ones."""
    return read(path(os.environ["GPU_SESSION_OUT"], window()))


def window() -> int:
    return int(os.environ["GPU_SESSION_WINDOW"])


def ended(task: str) -> set[str]:
    """The cases of a task that have passed or failed, which need not run again."""
    return {line["case"] for line in lines() if line["task"] == task and line["status"] != STOPPED}


def add(task: str, case: str, status: str, **found) -> None:
    """One more line, whole and on disk whatever comes next; several processes may write at once."""
    text = json.dumps({"task": task, "case": case, "status": status} | found) + "\n"
    at = os.open(path(os.environ["GPU_SESSION_OUT"], window()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(at, text.encode())
        os.fsync(at)
    finally:
        os.close(at)
