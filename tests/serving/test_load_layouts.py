"""One layer in each layout of ModelOpt and of transformers, against their own arithmetic."""

import json

import minifloat as mf
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.support import quantized_checkpoints as checkpoints

N, K = 256, 384


def weight(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(*shape, generator=generator) * torch.rand(shape[-2], 1, generator=generator)


def fp8(w: torch.Tensor, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns E4M3 codes, and the float32 scale of each block of rows x cols."""
    *experts, n, k = w.shape
    blocks = w.reshape(*experts, n // rows, rows, k // cols, cols)
    scale = blocks.abs().amax((-3, -1), keepdim=True) / 448
    return (blocks / scale).to(torch.float8_e4m3fn).reshape(w.shape), scale[..., 0, :, 0]


def values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns what transformers computes, in bfloat16."""
    return Fp8Dequantize(None)._dequantize_one(codes, scale, output_dtype=torch.bfloat16)


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    return scale.log2().ceil().exp2().to(torch.float8_e8m0fnu)


def of_compressed_tensors(preset: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed, expected = checkpoints.compress(weight(N, K), preset)
    return packed.get("weight_packed", packed.get("weight")), packed["weight_scale"], expected


def tensor(name: str):
    codes, scale = fp8(weight(N, K), N, K)
    return {"weight": codes, name: scale.reshape(())}, values(codes, scale), "e4m3/tensor"


def rows():
    codes, scale = fp8(weight(N, K), 1, K)
    return {"weight": codes, "weight_scale": scale[:, 0]}, values(codes, scale), "e4m3/row+exact"


def small_blocks():
    codes, scale = fp8(weight(N, K), 1, 128)
    state = {"weight": codes, "weight_scale": scale.bfloat16()}
    return state, values(codes, scale.bfloat16()), "e4m3/1x128+exact"


def blocks(name: str, reshape=lambda scale: scale):
    codes, scale = fp8(weight(N, K), 128, 128)
    state = {"weight": codes, name: reshape(scale)}
    return state, values(codes, reshape(scale).reshape(scale.shape)), "e4m3/128x128+exact"


def mx(preset: str, spec: str):
    codes, scale, expected = of_compressed_tensors(preset)
    return {"weight": codes, "weight_scale": scale}, expected, spec


LAYOUTS = {
    "modelopt FP8": lambda: tensor("weight_scale"),
    "modelopt FP8_PER_CHANNEL_PER_TOKEN": rows,
    "modelopt FP8_PB_WO": lambda: blocks("weight_scale", lambda s: s[:, None, :, None]),
    "modelopt MXFP8": lambda: mx("MXFP8A16", "mxfp8"),
    "modelopt MXFP4": lambda: mx("MXFP4A16", "mxfp4"),
    "fp8 tensor": lambda: tensor("weight_scale_inv"),
    "fp8 float32": lambda: blocks("weight_scale_inv"),
    "fp8 bfloat16": lambda: blocks("weight_scale_inv", torch.Tensor.bfloat16),
    "fp8 ue8m0": lambda: blocks("weight_scale_inv", e8m0),
    "compressed-tensors group of 128": small_blocks,
}


def save(folder, state: dict[str, torch.Tensor], method: str) -> None:
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    if method == "modelopt":
        config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
        (folder / "hf_quant_config.json").write_text(json.dumps(config))
    else:
        config = {"quantization_config": {"quant_method": method}}
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_has_the_values_of_its_layout(layout, tmp_path):
    state, expected, spec = LAYOUTS[layout]()
    state = {"0." + name: value for name, value in state.items()}
    save(tmp_path, state, layout.split()[0])
    model = nn.Sequential(nn.Linear(K, N, bias=False, dtype=torch.bfloat16))
    mf.load_quantized_(model, tmp_path)
    found = model[0].weight
    assert found.specs == (spec, None)
    assert torch.equal(found.dequantize(), expected)
    codes = state["0.weight"].view(torch.uint8)
    assert torch.equal(found.rowwise.codes, codes)


class Experts(nn.Module):
    """Experts as transformers names them, which this library can convert."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, 2 * width, hidden).bfloat16())
        self.down_proj = nn.Parameter(torch.zeros(experts, hidden, width).bfloat16())
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in range(len(self.down_proj)):
            token, slot = torch.where(top_k_index == e)
            gate, up = (hidden_states[token] @ self.gate_up_proj[e].T).chunk(2, -1)
            h = self.act_fn(gate) * up
            out.index_add_(0, token, (h @ self.down_proj[e].T) * top_k_weights[token, slot, None])
        return out


@pytest.mark.parametrize("rows", [128, None])
def test_3d_weights_that_transformers_saved_in_fp8(rows, tmp_path):
    model, state, expected = nn.Sequential(Experts(3, 256, 128)), {}, {}
    for name, parameter in list(model[0].named_parameters()):
        shape = tuple(parameter.shape)
        codes, scale = fp8(weight(*shape), rows or shape[1], rows or shape[2])
        state |= {f"0.{name}": codes, f"0.{name}_scale_inv": scale}
        expected[name] = torch.stack([values(c, s) for c, s in zip(codes, scale)])
    save(tmp_path, state, "fp8")
    mf.load_quantized_(model, tmp_path)
    for name, parameter in model[0].named_parameters():
        assert parameter.specs == ("e4m3/128x128+exact" if rows else "e4m3/tensor", None)
        assert torch.equal(parameter.dequantize(), expected[name])
