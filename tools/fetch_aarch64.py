"""Fetch a Python of aarch64 with torch into a folder, to be run under qemu-user.

usage: .venv/bin/python tools/fetch_aarch64.py FOLDER

FOLDER/root   Debian's python3 for arm64 with the libraries that it needs, unpacked, not installed
FOLDER/site   the wheels of torch and of what its import needs, at the versions of this Python

It needs apt-get, dpkg-deb, pip and aarch64-linux-gnu-gcc, and loads 0.5 GB. torch's wheel is the
one for CUDA. Of CUDA's libraries, 2 GB, only those are fetched without which it cannot be loaded.
Empty ones stand for the others: torch calls none of them where it sees no GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

DEBIAN = ["python3-minimal", "libpython3-stdlib", "libstdc++6"]
# Loading torch calls CUDA's run-time, and takes addresses of NVSHMEM's data.
WHEELS = [
    *("torch", "numpy", "typing_extensions", "filelock", "fsspec", "jinja2", "MarkupSafe"),
    *("networkx", "sympy", "mpmath", "nvidia-cuda-runtime", "nvidia-nvshmem-cu13"),
]
# The tags of wheels for glibc 2.17 to 2.34.
PLATFORMS = ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 35))]
# Python otherwise has every function found when torch is loaded, those of the empty libraries too.
LAZY = "import os, sys\n\nsys.setdlopenflags(os.RTLD_LAZY)\n"


def run(*command: str | Path) -> str:
    """Run a command and return its output; end this script where it fails."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(done.stdout)
        sys.exit(f"fetch_aarch64: {command[0]} ended with {done.returncode} (see above)")
    return done.stdout


def fetch_python(root: Path, apt: Path) -> str:
    """Unpack Debian's Python and what it depends on under `root`; return its X.Y."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()  # as of a machine of arm64 where nothing is installed
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "APT::Install-Recommends": "false",
        "Debug::NoLocking": "true",
        "Dir::State": apt,
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
    }
    get = ["apt-get", "-qq", *(word for k, v in options.items() for word in ("-o", f"{k}={v}"))]
    run(*get, "update")
    run(*get, "install", "--download-only", "--yes", *DEBIAN)
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        run("dpkg-deb", "--extract", package, root)
    if not (root / "lib").exists():  # releases after Debian 12 have it in another package
        (root / "lib").symlink_to("usr/lib")
    return os.readlink(root / "usr" / "bin" / "python3").removeprefix("python")


def fetch_wheels(site: Path, python: str) -> None:
    """Install WHEELS for aarch64 in `site`."""
    tags = [word for platform in PLATFORMS for word in ("--platform", platform)]
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-compile", "--only-binary=:all:", "--target", site),
        *("--python-version", python, "--implementation", "cp", *tags),
        *(f"{name}=={version(name).partition('+')[0]}" for name in WHEELS),
    )


def add_empty_libraries(root: Path, site: Path) -> None:
    """Compile an empty library for each that `import torch` loads and that is not there."""
    libraries = site / "torch" / "lib"
    folders = [libraries, *site.glob("nvidia/*/lib"), *root.glob("**/aarch64-linux-gnu")]
    for library in ("libtorch_python.so", "libtorch_cuda.so", "libtorch_cpu.so"):
        headers = run("aarch64-linux-gnu-readelf", "--dynamic", "--wide", libraries / library)
        for name in re.findall(r"\(NEEDED\).*\[(.+)\]", headers):
            if not any((folder / name).exists() for folder in folders):
                empty = ("-shared", "-nostdlib", "-x", "c", "/dev/null", f"-Wl,-soname,{name}")
                run("aarch64-linux-gnu-gcc", *empty, "-o", libraries / name)
    (site / "sitecustomize.py").write_text(LAZY, encoding="utf-8")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for tool in ("apt-get", "dpkg-deb", "aarch64-linux-gnu-gcc"):
        if shutil.which(tool) is None:
            sys.exit(f"fetch_aarch64: expected {tool} on the path")
    folder = Path(sys.argv[1]).resolve()
    done = folder / "done"
    versions = [version(name) for name in WHEELS]
    wanted = f"{versions}\n{Path(__file__).read_text(encoding='utf-8')}"
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    python = fetch_python(folder / "root", folder / "apt")
    fetch_wheels(folder / "site", python)
    add_empty_libraries(folder / "root", folder / "site")
    done.write_text(wanted, encoding="utf-8")
    print(f"fetch_aarch64: Python {python} and torch {version('torch')} in {folder}")


if __name__ == "__main__":
    main()
