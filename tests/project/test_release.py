"""The contents of a release: one version in every file, its notes, and wheels that contain jaxmp only.

Without these tests, a tag could publish another version, a release could lack a processor, and a wheel could bring a
second OpenBLAS or NCCL into the process. `.ci/wheels` builds and tries real wheels; these are made up.
"""

import datetime
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import release
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "pyproject.toml": '[project]\nname = "jaxmp"\nversion = "0.2.0"\n[tool.other]\nminimum-version = "1.0.0"\n',
    "CITATION.cff": "cff-version: 1.2.0\nversion: 0.2.0\ndate-released: 2026-11-22\n",
    "packaging/conda/recipe.yaml": 'context:\n  version: "0.2.0"\n',
    "packaging/easybuild/jaxmp-foss-2026.1.eb": "version = '0.2.0'\n",
    "packaging/spack/package.py": '    version("0.2.0")\n',
    "CHANGELOG.md": """# Changelog

Newest first.

## Unreleased

### Added

- A new thing.

## 0.2.0 (2026-11-22)

The second release.

### Fixed

- An old thing.

## 0.1.0 (2026-10-01)

- The first release.
""",
}
SAYS_NOTHING = ("CHANGELOG.md", "The second release.\n\n### Fixed\n\n- An old thing.\n\n", "")
RELEASED = ("CHANGELOG.md", "### Added\n\n- A new thing.\n\n", "")
TOML = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())


@pytest.fixture
def tree(tmp_path):
    """Returns `tree((file, old, new), ...)`, which writes a project's files with these changes into a folder."""

    def write(*changes):
        for name, text in FILES.items():
            for file, old, new in changes:
                if file == name:
                    assert old in text
                    text = text.replace(old, new)
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def refusal(*arguments, root):
    """Returns the single line that ends a command."""
    with pytest.raises(SystemExit) as ended:
        release.main([str(argument) for argument in arguments], root)
    message = str(ended.value)
    assert message.startswith("release: ")
    assert "\n" not in message
    return message.removeprefix("release: ")


# The version.


def test_the_repository_has_one_version_and_its_notes(tree, capsys):
    assert release.check(ROOT) == TOML["project"]["version"]
    assert len(release.notes(ROOT, release.version_of(ROOT)).splitlines()) > 5
    release.main(["check"], tree())  # without a tag entries may be unreleased
    release.main(["check", "--tag", "v0.2.0"], tree(RELEASED))
    assert capsys.readouterr().out == "0.2.0\n0.2.0\n"
    release.main(["notes"], tree())
    assert capsys.readouterr().out == "The second release.\n\n### Fixed\n\n- An old thing.\n"
    assert release.notes(tree(), "0.1.0") == "- The first release.\n"
    with pytest.raises(release.ReleaseError, match=r'no heading "## 0\.4\.0'):
        release.notes(tree(), "0.4.0")
    command = [sys.executable, ROOT / ".ci/release.py", "check", "--tag", "v0.0.1"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)


@pytest.mark.parametrize(
    ("tag", "changes", "said"),
    [
        ("v0.3.0", [RELEASED], "the tag is v0.3.0, but pyproject.toml has version 0.2.0; its tag is v0.2.0"),
        ("0.2.0", [RELEASED], "the tag is 0.2.0, but pyproject.toml"),
        ("v0.2.0rc1", [RELEASED], "the tag is v0.2.0rc1, but pyproject.toml"),
        ("v0.2.0", [], 'CHANGELOG.md has entries under "Unreleased", which v0.2.0 would release'),
        ("", [("CITATION.cff", "0.2.0", "0.1.0")], "CITATION.cff has version 0.1.0, but pyproject.toml has 0.2.0"),
        (
            "",
            [("packaging/spack/package.py", "0.2.0", "0.1.0")],
            "packaging/spack/package.py has version 0.1.0, but py",
        ),
        ("", [("CITATION.cff", "11-22", "11-21")], "CITATION.cff dates 0.2.0 2026-11-21, but CHANGELOG.md dates it 2"),
        ("", [("CITATION.cff", "\nversion:", "\nedition:")], "CITATION.cff has 0 lines like"),
        ("", [(name, "0.2.0", "0.3.0") for name in release.PLACES], "the newest version of CHANG"),
        ("", [("pyproject.toml", '"0.2.0"', '"0.2"')], "pyproject.toml has 0 lines like"),
        ("", [("CHANGELOG.md", "## 0.2.0 (2026-11-22)", "## 0.2.0")], "the newest version of CHANGELOG.md is 0.1.0"),
        ("", [SAYS_NOTHING], "CHANGELOG.md says nothing of 0.2.0"),
        ("v0.2.0", [("CHANGELOG.md", "## Unreleased", "## Next")], 'CHANGELOG.md has no heading "## Unreleased"'),
    ],
)
def test_what_does_not_agree_is_refused(tree, tag, changes, said):
    assert refusal("check", "--tag", tag, root=tree(*changes)).startswith(said)


@pytest.mark.parametrize("version", ["0.3.0", "0.3.0rc1", "1.0.0", "0.2.10"])
def test_a_prepared_version_can_be_tagged(tree, version):
    root = tree()
    release.prepare(root, version, datetime.date(2027, 1, 31))
    assert release.check(root, f"v{version}") == version
    assert release.notes(root, version) == "### Added\n\n- A new thing.\n"
    changelog = (root / "CHANGELOG.md").read_text()
    assert f"Newest first.\n\n## Unreleased\n\n## {version} (2027-01-31)\n\n### Added\n" in changelog
    assert changelog.endswith(FILES["CHANGELOG.md"].partition("- A new thing.\n")[2])
    assert 'minimum-version = "1.0.0"' in (root / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("version", "changes", "said"),
    [
        ("0.2.0", [], "0.2.0 does not come after 0.2.0"),
        ("0.2.0rc1", [], "0.2.0rc1 does not come after 0.2.0"),
        ("0.1.9", [], "0.1.9 does not come after 0.2.0"),
        ("v0.3.0", [], "'v0.3.0' is no version"),
        ("0.3", [], "'0.3' is no version"),
        ("0.3.0", [RELEASED], 'CHANGELOG.md has nothing under "Unreleased"'),
    ],
)
def test_a_version_that_cannot_be_next_changes_no_file(tree, version, changes, said):
    root = tree(*changes)
    before = {name: (root / name).read_text() for name in FILES}
    assert refusal("prepare", version, root=root).startswith(said)
    assert before == {name: (root / name).read_text() for name in FILES}


@pytest.mark.parametrize(("version", "is_next"), [("0.3.0rc1", False), ("0.3.0rc10", True), ("0.3.0", True)])
def test_a_candidate_precedes_its_version(tree, version, is_next):
    root = tree(*((name, "0.2.0", "0.3.0rc2") for name in ("pyproject.toml", "CITATION.cff")))
    if is_next:
        release.main(["prepare", version], root)
        assert release.check(root) == version
    else:
        assert "does not come after 0.3.0rc2" in refusal("prepare", version, root=root)


@pytest.mark.parametrize("version", ["0.2.0", "0.3.0rc1"])
def test_cmake_reads_the_whole_version(tree, version):
    root = tree(("pyproject.toml", "0.2.0", version))
    head, project, _ = (ROOT / "CMakeLists.txt").read_text().partition("project(jaxmp VERSION ${release}")
    assert project
    (root / "read.cmake").write_text(head + 'message("${JAXMP_VERSION} ${release}")')
    cmake = Path(sys.executable).parent / "cmake"
    ran = subprocess.run([cmake, "-P", "read.cmake"], cwd=root, capture_output=True, text=True, check=True)
    assert ran.stderr.split() == [version, version.partition("rc")[0]]


# The wheels.

X86 = "manylinux_2_27_x86_64.manylinux_2_28_x86_64"
ARM = "manylinux_2_27_aarch64.manylinux_2_28_aarch64"


def wheel(folder, tags="cp312-abi3-manylinux_2_28_x86_64", extension=None, more=(), size=100, version="0.2.0"):
    """Writes a file with a wheel's name and contents; returns its path."""
    own = "abi3" if "abi3" in tags else f"cpython-311-{tags.rpartition('_')[2]}-linux-gnu"
    files = ["jaxmp/__init__.py", "jaxmp/py.typed", f"jaxmp-{version}.dist-info/METADATA", *more]
    path = folder / f"jaxmp-{version}-{tags}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in files:
            archive.writestr(name, "")
        archive.writestr(extension or f"jaxmp/_jaxmp.{own}.so", bytes(size))
    return path


def all_wheels(folder):
    return [wheel(folder, f"{python}-{system}") for python in release.PYTHONS for system in (X86, ARM)]


def test_right_wheels_pass_and_are_listed(tree, capsys):
    root = tree()
    release.main(["contents", "--complete", *map(str, all_wheels(root))], root)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert all(re.fullmatch(r"jaxmp-0\.2\.0-.*\.whl: \d+ bytes, 4 files", line) for line in printed)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"version": "0.3.0"}, "is not of version 0.2.0"),
        ({"tags": "cp312-abi3-linux_x86_64"}, "is for linux_x86_64; repair it with auditwheel"),
        ({"more": ["jaxmp.libs/libnccl-1234.so.2"]}, "holds jaxmp.libs/libnccl-1234.so.2"),
        ({"more": ["jaxmp/libopenblas.so"]}, "holds jaxmp/libopenblas.so"),
        ({"more": ["tests/conftest.py"]}, "holds tests/conftest.py"),
        ({"extension": "jaxmp/_jaxmp.cpython-312-x86_64-linux-gnu.so"}, "holds jaxmp/_jaxmp.cpython-312"),
        ({"extension": "jaxmp/more.py"}, "does not hold one extension"),
        ({"size": 6_000_000}, "above 5000000 a library is linked into it"),
    ],
)
def test_wrong_wheels_are_refused(tree, options, said):
    root = tree()
    assert said in refusal("contents", wheel(root, **options), root=root)


@pytest.mark.parametrize("missing", range(4))
def test_a_release_lacks_no_wheel(tree, missing):
    root = tree()
    wheels = all_wheels(root)
    lacking = wheels.pop(missing)
    said = refusal("contents", "--complete", *wheels, root=root)
    python, processor = re.search(r"one wheel (\S+) for (\S+)$", said).groups()
    assert python in lacking.name
    assert lacking.name.endswith(f"{processor}.whl")


# The workflow, and the parts that it shares with `.ci/wheels`.


def test_only_a_tag_publishes():
    """A pull request's jobs may not write anything. Each that may has the tag's condition, or needs a job with it."""
    jobs = WORKFLOW["jobs"]
    assert WORKFLOW["permissions"] == {"contents": "read"}
    writers = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}
    assert writers == {"pypi", "github"}
    assert jobs["pypi"]["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
    assert "if" not in jobs["github"]
    needs, name = [], "github"
    while name := jobs[name].get("needs"):
        needs.append(name)
    assert needs == ["pypi", "packages", "wheels", "sdist"]


def test_every_supported_python_is_built_for_or_tried():
    settings = TOML["tool"]["cibuildwheel"]
    found = [re.fullmatch(r"cp3(\d+)-\*", entry)[1] for entry in settings["build"]]
    classified = re.findall(r"Python :: 3\.(\d+)", " ".join(TOML["project"]["classifiers"]))
    assert found == classified
    assert re.search(r'STABLE_ABI="(.*)"', (ROOT / ".ci/wheels").read_text())[1].split() == [
        f"3.{minor}" for minor in classified[1:]
    ]
    assert f"cp3{classified[0]}-cp3{classified[0]}" == release.PYTHONS[0]
    assert TOML["tool"]["scikit-build"]["wheel"]["py-api"] == release.PYTHONS[1].partition("-")[0]
    assert {settings[f"manylinux-{processor}-image"] for processor in release.PROCESSORS} == {"manylinux_2_28"}
    assert any("try_wheel.py {wheel}" in command for command in settings["test-command"])
