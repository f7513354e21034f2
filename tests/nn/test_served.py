"""Recipes that train a model as it is served: the forward is that of a server, bit for bit.

The server is written in tests/support/serving.py from the bytes of the folder that mf.export
writes. Where the sums of the products are exact, log-probabilities are equal; elsewhere each
layer's output is within the bound of its sums.
"""

import copy
from itertools import pairwise

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import serving
from tests.support.exact_sums import granule, order_bound, require_exact_sum

PRESETS = [name for name in mf.presets() if name.endswith("_served")]
VOCABULARY, K, N = 32, 256, 128


def narrow(*shape, top):
    """Draws bfloat16 values from top / 8 to top of both signs, and one of `top` in each row.

    Each block of a row, of 16 to 128 values, then has an amax between top / 2 and top, so that few
    binades hold all values of a product.
    """
    x = (torch.rand(*shape) * 7 / 8 + 1 / 8) * (torch.randint(0, 2, shape) * 2 - 1)
    x[..., ::128] = 1
    return (x * top).bfloat16()


class Model(nn.Module):
    """An embedding, linear layers with an activation after each, and a head."""

    def __init__(self, widths, activation):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, widths[0])
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=False) for k, n in pairwise(widths))
        self.lm_head = nn.Linear(widths[-1], VOCABULARY, bias=False)
        self.activation = activation

    def forward(self, tokens):
        h = self.embed(tokens)
        for layer in self.layers:
            h = self.activation(layer(h))
        return self.lm_head(h).float().log_softmax(-1)


def exported(model, path):
    """Returns what a server reads of a converted model, in bfloat16."""
    mf.export(model, path, dtype=torch.bfloat16)
    return serving.Folder(path)


def served(folder, x_spec, layers, activation, tokens):
    """Returns a server's log-probabilities, and the operands of each of its products."""
    h, operands = folder.tensors["embed.weight"].bfloat16()[tokens], []
    for i in range(layers):
        operands.append((serving.quantize_tokens(h, x_spec), folder.weight(f"layers.{i}")))
        h = activation(serving.linear(*operands[-1]))
    head = F.linear(h, folder.tensors["lm_head.weight"].bfloat16())
    return head.float().log_softmax(-1), operands


@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PRESETS)
def test_log_probabilities_are_those_of_the_server(name, master, tmp_path):
    """A float32 master is rounded by autocast, as the checkpoint that the server quantizes is."""
    torch.manual_seed(0)
    recipe, model = mf.Recipe(name), Model([K, N], F.relu).to(master)
    # Scales by these amaxes are powers of two: 1.3125 = 2688 / 2^11, 1.75 = 448 / 2^8.
    top = 1.3125 if recipe.fprop.b.startswith("nvfp4") else 1.75
    with torch.no_grad():
        model.embed.weight.copy_(narrow(VOCABULARY, K, top=1.75))
        weight = narrow(N, K, top=top).to(master)
        if master == torch.float32:  # which bfloat16 rounds back
            weight *= 1 + 2.0**-10 * (torch.rand(N, K) - 0.5)
        model.layers[0].weight.copy_(weight)
    tokens = torch.randint(0, VOCABULARY, (64,))
    mf.quantize_(model, name)
    folder = exported(model, tmp_path / "served")
    assert folder.has_input_activations == (name == "fp8_blockwise_served")
    want, operands = served(folder, recipe.fprop.a, 1, F.relu, tokens)
    for x, w in operands:
        magnitude = x.values.abs() @ w.values.abs().t()
        require_exact_sum(
            magnitude, granule(x.values, 1)[:, None] * granule(w.values, 1)[None], name
        )
    with torch.autocast("cpu", torch.bfloat16, enabled=master == torch.float32):
        got = model(tokens)
    assert torch.equal(got, want)
    got.sum().backward()  # it is the forward of training
    assert model.layers[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("name", PRESETS)
def test_layers_are_those_of_the_server_within_the_bound_of_sums(name, tmp_path):
    """Both round their sums to bf16, which differ by a step of 2^-8 of the value at most."""
    torch.manual_seed(1)
    recipe, model = mf.Recipe(name), Model([K, N, 192], F.silu).bfloat16()
    calls = []
    mf.quantize_(model, name)
    folder = exported(model, tmp_path / "served")
    for layer in model.layers:
        layer.register_forward_hook(lambda *call: calls.append(call))
    model(torch.randint(0, VOCABULARY, (64,)))
    assert len(calls) == len(model.layers)
    for i, (layer, (h,), y) in enumerate(calls):
        x = serving.quantize_tokens(h.detach(), recipe.fprop.a)
        w = folder.weight(f"layers.{i}")
        want, got = serving.linear(x, w), y.detach()
        magnitude = (x.values.abs() @ w.values.abs().t()) * w.factors.t() * x.factors
        bound = order_bound(magnitude, layer.in_features, roundings=4) + 2.0**-8 * want.abs()
        assert ((got.double() - want.double()).abs() <= bound).all()


def test_each_token_is_quantized_alone():
    """A token's log-probabilities do not depend on the tokens beside it, as in a server's batch."""
    torch.manual_seed(2)
    model = Model([K, N], F.relu).bfloat16()
    mf.quantize_(model, "nvfp4_served")
    with torch.no_grad():
        model.embed.weight[0] *= 1000
        y = model.layers[0](model.embed(torch.tensor([0, 5, 6, 7])))
        assert torch.equal(y[1:], model.layers[0](model.embed(torch.tensor([1, 5, 6, 7])))[1:])


class Mixture(nn.Module):
    """A linear layer with a bias, a feed-forward that may be one op, and experts."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(128, 128)
        self.w1, self.w3 = (nn.Linear(128, 256, bias=False) for _ in range(2))
        self.w2 = nn.Linear(256, 128, bias=False)
        self.moe = mf.MoE(128, 64, 4, 2)

    def forward(self, x):
        x = self.first(x)
        x = x + self.w2(F.silu(self.w1(x)) * self.w3(x))
        return x + self.moe(x)


@pytest.mark.parametrize("options", [{}, {"fuse": True}, {"recompute": "weight"}], ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_frozen_weights_leave_other_gradients_as_they_are(name, options):
    torch.manual_seed(3)
    model, x = Mixture().bfloat16(), torch.randn(32, 128).bfloat16()
    mf.quantize_(model, name, keep="nothing", **options)
    wanted, leaves = {}, {"x": x.requires_grad_(), **dict(model.named_parameters())}
    leaves = {n: t for n, t in leaves.items() if t.requires_grad}
    weights = {n for n, p in leaves.items() if n != "x" and p.dim() > 1}
    for frozen in (set(), weights, {"w1.weight"}, {"w1.weight", "w3.weight"}, {"w2.weight"}):
        for fqn in weights:
            leaves[fqn].requires_grad_(fqn not in frozen)
        used = {n: t for n, t in leaves.items() if n not in frozen}
        got = torch.autograd.grad(model(x).float().square().mean(), [*used.values()])
        wanted = wanted or dict(zip(used, got))
        for fqn, gradient in zip(used, got):
            assert torch.equal(gradient, wanted[fqn]), (fqn, frozen)


@pytest.mark.parametrize("recompute", [None, "weight"])
def test_compiled_code_and_recomputed_weights_give_the_same_bits(recompute):
    torch.manual_seed(3)
    model, x = Mixture().bfloat16(), torch.randn(32, 128).bfloat16()
    other = copy.deepcopy(model)
    mf.quantize_(model, "nvfp4_served", keep="nothing")
    mf.quantize_(other, "nvfp4_served", keep="nothing", recompute=recompute)
    other.compile(backend="aot_eager", fullgraph=True)
    found = []
    for each in (model, other):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        used = [p for p in each.parameters() if p.requires_grad]
        found.append([y, *torch.autograd.grad(y.float().square().mean(), [leaf, *used])])
    for got, want in zip(*found):
        assert torch.equal(got, want)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_compiled_code_trains_past_frozen_weights(name, fuse):
    torch.manual_seed(3)
    model, x = Mixture().bfloat16(), torch.randn(32, 128).bfloat16().requires_grad_()
    mf.quantize_(model, name, keep="nothing", fuse=fuse)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    other = copy.deepcopy(model)
    other.compile(backend="aot_eager", fullgraph=True)
    found = [torch.autograd.grad(each(x).float().square().mean(), x) for each in (model, other)]
    assert torch.equal(found[0][0], found[1][0])
