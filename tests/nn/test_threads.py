"""Several threads that run forwards at a time: of one model, or each of its own."""

import sys
import threading

import minifloat as mf
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

STOCHASTIC_FORWARD = "fprop=nvfp4+sr*nvfp4 dgrad=nvfp4+sr*nvfp4 wgrad=nvfp4+sr+rht*nvfp4+sr+rht"
THREADS = 4


@pytest.fixture(autouse=True)
def switches_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(*functions):
    """Runs functions at a time, and returns their results. Raises the error of the first."""
    results, start = {}, threading.Barrier(len(functions))

    def run(i):
        start.wait()
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[i] for i in range(len(functions))]


def block(width=32):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def converted(recipe, model):
    mf.quantize_(model, recipe, keep="nothing")
    return model


# ---- of one model --------------------------------------------------------------------------------


@pytest.mark.parametrize("calls_parts", [False, True])
def test_each_forward_of_a_model_has_a_count_of_its_own(calls_parts):
    model = converted("nvfp4", nn.Sequential(block(), block()))
    each = 60

    def forwards():
        x = torch.ones(16, 32)
        for _ in range(each):
            if calls_parts:  # a count each
                model[1](model[0](x))
            else:
                model(x)

    in_threads(*[forwards] * THREADS)
    counts = [
        [int(forward.rng[1]) for forward in layer.draws.past]
        for layer in model.modules()
        if isinstance(layer, mf.Linear)
    ]
    total = THREADS * each
    if calls_parts:
        assert all(sorted(counts[i]) == sorted(counts[i + 1]) for i in (0, 2))
        assert sorted(counts[0] + counts[2]) == list(range(1, 2 * total + 1))
        total *= 2
    else:
        for drawn in counts:
            assert sorted(drawn) == list(range(1, total + 1))
    assert mf.training_state(model)["rng"].tolist() == [0, total]


def test_counts_of_compiled_forwards_of_a_model():
    model = converted("nvfp4", block())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x, each = torch.ones(16, 32), 40
    compiled(x)

    def forwards():
        for _ in range(each):
            compiled(x)

    in_threads(*[forwards] * THREADS)
    assert mf.training_state(model)["rng"].tolist() == [0, THREADS * each + 1]


class KeepsOutputs(nn.Module):
    """A block that keeps what its first layer returned."""

    def __init__(self):
        super().__init__()
        self.block, self.outputs = block(), {}
        self.block[0].register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.outputs.setdefault(threading.get_ident(), []).append(output.detach().clone())

    def forward(self, x):
        return self.block(x)


@pytest.mark.parametrize("backward_in", ["its thread", "another"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_in_threads(use_reentrant, backward_in):
    """Recomputes forwards that several threads ran, in them or in the main thread."""
    model = converted(STOCHASTIC_FORWARD, KeepsOutputs())
    forwards, ready, row = 5, threading.Barrier(THREADS), torch.randn(1, 32)

    def run():
        runs = []
        for _ in range(forwards):
            x = row.repeat(16, 1).requires_grad_()
            runs.append(checkpoint(model, x, use_reentrant=use_reentrant).sum())
        ready.wait()
        seen = list(model.outputs[threading.get_ident()])
        if backward_in == "another":
            return seen, runs
        for y in runs:
            y.backward()
        return seen, model.outputs[threading.get_ident()][forwards:]

    for seen, runs in in_threads(*[run] * THREADS):
        again = runs
        if backward_in == "another":
            model.outputs.clear()
            for y in runs:
                y.backward()
            (again,) = model.outputs.values()
        assert len(seen) == len(again) == forwards
        for a, b in zip(seen, again):
            assert torch.equal(a, b)
        for i, a in enumerate(seen):
            assert not any(torch.equal(a, b) for b in seen[:i])
    assert mf.training_state(model)["rng"].tolist() == [0, THREADS * forwards]


# ---- each of its own -----------------------------------------------------------------------------


def train(recipe):
    """Builds, converts and trains a model; returns its weights and state."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(block(), block())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    converted(recipe, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        x = torch.randn(16, 32, generator=generator)
        checkpoint(model, x, use_reentrant=False).square().mean().backward()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
    return {**model.state_dict(), **mf.training_state(model)}


def test_threads_that_train_models_of_their_own():
    recipes = ["nvfp4", "fp8_delayed", STOCHASTIC_FORWARD, "mxfp8_nvfp4"]
    alone = [train(recipe) for recipe in recipes]
    together = in_threads(*[lambda recipe=recipe: train(recipe) for recipe in recipes])
    for recipe, a, b in zip(recipes, alone, together):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), (recipe, name)
