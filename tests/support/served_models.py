"""Tiny models of transformers to be exported, and what a folder of one has."""

import json
from functools import partial
from pathlib import Path

import huggingface_hub
import minifloat as mf
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from minifloat.nn.grouped_product import products_by_weight
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**options):
    """Returns a Llama with the same weights each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | options))


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def qwen3_moe():
    torch.manual_seed(0)
    sizes = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | sizes, head_dim=32))


def tokens(seed=0):
    return torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))


def weight_recipe(spec, x="bf16"):
    """Returns a recipe whose forward quantizes W, and nothing else but x."""
    return f"fprop={x}*{spec} dgrad=bf16*bf16 wgrad=bf16*bf16"


def export(model, folder, *args, **options):
    """Exports a model; returns the folder's tensors and configuration."""
    mf.export(model, folder, *args, **options)
    return read(folder)


def write_small_files(monkeypatch, size=50_000):
    """Has exports write files of at most `size` bytes, or of one tensor."""
    name = "split_state_dict_into_shards_factory"
    small = partial(getattr(huggingface_hub, name), max_shard_size=size)
    monkeypatch.setattr(huggingface_hub, name, small)


def read(folder):
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors, json.loads((Path(folder) / "config.json").read_text())


def converted(model):
    """Returns (name, W) of linear layers, and of 3D parameters, that products read as codes."""
    found = {}
    for fqn, module in model.named_modules():
        if isinstance(module, mf.Linear):
            found[fqn] = module.weight.detach()
        for name in products_by_weight(module):
            found[f"{fqn}.{name}"] = module.get_parameter(name).detach()
    return found


def layer(tensors, name):
    """Returns a layer's tensors by their own names."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def decompress(tensors, name, config):
    """Returns the values that compressed-tensors computes of a layer."""
    known = QuantizationConfig.model_validate(config["quantization_config"])
    ((_, scheme),) = known.config_groups.items()
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return compressor.decompress(layer(tensors, name), scheme)["weight"]


def values(weight, spec, dtype):
    return mf.tensor.dequantize(mf.tensor.quantize(weight, spec), dtype)
