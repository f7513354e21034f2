"""The benchmarks start: each one imports, and the one for a CPU prints its table."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
IMPORT_ALL = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
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


def test_one_rank_alone_trains_under_fsdp2():
    """Checks the process group without other ranks, which gpu_fsdp.py --alone has too."""
    title, row = output_of(BENCHMARKS / "fsdp_host.py", "--recipes", "nvfp4").splitlines()
    assert title.split()[0] == "recipe"
    name, *times = row.split()
    assert name == "nvfp4"
    assert 0 < float(times[0]) < float(times[2])  # hooks, of a step
