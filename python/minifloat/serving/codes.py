"""The tensors of a server's layer, from the codes of a parameter.

Codes are the bytes of a forward's cast, and so are scales, but for their layout:

    nvfp4/16x16, mxfp8/32x32     each row of scales is repeated for the rows of its blocks
    NVFP4's tensor scale         compressed-tensors divides by weight_global_scale, ModelOpt
                                 multiplies by weight_scale_2
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import Spec
from ..tensor.quantized import Quantized, quantize, raw_scale
from .schemes import (
    COMPRESSED_TENSORS,
    DIVIDES,
    MODELOPT,
    MULTIPLIES,
    SCALE,
    Scheme,
    Storage,
)
from .weights import Part


def tensors_of(q: Quantized, part: Part, storage: Storage, format: str) -> dict[str, Tensor]:
    """Returns the tensors of a layer's weight by their names within the layer.

    They are on the CPU, or on meta where the codes are.

    Args:
        q: the codes of the whole parameter, (N, K) or (E, N, K).
        part: the rows that the layer has of them.
        storage: of the layer.
        format: of the folder.
    """
    scheme, rows = storage.scheme, part.rows
    device = q.codes.device
    codes, scale, amax = q.codes, raw_scale(q), q.amax
    if len(q.shape) == 3:
        codes, scale = codes[part.expert], scale[part.expert]
        amax = amax[part.expert] if amax.numel() else amax
    codes = codes[rows.to(device)]
    if not scheme.is_packed:
        codes = codes.view(torch.float8_e4m3fn)
    found = {
        scheme.codes_name(format): codes,
        f"weight{SCALE}": scale_of(q.spec, scale, rows, scheme, format),
    }
    if scheme.has_global_scale:
        found |= global_scale("weight", q.spec, amax, format)
    to = device if device.type == "meta" else "cpu"
    return {name: tensor.contiguous().to(to) for name, tensor in found.items()}


def scale_of(text: str, scale: Tensor, rows: Tensor, scheme: Scheme, format: str) -> Tensor:
    """Returns the scales of some rows as a server reads them."""
    spec = Spec.parse(text)
    if scheme.strategy == "tensor":
        return scale.reshape(1 if format == COMPRESSED_TENSORS else ()).clone()
    if scheme.strategy == "channel":
        of_rows = scale[rows.to(scale.device)]
        return of_rows if format == MODELOPT else of_rows[:, None]
    if scheme.block:  # whole blocks: weights.parts_of sees to it
        height = scheme.block[0]
        first, last = int(rows[0]) // height, int(rows[-1]) // height
        blocks = scale[first : last + 1]
        return blocks[:, None, :, None] if format == MODELOPT else blocks
    repeated = scale.repeat_interleave(spec.block[0], 0)[rows.to(scale.device)]
    return repeated.view(torch.float8_e4m3fn) if scheme.has_global_scale else repeated


def global_scale(operand: str, text: str, amax: Tensor, format: str) -> dict[str, Tensor]:
    """Returns the tensor scale of NVFP4: the factor of its values, or the inverse.

    Args:
        operand: "weight" or "input".
        text: of the spec.
        amax: float32 ().
        format: of the folder.
    """
    factor = factor_of(text, amax)
    if format == MODELOPT:
        return {f"weight{MULTIPLIES}" if operand == "weight" else f"input{SCALE}": factor}
    # Servers invert it again. In fp32 the inverse of the inverse of an inverse is the first one.
    return {f"{operand}{DIVIDES}": factor.reciprocal().reshape(1)}


def factor_of(text: str, amax: Tensor) -> Tensor:
    """Returns what values of NVFP4 are multiplied with, float32 (), under an amax."""
    one = torch.full((1, 8), 0x22, dtype=torch.uint8)  # 16 codes of 1
    scale = torch.ones(1, 1).to(torch.float8_e4m3fn)
    # Of codes without values any amax gives the shape.
    amax = torch.ones(()) if amax.is_meta else amax.detach().reshape(()).float().cpu()
    return Quantized(one, scale, amax, text, (1, 16)).dequantize()[0, 0]


def has_inverse(text: str, amax: Tensor) -> bool:
    """Tells whether compressed-tensors' inverse of a factor is finite: above some 8e-36."""
    return bool(torch.isfinite(factor_of(text, amax).reciprocal()))


def spec_of_input(x: Spec) -> str:
    """Returns the spec of NVFP4 by which servers cast x with an amax that is known before."""
    return x.text.replace("/row", "")


def input_tensors(x: Spec, amax: Tensor, storage: Storage, format: str) -> dict[str, Tensor]:
    """Returns the scale of a layer's input that was known before, by its name within the layer."""
    if storage.scheme.has_global_scale:
        return global_scale("input", spec_of_input(x), amax, format)
    scale = quantize(amax.detach().float().cpu().reshape(1, 1), "e4m3/tensor").scale
    return {f"input{SCALE}": scale.reshape(1 if format == COMPRESSED_TENSORS else ())}
