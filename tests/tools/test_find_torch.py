"""Where CMake finds torch for a libtorch program: the places that libtorch's own page names, and
the one error where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
MODULES = Path(__file__).parents[2] / "cmake"
NO_TORCH = "ModuleNotFoundError: No module named 'torch'"
LIBTORCH = Path(torch.__file__).parent
PROJECT = f"""
cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES NONE)
set(CMAKE_FIND_LIBRARY_PREFIXES lib)
set(CMAKE_FIND_LIBRARY_SUFFIXES .so .dylib)
list(APPEND CMAKE_MODULE_PATH "{MODULES}")
find_package(TorchCpu REQUIRED)
message(STATUS "include ${{TorchCpu_INCLUDE_DIR}}, version ${{TorchCpu_VERSION}}")
"""


def configure(folder, *options, **environment):
    """Returns CMake's result for a program that needs torch, without any torch but the options'."""
    (folder / "CMakeLists.txt").write_text(PROJECT)
    (folder / "bin").mkdir()
    without_torch = folder / "bin" / "python3"
    without_torch.write_text(f'#!/bin/sh\necho "{NO_TORCH}" >&2\nexit 1\n')
    without_torch.chmod(0o755)
    cleared = {k: v for k, v in os.environ.items() if k not in ("CMAKE_PREFIX_PATH", "Torch_ROOT")}
    return subprocess.run(
        [CMAKE, "-S", folder, "-B", folder / "build", *options],
        env=cleared | environment, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "option",
    [
        f"-DCMAKE_PREFIX_PATH={LIBTORCH}",
        f"-DCMAKE_PREFIX_PATH=/nowhere;{torch.utils.cmake_prefix_path}",
        f"-DTorch_DIR={LIBTORCH / 'share/cmake/Torch'}",
        f"-DTorch_ROOT={LIBTORCH}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ],
)
def test_torch_is_found_where_the_user_says(option, tmp_path):
    options = [option]
    if "Python" not in option:  # as find_package(Python) leaves it: another Python decides nothing
        options += ["-DCMAKE_PROJECT_INCLUDE=" + str(tmp_path / "python.cmake")]
        (tmp_path / "python.cmake").write_text(f'set(Python_EXECUTABLE "{tmp_path}/bin/python3")\n')
    done = configure(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    version = torch.__version__.split("+")[0]
    assert f"include {LIBTORCH}/include/, version {version}" in done.stdout


@pytest.mark.parametrize("variable", ["CMAKE_PREFIX_PATH", "Torch_ROOT", "Torch_DIR"])
def test_torch_is_found_by_the_environment(variable, tmp_path):
    done = configure(tmp_path, **{variable: str(LIBTORCH)})
    assert done.returncode == 0, done.stderr
    assert f"include {LIBTORCH}/include" in done.stdout


# Of a toolchain file: libraries and headers are those of another machine's system.
CROSS = ["-DCMAKE_FIND_ROOT_PATH=/nowhere"] + [
    f"-DCMAKE_FIND_ROOT_PATH_MODE_{what}=ONLY" for what in ("LIBRARY", "INCLUDE")
]


def test_a_torch_that_is_named_need_not_be_in_the_target_system(tmp_path):
    done = configure(tmp_path, *CROSS, f"-DTorch_ROOT={LIBTORCH}")
    assert done.returncode == 0, done.stderr
    assert f"include {LIBTORCH}/include" in done.stdout


def test_a_torch_that_python_imports_is_not_the_target_systems(tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {LIBTORCH}\n")
    python.chmod(0o755)
    done = configure(tmp_path, *CROSS, f"-DPython_EXECUTABLE={python}")
    assert done.returncode == 1
    assert f"no include/torch/library.h in {LIBTORCH}" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (
            "-DTorch_ROOT=/nowhere",
            "expected share/cmake/Torch/TorchConfig.cmake of libtorch in Torch_ROOT or Torch_DIR, "
            "found none in /nowhere",
        ),
        (
            "-DPython_EXECUTABLE={folder}/bin/python3",
            f"cannot import torch: {NO_TORCH}. Set Torch_ROOT to libtorch's folder, or "
            "Python_EXECUTABLE to a Python with torch",
        ),
    ],
)
def test_a_missing_torch_is_one_error(option, reason, tmp_path):
    done = configure(tmp_path, option.format(folder=tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("CMake Error") == 1
    assert reason in " ".join(done.stderr.split())
