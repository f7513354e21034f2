"""Run the tests over small mistakes in the code, one at a time: those that no test finds survive.

usage: mutants.py [--only core|layers|python] [--limit N] [--commit COMMIT] [--tree FOLDER]
                  [--results FILE]

tools/mutants.txt is the list. A mistake in include/minifloat/core/ is compiled into the C++ suites
of the CPU, those of its header first; one in torch/layers/ runs under the tests of LAYER_TESTS, one
in python/minifloat/ under those of PYTHON_TESTS. Each run stops at the first failure. A mistake
that does not compile is found by the compiler: a static_assert, or a value that a constant
expression needs.

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
PACKAGE = "python/minifloat/"
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


# The tests of python/minifloat/, by the longest name that a file's begins with: files and folders.
PYTHON_TESTS = {
    "nn/state": "nn/test_state nn/test_convert_arguments nn/test_randomness nn/test_linear "
    "nn/test_randomness_edges nn/test_recomputing_functions nn/test_old_checkpoints nn/test_reuse "
    "nn/test_convert nn/test_convert_edges nn/test_threads distributed/test_state_of_ranks "
    "nn/test_training_programs",
    "nn/cache": "nn/test_reuse nn/test_reuse_edges nn/test_shared_input moe/test_reuse",
    "nn/accumulation": "nn/test_main_grad nn/test_accumulation nn/test_accumulation_edges",
    "nn/grouped_product": "nn/test_grouped_mm moe/test_convert moe/test_layer moe/test_primary "
    "nn/test_state moe/test_expert_parallel distributed/fsdp/test_fsdp_experts",
    "nn/linear": "nn/test_linear nn/test_convert nn/test_convert_tensors nn/test_convert_arguments "
    "tensor/test_primary",
    "nn/convert": "nn/test_keep nn/test_convert nn/test_convert_arguments nn/test_convert_edges "
    "nn/test_convert_tensors nn/test_construction nn/test_threads",
    "nn/convert/same_result": "nn/test_same_result moe/test_same_experts moe/test_foreign_effects "
    "moe/test_ways_to_call",
    "tensor": "tensor ops nn/test_refusals",
    "spec": "test_spec test_recipe tensor",
    "checks": "test_spec nn/test_convert_arguments nn/test_state moe/test_router tensor",
    "moe": "moe/test_router moe/test_balance moe/test_grouped_mlp moe/test_layer nn/test_no_tokens "
    "moe/test_token_cast moe/test_permute moe/test_convert moe/test_cut_experts",
    "moe/grouped_mlp": "moe/test_grouped_mlp moe/test_grouped_mlp_ranks",
    "moe/convert": "moe/test_same_experts moe/test_convert clients/test_known_experts",
    "moe/ranks/width": "moe/test_cut_experts",
    "moe/ranks": "moe/test_dispatch moe/test_expert_parallel moe/test_expert_faults "
    "moe/test_expert_gradients moe/test_expert_sharding moe/test_grouped_mlp_ranks",
    "distributed": "distributed/test_same_layers distributed/test_settings_of_ranks "
    "distributed/test_faults distributed/test_pipeline",
    "distributed/fsdp": "distributed/fsdp",
    "distributed/zero": "distributed/zero",
    "distributed/tensor_parallel": "distributed/tensor_parallel",
    "inspector": "inspector",
    "transformers": "clients/test_callbacks clients/test_resumed_experts",
}


def tests_of(file: str) -> list[str]:
    """Return the tests that may find a mistake in a file of the package."""
    name = file.removeprefix(PACKAGE)
    tests = PYTHON_TESTS[max(filter(name.startswith, PYTHON_TESTS), key=len)].split()
    return [path if (ROOT / (path := f"tests/{t}")).is_dir() else f"{path}.py" for t in tests]


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
        kinds = {CORE: "core", PACKAGE: "python"}
        return next((k for start, k in kinds.items() if self.file.startswith(start)), "layers")

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

    def __init__(self, folder: Path, commit: str, kinds: set[str]) -> None:
        self.folder = folder
        if not (folder / ".git").exists():
            self.run("git", "worktree", "add", "--detach", str(folder), commit, cwd=ROOT)
        # Restores what an interrupted run changed; git writes those files alone.
        self.run("git", "checkout", "--quiet", "--force", "--detach", commit)
        options = ("--log-level=NOTICE", "-DMINIFLOAT_CUDA=OFF",
                   f"-DPython_EXECUTABLE={sys.executable}")  # fmt: skip
        if "layers" in kinds or "python" in kinds:
            if not (folder / LAYERS / "build.ninja").exists():
                self.run("cmake", "--preset", "default", *options)
            self.run("cmake", "--build", LAYERS, "-j2", "--target", "minifloat_torch")
        if "core" in kinds and not (folder / CORE_SUITES / "build.ninja").exists():
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
        return self.first_failure(sorted(LAYER_TESTS, key=lambda name: name != first))

    def first_failure(self, tests: list[str]) -> str | None:
        """Return the test that fails first, or None."""
        options = ("-x", "-q", "-rfE", "-p", "no:cacheprovider", "-m", "not slow")
        for test in tests:
            output = self.output_of_failure(sys.executable, "-m", "pytest", *options, test)
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
            if mutant.kind == "python":
                return self.first_failure(tests_of(mutant.file))
            return self.killer_in_layers(path)
        finally:
            path.write_text(source)


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--only", choices=("core", "layers", "python"))
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
    tree = Tree(args.tree.resolve(), commit, {mutant.kind for mutant in mutants})
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
