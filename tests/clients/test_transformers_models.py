"""Models of transformers: what is converted, and what the report says of the rest."""

import minifloat as mf
import pytest
import torch
from minifloat.transformers import replace_conv1d_, restore_conv1d_
from torch import nn
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
    report = mf.quantize_(gpt2(), "mxfp8", verbose=False)
    assert report.converted == [("lm_head", "mxfp8")]
    assert len(report.skipped) == 8
    reasons = dict(report.skipped)
    assert "minifloat.transformers.replace_conv1d_(model)" in reasons["transformer.h.0.attn.c_attn"]
    with pytest.raises(ValueError, match=r"8 x Conv1D.*replace_conv1d_"):
        mf.quantize_(gpt2(), "mxfp8", filter_fqns=["lm_head"], verbose=False)


def test_replaced_conv1d_trains_and_returns_to_its_format():
    model, plain = gpt2(), gpt2()
    ids_of_biases = {id(p) for name, p in model.named_parameters() if name.endswith("bias")}
    replace_conv1d_(model)
    assert torch.allclose(loss_of(model), loss_of(plain), rtol=1e-6)
    assert ids_of_biases <= {id(p) for p in model.parameters()}
    report = mf.quantize_(model, "mxfp8", filter_fqns=["lm_head"], verbose=False)
    assert len(report.converted) == 8
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        losses.append(loss_of(model))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
    assert losses[-1] < 0.8 * losses[0]
    with pytest.raises(ValueError, match="restore_conv1d_: expected layers that mf"):
        restore_conv1d_(model)
    mf.restore_(model)
    model.eval()
    wanted = loss_of(model)
    restore_conv1d_(model)
    assert not any(type(m) is nn.Linear for n, m in model.named_modules() if n != "lm_head")
    plain.load_state_dict(model.state_dict())
    assert torch.allclose(loss_of(plain.eval()), wanted, rtol=1e-6)


# ---- nn.MultiheadAttention -----------------------------------------------------------------------


@pytest.mark.parametrize("kdim", [64, 32])
def test_weights_inside_of_attention_are_named_with_what_to_do(kdim):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, kdim=kdim)
            self.mlp = nn.Linear(64, 64)

    report = mf.quantize_(Block(), "mxfp8", verbose=False)
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
    report = mf.quantize_(model, "mxfp8", filter_fqns=["lm_head"], verbose=False)
    converted = dict(report.converted)
    experts = [n for n, p in model.named_parameters() if p.dim() == 3]
    assert experts
    assert all(n in converted for n in experts), str(report)
    assert all("lm_head" in n or "router" in why for n, why in report.skipped), str(report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        losses.append(loss_of(model))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
    assert losses[-1] < 0.8 * losses[0]
