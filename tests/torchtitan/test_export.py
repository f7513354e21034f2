"""mf.export of torchtitan's models: by the names of its adapter, or by their own."""

import json
import tempfile
from pathlib import Path

import minifloat as mf
import pytest
import torch
from safetensors.torch import load_file

from tests.support.same_bits import require_same_bytes
from tests.torchtitan.test_converter import built, run

MODELS = {
    "llama3": "model.layers.0.self_attn.q_proj",
    "deepseek_v3": "model.layers.1.mlp.experts.3.up_proj",
}


def values_of(model):
    """Returns the state dict with the values of the codes of what is converted."""
    found = dict(model.state_dict())
    for fqn, module in model.named_modules():
        names = ["weight"] if isinstance(module, mf.Linear) else []
        names += mf.nn.grouped_product.products_by_weight(module)
        for name in names:
            weight = module.get_parameter(name).detach()
            found[f"{fqn}.{name}"] = mf.tensor.quantize(weight, "e4m3/row").dequantize()
    return found


def check_export(name):
    from torchtitan.protocols.train_spec import get_train_spec

    options = [f"--model.name={name}", "--minifloat.recipe=fp8_rowwise", "--training.seq_len=64"]
    model, _ = built(name, *options)
    spec = get_train_spec(name)
    with tempfile.TemporaryDirectory() as folder:
        assets, out, own = (Path(folder, sub) for sub in ("assets", "out", "own"))
        assets.mkdir()
        (assets / "config.json").write_text(json.dumps({"model_type": "llama"}))
        arguments = spec.model_args["debugmodel"]
        adapter = spec.state_dict_adapter(arguments, str(assets))
        mf.export(model, out, adapter=adapter)
        tensors = load_file(out / "model.safetensors")
        assert f"{MODELS[name]}.weight_scale" in tensors
        for key, value in adapter.to_hf(values_of(model)).items():
            scale = tensors.get(f"{key}_scale")
            got = tensors[key] if scale is None else tensors[key].float() * scale
            require_same_bytes(got, value, key)
        config = json.loads((out / "config.json").read_text())
        assert config["model_type"] == "llama"
        assert "lm_head" in config["quantization_config"]["ignore"]
        mf.export(model, own)
        tensors = load_file(own / "model.safetensors")
        assert "layers.0.attention.wo.weight_scale" in tensors


def check_tied_head():
    """The adapter has no tensor of a head that is tied, nor a name for a layer of ours."""
    from torchtitan.protocols.train_spec import get_train_spec

    model, _ = built("qwen3", "--model.name=qwen3", "--minifloat.recipe=fp8_rowwise")
    spec = get_train_spec("qwen3")
    adapter = spec.state_dict_adapter(spec.model_args["debugmodel"], None)
    assert adapter.model_args.enable_weight_tying
    with tempfile.TemporaryDirectory() as folder:
        mf.export(model, Path(folder, "out"), adapter=adapter)
        config = json.loads(Path(folder, "out/config.json").read_text())
        assert "lm_head" in config["quantization_config"]["ignore"]
        model.layers["0"].gate = mf.Linear(64, 64, recipe="fp8_rowwise")
        with pytest.raises(ValueError, match=r"layers\.0\.gate: a checkpoint has no name for it"):
            mf.export(model, Path(folder, "other"), adapter=adapter)
        model.layers["0"].gate = torch.nn.LayerNorm(64)
        with pytest.raises(ValueError, match=r"layers\.0\.gate\.weight: a checkpoint has no name"):
            mf.export(model, Path(folder, "other"), adapter=adapter)


def test_a_head_that_is_tied_is_ignored():
    run(check_tied_head)


def check_models():
    for name in MODELS:
        check_export(name)


def test_folders_have_the_values_under_the_names_of_the_adapter():
    run(check_models)
