"""Which parameter of a model a checkpoint's tensor is, or which part of one.

    q_proj.weight                       the parameter of that name
    experts.3.gate_proj.weight          matrix 3, upper half of the rows, of experts.gate_up_proj
    experts.3.w1.weight                 matrix 3 of experts.w1, or gate of experts.w13

transformers' models say how names of checkpoints become theirs. Of its operations those are known
that merge the matrices of experts, and join gate and up. Other models have the names of mf.export.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..moe.convert.projections import NAMES, ProjectionExperts, is_row_major
from ..nn.names import join
from ..nn.state.recipe_state import WEIGHT_DTYPES
from ..tensor.attributes import attributes_of
from .read_checkpoint import Source
from .read_codes import Stored
from .weights import GATE_AND_UP, SUFFIX, is_transformers, own_parts

EXPERT = re.compile(r"\.(\d+)\.")
MATRIX = re.compile(r"(?:(.*)\.)?(\d+)\.(\w+)" + re.escape(SUFFIX))  # of experts
PEFT_PARTS = ("base_layer", "original_module", "token_adapter")  # of names: what PEFT wraps
PEFT_COPIES = "modules_to_save"
ADAPTED = "AdaptedAttention"  # PEFT's class of adaption prompts: its `model` is the attention
MERGES = [("MergeModulelist", 0), ("Concatenate", 1)]  # transformers' operations, and their dims


class Piece(NamedTuple):
    """A tensor of a checkpoint within a parameter.

    Args:
        source: its name in the checkpoint; of a quantized weight, the parameter's part of it.
        expert: the matrix that it is of the parameter; None: the parameter itself.
        part: its number among the tensors that are joined along the rows.
        parts: how many those are.
    """

    source: str
    expert: int | None = None
    part: int = 0
    parts: int = 1

    def within(self, tensor: Tensor) -> Tensor:
        """Returns the view of a parameter's tensor, or of its scales, that the piece is."""
        part = tensor if self.expert is None else tensor[self.expert]
        return part.chunk(self.parts)[self.part] if self.parts > 1 else part


class Target(NamedTuple):
    """A parameter or a buffer, and what a checkpoint has of it.

    Args:
        module: its owner.
        name: in the owner.
        tensor: it.
        is_row_major: whether it is (E, K, N), the transpose of the codes of experts.
        pieces: of the checkpoint.
    """

    module: nn.Module
    name: str
    tensor: Tensor
    is_row_major: bool
    pieces: list[Piece]

    def shape(self, is_coded: bool) -> tuple[int, ...]:
        """Returns the shape as the checkpoint has it, of all pieces together."""
        is_transposed = is_coded and self.is_row_major
        return tuple((self.tensor.mT if is_transposed else self.tensor).shape)


def targets_of(model: nn.Module) -> tuple[dict[str, Target], list[str]]:
    """Finds what a checkpoint has of a model: parameters and persistent buffers, by name.

    Returns:
        These, and the names of other buffers that are on meta.
    """
    found, lost = {}, []
    for path, module in modules_of(model):
        row_major = ProjectionExperts.fits(module) and bool(is_row_major(module))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            fqn = join(path, name)
            if tensor is None:
                continue
            if name not in module._non_persistent_buffers_set:
                of_experts = row_major and name in NAMES
                found[fqn] = Target(module, name, tensor, of_experts, [])
            elif tensor.is_meta:
                lost.append(fqn)
    return found, lost


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a model by their names without what PEFT puts before and into them.

    Left out are the copies of modules that PEFT trains in their place.
    """
    _, prefix = without_peft(model)
    wrappers: dict[str, tuple[str, ...]] = {}  # PEFT's modules -> the parts of names after them
    for raw, module in model.named_modules(remove_duplicate=False):
        if any(kind.__module__.startswith("peft.") for kind in type(module).__mro__):
            wrappers[raw] = ("model",) if type(module).__name__ == ADAPTED else PEFT_PARTS
        parts = raw.split(".")
        dropped = [wrappers.get(".".join(parts[:i]), ()) for i in range(len(parts))]
        if any(part == PEFT_COPIES and of_peft for part, of_peft in zip(parts, dropped)):
            continue
        parts = [part for part, of_peft in zip(parts, dropped) if part not in of_peft]
        yield f"{'.'.join(parts)}.".removeprefix(prefix)[:-1], module


def without_peft(model: nn.Module) -> tuple[nn.Module, str]:
    """Returns the model that PEFT wraps, and the start of its names; else the model and ""."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return model, ""
    inner = cast(Any, model.base_model)
    if getattr(model, "_is_prompt_learning", False):
        return inner, "base_model."
    return inner.model, "base_model.model."


def transformers_model(model: nn.Module) -> Any:
    """Returns the model of transformers that this is, or that PEFT wraps; None: neither."""
    inner, _ = without_peft(model)
    return inner if is_transformers(inner) else None


def own_piece(targets: dict[str, Target], name: str) -> tuple[str, Piece]:
    """Returns the parameter of a model that is not of transformers, and the part that it is."""
    matrix = MATRIX.fullmatch(name)
    if name in targets or matrix is None:
        return name, Piece(name)
    parent, expert, key = matrix.groups()
    for leaf in (key, GATE_AND_UP):
        fqn = join(parent or "", leaf)
        if fqn in targets and targets[fqn].tensor.dim() == 3:
            keys = own_parts(targets[fqn].module, leaf)
            if key in keys:
                return fqn, Piece(name, int(expert), keys.index(key), len(keys))
    return name, Piece(name)


def finder_of_pieces(
    source: Source, model: nn.Module, targets: dict[str, Target]
) -> Callable[[str], tuple[str, Piece]]:
    """Returns a function from a checkpoint's name to a parameter's, and the part that it is."""
    hf = transformers_model(model)
    if hf is None:
        return partial(own_piece, targets)
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms: list[Any] = get_model_conversion_mapping(hf)

    def find(name: str) -> tuple[str, Piece]:
        renamed = name
        for renaming in (t for t in transforms if not hasattr(t, "operations")):
            renamed = renaming.rename_source_key(renamed)[0]
        for converter in (t for t in transforms if hasattr(t, "operations")):
            target, pattern = converter.rename_source_key(renamed)
            if pattern is None:
                continue
            operations = [
                (type(op).__name__, getattr(op, "dim", None)) for op in converter.operations
            ]
            index = EXPERT.search(renamed, renamed.find(".experts."))
            if not operations or operations != MERGES[: len(operations)] or index is None:
                raise source.error(
                    f"{name}: expected a tensor that is a parameter, or a matrix of experts, got "
                    f"transformers' operations {operations}"
                )
            patterns = list(converter.source_patterns)
            return target, Piece(name, int(index[1]), patterns.index(pattern), len(patterns))
        return renamed, Piece(name)

    return find


def assign(
    source: Source, model: nn.Module, targets: dict[str, Target], names: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Gives each named tensor to the parameter that it is of.

    Returns:
        The names that the model's class leaves out, and those that are unknown.
    """
    find = finder_of_pieces(source, model, targets)
    patterns = getattr(transformers_model(model), "_keys_to_ignore_on_load_unexpected", None) or ()
    left_out, unknown = [], []
    for name in names:
        fqn, piece = find(name)
        if fqn in targets:
            targets[fqn].pieces.append(piece)
        elif any(re.search(pattern, n) for pattern in patterns for n in (name, fqn)):
            left_out.append(name)
        else:
            unknown.append(name)
    return left_out, unknown


def problem_of(source: Source, weights: dict[str, Stored], fqn: str, target: Target) -> str | None:
    """Returns why a parameter cannot have its pieces; None where it can.

    weights: the quantized ones of the checkpoint.
    """
    pieces, tensor = target.pieces, target.tensor
    is_coded = pieces[0].source in weights
    shape, first = target.shape(is_coded), pieces[0]
    count = 1 if first.expert is None else shape[0] * first.parts
    places = {(p.expert, p.part) for p in pieces if p.expert is None or p.expert < shape[0]}
    if len(places) < count:
        return f"{fqn} has {len(places)} of {count} tensors"
    if len(pieces) > count:
        return f"{fqn} has {len(pieces)} tensors, not {count}"
    wanted = shape if first.expert is None else (shape[1] // first.parts, *shape[2:])
    for name, *_ in pieces:
        stored = weights.get(name) or source.tensors[name]
        if tuple(stored.shape) != wanted or isinstance(stored, Stored) != is_coded:
            return f"{name} is {tuple(stored.shape)}, not {wanted}"
        if isinstance(stored, Tensor) and stored.dtype != tensor.dtype:
            is_float = stored.is_floating_point() and tensor.is_floating_point()
            if not is_float or stored.itemsize == 1:
                return f"{name} is {stored.dtype} without scales, not {tensor.dtype}"
    is_linear = target.name == "weight" and type(target.module) is nn.Linear
    if is_coded and not ((is_linear or tensor.dim() == 3) and tensor.dtype in WEIGHT_DTYPES):
        what = f"{type(target.module).__name__} in {tensor.dtype}"
        return f"{fqn} has codes, for a linear layer or experts in bfloat16, not a {what}"
    return None


def kept_in_float32(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns the tensors that transformers keeps in float32 in a model in bfloat16."""
    found = []
    for path, module in modules_of(model):
        patterns = cast(Any, module)._keep_in_fp32_modules_strict if is_transformers(module) else ()
        for pattern in patterns or ():
            own = (name for name in names if not path or name.startswith(f"{path}."))
            found += [name for name in own if re.search(pattern.replace("*", ".*"), name)]
    return found


@torch.no_grad()
def copy_values(source: Source, target: Target, tensor: Tensor) -> None:
    """Copies a parameter's values from the tensors that it has in the checkpoint."""
    for piece in target.pieces:
        piece.within(tensor).copy_(source.tensors[piece.source])


def write_values(
    source: Source,
    target: Target,
    in_float32: bool,
    memory: torch.device,
    made: dict[int, Tensor],
) -> None:
    """Copies the values of a parameter or a buffer. One on meta gets memory.

    in_float32: whether one in bfloat16 is replaced by one in float32.
    """
    tensor = target.tensor
    dtype = torch.float32 if in_float32 and tensor.dtype == torch.bfloat16 else tensor.dtype
    values = made.get(id(tensor), tensor)
    if values.is_meta or values.dtype != dtype:
        device = memory if tensor.is_meta else tensor.device
        values = torch.empty_like(tensor, dtype=dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, tensor.requires_grad)
        vars(values).update(attributes_of(tensor))
        made[id(tensor)] = values
    copy_values(source, target, values)
    if values is not tensor:
        setattr(target.module, target.name, values)
