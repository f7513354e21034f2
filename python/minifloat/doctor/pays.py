"""`minifloat doctor --model`: whether a recipe pays for a model on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..engine_choice import engines, find_device
from ..recipe import presets
from .meter import Meter
from .model_sizes import ModelSizes, read_sizes
from .predict import Job, Row, predict, table

TOKENS, SEQUENCE = 16384, 4096
ROUNDED = 3  # digits of the ms in JSON


def predict_model(
    model: str,
    recipes: Sequence[str],
    *,
    tokens: int = TOKENS,
    seq: int | None = None,
    gpus: int = Job.gpus,
    link: float | None = None,
    is_compiled: bool = Job.is_compiled,
) -> dict[str, Any]:
    """Measures this machine, and predicts a step of the model under each recipe.

    Args:
        model: a config.json, a folder with one, or sizes as text.
        recipes: presets.
        tokens, seq, gpus, link, is_compiled: as of Job; seq None: SEQUENCE, or `tokens` where that
            is less; link None: that of Job, which the text calls assumed; else it is for several
            GPUs.

    Returns:
        A JSON object; `as_text` prints it.

    Raises:
        OSError: the config cannot be read.
        ValueError: an argument is not as expected.
    """
    for name in recipes:
        if name not in presets():
            raise ValueError(f"--recipes: expected presets ({', '.join(presets())}), got {name!r}")
    seq = min(SEQUENCE, tokens) if seq is None else seq
    if tokens % seq:
        raise ValueError(f"--tokens: expected whole sequences of {seq}, got {tokens}")
    if link is not None and gpus == 1:
        raise ValueError("--link: expected --gpus of 2 or more, got 1, which gathers nothing")
    rate = Job.link if link is None else link
    job = Job(read_sizes(model), tokens, seq, gpus, rate, is_compiled)
    device, capability = find_device()
    begin = time.perf_counter()
    rows = predict(job, Meter(torch.device(device)).measure(job, recipes))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "job": asdict(job),
        "link_is": "assumed" if link is None else "given",
        "seconds": round(time.perf_counter() - begin, 1),
        "rows": [rounded(row) for row in rows],
        "emulated": {name: emulated(job.model, name, capability) for name in recipes},
    }


def emulated(model: ModelSizes, recipe: str, capability: tuple[int, int]) -> list[str]:
    """Returns the products whose GEMMs do not read codes, in linear layers or in experts."""
    kinds = {part.experts > 0 for part in model.parts() if part.is_converted}
    found = [engines(recipe, capability, experts=experts) for experts in kinds]
    return [e[0].product for e in zip(*found) if not all(one.native for one in e)]


def rounded(row: Row) -> dict[str, Any]:
    cells = asdict(row).items()
    return {name: round(v, ROUNDED) if isinstance(v, float) else v for name, v in cells}


def as_text(about: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a prediction."""
    job = about["job"]
    text = f"{about['device']}: predicted step of {job['tokens']} tokens a GPU, sequences of "
    text += f"{job['seq']}, {'compiled' if job['is_compiled'] else 'eager'} blocks"
    if section := job["model"]["section"]:
        text += f", of {section} alone"
    if job["gpus"] > 1:
        text += f", FSDP2 over {job['gpus']} GPUs at {job['link']:g} GB/s ({about['link_is']}, not "
        text += "measured)"
    yield f"{text}; measured in {about['seconds']} s"
    products = {name: ", ".join(found) for name, found in about["emulated"].items()}
    yield from table([Row(**row) for row in about["rows"]], products)
