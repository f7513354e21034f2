"""The package that pip installed, its version and the C++ examples with it: run where pip did.

    make test-torchtitan-0.3

ctest builds them with the package that `cmake --install` leaves.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import minifloat
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(1800)  # a minute on two idle cores, minutes beside other jobs


# torch's libraries find CUDA's beside themselves. Here these are in the environment that the one of
# torchtitan 0.3 extends, where neither the linker nor a program looks.
FOLDERS = [str(folder) for path in sys.path for folder in Path(path).glob("nvidia/*/lib")]
ENVIRONMENT = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(FOLDERS)}


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Returns the folder of the examples, built."""
    folder = tmp_path_factory.mktemp("examples")
    prefix = run(sys.executable, "-m", "minifloat", "--cmake-prefix", cwd=folder).strip()
    assert Path(prefix) == Path(minifloat.__file__).parent
    assert not Path(prefix).is_relative_to(ROOT / "python")
    run("cmake", "-S", ROOT / "examples", "-B", folder, "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_PREFIX_PATH={prefix}", cwd=folder)  # fmt: skip
    run("cmake", "--build", folder, cwd=folder)
    return folder


def test_the_version_is_that_of_the_metadata():
    assert minifloat.__version__ == importlib.metadata.version("minifloat")


@pytest.mark.parametrize("example", ["cast", "cast_tensor", "experts", "layer", "train"])
def test_an_example_runs(example, programs):
    run(programs / example, cwd=programs)
