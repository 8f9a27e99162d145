"""Counts the phrases of phrases.txt in comments, strings and documents. Exits with 1 if a folder has more than LIMIT in
1,000 lines of prose. `python .ci/words.py --show` prints each of them with its place."""

import collections
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

LIMIT = 20
LISTED = Path(__file__).with_name("phrases.txt")
PHRASES = [re.compile(line) for line in LISTED.read_text().splitlines() if line[0] != "#"]
TEXT = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def _of_python(text):
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in TEXT and " " in token.string:
            for i, line in enumerate(token.string.splitlines(), token.start[0]):
                if ">>> " not in line:
                    yield i, line.strip(" #:\"'")


def _of_cpp(text):
    for i, line in enumerate(text.splitlines(), 1):
        for string, comment in re.findall(r'"((?:[^"\\]|\\.)*)"|//(.*)', line):
            if " " in string or comment:
                yield i, string or comment


def _of_markdown(text):
    is_code = False
    for i, line in enumerate(text.splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code:
            yield i, re.sub("`[^`]*`", "`code`", line)


READERS = {".py": _of_python, ".cc": _of_cpp, ".h": _of_cpp, ".md": _of_markdown}


def _main():
    lines, hits = collections.Counter(), collections.Counter()
    for path in map(Path, subprocess.check_output(["git", "ls-files"], text=True).splitlines()):
        folder = "/".join(path.parts[: 3 if "_src" in path.parts else 1][: len(path.parts) - 1]) or "."
        is_read = path.is_file() and path.suffix in READERS
        for number, line in READERS[path.suffix](path.read_text()) if is_read else ():
            lines[folder] += bool(line.strip())
            found = [match[0] for phrase in PHRASES for match in phrase.finditer(line.strip())]
            hits[folder] += len(found)
            if found and "--show" in sys.argv:
                print(f"{path}:{number}: {', '.join(found)}: {line.strip()}")
    for folder in (over := [folder for folder, n in hits.items() if n > max(1, LIMIT * lines[folder] / 1000)]):
        print(f"{folder}: {hits[folder]} in {lines[folder]} lines of prose; the limit is {LIMIT} in 1,000")
    sys.exit(bool(over))


_main()
