"""Runs the torch layer on aarch64 under qemu-user: its bytes are this machine's.

tests/support/print_digests.py casts and runs layers on this machine and under the emulator. Hostile
calls of every op (tests/support/fuzz_ops.py) follow under the emulator alone. The libraries are
those of the presets default and aarch64-torch, Python and torch those of fetch_aarch64.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from link_tree import link_package

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = ROOT / "build" / "aarch64-system"
PACKAGE = ROOT / "build" / "aarch64-torch" / "python" / "minifloat"
MEMORY = 6 << 30  # bytes that the emulator may take: hostile calls ask for all there is
SECONDS = 600  # for one hostile call


def python_of_aarch64() -> list[str]:
    """Returns the command that starts it, in bounded memory."""
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        sys.exit("run_aarch64: expected qemu-aarch64 on the path")
    root = SYSTEM / "root"
    bounded = ["prlimit", f"--as={MEMORY}", emulator]
    return [*bounded, "-L", str(root), str(root / "usr" / "bin" / "python3")]


def run(python: list[str], folders: list[Path], *words: str) -> str:
    """Runs a module of tests/support; returns its output, or ends this script."""
    added = {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PYTHONPYCACHEPREFIX": str(SYSTEM / "pycache"),
        "OMP_WAIT_POLICY": "passive",
    }
    done = subprocess.run(
        [*python, "-m", *words],
        env={**os.environ, **added},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}run_aarch64: {words[0]} ended with {done.returncode}: {python[-1]}")
    return done.stdout


def require_same(here: dict[str, Any], there: dict[str, Any]) -> None:
    """Ends this script unless both have the same digests."""
    if there["machine"] != "aarch64":
        sys.exit(f"run_aarch64: expected digests of aarch64, got those of {there['machine']}")
    ours, theirs = here["digests"], there["digests"]
    wrong = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    if wrong:
        print(*wrong[:20], sep="\n", file=sys.stderr)
        sys.exit(
            f"run_aarch64: {len(wrong)} of {len(ours)} digests differ from {here['machine']}'s"
        )
    print(f"run_aarch64: {len(ours)} digests are those of {here['machine']}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=1000)
    options = parser.parse_args()
    link_package(PACKAGE)
    there = python_of_aarch64(), [PACKAGE.parent, SYSTEM / "site"]
    digests = "tests.support.print_digests"
    here = json.loads(run([sys.executable], [ROOT / "python"], digests))
    require_same(here, json.loads(run(*there, digests)))
    bounds = ["--megabytes", "0", "--seconds", str(SECONDS)]  # memory is bounded
    numbers = ["--seed", str(options.seed), "--calls", str(options.calls)]
    run(*there, "tests.support.fuzz_ops", *bounds, *numbers)
    print(f"run_aarch64: {options.calls} hostile calls of seed {options.seed}, no fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
