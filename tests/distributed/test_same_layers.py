"""Ranks whose layers differ, or of which one does not call: one error on every rank that calls."""

import time
from functools import partial

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.distributed import handshake, same_layers
from torch import nn

from tests.distributed.test_faults import TIMEOUT
from tests.support.expert_world import built as built_experts
from tests.support.expert_world import draw
from tests.support.sharded_models import batch, built, sharded
from tests.support.worlds import run_world

D = 32


def linears(names, recipe="fp8_delayed", **options):
    """Returns a converted model with layers of these names, in this order."""
    model = nn.Module()
    for name in names:
        model.add_module(name, nn.Linear(D, D))
    mf.quantize_(model, recipe, keep="nothing", **options)
    for i, layer in enumerate(model.children()):
        layer(torch.full((4, D), 1.0 + i)).sum().backward()
    return model


def evaluated(names):
    model = linears(names)
    model.get_submodule(names[-1]).eval()
    return model


# What each rank has -> what the error says of the first difference.
DIFFERENT = {
    "order": (lambda r: linears("ab" if r else "ba"), "layer 0 is 'b: fp8_delayed", "'a: fp8"),
    "names": (lambda r: linears("b" if r else "a"), "layer 0 is 'a: fp8_delayed", "'b: fp8"),
    "count": (lambda r: linears("abc"[: 2 + r]), "layer 2 is none on rank 0", "'c: fp8_delayed"),
    "recipe": (
        lambda r: linears("a", "fp8_tensorwise" if r else "fp8_delayed"),
        "layer 0 is 'a: fp8_delayed",
        "'a: fp8_tensorwise, weight (32, 32)' on rank 1",
    ),
    "part": (
        lambda r: linears("abc", f"*: fp8_delayed; {'a' if r else 'c'}: bf16"),
        "layer 0 is 'a: fp8_delayed",
        "'b: fp8_delayed",
    ),
    "none": (
        lambda r: nn.Linear(D, D) if r else linears("a"),
        "layer 0 is 'a: fp8_delayed",
        "none on rank 1",
    ),
    "length": (
        lambda r: linears("a", delayed_scaling=mf.nn.DelayedScaling(4 + r)),
        "4 steps of history",
        "5 steps of history (max, margin 0)' on rank 1",
    ),
    "algorithm": (
        lambda r: linears(
            "a", delayed_scaling=mf.nn.DelayedScaling(amax_algorithm="most_recent" if r else "max")
        ),
        "(max, margin 0)' on rank 0",
        "(most_recent, margin 0)' on rank 1",
    ),
    "mode": (lambda r: evaluated("ab") if r else linears("ab"), "layer 1 is 'b:", "evaluation"),
    "experts": (
        lambda r: built_experts("bf16", experts=8 * (1 + r)),
        "a router of experts=8",
        "a router of experts=16",
    ),
}


def error_of(function, match="expected all"):
    """Returns the ValueError that a call raises, and after how many seconds."""
    begin = time.monotonic()
    with pytest.raises(ValueError, match=match) as error:
        function()
    return str(error.value), time.monotonic() - begin


def check_differences(rank):
    for name, (build, first, second) in DIFFERENT.items():
        model = build(rank)
        before = {key: t.clone() for key, t in mf.training_state(model).items()}
        for _ in range(2):  # the second call finds it again
            text, seconds = error_of(lambda model=model: mf.step(model))
            assert first in text, f"{name}: {text}"
            assert second in text, f"{name}: {text}"
            assert seconds < TIMEOUT, name
        for key, value in mf.training_state(model).items():
            assert torch.equal(value, before[key]), f"{name}: {key}"
    # A difference after steps that agreed, on one rank alone: under the recipe that reduces.
    model = linears("ab")
    for _ in range(3):
        mf.step(model)
    if rank:
        model.a.recipe = "fp8_tensorwise"
    text, _ = error_of(lambda: mf.step(model))
    assert "layer 0 is 'a: fp8_delayed" in text, text
    assert "'a: fp8_tensorwise" in text, text
    if not rank:
        model.a.recipe = "fp8_tensorwise"
    mf.step(model)
    # The first gather of a weight, of which one rank may not know the compute dtype.
    gather = partial(handshake.agree, group=dist.group.WORLD)
    assert gather("0: mxfp8", None if rank else torch.float16) == torch.float16
    text, _ = error_of(lambda: gather("0: nvfp4" if rank else "0: mxfp8", torch.float32))
    assert text == f"{handshake.SAME_WEIGHT}, but rank 0 has 0: mxfp8; rank 1 has 0: nvfp4"


def test_ranks_whose_layers_differ_raise_one_error():
    run_world(2, check_differences)


# ---- a rank whose own checks fail ----------------------------------------------------------------


def balanced():
    """Returns a layer whose balance loss nobody has read."""
    moe = mf.MoE(D, D, 4, 2, balance="loss")
    moe(torch.ones(3, D)).sum().backward()
    return moe


def alike(seeds, recipe):
    """Returns two parts that were converted one by one, each with its own seed."""
    return nn.Sequential(*(linears("ab", recipe, seed=seed) for seed in seeds))


def check_own_faults(rank):
    """Every rank raises the one error, in the first step and in a later one; nothing changes."""
    for faulty in ([1], [0], [0, 1]):
        moe = balanced()
        mf.moe.balance_loss(moe)
        for _ in range(2):
            mf.step(moe)
            moe(torch.ones(3, D)).sum().backward()
            if rank not in faulty:
                mf.moe.balance_loss(moe)
            loss, counts = moe.router.loss, moe.router.counts.clone()
            for _ in range(2):  # the second call finds it again
                text, seconds = error_of(lambda moe=moe: mf.step(moe), "nobody read in the mf.MoE")
                assert ("ranks" in text) == (len(faulty) == 1), text
                assert f"(ranks {faulty})" in text or len(faulty) == 2, text
                assert seconds < TIMEOUT
                assert moe.router.loss is loss
                assert torch.equal(moe.router.counts, counts)
            mf.moe.balance_loss(moe)
        mf.step(moe)
    moe = balanced()  # in its first step
    if not rank:
        mf.moe.balance_loss(moe)
    text, _ = error_of(lambda: mf.step(moe), r"nobody read in the mf.MoE.*ranks \[1\]")
    for recipe in ("nvfp4", "a: nvfp4; b: fp8_delayed"):
        model = alike((7, 7 + rank), recipe)
        error_of(lambda model=model: mf.step(model), r"random bits of their own.*ranks \[0\]")


def test_an_error_of_one_rank_is_raised_on_all():
    run_world(2, check_own_faults)


# ---- a rank that does not call -------------------------------------------------------------------


def step_alone(rank):
    """Calls mf.step on rank 0 alone, after one on both."""
    model = linears("ab")
    mf.step(model)
    return lambda: mf.step(model)


def step_of_shards(rank):
    model = sharded(built("fp8_tensorwise"))
    model(batch(1)).sum().backward()
    mf.step(model)
    return lambda: mf.step(model)


def divided():
    moe = mf.expert_parallel(built_experts("fp8_delayed"), dist.group.WORLD)
    moe(draw(dist.get_rank(), 6)).sum().backward()
    mf.step(moe)
    return moe


def step_of_experts(rank):
    moe = divided()
    return lambda: mf.step(moe)


def state_of_experts(rank):
    moe = divided()
    return lambda: mf.training_state(moe)


def evaluate_shards(rank):
    """Gathers in evaluation mode on rank 0 alone, where it would exchange maxima."""
    model = sharded(built("fp8_tensorwise"))
    model(batch(1)).sum().backward()
    mf.step(model)
    model.eval()
    return lambda: model(batch(1))


def check_missing(rank):
    longest = handshake.LONGEST  # the bound of groups with long timeouts
    for prepare in (step_alone, step_of_shards, step_of_experts, state_of_experts, evaluate_shards):
        call = prepare(rank)
        dist.barrier()
        if rank == 0:
            handshake.LONGEST = handshake.timedelta(seconds=0.25)
            text, seconds = error_of(call)
            assert "ranks [1] have not arrived in 0:00:00.25" in text, text
            assert seconds < 5, prepare.__name__
            handshake.LONGEST = longest
        dist.barrier()
    # Calls of two kinds meet, and neither takes the other's values.
    model, moe = linears("ab"), divided()
    mf.step(model)
    text, _ = error_of(lambda: mf.training_state(moe) if rank else mf.step(model))
    assert "rank 0: mf.step of" in text, text
    assert "rank 1: mf.training_state of" in text, text


def test_a_rank_that_does_not_call_is_named():
    run_world(2, check_missing)


# ---- what a handshake leaves ---------------------------------------------------------------------


def check_store(rank):
    """The store keeps as many keys after many steps as after a few, and steps may need none."""
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    model, other, kept = linears("ab"), linears("ab", "mxfp8"), []
    for steps in (3, 20):
        for _ in range(steps):
            mf.step(model)
        dist.barrier()
        kept.append(store.num_keys())
        dist.barrier()
    assert kept[0] == kept[1], kept
    mf.step(other)
    done = handshake.rounds[dist.group.WORLD]
    mf.step(other)  # reduces nothing
    assert handshake.rounds[dist.group.WORLD] == done
    assert not same_layers.agreements[other][dist.group.WORLD].is_reduced
    # A change calls all ranks to a handshake in the step after, by a key.
    kept = []
    for recipe in ("mxfp8_2d", "mxfp8", "mxfp8_2d", "mxfp8"):
        other.a.recipe = recipe
        for _ in range(2):
            mf.step(other)
            dist.barrier()
        kept.append(store.num_keys())
        dist.barrier()
    assert handshake.rounds[dist.group.WORLD] == done + len(kept)
    assert len(set(kept[1:])) == 1, kept


def test_handshakes_leave_no_keys():
    run_world(2, check_store)
