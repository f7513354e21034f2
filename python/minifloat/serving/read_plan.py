"""The plan of a load: which parameter has which tensors of a checkpoint, in which spec.

All errors about names, shapes and formats are raised here, from the files' headers and NVFP4's
factors, before a model changes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..moe.convert.projections import is_row_major
from ..nn.state.recipe_state import WEIGHT_DTYPES
from ..spec import Spec
from .read_checkpoint import Checkpoint, listed
from .read_codes import NVFP4, ROW, TENSOR, Names, Stored, choose_nvfp4, nvfp4_factor
from .read_targets import (
    Owned,
    Piece,
    aliases,
    finder_of_pieces,
    ignored_by,
    missing_pieces,
    owned_tensors,
)

MOST = 8  # problems that an error lists


class Target(NamedTuple):
    """A parameter, and what the checkpoint has of it."""

    own: Owned
    pieces: list[Piece]
    is_row_major: bool = False  # whether the parameter is (E, K, N), the transpose of the codes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices as the checkpoint has them."""
        shape = tuple(self.own.tensor.shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_row_major else shape

    def expected(self) -> tuple[int, ...]:
        """Returns the shape of each piece."""
        shape = self.shape
        if self.pieces[0].expert is not None:
            shape = (shape[1] // self.pieces[0].parts, *shape[2:])
        return shape


# ---- names ---------------------------------------------------------------------------------------


def plan(
    model: nn.Module, checkpoint: Checkpoint, names: Names
) -> tuple[dict[str, Target], dict[str, Target], list[str]]:
    """Finds the parameter of each tensor: quantized ones, others, and names that are left out.

    Raises:
        ValueError: names or shapes are not those of the model.
    """
    owned, lost = owned_tensors(model)
    find, is_ignored = finder_of_pieces(checkpoint.function, model), ignored_by(model)
    found: tuple[dict[str, Target], dict[str, Target]] = {}, {}
    unknown, left_out = [], []
    for targets, sources in zip(found, (names.weights, names.plain)):
        for source in sources:
            fqn, piece = find(source)
            own = owned.get(fqn)
            if own is not None:
                row_major = targets is found[0] and is_transposed(own)
                targets.setdefault(fqn, Target(own, [], row_major)).pieces.append(piece)
            elif is_ignored(source) or is_ignored(fqn):
                left_out.append(source)
            else:
                unknown.append(source)
    codes, plain = found
    for tied in aliases(owned).values():  # one of the names of a tied tensor is enough
        if not any(name in codes or name in plain for name in tied):
            lost.append(tied[0])
    problems = [f"{n} is unknown" for n in unknown] + [f"{n} is missing" for n in lost]
    problems += [f"{n} is both" for n in codes.keys() & plain.keys()]
    problems += [
        why
        for targets in found
        for fqn, target in targets.items()
        if (why := problem_of(checkpoint, names, fqn, target)) is not None
    ]
    if not codes:
        problems.append("no quantized weight")
    if problems:
        more = f" and {len(problems) - MOST} more" if len(problems) > MOST else ""
        raise checkpoint.error(
            f"expected the tensors of {type(model).__name__} in {checkpoint.folder}, got: "
            f"{'; '.join(problems[:MOST])}{more}"
        )
    return codes, plain, left_out


def is_transposed(own: Owned) -> bool:
    """Tells whether a parameter of experts is (E, K, N)."""
    has_both = all(hasattr(own.module, name) for name in ("gate_up_proj", "down_proj"))
    return own.tensor.dim() == 3 and has_both and bool(is_row_major(own.module))


def problem_of(checkpoint: Checkpoint, names: Names, fqn: str, target: Target) -> str | None:
    """Returns why a parameter cannot have these pieces; None where it can."""
    own = target.own
    if (why := missing_pieces(target.pieces, own.tensor.shape)) is not None:
        return f"{fqn} has {why}"
    first, wanted = target.pieces[0], target.expected()
    if first.parts * wanted[0] != target.shape[first.expert is not None]:
        return f"{fqn} has rows that {first.parts} tensors do not share"
    for source, *_ in target.pieces:
        weight = names.weights.get(source)
        shape = weight.shape if weight else checkpoint.shape(source)
        if shape != wanted:
            return f"{source} is {shape}, not {wanted}"
        if weight is None:
            dtype = checkpoint.dtype(source)
            kept = isinstance(dtype, torch.dtype) and (
                dtype.itemsize > 1 and dtype.is_floating_point == own.tensor.is_floating_point()
            )
            if not kept and dtype != own.tensor.dtype:
                return f"{source} is {dtype} without scales, not {own.tensor.dtype}"
    if first.source in names.weights:
        is_linear = own.name == "weight" and type(own.module) is nn.Linear
        if not (is_linear or own.tensor.dim() == 3) or own.tensor.dtype not in WEIGHT_DTYPES:
            what = f"{type(own.module).__name__} in {own.tensor.dtype}"
            return f"{fqn} has codes, for a linear layer or experts in bfloat16, not a {what}"
    return None


# ---- specs ---------------------------------------------------------------------------------------


def choose_specs(checkpoint: Checkpoint, names: Names, codes: dict[str, Target]) -> dict[str, str]:
    """Chooses the spec of each quantized parameter; those of one module have one.

    Raises:
        ValueError: the parts of a parameter have no common spec, or no codes here have its values.
    """
    modules: dict[int, list[str]] = {}
    for fqn, target in codes.items():
        modules.setdefault(id(target.own.module), []).append(fqn)
    specs = {}
    for fqns in modules.values():
        targets = [codes[fqn] for fqn in fqns]
        pieces = [piece for target in targets for piece in target.pieces]
        weights = [names.weights[piece.source] for piece in pieces]
        found = {weight.spec for weight in weights}
        if found <= {TENSOR, ROW} and (len(found) > 1 or any(p.parts > 1 for p in pieces)):
            found = {ROW}  # of gate and up, which have a scale each
        if len(found) > 1:
            raise checkpoint.error(
                f"{', '.join(fqns)}: expected codes of one format, got {listed(found)}"
            )
        (spec,) = found
        if spec == NVFP4:
            spec = choose_nvfp4_spec(checkpoint, fqns, weights)
            for fqn, target in zip(fqns, targets):
                require_shared_factors(checkpoint, names, fqn, target)
        for fqn, target in zip(fqns, targets):
            rows = target.expected()[-2]
            if target.pieces[0].parts > 1 and rows % max(Spec.parse(spec).block[0], 1):
                raise checkpoint.error(
                    f"{fqn}: expected parts of whole blocks of {spec}, got {rows} rows"
                )
            specs[fqn] = spec
    return specs


def choose_nvfp4_spec(checkpoint: Checkpoint, fqns: list[str], weights: list[Stored]) -> str:
    factors = [
        (value, divides)
        for weight in weights
        for values, divides in [nvfp4_factor(checkpoint, weight)]
        for value in values
    ]
    spec = choose_nvfp4(factors)
    if spec is None:
        raise checkpoint.error(
            f"{', '.join(fqns)}: expected factors that an amax gives, such as 2688 / "
            f"amax, with equal values in bfloat16, got {factors[:4]}"
        )
    return spec


def require_shared_factors(checkpoint: Checkpoint, names: Names, fqn: str, target: Target) -> None:
    """Raises ValueError where gate and up of an expert have two factors: here a matrix has one."""
    of_experts: dict[int | None, set[tuple[float, ...]]] = {}
    for piece in target.pieces:
        factors, _ = nvfp4_factor(checkpoint, names.weights[piece.source])
        of_experts.setdefault(piece.expert, set()).add(tuple(factors))
    differing = [str(e) for e, factors in of_experts.items() if len(factors) > 1]
    if differing:
        raise checkpoint.error(
            f"{fqn}: expected one factor for gate and up of an expert, got two in "
            f"experts {listed(differing)}"
        )


def copy_values(checkpoint: Checkpoint, target: Target, tensor: Tensor) -> None:
    """Copies a parameter's values from the tensors that it has in the checkpoint."""
    for piece in target.pieces:
        part = tensor if piece.expert is None else tensor[piece.expert]
        if piece.parts > 1:
            part = part.chunk(piece.parts)[piece.part]
        part.copy_(checkpoint.read(piece.source))
