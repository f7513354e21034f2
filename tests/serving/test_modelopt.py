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


# ---- what vLLM 0.33.0 does not read --------------------------------------------------------------


def refuse(model, folder, refused, *texts):
    """Requires an error that names these layers alone, and no folder."""
    with pytest.raises(ValueError, match="export: expected a model that can be written") as error:
        mf.export(model, folder, "modelopt")
    lines = str(error.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == refused
    assert all(text in line for line in lines for text in texts)
    assert not folder.exists()


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "fp8_blockwise"])
@pytest.mark.parametrize("others", ["", "0: mxfp8"])
def test_experts_with_a_scale_a_row_or_block_are_refused(recipe, others, tmp_path):
    """ModelOptFp8MoEMethod has one scale a matrix; among several formats no method has ours."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), mf.MoE(128, 128, experts=2, top_k=1))
    mf.quantize_(model, f"*: {recipe}; {others}".rstrip("; "), keep="nothing")
    experts = [f"1.experts.{name}" for name in ("w1", "w3", "w2")]
    texts = f"got {ALGORITHMS[recipe]}; ", "format='compressed-tensors' takes it"
    refuse(model, tmp_path / "out", experts, "expected experts as NVFP4 or W4A16_NVFP4 ", *texts)
    mf.export(model, tmp_path / "out")


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_tensorwise"])
def test_experts_in_other_formats_are_written(recipe, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(mf.MoE(64, 32, experts=2, top_k=1))
    mf.quantize_(model, recipe, keep="nothing")
    amaxes = None if recipe == "mxfp8" else mf.calibrate(model, [torch.randn(32, 64)])
    tensors, _ = export(model, tmp_path / "out", "modelopt", amaxes=amaxes)
    ends = {*layer(tensors, "0.experts.1.w2")}
    assert ends - {"weight_scale_2", "input_scale"} == {"weight", "weight_scale"}
    assert ("weight_scale_2" in ends) == (recipe == "nvfp4")
    assert ("input_scale" in ends) == (amaxes is not None)


def test_vision_towers_of_one_format_are_refused(tmp_path):
    """vLLM reads them in high precision, except where each layer has a quant_algo of its own."""

    def build(recipe):
        blocks = {n: torch.nn.Sequential(torch.nn.Linear(64, 64)) for n in ("vision_tower", "text")}
        model = torch.nn.ModuleDict(blocks)
        mf.quantize_(model, recipe, keep="nothing")
        return model

    texts = "expected vision_tower unconverted", "got MXFP8; format='compressed-tensors'"
    refuse(build("mxfp8"), tmp_path / "out", ["vision_tower.0"], *texts)
    _, config = export(build("*: mxfp8; text.*: fp8_rowwise"), tmp_path / "mixed", "modelopt")
    layers = config["quantization_config"]["quantized_layers"]
    assert layers["vision_tower.0"] == {"quant_algo": "MXFP8", "group_size": 32}
    assert layers["text.0"] == {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    _, config = export(build("*: mxfp8; vision_tower.*: bf16"), tmp_path / "left", "modelopt")
    assert config["quantization_config"]["ignore"] == ["vision_tower.0"]
    mf.export(build("mxfp8"), tmp_path / "out")


def test_blocks_that_would_lie_across_joined_layers_are_refused(tmp_path):
    """vLLM begins a joined layer's scales with a block, and pads the last block of all."""
    model = llama()  # q, k and v have 128, 64 and 64 rows
    mf.quantize_(model, "fp8_blockwise", keep="nothing")
    refused = "model.layers.0.self_attn.k_proj"
    refuse(model, tmp_path / "out", [refused], "a multiple of 128", "got 64; other recipes")
    mf.export(model, tmp_path / "out")
    sizes = {"q_a_proj": 256, "kv_a_proj_with_mqa": 192, "other": 192}
    model = torch.nn.ModuleDict({n: torch.nn.Linear(128, size) for n, size in sizes.items()})
    mf.quantize_(model, "fp8_blockwise", keep="nothing")
    tensors, _ = export(model, tmp_path / "padded", "modelopt")
    assert all(tensors[f"{name}.weight_scale"].shape == (2, 1, 1, 1) for name in sizes)
