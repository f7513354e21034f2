"""The command `minifloat export`: from a folder of Hugging Face to one that servers read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ..nn.convert.quantize import quantize_
from ..nn.convert.selection import Report
from .export import export
from .read_checkpoint import Source, read_json

# What save_pretrained of a tokenizer writes.
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*")


def quantize_folder(
    model: str, out: str, recipe: str, format: str, weight_only: bool, share_amax: str | None
) -> Report:
    """Loads a causal language model, converts and exports it, and copies its tokenizer.

    Args:
        model: a folder with plain weights.
        out: a folder, absent or empty.
        recipe, format, weight_only, share_amax: as those of mf.quantize_ and mf.export.

    Returns:
        Which layers were converted.
    """
    from transformers import AutoModelForCausalLM

    if not Path(model, "config.json").is_file():
        raise ValueError(f"MODEL: expected a folder with config.json, got {model}")
    source = Source("MODEL", model, {})
    if read_json(source, Path(model, "config.json"), "quantization_config"):
        raise source.error(f"expected plain weights, got quantized ones in {model}")
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    report = quantize_(loaded, recipe, share_amax=share_amax)
    export(loaded, out, format, weight_only=weight_only)
    for pattern in TOKENIZER:
        for path in Path(model).glob(pattern):
            shutil.copy(path, out)
    return report
