"""mf.load_quantized_: the weights of a quantized checkpoint as frozen codes of a model's layers.

names      of the checkpoint -> parameters, all of them, before anything is written
layers     converted, each under the recipe's x and gradients, and the codes that it has
weights    read and written one by one: codes and scales as they are, never values
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from ..checks import require_module
from ..nn.convert.filters import require_used
from ..nn.convert.quantize import quantize_, restore_
from ..nn.convert.selection import Report
from ..nn.grouped_product import product_of
from ..nn.names import unwrapped
from ..nn.state.recipe_state import RecipeState, converted
from ..recipe import Product, Recipe, RecipeMap, glob_matches
from ..spec import Spec
from ..tensor.directions import tensors_of
from ..tensor.quantized import Quantized
from ..tensor.quantized_tensor import QuantizedTensor
from .read_checkpoint import Checkpoint, listed
from .read_codes import (
    Names,
    nvfp4_amax,
    nvfp4_factor,
    read_names,
    read_part,
)
from .read_plan import Target, choose_specs, copy_values, plan
from .read_targets import (
    Owned,
    aliases,
    owned_tensors,
)

FUNCTION = "load_quantized_"
IN_HIGH_PRECISION = "the checkpoint has it in high precision"
NO_GLOB = "no glob of the recipe map matches"  # of a report
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
DECODED = "bf16"  # what dgrad reads of codes whose blocks do not run along its contraction


def load_quantized_(
    model: nn.Module,
    folder: object,
    recipe: str | Recipe | RecipeMap = "bf16",
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Report:
    """Loads a quantized checkpoint, whose codes become the frozen weights of converted layers.

    It reads compressed-tensors' and ModelOpt's NVFP4, MXFP4, MXFP8 and FP8, transformers' `fp8`
    (DeepSeek-V3) and gpt-oss's MXFP4. A weight is never computed in high precision: a
    QuantizedTensor has the checkpoint's codes and scales. All other tensors are loaded too.

    The recipe says how x and gradients are cast. In its place for W each layer has the codes of the
    checkpoint, which nothing rounds again: fprop reads them, dgrad their transpose where that has
    the same codes, else their values (docs/lora.md).

    Args:
        model: a plain one, in float32 or bfloat16, whose parameters may be on meta.
        folder: of safetensors, with config.json.
        recipe: of x and gradients: one for all layers, or a map from module names. A layer without
            a recipe has "bf16".
        device: of parameters that are on meta; None: the CPU.
        seed: of stochastic rounding, 64 bits with sign.

    Returns:
        The names of layers with codes and their recipes, and of others with reasons.

    Raises:
        TypeError: `model` is no module.
        ValueError: the folder is no quantized checkpoint of a known kind, a tensor is missing,
            unknown or of another shape, no codes here have a weight's values, or a layer that has
            codes cannot be converted. The model is unchanged then.
        OSError: a file cannot be read.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> mf.load_quantized_(model, "no such folder")
        Traceback (most recent call last):
        ValueError: load_quantized_: expected a folder of safetensors, got no such folder
    """
    model = unwrapped(require_module(FUNCTION, model))
    if found := [fqn for fqn, _ in converted(model)]:
        raise ValueError(f"{FUNCTION}: expected a plain model, got {listed(found)} converted")
    checkpoint = Checkpoint(FUNCTION, folder)
    checkpoint.require_method()
    names = read_names(checkpoint)
    codes, plain, left_out = plan(model, checkpoint, names)
    specs = choose_specs(checkpoint, names, codes)
    recipes = recipes_of(model, RecipeMap(recipe), codes, specs)
    report = convert(model, recipes, codes, seed)
    for fqn, target in codes.items():
        write_codes(checkpoint, names, target, specs[fqn], torch.device(device or "cpu"))
    ties = aliases(owned_tensors(model)[0])
    owned = owned_tensors(model)[0]
    for target in plain.values():
        others = [owned[name] for name in ties.get(id(target.own.tensor), [])]
        write_plain(checkpoint, target, others, torch.device(device or "cpu"))
    notes = [
        ("", f"{len(group)} {what}, such as {group[0]}")
        for group, what in (
            (names.ignored, "scales of activations are not read: x is scaled by its own values"),
            (left_out, "tensors are not read, which the model's class leaves out"),
        )
        if group
    ]
    return replace(report, notes=[*report.notes, *notes])


# ---- recipes -----------------------------------------------------------------------------------


def recipe_on_codes(recipe: Recipe, spec: str) -> Recipe:
    """Returns a recipe with the codes of a checkpoint as W.

    Raises:
        ValueError: x or g of the recipe cannot be multiplied with them.
    """
    fprop, dgrad = recipe.fprop, recipe.dgrad

    def product(a: str, b: str, fast: bool) -> Product:
        rules = {Spec.parse(a).rule, Spec.parse(b).rule}
        return Product(a, b, fast and rules <= {"tensor", "row"})

    is_read = Spec.parse(spec).transposes_exactly and not Spec.parse(dgrad.a).is_bf16
    backward = product(dgrad.a, spec if is_read else DECODED, is_read and dgrad.fast)
    return Recipe(
        f"fprop={product(fprop.a, spec, fprop.fast)} dgrad={backward} wgrad={recipe.wgrad}"
    )


def recipes_of(
    model: nn.Module, recipes: RecipeMap, codes: dict[str, Target], specs: dict[str, str]
) -> RecipeMap:
    """Returns the recipe of each module that has codes, by name."""
    fqns = [fqn for fqn, _ in model.named_modules()]
    unused = [g for g, _ in recipes.entries if not any(glob_matches(g, fqn) for fqn in fqns)]
    require_used("recipe", "globs of names of this model's modules", unused, fqns)
    texts = {}
    for fqn in codes:
        module = fqn.rpartition(".")[0]
        given = recipes.find(module) or Recipe("bf16")
        try:
            texts[module] = recipe_on_codes(given, specs[fqn]).text
        except ValueError as error:
            raise ValueError(
                f"{FUNCTION}: {module}: expected a recipe of x and gradients beside the "
                f"checkpoint's {specs[fqn]}, got {given}: {error}"
            ) from None
    return RecipeMap("; ".join(f"{module}: {text}" for module, text in texts.items()))


def convert(model: nn.Module, recipes: RecipeMap, codes: dict[str, Target], seed: int) -> Report:
    """Converts the layers that have codes, and no others.

    Raises:
        ValueError: one of them cannot be converted. The model is unchanged then.
    """
    report = quantize_(model, recipes, keep="nothing", seed=seed)
    rows = {name for name, _ in report.converted}
    reasons = dict(report.skipped)
    left = {}
    for fqn in codes:
        module = fqn.rpartition(".")[0]
        if not {fqn, module} & rows:
            left[fqn] = reasons.get(fqn) or reasons.get(module) or "no layer reads it"
    extra = [
        row
        for row in rows
        if row not in codes and f"{row}.weight" not in codes  # such as one of two of experts
    ]
    if left or extra:
        restore_(model)
        what = [f"{fqn}: {why}" for fqn, why in left.items()] + [
            f"{row}: no codes" for row in extra
        ]
        raise ValueError(
            f"{FUNCTION}: expected layers that read the checkpoint's codes, got {listed(what)}"
        )
    skipped = [(n, IN_HIGH_PRECISION if why == NO_GLOB else why) for n, why in report.skipped]
    return replace(report, skipped=skipped)


# ---- tensors -------------------------------------------------------------------------------------


def device_of(own: Owned, device: torch.device) -> torch.device:
    return device if own.tensor.is_meta else own.tensor.device


def write_codes(
    checkpoint: Checkpoint, names: Names, target: Target, spec: str, device: torch.device
) -> None:
    """Makes a parameter of codes and scales, of each piece in turn."""
    own, parsed = target.own, Spec.parse(spec)
    device = device_of(own, device)
    *experts, n, k = target.shape
    kinds = tensors_of(parsed, n, k)
    codes, scale, amax = (
        torch.empty((0,) if shape == (0,) else (*experts, *shape), dtype=dtype, device=device)
        for dtype, shape in kinds.values()
    )
    for piece in target.pieces:
        weight = names.weights[piece.source]
        of_codes, of_scale = read_part(checkpoint, weight, spec)
        begin = piece.part * (n // piece.parts)
        is_whole = piece.expert is None
        index = () if is_whole else (piece.expert,)
        rows = slice(begin, begin + n // piece.parts)
        codes[(*index, ...)][..., rows, :].copy_(of_codes)
        block = max(parsed.block[0], 1)
        if parsed.has_blocks:
            first = begin // block
            part = raw(scale)[(*index, ...)][..., first : first + of_scale.shape[-2], :]
        elif parsed.amax_of == "row":
            part = scale[(*index, ...)][..., rows]
        else:
            part = scale[(*index, ...)]
        part.copy_(raw(of_scale))
        if weight.factor is not None:
            factors, divides = nvfp4_factor(checkpoint, weight)
            values = [cast(float, nvfp4_amax(spec, f, divides)) for f in factors]
            amax[(*index, ...)].copy_(torch.tensor(values).reshape(amax[(*index, ...)].shape))
    if not parsed.has_blocks:
        amax.copy_(scale * E4M3_MAX)
    quantized = Quantized(codes, scale, amax, spec, target.shape, target.is_row_major)
    rowwise, columnwise = (None, quantized) if target.is_row_major else (quantized, None)
    weight_of_codes = QuantizedTensor(rowwise, columnwise, own.tensor.dtype)
    setattr(own.module, own.name, nn.Parameter(weight_of_codes, requires_grad=False))
    state = own.module if isinstance(own.module, RecipeState) else product_of(own.module, own.name)
    assert state is not None
    state.has_loaded_codes = True


def raw(scale: Tensor) -> Tensor:
    """Returns scales in a dtype that copies on every device."""
    return scale.view(torch.uint8) if scale.element_size() == 1 else scale


@torch.no_grad()
def write_plain(
    checkpoint: Checkpoint, target: Target, owners: list[Owned], device: torch.device
) -> None:
    """Copies the values of a parameter or a buffer. One on meta gets memory, in all its owners."""
    own, tensor = target.own, target.own.tensor
    if tensor.is_meta:
        values: Tensor = torch.empty_like(tensor, device=device)
        if own.is_parameter:
            values = nn.Parameter(values, requires_grad=tensor.requires_grad)
        for other in owners:
            setattr(other.module, other.name, values)
        tensor = values
    copy_values(checkpoint, target, tensor)
