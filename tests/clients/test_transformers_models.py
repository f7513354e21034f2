"""Models of transformers: what is converted, and what the report says of the rest."""

import minifloat as mf
import pytest
import torch
import transformers
from minifloat.nn.convert.heads import heads_of
from minifloat.transformers import replace_conv1d_, restore_conv1d_
from torch import nn
from torch.nn.utils import parametrize
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.pytorch_utils import Conv1D

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def gpt2(seed=0):
    torch.manual_seed(seed)
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=64, **tokens, **drops)
    )


def ids(seed=0):
    return torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed=0):
    return model(input_ids=ids(seed), labels=ids(seed)).loss


# ---- Conv1D --------------------------------------------------------------------------------------


def test_conv1d_is_named_with_what_to_do():
    report = mf.quantize_(gpt2(), "mxfp8", keep="nothing")
    assert report.converted == [("lm_head", "mxfp8")]
    assert len(report.skipped) == 8
    reasons = dict(report.skipped)
    assert "minifloat.transformers.replace_conv1d_(model)" in reasons["transformer.h.0.attn.c_attn"]
    with pytest.raises(ValueError, match=r"8 x Conv1D.*replace_conv1d_"):
        mf.quantize_(gpt2(), "mxfp8")


def with_linears(model):
    """Replaces each Conv1D of a model by a new Linear of the same values."""
    for name, conv in [*model.named_modules()]:
        if type(conv) is Conv1D:
            linear = nn.Linear(conv.nx, conv.nf)
            linear.weight = nn.Parameter(conv.weight.detach().t().contiguous())
            linear.bias = nn.Parameter(conv.bias.detach().clone())
            model.set_submodule(name, linear)
    return model


def train(model, steps):
    """Returns the losses of one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
    return losses


def loss_without_context():
    """Returns the entropy of the labels: the least loss of outputs that depend on no token."""
    _, counts = ids()[:, 1:].unique(return_counts=True)
    share = counts / counts.sum()
    return -(share * share.log()).sum().item()


def test_replaced_conv1d_trains_and_returns_to_its_format():
    model, plain = gpt2(), gpt2()
    ids_of_biases = {id(p) for name, p in model.named_parameters() if name.endswith("bias")}
    replace_conv1d_(model)
    assert torch.allclose(loss_of(model), loss_of(plain), rtol=1e-6)
    assert ids_of_biases <= {id(p) for p in model.parameters()}
    report = mf.quantize_(model, "mxfp8")
    assert len(report.converted) == 8
    twin = with_linears(gpt2())
    mf.quantize_(twin, "mxfp8")
    losses = train(model, 8)
    assert losses == train(twin, 8)
    assert losses[-1] < loss_without_context()
    with pytest.raises(ValueError, match="restore_conv1d_: expected layers that mf"):
        restore_conv1d_(model)
    mf.restore_(model)
    model.eval()
    wanted = loss_of(model)
    restore_conv1d_(model)
    assert not any(type(m) is nn.Linear for n, m in model.named_modules() if n != "lm_head")
    plain.load_state_dict(model.state_dict())
    assert torch.allclose(loss_of(plain.eval()), wanted, rtol=1e-6)


def test_a_forward_that_a_wrapper_keeps_is_restored():
    """Of a square weight, which nn.Linear's forward would take for its transpose."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Conv1D(32, 32)), torch.randn(4, 32)
    want = model(x)
    mf.quantize_(replace_conv1d_(model), "mxfp8", keep="nothing")
    kept = model[0].forward
    model[0].forward = lambda x: kept(x)
    assert not torch.equal(model(x), want)
    restore_conv1d_(mf.restore_(model))
    assert torch.equal(model(x), want)


class Tied(nn.Module):
    """Conv1D layers under two names, and with one weight."""

    def __init__(self, size: int = 24):
        super().__init__()
        self.a, self.b = Conv1D(40, size), Conv1D(40, size)
        self.again, self.b.weight = self.a, self.a.weight
        self.c = Conv1D(size, 40)

    def forward(self, x):
        return self.c(self.a(x) + self.b(x)) + self.c(self.again(x))


def hook_everywhere(model, seen):
    """Registers hooks of all kinds, which note their names."""
    layer = model.a
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_forward_pre_hook(lambda *_: seen.append("before forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.register_state_dict_post_hook(lambda *_: seen.append("state dict"))
    layer.register_load_state_dict_pre_hook(lambda *_: seen.append("loads"))
    layer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    layer.weight.register_post_accumulate_grad_hook(lambda *_: seen.append("accumulated"))
    return layer.weight.register_hook(lambda _: seen.append("gradient"))


def test_replaced_conv1d_keeps_ties_hooks_and_settings():
    torch.manual_seed(0)
    model, seen = Tied(), []
    handle = hook_everywhere(model, seen)
    model.b.eval()
    model.c.weight.requires_grad_(False)
    model.a.note, model.a.weight.note = "layer", "weight"
    model.a.weight.grad = torch.randn(24, 40)
    grad = model.a.weight.grad.clone()
    modules, x = list(model.modules()), torch.randn(3, 24, requires_grad=True)
    wanted = model(x).detach()

    def check(transposes):
        assert list(model.modules()) == modules
        assert model.again is model.a
        assert model.b.weight is model.a.weight
        assert [n for n, _ in model.named_parameters()] == [
            "a.weight", "a.bias", "b.bias", "c.weight", "c.bias"
        ]  # fmt: skip
        assert [m.training for m in (model, model.a, model.b)] == [True, True, False]
        assert not model.c.weight.requires_grad
        assert (model.a.note, model.a.weight.note) == ("layer", "weight")
        assert torch.equal(model.a.weight.grad, grad.t() if transposes else grad)
        seen.clear()
        y = model(x)
        assert torch.allclose(y, wanted, rtol=1e-5, atol=1e-5)
        y.sum().backward()
        model.load_state_dict(model.state_dict())
        calls = ["before forward", "forward"] * 2 + ["gradient", "accumulated"]
        assert sorted(seen) == sorted(
            [*calls, "backward", "backward", *["state dict", "loads", "loaded"] * 2]
        )
        model.a.weight.grad.copy_(grad.t() if transposes else grad)

    for _ in range(2):
        replace_conv1d_(model)
        assert all(type(m) is nn.Linear for m in modules[1:])
        check(True)
        report = mf.quantize_(model, "mxfp8")
        assert [row for row, _ in report.converted] == ["a", "b", "c"]
        mf.restore_(model)
        check(True)
        restore_conv1d_(model)
        assert all(type(m) is Conv1D for m in modules[1:])
        assert (model.c.nx, model.c.nf) == (40, 24)
        assert not hasattr(model.c, "in_features")
        check(False)
    handle.remove()
    seen.clear()
    model(x).sum().backward()
    assert "gradient" not in seen
    assert replace_conv1d_(model).a.weight._backward_hooks is None  # the dict was left empty


class Scaled(Conv1D):
    def forward(self, x):
        return 2 * super().forward(x)


class Same(Conv1D):
    pass


def test_conv1d_of_other_classes_is_compared():
    model = nn.ModuleDict({"scaled": Scaled(40, 24), "same": Same(24, 24), "other": Conv1D(40, 24)})
    model["other"].forward = lambda x: x
    replace_conv1d_(model)
    assert [type(m) for m in model.values()] == [Scaled, nn.Linear, Conv1D]
    skipped = dict(mf.quantize_(model, "mxfp8").skipped)
    assert "Scaled, whose weight is (K, N); its forward returns other bits" in skipped["scaled"]
    assert "its forward is replaced on the instance" in skipped["other"]
    restore_conv1d_(mf.restore_(model))
    assert type(model["same"]) is Same


def test_conv1d_weights_that_other_modules_share_are_refused():
    model = nn.ModuleDict({"a": Conv1D(40, 24), "table": nn.Embedding(24, 40)})
    model["table"].weight = model["a"].weight
    with pytest.raises(
        ValueError, match=r"replace_conv1d_: expected .* is table\.weight too; give"
    ):
        replace_conv1d_(model)
    assert type(model["a"]) is Conv1D
    model = replace_conv1d_(nn.ModuleDict({"a": Conv1D(40, 24)}))
    model["head"] = nn.Linear(24, 40)
    model["head"].weight = model["a"].weight
    with pytest.raises(ValueError, match=r"restore_conv1d_: expected .* is head\.weight too"):
        restore_conv1d_(model)
    assert type(model["a"]) is nn.Linear
    parametrize.register_parametrization(model["a"], "weight", nn.Identity())
    with pytest.raises(ValueError, match="that are not parametrized, but a is a Parametrized"):
        restore_conv1d_(model)


# ---- nn.MultiheadAttention -----------------------------------------------------------------------


@pytest.mark.parametrize("kdim", [64, 32])
def test_weights_inside_of_attention_are_named_with_what_to_do(kdim):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, kdim=kdim)
            self.mlp = nn.Linear(64, 64)

    report = mf.quantize_(Block(), "mxfp8")
    names = ["in_proj_weight"] if kdim == 64 else [f"{n}_proj_weight" for n in "qkv"]
    reasons = dict(report.skipped)
    assert reasons.keys() == {"attention.out_proj", *(f"attention.{name}" for name in names)}
    for name in names:
        assert "F.scaled_dot_product_attention" in reasons[f"attention.{name}"]


# ---- experts -------------------------------------------------------------------------------------

MIXTURES = {
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SMALL)),
    "Qwen3-MoE": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, **SMALL)
    ),
    "DeepSeek-V3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            **{**SMALL, "num_key_value_heads": 4},
        )
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_converted_and_train(name):
    torch.manual_seed(0)
    model = MIXTURES[name]()
    report = mf.quantize_(model, "mxfp8")
    converted = dict(report.converted)
    experts = [n for n, p in model.named_parameters() if p.dim() == 3]
    assert experts
    assert all(n in converted for n in experts), str(report)
    assert all("lm_head" in n or "router" in why for n, why in report.skipped), str(report)
    assert train(model, 6)[-1] < loss_without_context()


# ---- heads ---------------------------------------------------------------------------------------
DECODER = "cls.predictions.decoder"
HEADS = {  # class -> its heads
    "LlamaForCausalLM": ["lm_head"],
    "GPTNeoXJapaneseForCausalLM": ["embed_out"],
    "BertForMaskedLM": [DECODER],
    "RemBertForMaskedLM": [DECODER],  # whose embedding is narrower than its head
    "BioGptForCausalLM": ["output_projection"],
    "XLNetLMHeadModel": ["lm_loss"],
    "DistilBertForMaskedLM": ["vocab_projector"],
    "FSMTForConditionalGeneration": ["model.decoder.output_projection"],
    "T5ForConditionalGeneration": ["lm_head"],
    "WhisperForConditionalGeneration": ["proj_out"],
    "Blip2ForConditionalGeneration": ["language_model.lm_head"],
    "MusicgenForCausalLM": [f"lm_heads.{i}" for i in range(4)],
    "BertModel": [],
    "ViTModel": [],
    "ViTForImageClassification": [],
    "CLIPModel": [],
    "SiglipVisionModel": [],  # whose `head` pools by attention
    "SamModel": [],  # whose mask decoder has layers called proj_out
    "DecisionTransformerModel": [],  # whose embedding has one row
    "Wav2Vec2Model": [],
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_families(name):
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = cls(cls.config_class())
    assert list(heads_of(model)) == HEADS[name]
