"""The benchmarks and the tests of a GPU start on a machine without one.

Each file imports; fsdp_host.py prints its table; a rank can be alone.
"""

import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
BENCHMARKS = TREE / "benchmarks"
IMPORT_ALL = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
"""
ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
import _ranks, torch
import torch.distributed as dist
_ranks.alone(4)
part, whole, own = torch.arange(3.0), torch.empty(12), torch.empty(3)
dist.all_gather_into_tensor(whole, part)
assert torch.equal(whole, part.repeat(4))
dist.reduce_scatter_tensor(own, torch.arange(12.0))
assert torch.equal(own, part)
"""


def output_of(*arguments):
    command = [sys.executable, *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_every_benchmark_imports():
    names = [path.stem for path in sorted(BENCHMARKS.glob("*.py"))]
    assert "gpu_fsdp" in names
    output_of("-c", IMPORT_ALL, BENCHMARKS, *names)


def test_every_test_of_a_gpu_is_collected():
    options = ("-q", "--collect-only", "--device", "cpu", "-p", "no:cacheprovider")
    names = output_of("-m", "pytest", *options, TREE / "tests/gpu")
    for path in (TREE / "tests/gpu").glob("test_*.py"):
        assert f"/{path.name}::" in names


@pytest.mark.slow
def test_fsdp_host_prints_its_table():
    title, row = output_of(BENCHMARKS / "fsdp_host.py", "--recipes", "nvfp4").splitlines()
    names = [name.rstrip(",") for name in title.split() if name != "ms"]
    found = dict(zip(names, row.split(), strict=True))
    assert found["recipe"] == "nvfp4"
    weights = 8 * 7
    python, native, step = (float(found[name]) for name in ("python", "native", "step"))
    assert 0 < weights * (python + native) < 1e3 * step  # microseconds; all of a step


def test_collectives_of_a_rank_alone():
    output_of("-c", ALONE, BENCHMARKS)
