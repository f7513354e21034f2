"""mf.export's folders, as compressed-tensors and transformers read them: the codes, to the bit."""

import json

import minifloat as mf
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tests.support.same_bits import require_all_same, require_same_bytes
from tests.support.served_models import (
    SIZES,
    converted,
    decompress,
    export,
    layer,
    llama,
    mixtral,
    qwen3_moe,
    read,
    tokens,
    values,
    weight_recipe,
    write_small_files,
)

SPECS = (
    "nvfp4",
    "nvfp4+up",
    "nvfp4+pow2",
    "nvfp4+4over6",
    "nvfp4/16x16",
    "nvfp4/16x16+4over6",
    "mxfp8",
    "mxfp8/32x32",
    "mxfp4",
    "mxfp4+floor",
    "e4m3/tensor",
    "e4m3/row",
    "e4m3/row+exact",
    "e4m3/128x128",
    "e4m3/128x128+exact",
)
CODES = ("weight_packed", "weight")


def plain_model(build, spec, dtype, folder):
    """Returns the model with the values of the codes as weights, saved and loaded."""
    model = build()
    mf.quantize_(model, weight_recipe(spec))
    weights = {n: values(w, spec, dtype) for n, w in converted(model).items()}
    mf.restore_(model)
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        parameter = parameters.get(name, parameters.get(f"{name}.weight"))
        parameter.data.copy_(weight)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_folder_has_the_codes_and_their_values(spec, tmp_path):
    """compressed-tensors computes FP8 in the scales' float32, and other formats in bfloat16.

    NVFP4's tensor scale is applied in another order there, in float32: s / S, then times the code.
    That is at most 3 roundings away, 2^-22 of a value, and rounds to the same bfloat16 but where a
    midpoint lies between: about once in 2^14 values, and nowhere in these weights.
    """
    model = llama()
    mf.quantize_(model, weight_recipe(spec))
    tensors, config = export(model, tmp_path / "out")
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    for name, weight in converted(model).items():
        found = layer(tensors, name)
        (codes,) = (found[key] for key in CODES if key in found)
        require_same_bytes(codes.view(torch.uint8), mf.tensor.quantize(weight, spec).codes, name)
        got = decompress(tensors, name, config)
        assert got.dtype == (torch.float32 if spec.startswith("e4m3") else torch.bfloat16)
        require_same_bytes(got, values(weight, spec, got.dtype), name)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        require_same_bytes(tensors[name], model.state_dict()[name], name)


@pytest.mark.parametrize("spec", ["nvfp4/16x16", "mxfp8", "e4m3/row"])
def test_codes_of_a_primary_model_are_written_as_they_are(spec, tmp_path):
    recipe = f"fprop=bf16*{spec} dgrad=bf16*{spec} wgrad=bf16*bf16"
    models = [llama(), llama()]
    mf.quantize_(models[0], recipe)
    mf.quantize_(models[1], recipe, primary=True)
    (got, _), (want, _) = (export(m, tmp_path / str(i)) for i, m in enumerate(models))
    require_all_same(list(got.values()), list(want.values()))
    assert list(got) == list(want)


def test_weights_are_rounded_to_the_dtype_of_forwards(tmp_path):
    model = llama()
    mf.quantize_(model, weight_recipe("nvfp4"))
    tensors, _ = export(model, tmp_path / "out", dtype=torch.bfloat16)
    for name, weight in converted(model).items():
        want = mf.tensor.quantize(weight.bfloat16(), "nvfp4").codes
        require_same_bytes(tensors[f"{name}.weight_packed"], want, name)


def test_delayed_scaling_has_the_scale_of_the_next_forward(tmp_path):
    model = llama()
    mf.quantize_(model, "fp8_delayed")
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    mf.step(model)
    with torch.no_grad():
        for weight in converted(model).values():
            weight.mul_(1.5)  # past the amax that the scale is of: codes saturate
    tensors, _ = export(model, tmp_path / "out")
    for name, module in model.named_modules():
        if isinstance(module, mf.Linear):
            amax = module.amax_history[1, 0]
            want = mf.tensor.quantize(module.weight.detach(), "e4m3/tensor+delayed", amax=amax)
            require_same_bytes(tensors[f"{name}.weight"].view(torch.uint8), want.codes, name)
            require_same_bytes(tensors[f"{name}.weight_scale"], want.scale.reshape(1), name)


GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["nvfp4_served", weight_recipe("nvfp4/16x16"), "fp8_tensorwise"])
@pytest.mark.filterwarnings("error")
def test_layers_that_share_an_amax_have_the_codes_of_training_and_one_scale(
    recipe, dtype, tmp_path
):
    """They are the rows of the codes of the matrix that servers join, and nothing is warned of."""
    model, spec = llama(), mf.Recipe(recipe).fprop.b
    mf.quantize_(model, recipe, share_amax="servers")
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    mf.step(model)
    tensors, _ = export(model, tmp_path / "out", weight_only=True, dtype=dtype)
    for group in GROUPS:
        names = [f"model.layers.0.{name}" for name in group]
        modules = [model.get_submodule(name) for name in names]
        weights = [m.weight.detach().to(dtype or torch.float32) for m in modules]
        joined = mf.tensor.quantize(torch.cat(weights), spec)
        rows = joined.codes.split([len(weight) for weight in weights])
        found = [layer(tensors, name) for name in names]
        for module, own, want in zip(modules, found, rows):
            (codes,) = (own[key].view(torch.uint8) for key in CODES if key in own)
            require_same_bytes(codes, want.contiguous())
            x = torch.ones(1, module.in_features, dtype=dtype)
            own_codes = module.amax_group.operands(module, module.weight, x, False)[0]
            require_same_bytes(codes, own_codes)
        key = "weight_global_scale" if "nvfp4" in spec else "weight_scale"
        assert len({own[key].item() for own in found}) == 1


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_a_model_that_is_one_layer_is_loaded_again(form, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 48)
    mf.quantize_(model, weight_recipe("nvfp4", "nvfp4"), keep="nothing")
    amaxes = mf.calibrate(model, [torch.randn(8, 64)])
    tensors, _ = export(model, tmp_path / "out", form, amaxes=amaxes)
    assert {"weight_scale", "bias"} < {*tensors}
    loaded = torch.nn.Linear(64, 48)
    mf.load_quantized_(loaded, tmp_path / "out")
    q = loaded.weight.direction("nvfp4", False)
    want = mf.tensor.quantize(model.weight.detach(), "nvfp4")
    require_same_bytes(q.codes, want.codes)
    require_same_bytes(q.scale, want.scale)


def test_buffers_that_share_memory_are_written_apart(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    mf.quantize_(model, "mxfp8", keep="nothing")
    model.register_buffer("table", torch.randn(4, 4))
    model.register_buffer("flat", model.table.view(16))
    tensors, _ = export(model, tmp_path / "out")
    require_same_bytes(tensors["table"], model.table)
    require_same_bytes(tensors["flat"], model.flat)


# ---- transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("spec", ["nvfp4", "mxfp8/32x32", "mxfp4", "e4m3/tensor", "e4m3/128x128"])
def test_transformers_computes_what_the_values_give(spec, dequantize, tmp_path):
    """The loaded model has the plain model's weights, and runs the same ops on them."""
    dtype = torch.float32 if spec.startswith("e4m3") else torch.bfloat16
    model = llama()
    mf.quantize_(model, weight_recipe(spec))
    mf.export(model, tmp_path / "out")
    config = {"quant_method": "compressed-tensors", "dequantize": dequantize}
    saved = json.loads((tmp_path / "out/config.json").read_text())
    saved["quantization_config"] |= config
    (tmp_path / "out/config.json").write_text(json.dumps(saved))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).eval()
    with torch.no_grad():
        got = loaded(tokens()).logits
        want = plain_model(llama, spec, dtype, tmp_path / "plain")(tokens()).logits
    require_same_bytes(got, want)


def test_shards_and_their_index_load_as_one_file_does(tmp_path, monkeypatch):
    model = llama(tie_word_embeddings=True)
    mf.quantize_(model, weight_recipe("e4m3/row"))
    one, _ = export(model, tmp_path / "one")
    write_small_files(monkeypatch)
    several, _ = export(model, tmp_path / "several")
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "several").glob("*.safetensors")}
    assert len(files) > 2
    assert files == {*index["weight_map"].values()}
    assert {*one} == {*several} == {*index["weight_map"]}
    assert "lm_head.weight" not in one
    require_all_same([one[key] for key in one], [several[key] for key in one])
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / f) for f in ("one", "several")]
    with torch.no_grad():
        require_same_bytes(*(m(tokens()).logits for m in loaded))


@pytest.mark.parametrize("spec", ["nvfp4", "mxfp8", "e4m3/row+exact"])
def test_a_loaded_model_saves_the_same_codes(spec, tmp_path):
    dtype = torch.float32 if spec.startswith("e4m3") else torch.bfloat16
    model = llama().to(dtype)
    mf.quantize_(model, weight_recipe(spec))
    want, _ = export(model, tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    got, config = read(tmp_path / "again")
    assert {*got} == {*want}
    for name, tensor in want.items():
        require_same_bytes(got[name].view(torch.uint8), tensor.view(torch.uint8), name)
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


# ---- experts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["e4m3/row", "e4m3/tensor"])
@pytest.mark.parametrize("build", [mixtral, qwen3_moe])
def test_transformers_loads_experts(build, spec, tmp_path):
    """transformers rounds the values of FP8 experts to bfloat16."""
    model = build()
    mf.quantize_(model, weight_recipe(spec))
    mf.export(model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    parameters = dict(loaded.named_parameters())
    found = {n: w for n, w in converted(model).items() if ".experts." in n}
    assert len(found) == 2
    for name, weight in found.items():
        got = parameters[name].detach().bfloat16()
        require_same_bytes(got, values(weight, spec, torch.bfloat16), name)


@pytest.mark.parametrize("spec", ["nvfp4/16x16", "nvfp4+4over6", "mxfp8", "mxfp4", "e4m3/tensor"])
def test_each_expert_is_a_layer_with_its_rows_of_the_codes(spec, tmp_path):
    model = qwen3_moe()
    mf.quantize_(model, weight_recipe(spec))
    tensors, config = export(model, tmp_path / "out")
    prefix = "model.layers.0.mlp.experts"
    weights = converted(model)
    gate_up, down = (weights[f"{prefix}.{name}"] for name in ("gate_up_proj", "down_proj"))
    for expert in range(4):
        for name, whole, rows in (
            ("gate_proj", gate_up, slice(0, 64)),
            ("up_proj", gate_up, slice(64, 128)),
            ("down_proj", down, slice(0, 128)),
        ):
            got = decompress(tensors, f"{prefix}.{expert}.{name}", config)
            want = values(whole, spec, got.dtype)[expert, rows]
            require_same_bytes(got, want, (name, expert))
    assert config["quantization_config"]["ignore"] == ["model.layers.0.mlp.gate", "lm_head"]


def test_experts_that_are_not_converted_keep_their_values(tmp_path):
    model = qwen3_moe()
    mf.quantize_(model, "*: fp8_rowwise; *.experts: bf16")
    tensors, config = export(model, tmp_path / "out")
    prefix = r"re:model\.layers\.0\.mlp\.experts\.\d+\."
    assert config["quantization_config"]["ignore"] == [
        *(f"{prefix}{name}_proj$" for name in ("gate", "up", "down")),
        "model.layers.0.mlp.gate",
        "lm_head",
    ]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    _, config = export(model, tmp_path / "modelopt", "modelopt")
    assert "model.layers.0.mlp.experts.*.up_proj" in config["quantization_config"]["ignore"]
    down = model.model.layers[0].mlp.experts.down_proj.detach()
    for expert in range(4):
        name = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
        require_same_bytes(tensors[name], down[expert], name)


@pytest.mark.parametrize("options", [{}, {"fused_w13": True}, {"fused_w13": True, "limit": 7.0}])
def test_mixtures_of_this_library_have_names_of_their_own(options, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(mf.MoE(64, 32, experts=4, top_k=2, **options))
    mf.quantize_(model, weight_recipe("e4m3/row"))
    tensors, config = export(model, tmp_path / "out")
    experts = model[0].experts
    for expert in range(4):
        if options:
            w1, w3 = experts.w13[expert].detach().chunk(2)
        else:
            w1, w3 = experts.w1[expert].detach(), experts.w3[expert].detach()
        for name, weight in (("w1", w1), ("w3", w3), ("w2", experts.w2[expert].detach())):
            got = decompress(tensors, f"0.experts.{expert}.{name}", config)
            require_same_bytes(got, values(weight, "e4m3/row", torch.float32), name)
    assert config["quantization_config"]["ignore"] == ["0.router"]


# ---- several formats -----------------------------------------------------------------------------


def test_layers_of_several_formats_are_named(tmp_path):
    model = qwen3_moe()
    mf.quantize_(model, "*: mxfp8; *.self_attn.*: fp8_rowwise; *.o_proj: bf16")
    mf.export(model, tmp_path / "out")
    _, config = read(tmp_path / "out")
    about = config["quantization_config"]
    assert about["format"] == "mixed-precision"
    attention, experts = about["config_groups"].values()
    assert attention["format"], experts["format"] == ("float-quantized", "mxfp8-quantized")
    assert attention["targets"] == [
        f"model.layers.0.self_attn.{name}_proj" for name in ("q", "k", "v")
    ]
    assert experts["targets"] == [
        rf"re:model\.layers\.0\.mlp\.experts\.\d+\.{name}_proj$" for name in ("gate", "up", "down")
    ]
    assert about["ignore"] == [
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate",
        "lm_head",
    ]
    QuantizationConfig.model_validate(about)


def llava():
    """Returns a model whose layers have other names in a checkpoint than its modules."""
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 32, "image_size": 8, "patch_size": 4, "projection_dim": 32}
    config = LlavaConfig(
        text_config={"model_type": "llama", **SIZES},
        vision_config={"model_type": "clip_vision_model", **vision},
        image_token_index=5,
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config)


def gpt_neox():
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes))


@pytest.mark.parametrize("build", [gpt_neox, llava])
def test_transformers_leaves_layers_out_by_the_names_of_its_modules(build, tmp_path):
    model = build()
    recipes = f"*: {weight_recipe('e4m3/row')}; *.mlp.*: {weight_recipe('e4m3/tensor')}"
    mf.quantize_(model, recipes if build is gpt_neox else f"{recipes}; *.vision_tower.*: bf16")
    _, config = export(model, tmp_path / "out")
    ignored = config["quantization_config"]["ignore"]
    assert ("embed_out" if build is gpt_neox else "language_model.lm_head") in ignored
    assert "lm_head" in ignored
    again = build()
    mf.load_quantized_(again, tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        loaded(input_ids=torch.arange(6, 16)[None])  # which decompresses
    wanted = mf.restore_(again).state_dict()
    found = loaded.state_dict()
    require_all_same([found[name] for name in wanted], list(wanted.values()))


def test_transformers_loads_layers_of_several_formats(tmp_path):
    model = llama()
    specs = {"mlp": "mxfp4", "q_proj": "nvfp4/16x16", "self_attn": "e4m3/row"}
    recipes = (
        f"*.{part}*: {weight_recipe(specs[part])}" for part in ("mlp", "self_attn", "q_proj")
    )
    mf.quantize_(model, "; ".join(recipes))
    mf.export(model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    with torch.no_grad():
        loaded(tokens())  # which decompresses
    weights = loaded.state_dict()
    for name, weight in converted(model).items():
        spec = next(spec for part, spec in specs.items() if part in name)
        require_same_bytes(weights[f"{name}.weight"], values(weight, spec, torch.bfloat16), name)
