"""Recipe maps for the parity trial: which layers keep bf16, by the inspector and by position.

    python benchmarks/gpu_inspect.py --data FOLDER [--steps 500] [--share 0.9] --out OUT

FOLDER is what `parity_data.py` made. A bf16 run of the trial trains STEPS steps from a seed that no
run of the trial has. mf.inspect then measures each layer under nvfp4, on windows that follow. Two
maps give nvfp4 to SHARE of the operations of a forward, the head aside:

    by_inspector   bf16 for the layers to which the inspector predicts the most harm
    by_position    bf16 for the last layers, as the published policy chooses

OUT/maps.txt has both as entries of gpu_parity.py's --recipe; OUT/inspect.{md,json,png} the numbers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import _gpu_timing as timing  # first: it makes minifloat importable
import torch
from _measure import product_dtype
from _parity_records import BF16
from _parity_run import Run, Text, Trial, Windows
from _parity_tokens import load_tokens
from gpu_parity import Plan
from minifloat.inspector.inspect import inspect
from minifloat.inspector.inspection import Inspection
from recipe_map import LOW, map_in_order

SEED = 1000  # of the run that is inspected
WINDOWS = 8


def inspect_trial(trial: Trial, text: Text, steps: int) -> Inspection:
    """Trains a bf16 run for some steps, and inspects its layers on the windows that follow."""
    run = Run(Plan.parse(BF16, SEED).spec, trial, text, wire="")
    run.train_to(steps)
    batch = text.train.gather(run.batches[steps][:WINDOWS])
    with torch.autocast(trial.device, product_dtype(trial.device)):
        return inspect(run.model, batch, [LOW])


def write_results(found: Inspection, share: float, out: Path) -> str:
    """Writes the numbers and both maps; returns the maps' text."""
    out.mkdir(parents=True, exist_ok=True)
    text = f"# Layers\n\n{found.table()}\n\n# Operands\n\n{found.operand_table()}\n"
    (out / "inspect.md").write_text(text)
    (out / "inspect.json").write_text(found.json())
    operations = {r.module: r.operations for r in found.rows if r.module not in found.heads}
    maps = {
        "nvfp4_by_inspector": found.recipe_map(share, LOW, BF16).text,
        "nvfp4_by_position": map_in_order(operations, [*operations][::-1], share),
    }
    text = "".join(f"{name}={entry}\n" for name, entry in maps.items())
    (out / "maps.txt").write_text(text)
    found.plot(out / "inspect.png")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="FOLDER/text of parity_data.py")
    parser.add_argument("--out", type=Path, default=timing.ROOT / "build" / "parity" / "inspect")
    parser.add_argument("--steps", type=int, default=500, help="before the inspection")
    parser.add_argument("--share", type=float, default=0.9, help="of operations in nvfp4")
    arguments = parser.parse_args()
    trial, tokens = Trial(), load_tokens(arguments.data)
    text = Text(Windows(tokens.train, trial), Windows(tokens.validation, trial))
    found = inspect_trial(trial, text, arguments.steps)
    print(found.table())
    print(write_results(found, arguments.share, arguments.out), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
