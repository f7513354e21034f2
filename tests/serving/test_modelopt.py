"""Folders in ModelOpt's format: its documented arithmetic gives the values of the codes.

A value is code times weight_scale, which NVFP4 multiplies by weight_scale_2 before: nvidia-modelopt
0.47.0, torch/quantization/qtensor, where NVFP4QTensor and its siblings dequantize. As in
test_export.py, that other order of two products in float32 gives the same bfloat16 here.
"""

import json

import minifloat as mf
import pytest
import torch

from tests.support.same_bits import require_same_bytes
from tests.support.served_models import converted, export, layer, llama, tokens

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Recipe -> quant_algo.
ALGORITHMS = {
    "nvfp4": "NVFP4",
    "fprop=bf16*nvfp4+4over6 dgrad=bf16*bf16 wgrad=bf16*bf16": "W4A16_NVFP4",
    "mxfp8_2d": "MXFP8",
    "fp8_tensorwise": "FP8",
    "fp8_rowwise": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8_blockwise": "FP8_PB_WO",
}


def dequantize(found, algorithm):
    codes, scale = found["weight"], found["weight_scale"]
    if codes.dtype == torch.uint8:
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        values, columns = E2M1[pairs.long()], 16
        scales = scale.float() * found["weight_scale_2"]
        return (values * scales.repeat_interleave(columns, 1)).bfloat16()
    values = codes.float()
    if algorithm == "MXFP8":
        assert scale.dtype == torch.uint8
        powers = torch.exp2(scale.float() - 127)
        return values * powers.repeat_interleave(32, 1)
    if scale.dim() == 1:
        return values * scale[:, None]
    if scale.dim() == 4:
        blocks = scale.squeeze(3).squeeze(1)
        return values * blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values * scale


@pytest.mark.parametrize("recipe", ALGORITHMS)
def test_documented_arithmetic_gives_the_values(recipe, tmp_path):
    model, algorithm = llama(head_dim=64), ALGORITHMS[recipe]
    mf.quantize_(model, recipe)
    spec = mf.Recipe(recipe).fprop.b
    has_amaxes = algorithm in ("NVFP4", "FP8")
    amaxes = mf.calibrate(model, [tokens()]) if has_amaxes else None
    tensors, config = export(model, tmp_path / "out", "modelopt", amaxes=amaxes)
    for name, weight in converted(model).items():
        found = layer(tensors, name)
        got = dequantize(found, algorithm)
        want = mf.tensor.dequantize(mf.tensor.quantize(weight, spec), got.dtype)
        require_same_bytes(got, want, name)
        assert ("input_scale" in found) == has_amaxes
    about = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    known = config["quantization_config"]
    assert about["quant_algo"] == known["quant_algo"] == algorithm
    assert about["exclude_modules"] == known["ignore"] == ["lm_head"]
    assert about.get("group_size") == {"MXFP8": 32}.get(
        algorithm, 16 if "NV" in algorithm else None
    )
    assert known["quant_method"] == "modelopt"
