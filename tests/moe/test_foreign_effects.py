"""Experts of other libraries whose forward does more than compute are left out, untouched."""

import random
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import minifloat as mf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.moe.test_same_experts import Foreign

LOSSES = []


class Capacity(Foreign):
    """Drops tokens past a number of them."""

    capacity = 64

    def forward(self, x, index, weights):
        y = super().forward(x, index, weights)
        return torch.cat([y[: self.capacity], torch.zeros_like(y[self.capacity :])])


class Capacity128(Capacity):
    capacity = 128


class Capacity1024(Capacity):
    capacity = 1024


class CapacityInEvaluation(Foreign):
    def forward(self, x, index, weights):
        y = super().forward(x, index, weights)
        return y if self.training or len(x) < 1000 else y * 0.5


class DropsSmall(Foreign):
    """Skips tokens whose magnitudes are all small."""

    def forward(self, x, index, weights):
        return super().forward(x, index, weights) * float(x.abs().max() > 0.01)


class DoublesWithoutGradients(Foreign):
    def forward(self, x, index, weights):
        y = super().forward(x, index, weights)
        return y if torch.is_grad_enabled() else 2 * y


class IdentityPastTheLast(Foreign):
    """Adds tokens that have an expert's number past those of its matrices."""

    def forward(self, x, index, weights):
        y = super().forward(x, index, weights)
        return y + x * (weights * (index >= self.experts)).sum(-1, keepdim=True)


class Counts(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, x, index, weights):
        self.tokens += len(x)
        return super().forward(x, index, weights)


class CountsInPython(Foreign):
    steps = 0

    def forward(self, x, index, weights):
        self.steps += 1
        return super().forward(x, index, weights)


class CountsInClass(Foreign):
    steps = 0

    def forward(self, x, index, weights):
        type(self).steps += 1
        return super().forward(x, index, weights)


def counting():
    steps = None

    def count():
        nonlocal steps
        steps = 1

    return count


COUNT = counting()


class CountsInVariable(Foreign):
    def forward(self, x, index, weights):
        COUNT()
        return super().forward(x, index, weights)


class Losses(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"losses": []}

    def forward(self, x, index, weights):
        self.kept["losses"].append(weights.square().mean())
        return super().forward(x, index, weights)


class LossesOfClass(Foreign):
    losses: ClassVar = []

    def forward(self, x, index, weights):
        self.losses.append(weights.square().mean())
        return super().forward(x, index, weights)


class LossesOfProcess(Foreign):
    def forward(self, x, index, weights):
        LOSSES.append(weights.square().mean())
        return super().forward(x, index, weights)


def note(value):
    LOSSES.append(value)


class LossesByHelper(Foreign):
    def forward(self, x, index, weights):
        note(weights.square().mean())
        return super().forward(x, index, weights)


class LossesOfObject(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.context = SimpleNamespace(loss=None)

    def forward(self, x, index, weights):
        self.context.loss = weights.square().mean()
        return super().forward(x, index, weights)


class Scaled(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x, index, weights):
        return super().forward(x, index, weights) * self.scale


class Detached(Foreign):
    def hidden(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate.detach()) * up


class WithoutGradients(Foreign):
    def forward(self, x, index, weights):
        with torch.no_grad():
            return super().forward(x, index, weights)


class RoutedWithoutGradients(Foreign):
    def weighted(self, y, weights):
        return y * weights.detach()


class HalfOfWeights(Foreign):
    def forward(self, x, index, weights):
        if self.down_proj.requires_grad:
            self.down_proj.register_hook(lambda grad: grad / 2)
        return super().forward(x, index, weights)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1, 1)


class Clipped(Foreign):
    def forward(self, x, index, weights):
        return super().forward(Clip.apply(x), index, weights)


class ClippedByHook(Foreign):
    def forward(self, x, index, weights):
        y = super().forward(x, index, weights)
        if y.requires_grad:
            y.register_hook(lambda grad: grad / grad.norm())
        return y


class Drops(Foreign):
    def weighted(self, y, weights):
        return F.dropout(y, 0.5, self.training) * weights


class Jitters(Foreign):
    def forward(self, x, index, weights):
        return super().forward(x + 0 * random.random(), index, weights)


class JittersByNumpy(Foreign):
    def forward(self, x, index, weights):
        return super().forward(x + 0 * float(np.random.rand()), index, weights)


class OwnGenerator(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x, index, weights):
        noise = torch.rand(len(x), 1, generator=self.generator)
        return super().forward(x + 0 * noise, index, weights)


class Locked(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x, index, weights):
        with self.lock:
            return super().forward(x, index, weights)


class InPlace(Foreign):
    def forward(self, x, index, weights):
        return x.copy_(super().forward(x, index, weights))


EFFECTS = {
    Capacity: "(65 tokens of magnitude",
    Capacity128: "(129 tokens of magnitude",
    Capacity1024: "(1025 tokens of magnitude",
    CapacityInEvaluation: "(1023 tokens of magnitude",
    DropsSmall: "tokens of magnitude 0.0009765625)",
    DoublesWithoutGradients: "differs from minifloat's by 0.5 of",
    IdentityPastTheLast: "of a slot whose expert's number is 4 of 4)",
    Counts: "reads tokens, tensors that minifloat's does not read",
    CountsInPython: "changes its attribute steps",
    CountsInClass: "could change type(self).steps, which is no part of it",
    CountsInVariable: "writes the variable steps, which is no part of it",
    Losses: "changes its attribute kept['losses'][0]",
    LossesOfClass: "changes its attribute losses[0]",
    LossesOfProcess: "could change LOSSES, which is no part of it",
    LossesByHelper: "could change LOSSES, which is no part of it",
    LossesOfObject: "changes its attribute context.loss",
    Scaled: "reads scale, tensors that minifloat's does not read",
    Detached: "has a gradient of its argument 0 that differs from minifloat's by",
    WithoutGradients: "returns a result without a gradient",
    RoutedWithoutGradients: "has a gradient of its argument 2 that differs",
    HalfOfWeights: "has a gradient of down_proj that differs from minifloat's by 0.5 of",
    Clipped: "has a gradient of its argument 0 that differs from minifloat's by",
    ClippedByHook: "has a gradient of its argument 0 that differs from minifloat's by",
    Drops: "draws random numbers, by bernoulli_",
    Jitters: "draws random numbers, by random",
    JittersByNumpy: "draws random numbers, by np.random",
    OwnGenerator: "draws random numbers, by rand",
    Locked: "has an attribute lock, a lock, without a copy",
    InPlace: "changes its arguments",
}


def states() -> tuple[object, ...]:
    """Returns the state of each generator of the process, as texts."""
    return tuple(
        map(str, (random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))
    )


@pytest.mark.parametrize("kind", EFFECTS)
def test_a_forward_that_does_more_is_left_out_and_leaves_no_trace(kind):
    torch.manual_seed(0)
    experts = kind()
    model = nn.ModuleDict({"experts": experts, "other": nn.Linear(32, 32)})
    before = states()
    skipped = dict(mf.quantize_(model, "mxfp8").skipped)
    for name in ("gate_up_proj", "down_proj"):
        assert EFFECTS[kind] in skipped[f"experts.{name}"]
    assert type(experts) is kind
    assert states() == before
    assert LOSSES == []
    assert LossesOfClass.losses == []
    assert (CountsInClass.steps, CountsInPython.steps) == (0, 0)
    if kind is OwnGenerator:
        assert experts.generator.initial_seed() == torch.Generator().initial_seed()
        assert torch.equal(experts.generator.get_state(), torch.Generator().get_state())
    if kind is Losses:
        assert experts.kept == {"losses": []}


# ---- other threads -------------------------------------------------------------------------------


def test_another_thread_sees_nothing_of_a_conversion():
    """Its random numbers are those of itself alone, and the default dtype stays."""

    def draw(count: int) -> list[object]:
        return [
            (float(torch.rand(())), random.random(), float(np.random.rand())) for _ in range(count)
        ]

    def seed() -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    drawn, dtypes, done = [], set(), threading.Event()

    def work() -> None:
        while not done.is_set():
            drawn.extend(draw(1))
            dtypes.add((torch.get_default_dtype(), torch.backends.mkldnn.enabled))
            dtypes.add((torch.zeros(1).dtype, torch.get_default_device()))

    experts = [kind() for kind in (Foreign, Jitters, JittersByNumpy, Drops)]
    seed()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for count in (1, 100):  # before the conversion, and in all
            while len(drawn) < count:
                time.sleep(0.001)
            mf.quantize_(nn.ModuleList(experts), "mxfp8")
            mf.restore_(nn.ModuleList(experts))
    finally:
        done.set()
        thread.join()
    seed()
    assert drawn == draw(len(drawn))
    assert dtypes == {(torch.float32, True), (torch.float32, torch.device("cpu"))}
