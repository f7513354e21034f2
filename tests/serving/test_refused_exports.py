"""What mf.export refuses, with every name and nothing written, and what it warns of."""

import minifloat as mf
import pytest
import safetensors.torch
import torch
from minifloat.transformers import replace_conv1d_
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.distributed.configuration_utils import DistributedConfig

from tests.support.same_bits import require_same_bytes
from tests.support.served_models import (
    decompress,
    export,
    llama,
    qwen3_moe,
    values,
    weight_recipe,
    write_small_files,
)


@pytest.mark.parametrize(
    ("recipe", "options", "why"),
    [
        (weight_recipe("mxfp4+rht", "mxfp4+rht"), {}, "servers know no transform of the weight"),
        (weight_recipe("mxfp4+sr"), {}, "drawn anew in each step"),
        (weight_recipe("mxfp8/e5m2"), {}, "no server reads weights of mxfp8/e5m2"),
        (weight_recipe("e1m2/1x16"), {}, "no server reads weights of e1m2/1x16"),
        (weight_recipe("e1m2/1x32"), {}, "no server reads weights of e1m2/1x32"),
        (weight_recipe("e4m3/1x128"), {}, "no server reads weights of e4m3/1x128"),
        ("fprop=bf16*bf16 dgrad=mxfp8*mxfp8 wgrad=bf16*bf16", {}, "in high precision"),
        (weight_recipe("e4m3/128x128", "e4m3/row"), {}, "no server casts x as e4m3/row"),
        (weight_recipe("mxfp4", "nvfp4/row"), {}, "no server casts x as nvfp4/row"),
        ("nvfp4", {}, "pass amaxes=mf.calibrate(model, batches), or weight_only=True"),
        ("mxfp4", {"format": "modelopt"}, "x cast by group; format='compressed-tensors'"),
        ("fp8_tensorwise", {"format": "modelopt"}, "ModelOpt has no name"),
    ],
)
def test_layers_that_cannot_be_written_are_all_named(recipe, options, why, tmp_path):
    model = llama()
    report = mf.quantize_(model, recipe)
    with pytest.raises(ValueError, match="a model that can be written") as error:
        mf.export(model, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    for name, _ in report.converted:
        (line,) = (line for line in str(error.value).splitlines() if f"{name}: " in line)
        assert why in line


class Batched(torch.nn.Module):
    """Experts whose matrices are B of a product, (E, K, N)."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 64, 32))

    def forward(self, x):
        return torch.bmm(x, self.weight)


class Stateful(torch.nn.Module):
    """A module whose state dict has more than tensors."""

    def get_extra_state(self):
        return {"seen": 1}


def test_weights_and_folders_that_cannot_be_written(tmp_path):
    def refuse(model, what, folder="out", **options):
        with pytest.raises(ValueError, match=what):
            mf.export(model, tmp_path / folder, **options)

    odd = torch.nn.Sequential(torch.nn.Linear(72, 64))
    mf.quantize_(odd, "mxfp8")
    refuse(odd, r"\n  0: expected inputs as a multiple of 32, got 72")
    tied = llama(tie_word_embeddings=True)
    mf.quantize_(tied, "mxfp8", keep="nothing")
    refuse(tied, "lm_head: its weight is tied to model.embed_tokens.weight")
    broken = llama()
    mf.quantize_(broken, "mxfp8")
    broken.model.layers[0].mlp.down_proj.weight.data[3, 5] = float("nan")
    refuse(broken, r"got\n  model.layers.0.mlp.down_proj: its weight has Inf or NaN$")
    refuse(llama(), "expected layers that mf.quantize_ converted, got none")
    good = llama()
    mf.quantize_(good, "mxfp8")
    refuse(good, "amaxes: lm_head: no converted layer", amaxes={"lm_head": torch.ones(())})
    with pytest.raises(TypeError, match=r"^amaxes: expected a mapping of names, got list$"):
        mf.export(good, tmp_path / "out", amaxes=[1])
    for amax in (torch.tensor(float("nan")), torch.tensor(-1.0), torch.ones(2), 1.0):
        q_proj = "model.layers.0.self_attn.q_proj"
        refuse(good, f"amaxes: {q_proj}: expected a finite tensor", amaxes={q_proj: amax})
    stateful = torch.nn.Sequential(torch.nn.Linear(64, 64), Stateful())
    mf.quantize_(stateful, "mxfp8", keep="nothing")
    refuse(stateful, "1._extra_state: a checkpoint has tensors alone, got dict")
    meta = torch.nn.Sequential(torch.nn.Linear(64, 64, device="meta"))
    mf.quantize_(meta, "mxfp8", keep="nothing")
    refuse(meta, "0: its weight has no values, on meta")
    offloaded = llama()
    mf.quantize_(offloaded, "mxfp8")
    offloaded.lm_head.to("meta")
    refuse(offloaded, "lm_head.weight: it has no values, on meta")
    divided = llama()
    mf.quantize_(divided, "mxfp8")
    divided.config.distributed_config = DistributedConfig(tp_size=2)
    refuse(divided, "ranks: transformers divided the model by its own tensor parallelism")
    adapted = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    mf.quantize_(adapted, "mxfp8")
    refuse(adapted, "adapters: expected adapters that are merged")
    named = torch.nn.Sequential(Batched())
    mf.quantize_(named, "mxfp8", experts={"*": ["weight"]})
    refuse(named, "0.weight: its module's forward alone says how it reads a parameter")
    replaced = llama()
    mf.quantize_(replaced, "nvfp4_served", share_amax="servers")
    replaced.model.layers[0].self_attn.k_proj = torch.nn.Linear(128, 64, bias=False)
    refuse(replaced, r"self_attn.k_proj: expected a layer under .* got Linear; convert the model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    refuse(good, "expected an absent or empty one", folder="full")
    refuse(good, "expected one of compressed-tensors, modelopt, got 'gguf'", format="gguf")
    assert not (tmp_path / "out").exists()
    assert len([*(tmp_path / "full").iterdir()]) == 1


class Adapter:
    """An adapter that keeps names, and changes the matrices of one layer."""

    hf_assets_path = None

    def __init__(self, change):
        self.change = change

    def to_hf(self, tensors):
        return {k: self.change(t) if k == "0.weight" else t for k, t in tensors.items()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda w: w.T, "is not made of whole rows"),
        (lambda w: w.flip(1), "is not made of whole rows"),
        (lambda w: w.flip(0), None),
        (lambda w: w[64:], None),
        (lambda w: w[None], r"has it as 0.weight \(1, 128, 128\), which is no linear layer"),
        (lambda w: w[:, :64], "which is no linear layer"),
        (lambda w: w.missing, "its name in a checkpoint was not found"),
    ],
)
def test_layers_of_a_checkpoint_are_whole_rows(change, why, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(128, 128, bias=False), torch.nn.Linear(128, 8))
    mf.quantize_(model, weight_recipe("nvfp4/16x16"), filter_fqns=["1"])
    weight = model[0].weight.detach()
    if why is None:
        tensors, config = export(model, tmp_path / "out", adapter=Adapter(change))
        got = decompress(tensors, "0", config)
        want = change(values(weight, "nvfp4/16x16", torch.bfloat16))
        require_same_bytes(got, want.contiguous())
        return
    with pytest.raises(ValueError, match=why):
        mf.export(model, tmp_path / "out", adapter=Adapter(change))
    assert not (tmp_path / "out").exists()


def refuse(model, message, folder):
    with pytest.raises(ValueError, match=message):
        mf.export(model, folder)
    assert not folder.exists()


def test_two_tensors_of_one_name_are_refused(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    model[0].register_buffer("weight_scale", torch.ones(()))
    mf.quantize_(model, "mxfp8", keep="nothing")
    refuse(model, "expected tensors of different names, got two 0.weight_scale", tmp_path / "out")


@pytest.mark.parametrize("new", ["renamed", "linear.weight", None])
def test_weights_that_a_hook_renames_are_refused(new, tmp_path):
    def rename(module, state, prefix, _):
        weight = state.pop(f"{prefix}0.weight")
        if new is not None:
            state[prefix + new] = weight

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    mf.quantize_(model, "mxfp8", keep="nothing")
    model._register_state_dict_hook(rename)
    refuse(model, r"\n  0: the state dict has no tensor under its weight's name", tmp_path / "out")


def test_conv1d_layers_that_were_replaced_are_refused(tmp_path):
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 64, "n_layer": 1, "n_head": 2}
    model = replace_conv1d_(GPT2LMHeadModel(GPT2Config(**sizes)))
    mf.quantize_(model, "mxfp8")
    message = r"h.0.attn.c_attn: a checkpoint has its weight as \(K, N\), of a Conv1D"
    refuse(model, message, tmp_path / "out")


def test_an_export_that_fails_takes_back_its_files(tmp_path, monkeypatch):
    write_small_files(monkeypatch)
    model = llama()
    mf.quantize_(model, "mxfp8")
    write, written = safetensors.torch.save_file, []

    def fill(tensors, path, metadata):
        if written:
            (path.parent / "others").mkdir()
            raise safetensors.SafetensorError("No space left on device")
        write(tensors, path, metadata)
        written.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", fill)
        with pytest.raises(OSError, match=r"export: .*safetensors: No space left on device"):
            mf.export(model, tmp_path / "out")
    assert written
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"others"}
    (tmp_path / "out/others").rmdir()
    mf.export(model, tmp_path / "out")


def test_blocks_are_not_cut(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(128, 256, bias=False))
    mf.quantize_(model, weight_recipe("e4m3/128x128"), keep="nothing")
    for change in (lambda w: w[64:], lambda w: w.flip(0)):
        with pytest.raises(ValueError, match="begins within a block of 128 rows"):
            mf.export(model, tmp_path / "out", adapter=Adapter(change))
    tensors, config = export(model, tmp_path / "out", adapter=Adapter(lambda w: w[128:]))
    want = values(model[0].weight.detach(), "e4m3/128x128", torch.float32)[128:]
    require_same_bytes(decompress(tensors, "0", config), want)


@pytest.mark.parametrize("what", ["weight", "expert", "x"])
def test_scales_that_underflow_are_named_before_a_file_is_written(what, tmp_path, monkeypatch):
    """1e-36 / 2688 has no inverse in float32. Each tensor is a file, so others would be written."""
    write_small_files(monkeypatch, 1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), mf.MoE(64, 32, experts=4, top_k=2)
    )
    mf.quantize_(model, "nvfp4", keep="nothing")
    amaxes = mf.calibrate(model, [torch.randn(32, 64)])
    name = "2.experts.w2" if what == "expert" else "1"
    with torch.no_grad():
        if what == "x":
            amaxes[name] = torch.tensor(1e-36)
        else:
            weight = model[2].experts.w2[3] if what == "expert" else model[1].weight
            weight.zero_()[5, 7] = 1e-36
    subject = "x" if what == "x" else "its weight"
    expected = rf"got\n  {name}: expected {subject} as zeros, .* got an amax of 1e-36$"
    with pytest.raises(ValueError, match=expected):
        mf.export(model, tmp_path / "out", amaxes=amaxes)
    assert not (tmp_path / "out").exists()
    mf.export(model, tmp_path / "modelopt", "modelopt", amaxes=amaxes)


def test_configurations_that_cannot_be_written_leave_no_folder(tmp_path):
    model = llama()
    mf.quantize_(model, "mxfp8")
    model.generation_config.temperature = 0.3  # without do_sample, which transformers refuses
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        mf.export(model, tmp_path / "out")
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    mf.quantize_(layer, "mxfp8", keep="nothing")
    (tmp_path / "config.json").write_text("{")
    adapter = Adapter(lambda w: w)
    adapter.hf_assets_path = str(tmp_path)
    with pytest.raises(ValueError, match=r"expected JSON in .*config\.json, got Expecting"):
        mf.export(layer, tmp_path / "out", adapter=adapter)
    assert not (tmp_path / "out").exists()


def test_small_layers_of_a_group_are_no_underflow(tmp_path):
    model = llama()
    mf.quantize_(model, "nvfp4_served", share_amax="servers")
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.k_proj.weight.fill_(1e-36)
        layer.mlp.down_proj.weight.zero_()
    tensors, _ = export(model, tmp_path / "out")
    scales = [tensors[f"model.layers.0.{n}.weight_global_scale"].item()
              for n in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")]  # fmt: skip
    assert scales[0] == scales[1] != scales[2] == 1


@pytest.mark.parametrize(
    ("recipe", "groups"),
    [
        ("*: mxfp8; *.k_proj: bf16", 1),
        ("*: mxfp8; *.q_proj: mxfp4; *.up_proj: bf16", 2),
        ("*: mxfp8; *.up_proj: mxfp4; *.k_proj: fp8_rowwise; lm_head: bf16", 2),
    ],
)
def test_groups_of_several_formats_are_named(recipe, groups, tmp_path):
    model = llama()
    mf.quantize_(model, recipe)
    first = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    expected = f"^export: {groups} groups of layers .* have several formats"
    with pytest.warns(UserWarning, match=expected) as seen:
        mf.export(model, tmp_path / "out")
    (text,) = (str(w.message) for w in seen if "several formats" in str(w.message))
    assert f"such as {', '.join(first)}. Servers" in text


@pytest.mark.parametrize("recipe", ["mxfp8", "*: mxfp8; *.mlp.*: mxfp4"])
@pytest.mark.filterwarnings("error")
def test_groups_of_one_format_are_not_warned_of(recipe, tmp_path):
    for i, model in enumerate((llama(), qwen3_moe())):
        mf.quantize_(model, recipe)
        mf.export(model, tmp_path / str(i))


def test_scales_that_servers_join_are_named(tmp_path):
    model = llama()
    mf.quantize_(model, weight_recipe("nvfp4"))
    expected = "2 groups of layers .* such as .*q_proj, .*k_proj, .* share_amax='servers' before"
    with pytest.warns(UserWarning, match=expected):
        mf.export(model, tmp_path / "out")
