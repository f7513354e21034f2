"""Experts of checkpoints, loaded as codes of 3D parameters, and adapters that train on them."""

import json
from contextlib import nullcontext
from functools import partial

import minifloat as mf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support import quantized_checkpoints as checkpoints
from tests.support.adapters import adapted, train
from tests.support.same_bits import require_same

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SMALL,
            moe_intermediate_size=128,
            num_experts_per_tok=2,
            head_dim=16,
            num_experts=4,
            decoder_sparse_step=1,
        )
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SMALL | {"intermediate_size": 64}, head_dim=16, num_local_experts=4)
    ),
}
IDS = torch.arange(24).view(2, 12) * 7 % 64
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name]().to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 3:
            parameter.data.normal_(0, 0.1)
    return model


def of_experts(name: str) -> bool:
    return ".experts." in name and name.endswith(".weight")


def save(name: str, kind: str, folder) -> nn.Module:
    """Writes a checkpoint of a model; returns a model of its values."""
    model = build(name)
    write = checkpoints.deepseek
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    if kind != "deepseek":
        # The matrices of an expert share NVFP4's amax, as servers need gate and up to.
        amax = torch.tensor(1.5) if kind.startswith("NVFP4") else None
        write = partial(checkpoints.compress, preset=kind, global_amax=amax)
        config = checkpoints.config_of(kind)
    values = checkpoints.save_quantized(model, folder, write, config, of_experts)
    plain = folder / "plain"
    plain.mkdir()
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text(model.config.to_json_string())
    model.load_state_dict(type(model).from_pretrained(plain, dtype=torch.bfloat16).state_dict())
    return model


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "kind", ["NVFP4A16", "MXFP4A16", "MXFP8A16", "FP8", "FP8_DYNAMIC", "deepseek"]
)
def test_a_linear_layer_an_expert_becomes_a_3d_parameter(kind, name, tmp_path):
    plain, loaded = save(name, kind, tmp_path), build(name, 1)
    (tmp_path / "plain" / "model.safetensors").unlink()
    report = mf.load_quantized_(loaded, tmp_path)
    assert [row.rpartition(".")[2] for row, _ in report.converted] == ["gate_up_proj", "down_proj"]
    wanted = dict(plain.named_parameters())
    for fqn, parameter in loaded.named_parameters():
        is_coded = isinstance(parameter, mf.QuantizedTensor)
        assert is_coded == (parameter.dim() == 3)
        found = parameter.dequantize() if is_coded else parameter
        assert torch.equal(found, wanted[fqn]), fqn
    require_alike(loaded, plain, 2**-6)


def require_alike(loaded, plain, tolerance):
    """Requires logits within the rounding of values to bfloat16, which the products lack."""
    with torch.no_grad():
        found, expected = (m(input_ids=IDS).logits.float() for m in (loaded, plain))
    assert (found - expected).norm() <= tolerance * expected.norm()


def gpt_oss(folder) -> nn.Module:
    """Writes gpt-oss's own layout; returns a model of its values by transformers' function."""
    model = build("gpt_oss")
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors, values = load_file(path), model.state_dict()
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        matrices = tensors.pop(name).mT
        packed = [checkpoints.compress(w, "MXFP4A16")[0] for w in matrices]
        blocks = torch.stack([p["weight_packed"] for p in packed]).unflatten(-1, (-1, 16))
        scales = torch.stack([p["weight_scale"] for p in packed])
        tensors |= {name + "_blocks": blocks.contiguous(), name + "_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    model.load_state_dict(values)
    return model


def test_blocks_and_scales_of_gpt_oss(tmp_path):
    plain, loaded = gpt_oss(tmp_path), build("gpt_oss", 1)
    mf.load_quantized_(loaded, tmp_path)
    experts, wanted = (m.model.layers[0].mlp.experts for m in (loaded, plain))
    for name in ("gate_up_proj", "down_proj"):
        parameter = getattr(experts, name)
        assert parameter.specs == (None, "mxfp4")
        assert torch.equal(parameter.dequantize(), getattr(wanted, name))
    require_alike(loaded, plain, 2**-7)


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_adapters_of_3d_parameters_train_on_the_values(recipe, tmp_path):
    """With adapters, experts multiply the sum of values and adapter in bfloat16: a cast of that
    sum to FP4 would drop the adapter. So both models run the same op then.
    """
    plain, loaded = save("qwen3_moe", "NVFP4A16", tmp_path), build("qwen3_moe", 1)
    mf.load_quantized_(loaded, tmp_path, recipe)
    mf.quantize_(plain, "nvfp4", filter_fqns=["_attn"])
    for name in ("gate_up_proj_product", "down_proj_product"):
        of_loaded, of_plain = (
            getattr(m.model.layers[0].mlp.experts, name) for m in (loaded, plain)
        )
        of_plain.recipe = of_loaded.recipe.with_values
    found, expected = (train(adapted(m, PARAMETERS), IDS, 4) for m in (loaded, plain))
    assert all(map(torch.equal, found, expected))
    assert found[0] != found[5]


def without(part: str):
    return lambda tensors: {k: v for k, v in tensors.items() if part not in k}


def two_factors(tensors):
    key = "model.layers.0.mlp.experts.2.up_proj.weight_global_scale"
    return tensors | {key: tensors[key] * 1.5}


def one_too_many(tensors):
    key = "model.layers.0.mlp.experts.3."
    of_4 = {k.replace(".3.", ".4."): v.clone() for k, v in tensors.items() if k.startswith(key)}
    return tensors | of_4


def mixed(tensors):
    prefix = "model.layers.0.mlp.experts.1.down_proj.weight"
    tensors = {k: v for k, v in tensors.items() if not k.startswith(prefix)}
    local, _ = checkpoints.compress(torch.ones(64, 128).bfloat16(), "FP8")
    return tensors | {prefix.removesuffix("weight") + k: v for k, v in local.items()}


def high_precision(tensors):
    tensors = without("down_proj")(tensors)
    names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(4)]
    return tensors | {name: torch.zeros(64, 128).bfloat16() for name in names}


CASES = [
    (without("experts.3.up_proj"), "gate_up_proj has 7 of 8 tensors"),
    (one_too_many, "gate_up_proj has 10 tensors, not 8"),
    (
        two_factors,
        "gate_up_proj: expected one factor for gate and up of an expert, got .* in expert 2",
    ),
    (mixed, r"expected codes of one format, got \['e4m3/tensor', 'nvfp4'\]"),
    (high_precision, "got: model.layers.0.mlp.experts.down_proj: no codes"),
]


@pytest.mark.parametrize(("change", "message"), CASES)
def test_experts_that_no_parameter_can_hold_are_refused(change, message, tmp_path):
    save("qwen3_moe", "NVFP4A16", tmp_path)
    shards = list(tmp_path.glob("model-*.safetensors"))
    tensors = {k: v for shard in shards for k, v in load_file(shard).items()}
    for path in (*shards, tmp_path / "model.safetensors.index.json"):
        path.unlink()
    save_file(change(tensors), tmp_path / "model.safetensors")
    model = build("qwen3_moe", 1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        mf.load_quantized_(model, tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(isinstance(m, mf.Linear) for m in model.modules())
    assert not hasattr(model.model.layers[0].mlp.experts, "gate_up_proj_product")


@pytest.mark.parametrize("is_on_meta", [False, True])
def test_routing_biases_stay_in_float32(is_on_meta, tmp_path):
    """As from_pretrained keeps them: in bfloat16 other experts would be chosen."""
    sizes = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_key_value_heads": 2}
    sizes |= {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 32}
    sizes |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
    config = DeepseekV3Config(**SMALL | sizes)
    model = DeepseekV3ForCausalLM(config)
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    bias = model.get_buffer(name).copy_(4 + torch.arange(4) * 1e-3)
    mf.quantize_(model, "fprop=bf16*mxfp8 dgrad=bf16*bf16 wgrad=bf16*bf16")
    mf.export(model, tmp_path / "quantized")
    with torch.device("meta") if is_on_meta else nullcontext():
        loaded = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if is_on_meta:  # which no checkpoint has
        rotary = type(loaded.model.rotary_emb)(config)
        loaded.model.rotary_emb = rotary
    mf.load_quantized_(loaded, tmp_path / "quantized")
    assert torch.equal(loaded.get_buffer(name), bias)
    assert loaded.model.embed_tokens.weight.dtype == torch.bfloat16


def test_scales_of_tensors_are_joined_as_scales_of_rows(tmp_path):
    save("qwen3_moe", "FP8", tmp_path)
    model = build("qwen3_moe", 1)
    mf.load_quantized_(model, tmp_path, "fp8_rowwise")
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.specs == experts.down_proj.specs == ("e4m3/row+exact", None)
    gate, up = experts.gate_up_proj.rowwise.scale.chunk(2, dim=1)
    assert (gate == gate[:, :1]).all()
    assert (gate != up).any()


def test_names_that_the_class_leaves_out_are_reported(tmp_path):
    save("qwen3_moe", "MXFP4A16", tmp_path)
    save_file({"mtp.0.norm.weight": torch.ones(3)}, tmp_path / "more.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"] | {"mtp.0.norm.weight": "more.safetensors"}
    index.write_text(json.dumps({"weight_map": names}))
    model = build("qwen3_moe", 1)
    with pytest.raises(ValueError, match=r"mtp\.0\.norm\.weight is unknown"):
        mf.load_quantized_(model, tmp_path)
    model._keys_to_ignore_on_load_unexpected = [r"^mtp\."]
    notes = mf.load_quantized_(model, tmp_path).notes
    wanted = "1 tensors are not read, which the model's class leaves out, such as mtp.0.norm.weight"
    assert ("", wanted) in notes


# ---- mf.MoE --------------------------------------------------------------------------------------


class Mixture(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.moe = mf.MoE(64, 96, experts=12, top_k=2, **options)

    def forward(self, x):
        return self.moe(self.first(x))


def mixture(seed, **options):
    torch.manual_seed(seed)
    return Mixture(**options).to(torch.bfloat16)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(
    "options", [{}, {"fused_w13": True, "bias": True}, {"fused_w13": True, "shared_experts": 1}]
)
def test_mixtures_of_this_library_are_read_as_they_were_written(options, recipe, tmp_path):
    model, loaded = mixture(0, **options), mixture(1, **options)
    plain = {name: value.detach().clone() for name, value in model.named_parameters()}
    mf.quantize_(model, recipe, keep="nothing")
    mf.export(model, tmp_path, weight_only=True)
    report = mf.load_quantized_(loaded, tmp_path, "mxfp8" if recipe == "mxfp8" else "bf16")
    assert dict(report.converted).keys() >= {"first", "moe.experts.w2"}
    if recipe == "mxfp8":
        x = torch.randn(8, 64).to(torch.bfloat16)
        require_same(loaded(x), model(x), "y")
    mf.restore_(loaded, plain)  # refuses weights that are not those of the codes
    for name, value in loaded.named_parameters():
        assert torch.equal(value, plain[name]), name


def test_a_number_that_no_expert_has_is_refused(tmp_path):
    model, loaded = mixture(0), mixture(1)
    mf.quantize_(model, "mxfp8", keep="nothing")
    mf.export(model, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {k.replace("experts.11.", "experts.12."): v for k, v in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    before = {name: value.clone() for name, value in loaded.state_dict().items()}
    with pytest.raises(ValueError, match="has 11 of 12 tensors"):
        mf.load_quantized_(loaded, tmp_path)
    assert type(loaded.first) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())
