"""Valid calls of what writes and reads the folders of servers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from typing import Any

import minifloat as mf
import torch
from torch import nn

from tests.support.fuzz_calls import Call, call
from tests.support.fuzz_values import Arena


@call("mf.export")
@call("mf.calibrate")
@call("mf.load_quantized_")
def _serve(rng: Random, arena: Arena) -> Call:
    def run(recipe: Any, format: Any, batch: Any, loaded: Any, seed: Any) -> None:
        model, plain = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 16)) for _ in range(2))
        mf.quantize_(model, recipe, keep="nothing")
        amaxes = mf.calibrate(model, [batch])
        with tempfile.TemporaryDirectory() as folder:
            served = Path(folder) / "served"
            mf.export(model, served, format, amaxes=amaxes)
            mf.load_quantized_(plain.bfloat16(), served, loaded, seed=seed)

    args = {"recipe": rng.choice(("nvfp4", "fp8_tensorwise")), "batch": torch.randn(4, 64)}
    args |= {"format": rng.choice(("compressed-tensors", "modelopt"))}
    return Call(
        run, {**args, "loaded": rng.choice(("bf16", "fp8_rowwise")), "seed": 0}, is_of_models=True
    )
