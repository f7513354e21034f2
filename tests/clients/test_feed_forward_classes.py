"""Which feed-forwards of transformers are one op: each is right, or is left out with a reason."""

from collections import Counter

import pytest
from minifloat.nn.fuse.find_mlps import WITHIN

from tests.support.feed_forward_classes import (
    NO_ROW,
    all_classes,
    build,
    find_class,
    outcome_of,
    require_right,
)

NO_PART = " is no part of a feed-forward"


def fused(activation: str, layers: str = "gate_proj, up_proj, down_proj") -> str:
    return f"{layers} and {activation} are one op"


KNOWN = {
    "llama.LlamaMLP": fused("silu"),
    "qwen3.Qwen3MLP": fused("silu"),
    "gemma.GemmaMLP": fused("gelu_tanh"),
    "granite.GraniteMLP": fused("silu"),
    "vit.ViTMLP": fused("gelu", "fc1, fc2"),
    "siglip.SiglipMLP": fused("gelu_tanh", "fc1, fc2"),
    "phi3.Phi3MLP": NO_ROW,  # one layer computes gate and up
    "deepseek_v4.DeepseekV4MLP": "self.gate_proj(x).clamp(max=self.limit)" + NO_PART,
    "step3p7.Step3p7MLP": "self.act_fn(self.gate_proj(x)).clamp(max=self.limit)" + NO_PART,
    "glm5_next.Glm5NextTextMLP": "gate.clamp(min=None, max=self.swiglu_limit)" + NO_PART,
    "glm5_next.Glm5NextVisionMLP": "gate.clamp(min=None, max=self.swiglu_limit)" + NO_PART,
    "clip.CLIPMLP": "torch.sigmoid(1.702 * input) of activation_fn" + NO_PART,
    "falcon_h1.FalconH1MLP": "self.gate_multiplier" + NO_PART,  # 1 by default
    "seed_oss.SeedOssMLP": "its forward drops with p=0.1, by nn.functional.dropout(down_proj, "
    "p=self.residual_dropout, training=self.training)",
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_class_of_transformers(name):
    module = build(find_class(name))
    assert outcome_of(module) == KNOWN[name]
    if "are one op" in KNOWN[name]:
        require_right(module, KNOWN[name])


# Of the classes of the transformers in requirements.lock: how many are one op, and how many are
# left out because of which text.
RELU = "F.relu(input, inplace=self.inplace) of "
OF_DROPOUT = (
    "its forward drops with p={}, by F.dropout(input, self.p, self.training, self.inplace) of "
)
DROPS = "its forward drops with p=0.1, by nn.functional.dropout("
EVERY = {
    "silu are one op": 163,
    "gelu are one op": 66,
    "gelu_tanh are one op": 20,
    NO_ROW: 85,
    "has no linear layer": 11,
    "needs more than a config": 10,
    # a feed-forward within a larger forward
    WITHIN.format("up_proj and down_proj"): 4,
    WITHIN.format("fc1 and fc2"): 1,
    WITHIN.format("ffw_layer_1 and ffw_layer_2"): 1,
    # another activation, or one that is written by hand
    f"{RELU}activation_fn": 12,
    f"{RELU}act": 12,
    f"{RELU}activation": 10,
    f"{RELU}act_fn": 1,
    "nn.functional.relu(input) of act_fn": 5,
    "nn.functional.relu(input) of activation_fn": 3,
    "nn.functional.relu(input) of act": 1,
    "F.relu(self.layer1(x))": 2,
    "torch.sigmoid(1.702 * input) of activation_fn": 9,
    "0.5 * input of act": 11,
    "0.5 * input of activation_fn": 2,
    # a clamp
    "self.gate_proj(x).clamp(max=self.limit)": 1,
    "gate.clamp(min=None, max=self.swiglu_limit)": 2,
    "self.act_fn(self.gate_proj(x)).clamp(max=self.limit)": 1,
    # an active dropout
    f"{OF_DROPOUT.format(0.1)}intermediate_dropout": 9,
    f"{OF_DROPOUT.format(0.1)}dropout": 2,
    f"{OF_DROPOUT.format(0.2)}dropout1": 1,
    f"{DROPS}hidden_states, p=self.activation_dropout, training=self.training)": 4,
    f"{DROPS}down_proj, p=self.residual_dropout, training=self.training)": 1,
    # anything else
    "apply_chunking_to_forward(self.ff_chunk, self.chunk_size_feed_forward, "
    "self.seq_len_dim, input)": 3,
    "(self.act_fn(gate.float()) * up.float()).to(gate.dtype)": 1,
    "self.gate_multiplier": 1,
    "if self.activation_sparsity > 0.0:…": 1,
    "if self.config.weight_mode == 'single':…": 1,
    "hidden_states.chunk(2, dim=-1)": 2,
    "the forward reads __class__ of an enclosing scope": 1,
    "F.gelu(input, approximate=self.approximate) of activation_fn": 1,
    "self.fc2(hidden_states)": 2,
}


@pytest.mark.slow  # imports the models of transformers, and runs 250 of their classes
def test_every_class_of_transformers():
    outcomes: Counter[str] = Counter()
    for cls in all_classes():
        module = build(cls)
        if module is None:
            outcomes["needs more than a config"] += 1
            continue
        outcome = outcome_of(module)
        if "are one op" in outcome:
            require_right(module, outcome)
            outcome = outcome.rpartition(" and ")[2]
        outcomes[outcome.removesuffix(NO_PART)] += 1
    assert outcomes == EVERY
