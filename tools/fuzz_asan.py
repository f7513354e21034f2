"""Runs the op fuzzer (tests/support/fuzz_ops.py) on the libraries of the preset asan-torch.

The package is beside them: links to the Python sources, and the sanitized lib/. Python itself is
not instrumented, so the sanitizer's run-time is preloaded. Leak detection is off: an interpreter
leaves memory allocated on purpose.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from link_tree import link_package

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "build" / "asan-torch" / "python" / "minifloat"
# A failed allocation is null, as without the sanitizer; 4 GB is more than a call needs.
OPTIONS = "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096"


def runtime(name: str) -> str:
    """Returns the path of the compiler's run-time library."""
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--calls", type=int, default=2500, help="of each seed")
    options = parser.parse_args()
    if not list((PACKAGE / "lib").glob("libminifloat_torch_*.so")):
        sys.exit(f"fuzz_asan: expected the libraries of the preset asan-torch in {PACKAGE / 'lib'}")
    link_package(PACKAGE)
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",
        "ASAN_OPTIONS": OPTIONS,
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(PACKAGE.parent),
    }
    command = [sys.executable, "-m", "tests.support.fuzz_ops", "--megabytes", "0"]
    for seed in range(options.seeds):
        numbers = ["--seed", str(seed), "--calls", str(options.calls)]
        done = subprocess.run([*command, *numbers], env=environment, cwd=ROOT)
        if done.returncode != 0:
            print(f"fuzz_asan: seed {seed} ended with {done.returncode}", file=sys.stderr)
            return 1
        print(f"fuzz_asan: {options.calls} calls of seed {seed}, no fault", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
