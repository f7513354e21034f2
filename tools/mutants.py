"""Run the tests over small mistakes in the code, one at a time: those that no test finds survive.

usage: mutants.py [--only core|layers] [--limit N] [--commit COMMIT] [--tree FOLDER]
                  [--results FILE]

tools/mutants.txt is the list. A mistake in include/minifloat/core/ is compiled into the C++ suites
of the CPU, those of its header first; one in torch/layers/ runs under the tests of LAYER_TESTS.
Each run stops at the first failure. A mistake that does not compile is found by the compiler: a
static_assert, or a value that a constant expression needs.

The mistakes are made in a worktree of the commit, FOLDER, never in this tree; a run that was killed
leaves nothing behind that the next one does not undo. FILE holds the results of each commit; a
later run goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "mutants.txt"
CORE = "include/minifloat/core/"
# The builds of the worktree. -O1 compiles the casts three times as fast, to the same bytes.
CORE_SUITES, LAYERS = "build/quick", "build/default"
QUICK = "-DCMAKE_CXX_FLAGS_QUICK=-O1 -DNDEBUG"
SECONDS = 900  # of a suite; a mistake may make a loop endless

# The tests of torch/layers/, quick ones first. Those that a file names run before the others.
LAYER_TESTS = (
    "tests/nn/test_linear.py",
    "tests/nn/test_shared_input.py",
    "tests/nn/test_randomness.py",
    "tests/nn/test_autograd_edges.py",
    "tests/nn/test_state.py",
    "tests/nn/test_main_grad.py",
    "tests/nn/test_mlp.py",
    "tests/nn/test_grouped_mm.py",
    "tests/distributed/tensor_parallel/test_tensor_parallel.py",
)
FIRST_TESTS = {
    "shard_casts": "tests/distributed/tensor_parallel/test_tensor_parallel.py",
    "sharding": "tests/distributed/tensor_parallel/test_tensor_parallel.py",
    "weight_sums": "tests/nn/test_main_grad.py",
    "mlp_gradients": "tests/nn/test_mlp.py",
    "expert_weights": "tests/nn/test_grouped_mm.py",
}


@dataclass(frozen=True)
class Mutant:
    file: str
    text: str
    replacement: str

    @property
    def line(self) -> str:
        return f"{self.file}: {self.text} => {self.replacement}"

    @property
    def kind(self) -> str:
        return "core" if self.file.startswith(CORE) else "layers"

    def apply(self, source: str) -> str:
        """Return the source with the mistake.

        Raises:
            ValueError: the text does not occur exactly once.
        """
        if (count := source.count(self.text)) != 1:
            raise ValueError(
                f"{TABLE.name}: expected {self.text!r} once in {self.file}, found {count}; "
                "write the line anew for the code as it is now"
            )
        return source.replace(self.text, self.replacement)


def read_table(table: Path = TABLE) -> list[Mutant]:
    """Return the mutants of a table."""
    mutants = []
    for line in table.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        file, _, change = line.partition(": ")
        text, _, replacement = change.partition(" => ")
        if not replacement or replacement == text:
            raise ValueError(f"{table.name}: expected 'file: text => another text', got {line!r}")
        mutants.append(Mutant(file, text, replacement))
    return mutants


def included(source: Path, tree: Path) -> set[Path]:
    """Return a source and every file of the tree that it includes, directly or not."""
    found: set[Path] = set()
    left = [source]
    while left:
        path = left.pop()
        found.add(path)
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            for folder in (path.parent, tree / "include", tree / "tests", tree / "src"):
                if (folder / name).exists() and folder / name not in found:
                    left.append(folder / name)
                    break
    return found


def suites_of(header: Path, tree: Path) -> list[str]:
    """Return the executables that test a header of core/: the quickest to find a mistake first."""
    tests = tree / "tests"
    core = [p for p in sorted(tests.glob("core/*_test.cpp")) if header in included(p, tree)]
    core.sort(key=lambda p: not p.stem.startswith(header.stem))
    cpu = sorted(tests.glob("cpu/*_test.cpp"))  # the library that they link includes all of core/
    cpu.sort(key=lambda p: (not p.stem.startswith(header.stem), p.stem != "quantize_test"))
    return [f"{p.parent.name}_{p.stem}" for p in [*core, *cpu]]


class Tree:
    """A worktree in which mistakes are made, with a build of its own."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder = folder
        if not (folder / ".git").exists():
            self.run("git", "worktree", "add", "--detach", str(folder), commit, cwd=ROOT)
        # Restores what an interrupted run changed; git writes those files alone.
        self.run("git", "checkout", "--quiet", "--force", "--detach", commit)
        options = ("--log-level=NOTICE", "-DMINIFLOAT_CUDA=OFF",
                   f"-DPython_EXECUTABLE={sys.executable}")  # fmt: skip
        if not (folder / LAYERS / "build.ninja").exists():
            self.run("cmake", "--preset", "default", *options)
        if not (folder / CORE_SUITES / "build.ninja").exists():
            self.run("cmake", "--preset", "default", "-B", CORE_SUITES, *options, QUICK,
                     "-DCMAKE_BUILD_TYPE=Quick", "-DMINIFLOAT_TORCH=OFF")  # fmt: skip

    def run(self, *command: str, cwd: Path | None = None) -> None:
        subprocess.run(command, cwd=cwd or self.folder, check=True, stdout=subprocess.DEVNULL)

    def output_of_failure(self, *command: str) -> str | None:
        """Run a command; return its output if it fails or does not end, else None."""
        env = os.environ | {"PYTHONPATH": str(self.folder / "python")}
        process = subprocess.Popen(
            command, cwd=self.folder, env=env, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return f"no end within {SECONDS} seconds"
        return output if process.returncode else None

    def build(self, folder: str, target: str) -> str | None:
        """Build a target; return the compiler's first error, or None."""
        output = self.output_of_failure("cmake", "--build", folder, "-j2", "--target", target)
        if output is None:
            return None
        errors = [line for line in output.splitlines() if "error:" in line]
        return f"compiler: {errors[0] if errors else output[-300:]}"

    def killer_in_core(self, header: Path) -> str | None:
        for suite in suites_of(header, self.folder):
            if error := self.build(CORE_SUITES, suite):
                return error
            output = self.output_of_failure(
                f"{CORE_SUITES}/tests/{suite}", "--gtest_brief=1", "--gtest_fail_fast"
            )
            if output is not None:
                case = re.search(r"FAILED  \] (\S+)", output)
                return f"{suite} {case[1] if case else output[-200:]}"
        return None

    def killer_in_layers(self, file: Path) -> str | None:
        if error := self.build(LAYERS, "minifloat_torch"):
            return error
        first = FIRST_TESTS.get(file.stem)
        tests = sorted(LAYER_TESTS, key=lambda name: name != first)
        for test in tests:
            output = self.output_of_failure(
                sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", test
            )
            if output is not None:
                case = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                return case[1] if case else f"{test}: {output[-200:]}"
        return None

    def killer_of(self, mutant: Mutant) -> str | None:
        """Make the mistake, run its tests, take it back; return what found it, or None."""
        path = self.folder / mutant.file
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            if mutant.kind == "core":
                return self.killer_in_core(path)
            return self.killer_in_layers(path)
        finally:
            path.write_text(source)


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--only", choices=("core", "layers"))
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--tree", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants.json")
    args = parser.parse_args()

    named = ["git", "rev-parse", "--verify", f"{args.commit}^{{commit}}"]
    commit = subprocess.run(named, cwd=ROOT, check=True, capture_output=True, text=True).stdout[:12]
    mutants = [m for m in read_table() if args.only in (None, m.kind)]
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    of_commit: dict[str, dict[str, object]] = results.setdefault(commit, {})
    tree = Tree(args.tree.resolve(), commit)
    for mutant in mutants:
        mutant.apply((tree.folder / mutant.file).read_text())
    left = [m for m in mutants if m.line not in of_commit][: args.limit]
    for mutant in left:
        start = time.monotonic()
        killer = tree.killer_of(mutant)
        of_commit[mutant.line] = {"killer": killer, "seconds": round(time.monotonic() - start)}
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(results, indent=1) + "\n")
        print("killed  " if killer else "survived", mutant.line, f"\n         {killer}", flush=True)
    seen = [of_commit[m.line]["killer"] for m in mutants if m.line in of_commit]
    killed = sum(killer is not None for killer in seen)
    print(f"{commit}: {killed} of {len(seen)} killed, {len(mutants) - len(seen)} not run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
