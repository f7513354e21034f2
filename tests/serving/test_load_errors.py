"""What mf.load_quantized_ refuses. The model is as it was, values and classes."""

import json
from pathlib import Path

import minifloat as mf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support import quantized_checkpoints as checkpoints

CONFIG = {"quantization_config": checkpoints.config_of("NVFP4A16")}


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48)).to(torch.bfloat16)
    return model.add_module("2", nn.Linear(48, 32, bias=False, dtype=torch.bfloat16)) or model


def write(folder: Path, tensors: dict[str, torch.Tensor], config=CONFIG) -> None:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def tensors() -> dict[str, torch.Tensor]:
    found = {}
    for name, value in build().state_dict().items():
        if value.dim() == 2:
            local, _ = checkpoints.compress(value, "NVFP4A16")
            found |= {name.removesuffix("weight") + k: v for k, v in local.items()}
        else:
            found[name] = value
    return found


def test_a_module_of_torch_loads(tmp_path):
    write(tmp_path, tensors())
    model = build()
    report = mf.load_quantized_(model, tmp_path, "*: bf16; 2: nvfp4")
    assert [name for name, _ in report.converted] == ["0", "2"]
    assert "fprop=nvfp4*nvfp4 " in report.converted[1][1]


def test_matrices_with_names_of_experts_are_no_experts(tmp_path):
    model = build()
    for name in ("gate_up_proj", "down_proj"):
        model.register_parameter(name, nn.Parameter(torch.zeros(4, 6)))
    values = {name: torch.ones(4, 6) for name in ("gate_up_proj", "down_proj")}
    write(tmp_path, tensors() | values)
    mf.load_quantized_(model, tmp_path)
    assert torch.equal(model.down_proj, values["down_proj"])


def without(*names):
    return lambda t: {k: v for k, v in t.items() if k not in names}


def replaced(**values):
    return lambda t: t | {k.replace("_at_", "."): v for k, v in values.items()}


CASES = [
    (without("1.bias", "2.weight_packed"), "got: 2.weight_global_scale is unknown; 2.weight_scale"),
    (without("0.bias"), "got: 0.bias is missing"),
    (replaced(other=torch.ones(2)), "got: other is unknown"),
    ({"1.bias": torch.ones(3)}, r"1.bias is \(3,\), not \(48,\)"),
    ({"0.weight_packed": torch.zeros(16, 32, dtype=torch.uint8)}, "expected codes and scales of"),
    (without("0.weight_global_scale"), "expected codes and scales of NVFP4"),
    ({"0.weight_scale": torch.ones(48, 4)}, "expected codes and scales of NVFP4"),
    ({"0.weight_global_scale": torch.tensor([0.0])}, "expected a positive factor"),
    (
        {"0.weight_scale_inv": torch.ones(48, 4)},
        "expected scales in one tensor, got 0.weight_scale",
    ),
    ({"0.weight_zero_point": torch.zeros(48, 4)}, "0.weight_zero_point is unknown"),
    ({"1.weight": torch.ones(48).to(torch.float8_e4m3fn)}, "without scales"),
]


@pytest.mark.parametrize(("change", "message"), CASES)
def test_a_checkpoint_of_another_model_is_refused(change, message, tmp_path):
    given = tensors()
    write(tmp_path, change(given) if callable(change) else given | change)
    model = build()
    with pytest.raises(ValueError, match=message) as error:
        mf.load_quantized_(model, tmp_path)
    assert str(error.value).startswith("load_quantized_: ")
    require_unchanged(model)


def require_unchanged(model):
    assert [type(m) for m in model] == [nn.Linear, nn.LayerNorm, nn.Linear]
    expected = build().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


CONFIGS = [
    ({}, "expected quantization_config.quant_method"),
    ({"quantization_config": {"quant_method": "gptq"}}, "got 'gptq'"),
    (
        {"quantization_config": CONFIG["quantization_config"] | {"transform_config": {"a": 1}}},
        "expected weights without transforms",
    ),
    (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4}}},
            }
        },
        "expected symmetric weights of type float in config_groups.g",
    ),
    *(
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": of}},
            f"expected an object in {where}, got list",
        )
        for of, where in [
            ([1], "config_groups"),
            ({"g": [1]}, "config_groups.g"),
            ({"g": {"weights": [1]}}, "config_groups.g.weights"),
        ]
    ),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS)
def test_another_method_is_refused(config, message, tmp_path):
    write(tmp_path, tensors(), config)
    with pytest.raises(ValueError, match=message):
        mf.load_quantized_(build(), tmp_path)


def test_a_group_of_activations_alone_is_read(tmp_path):
    config = checkpoints.config_of("NVFP4A16")
    group = {"targets": ["Attention"], "weights": None, "input_activations": {"type": "float"}}
    config["config_groups"] |= {"group_1": group}
    write(tmp_path, tensors(), {"quantization_config": config})
    assert len(mf.load_quantized_(build(), tmp_path).converted) == 2


def test_a_buffer_that_has_two_names_is_no_scale(tmp_path):
    """Of a tied module, whose second name a checkpoint may have alone."""
    bounds = nn.Module()
    bounds.register_buffer("input_scale", torch.ones(3))
    model = build()
    model.add_module("3", bounds)
    model.add_module("4", bounds)
    write(tmp_path, tensors() | {"4.input_scale": torch.full((3,), 2.0)})
    mf.load_quantized_(model, tmp_path)
    assert torch.equal(bounds.input_scale, torch.full((3,), 2.0))


def test_folders_that_are_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected safetensors in .* got no file"):
        mf.load_quantized_(build(), tmp_path)
    write(tmp_path, tensors())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with pytest.raises(ValueError, match="to name the tensors of its files"):
        mf.load_quantized_(build(), tmp_path)
    for file in ("other.safetensors", 1):
        index.write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(ValueError, match=f"got no .*/{file}"):
            mf.load_quantized_(build(), tmp_path)


def test_a_tensor_is_that_of_its_file(tmp_path):
    """A stale copy in another file is not read where the index names one, else refused."""
    write(tmp_path, tensors())
    whole = tmp_path / "model.safetensors"
    of_model = build().state_dict()
    stale = {n: torch.full_like(t, 3.0) for n, t in load_file(whole).items() if n in of_model}
    save_file(stale, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"where files have the same names, got .* in model\.safe"):
        mf.load_quantized_(build(), tmp_path)
    index = {name: whole.name for name in load_file(whole)}
    content = {"weight_map": index}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    model = build()
    mf.load_quantized_(model, tmp_path)
    assert stale
    assert not any((model.state_dict()[name] == 3.0).any() for name in stale)


DAMAGED = [
    ("model.safetensors", lambda b: b[: len(b) // 2], "expected safetensors in .*, got"),
    ("model.safetensors", lambda b: b"", "expected safetensors in .*, got"),
    ("model.safetensors", lambda b: b"x" * 1000, "expected safetensors in .*, got"),
    ("config.json", lambda b: b[:-3], "expected JSON in .*, got"),
    ("config.json", lambda b: b"[]", "expected an object in .*, got list"),
    ("config.json", lambda b: b'{"quantization_config": [1]}', "expected an object .* got list"),
    ("model.safetensors.index.json", lambda b: b"{", "expected JSON in .*, got"),
    ("model.safetensors.index.json", lambda b: b'{"weight_map": [1]}', "expected .* got list"),
]


@pytest.mark.parametrize(("name", "change", "message"), DAMAGED)
def test_damaged_files_are_named(name, change, message, tmp_path):
    write(tmp_path, tensors())
    path = tmp_path / name
    path.write_bytes(change(path.read_bytes() if path.exists() else b""))
    model = build()
    with pytest.raises(ValueError, match=f"^load_quantized_: {message}") as error:
        mf.load_quantized_(model, tmp_path)
    assert str(path) in str(error.value)
    require_unchanged(model)


NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("NVFP4A16", NAN),
        ("NVFP4A16", -1.0),
        ("MXFP4A16", 0xFF),  # NaN of E8M0, in bytes
        ("FP8_DYNAMIC", NAN),
        ("FP8_DYNAMIC", -1.0),
    ],
)
def test_scales_of_no_values_are_refused(kind, value, tmp_path):
    values = build().state_dict()
    local, _ = checkpoints.compress(values.pop("0.weight"), kind)
    found = values | {f"0.{name}": tensor for name, tensor in local.items()}
    scale = found["0.weight_scale"]
    scale[3, 0] = value
    write(tmp_path, found, {"quantization_config": checkpoints.config_of(kind)})
    model = build()
    with pytest.raises(ValueError, match=r"got: 0\.weight_scale has 1 scales that are negative"):
        mf.load_quantized_(model, tmp_path)
    require_unchanged(model)


@pytest.mark.parametrize("device", ["nowhere", "meta", "cuda:1000"])
def test_devices_without_memory_are_refused(device, tmp_path):
    write(tmp_path, tensors())
    model = build()
    with pytest.raises(ValueError, match=r"^device: expected a device"):
        mf.load_quantized_(model, tmp_path, device=device)
    require_unchanged(model)


def test_tied_tensors_have_one_value(tmp_path):
    given = tensors() | {"1.bias": torch.ones(48, dtype=torch.bfloat16)}
    write(tmp_path, given | {"1.weight": given["1.bias"] * 2})
    model = build()
    model[1].bias = model[1].weight
    before = model[1].weight.detach().clone()
    with pytest.raises(ValueError, match=r"got: 1\.bias is tied to 1\.weight in the model"):
        mf.load_quantized_(model, tmp_path)
    assert torch.equal(model[1].weight, before)
    write(tmp_path, given | {"1.weight": given["1.bias"].clone()})
    mf.load_quantized_(model, tmp_path)
    assert torch.equal(model[1].weight, given["1.bias"])


def test_models_and_recipes_that_do_not_fit_are_refused(tmp_path):
    write(tmp_path, tensors())
    model = build()
    with pytest.raises(ValueError, match=r"0: expected a recipe .* the same transform"):
        mf.load_quantized_(model, tmp_path, "mxfp4")
    with pytest.raises(ValueError, match="got no match for '7'"):
        mf.load_quantized_(model, tmp_path, "*: bf16; 7: nvfp4")
    model[0].forward = model[0].forward
    with pytest.raises(ValueError, match="got: 0: its forward is replaced on the instance"):
        mf.load_quantized_(model, tmp_path)
    del model[0].forward
    require_unchanged(model)
    mf.quantize_(model, "mxfp8", keep="nothing")
    with pytest.raises(ValueError, match="expected a plain model, got 0 converted"):
        mf.load_quantized_(model, tmp_path)
    half = build().half()
    with pytest.raises(ValueError, match=r"0.weight has codes, .* not a Linear in torch.float16"):
        mf.load_quantized_(half, tmp_path)


def test_buffers_that_no_file_has_need_values(tmp_path):
    write(tmp_path, tensors())
    model = build().to("meta")
    model.register_buffer("table", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="table is missing"):
        mf.load_quantized_(model, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == tensors().keys()


def test_parameters_with_names_of_scales_are_read(tmp_path):
    def model() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64))
        for name in ("q_scale", "output_scale", "factor", "factor_scale"):
            model.register_parameter(name, nn.Parameter(torch.randn(4)))
        return model

    written, read = model(), model()
    mf.quantize_(written, "mxfp8", keep="nothing")
    mf.export(written, tmp_path)
    assert not mf.load_quantized_(read, tmp_path).notes
    for name in ("q_scale", "output_scale", "factor", "factor_scale"):
        assert torch.equal(read.get_parameter(name), written.get_parameter(name))
