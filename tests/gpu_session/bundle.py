"""Collect what a GPU machine without a network lacks, in parts that are small enough to be carried (`make gpu-bundle`).

    python tests/gpu_session/bundle.py --conformance build/cpp/conformance --out build/gpu-bundle

A wheel of jaxmp for CPython 3.12 and later, the conformance suite, and from PyPI cuBLASMp, NCCL and scipy-openblas32.
NCCL's library holds code for nine architectures, of which the machine has one: the others' is blanked, and what is left
packs to a sixth. Each part comes with `unpack.py`, which needs nothing else.
"""

import argparse
import hashlib
import json
import lzma
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# The versions that jaxmp's extra takes (pyproject.toml); NCCL's is the one whose image is known to shrink.
WHEELS = ("nvidia-cublasmp-cu13==0.10.*", "scipy-openblas32")
NCCL = "nvidia-nccl-cu13==2.30.7"
PART_BYTES = 58 * 2**20

# A fat binary: a container (magic, version, bytes of header, bytes of the entries), then entries, each with a header
# (kind, version, bytes of header, bytes of code) in which the architecture stands at byte 28.
_CONTAINER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
_MAGIC, _MACHINE_CODE, _ARCHITECTURE_AT = 0xBA55ED50, 2, 28


def keep_architecture(library: bytes, architecture: int) -> bytes:
    """The library with the code for other architectures, and all PTX, blanked. Nothing moves, so it loads as before."""
    image = bytearray(library)
    magic, kept, at = struct.pack("<I", _MAGIC), 0, -1
    while (at := image.find(magic, at + 1)) >= 0:
        _, version, header, size = _CONTAINER.unpack_from(image, at)
        if (version, header) != (1, _CONTAINER.size) or at + header + size > len(image):
            continue  # these four bytes happen to stand there
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, header, size = _ENTRY.unpack_from(image, entry)
            (found,) = struct.unpack_from("<I", image, entry + _ARCHITECTURE_AT)
            if (kind, found) == (_MACHINE_CODE, architecture):
                kept += size
            else:
                image[entry + header : entry + header + size] = bytes(size)
            entry += header + size
    if not kept:
        sys.exit(f"gpu-bundle: the library has no machine code for architecture {architecture}")
    return bytes(image)


def download(requirements, into: Path, python: str) -> list[Path]:
    """Wheels for CPython `python`, without what they depend on."""
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (28, 27, 24, 18, 17)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={python}", *platforms, "--platform=manylinux2014_x86_64", "--platform=any"]
    subprocess.run([*command, "-d", str(into), *requirements], check=True)
    return sorted(into.glob("*.whl"))


def packed(data: bytes, to: Path) -> Path:
    to.write_bytes(lzma.compress(data, preset=6))
    return to


def collect(conformance: Path, architecture: int, python: str, into: Path) -> list[Path]:
    """Everything, as files of its own."""
    wheels, nccl = into / "wheels", into / "nccl"
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)],
        check=True,
    )
    (ours,) = wheels.glob("jaxmp-*.whl")
    if "-abi3-" not in ours.name:
        sys.exit(f"gpu-bundle: {ours.name} runs on one Python; build with CPython 3.12 or later")
    download(WHEELS, wheels, python)
    (nccl_wheel,) = download([NCCL], nccl, python)
    with zipfile.ZipFile(nccl_wheel) as wheel:
        library = wheel.read("nvidia/nccl/lib/libnccl.so.2")
    return [
        *sorted(wheels.glob("*.whl")),
        packed(keep_architecture(library, architecture), into / "libnccl.so.2.xz"),
        packed(conformance.read_bytes(), into / "conformance.xz"),
    ]


def into_parts(files: list[Path], limit: int) -> list[list[Path]]:
    """The largest first, each into the first part that has room."""
    parts: list[list[Path]] = []
    for file in sorted(files, key=lambda file: -file.stat().st_size):
        if file.stat().st_size > limit:
            sys.exit(f"gpu-bundle: {file.name} has {file.stat().st_size} bytes, more than a part may have")
        room = (part for part in parts if sum(x.stat().st_size for x in (*part, file)) <= limit)
        part = next(room, None)
        if part is None:
            parts.append([file])
        else:
            part.append(file)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conformance", type=Path, required=True, help="the executable, which CMake builds")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bundle")
    parser.add_argument("--architecture", type=int, default=90, help="the machine's, 90 for an H100 or H200")
    parser.add_argument("--python", default="3.12", help="the machine's")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        files = collect(arguments.conformance, arguments.architecture, arguments.python, Path(folder))
        parts = into_parts(files, PART_BYTES)
        digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        for number, part in enumerate(parts, 1):
            to = arguments.out / f"part{number}"
            to.mkdir(parents=True)
            for file in part:
                shutil.move(file, to / file.name)
            shutil.copy(HERE / "unpack.py", to)
            (to / "contents.json").write_text(json.dumps(digests, indent=1) + "\n")
            print(f"{to}: {sum(x.stat().st_size for x in to.iterdir()) / 2**20:.1f} MiB")
            for file in sorted(to.iterdir()):
                print(f"  {file.stat().st_size:>10} {file.name}")


if __name__ == "__main__":
    main()
