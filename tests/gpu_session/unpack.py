"""Install the parts of a bundle on a GPU machine, without a network.

    python part1/unpack.py [part2 ...] --site /tmp/jaxmp-gpu

Parts may come one at a time, in any order: the call that brings the last of them installs everything.
"""

import argparse
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def missing(store: Path, contents: dict[str, str]) -> list[str]:
    """The files of the bundle that are not here yet, or not whole."""
    return [
        name
        for name, digest in contents.items()
        if not (store / name).is_file() or hashlib.sha256((store / name).read_bytes()).hexdigest() != digest
    ]


def install(store: Path, site: Path) -> None:
    wheels = [str(wheel) for wheel in sorted(store.glob("*.whl"))]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--no-cache-dir", "--upgrade", "--target", str(site), *wheels], check=True)
    # Where NCCL's wheel has its library, by which jaxmp finds it.
    for packed, to in (("libnccl.so.2.xz", "nvidia/nccl/lib/libnccl.so.2"), ("conformance.xz", "bin/conformance")):
        path = site / to
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.decompress((store / packed).read_bytes()))
        path.chmod(0o755)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", type=Path, help="folders; this file's own is always one")
    parser.add_argument("--site", type=Path, required=True, help="the folder to install into")
    arguments = parser.parse_args()
    store = arguments.site / "bundle"
    store.mkdir(parents=True, exist_ok=True)
    contents = json.loads((HERE / "contents.json").read_text())
    for part in {HERE, *(part.resolve() for part in arguments.parts)}:
        for file in part.iterdir():
            if file.name in contents:
                shutil.copy(file, store)
    if left := missing(store, contents):
        print(f"still to come: {', '.join(left)}")
        return 1
    install(store, arguments.site)
    print(f"installed in {arguments.site}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
