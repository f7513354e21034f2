"""Scales of whole tensors in a folder, and the groups of layers that servers compute as one.

A group has one scale in a server. In the folder its layers have one of W where they share an amax
in training, and always one of x.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..nn.names import join
from ..nn.shared_amax import AmaxGroup, fused_group
from ..spec import Spec
from ..tensor.quantized_tensor import QuantizedTensor
from .calibrate import amax_of
from .codes import has_inverse, spec_of_input
from .ranks import of_all_ranks
from .weights import Found, Weight, pattern_of


def require_groups(weights: Sequence[Weight]) -> None:
    """Raises ValueError where a layer of a group that shares an amax was replaced."""
    for weight in weights:
        if (group := weight.amax_group) is not None:
            group.layers(weight.state.recipe)


def shared_amaxes(weights: Sequence[Weight], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Returns the amax, float32 (), of each layer that shares one of W, by the layer's name.

    All ranks call it together.

    Args:
        weights: those of the model.
        dtype: what forwards read them in; None: their own.
    """
    own: dict[str, float] = {}
    members: dict[AmaxGroup, list[str]] = {}
    for weight in weights:
        if (group := weight.amax_group) is not None:
            members.setdefault(group, []).append(weight.layer)
            own[weight.layer] = float(amax_of(weight.local.to(dtype or weight.local.dtype)))
    every = of_all_ranks(own)
    return {
        name: torch.tensor(max(of_rank[n] for of_rank in every for n in names))
        for names in members.values()
        for name in names
    }


def largest_input(
    weight: Weight, weights: Sequence[Weight], amaxes: Mapping[str, Tensor]
) -> Tensor:
    """Returns the largest amax of x among the layers that servers compute as one with this."""
    group = fused_group(weight.layer)
    names = [w.layer for w in weights if group and fused_group(w.layer) == group]
    found = [amaxes[name].cpu() for name in names or [weight.layer] if name in amaxes]
    return torch.stack(found).amax()


# ---- underflow -----------------------------------------------------------------------------------


def underflows_of(
    weights: Sequence[Weight],
    shared: Mapping[str, Tensor],
    amaxes: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> dict[str, str]:
    """Returns why layers of NVFP4 have no scale of the tensor in compressed-tensors, by name.

    All ranks call it together. A weight is gathered only where a part of it is as small.

    Args:
        weights: those of the model.
        shared: amaxes of W that layers share.
        amaxes: of x.
        dtype: what forwards read weights in; None: their own.
    """
    found = {}
    nvfp4 = [weight for weight in weights if weight.storage.scheme.has_global_scale]
    small = [w.layer for w in nvfp4 if underflow(w.spec.text, known_amaxes(w, shared, dtype))]
    for layer in {layer: None for of_rank in of_all_ranks(small) for layer in of_rank}:
        (weight,) = (weight for weight in nvfp4 if weight.layer == layer)
        q = weight.cast(weight.whole(), dtype, weight.whole_amax(shared))
        found[layer] = underflow(weight.spec.text, q.amax.flatten(), "its weight")
    for weight in nvfp4:
        if weight.storage.needs_input_amax:
            spec = spec_of_input(Spec.parse(weight.state.recipe.fprop.a))
            amax = largest_input(weight, weights, amaxes)
            found[weight.layer] = found.get(weight.layer) or underflow(spec, amax[None], "x")
    return {layer: why for layer, why in found.items() if why}


def underflow(spec: str, amaxes: Tensor, what: str = "") -> str:
    """Returns why an amax is too small; an empty text where none is. Zero is not too small."""
    least = amaxes[amaxes > 0]
    if not least.numel() or has_inverse(spec, least.amin()):
        return ""
    return (
        f"expected {what} as zeros, or with an amax whose factor of NVFP4 has an inverse in "
        f"float32, got an amax of {least.amin():.3g}"
    )


def known_amaxes(weight: Weight, shared: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensor:
    """Returns amaxes of the matrices of a parameter; of a part, at most those of the whole."""
    if weight.layer in shared:
        return shared[weight.layer][None]
    if (delayed := weight.delayed_amax) is not None:
        return delayed.flatten()
    local = weight.local
    if isinstance(local, QuantizedTensor):
        return local.direction(weight.spec.text, False).amax.flatten()
    matrices: Iterable[Tensor] = local if local.dim() == 3 else (local,)
    found = [amax_of(matrix.to(dtype or matrix.dtype)) for matrix in matrices]
    return torch.stack(found) if found else local.new_zeros(0)


# ---- groups --------------------------------------------------------------------------------------


def groups_of_other_scales(amaxes: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the layers of each group whose amaxes of W differ."""
    return groups_that_differ({name: float(amax) for name, amax in amaxes.items()})


def groups_of_other_formats(found: Found) -> list[str]:
    """Returns the names of the layers of each group that a folder stores in several ways."""
    storages: dict[str, object] = {}
    for weight in found.weights:
        for part in weight.parts:
            name = pattern_of(part.name) if len(weight.shape) == 3 else part.name
            storages[name] = weight.storage
    return groups_that_differ(storages | dict.fromkeys(found.ignored))


def groups_that_differ(values: Mapping[str, object]) -> list[str]:
    """Returns the names of the layers of each group that have several values."""
    found = []
    for parent, leaves in dict.fromkeys(filter(None, map(fused_group, values))):
        names = [name for leaf in leaves if (name := join(parent, leaf)) in values]
        if any(values[name] != values[names[0]] for name in names):
            found.append(", ".join(names))
    return found
