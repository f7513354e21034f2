"""No input ends the process: seeded hostile calls of every op and every public function.

The calls run in other processes (fuzz_ops.py), which a crash ends. A failure prints the command
that repeats the call.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import minifloat as mf
import pytest
import torch

from tests.support import fuzz_ops
from tests.support.public_names import public_names

ROOT = Path(__file__).parents[2]
MOST_DEATHS = 5  # of a seed
LEAST_VALID = 5  # of 20; the call with the most refusals has 7
COMMAND = "PYTHONPATH=python python -m tests.support.fuzz_ops --seed {} --first {} --calls 1"


def registered_ops():
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("minifloat::") for name in names if name.startswith("minifloat::")}


def native_methods():
    """Lists methods of native classes; their constructors are called with each."""
    found = set()
    for schema in torch._C._jit_get_custom_class_schemas():
        owner = str(schema.arguments[0].type)
        if "minifloat" in owner and schema.name != "__init__":
            found.add(f"{owner.split('.')[-1]}.{schema.name}")
    return found


def test_every_op_and_public_function_has_a_valid_call():
    public = {f"mf.{name}" for name in public_names()}
    missing = (registered_ops() | native_methods() | public) - set(fuzz_ops.names())
    assert not missing, (
        f"no valid call for {sorted(missing)}: write one in a tests/support/fuzz_*_calls.py, "
        "with the decorator @call of that name"
    )


@pytest.mark.parametrize("name", fuzz_ops.names())
def test_the_valid_calls_are_valid(name):
    """Runs the unchanged calls: hostile changes start from arguments that an op accepts."""
    valid, last = 0, None
    for seed in range(20):
        torch.manual_seed(seed)
        rng = Random(seed)
        arena = fuzz_ops.Arena(rng)
        one = fuzz_ops.CALLS[name](rng, arena)
        try:
            one.run(**one.args)
            valid += 1
        except ValueError as error:  # of one spec, such as a cut that it has not
            last = error
        if valid == LEAST_VALID:
            return
    raise AssertionError(f"{valid} of 20 calls of {name} were valid, the last error was {last}")


def run_calls(seed, first, calls, state):
    command = [sys.executable, "-m", fuzz_ops.__name__, "--seed", seed, "--first", first]
    command += ["--calls", calls, "--state", state, "--most-faults", 10]
    environment = {"PYTHONPATH": str(Path(mf.__file__).parents[1]), "OMP_NUM_THREADS": "2"}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        errors="replace",
        cwd=ROOT,
        timeout=500,
        env=environment,
    )


def faults_of(seed, calls, folder):
    """Lists the faults of the calls of one seed. After a crash the next call follows."""
    found, first, state = [], 0, folder / f"state{seed}"
    for _ in range(MOST_DEATHS):
        done = run_calls(seed, first, calls - first, state)
        found += done.stdout.splitlines()
        if done.returncode in (0, 1) and not done.stderr.strip():
            return found
        index = int(state.read_text()) if state.exists() else first
        found.append(
            f"the process ended with {done.returncode} in call {index} of seed {seed}: "
            f"{done.stderr.strip()[-500:]}\n    {COMMAND.format(seed, index)}"
        )
        first = index + 1
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded as Linux counts it")
@pytest.mark.parametrize(
    ("seeds", "calls"), [([0], 500), pytest.param([1, 2, 3], 2500, marks=pytest.mark.slow)]
)
def test_no_hostile_call_ends_the_process_or_writes_where_it_must_not(seeds, calls, tmp_path):
    started = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        each = pool.map(lambda seed: faults_of(seed, calls, tmp_path), seeds)
        found = [fault for faults in each for fault in faults]
    print(f"{calls} calls of each seed in {time.perf_counter() - started:.0f} s")
    repeat = f"repeat one with {COMMAND.format('SEED', 'INDEX')}"
    assert not found, f"{len(found)} faults; {repeat}\n" + "\n".join(found)
