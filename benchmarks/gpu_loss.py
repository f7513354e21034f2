"""What a recipe costs in loss: gaps to bf16, paired by seed and data, with their standard errors.

    python benchmarks/gpu_loss.py [--seeds 1,2,3] [--gpus 2] [--recipes …] [--recipe NAME=TEXT …]

A run is a process of its own, `minifloat train --recipes NAME@SEED`, one at a time on each GPU. The
runs of a seed start from the same weights and read the same batches. Runs that have finished in
--out are not trained again, so the same command goes on where an earlier one ended. All other
options go to `minifloat train`; the data must be the same in all commands of one --out.

    gap        100 (loss / loss of bf16 from the same seed - 1), validation loss at the last step
    mean, se   over the seeds; se is the standard deviation over sqrt(seeds)
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from gpu_training import ROOT, train_recipe

FP4 = [f"{name}={name} keep=nvfp4_paper" for name in ("mxfp4", "nvfp4", "nvfp4_pow2")]
RECIPES = ",".join(["bf16", "fp8_rowwise", *FP4])
BF16 = "bf16"
SETTINGS = """--model 768,12,12,4,2048 --vocab 8192 --seq 1024 --batch 32 --steps 1000 --warmup 100
    --eval-every 250 --eval-batches 16 --checkpoint-every 1000 --data-mb 150 --compile"""


def finished_loss(part: Path) -> float | None:
    """Returns the validation loss of a finished run, or None."""
    report = part / "report.json"
    if not report.exists():
        return None
    (row,) = json.loads(report.read_text())["rows"]
    return row["validation_loss"] if row["status"] == "finished" else None


def folder_of(out: Path, name: str, seed: int) -> Path:
    return out / "parts" / f"{name}_seed_{seed}"


def gaps_of(losses: dict[str, dict[int, float]]) -> dict[str, list[float]]:
    """Returns each recipe's gaps in percent, of the seeds that bf16 has too."""
    base = losses.get(BF16, {})
    return {
        name: [100 * (loss / base[seed] - 1) for seed, loss in sorted(runs.items()) if seed in base]
        for name, runs in losses.items()
        if name != BF16
    }


def table(losses: dict[str, dict[int, float]]) -> str:
    """Formats the losses and gaps as a table of the docs."""
    lines = ["| recipe | losses | gaps to bf16 | mean | se |", "|---|---|---|---|---|"]
    gaps = gaps_of(losses)
    for name, runs in losses.items():
        found = gaps.get(name, [])
        shown = ", ".join(f"{loss:.4f}" for _, loss in sorted(runs.items()))
        each = ", ".join(f"{gap:+.2f}%" for gap in found) or "-"
        mean = f"{statistics.mean(found):+.2f}%" if found else "-"
        error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None
        lines.append(
            f"| `{name}` | {shown} | {each} | {mean} | "
            f"{'-' if error is None else f'{error:.2f}%'} |"
        )
    return "\n".join(lines)


def losses_of(out: Path, names: list[str], seeds: list[int]) -> dict[str, dict[int, float]]:
    """Reads the losses of finished runs."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for name in names:
        for seed in seeds:
            loss = finished_loss(folder_of(out, name, seed))
            if loss is not None:
                found[name][seed] = loss
    return dict(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--seeds", default="1,2,3", help="%(default)s")
    parser.add_argument("--gpus", type=int, default=1, help="%(default)s; 0: on the CPU")
    parser.add_argument("--recipes", default=RECIPES, help="presets, or NAME=TEXT (%(default)s)")
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME=TEXT")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "loss")
    arguments, options = parser.parse_known_args()
    out, seeds = arguments.out.resolve(), [int(seed) for seed in arguments.seeds.split(",")]
    texts = {}
    for entry in [*filter(None, arguments.recipes.split(",")), *arguments.recipe]:
        name, _, text = entry.partition("=")
        texts[name] = text or name
    gpus: Queue[int | None] = Queue()
    for gpu in range(arguments.gpus) if arguments.gpus else [None]:
        gpus.put(gpu)

    def run(name: str, seed: int) -> None:
        part = folder_of(out, name, seed)
        if finished_loss(part) is not None:
            return
        gpu = gpus.get()
        try:
            entry = f"{name}={texts[name]}@{seed}"
            train_recipe(["--recipe", entry], part, [*SETTINGS.split(), *options], gpu)
        finally:
            gpus.put(gpu)
        print(table(losses_of(out, list(texts), seeds)), flush=True)

    with ThreadPoolExecutor(max(arguments.gpus, 1)) as pool:
        for done in [pool.submit(run, name, seed) for seed in seeds for name in texts]:
            done.result()
    losses = losses_of(out, list(texts), seeds)
    (out / "loss.json").write_text(
        json.dumps({"losses": losses, "gaps": gaps_of(losses)}, indent=1)
    )
    print(table(losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
