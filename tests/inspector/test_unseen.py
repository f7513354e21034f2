"""mf.inspect: layers whose calls it cannot see, generators that stay, and inference mode."""

import threading

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from minifloat.inspector.inspection import NOT_CALLED
from torch import nn
from torch.utils.checkpoint import checkpoint


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        return layer(x)

    @staticmethod
    def backward(ctx, g):
        return g, None


class Model(nn.Module):
    """A layer that is seen, `down`, after one that is called in another way."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.idle = nn.Linear(32, 64), nn.Linear(64, 16), nn.Linear(8, 8)
        self.call = call

    def forward(self, x):
        return self.down(torch.tanh(self.call(self.up, x))).square().mean()


def without_gradients(layer, x):
    with torch.no_grad():
        return layer(x)


CALLS = {
    "no_grad": (without_gradients, "called without gradients, as under torch.no_grad"),
    "reentrant": (
        lambda layer, x: checkpoint(layer, x, use_reentrant=True),
        "called in the forward of CheckpointFunction, which hides its gradient; of a checkpoint, "
        "use_reentrant=False does not",
    ),
    "function": (
        lambda layer, x: Hidden.apply(x, layer),
        "called in the forward of Hidden, which hides its gradient; of a checkpoint, "
        "use_reentrant=False does not",
    ),
    "F.linear": (
        lambda layer, x: F.linear(x, layer.weight, layer.bias),
        "not called: linear reads its weight, which no recipe reaches",
    ),
    "matmul": (
        lambda layer, x: x @ layer.weight.t(),
        "not called: t reads its weight, which no recipe reaches",
    ),
}


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("way", CALLS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_call_that_is_not_seen_has_its_reason(way, converted):
    call, reason = CALLS[way]
    model, x = Model(call), torch.randn(8, 32)
    if converted:
        mf.quantize_(model, "mxfp8", keep="nothing")
    found = mf.inspect(model, x, ["mxfp8"])
    assert [row.layer for row in found.rows] == ["down"]
    assert dict(found.skipped) == {"up": reason, "idle": NOT_CALLED}
    assert found.recipe_map(1.0, "mxfp8").text == "*: mxfp8; idle: bf16"


def test_a_weight_that_is_read_beside_its_call():
    """A tied weight, and a norm of the weight in the loss, leave the layer inspected."""
    model, x = Model(lambda layer, x: layer(x)), torch.randn(8, 32)
    found = mf.inspect(model, x, "mxfp8")
    again = mf.inspect(model, x, "mxfp8", loss=lambda m, x: m(x) + 0 * m.up.weight.square().mean())
    assert again.rows == found.rows
    assert [row.layer for row in again.rows] == ["up", "down"]


def test_gradients_through_a_reentrant_checkpoint():
    model, x = Model(lambda layer, x: checkpoint(layer, x, use_reentrant=True)), torch.randn(8, 32)
    before = nn.Sequential(nn.Linear(32, 32), model)
    with pytest.raises(ValueError, match=r"inspect: expected checkpoints .*use_reentrant=False"):
        mf.inspect(before, x, "mxfp8")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in before.modules())


# ---- generators ----------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Draws by each kind of op in eval mode, in a block that may be run again in backward."""

    def __init__(self, again=False):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.again = nn.Linear(32, 64), nn.Linear(64, 32), again
        self.own = torch.Generator().manual_seed(3)
        self.drawn = []

    def block(self, x):
        x = F.dropout(x, 0.3)
        noise = torch.rand(x.shape) + torch.randn_like(x) + torch.randint(0, 3, x.shape)
        noise = noise + torch.empty_like(x).normal_() + torch.normal(x.detach(), 1.0)
        noise = noise + torch.randperm(x.shape[-1]) + torch.rand(x.shape, generator=self.own)
        noise = noise + torch.multinomial(torch.ones(x.shape[0], 4), 1)
        self.drawn.append(noise.clone())
        q = self.up(x + 0.01 * noise)[None, None]
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)[0, 0]
        return self.down(F.dropout(y, 0.5))

    def forward(self, x):
        y = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
        return y.square().mean()


def test_generators_stay_as_they_were():
    model, x = Drawing(), torch.randn(16, 32)
    before = torch.get_rng_state(), model.own.get_state()
    found = mf.inspect(model, x, "mxfp8")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(model.own.get_state(), before[1])
    again = Drawing(again=True)  # which draws the same numbers twice
    torch.set_rng_state(before[0])
    assert mf.inspect(again, x, "mxfp8").rows == found.rows
    assert torch.equal(again.drawn[0], again.drawn[1])


def test_another_thread_draws_what_it_draws_alone():
    """It draws within the forward of the inspected model."""

    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drawn = nn.Linear(32, 32), []

        def draw(self):
            self.drawn += [torch.rand(4) for _ in range(3)]

        def forward(self, x):
            x = F.dropout(x, 0.5)
            other = threading.Thread(target=self.draw)
            other.start()
            other.join()
            return self.layer(x).square().mean()

    model, x = Waits(), torch.ones(8, 32)
    torch.manual_seed(5)
    mf.inspect(model, x, "mxfp8")
    last = torch.rand(4)
    torch.manual_seed(5)
    want = [torch.rand(4) for _ in range(4)]
    for got, number in zip([*model.drawn, last], want, strict=True):
        assert torch.equal(got, number)


# ---- inference mode ------------------------------------------------------------------------------


def test_inference_mode():
    with torch.inference_mode():
        x, weights = torch.randn(8, 32), nn.Linear(32, 32)
        inner = Model(lambda layer, x: layer(x))
    model = Model(lambda layer, x: layer(x))
    expected = r"inspect: expected gradients.*got {}.*; call inspect outside"
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=expected.format("a call under torch.inference_mode")),
    ):
        mf.inspect(model, x, "mxfp8")
    with pytest.raises(ValueError, match=expected.format("a tensor of the batch that was made")):
        mf.inspect(model, x, "mxfp8")
    for made in (nn.Sequential(weights), inner):
        with pytest.raises(ValueError, match=expected.format(r"\S*weight of the model that was")):
            mf.inspect(made, x.clone(), "mxfp8")
    with torch.no_grad():
        assert len(mf.inspect(model, x.clone(), "mxfp8").rows) == 2


# ---- weights that are not the module's -----------------------------------------------------------


def test_layers_called_with_other_weights_are_left_out():
    """As an average of weights is evaluated, by torch.func.functional_call."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(64, 32)
    weights = {"0.weight": model[0].weight.detach() * 100}

    def loss(model, x):
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    found = mf.inspect(model, x, ["nvfp4"], loss=loss)
    assert [row.layer for row in found.rows] == ["1"]
    (reason,) = (why for name, why in found.skipped if name == "0")
    assert reason == "called with another weight than its own, as by torch.func.functional_call"
