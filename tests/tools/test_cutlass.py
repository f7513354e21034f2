"""A build with CUDA has CUTLASS's headers, or ends and says how to install them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scikit_build_core.build import get_requires_for_build_wheel

ROOT = Path(__file__).parents[2]
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
PROJECT = f"""
cmake_minimum_required(VERSION 3.25)
project(build LANGUAGES NONE)
set(MINIFLOAT_CUDA OFF)
include("{ROOT}/cmake/MinifloatCuda.cmake")
set(CMAKE_CUDA_ARCHITECTURES 90a-real)
minifloat_cutlass(minifloat)
"""
HEADERS = re.findall(r'^cuda = \["(.*)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A folder that alone is on the path, and an environment that names no compiler of CUDA."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDACXX", "CUDA_PATH", "CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_pip_fetches_the_headers_beside_nvcc_alone(bare, monkeypatch):
    assert len(HEADERS) == 1
    assert not set(HEADERS) & set(get_requires_for_build_wheel())
    (bare / "nvcc").touch(mode=0o755)
    assert set(HEADERS) <= set(get_requires_for_build_wheel())
    monkeypatch.setenv("CMAKE_ARGS", "-DMINIFLOAT_CUDA=OFF")
    assert not set(HEADERS) & set(get_requires_for_build_wheel())


@pytest.mark.parametrize("variable", ["CUDACXX", "CUDA_PATH"])
def test_nvcc_may_be_named_by_the_environment(variable, bare, monkeypatch):
    (bare / "cuda" / "bin").mkdir(parents=True)
    (bare / "cuda" / "bin" / "nvcc").touch(mode=0o755)
    monkeypatch.setenv(
        variable, str(bare / ("cuda" if variable == "CUDA_PATH" else "cuda/bin/nvcc"))
    )
    assert set(HEADERS) <= set(get_requires_for_build_wheel())


def configure(folder, *options):
    (folder / "CMakeLists.txt").write_text(PROJECT)
    command = [CMAKE, "-S", folder, "-B", folder / "build", *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_build_without_the_headers_ends_with_the_command_that_helps(tmp_path):
    done = configure(tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("CMake Error") == 1
    text = " ".join(done.stderr.split())
    assert "expected CUTLASS's headers" in text
    assert "pip install --no-deps --group cuda" in text


def test_the_kernels_are_left_out_on_request(tmp_path):
    done = configure(tmp_path, "-DMINIFLOAT_CUTLASS_INCLUDE=OFF")
    assert done.returncode == 0, done.stderr
    assert "torch's are used" in done.stdout
