"""Megatron-Core's recompute of activations: random bits of a recomputed forward are the same."""

import minifloat as mf

from tests.support.megatron_models import EXPERTS, MLA, begin, build, config, loss
from tests.support.same_bits import require_same
from tests.support.worlds import run_world

UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform"}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block"}


def selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


# Without Transformer Engine, Megatron has no "layernorm", "mla_up_proj" and "moe_act".
FULL = [
    UNIFORM | {"recompute_num_layers": 1},
    UNIFORM | {"recompute_num_layers": 2},
    BLOCK | {"recompute_num_layers": 1},
]
DIVIDED = BLOCK | {"recompute_num_layers": 2, "distribute_saved_activations": True}
SELECTIVE = [selective("core_attn"), selective("mlp"), selective("core_attn", "mlp")]
CASES = [  # config, names, what is recomputed
    ({}, "te", [*FULL, DIVIDED, *SELECTIVE]),
    ({"sequence_parallel": True}, "local", [*FULL, *SELECTIVE]),
    (MLA, "local", [FULL[0], *SELECTIVE]),
    (MLA, "te", [FULL[0]]),
    (EXPERTS | {"sequence_parallel": True}, "te", [FULL[0], selective("core_attn", "moe")]),
]


def trained(of, names, weights, recipe):
    """Returns the losses and gradients of two steps, the second of changed weights."""
    model = build(of, names)
    if weights is not None:
        model.load_state_dict(weights)
    weights = {name: t.clone() for name, t in model.state_dict().items() if t is not None}
    mf.quantize_(model, recipe)
    found = {}
    for step in range(2):
        model.zero_grad()
        value = loss(model, step)
        value.backward()
        found[f"{step}: loss"] = value.detach()
        found |= {f"{step}: {n}": p.grad.clone() for n, p in model.named_parameters()}
        mf.step(model)
    return weights, found


def check(rank):
    begin(tp=2)
    for changes, names, cases in CASES:
        for recipe in ("nvfp4",) if changes else ("nvfp4", "fp8_delayed"):
            weights, want = trained(config(**changes), names, None, recipe)
            for case in cases:
                _, got = trained(config(**changes, **case), names, weights, recipe)
                for name, value in got.items():
                    require_same(value, want[name], f"{recipe}, {names}, {changes | case}: {name}")


def test_recompute_changes_no_bit():
    run_world(2, check)
