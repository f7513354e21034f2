"""`minifloat inspect`: the model of a run of `minifloat train`, or its small Llama before a step.

OUT/inspect.md         the tables          OUT/recipe_map.txt    for `minifloat train --recipe`
OUT/inspect.json       all numbers         OUT/inspect.png       the heat map
"""

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..inspector.inspect import inspect
from ..inspector.inspection import Inspection
from ..recipe import Recipe
from .checks import TrainError, say
from .config import SEPARATOR, TrainConfig
from .data import Batches
from .durable_files import write_atomically, write_text
from .job import checkpoint
from .job.looks import write
from .job.train import make_deterministic, read_data, require_memory
from .model.llama import build_model
from .model.measure import loss_in_product_dtype


def parse_recipes(text: str) -> list[str]:
    """Returns the texts of recipes, comma-separated as those of `minifloat train`."""
    try:
        return [Recipe(" ".join(each.split())).text for each in SEPARATOR.split(text)]
    except ValueError as error:
        raise TrainError(f"--recipes: {error}") from error


def load_run(folder: Path) -> tuple[TrainConfig, Path, int, int]:
    """Returns the settings of a run's job, the run's newest checkpoint, its seed and step."""
    job = checkpoint.read_job(folder.resolve().parent.parent)
    runs = [run for run in job.runs if run.folder == folder.resolve().name] if job else []
    if not job or not runs:
        raise TrainError(
            f"{folder}: expected the folder of a run of `minifloat train`, such as "
            "runs/train/runs/bf16, got another"
        )
    trained = max(job.trained[runs[0].name], default=0)
    found = checkpoint.choose(folder / "checkpoints", trained, job.config.checkpoint_every)
    if found is None:
        raise TrainError(f"{folder}: expected a checkpoint, got none yet")
    return job.config, found, runs[0].seed, checkpoint.step_of(found)


def inspect_job(
    config: TrainConfig, run: Path | None, recipes: list[str], sequences: int, cache: Path
) -> Inspection:
    """Inspects a model on one batch of its training text.

    Args:
        config: of a new model, and of the batch; with `run` its device and threads alone.
        run: the folder of a run; None: a new model.
        recipes: to try.
        sequences: of the batch, at most.
        cache: folder of tokenized text.
    """
    found, seed, step = None, config.seed, 0
    config = replace(config, batch=sequences)
    if run is not None:
        saved, found, seed, step = load_run(run)
        config = replace(saved, device=config.device, threads=config.threads, processes=1)
    make_deterministic(config)
    require_memory(config)
    _, tokens = read_data(config, cache)
    model = build_model(config.model, config.seq, seed, config.device)
    if found is not None:
        state = torch.load(found / "state.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        del state
    batches = Batches(tokens.train, tokens.validation, config.seq, config.batch)
    batch = tuple(t[:sequences].to(config.device) for t in batches.training(seed, step))
    forward = loss_in_product_dtype(model, config.device)

    def loss(_: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return forward(*batch)

    start = time.perf_counter()
    result = inspect(model, batch, recipes, loss=loss)
    where = f"{found}" if found else "a new model"
    say(
        f"{where}: {config.model.parameters / 1e6:.1f}M parameters, {result.tokens} tokens, "
        f"{len(recipes)} recipes, loss {result.loss:.4f}: {time.perf_counter() - start:.1f} s"
    )
    return result


def write_files(result: Inspection, out: Path, recipe_map: str) -> None:
    """Writes the files of an inspection and its recipe map."""
    write(result, out)
    write_atomically(out / "inspect.png", result.plot)
    write_text(out / "recipe_map.txt", recipe_map)
