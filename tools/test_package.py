"""Installs a package of dist/ where nothing else is, and runs what a user runs first.

    make test-wheel [PYTHONS="3.10 3.12"]    the wheel, for each Python with each torch it is for
    make test-sdist                          the sources, compiled without nvcc in MOST_SECONDS

Each environment is empty but for what the wheel asks for, or what the sources' build needs. There
the README's first example and the op fuzzer run, with a PATH that has no compiler. A Python that is
not on the path, or for which a torch was not published, is named and left out; at least one
environment must be there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "test-package"
UV = Path(sys.executable).parent / "uv"
BUILD_TOOLS = ("scikit-build-core", "cmake", "ninja", "torch==2.11.*", "numpy")
MOST_SECONDS = 240  # to compile the source distribution on two cores
# What the README's example takes as given: a model that returns its loss, and batches.
GIVEN = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
        self.head = torch.nn.Linear(64, 8)

    def forward(self, x):
        x = x.to(self.up.weight.dtype)
        return self.head(self.down(self.up(x).relu())).square().mean()


torch.manual_seed(0)
model, batches = Model(), torch.randn(20, 32, 64)
"""
CHECKS = """
assert loss < 0.5 * model_loss_before, (loss, model_loss_before)
assert type(model.up) is mf.Linear, type(model.up)
print("trained in", mf.engines("fp8_tensorwise")[0].does)
"""


def uv(*arguments: str | Path) -> str:
    """Runs uv; returns why no versions of packages fit, "" where it succeeded."""
    cache = {"UV_CACHE_DIR": str(WORK / "cache"), "UV_LINK_MODE": "hardlink"}
    command = [str(part) for part in (UV, *arguments, "--quiet")]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **cache})
    if done.returncode != 0 and "No solution found" not in done.stderr:
        sys.exit(f"test_package: {' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stderr if done.returncode != 0 else ""


def new_environment(folder: Path, python: str) -> Path:
    """Returns the Python of a new, empty environment."""
    shutil.rmtree(folder, ignore_errors=True)
    uv("venv", "--python", python, folder)
    return folder / "bin" / "python"


def has_python(python: str) -> bool:
    command = [f"python{python}", "-c", ""]
    return bool(
        shutil.which(command[0]) and subprocess.run(command, capture_output=True).returncode == 0
    )


def first_example() -> str:
    """Returns the README's first block of Python as a script that trains Model."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert found is not None
    before = "model_loss_before = model(batches[0]).item()\n"
    return GIVEN + before + found[1] + CHECKS


def check(python: Path, calls: int) -> None:
    """Runs the example and the fuzzer, without a compiler and away from the sources."""
    alone = {"PATH": str(python.parent), "HOME": str(WORK), "PYTHONSAFEPATH": "1"}
    alone |= {"TORCHDYNAMO_DISABLE": "1"}  # Inductor needs a compiler
    script = WORK / "example.py"
    script.write_text(first_example(), encoding="utf-8")
    subprocess.run([python, script], check=True, env=alone, cwd=WORK)
    fuzz = [str(python), "-m", "tests.support.fuzz_ops", "--seed", "1", "--calls", str(calls)]
    subprocess.run(fuzz, check=True, env={**alone, "PYTHONPATH": str(ROOT)}, cwd=WORK)
    print(f"{calls} hostile calls, no fault\n", flush=True)


def test_wheel(wheel: Path, pythons: list[str], calls: int) -> int:
    names = zipfile.ZipFile(wheel).namelist()
    torches = [found[1] for name in names if (found := re.search(r"_torch_(.+)\.so$", name))]
    count = 0
    for python in pythons:
        if not has_python(python):
            print(f"test_package: python{python} is not on the path: left out", flush=True)
            continue
        for torch in torches:
            environment = new_environment(WORK / f"{python}-{torch}", python)
            install = ("pip", "install", "--python", environment, f"torch=={torch}.*")
            if uv(*install, "--no-deps", "--dry-run"):
                print(f"test_package: no torch {torch} for Python {python}: left out", flush=True)
                continue
            if why := uv(*install, wheel):
                sys.exit(f"test_package: Python {python}, torch {torch}: {why}")
            print(f"Python {python}, torch {torch}:", flush=True)
            check(environment, calls)
            shutil.rmtree(environment.parents[1])
            count += 1
    return count


def test_sdist(sdist: Path, calls: int) -> int:
    environment = new_environment(WORK / "sdist", f"{sys.version_info[0]}.{sys.version_info[1]}")
    if why := uv("pip", "install", "--python", environment, "pip", *BUILD_TOOLS):
        sys.exit(f"test_package: {why}")
    folders = [str(environment.parent)]  # of the path: those with a compiler, and none with nvcc
    folders += [p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "nvcc").exists()]
    variables = {**os.environ, "PATH": os.pathsep.join(folders), "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
    for name in ("CUDACXX", "CUDA_PATH", "CUDA_HOME"):
        variables.pop(name, None)
    variables["CCACHE_DISABLE"] = "1"
    pip = [str(environment), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    start = time.monotonic()
    subprocess.run([*pip, str(sdist)], check=True, env=variables, cwd=WORK)
    seconds = time.monotonic() - start
    subprocess.run([str(environment), "-m", "pip", "check"], check=True)
    print(f"test_package: {sdist.name} compiled and installed in {seconds:.0f} s", flush=True)
    check(environment, calls)
    if seconds > MOST_SECONDS:
        sys.exit(f"test_package: expected at most {MOST_SECONDS} s, took {seconds:.0f} s")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--pythons", default="3.10 3.11 3.12 3.13", help="%(default)s")
    parser.add_argument("--calls", type=int, default=1000, help="of the fuzzer (%(default)s)")
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    package = arguments.package.resolve()
    if package.suffix == ".whl":
        passed = test_wheel(package, arguments.pythons.split(), arguments.calls)
    else:
        passed = test_sdist(package, arguments.calls)
    if not passed:
        sys.exit(f"test_package: expected one of Python {arguments.pythons}, found none")
    print(f"test_package: {package.name} works in {passed} environments")
    return 0


if __name__ == "__main__":
    sys.exit(main())
