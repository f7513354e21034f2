"""What layers in NVFP4 cost a trained model, chosen by the inspector's map or by their position.

    minifloat train --recipes bf16 --steps 150
    python benchmarks/recipe_map.py runs/train/runs/bf16

It prints the validation loss less that in bf16, in nats a token, of one checkpoint whose layers are
converted and not trained on. In each row the same share of the operations is in NVFP4, and the rest
in bf16: the layers that mf.inspect names, the last ones, the first ones, and random ones, the mean
of three draws. Below is what the inspector predicts of all layers in NVFP4, to second order.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

import _gpu_timing  # noqa: F401  first: it makes minifloat importable
import minifloat as mf
import torch
from minifloat.train.config import TrainConfig
from minifloat.train.data import Batches
from minifloat.train.inspect_run import inspect_job, load_run
from minifloat.train.job.train import read_data
from minifloat.train.model.llama import build_model
from minifloat.train.model.measure import loss_in_product_dtype

SHARES = (1.0, 0.9, 0.75, 0.5)
DRAWS = 3
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
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/minifloat").expanduser())
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    threads = torch.get_num_threads() if arguments.device == "cpu" else 0
    device = TrainConfig(device=arguments.device, threads=threads)
    found = inspect_job(device, arguments.run, [LOW], 4, arguments.cache)
    config, checkpoint, seed, _ = load_run(arguments.run)
    _, tokens = read_data(config, arguments.cache)
    batches = Batches(tokens.train, tokens.validation, config.seq, config.batch)
    validation = batches.validation_set(config.eval_batches)
    state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True)["model"]

    def loss(recipe: str) -> float:
        model = build_model(config.model, config.seq, seed, arguments.device)
        model.load_state_dict(state)
        if recipe != "bf16":
            mf.quantize_(model, recipe, verbose=False)
        forward = loss_in_product_dtype(model.eval(), arguments.device)
        with torch.no_grad():
            shares = ((t.to(arguments.device) for t in batch) for batch in validation)
            return statistics.mean(forward(*share).item() for share in shares)

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
