"""Which parameter of a model a checkpoint's tensor is, or which part of one.

    q_proj.weight                       the parameter of that name
    experts.3.gate_proj.weight          matrix 3, upper half of the rows, of experts.gate_up_proj

transformers' models say how names of checkpoints become theirs. Of its operations those are known
that merge the matrices of experts, and join gate and up.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

EXPERT = re.compile(r"\.(\d+)\.")
PEFT_PREFIX, PEFT_PART = "base_model.model.", "base_layer"


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


class Owned(NamedTuple):
    """A parameter or a buffer, and where it is."""

    module: nn.Module
    name: str
    tensor: Tensor
    is_parameter: bool


def plain_name(fqn: str) -> str:
    """Returns a name without what PEFT puts before and into it."""
    parts = fqn.removeprefix(PEFT_PREFIX).split(".")
    return ".".join(part for part in parts if part != PEFT_PART)


def owned_tensors(model: nn.Module) -> tuple[dict[str, Owned], list[str]]:
    """Finds what a checkpoint has of a model: parameters and persistent buffers, by name.

    Returns:
        These, and the names of other buffers that are on meta.
    """
    found: dict[str, Owned] = {}
    lost = []
    for raw, module in model.named_modules(remove_duplicate=False):
        prefix = plain_name(raw + ".").rstrip(".")
        for is_parameter, tensors in ((True, module._parameters), (False, module._buffers)):
            for name, tensor in tensors.items():
                fqn = f"{prefix}.{name}" if prefix else name
                if tensor is None:
                    continue
                if is_parameter or name not in module._non_persistent_buffers_set:
                    found[fqn] = Owned(module, name, tensor, is_parameter)
                elif tensor.is_meta:
                    lost.append(fqn)
    return found, lost


def transformers_model(model: nn.Module) -> Any:
    """Returns the model of transformers that this is, or that PEFT wraps; None: neither."""
    if "transformers" not in sys.modules:
        return None
    cls = sys.modules["transformers"].PreTrainedModel
    inner = getattr(getattr(model, "base_model", None), "model", None)
    return next((m for m in (model, inner) if isinstance(m, cls)), None)


def finder_of_pieces(function: str, model: nn.Module) -> Callable[[str], tuple[str, Piece]]:
    """Returns a function from a checkpoint's name to a parameter's, and the part that it is."""
    hf = transformers_model(model)
    if hf is None:
        return lambda source: (source, Piece(source))
    from transformers.conversion_mapping import get_model_conversion_mapping

    renamings: list[Any] = []
    converters: list[Any] = []
    for transform in get_model_conversion_mapping(hf):
        (converters if hasattr(transform, "operations") else renamings).append(transform)

    def find(source: str) -> tuple[str, Piece]:
        name = source
        for renaming in renamings:
            name = renaming.rename_source_key(name)[0]
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return target, piece_of(function, source, name, pattern, converter)
        return name, Piece(source)

    return find


def piece_of(function: str, source: str, name: str, pattern: str, converter: Any) -> Piece:
    """Returns the part that transformers' operations make of a tensor."""
    operations = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    index = EXPERT.search(name, name.find(".experts."))
    known = [("MergeModulelist", 0), ("Concatenate", 1)]
    patterns = [p for p in converter.source_patterns]
    if operations != known[: len(operations)] or not operations or index is None:
        raise ValueError(
            f"{function}: {source}: expected a tensor that is a parameter, or a matrix of experts, "
            f"got transformers' operations {[op for op, _ in operations]}"
        )
    return Piece(source, int(index[1]), patterns.index(pattern), len(patterns))


def ignored_by(model: nn.Module) -> Callable[[str], bool]:
    """Returns a function that tells which of a checkpoint's names the model's class leaves out."""
    patterns = getattr(transformers_model(model), "_keys_to_ignore_on_load_unexpected", None) or ()
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def missing_pieces(pieces: Iterable[Piece], shape: tuple[int, ...]) -> str | None:
    """Returns what the pieces of one parameter lack, or have twice; None: nothing."""
    listed = sorted((p.expert, p.part) if p.expert is not None else (0, 0) for p in pieces)
    first = next(iter(pieces))
    if first.expert is None:
        return None if len(listed) == 1 else "two tensors"
    wanted = [(e, part) for e in range(shape[0]) for part in range(first.parts)]
    return None if listed == wanted else f"{len(listed)} of {len(wanted)} matrices"


def aliases(owned: Mapping[str, Owned]) -> dict[int, list[str]]:
    """Returns the names of each tensor, by its id: several where it is tied."""
    names: dict[int, list[str]] = {}
    for fqn, own in owned.items():
        names.setdefault(id(own.tensor), []).append(fqn)
    return names
