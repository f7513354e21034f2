"""The line that `make test` prints first: the CPU of any Linux, and of a system without /proc."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
INTEL = """processor\t: 0
cpu family\t: 6
model\t\t: 143
model name\t: A Xeon
stepping\t: 8
flags\t\t: fpu avx2 avx512f amx_bf16 amx_tile

processor\t: 1
model name\t: another
"""
ARM = """processor : 0
Features  : fp asimd sve
CPU implementer : 0x41
"""


@pytest.mark.parametrize(
    ("cpuinfo", "machine", "line"),
    [
        (
            INTEL,
            "x86_64",
            "cpu: A Xeon (x86_64, cpu family 6, model 143, stepping 8, 2 CPUs): "
            "avx2 avx512f amx_bf16",
        ),
        (ARM, "aarch64", "cpu: unnamed CPU (aarch64, 2 CPUs): asimd sve"),
        ("", "arm64", "cpu: unnamed CPU (arm64, 2 CPUs): no extension found"),
    ],
)
def test_a_cpu_is_described_in_one_line(cpuinfo, machine, line, monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    from print_cpu import describe_cpu

    assert describe_cpu(cpuinfo, machine, 2) == line


def test_this_machines_line():
    command = [sys.executable, TOOLS / "print_cpu.py"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("cpu: ")
