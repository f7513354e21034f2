"""The native batch of a gather: what it refuses; more weights take no more of torch's ops."""

import minifloat as mf
import pytest
import torch
from minifloat.distributed.fsdp.gather import BACKWARD, BOTH_GATHERS, FORWARD, plan_gather
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, COLS, WORLD = 64, 32, 2
ALL = -1


class Batch:
    """A native batch of rank 0 of two, with shards and targets."""

    def __init__(self, recipe, weights=2):
        self.plan, _ = plan_gather(mf.Recipe(recipe))
        of_specs = ((self.plan.row, False), (self.plan.col, True))
        casts = [
            [torch.classes.minifloat.ShardCast(*spec, ROWS, COLS, True) for _ in range(weights)]
            for spec in of_specs
        ]
        modes = [self.plan.mode] * weights
        self.native = torch.classes.minifloat.GatherBatch(*casts, modes, WORLD, 0)
        self.native.hold_shards([torch.randn(ROWS // WORLD, COLS) for _ in range(weights)], [])
        exchange = torch.classes.minifloat.AmaxExchange([self.native])
        exchange.accept(exchange.measure(BOTH_GATHERS))
        operands = [cast.new_operand(torch.empty(0)) for pair in zip(*casts) for cast in pair]
        self.targets = [t.zero_() for operand in operands for t in operand]

    def outputs(self, selection):
        inputs = self.native.cast(selection, True)
        return [t.repeat(WORLD) for of_weight in inputs for t in of_weight]


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "mxfp8"])
def test_a_gather_is_before_forward_or_before_backward(recipe):
    batch = Batch(recipe)
    batch.native.hold_targets(batch.targets)
    outputs = batch.outputs(FORWARD)
    for selection in (-1, BOTH_GATHERS):
        with pytest.raises(ValueError, match="expected a selection from 0 to 1"):
            batch.native.cast(selection, True)
        with pytest.raises(ValueError, match="expected a selection from 0 to 1"):
            batch.native.fill(outputs, selection, ALL, True, False)


def test_targets_are_checked_when_they_are_held():
    batch = Batch("mxfp8")
    with pytest.raises(ValueError, match="expected 12 targets, got 6"):
        batch.native.hold_targets(batch.targets[:6])
    for name, i in (("codes", 0), ("scale", 4)):
        wrong = list(batch.targets)
        wrong[i] = wrong[i][1:]
        with pytest.raises(ValueError, match=f"contiguous bytes of {name}"):
            batch.native.hold_targets(wrong)
        wrong[i] = batch.targets[i].t()
        with pytest.raises(ValueError, match=f"contiguous bytes of {name}"):
            batch.native.hold_targets(wrong)


def test_a_fill_refuses_freed_memory_and_short_outputs():
    batch = Batch("fp8_tensorwise")
    batch.native.hold_targets(batch.targets)
    outputs, before = batch.outputs(FORWARD), [t.clone() for t in batch.targets]
    with pytest.raises(ValueError, match="codes and tables of 2 weights, got 1"):
        batch.native.fill(outputs[:1], FORWARD, ALL, False, True)
    with pytest.raises(ValueError, match="contiguous bytes of codes"):
        batch.native.fill([*outputs[:1], outputs[1][1:]], FORWARD, ALL, False, True)
    codes = batch.targets[6].untyped_storage()
    codes.resize_(0)
    with pytest.raises(ValueError, match=r"expected codes in memory .* is freed, or was moved"):
        batch.native.fill(outputs, FORWARD, ALL, False, True)
    for i, target in enumerate(batch.targets):
        assert i == 6 or torch.equal(target, before[i])
    codes.resize_(before[6].nbytes)
    batch.native.fill(outputs, FORWARD, ALL, False, True)
    assert torch.equal(batch.targets[6].view(-1), outputs[1])
    assert torch.equal(batch.targets[9], batch.targets[6].t())


def test_outputs_that_are_held_are_read_again():
    """A fill takes the last output alone, which is to be in the memory that is held."""
    batch = Batch("fp8_tensorwise", 3)
    batch.native.hold_targets(batch.targets)
    outputs = batch.outputs(FORWARD)
    batch.native.hold_outputs(outputs)
    for t in outputs:
        t.copy_(torch.randint(0, 120, t.shape, dtype=torch.uint8))
    batch.native.fill([outputs[-1].view(-1)], FORWARD, ALL, False, True)
    for codes, output in zip(batch.targets[::6], outputs, strict=True):
        assert torch.equal(codes.view(-1), output)
    with pytest.raises(ValueError, match="expected outputs in the memory that is held"):
        batch.native.fill([outputs[-1].clone()], FORWARD, ALL, False, True)
    others = [t.clone() for t in outputs]
    batch.native.fill(others, FORWARD, ALL, False, True)


class Counted(TorchDispatchMode):
    """Lists the torch ops that are called."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "mxfp8"])
def test_torch_ops_of_a_gather_do_not_grow_with_its_weights(recipe):
    counts = []
    for weights in (2, 6):
        batch, counted = Batch(recipe, weights), Counted()
        batch.native.hold_targets(batch.targets)
        for selection in (FORWARD, BACKWARD):
            outputs = batch.outputs(selection)
            for target in batch.targets:  # as FSDP2 does before it gathers
                target.untyped_storage().resize_(target.nbytes)
            with counted:
                batch.native.cast(selection, True)
                batch.native.fill(outputs, selection, ALL, False, True)
        counts.append(counted.ops)
    assert counts[0] == counts[1]
    assert set(counts[0]) == {"aten.empty.memory_format"}
