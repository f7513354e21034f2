"""LoRA on the 3D parameters of experts (PEFT's target_parameters), converted before or after."""

import minifloat as mf
import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.support.adapters import adapted
from tests.support.experts import relative_error
from tests.support.foreign_experts import Batched, D, E

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
OF_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
GROUPS = {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "v_head_dim": 16}
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, **OF_EXPERTS, head_dim=16, num_experts=4, decoder_sparse_step=1)
    ),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**SMALL, **OF_EXPERTS, **LATENT, **GROUPS, n_routed_experts=4)
    ),
}
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.arange(24).view(2, 12) * 7 % 64


def run(model: nn.Module) -> list[torch.Tensor]:
    """Returns logits and the gradients of all adapters."""
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    named = {n: p.grad for n, p in model.named_parameters() if "lora_" in n}
    assert len(named) == 4
    return [out.logits.detach(), *named.values()]


@pytest.mark.parametrize("name", MODELS)
def test_adapters_of_experts_before_and_after_conversion(name):
    """A missing adapter changes far more than the rounding of operands to 2^-4 of themselves."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name]()

    expected = run(adapted(build(), PARAMETERS))
    outputs = []
    for is_first, primary in ((True, False), (False, False), (True, True), (False, True)):
        model = build() if is_first else adapted(build(), PARAMETERS)
        recipe = "mxfp8_2d" if primary else "fp8_rowwise"
        report = mf.quantize_(
            model, recipe, filter_fqns=() if is_first else ["lora_"], primary=primary
        )
        assert sum(".mlp.experts." in row for row, _ in report.converted) == 2
        model = adapted(model, PARAMETERS) if is_first else model
        found = run(model)
        for got, want in zip(found, expected, strict=True):
            assert relative_error(got, want) < 0.3
        outputs.append(found)
        with torch.no_grad(), model.disable_adapter():
            assert relative_error(model(input_ids=IDS).logits, expected[0]) > 0.3
    for a, b in ((0, 1), (2, 3)):
        assert all(map(torch.equal, outputs[a], outputs[b]))


def test_adapters_of_named_experts():
    x = torch.randn(E, 6, D, generator=torch.Generator().manual_seed(1))
    names = {"*": ["inputs", "outputs"]}

    def build(is_converted: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Batched())
        if is_converted:
            mf.quantize_(model, "fp8_rowwise", experts=names)
        return adapted(model, ["0.inputs", "0.outputs"])

    plain, converted = build(False), build(True)
    assert 0 < relative_error(converted(x), plain(x)) < 0.2
    with converted.disable_adapter():
        assert relative_error(converted(x), plain(x)) > 0.2
