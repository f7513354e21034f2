"""Unpack GoogleTest's sources into a folder, from the PyPI wheel that contains them.

usage: fetch_gtest.py FOLDER

The wheel `ros-gtest-vendor` is GoogleTest 1.15.0, packed for another project. Only include/ and
src/ of its data folder are unpacked. Its tags name Python 3.11 on Linux, but sources fit any
machine, so pip gets the tags explicitly.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "ros-gtest-vendor==1.15.1"
DATA_FOLDER = "/data/src/gtest_vendor/"


def download_wheel(folder: Path) -> Path:
    """Download the wheel into `folder` and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--python-version", "311"]
    command += ["--implementation", "cp", "--platform", "manylinux_2_28_x86_64"]
    command += ["--dest", str(folder), REQUIREMENT]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(
            f"fetch_gtest: expected {REQUIREMENT} from the package index, pip failed (see above).\n"
            "  Install GoogleTest instead (Debian and Ubuntu: apt install libgtest-dev)."
        )
    return next(folder.glob("*.whl"))


def unpack_sources(wheel: Path, destination: Path) -> int:
    """Write include/ and src/ of the wheel's data folder under `destination`; return the count."""
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            _, found, relative = name.partition(DATA_FOLDER)
            if not found or not relative.startswith(("include/", "src/")) or name.endswith("/"):
                continue
            target = destination / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
            count += 1
    return count


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    destination = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        count = unpack_sources(download_wheel(Path(folder)), destination)
    if not (destination / "src" / "gtest-all.cc").is_file():
        sys.exit(f"fetch_gtest: expected src/gtest-all.cc in {REQUIREMENT}, it is not there")
    print(f"fetch_gtest: {count} files in {destination}")


if __name__ == "__main__":
    main()
