"""Compiled models train as eager ones do, whatever the loop does: equal counts, bits and gradients.

Some sequences are those of real loops, others are random (support/training_programs.py).
"""

import minifloat as mf
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support import training_programs as programs
from tests.support.same_bits import require_same

WAYS = [
    programs.compile_root,
    programs.compile_root_in_one_graph,
    programs.compile_in_place,
    programs.compile_blocks,
    programs.compile_function,
]
RECOMPUTED = ["recompute", "recompute", "train", "oldest", "newest", "oldest", "step"]


def build(recipe="nvfp4", model=programs.Model):
    torch.manual_seed(0)
    converted = model()
    mf.quantize_(converted, recipe, keep="nothing")
    return converted


def first_of(seeds, count):
    """Returns seeds, of which the first ones are quick tests."""
    slow = (pytest.param(seed, marks=pytest.mark.slow) for seed in range(count, seeds))
    return [*range(count), *slow]


def require_equal_runs(program, way, make=build):
    want = programs.Loop(make, programs.run_eager).run(program)
    got = programs.Loop(make, way).run(program)
    assert list(got) == list(want)
    for name, tensor in want.items():
        require_same(got[name], tensor, name)


def written_runs():
    """Returns each sequence in two ways, in all ways where a kind of module once failed alone."""
    everywhere = ("evaluation before", "two forwards before a backward")
    for i, name in enumerate(programs.WRITTEN):
        for way in WAYS if name in everywhere else (WAYS[i % 5], WAYS[(i + 2) % 5]):
            yield pytest.param(name, way, id=f"{name}-{way.__name__}")


@pytest.mark.parametrize(("name", "way"), written_runs())
def test_written_sequences(name, way):
    require_equal_runs(programs.WRITTEN[name], way)


def outputs_of_two_recipes(way):
    """Trains under one recipe, then in place under another, with one optimizer and one call."""
    model, outputs = build("mxfp8"), []
    call, optimizer = way(model), torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        if step == 3:
            mf.restore_(model)
            mf.quantize_(model, "nvfp4", keep="nothing", seed=1)
        generator = torch.Generator().manual_seed(step)
        y = call(torch.randn(programs.ROWS, programs.FEATURES, generator=generator))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
        outputs.append(y.detach())
    return outputs


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_another_recipe_in_place_is_compiled_again(way):
    for got, want in zip(outputs_of_two_recipes(way), outputs_of_two_recipes(programs.run_eager)):
        require_same(got, want)


@pytest.mark.parametrize("way", WAYS[:-1], ids=lambda way: way.__name__)
def test_recomputed_forwards(way):
    require_equal_runs(2 * RECOMPUTED, way)


@pytest.mark.parametrize("is_checkpointed_within", [False, True])
def test_a_recomputed_function_that_begins_a_count_is_an_error(is_checkpointed_within):
    model = build()
    if is_checkpointed_within:
        call = torch.compile(
            lambda x: checkpoint(model.head, x, use_reentrant=False), backend=programs.BACKEND
        )
    else:
        function = programs.compile_function(model)

        def call(x):
            return checkpoint(function, x, use_reentrant=False)

    y = call(torch.ones(programs.ROWS, programs.FEATURES, requires_grad=True))
    with pytest.raises(RuntimeError, match="expected a forward pass, got the recomputation"):
        y.sum().backward()


@pytest.mark.parametrize("seed", first_of(8, 4))
def test_random_sequences(seed):
    require_equal_runs(programs.random_program(seed, programs.WHOLE), WAYS[seed % 4])


@pytest.mark.parametrize("seed", first_of(4, 2))
def test_random_sequences_with_experts(seed):
    program = programs.random_program(100 + seed, programs.PARTS)
    require_equal_runs(program, programs.compile_blocks, lambda: build(model=programs.Experts))
