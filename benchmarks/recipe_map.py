"""What layers in NVFP4 cost a trained model, chosen by the inspector's map or by their position.

    make train RECIPES=bf16 STEPS=150
    python benchmarks/recipe_map.py runs/train/runs/bf16

It prints the validation loss less that in bf16, in nats a token, of one checkpoint whose layers are
converted and not trained on. In each row the same share of the operations is in NVFP4, and the rest
in bf16: the layers that mf.inspect names, the last ones, the first ones, and random ones, the mean
of three draws. Below is what the inspector predicts of all layers in NVFP4, to second order.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
from pathlib import Path

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
from _measure import product_dtype
from torch import Tensor, nn
from torch.utils.data import default_collate

sys.path.insert(0, str(timing.ROOT / "examples" / "pretrain"))
from inspect_run import SEQUENCES, load_run

SHARES = (1.0, 0.9, 0.75, 0.5)
DRAWS = 3
WINDOWS = 192  # of validation text
LOW = "nvfp4"


def map_in_order(operations: dict[str, int], names: list[str], share: float) -> str:
    """Returns the map that keeps the first of `names` in bf16 while the rest has the share."""
    room, entries = (1 - share) * sum(operations.values()) * (1 + 1e-9), [f"*: {LOW}"]
    for name in names:
        if operations[name] <= room:
            room -= operations[name]
            entries.append(f"{name}: bf16")
    return "; ".join(entries)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a bf16 run")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device = arguments.device
    model, training, held_out = load_run(arguments.run.resolve())
    windows = [held_out[i] for i in range(0, len(held_out), max(len(held_out) // WINDOWS, 1))]
    windows = windows[:WINDOWS]

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device, product_dtype(device), product_dtype(device).itemsize == 2):
            return model(**{name: t.to(device) for name, t in batch.items()}).loss

    first = default_collate([training[i] for i in range(SEQUENCES)])
    found = mf.inspect(model.to(device), first, [LOW], loss=forward)

    def loss(recipe: str) -> float:
        changed = copy.deepcopy(model).eval()
        if recipe != "bf16":
            mf.quantize_(changed, recipe)
        parts = [default_collate(windows[i : i + 12]) for i in range(0, len(windows), 12)]
        with torch.no_grad():
            return statistics.mean(forward(changed, part).item() for part in parts)

    base, operations, predicted = loss("bf16"), dict[str, int](), 0.0
    for row in found.rows:
        if row.module not in found.heads:
            operations[row.module] = operations.get(row.module, 0) + row.operations
            predicted += row.loss_second
    names = list(operations)
    print("| share in NVFP4 | inspector | last | first | random |\n|---|---|---|---|---|")
    for share in SHARES:
        orders = [
            names[::-1],
            names,
            *(random.Random(i).sample(names, len(names)) for i in range(DRAWS)),
        ]
        maps = [found.recipe_map(share, LOW).text]
        maps += [map_in_order(operations, order, share) for order in orders]
        mapped, last, first, *drawn = (loss(text) - base for text in maps)
        cells = [f"{value:.4f}" for value in (mapped, last, first, statistics.mean(drawn))]
        print(f"| {share:.0%} | {' | '.join(cells)} |", flush=True)
    print(f"bf16: {base:.4f}; predicted of all in NVFP4: {predicted:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
