#!/usr/bin/env python3
"""Checks and files of a release: one version everywhere, notes, and wheels with the right contents.

pyproject.toml has the version, and CMake reads it there. CITATION.cff, the recipes in packaging, the changelog and a
release's tag agree with it.

    .ci/release.py prepare 0.3.0                   write the version and today's date, and close "Unreleased"
    .ci/release.py check [--tag v0.3.0]            compare what the files say, and the tag
    .ci/release.py notes                           print the changelog's part of this version
    .ci/release.py contents [--complete] WHEEL...  look into wheels; --complete: they are all that a release has
"""

import argparse
import datetime
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = r"\d+\.\d+\.\d+(?:rc\d+)?"
# Where each file has the version, and where two of them have the date.
PLACES = {
    "pyproject.toml": rf'(?m)^version = "({VERSION})"$',
    "CITATION.cff": rf"(?m)^version: ({VERSION})$",
    "packaging/conda/recipe.yaml": rf'(?m)^  version: "({VERSION})"$',
    "packaging/easybuild/jaxmp-foss-2026.1.eb": rf"(?m)^version = '({VERSION})'$",
    "packaging/spack/package.py": rf'(?m)^    version\("({VERSION})"\)$',
}
CITED_DATE = r"(?m)^date-released: (\d{4}-\d\d-\d\d)$"
HEADING = re.compile(rf"(?m)^## ({VERSION}) \((\d{{4}}-\d\d-\d\d)\)$")
UNRELEASED = "## Unreleased\n"
# The wheels of a release, which it has in addition to the source distribution.
PYTHONS = ("cp311-cp311", "cp312-abi3")
PROCESSORS = ("x86_64", "aarch64")
# OpenBLAS or cuBLAS inside would be tens of megabytes; ours has one.
LARGEST_WHEEL = 5_000_000


class ReleaseError(Exception):
    """A release that does not fit, explained in one line."""


def main(arguments: list[str] | None = None, root: Path = ROOT) -> None:
    """Runs one command; what does not fit ends it with one line and status 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare").add_argument("version")
    commands.add_parser("check").add_argument("--tag", default="", help="empty: no tag")
    commands.add_parser("notes")
    contents = commands.add_parser("contents")
    contents.add_argument("wheels", nargs="+", type=Path)
    contents.add_argument("--complete", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if options.command == "prepare":
            prepare(root, options.version, datetime.datetime.now(datetime.UTC).date())
        elif options.command == "check":
            print(check(root, options.tag))
        elif options.command == "notes":
            print(notes(root, version_of(root)), end="")
        else:
            check_wheels(options.wheels, version_of(root), is_complete=options.complete)
    except ReleaseError as error:
        sys.exit(f"release: {error}")


def prepare(root: Path, version: str, date: datetime.date) -> None:
    """Writes `version` and `date` where they belong, and moves what is unreleased below a heading with them."""
    if not re.fullmatch(VERSION, version):
        raise ReleaseError(f"{version!r} is no version; write 1.2.3, or 1.2.3rc1 for a candidate")
    if _order(version) <= _order(current := version_of(root)):
        raise ReleaseError(f"{version} does not come after {current}, the version of pyproject.toml")
    changelog = root / "CHANGELOG.md"
    if not (text := unreleased(root)):
        raise ReleaseError('CHANGELOG.md has nothing under "Unreleased", so there is nothing to release')
    released = changelog.read_text().replace(text, f"## {version} ({date})\n\n{text}", 1)
    for name, pattern in PLACES.items():
        _substitute(root / name, pattern, version)
    _substitute(root / "CITATION.cff", CITED_DATE, str(date))
    changelog.write_text(released)


def check(root: Path, tag: str = "") -> str:
    """The version on which the files, and the tag if there is one, agree."""
    version = version_of(root)
    for name, pattern in PLACES.items():
        if (said := _found(root / name, pattern)) != version:
            raise ReleaseError(f"{name} has version {said}, but pyproject.toml has {version}")
    headings = HEADING.findall((root / "CHANGELOG.md").read_text())
    newest, date = headings[0] if headings else ("none", "")
    if newest != version:
        raise ReleaseError(f"the newest version of CHANGELOG.md is {newest}, but pyproject.toml has {version}")
    if (cited_date := _found(root / "CITATION.cff", CITED_DATE)) != date:
        raise ReleaseError(f"CITATION.cff dates {version} {cited_date}, but CHANGELOG.md dates it {date}")
    notes(root, version)
    if tag and tag != f"v{version}":
        raise ReleaseError(f"the tag is {tag}, but pyproject.toml has version {version}; its tag is v{version}")
    if tag and unreleased(root):
        raise ReleaseError(f'CHANGELOG.md has entries under "Unreleased", which {tag} would release without a heading')
    return version


def notes(root: Path, version: str) -> str:
    """The changelog's part of a version, without its heading."""
    text = (root / "CHANGELOG.md").read_text()
    for heading in HEADING.finditer(text):
        if heading[1] == version:
            part = text[heading.end() :].split("\n## ", 1)[0].strip()
            if not part:
                raise ReleaseError(f"CHANGELOG.md says nothing of {version}")
            return part + "\n"
    raise ReleaseError(f'CHANGELOG.md has no heading "## {version} (<date>)"')


def check_wheels(wheels: list[Path], version: str, *, is_complete: bool) -> None:
    """Each is of this version, made for many systems, and holds one extension and no library of somebody else's."""
    found = []
    for wheel in wheels:
        name, of_version, python, abi, system = wheel.name.removesuffix(".whl").split("-")
        if (name, of_version) != ("jaxmp", version):
            raise ReleaseError(f"{wheel.name} is not of version {version}, which pyproject.toml has")
        if not re.fullmatch(r"manylinux_\d+_\d+_\w+(\.manylinux\w+)*", system):
            raise ReleaseError(f"{wheel.name} is for {system}; repair it with auditwheel")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
        extension = "jaxmp/_jaxmp.abi3.so" if abi == "abi3" else f"jaxmp/_jaxmp.cpython-{python[2:]}-"
        foreign = [
            name
            for name in names
            if not (name.startswith("jaxmp/") and name.endswith((".py", ".typed")))
            and not name.startswith((f"jaxmp-{version}.dist-info/", extension))
        ]
        if foreign:
            raise ReleaseError(f"{wheel.name} holds {', '.join(foreign)}, which no wheel of jaxmp should")
        if sum(name.startswith(extension) for name in names) != 1:
            raise ReleaseError(f"{wheel.name} does not hold one extension {extension}*")
        if (size := wheel.stat().st_size) > LARGEST_WHEEL:
            raise ReleaseError(f"{wheel.name} has {size} bytes; above {LARGEST_WHEEL} a library is linked into it")
        found.append((f"{python}-{abi}", system.split(".")[0]))
        print(f"{wheel.name}: {size} bytes, {len(names)} files")
    for python in PYTHONS if is_complete else ():
        for processor in PROCESSORS:
            if sum(one == python and system.endswith(processor) for one, system in found) != 1:
                raise ReleaseError(f"a release has one wheel {python} for {processor}")


def version_of(root: Path) -> str:
    """The version that pyproject.toml has."""
    return _found(root / "pyproject.toml", PLACES["pyproject.toml"])


def unreleased(root: Path) -> str:
    """The changelog's entries that are in no version yet."""
    _, heading, rest = (root / "CHANGELOG.md").read_text().partition(UNRELEASED)
    if not heading:
        raise ReleaseError('CHANGELOG.md has no heading "## Unreleased"')
    return rest.split("\n## ", 1)[0].strip("\n")


def _found(path: Path, pattern: str) -> str:
    found = re.findall(pattern, path.read_text())
    if len(found) != 1:
        raise ReleaseError(f"{path.name} has {len(found)} lines like {pattern}, instead of one")
    return found[0]


def _substitute(path: Path, pattern: str, value: str) -> None:
    old = _found(path, pattern)
    text = path.read_text()
    line = re.search(pattern, text)[0]
    path.write_text(text.replace(line, line.replace(old, value), 1))


def _order(version: str) -> tuple[int, ...]:
    """Returns a key by which versions sort: a candidate comes before its version."""
    release, _, candidate = version.partition("rc")
    return (*map(int, release.split(".")), not candidate, int(candidate or 0))


if __name__ == "__main__":
    main()
