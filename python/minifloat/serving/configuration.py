"""config.json of a served folder: what a loader must know of the codes.

One group of layers is called `Linear`, and what it leaves out is ignored. Several groups name their
layers; the experts of one parameter are named by one pattern. `unread_in_modelopt` finds the layers
that vLLM does not read in ModelOpt's format.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn

from .._version import __version__
from ..nn.names import join
from ..nn.shared_amax import fused_group
from .read_checkpoint import Source, read_json
from .schemes import COMPRESSED_TENSORS, EXPERTS, IN_HIGH_PRECISION, MODELOPT, Storage
from .weights import Found, Part, Weight, is_transformers, pattern_of

PRODUCER = {"name": "minifloat", "version": __version__}
OTHER_FORMAT = f"format={COMPRESSED_TENSORS!r} takes it"


def groups_of(weights: Sequence[Weight]) -> list[tuple[Storage, list[Weight]]]:
    """Returns the different storages, each with its weights."""
    groups: list[tuple[Storage, list[Weight]]] = []
    for weight in weights:
        for storage, members in groups:
            if storage == weight.storage:
                members.append(weight)
                break
        else:
            groups.append((weight.storage, [weight]))
    return groups


def targets_of(weights: Sequence[Weight], by_modules: bool) -> list[str]:
    """Returns the names of layers, and patterns for those of experts.

    by_modules: whether a loader looks for the names of their modules too.
    """
    names = []
    for weight in weights:
        is_layer = len(weight.shape) == 2
        names += [part.name if is_layer else pattern_of(part.name) for part in weight.parts]
        names += [weight.layer] * (is_layer and by_modules)
    return expressions(names)


def expressions(names: Sequence[str]) -> list[str]:
    """Returns names as compressed-tensors has them: regular expressions for those of experts."""
    return list(dict.fromkeys(expression(name) for name in names))


def expression(name: str) -> str:
    head, has_number, tail = name.partition("{}")
    return f"re:{re.escape(head)}\\d+{re.escape(tail)}$" if has_number else name


def config_groups(found: Found) -> dict[str, dict[str, Any]]:
    """Returns the different storages of a folder as compressed-tensors has them."""
    groups = groups_of(found.weights)
    return {
        f"group_{i}": {
            "targets": targets_of(weights, found.by_modules) if len(groups) > 1 else ["Linear"],
            "weights": storage.scheme.arguments(),
            "input_activations": storage.inputs,
            "output_activations": None,
            "format": storage.format,
        }
        for i, (storage, weights) in enumerate(groups)
    }


def compressed_tensors_config(found: Found) -> dict[str, Any]:
    """Returns config.json's quantization_config of compressed-tensors."""
    groups = config_groups(found)
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": expressions(found.ignored),
    }


def modelopt_config(found: Found) -> dict[str, Any]:
    """Returns hf_quant_config.json of ModelOpt."""

    def algorithm(storage: Storage) -> dict[str, Any]:
        size = {"group_size": storage.scheme.group} if storage.scheme.group else {}
        return {"quant_algo": storage.algorithm, **size}

    groups = groups_of(found.weights)
    names = [part.name for weight in found.weights for part in weight.parts]
    excluded = [name.replace("{}", "*") for name in found.ignored]
    common = {"kv_cache_quant_algo": None, "exclude_modules": excluded}
    if len(groups) == 1:
        quantization = algorithm(groups[0][0]) | common
    else:
        layers = {p.name: algorithm(w.storage) for w in found.weights for p in w.parts}
        quantization = {"quant_algo": "MIXED_PRECISION", **common}
        quantization["quantized_layers"] = {name: layers[name] for name in names}
    return {"producer": PRODUCER, "quantization": quantization}


def unread_in_modelopt(found: Found) -> dict[str, str]:
    """Returns why vLLM 0.33.0 does not read layers in ModelOpt's format, by the layer's name."""
    is_mixed = len(groups_of(found.weights)) > 1 or bool(found.problems)  # perhaps of others
    names = {part.name for weight in found.weights for part in weight.parts}
    problems = {}
    for weight in found.weights:
        if weight.storage.algorithm is None:
            inputs = weight.storage.inputs
            how = "no scale of x" if inputs is None else f"x cast by {inputs['strategy']}"
            recipe = weight.state.recipe.fprop
            problems[weight.layer] = f"ModelOpt has no name for {recipe} with {how}; {OTHER_FORMAT}"
            continue
        reasons = (unread_part(part, weight.storage, names, is_mixed) for part in weight.parts)
        if why := next(filter(None, reasons), None):
            problems[weight.layer] = why
    return problems


def unread_part(part: Part, storage: Storage, names: Collection[str], is_mixed: bool) -> str | None:
    """Returns why vLLM does not read a layer in ModelOpt's format; None: it does.

    Args:
        part: the layer.
        storage: of the layer, with a quant_algo.
        names: of all quantized layers.
        is_mixed: whether these have several quant_algos.
    """
    algorithm, block = storage.algorithm, storage.scheme.block
    if algorithm not in EXPERTS and re.search(r"(^|\.)experts\.\d+\.", part.name):
        known = " or ".join(EXPERTS)
        return f"expected experts as {known}, for vLLM, got {algorithm}; {OTHER_FORMAT}"
    module = next((module for module in IN_HIGH_PRECISION if module in part.name), None)
    if module is not None and not is_mixed:
        return (
            f"expected {module} unconverted, as vLLM reads it in high precision, got {algorithm}; "
            f"{OTHER_FORMAT}"
        )
    if block and len(part.rows) % block[0] and is_joined_with_next(part.name, names):
        return (
            f"expected outputs as a multiple of {block[0]}, as vLLM joins the layer with one after "
            f"it, got {len(part.rows)}; other recipes have no such limit"
        )
    return None


def is_joined_with_next(name: str, names: Collection[str]) -> bool:
    """Tells whether servers compute a layer as one with a layer of these names that follows it."""
    group = fused_group(name)
    if group is None:
        return False
    parent, leaves = group
    after = leaves[leaves.index(name.rpartition(".")[2]) + 1 :]
    return any(join(parent, leaf) in names for leaf in after)


def embedded_modelopt_config(found: Found) -> dict[str, Any]:
    """Returns config.json's quantization_config of ModelOpt, which says what the file says."""
    about = modelopt_config(found)["quantization"]
    keys = ("weights", "input_activations", "targets")
    groups = {
        name: {key: group[key] for key in keys} for name, group in config_groups(found).items()
    }
    about["ignore"] = about.pop("exclude_modules")
    about.pop("kv_cache_quant_algo")
    return {"quant_method": MODELOPT, "producer": PRODUCER, "config_groups": groups, **about}


def write_configuration(
    model: nn.Module, found: Found, folder: Path, format: str, assets: str | None
) -> None:
    """Writes config.json, and what save_pretrained writes beside it; ModelOpt has a file more.

    Args:
        model: its configuration is written where it is one of transformers.
        found: the layers of the folder.
        folder: an existing one.
        format: of the codes.
        assets: a folder with the config.json of a model that has none itself, or None.
    """
    is_modelopt = format == MODELOPT
    about = embedded_modelopt_config(found) if is_modelopt else compressed_tensors_config(found)
    if is_modelopt:
        write_json(folder / "hf_quant_config.json", modelopt_config(found))
    if is_transformers(model):
        pretrained = cast(Any, model)
        config = copy.deepcopy(pretrained.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = str(pretrained.dtype).removeprefix("torch.")
        config.quantization_config = about
        if pretrained.can_generate():
            pretrained.generation_config.save_pretrained(folder)
        config.save_pretrained(folder)
        return
    source = Source("export: adapter", assets, {})
    known = read_json(source, Path(assets, "config.json")) if assets else {}
    write_json(folder / "config.json", known | {"quantization_config": about})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
