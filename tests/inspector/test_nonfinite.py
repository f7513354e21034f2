"""find_nonfinite names the first tensor with Inf or NaN, forward and backward."""

import math

import minifloat as mf
import pytest
import torch
from minifloat.inspector.nonfinite import find_nonfinite
from torch import nn

from tests.support.llama import ModelConfig, build_model, cross_entropy

CONFIG = ModelConfig(32, 3, 2, 2, 64, 300)


def loss_of(model, batch):
    return cross_entropy(model(batch[:, :-1]), batch[:, 1:])


def ids():
    return torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["bf16", "nvfp4"])
def model(request):
    model = build_model(CONFIG, 16, 1, "cpu")
    if request.param != "bf16":
        mf.quantize_(model, request.param)
    return model


def found_in(model, loss=loss_of):
    return str(find_nonfinite(model, ids(), loss))


def test_a_finite_model_has_none(model):
    assert find_nonfinite(model, ids(), loss_of) is None


def test_a_weight(model):
    with torch.no_grad():
        model.layers[1].attention.wv.weight[2, 3] = math.nan
        model.layers[2].attention.wv.weight[2, 3] = math.nan
    want = "layers.1.attention.wv, weight of fprop: 1 of 1024 values"
    assert found_in(model) == want


def test_the_weight_of_a_norm(model):
    with torch.no_grad():
        model.layers[2].ffn_norm.weight[5] = math.inf
    assert found_in(model) == "layers.2.ffn_norm, weight: 1 of 32 values"


def test_an_input_that_no_module_computed(model):
    """Between the layers, a product of two finite hidden layers overflows."""
    feed_forward = model.layers[1].feed_forward
    with torch.no_grad():
        for layer in (feed_forward.w1, feed_forward.w3):
            layer.weight.fill_(1e25)
    text = found_in(model)
    assert text.startswith("layers.1.feed_forward.w2, x of fprop: ")


def test_an_output(model):
    with torch.no_grad():
        model.layers[0].attention.wo.weight.fill_(3e38)
        model.layers[0].attention.wv.weight.mul_(1e4)
    assert found_in(model).startswith("layers.0.attention.wo, y of fprop: ")


def test_a_loss(model):
    assert found_in(model, lambda m, b: loss_of(m, b) * math.inf) == "the loss: 1 of 1 values"


class Explodes(torch.autograd.Function):
    """The identity, whose gradient has an Inf."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        g.view(-1)[7] = math.inf
        return g


def test_a_gradient_of_the_last_layer_that_has_it(model):
    """Backward meets layers.1 before layers.0, and w2 before w1."""
    feed_forward = model.layers[1].feed_forward
    plain = type(feed_forward).forward

    def forward(x):
        return Explodes.apply(plain(feed_forward, x))

    feed_forward.forward = forward
    text = found_in(model)
    assert text == "layers.1.feed_forward.w2, g of dgrad and wgrad: 1 of 1024 values"


def test_the_gradient_of_a_parameter():
    """All of g and x are finite, and their product is not."""

    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(0)
    x = torch.full((64, 4), 1e30)
    assert find_nonfinite(model, x, lambda m, x: (m(x) * 1e6).sum()) is None
    found = find_nonfinite(model, x, lambda m, x: (m(x) * 1e9).sum())
    assert str(found) == "weight, its gradient from wgrad: 16 of 16 values"


def test_experts():
    model = build_model(ModelConfig(32, 2, 2, 2, 48, 300, 16, 4, 2, 1), 16, 1, "cpu")
    mf.quantize_(model, "mxfp8")
    with torch.no_grad():
        model.layers[1].moe.experts.w2[1, 0, 0] = math.nan
    assert found_in(model) == "layers.1.moe.experts, w2 of fprop: 1 of 2048 values"


class Mapped(nn.Linear):
    """Returns its output by a name."""

    def forward(self, x):
        return {"h": super().forward(x)}


class Attends(nn.Module):
    """Modules that return several tensors, and one that attention reads without a call."""

    def __init__(self):
        super().__init__()
        self.up, self.attention = nn.Linear(16, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.mapped, self.lstm = Mapped(16, 16), nn.LSTM(16, 16, batch_first=True)
        self.down = nn.Linear(16, 16)

    def forward(self, x):
        h = self.up(x)
        h = self.mapped(self.attention(h, h, h)[0])["h"]
        return self.down(self.lstm(h)[0]).square().mean()


@pytest.mark.parametrize(
    "name",
    ["attention.in_proj_weight", "attention.out_proj.weight", "mapped.bias", "lstm.weight_hh_l0"],
)
def test_modules_that_return_several_tensors(name):
    model, x = Attends(), torch.randn(2, 4, 16)
    assert find_nonfinite(model, x, lambda m, x: m(x)) is None
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = math.nan
    found = str(find_nonfinite(model, x, lambda m, x: m(x)))
    module, _, parameter = name.rpartition(".")
    assert found.startswith(f"{module}, {parameter}"), found


def test_nothing_is_left_behind(model):
    with torch.no_grad():
        model.layers[1].attention.wv.weight[2, 3] = math.nan
    hooks = [dict(m._forward_hooks) for m in model.modules()]
    found_in(model)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert [dict(m._forward_hooks) for m in model.modules()] == hooks
