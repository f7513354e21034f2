"""The command `minifloat export`: from a folder of Hugging Face to one that servers read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from ..nn.convert.filters import DEFAULT_KEEP, read_recipe
from ..nn.convert.quantize import quantize_
from ..nn.convert.selection import Report
from .export import export, is_taken
from .read_checkpoint import MappedTensors, Source, open_folder, read_json
from .schemes import INDEX

# What save_pretrained of a tokenizer writes.
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("*.model", "tekken.json", "chat_template*", "additional_chat_templates/*"),
)
WHOLE = "model.safetensors"
# Lists of transformers' report of a load, of which none may have a name.
WRONG = {"missing_keys": "without weights", "unexpected_keys": "not of this model"}


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

    Raises:
        ValueError: `out` is not empty, `recipe` is none, there is no folder `model`, or its weights
            are quantized or not those of its model.
    """
    from transformers import AutoModelForCausalLM

    if not Path(model, "config.json").is_file():
        raise ValueError(f"MODEL: expected a folder with config.json, got {model}")
    source = Source("MODEL", model, {})
    if read_json(source, Path(model, "config.json"), "quantization_config"):
        raise source.error(f"expected plain weights, got quantized ones in {model}")
    require_one_file_each(source, Path(model))
    read_recipe(recipe, DEFAULT_KEEP)
    if is_taken(Path(out)):
        raise source.error(f"expected OUT as an absent or empty folder, got {out}")
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        loaded, found = load(model, dtype="auto", output_loading_info=True)
    except (torch.OutOfMemoryError, OSError, ImportError):
        raise
    except Exception as error:  # a config that transformers does not know, other shapes, damage
        raise source.error(
            f"expected a config.json and weights that transformers loads, got "
            f"{type(error).__name__}: {error}"
        ) from error
    wrong = [f"{name} {what}" for key, what in WRONG.items() for name in sorted(found[key])]
    if wrong:
        raise source.error_of_list("expected the weights of AutoModelForCausalLM", wrong)
    tokenizer = [path for pattern in TOKENIZER for path in Path(model).glob(pattern)]
    report = quantize_(loaded, recipe, share_amax=share_amax)
    export(loaded, out, format, weight_only=weight_only)
    for path in filter(Path.is_file, tokenizer):
        copy = Path(out, path.relative_to(model))
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    return report


def require_one_file_each(source: Source, folder: Path) -> None:
    """Raises ValueError where transformers would not read the tensors that an index names.

    It takes model.safetensors before an index, and every tensor of the index's files.
    """
    if not (folder / INDEX).is_file():
        return
    if (folder / WHOLE).is_file():
        raise source.error(f"expected {WHOLE} or {INDEX} in {folder}, got both")
    tensors = open_folder(source.function, folder).tensors
    if isinstance(tensors, MappedTensors) and tensors.strays:
        raise source.error_of_list(f"expected each tensor in the file of {INDEX}", tensors.strays)
