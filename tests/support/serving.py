"""What a server computes from the bytes of a quantized weight, without code of the library.

A weight is codes and scales as compressed-tensors stores them (nvfp4-pack-quantized,
mxfp4-pack-quantized, float-quantized by blocks): a value is code x scale, of NVFP4 divided by
weight_global_scale. Activations are quantized a token at a time by the casts of oracle.py. Sums are
float64, and the result is rounded to fp32, multiplied by the factors of W and of each token in
fp32, and rounded to bf16.

Shape suffixes: M tokens, K input features, N output features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.support import oracle

F32 = np.float32
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def fp4_values(packed: Tensor) -> Tensor:
    """Unpacks two E2M1 codes a byte, the even column in the low nibble."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return E2M1[codes & 7] * (1 - 2 * (codes >> 3))


@dataclass(frozen=True)
class Operand:
    """Values before the factors that multiply a whole sum.

    Args:
        values: float64 (rows, K).
        factors: fp32, (rows, 1), or (1, 1) of all rows.
    """

    values: Tensor
    factors: Tensor


def operand_of(codes: Tensor, scale: Tensor, amax: Tensor, spec: str) -> Operand:
    """Decodes the bytes of an operand.

    Args:
        codes: uint8 (rows, bytes of a row).
        scale: float32, or the bytes of E4M3 or E8M0, (rows of blocks, columns of blocks).
        amax: float32, of the tensor or of each row; weight_global_scale is 2688 / amax.
        spec: nvfp4, nvfp4/row, mxfp4, e4m3/1x128+exact or e4m3/128x128+exact.
    """
    one = torch.ones(1, 1)
    if spec.startswith("nvfp4"):
        scales = scale.view(torch.float8_e4m3fn).double()
        # torch computes number / tensor as a product with the reciprocal.
        global_scale = torch.tensor(2688.0) / amax.float()
        factors = (torch.tensor(1.0) / global_scale).view(-1, 1)
        return Operand(fp4_values(codes) * scales.repeat_interleave(16, 1), factors)
    if spec == "mxfp4":
        scales = torch.exp2(scale.view(torch.uint8).double() - 127)
        return Operand(fp4_values(codes) * scales.repeat_interleave(32, 1), one)
    values = codes.view(torch.float8_e4m3fn)
    rows, cols = values.shape
    scales = scale.repeat_interleave(128, 1)[:, :cols]
    if spec.startswith("e4m3/128x128"):
        scales = scales.repeat_interleave(128, 0)[:rows]
    return Operand((values.float() * scales).double(), one)


def quantize_tokens(x_MK: Tensor, spec: str) -> Operand:
    """Quantizes activations as a server does, each token alone; under bf16 they stay values."""
    if spec == "bf16":
        return Operand(x_MK.double(), torch.ones(1, 1))
    cast = oracle.quantize(x_MK.float().numpy(), spec)[:3]  # without an amax where blocks have one
    tensors = [torch.from_numpy(np.array(a if a is not None else F32(0))) for a in cast]
    return operand_of(*tensors, spec)


def linear(x: Operand, w: Operand) -> Tensor:
    """Multiplies operands, and rounds to bf16 as a GEMM with fp32 sums does."""
    sums = (x.values @ w.values.t()).float()
    return (sums * w.factors.t() * x.factors).bfloat16()
