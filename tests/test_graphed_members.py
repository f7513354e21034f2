"""What mf.GraphedStep has captured of a model's members, on a CPU."""

from contextlib import nullcontext
from operator import is_

import minifloat as mf
import pytest
import torch
from minifloat.graphed_members import GraphedMembers
from torch import nn

from tests.support.sharded_models import Model, batch, built, sharded
from tests.support.worlds import run_world


def model_of(*, primary):
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)), nn.Linear(32, 32))
    mf.quantize_(model, "mxfp8", keep="nothing", primary=primary)
    return model


def assign(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def train(model, x):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    mf.step(model)


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (assign, r"0\.0\.weight"),
        (lambda m: m.bfloat16(), r"0\.[01]\.\w+"),
        (lambda m: m[1].bfloat16(), r"1\.\w+"),
        (lambda m: setattr(m[0][1], "running_var", torch.ones(32)), r"0\.1\.running_var"),
        (lambda m: setattr(m[0][1].running_mean, "data", torch.ones(32)), r"0\.1\.running_mean"),
        (lambda m: setattr(m[1], "bias", None), r"1\.bias"),
        (lambda m: m.register_module("1", nn.Linear(32, 32)), "1"),
    ],
)
def test_tensors_are_those_of_the_capture(change, name, primary):
    model = model_of(primary=primary)
    train(model, torch.ones(4, 32))
    members = GraphedMembers(model)
    train(model, torch.ones(4, 32))
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    model.to("cpu", torch.float32)
    members.require()
    change(model)
    with pytest.raises(ValueError, match=rf"expected {name} as at the capture, got another, .*new"):
        members.require()


class Averaged(nn.Module):
    """Keeps an average of its outputs in a buffer."""

    def __init__(self, in_place):
        super().__init__()
        self.linear, self.in_place = nn.Linear(32, 32), in_place
        self.register_buffer("average", torch.zeros(32))

    def forward(self, x):
        y = self.linear(x)
        average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        if self.in_place:
            self.average.copy_(average)
        else:
            self.average = average
        return y


@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_writes_buffers_in_place(monkeypatch, in_place):
    """A replay would set no other tensor. The capture is one without a device."""
    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    model = nn.Sequential(Averaged(in_place), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters())
    step = mf.GraphedStep(lambda x: train(model, x), model, optimizer)
    if in_place:
        step._capture((torch.ones(4, 32),), {})
        return
    with pytest.raises(ValueError, match=r"writes into 0\.average, .* self\.average\.copy_\("):
        step._capture((torch.ones(4, 32),), {})


@pytest.mark.parametrize(
    ("recipe", "primary"), [("fp8_delayed", False), ("nvfp4", False), ("nvfp4", True)]
)
def test_layers_write_in_place(recipe, primary):
    model = nn.Sequential(mf.MoE(32, 64, 4, 2), nn.BatchNorm1d(32), mf.MLP(32, 64))
    mf.quantize_(model, recipe, keep="nothing", primary=primary)
    train(model, torch.ones(4, 32))
    members = GraphedMembers(model)
    train(model, torch.ones(4, 32))
    members.require_written_in_place()


def test_another_conversion():
    """Layers keep their parameters and change class in place."""
    model = model_of(primary=False)
    members = GraphedMembers(model)
    mf.restore_(model)
    with pytest.raises(ValueError, match=r"expected 0\.0\.recipe as at the capture"):
        members.require()
    mf.quantize_(model, "mxfp8", keep="nothing")  # whose state begins anew
    with pytest.raises(ValueError, match=r"expected 0\.0\.recipe as at the capture"):
        members.require()


def test_what_has_no_memory_of_its_own():
    model = nn.ReLU()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_parameter("none", None)
    members = GraphedMembers(model)
    members.require()
    model.sparse = torch.eye(3).to_sparse()
    with pytest.raises(ValueError, match="expected sparse as at the capture"):
        members.require()


def check_sharded(rank, recipe, by_block):
    """Evaluates between steps. FSDP2 leaves the root's weights gathered then."""
    model = built(recipe) if recipe else Model()
    model, x = sharded(model, by_block=by_block), batch(0)
    train(model, x)
    members = GraphedMembers(model)
    sharded_ones, seen = [*model.parameters()], []
    for _ in range(2):
        with torch.no_grad():
            seen.append(model.eval()(x))
        assert not all(map(is_, model.train().parameters(), sharded_ones))
        members.require()
        assert all(map(is_, model.parameters(), sharded_ones))
        for shard in sharded_ones:  # a replay trains it, of which FSDP2 knows nothing
            shard.detach().to_local().mul_(2)
        mf.step(model)
    assert not torch.equal(*seen)
    train(model, x)
    model.to("cpu", torch.float32)
    members.require()
    assign(model) if by_block else model.bfloat16()
    with pytest.raises(ValueError, match=r"expected .*\.\w+ as at the capture"):
        members.require()


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("recipe", ["", "fp8_delayed", "nvfp4"])
def test_sharded_parameters(recipe, by_block):
    run_world(2, check_sharded, recipe, by_block)
