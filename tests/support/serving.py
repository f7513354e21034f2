"""What a server computes from the bytes of a folder, without code of the library.

A weight is codes and scales as compressed-tensors stores them (nvfp4-pack-quantized,
mxfp4-pack-quantized, float-quantized by blocks): a value is code x scale, of NVFP4 divided by
weight_global_scale. Activations are quantized a token at a time by the casts of oracle.py. Sums are
float64, and the result is rounded to fp32, multiplied by the factors of W and of each token in
fp32, and rounded to bf16.

Shape suffixes: M tokens, K input features, N output features.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support import oracle

F32 = np.float32
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def fp4_values(packed: Tensor) -> Tensor:
    """Unpacks two E2M1 codes a byte, the even column in the low nibble."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return E2M1[codes & 7] * (1 - 2 * (codes >> 3))


def fp8_values(codes: Tensor, scale: Tensor, height: int) -> Tensor:
    """Returns float64 of E4M3 codes (rows, K) and fp32 scales of blocks of height x 128."""
    rows, cols = codes.shape
    scales = scale.repeat_interleave(128, 1)[:, :cols].repeat_interleave(height, 0)[:rows]
    return (codes.float() * scales).double()


@dataclass(frozen=True)
class Operand:
    """Values before the factors that multiply a whole sum.

    Args:
        values: float64 (rows, K).
        factors: fp32, (rows, 1), or (1, 1) of all rows.
    """

    values: Tensor
    factors: Tensor


ONE = torch.ones(1, 1)


class Folder:
    """A folder in compressed-tensors' format, whose quantized layers have one storage."""

    def __init__(self, path: Path) -> None:
        config = json.loads((path / "config.json").read_text())["quantization_config"]
        (group,) = config["config_groups"].values()
        self.arguments = group["weights"]
        self.has_input_activations = group["input_activations"] is not None
        self.tensors = load_file(path / "model.safetensors")

    def weight(self, layer: str) -> Operand:
        """Decodes the weight (N, K) of a quantized layer."""
        scale, size = self.tensors[f"{layer}.weight_scale"], self.arguments["group_size"]
        if self.arguments["strategy"] == "block":
            height, width = self.arguments["block_structure"]
            assert width == 128
            return Operand(fp8_values(self.tensors[f"{layer}.weight"], scale, height), ONE)
        values = fp4_values(self.tensors[f"{layer}.weight_packed"])
        if self.arguments["strategy"] == "group":
            powers = torch.exp2(scale.double() - 127)
            return Operand(values * powers.repeat_interleave(size, 1), ONE)
        assert self.arguments["strategy"] == "tensor_group"
        factor = torch.tensor(1.0) / self.tensors[f"{layer}.weight_global_scale"]
        return Operand(values * scale.double().repeat_interleave(size, 1), factor.view(1, 1))


def quantize_tokens(x_MK: Tensor, spec: str) -> Operand:
    """Quantizes activations as a server does, each token alone; under bf16 they stay values.

    spec: bf16, nvfp4/row or e4m3/1x128+exact.
    """
    if spec == "bf16":
        return Operand(x_MK.double(), ONE)
    cast = oracle.quantize(x_MK.float().numpy(), spec)[:3]  # without an amax where blocks have one
    codes, scale, amax = (torch.from_numpy(np.array(a if a is not None else F32(0))) for a in cast)
    if spec == "e4m3/1x128+exact":
        return Operand(fp8_values(codes.view(torch.float8_e4m3fn), scale, 1), ONE)
    scales = scale.view(torch.float8_e4m3fn).double()
    # torch computes number / tensor as a product with the reciprocal.
    factors = torch.tensor(1.0) / (torch.tensor(2688.0) / amax.float())
    return Operand(fp4_values(codes) * scales.repeat_interleave(16, 1), factors.view(-1, 1))


def linear(x: Operand, w: Operand) -> Tensor:
    """Multiplies operands, and rounds to bf16 as a GEMM with fp32 sums does."""
    sums = (x.values @ w.values.t()).float()
    return (sums * w.factors.t() * x.factors).bfloat16()
