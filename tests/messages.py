"""The messages of jaxmp's exceptions and warnings, as its sources have them.

A message is public unless it is an AssertionError (a fault of ours, or a comparison that failed), a ConnectionError
(two processes that greet each other catch it), or a class that its module alone knows. What is computed is written as
"…". A message that is computed as a whole passes on a text that was made elsewhere, and is left out.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRIVATE = ("AssertionError", "ConnectionError", "UnknownError")


def _text(node):
    """The text of an expression, with "…" for what is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{(a|b|bias)\}", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


def _raised(node):
    """The name of what a statement raises or warns of, and the node of its text; or None."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        return ast.unparse(node.exc.func), node.exc.args[0]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
        return "warning", node.args[0]
    return None


def head(message):
    """A message without the name of its function, up to where it says what came or what to do."""
    first, *rest = re.split(r"(; |, got )", re.sub(r"^…(?:\(\))?: ", "", message))
    while rest and len(re.findall(r"[A-Za-z]", first)) < 20:
        first, rest = first + rest[0] + rest[1], rest[2:]
    return first.rstrip(" .")


def public_messages():
    """{head of a message: the first place that has it}"""
    found = {}
    for path in sorted((ROOT / "jaxmp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            kind, text = _raised(node) or ("", None)
            message = head(re.sub("…+", "…", _text(text))) if text else ""
            if kind not in PRIVATE and len(re.findall(r"[A-Za-z]", re.sub(r"^\w+: ", "", message))) >= 8:
                found.setdefault(message, f"{path.relative_to(ROOT)}:{node.lineno}")
    return found
