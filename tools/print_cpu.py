"""Print one line that names this machine's CPU and the vector extensions that tests depend on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

# The extensions by which matrix libraries choose kernels, and with them the order of sums.
EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
NAMES = ("model name", "Model", "cpu model", "cpu", "Hardware", "uarch")  # x86, then others
NUMBERS = ("cpu family", "model", "stepping")


def read_fields(text: str) -> dict[str, str]:
    """Return the first value of each field of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def describe_cpu(cpuinfo: str, machine: str, count: int) -> str:
    """Return one line: the CPU's name, its family where there is one, CPUs, extensions."""
    fields = read_fields(cpuinfo)
    name = next((fields[key] for key in NAMES if fields.get(key)), "unnamed CPU")
    numbers = [f"{key} {fields[key]}" for key in NUMBERS if key in fields]
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    found = [flag for flag in EXTENSIONS if flag in flags]
    about = ", ".join([machine, *numbers, f"{count} CPUs"])
    return f"cpu: {name} ({about}): {' '.join(found) or 'no extension found'}"


def main() -> None:
    path = Path("/proc/cpuinfo")
    text = path.read_text(errors="replace") if path.exists() else ""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux: the CPUs that this process may use
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    print(describe_cpu(text, platform.machine(), count), flush=True)


if __name__ == "__main__":
    main()
