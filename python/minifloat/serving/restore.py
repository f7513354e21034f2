"""mf.restore_: plain layers again, of the values of codes, or of the weights before them."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from os import PathLike

import torch
from torch import Tensor, nn

from ..nn.convert.quantize import require_restorable
from ..nn.convert.quantize import restore_ as restore_layers
from ..nn.grouped_product import product_of
from ..nn.names import unwrapped
from ..nn.registry import is_distributed
from ..nn.state.recipe_state import RecipeState
from ..spec import Spec
from ..tensor.attributes import attributes_of
from ..tensor.directions import TENSORS
from ..tensor.quantized_tensor import QuantizedTensor
from .read_checkpoint import Source, open_folder, same_bytes
from .read_codes import crc_of
from .read_targets import Target, assign, copy_values, problem_of, targets_of

FUNCTION = "restore_"
# Norm of codes' values less the weights, over that of the weights, by the bits of an element. Codes
# of other libraries are not always those of rounding to nearest: NVFP4's are at 0.11, E4M3's at
# 0.027. Weights of another model are at 1.4.
LARGEST_ERROR = {4: 0.25, 8: 0.0625}


def restore_(
    model: nn.Module, weights: str | PathLike[str] | Mapping[str, Tensor] | None = None
) -> nn.Module:
    """Undoes mf.quantize_ and mf.load_quantized_ in place: mf.Linear becomes nn.Linear.

    Parameters stay, except that weights of codes become high-precision ones: the values of their
    codes, or the given weights. With PEFT's adapters on the model, merge_and_unload() then
    publishes these weights and the adapters.

    Args:
        model: one that was converted, or PEFT's around it.
        weights: the checkpoint that the codes were made from, in high precision: a folder of
            safetensors or a state dict, by the names of the model without adapters. Only weights of
            codes are taken. None: the values of the codes.

    Returns:
        The model.

    Raises:
        TypeError: `model` is no module.
        ValueError: FSDP2 gathers a weight as codes; a layer is of a subclass of mf.Linear, which
            was never an nn.Linear; `weights` lacks a weight, has an unknown name, another shape or
            a value that is no tensor, or has weights that are not those of the codes, or codes of a
            checkpoint were written to. The model is unchanged then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
        >>> before = {name: value.clone() for name, value in model.state_dict().items()}
        >>> report = mf.quantize_(model, "mxfp8", primary=True)
        >>> mf.restore_(model, before)
        Sequential(
          (0): Linear(in_features=64, out_features=32, bias=True)
        )
        >>> torch.equal(model[0].weight, before["0.weight"])
        True
    """
    require_restorable(model)
    if weights is not None:
        if isinstance(weights, Mapping):
            source = Source(FUNCTION, "a state dict", weights)
            for name, value in weights.items():
                if not isinstance(value, Tensor):
                    what = type(value).__name__
                    raise source.error(f"weights: {name}: expected a tensor, got {what}")
        else:
            source = open_folder(FUNCTION, weights)
        targets = find_originals(unwrapped(model), source)
        for fqn, target in targets.items():
            require_same_weight(source, fqn, target)
        made: dict[int, nn.Parameter] = {}  # of tied weights one
        for target in targets.values():
            if id(target.tensor) not in made:
                values = read_original(source, target)
                made[id(target.tensor)] = nn.Parameter(values, target.tensor.requires_grad)
                vars(made[id(target.tensor)]).update(attributes_of(target.tensor))
            setattr(target.module, target.name, made[id(target.tensor)])
    return restore_layers(model)


def find_originals(model: nn.Module, source: Source) -> dict[str, Target]:
    """Finds the tensors of each weight of codes.

    Raises:
        ValueError: names or shapes are not those of the model.
    """
    targets, _ = targets_of(model)
    local = {f: getattr(t.tensor, "_local_tensor", t.tensor) for f, t in targets.items()}
    coded = {f: targets[f] for f, tensor in local.items() if isinstance(tensor, QuantizedTensor)}
    if not coded or any(is_distributed(target.tensor) for target in coded.values()):
        got = "sharded ones" if coded else "none"
        raise source.error(f"weights: expected a model with whole weights of codes, got {got}")
    _, unknown = assign(source, model, targets, source.tensors)
    pieces = {id(t.tensor): t.pieces for t in coded.values() if t.pieces}  # tied: under one name
    coded = {f: t._replace(pieces=pieces.get(id(t.tensor), [])) for f, t in coded.items()}
    problems = [f"{name} is unknown" for name in unknown]
    problems += [f"{fqn} is missing" for fqn, target in coded.items() if not target.pieces]
    whys = (problem_of(source, {}, f, t) for f, t in coded.items() if t.pieces)
    problems += [why for why in whys if why is not None]
    if problems:
        expected = f"weights: expected those that {type(model).__name__} has as codes"
        raise source.error_of_list(expected, problems)
    return coded


def read_original(source: Source, target: Target) -> Tensor:
    """Returns the weight in the nominal dtype of its codes, on their device."""
    like = target.tensor
    values = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    copy_values(source, target, values)
    return values


def require_same_weight(source: Source, fqn: str, target: Target) -> None:
    """Raises ValueError where a weight is not the one that its codes were made from."""
    codes, values = target.tensor, read_original(source, target)
    assert isinstance(codes, QuantizedTensor)
    state = product_of(target.module, target.name) or target.module
    if isinstance(state, RecipeState) and state.has_loaded_codes:
        if crc_of(codes) != state.loaded_crc:
            raise source.error(
                f"weights: {fqn}: expected the codes that load_quantized_ read, got ones that were "
                "written to since; call restore_(model), which keeps their values"
            )
        bits = Spec.parse(codes.directions[0].spec).code_bits
        difference = codes.dequantize(torch.float32) - values.float()
        error, norm = difference.norm().item(), values.float().norm().item()
        if not (isfinite(norm) and error <= LARGEST_ERROR[bits] * norm):
            raise source.error(
                f"weights: {fqn}: expected the weight that the checkpoint's codes were made from, "
                f"within {LARGEST_ERROR[bits]} of its norm, got one at {error / (norm or 1):.3g}"
            )
        return
    again = QuantizedTensor.from_tensor(values, *codes.specs)
    differing = [
        name
        for part, other in zip(codes.directions, again.directions)
        for name in TENSORS
        if not same_bytes(getattr(part, name), getattr(other, name))
    ]
    if differing:
        raise source.error(
            f"weights: {fqn}: expected the weight that was cast to its codes, got one with other "
            f"{', '.join(dict.fromkeys(differing))}"
        )
