"""Quantized checkpoints of tiny models, by compressed-tensors' own compressors, and their values.

    values = save_quantized(model, folder, "NVFP4A16")      model: plain, of transformers

`values` has the tensors of the folder as compressed-tensors decompresses them, by the name that the
plain checkpoint has.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Tensors = dict[str, Tensor]
Writer = Callable[[Tensor], tuple[Tensors, Tensor]]  # a weight -> local tensors, values


def scheme_of(preset: str) -> QuantizationScheme:
    return preset_name_to_scheme(preset, ["Linear"])


def extremes(weight: Tensor, scheme: QuantizationScheme) -> tuple[Tensor, Tensor]:
    """Returns the least and the largest value of what shares a scale."""
    args = scheme.weights
    if args.strategy == "block":
        rows, cols = args.block_structure
        n, k = weight.shape
        padded = nn.functional.pad(weight, (0, -k % cols, 0, -n % rows))
        shape = padded.shape[0] // rows, rows, padded.shape[1] // cols, cols
        return torch.aminmax(padded.reshape(shape).transpose(1, 2).flatten(2), dim=-1)
    if args.strategy in ("group", "tensor_group"):
        return torch.aminmax(weight.unflatten(-1, (-1, args.group_size)), dim=-1)
    if args.strategy == "channel":
        return torch.aminmax(weight, dim=-1, keepdim=True)
    return torch.aminmax(weight)


def compress(
    weight: Tensor, preset: str, global_amax: Tensor | None = None
) -> tuple[Tensors, Tensor]:
    """Returns the tensors of a compressed weight by their local names, and its values in bfloat16.

    global_amax: of NVFP4; None: the weight's own.
    """
    scheme = scheme_of(preset)
    weight = weight.detach().clone()
    least, largest = extremes(weight, scheme)
    state = {"weight": weight}
    if scheme.weights.strategy == "tensor_group":
        amax = weight.abs().max() if global_amax is None else global_amax
        state["weight_global_scale"] = generate_gparam(-amax, amax)
    scale, _ = calculate_qparams(least, largest, scheme.weights, state.get("weight_global_scale"))
    if preset.startswith("FP8"):
        scale = scale.float()
    compressor = BaseCompressor.get_value_from_registry(
        infer_module_format(nn.Linear, scheme).value
    )
    packed = compressor.compress(state | {"weight_scale": scale}, scheme)
    values = compressor.decompress(packed, scheme)["weight"].to(torch.bfloat16)
    return packed, values


def modelopt(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Returns ModelOpt's NVFP4: block scales are multiplied by weight_scale_2, amax / 2688."""
    packed, _ = compress(weight, "NVFP4A16")
    factor = weight.abs().max().float() / 2688
    codes = packed["weight_packed"].to(torch.int64)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    elements = torch.cat((table, -table))[nibbles].unflatten(-1, (-1, 16))
    values = elements * (packed["weight_scale"].float() * factor)[..., None]
    state = {
        "weight": packed["weight_packed"],
        "weight_scale": packed["weight_scale"],
        "weight_scale_2": factor,
        "input_scale": torch.tensor(0.01),
    }
    return state, values.flatten(-2).to(torch.bfloat16)


def deepseek(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Returns DeepSeek-V3's FP8: weight_scale_inv, float32, of blocks of 128 x 128."""
    packed, values = compress(weight, "FP8_BLOCK")
    return {"weight": packed["weight"], "weight_scale_inv": packed["weight_scale"]}, values


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight") or (".experts." in name and name.endswith(".weight"))


def save_quantized(
    model: nn.Module,
    folder: Path,
    write: Writer,
    config: dict[str, object],
    chosen: Callable[[str], bool] = is_projection,
) -> Tensors:
    """Writes a checkpoint in two shards, and returns its tensors in high precision.

    Args:
        model: of transformers.
        folder: of the checkpoint.
        write: makes the tensors of a chosen weight.
        config: quantization_config.
        chosen: which weights are quantized, by name.
    """
    model.save_pretrained(folder)
    (whole,) = folder.glob("*.safetensors")
    plain = load_file(whole)
    whole.unlink()
    values, stored = dict(plain), {}
    for name, tensor in plain.items():
        if not chosen(name):
            stored[name] = tensor
            continue
        local, values[name] = write(tensor)
        prefix = name.removesuffix("weight")
        stored |= {prefix + k: v.contiguous() for k, v in local.items()}
    names, index = sorted(stored), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: stored[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return values


def config_of(preset: str) -> dict[str, object]:
    """Returns compressed-tensors' quantization_config."""
    scheme = scheme_of(preset)
    group = json.loads(scheme.model_dump_json())
    return {
        "quant_method": "compressed-tensors",
        "format": infer_module_format(nn.Linear, scheme).value,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
