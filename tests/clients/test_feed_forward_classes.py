"""Which feed-forwards of transformers are one op: each is right, or is left out with a reason."""

from collections import Counter

import pytest
from transformers import T5Config

from tests.support.feed_forward_classes import (
    NO_ROW,
    all_classes,
    build,
    find_class,
    outcome_of,
    require_right,
)

NO_PART = " is no part of a feed-forward"


CHUNKED = (
    "Signature.from_callable(ff_chunk, follow_wrapped=True, globals=None, locals=None, "
    "eval_str=False)"
)


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
    "deepseek_v4.DeepseekV4MLP": "gate_proj(x).clamp(max=10.0)" + NO_PART,
    "step3p7.Step3p7MLP": "silu(gate_proj(x)).clamp(max=inf)" + NO_PART,
    "glm5_next.Glm5NextTextMLP": "gate_proj(x).clamp(min=None, max=10.0)" + NO_PART,
    "glm5_next.Glm5NextVisionMLP": "gate_proj(x).clamp(min=None, max=10.0)" + NO_PART,
    "clip.CLIPMLP": "1.702 * fc1(x)" + NO_PART,
    "t5.T5DenseGatedActDense": "F.relu(wi_0(x), inplace=False)" + NO_PART,
    "seed_oss.SeedOssMLP": (
        "dropout(down_proj(silu(gate_proj(x)) * up_proj(x)), p=0.1, training=True)" + NO_PART
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_class_of_transformers(name):
    module = build(find_class(name))
    assert outcome_of(module) == KNOWN[name]
    if "are one op" in KNOWN[name]:
        require_right(module, KNOWN[name])


def test_t5_with_an_activation_of_the_op():
    """Its forward compares the dtypes of x and of a weight, and asks isinstance of the weight."""
    cls = find_class("t5.T5DenseGatedActDense")
    module = cls(T5Config(feed_forward_proj="gated-silu", dropout_rate=0.0))
    assert outcome_of(module) == fused("silu", "wi_0, wi_1, wo")
    require_right(module, outcome_of(module))


# Of the classes of the transformers of requirements.lock: how many are one op, and
# how many are left out because of which node.
EVERY = {
    "silu are one op": 164,
    "gelu are one op": 66,
    "gelu_tanh are one op": 20,
    NO_ROW: 91,
    "has no linear layer": 11,
    "needs more than a config": 10,
    # another activation
    "F.relu(fc1(x), inplace=False)": 15,
    "F.relu(proj_in(x), inplace=False)": 8,
    "F.relu(wi(x), inplace=False)": 5,
    "F.relu(wi_0(x), inplace=False)": 4,
    "F.relu(linear1(x), inplace=False)": 2,
    "F.relu(up_proj(x), inplace=False)": 1,
    "F.relu(layer1(x))": 2,
    "nn.functional.relu(up_proj(x))": 5,
    "nn.functional.relu(fc1(x))": 3,
    "nn.functional.relu(dense_h_to_4h(x))": 1,
    # an activation that is written by hand
    "1.702 * fc1(x)": 9,
    "0.5 * wi_0(x)": 5,
    "0.5 * wi(x)": 2,
    "0.5 * fc_in(x)": 2,
    "0.5 * fc1(x)": 2,
    "0.5 * linear_in(x)": 1,
    "0.5 * c_fc(x)": 1,
    # a clamp
    "gate_proj(x).clamp(max=10.0)": 1,
    "gate_proj(x).clamp(min=None, max=10.0)": 2,
    "silu(gate_proj(x)).clamp(max=inf)": 1,
    # an active dropout
    "dropout(gelu(intermediate_dense(x)), p=0.1, training=True)": 9,
    "dropout(silu(linear1(x)), p=0.1, training=True)": 3,
    "dropout(c_proj(gelu(c_fc(x), approximate='tanh')), p=0.1, training=True)": 1,
    "dropout(gelu(gate_proj(x)) * up_proj(x), p=0.1, training=True)": 1,
    "dropout(gelu(fc1(x)), p=0.2, training=True)": 1,
    "dropout(gelu(intermediate(x)), p=0.1, training=True)": 1,
    "dropout(down_proj(silu(gate_proj(x)) * up_proj(x)), p=0.1, training=True)": 1,
    # anything else
    CHUNKED: 3,
    "gate_proj(x).float()": 1,
    "its forward reads gate_proj(x).device": 1,
    "its forward reads config.weight_mode": 1,
    "input_linear(x).chunk(2, dim=-1)": 2,
    "x.transpose(1, 2)": 1,
    "gelu(fc2(gelu(fc1(x))))": 1,
    "fc2(fc1(x))": 2,
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
