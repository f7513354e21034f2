"""mf.calibrate: the largest inputs of layers, and the scales that a folder has of them."""

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.support.same_bits import require_all_same, require_same_bytes
from tests.support.served_models import export, llama, qwen3_moe, tokens, weight_recipe


def largest(inputs, name):
    return max(x.abs().max() for x in inputs[name])


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_served"])
def test_amaxes_are_those_of_inputs(recipe):
    model = llama()
    mf.quantize_(model, recipe)
    model.train()
    inputs, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, mf.Linear):
            see = inputs.setdefault(name, []).append
            handles.append(module.register_forward_pre_hook(lambda _, args, see=see: see(args[0])))
    before = mf.training_state(model)
    amaxes = mf.calibrate(model, [{"input_ids": tokens(i)} for i in range(3)])
    assert {*amaxes} == {*inputs}
    for name, amax in amaxes.items():
        require_same_bytes(amax, largest(inputs, name), name)
    assert model.training
    assert model.model.layers[0].mlp.training
    after = mf.training_state(model)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("options", [{}, {"fused_w13": True}])
def test_hidden_layers_of_experts_have_no_routing_weights(options):
    """Each expert is computed from its codes' values; sums differ by the order of 64 terms."""
    torch.manual_seed(0)
    moe = mf.MoE(64, 32, experts=4, top_k=2, recipe="nvfp4", **options)
    x = torch.randn(16, 64)
    amaxes = mf.calibrate(moe, [x])
    indices, _ = moe.router(x)

    def values(name, expert):
        weight = moe.experts.get_parameter(name).detach()
        return mf.tensor.dequantize(mf.tensor.quantize(weight, "nvfp4/16x16"))[expert]

    hidden = []
    for expert in range(4):
        rows = x[(indices == expert).any(-1)]
        rows = mf.tensor.dequantize(mf.tensor.quantize(rows, "nvfp4"))
        if options:
            gate, up = (rows @ values("w13", expert).T).chunk(2, -1)
        else:
            gate, up = rows @ values("w1", expert).T, rows @ values("w3", expert).T
        hidden.append((nn.functional.silu(gate) * up).abs().max())
    want = torch.stack(hidden).max()
    # Each sum is off by at most 64 roundings of fp32, of terms that cancel little.
    assert abs(amaxes["experts.w2"] - want) <= 2**-14 * want
    first = "experts.w13" if options else "experts.w1"
    require_same_bytes(amaxes[first], x.abs().max())


def test_experts_of_transformers_have_amaxes():
    model = qwen3_moe()
    mf.quantize_(model, "nvfp4")
    prefix, seen = "model.layers.0.mlp.experts", []
    experts = model.get_submodule(prefix)
    experts.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    amaxes = mf.calibrate(model, [tokens()])
    require_same_bytes(amaxes[f"{prefix}.gate_up_proj"], seen[0].abs().max())
    assert 0 < amaxes[f"{prefix}.down_proj"] < amaxes[f"{prefix}.gate_up_proj"]


def test_scales_of_inputs_are_those_of_a_cast_by_the_amax(tmp_path):
    """Of layers that servers compute as one, they are one scale: the largest amax's."""
    model = llama()
    mf.quantize_(model, "*: nvfp4; *.mlp.*: fp8_tensorwise")
    amaxes = mf.calibrate(model, [tokens()])
    q = "model.layers.0.self_attn.q_proj"
    amaxes[q] *= 3  # as if it read another tensor than k and v
    for format in ("compressed-tensors", "modelopt"):
        tensors, config = export(model, tmp_path / format, format, amaxes=amaxes)
        for name, amax in amaxes.items():
            x = torch.full((1, 16), float(amax))
            if ".mlp." in name:
                scale = mf.tensor.quantize(x, "e4m3/tensor").scale
                require_same_bytes(tensors[f"{name}.input_scale"].reshape(()), scale, name)
                continue
            joined = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj")
            x = torch.full((1, 16), float(amaxes[joined]))
            # The amax of a block that is all of the tensor: its scale is 448, and its codes 6.
            value = mf.tensor.dequantize(mf.tensor.quantize(x, "nvfp4"))[0, 0]
            if format == "modelopt":
                factor = tensors[f"{name}.input_scale"]
            else:
                factor = 1 / tensors[f"{name}.input_global_scale"][0]
            require_same_bytes(448 * 6 * factor, value, name)
    if format == "modelopt":
        assert config["quantization_config"]["quant_algo"] == "MIXED_PRECISION"


def test_models_and_batches_that_give_no_amaxes():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    mf.quantize_(model, "*: mxfp8; 1: bf16")
    with pytest.raises(ValueError, match="expected layers whose x has one amax"):
        mf.calibrate(model, [torch.ones(2, 64)])
    mf.restore_(model)
    mf.quantize_(model, "*: nvfp4; 1: bf16")
    with pytest.raises(ValueError, match="expected batches that reach every layer, got none"):
        mf.calibrate(model, [])
    with pytest.raises(ValueError, match="0: expected finite inputs, got an amax of inf"):
        mf.calibrate(model, [torch.full((2, 64), float("inf"))])


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("build", [llama, qwen3_moe])
def test_scales_a_token_have_a_tensor_scale_with_amaxes_and_else_none(build, format, tmp_path):
    """The folder of nvfp4/row is that of nvfp4: no format names a scale a token."""
    models = {x: build() for x in ("nvfp4/row", "nvfp4")}
    for x, model in models.items():
        mf.quantize_(model, weight_recipe("nvfp4", x))
    amaxes = mf.calibrate(models["nvfp4/row"], [tokens()])
    ends = (".input_scale", ".input_global_scale")
    assert {*amaxes} == {*mf.calibrate(models["nvfp4"], [tokens()])}
    for folder, options in (
        ("W4A4", {"amaxes": amaxes}),
        ("W4A16", {"weight_only": True}),
        ("W4A16, by itself", {}),
    ):
        got, config = export(models["nvfp4/row"], tmp_path / folder, format, **options)
        options = options or {"weight_only": True}
        want, expected = export(models["nvfp4"], tmp_path / f"{folder}, nvfp4", format, **options)
        assert config == expected
        require_all_same(list(got.values()), list(want.values()))
        assert any(name.endswith(ends) for name in got) == ("amaxes" in options)


@pytest.mark.parametrize("batches", [3, None, "text", {"input_ids": tokens()}])
def test_batches_are_iterated(batches):
    model = llama()
    mf.quantize_(model, "nvfp4")
    got = type(batches).__name__
    with pytest.raises(TypeError, match=f"^calibrate: expected an iterable of batches, got {got}$"):
        mf.calibrate(model, batches)
