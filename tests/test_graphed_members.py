"""What mf.GraphedStep has captured of a model's members, on a CPU."""

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
