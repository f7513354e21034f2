"""The input of sibling projections is quantized once. Each result is compared, bit for bit, with
the same model that reuses nothing.
"""

import copy
import gc

import minifloat as mf
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.llama import Attention, FeedForward, ModelConfig, build_model, rotary_table
from tests.support.reuse_counts import RECIPES, casts, without_reuse
from tests.support.same_bits import require_same_numbers

CONFIG = ModelConfig(dim=64, layers=1, heads=4, kv_heads=2, ffn=96, vocab=300)
TABLE = rotary_table(16, 16)


def attention(recipe="nvfp4"):
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": Attention(CONFIG)})
    mf.quantize_(model, recipe)
    return model


def hidden(seed=1):
    torch.manual_seed(seed)
    return torch.randn(2, 15, 64, requires_grad=True)


def gradients(model, x, run):
    return torch.autograd.grad(run(x).sum(), [x, *model.parameters()])


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "fp8_delayed"])
def test_q_k_and_v_quantize_their_input_once(recipe):
    model = attention(recipe)
    twin = without_reuse(model)
    x = hidden()
    with torch.no_grad():
        assert casts(lambda: model.attention(x, TABLE), (30, 64)) == 2  # one for wo's
        assert casts(lambda: twin.attention(x, TABLE), (30, 64)) == 4
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got, want = (
                gradients(m, x, lambda x, m=m: m.attention(x, TABLE)) for m in (model, twin)
            )
        for a, b in zip(got, want):
            require_same_numbers(a, b)
    assert model.attention.wq.shared_input.cached is None  # all three have read it
    assert model.attention.wo.shared_input is None


def test_names_of_other_models():
    torch.manual_seed(0)
    model = nn.ModuleDict({n: nn.Linear(64, 32) for n in ("q_proj", "k_proj", "v_proj", "o_proj")})
    model["mlp"] = FeedForward(CONFIG)
    mf.quantize_(model, "*: mxfp8; v_proj: nvfp4")
    assert model.q_proj.shared_input is model.k_proj.shared_input is not None
    assert model.v_proj.shared_input is None  # another recipe
    assert model.o_proj.shared_input is None
    assert model.mlp.w1.shared_input is model.mlp.w3.shared_input is not None
    x = hidden()
    with torch.no_grad():
        assert casts(lambda: [model.q_proj(x), model.v_proj(x), model.k_proj(x)], (30, 64)) == 2
        assert casts(lambda: model.mlp(x), (30, 64)) == 1


def test_different_inputs_are_each_quantized():
    model = attention()
    a = model.attention
    x, y = hidden(1), hidden(2)
    with torch.no_grad():
        for run in (lambda m: m.wq(x), lambda m: m.wk(y), lambda m: m.wv(y), lambda m: m.wq(y)):
            require_same_numbers(run(a), run(without_reuse(a)))
        a.wq(x)
        x.mul_(2)  # a write between the siblings
        require_same_numbers(a.wk(x), without_reuse(a).wk(x))
        require_same_numbers(a.wk(x.clone()), without_reuse(a).wk(x))
    frozen = attention()
    frozen.attention.wk.requires_grad_(False)  # its input has no columnwise reader
    got, want = (
        torch.autograd.grad(
            m.attention(y, TABLE).sum(), [y, *(p for p in m.parameters() if p.requires_grad)]
        )
        for m in (frozen, without_reuse(frozen))
    )
    for p, q in zip(got, want):
        require_same_numbers(p, q)


def test_an_input_that_not_all_read_is_let_go():
    a = attention().attention
    x = hidden().detach()
    with torch.no_grad():
        a.wq(x)
        assert a.wq.shared_input.cached is not None
        del x
        gc.collect()
        assert a.wq.shared_input.cached is None


def test_stochastic_and_delayed_inputs_are_each_layers_own():
    own = "fprop=mxfp8+sr*mxfp8 dgrad=mxfp8*mxfp8 wgrad=mxfp8*mxfp8"
    assert attention(own).attention.wq.shared_input is None
    assert attention("fp8_delayed").attention.wq.shared_input is None


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant, early_stop):
    torch.manual_seed(0)
    model = build_model(CONFIG, 16, 1, "cpu")
    mf.quantize_(model, "nvfp4")
    twin = without_reuse(model)
    block = model.layers[0]
    options = {} if reentrant else {"early_stop": early_stop}
    for i in range(3):
        x = hidden(i)
        for m in (model, twin):
            mf.load_training_state(m, {"rng": torch.tensor([0, i])})
        y = checkpoint(block, x, model.rotary, use_reentrant=reentrant, **options)
        y.sum().backward()
        grads = [x.grad.clone(), *(p.grad.clone() for p in block.parameters())]
        x.grad = None
        twin.layers[0](x, twin.rotary).sum().backward()
        want = [x.grad, *(p.grad for p in twin.layers[0].parameters())]
        for a, b in zip(grads, want):
            require_same_numbers(a, b)
        model.zero_grad()
        twin.zero_grad()


def test_copies_of_a_model_share_among_themselves():
    model = attention()
    twin = copy.deepcopy(model)
    assert twin.attention.wq.shared_input is twin.attention.wv.shared_input
    assert twin.attention.wq.shared_input is not model.attention.wq.shared_input


def test_hooks_see_every_projection():
    model = attention()
    seen = []
    for name in ("wq", "wk", "wv"):
        layer_ = getattr(model.attention, name)
        layer_.register_forward_hook(lambda m, i, o, name=name: seen.append(name))
    model.attention(hidden(), TABLE)
    assert seen == ["wq", "wk", "wv"]


@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_trace_has_no_shared_codes(has_gradients):
    model = attention("mxfp8").eval()
    with torch.set_grad_enabled(has_gradients):
        traced = torch.jit.trace(model.attention, (hidden(), TABLE), check_trace=False)
        for seed in (1, 2):
            x = hidden(seed)
            require_same_numbers(traced(x, TABLE), model.attention(x, TABLE))
