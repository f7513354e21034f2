"""Trains mixtures of experts under several recipes at once on one GPU, and joins the results.

    python benchmarks/gpu_training.py [--at-once 3] [--out build/training] [--steps 1000 …]

Each recipe is a process of its own, `minifloat train --recipes RECIPE --out OUT/parts/NAME`, since
the launches of small kernels keep a host's core busy, not the GPU. Processes that share a GPU slow
each other down: the losses count here, not the speeds. All other options go to `minifloat train`.
OUT then has the report, the plot and the records of all runs, as if one job had trained them. The
same command again goes on with whatever was not finished.

The exit status is 1 where a bar is missed: FP8 within 0.5% of bf16's validation loss or twice the
gap of two seeds, FP4 within 2%, and no expert idle that is active under bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))  # the source tree's package, installed or not

from minifloat import cli  # noqa: E402

FP4 = [f"{name}={name} keep=nvfp4_paper" for name in ("mxfp4", "nvfp4")]
RECIPES = ",".join(["bf16", "bf16@2", "fp8_rowwise", "fp8_blockwise", *FP4])
SETTINGS = """--model moe:512,4,8,4,256,16,2,1 --vocab 8192 --seq 512 --batch 24 --steps 1000
    --warmup 100 --eval-every 100 --eval-batches 8 --checkpoint-every 500"""
FP8_BAR, FP4_BAR = 0.5, 2.0  # percent of bf16's validation loss
LAST_LINES = 15  # of the log of a run that failed


def environment(gpu: int | None) -> dict[str, str]:
    """Returns the environment of a process that imports this tree's package. None: all GPUs."""
    path = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
    visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return {**os.environ, "PYTHONPATH": path, **visible}


def train_recipe(recipe: list[str], part: Path, options: list[str], gpu: int | None = None) -> None:
    """Trains one recipe in another process, which writes to the folder `part`."""
    part.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "minifloat", "train", "--resume", *recipe]
    command += ["--out", str(part), *options]
    start, log = time.monotonic(), part.with_suffix(".log")
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=file, env=environment(gpu)).returncode
    if code:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        sys.exit(f"{part.name}: expected exit code 0, got {code}; the end of {log}:\n{last}")
    print(f"{part.name}: done in {time.monotonic() - start:.0f} s", flush=True)


def train(recipe: str, out: Path, options: list[str]) -> Path:
    """Trains one recipe of this benchmark; returns its folder."""
    part = out / "parts" / recipe.partition("=")[0].replace("@", "_seed_")
    train_recipe(["--recipes", recipe], part, [*SETTINGS.split(), *options])
    return part


def join(parts: list[Path], out: Path) -> None:
    """Writes the job of all runs to `out`: its description, records, weights and results."""
    jobs = [json.loads((part / "job.json").read_text()) for part in parts]
    whole = {**jobs[0], "runs": [run for job in jobs for run in job["runs"]]}
    (out / "job.json").write_text(json.dumps(whole))
    records = "".join((part / "metrics.jsonl").read_text() for part in parts)
    (out / "metrics.jsonl").write_text(records)
    for part in parts:
        shutil.copytree(
            part / "runs",
            out / "runs",
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("checkpoints"),
        )
        shutil.copytree(part / "tensorboard", out / "tensorboard", dirs_exist_ok=True)


def verdict(row: dict[str, Any], seeds_gap: float) -> tuple[bool, str]:
    """Compares a run's gap, and its idle experts, with their bars."""
    bar = FP4_BAR if "fp4" in row["recipe"] else max(FP8_BAR, 2 * seeds_gap)
    gap, idle = row["gap_percent"], row["idle_experts"]
    is_met = gap is not None and gap <= bar and not idle
    shown = "no loss" if gap is None else f"{gap:+.2f}%"
    word = "met" if is_met else "MISSED"
    return is_met, f"{row['run']}: {shown}, bar {bar:.2f}%, idle beside bf16: {idle}: {word}"


def judge(rows: list[dict[str, Any]]) -> bool:
    """Prints a line a recipe; tells whether all bars are met."""
    noise = [abs(row["gap_percent"] or 0) for row in rows if row["recipe"] == "bf16"]
    seeds_gap = max(noise, default=0.0)
    print(f"gap of two seeds of bf16: {seeds_gap:.2f}%")
    verdicts = [verdict(row, seeds_gap) for row in rows if row["recipe"] != "bf16"]
    print("\n".join(text for _, text in verdicts))
    return all(is_met for is_met, _ in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at-once", type=int, default=3, help="processes (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "training")
    parser.add_argument("--recipes", default=RECIPES, help="presets, or NAME=TEXT (%(default)s)")
    arguments, options = parser.parse_known_args()
    out, recipes = arguments.out.resolve(), arguments.recipes.split(",")
    with ThreadPoolExecutor(arguments.at_once) as pool:
        parts = list(pool.map(partial(train, out=out, options=options), recipes))
    join(parts, out)
    if cli.main(["train", "--resume", "--out", str(out)]):
        return 1
    return 0 if judge(json.loads((out / "report.json").read_text())["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
