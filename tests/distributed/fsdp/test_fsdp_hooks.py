"""FSDP2's hooks make few calls of Python functions a weight and step.

benchmarks/fsdp_host.py measures their time, which no test can hold on a shared machine.
"""

import gc
import sys
import weakref
from pathlib import Path

import minifloat as mf
import pytest
import torch
from minifloat.distributed.fsdp.gather_batch import Batch
from minifloat.distributed.fsdp.private_state import outputs_of
from minifloat.nn.linear import Linear
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.worlds import run_world

WIDTH, FEW, MANY = 32, 2, 10
HOOKS = str(Path(mf.__file__).parent / "distributed" / "fsdp")
RECIPES = ("fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "mxfp8", "nvfp4")
# Two hooks of a gather and complete() of a forward, and what they call.
MOST_CALLS = 15  # a weight and step


class Calls:
    """Counts calls in the hooks, of Python functions and of others."""

    def __init__(self):
        self.count = 0

    def __call__(self, frame, event, arg):
        if event in ("call", "c_call"):
            code = frame.f_code
            self.count += code.co_filename.startswith(HOOKS) or code.co_name == "__setattr__"


def stepped(weights, recipe):
    """Returns a step of a model with one block."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(weights))))
    mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0)
    for module in (model[0], model):
        fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def step(is_counted):
        calls = Calls()
        if is_counted:
            sys.setprofile(calls)
        try:
            model(torch.ones(WIDTH, WIDTH)).sum().backward()
            if is_counted:
                sys.setprofile(None)
            optimizer.step()
            optimizer.zero_grad()
            if is_counted:
                sys.setprofile(calls)
            mf.step(model)
        finally:
            sys.setprofile(None)
        return calls.count

    return model, step


def calls_of(weights, recipe):
    _, step = stepped(weights, recipe)
    for _ in range(4):
        step(False)
    return step(True)


def check_calls(rank):
    for recipe in RECIPES:
        a_weight = (calls_of(MANY, recipe) - calls_of(FEW, recipe)) / (MANY - FEW)
        assert 4 <= a_weight <= MOST_CALLS, (recipe, a_weight)


def test_calls_of_a_weight_and_step():
    run_world(2, check_calls)


def check_kept(rank):
    """Checks that steps list no tensors for native code again, and that it keeps no model alive."""
    for recipe in RECIPES:
        model, step = stepped(FEW, recipe)
        for _ in range(3):
            step(False)
        with pytest.MonkeyPatch.context() as monkeypatch:
            for name in ("hold", "hold_targets"):
                monkeypatch.setattr(Batch, name, lambda *_, name=name: pytest.fail(name))
            step(False)
            model.eval()
            with pytest.raises(pytest.fail.Exception, match="hold"):
                step(False)
        shard = weakref.ref(model[0][0].weight._local_tensor)
        del model, step
        gc.collect()
        assert shard() is None, recipe


def test_tensors_are_listed_once():
    run_world(1, check_kept)


def check_dropped(rank):
    """Checks that a copy of a shard, as FSDP2 offloads it, is dropped after its gather."""
    model, step = stepped(FEW, "fp8_tensorwise")
    for _ in range(3):
        step(False)
    gather = model[0][0].weight_gather
    gc.disable()
    model[0].unshard()
    copy = model[0][0].weight_gather.held_shard(torch.device("cpu")).clone()
    inputs, receive = gather.send(copy, None)
    receive([t.clone() for t in inputs])
    kept = weakref.ref(copy)
    del copy, inputs, receive
    is_dropped = kept() is None
    gc.enable()
    assert is_dropped


def test_copies_of_offloaded_shards_are_dropped():
    run_world(1, check_dropped)


def check_outputs(rank):
    """Checks that FSDP2 gathers into the same tensors in each step, which native code holds."""
    model, step = stepped(FEW, "fp8_tensorwise")
    for _ in range(3):
        step(False)
    batch = model[0][0].weight_gather.batch
    outputs = [outputs_of(parameter) for parameter in batch.kept_parameters()]
    assert [len(of_weight) for of_weight in outputs] == [1] * FEW
    step(False)
    assert all(outputs_of(p) is known for p, known in zip(batch.kept_parameters(), outputs))
    for gather, (output,) in zip(batch.gathers, outputs, strict=True):
        assert gather.targets[0].untyped_storage()._cdata == output.untyped_storage()._cdata


def test_outputs_stay_the_same_tensors():
    run_world(2, check_outputs)


# ---- assignment ----------------------------------------------------------------------------------


def check_assignments(rank):
    """Checks that FSDP2 assigns gathered weights itself, and that others' assignments are seen."""
    assigned = []

    class Watched(Linear):
        def __setattr__(self, name, value):
            assigned.append(name)
            super().__setattr__(name, value)

    model, step = stepped(FEW, "fp8_tensorwise")
    for _ in range(3):
        step(False)
    layer = model[0][0]
    layer.__class__ = Watched
    step(False)
    assert assigned == []
    sharded = layer.weight
    layer.__setattr__("weight", sharded)
    assert assigned == ["weight"]
    step(False)  # FSDP2 finds its parameter and assigns through the class once more
    assert layer.weight is sharded
    with pytest.raises(TypeError):
        layer.weight = "no tensor"


def test_assignments():
    run_world(2, check_assignments)


# ---- compiled code -------------------------------------------------------------------------------

# The tensors that a compiled block reads of each weight: it takes time for each in every call.
INNER = {
    "fp8_tensorwise": ["codes", "scale", "amax", "columnwise codes"],
    "fp8_delayed": ["codes", "scale", "amax", "columnwise codes"],
    "fp8_blockwise": ["codes", "scale", "amax", "columnwise codes", "columnwise scale"],
    "nvfp4": ["codes", "scale", "amax", "columnwise codes", "columnwise scale"],
    "mxfp8": ["codes", "scale", "amax", "columnwise codes", "columnwise scale"],
}


def check_inner(rank):
    for recipe, inner in INNER.items():
        model, step = stepped(1, recipe)
        step(False)
        model[0].unshard()
        weight = model[0][0].weight
        names, context = weight.__tensor_flatten__()
        assert names == [f"_{n.replace(' ', '_')}" if " " in n else f"_rowwise_{n}" for n in inner]
        tensors = {name: getattr(weight, name) for name in names}
        assert len({t.untyped_storage()._cdata for t in tensors.values()}) == len(names)
        again = type(weight).__tensor_unflatten__(tensors, context, None, None)
        assert again.__tensor_flatten__() == (names, context)
        for part, other in zip(weight.directions, again.directions):
            assert part.codes is other.codes
            assert part.scale is other.scale
            assert part.amax is other.amax


def test_a_tensor_of_both_directions_is_read_once():
    run_world(2, check_inner)
