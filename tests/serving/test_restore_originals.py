"""mf.restore_(model, weights): adapters that were trained on codes, over the original weights."""

from copy import deepcopy

import minifloat as mf
import pytest
import torch
from peft import AdaptionPromptConfig, LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from tests.serving import test_load_dense as dense
from tests.serving import test_load_experts as experts
from tests.support import quantized_checkpoints as checkpoints


def with_adapters(model: nn.Module, parameters: list[str]) -> nn.Module:
    """Returns PEFT's model, with adapters that are not zero."""
    torch.manual_seed(5)
    layers = [] if parameters else "all-linear"
    config = LoraConfig(r=4, target_modules=layers, target_parameters=parameters or None)
    config.init_lora_weights = False
    return get_peft_model(model, config)


def merged(model: nn.Module) -> dict[str, torch.Tensor]:
    return model.merge_and_unload().state_dict()


@pytest.mark.parametrize("given", ["state dict", "folder"])
@pytest.mark.parametrize("name", ["dense", "experts", "gpt_oss", "loaded"])
def test_a_merge_publishes_the_original_weights_and_the_adapters(name, given, tmp_path):
    parameters = experts.PARAMETERS if name in ("experts", "gpt_oss") else []
    kind = {"experts": "qwen3_moe", "gpt_oss": "gpt_oss"}.get(name)
    original = experts.build(kind) if kind else dense.build()
    expected = merged(with_adapters(deepcopy(original), parameters))

    if name == "loaded":
        checkpoints.save_quantized(original, tmp_path, *dense.write_of("NVFP4A16"))
        model = dense.build()
        mf.load_quantized_(model, tmp_path)
    else:
        model = deepcopy(original)
        recipe = "mxfp8" if kind else "nvfp4"
        mf.quantize_(model, recipe, primary=True)
    model = with_adapters(model, parameters)
    off = merged(mf.restore_(deepcopy(model)))
    weights: object = original.state_dict()
    if given == "folder":
        original.save_pretrained(tmp_path / "original")  # experts as linear layers
        weights = tmp_path / "original"
    model = mf.restore_(model, weights)
    assert not any(isinstance(p, mf.QuantizedTensor) for p in model.parameters())
    found = merged(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    differing = [key for key, value in off.items() if not torch.equal(value, expected[key])]
    assert len(differing) == (6 if kind else 14)  # the values of the codes are another base


def coded(primary: bool, folder) -> nn.Module:
    model = dense.build()
    if primary:
        mf.quantize_(model, "mxfp8", primary=True)
    else:
        checkpoints.save_quantized(dense.build(), folder, *dense.write_of("MXFP4A16"))
        mf.load_quantized_(model, folder)
    return model


KEY = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("primary", [True, False])
def test_other_weights_are_refused(primary, tmp_path):
    model = coded(primary, tmp_path)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    base = dense.build().state_dict()
    torch.manual_seed(9)
    another = LlamaForCausalLM(dense.config()).to(torch.bfloat16).state_dict()
    cases = [
        ({k: v for k, v in base.items() if k != KEY}, f"{KEY} is missing"),
        (base | {"model.other": torch.ones(2)}, "model.other is unknown"),
        (base | {KEY: torch.ones(2, 64)}, r"up_proj.weight is \(2, 64\), not \(160, 64\)"),
        (base | {KEY: base[KEY].to(torch.float8_e4m3fn)}, "without scales"),
        (base | {KEY: another[KEY]}, f"{KEY}: expected the weight that"),
        (base | {KEY: [1.0]}, f"weights: {KEY}: expected a tensor, got list"),
        ("no such folder", "expected safetensors in no such folder, got no file"),
        (base | {KEY: another[KEY].index_fill(0, torch.tensor(0), torch.inf)}, "weight that"),
    ]
    if primary:  # one element, by one bit
        close = base[KEY].clone()
        close.view(torch.int16)[3, 5] ^= 0x40
        cases.append((base | {KEY: close}, "got one with other codes"))
    for weights, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            mf.restore_(model, weights)
        assert str(error.value).startswith("restore_: ")
    for key, value in model.state_dict().items():
        assert type(value) is type(before[key])
        parts = zip(value.directions, before[key].directions) if key == KEY else ()
        assert all(torch.equal(a.codes, b.codes) for a, b in parts)
    assert isinstance(model.model.layers[1].mlp.up_proj, mf.Linear)
    mf.restore_(model, base)
    assert all(torch.equal(value, base[key]) for key, value in model.state_dict().items())


def test_writes_to_loaded_codes_are_not_lost(tmp_path):
    """A merge changes little, so that the codes stay near the weights they were made from."""
    model = coded(False, tmp_path)
    base = dense.build().state_dict()
    weight = model.get_parameter(KEY)
    with torch.no_grad():
        weight[0, 0] += 0.5 * weight.abs().max()
    values = weight.dequantize(torch.bfloat16)
    with pytest.raises(ValueError, match=f"{KEY}: expected the codes that load_quantized_ read"):
        mf.restore_(model, base)
    assert torch.equal(mf.restore_(model).get_parameter(KEY), values)


def test_a_copy_and_another_dtype_of_loaded_codes_are_no_writes(tmp_path):
    model = deepcopy(coded(False, tmp_path).float())
    base = dense.build().state_dict()
    mf.restore_(model, base)
    assert torch.equal(model.get_parameter(KEY).bfloat16(), base[KEY])


@pytest.mark.parametrize(
    "options", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3]}]
)
def test_weights_reach_models_whose_head_or_tokens_train(options, tmp_path):
    model = coded(False, tmp_path)
    base = dense.build().state_dict()
    config = LoraConfig(r=4, target_modules=["up_proj"], **options)
    model = mf.restore_(get_peft_model(model, config), base)
    assert all(torch.equal(value, base[key]) for key, value in merged(model).items())


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_layers=1, adapter_len=2),
    ],
)
def test_weights_reach_the_model_under_a_prompt(config, tmp_path):
    model = coded(False, tmp_path)
    base = dense.build().state_dict()
    mf.restore_(get_peft_model(model, config), base)
    found = {
        key.replace("self_attn.model.", "self_attn."): v for key, v in model.state_dict().items()
    }
    assert all(torch.equal(found[key], value) for key, value in base.items())


def test_weights_reach_a_model_whose_adapter_is_deleted(tmp_path):
    model = get_peft_model(coded(False, tmp_path), LoraConfig(r=4, target_modules=["up_proj"]))
    model.delete_adapter("default")
    base = dense.build().state_dict()
    mf.restore_(model, base)
    assert torch.equal(model.base_model.model.lm_head.weight, base["lm_head.weight"])


def test_a_model_within_one_of_another_library_keeps_its_names(tmp_path):
    """Its attribute base_model is no prefix of PEFT."""

    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_model = dense.build()

    model, other = Reward(), Reward()
    mf.quantize_(model, "mxfp8")
    mf.export(model, tmp_path / "out")
    other.base_model.config.quantization_config = {"quant_method": "compressed-tensors"}
    mf.load_quantized_(other, tmp_path / "out")
    assert not hasattr(other.base_model.config, "quantization_config")
    base = Reward().state_dict()
    mf.restore_(other, base)
    assert all(torch.equal(value, base[key]) for key, value in other.state_dict().items())


def test_a_weight_of_zeros_is_that_of_its_codes(tmp_path):
    original = dense.build()
    with torch.no_grad():
        original.get_parameter(KEY).zero_()
    checkpoints.save_quantized(original, tmp_path, *dense.write_of("MXFP4A16"))
    model = dense.build()
    mf.load_quantized_(model, tmp_path)
    mf.restore_(model, original.state_dict())
    assert not model.get_parameter(KEY).any()


def test_a_model_without_codes_has_no_originals():
    model = dense.build()
    mf.quantize_(model, "mxfp8")
    with pytest.raises(ValueError, match="a model with whole weights of codes, got none"):
        mf.restore_(model, model.state_dict())
