"""Dense checkpoints of compressed-tensors, and in other layouts, loaded as codes."""

import copy
from contextlib import nullcontext

import accelerate
import minifloat as mf
import pytest
import torch
from minifloat.recipe import FORWARD_W
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from tests.support import quantized_checkpoints as checkpoints
from tests.support.adapters import adapted, train
from tests.support.worlds import run_world

PRESETS = ("NVFP4A16", "NVFP4", "MXFP4A16", "MXFP8A16", "FP8", "FP8_DYNAMIC", "FP8_BLOCK")


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=160,  # more than a block of 128, and no multiple of it
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )


def build(dtype=torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config()).to(dtype)
    for p in model.parameters():
        if p.dim() == 2:
            p.data.mul_(torch.rand(len(p), 1) * 3)  # scales differ from row to row
    return model


def write_of(kind: str):
    """Returns what writes a weight, and the quantization_config."""
    if kind == "modelopt":
        return checkpoints.modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if kind == "deepseek":
        options = {"weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
        return checkpoints.deepseek, {"quant_method": "fp8", **options}
    return lambda w: checkpoints.compress(w, kind), checkpoints.config_of(kind)


@pytest.mark.parametrize("kind", [*PRESETS, "modelopt", "deepseek"])
def test_codes_have_the_values_of_the_checkpoint(kind, tmp_path):
    write, quantization = write_of(kind)
    values = checkpoints.save_quantized(build(), tmp_path, write, quantization)
    torch.manual_seed(1)
    model = LlamaForCausalLM(config()).to(torch.bfloat16)
    report = mf.load_quantized_(model, tmp_path)
    assert len(report.converted) == 14
    coded = 0
    for name, parameter in model.named_parameters():
        is_coded = isinstance(parameter, mf.QuantizedTensor)
        coded += is_coded
        assert is_coded == checkpoints.is_projection(name)
        found = parameter.dequantize() if is_coded else parameter
        assert torch.equal(found, values[name]), name
        assert parameter.requires_grad != is_coded
    assert coded == 14
    assert ("lm_head", "the checkpoint has it in high precision") in report.skipped
    note = "14 scales of activations are not read: x is scaled by its own values, such as "
    is_noted = any(text.startswith(note) for _, text in report.notes)
    assert is_noted == (kind == "modelopt")  # alone with an input_scale


@pytest.mark.parametrize("place", ["float32", "meta"])
def test_a_model_in_float32_or_on_meta_loads_alike(place, tmp_path, monkeypatch):
    checkpoints.save_quantized(build(), tmp_path, *write_of("NVFP4"))
    with accelerate.init_empty_weights(include_buffers=False) if place == "meta" else nullcontext():
        model = LlamaForCausalLM(config())
    if place == "meta":
        model = model.to(torch.bfloat16)
    with monkeypatch.context() as patch:  # no weight is computed in high precision
        patch.setattr(mf.QuantizedTensor, "dequantize", None)
        patch.setattr(mf.QuantizedTensor, "from_tensor", None)
        mf.load_quantized_(model, tmp_path)
    ids = torch.arange(8)[None]
    model(input_ids=ids).logits.sum().backward()
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    other = LlamaForCausalLM(config()).to(torch.bfloat16)
    mf.load_quantized_(other, tmp_path)
    found, wanted = (m.model.layers[1].mlp.down_proj.weight.rowwise for m in (model, other))
    assert all(torch.equal(getattr(found, t), getattr(wanted, t)) for t in ("codes", "amax"))


def test_tied_heads_have_one_tensor(tmp_path):
    tied = LlamaConfig(**{**config().to_dict(), "tie_word_embeddings": True})
    torch.manual_seed(0)
    model = LlamaForCausalLM(tied).to(torch.bfloat16)
    values = checkpoints.save_quantized(model, tmp_path, *write_of("MXFP8A16"))
    with accelerate.init_empty_weights(include_buffers=False):
        loaded = LlamaForCausalLM(tied)
    loaded.tie_weights()
    mf.load_quantized_(loaded, tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight.bfloat16(), values["model.embed_tokens.weight"])


def test_a_head_that_is_tied_no_more_is_named(tmp_path):
    tied = LlamaConfig(**{**config().to_dict(), "tie_word_embeddings": True})
    model = LlamaForCausalLM(tied).to(torch.bfloat16)
    checkpoints.save_quantized(model, tmp_path, *write_of("MXFP8A16"))
    with accelerate.init_empty_weights(include_buffers=False):
        loaded = LlamaForCausalLM(tied)
    message = "lm_head.weight is tied to model.embed_tokens.weight no more; call model.tie_weights"
    with pytest.raises(ValueError, match=message):
        mf.load_quantized_(loaded, tmp_path)


def test_a_restored_model_is_saved_as_a_plain_one(tmp_path):
    checkpoints.save_quantized(build(), tmp_path / "quantized", *write_of("MXFP8A16"))
    of_codes = AutoConfig.from_pretrained(tmp_path / "quantized")
    model = LlamaForCausalLM(of_codes).to(torch.bfloat16)
    mf.load_quantized_(model, tmp_path / "quantized")
    mf.restore_(model).save_pretrained(tmp_path / "plain")
    published = LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    assert all(map(torch.equal, published.parameters(), model.parameters()))


def two_linears(width=64):
    return nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in "ab"}).bfloat16()


def test_tied_layers_share_codes_and_values(tmp_path):
    plain = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False)}).bfloat16()
    model = copy.deepcopy(plain)
    mf.quantize_(model, "mxfp8", keep="nothing")
    mf.export(model, tmp_path / "codes")
    for originals in (None, {"a.weight": plain["a"].weight}):
        loaded = two_linears()
        loaded["b"].weight = loaded["a"].weight
        assert len(mf.load_quantized_(loaded, tmp_path / "codes").converted) == 2
        assert loaded["a"].weight is loaded["b"].weight
        want = loaded["a"].weight.dequantize() if originals is None else plain["a"].weight
        mf.restore_(loaded, originals)
        assert loaded["a"].weight is loaded["b"].weight
        assert torch.equal(loaded["a"].weight, want)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"])
def test_tied_layers_have_equal_codes_and_scales(recipe, tmp_path):
    for factor in (1, 2):  # twice the values have the same codes under other scales
        model, loaded = two_linears(128), two_linears(128)
        with torch.no_grad():
            model["b"].weight.copy_(factor * model["a"].weight)
        mf.quantize_(model, recipe, keep="nothing")
        mf.export(model, tmp_path / str(factor), weight_only=True)
        loaded["b"].weight = loaded["a"].weight
        if factor == 2:
            with pytest.raises(
                ValueError, match=r"b\.weight is tied to a\.weight in the model, and"
            ):
                mf.load_quantized_(loaded, tmp_path / "2")
        else:
            assert len(mf.load_quantized_(loaded, tmp_path / "1").converted) == 2


def test_attributes_of_weights_stay(tmp_path):
    model = two_linears()
    originals = {name: value.clone() for name, value in model.state_dict().items()}
    mf.quantize_(model, "mxfp8", keep="nothing")
    mf.export(model, tmp_path, weight_only=True)
    loaded = two_linears()
    loaded["a"].weight.mine = 3
    mf.load_quantized_(loaded, tmp_path)
    assert loaded["a"].weight.mine == 3
    for weights in (None, originals):
        again = copy.deepcopy(loaded)
        assert mf.restore_(again, weights)["a"].weight.mine == 3


def test_restored_weights_reach_modules_that_are_no_layers():
    plain = nn.ModuleDict({"first": nn.Embedding(64, 64), "layer": nn.Linear(64, 64, bias=False)})
    plain["last"] = nn.Embedding(64, 64)
    mf.quantize_(plain, "mxfp8", primary=True, keep="nothing")
    weight = plain["layer"].weight
    for name in ("first", "last"):
        plain[name].weight = weight
    mf.restore_(plain)
    assert torch.equal(plain["layer"].weight, weight.dequantize())
    assert plain["first"].weight is plain["last"].weight is plain["layer"].weight


def check_shared_shards(rank):
    mesh = init_device_mesh("cpu", (1,))
    model = two_linears()
    mf.quantize_(model, "mxfp8", primary=True, keep="nothing")
    weight = nn.Parameter(distribute_tensor(model["a"].weight.detach(), mesh, [Replicate()]))
    model["a"].weight = model["b"].weight = weight
    mf.restore_(model)
    assert model["a"].weight is model["b"].weight
    assert not isinstance(model["a"].weight.to_local(), mf.QuantizedTensor)


def test_restored_shards_stay_tied():
    run_world(1, check_shared_shards)


def test_a_layer_with_two_names_is_one(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False)}).bfloat16()
    mf.quantize_(model, "mxfp8", keep="nothing")
    mf.export(model, tmp_path / "codes")
    loaded = two_linears()
    loaded["b"] = loaded["a"]
    report = mf.load_quantized_(loaded, tmp_path / "codes", "mxfp8")
    assert [name for name, _ in report.converted] == ["a"]
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(loaded["b"](x), model["a"](x))


def loaded_and_plain(kind, folder, recipe="bf16"):
    """Returns a loaded model, and a plain one of the values of its codes."""
    values = checkpoints.save_quantized(build(), folder, *write_of(kind))
    loaded, plain = build(), build()
    mf.load_quantized_(loaded, folder, recipe)
    plain.load_state_dict(values, strict=False)
    return loaded, plain


IDS = torch.arange(48).view(2, 24) * 7 % 64


@pytest.mark.parametrize("kind", ["MXFP4A16", "MXFP8A16"])
def test_adapters_train_as_over_the_values(kind, tmp_path):
    """Codes times powers of two are bfloat16 values, so both models multiply the same ones."""
    loaded, plain = loaded_and_plain(kind, tmp_path)
    found, expected = (train(adapted(m), IDS, 28) for m in (loaded, plain))
    assert all(map(torch.equal, found, expected))
    assert found[0] != found[len(found) // 2]


@pytest.mark.parametrize("kind", ["NVFP4A16", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "modelopt"])
def test_products_of_a_layer_are_those_of_the_values(kind, tmp_path):
    """dx is a product of the same bfloat16 values. y's is one of the codes, whose factor is applied
    afterwards, so its weights lack a rounding of 2^-8; blocks are cut to bfloat16, by 2^-7.
    """
    loaded, plain = loaded_and_plain(kind, tmp_path)
    for name in ("q_proj", "o_proj"):
        layers = [getattr(m.model.layers[1].self_attn, name) for m in (loaded, plain)]
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        inputs = [x.clone().requires_grad_() for _ in layers]
        found, expected = (layer(x) for layer, x in zip(layers, inputs))
        sums = x.abs().double() @ layers[1].weight.abs().double().T
        bound = 2**-7 * sums + 2**-8 * expected.abs().double()
        assert ((found - expected).abs().double() <= bound).all()
        for y in (found, expected):
            y.backward(torch.ones_like(y))
        assert torch.equal(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize(
    ("kind", "recipe", "wanted"),
    [
        ("NVFP4A16", "nvfp4", "fprop=nvfp4*nvfp4 dgrad=nvfp4+sr*{} wgrad=nvfp4+sr+rht*nvfp4+rht"),
        ("MXFP4A16", "fprop=mxfp4*mxfp4 dgrad=mxfp4+sr*mxfp4 wgrad=bf16*bf16",
         "fprop=mxfp4*mxfp4 dgrad=mxfp4+sr*{} wgrad=bf16*bf16"),
        ("MXFP8A16", "mxfp8", "fprop=mxfp8*mxfp8 dgrad=mxfp8*{} wgrad=mxfp8*mxfp8"),
        ("FP8", "fp8_tensorwise", "fp8_tensorwise"),
        ("FP8_BLOCK", "fp8_blockwise", "fprop=e4m3/1x128*e4m3/128x128+exact dgrad=e4m3/1x128*"
         "e4m3/128x128+exact wgrad=e4m3/1x128*e4m3/1x128"),
        ("NVFP4A16", "fprop=bf16*nvfp4 dgrad=bf16*nvfp4 wgrad=bf16*bf16",
         "fprop=bf16*nvfp4 dgrad=bf16*{} wgrad=bf16*bf16"),
    ],
)  # fmt: skip
def test_a_quantized_recipe_reads_the_codes_as_they_are(kind, recipe, wanted, tmp_path):
    loaded, _ = loaded_and_plain(kind, tmp_path, recipe)
    layer = loaded.model.layers[0].mlp.up_proj
    assert layer.recipe == mf.Recipe(wanted.format(FORWARD_W))
    before = layer.weight.rowwise.codes.clone()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    fprop = layer.recipe.fprop
    operand = x if fprop.a == "bf16" else mf.tensor.quantize(x, fprop.a)
    assert torch.equal(layer(x), mf.tensor.scaled_mm(operand, layer.weight.rowwise))
    assert all(t.isfinite().all() for t in train(adapted(loaded), IDS, 28))
    assert torch.equal(before, layer.weight.rowwise.codes)
