"""Ranks that differ in one setting, argument or step: one error on every rank, and no hang."""

import inspect
import time
from dataclasses import fields
from functools import partial

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.distributed import handshake
from minifloat.moe.router import Router
from minifloat.nn.state.recipe_state import DelayedScaling

from tests.distributed.test_faults import TIMEOUT
from tests.distributed.test_same_layers import D, error_of, linears
from tests.support.worlds import run_world

# ---- every setting that a step reads -------------------------------------------------------------

# A second value of each argument of a router, and of each field of delayed scaling.
OF_ROUTERS = {
    "dim": 2 * D,
    "experts": 16,
    "top_k": 3,
    "score": "softmax",
    "route_norm": False,
    "route_scale": 2.5,
    "expert_groups": 2,
    "groups_chosen": 1,
    "balance": None,
    "balance_speed": 0.5,
    "balance_loss": 0.5,
}
OF_HISTORIES = {"amax_history_length": 5, "amax_algorithm": "most_recent", "margin": 3}
SHOWN = {
    "amax_history_length": "5 steps of history",
    "amax_algorithm": "(most_recent, margin 0)",
    "margin": "(max, margin 3)",
    "bias": "no bias",
}


def mixture(**options):
    usual = {"experts": 8, "top_k": 2, "expert_groups": 4, "groups_chosen": 2}
    return mf.MoE(**{"dim": D, "hidden": D} | usual | options)


def router_of(name, is_other):
    """Returns a layer with one other argument of its router, or without."""
    return mixture(**{name: OF_ROUTERS[name]} if is_other else {})


def set_attribute(name, is_other):
    """Returns a layer with one attribute of its router set after it was built."""
    moe = mixture()
    if is_other:
        setattr(moe.router, name, OF_ROUTERS[name])
    return moe


def without_bias(is_other):
    moe = mixture()
    if is_other:
        moe.router.expert_bias = None
    return moe


def history_of(name, is_other):
    rule = DelayedScaling(**{name: OF_HISTORIES[name]} if is_other else {})
    return linears("a", delayed_scaling=rule)


def check_settings(rank):
    """One rank alone has another value: an error on both in the first step, and in a later one."""
    arguments = set(inspect.signature(Router.__init__).parameters)
    assert set(OF_ROUTERS) == set(Router.SETTINGS) == arguments - {"self", "device", "dtype"}
    assert set(OF_HISTORIES) == {field.name for field in fields(DelayedScaling)}
    builds = {name: partial(router_of, name) for name in OF_ROUTERS}
    builds |= {f"router.{name}": partial(set_attribute, name) for name in OF_ROUTERS}
    builds |= {name: partial(history_of, name) for name in OF_HISTORIES}
    for name, build in (builds | {"bias": without_bias}).items():
        model = build(bool(rank))
        for _ in range(2):
            text, seconds = error_of(lambda model=model: mf.step(model), "the same layers in one")
            assert seconds < TIMEOUT, name
        key = name.removeprefix("router.")
        shown = f"{key}={OF_ROUTERS[key]!r}" if key in OF_ROUTERS else SHOWN[key]
        assert shown in text, (name, text)
    moe = mixture()
    mf.step(moe)
    for name in ("balance_speed", "score"):  # in a later step
        before = getattr(moe.router, name)
        if rank:
            setattr(moe.router, name, OF_ROUTERS[name])
        text, _ = error_of(lambda: mf.step(moe), "the same layers in one order")
        assert f"{name}={OF_ROUTERS[name]!r}" in text, text
        setattr(moe.router, name, before)
        mf.step(moe)


def test_settings_of_one_rank_alone_are_refused():
    run_world(2, check_settings)


# ---- arguments that one rank alone gets wrong ----------------------------------------------------


def check_arguments(rank):
    """Every rank raises what is wrong on one, in a first step and in a later one."""
    pair = dist.new_group([0, 1])
    for model in (linears("ab"), mixture()):
        for _ in range(2):
            for wrong, match in (
                ((None,), r"step: expected a torch.nn.Module, got NoneType"),
                (([model], None), r"step: expected a torch.nn.Module, got list"),
                ((None, pair), r"step: expected a torch.nn.Module, got NoneType"),
                ((model, "x"), r"step: group: expected a process group .* got 'x' \(str\)"),
                ((model, 3), r"step: group: expected a process group .* got 3 \(int\)"),
            ):
                usual = (model, pair if pair in wrong else None)
                call = partial(mf.step, *(wrong if rank else usual))
                _, seconds = error_of(call, match + r".*\(ranks \[1\]\)")
                assert seconds < TIMEOUT
            mf.step(model)
            mf.step(model, pair)
    with pytest.raises(TypeError, match="group: expected a process group that this rank is in"):
        mf.step(linears("ab"), dist.GroupMember.NON_GROUP_MEMBER)  # for which nobody waits


def test_arguments_of_one_rank_are_an_error_on_all():
    run_world(2, check_arguments)


# ---- a list that changes where nothing is reduced ------------------------------------------------


def change_recipe(model):
    model.a.recipe = "mxfp8_2d"


def change_mode(model):
    model.a.eval()


def check_changes(rank):
    """A list that changes on one rank is an error on both in the step after; on all, it is none."""
    for world_rank in (0, 1):
        for change in (change_recipe, change_mode):
            model = linears("ab", "mxfp8")
            for _ in range(3):
                mf.step(model)
            if rank == world_rank:
                change(model)
            mf.step(model)  # ranks whose steps end before wait for nobody
            dist.barrier()
            for _ in range(2):
                text, seconds = error_of(lambda model=model: mf.step(model))
                assert "layer 0 is 'a: " in text, text
                assert seconds < TIMEOUT
            if rank != world_rank:
                change(model)
            for _ in range(3):  # all have changed
                mf.step(model)
                dist.barrier()
            if rank == world_rank:  # there and back
                model.a.train(not model.a.training)
                mf.step(model)
                model.a.train(not model.a.training)
            else:
                mf.step(model)
            dist.barrier()
            done = handshake.rounds[dist.group.WORLD]
            for _ in range(2):  # one handshake, which finds no difference
                mf.step(model)
                assert handshake.rounds[dist.group.WORLD] == done + 1
    # All change in one step, and reduce from then on.
    model = linears("ab", "mxfp8")
    for recipe in ("fp8_delayed", "mxfp8", "fp8_delayed"):
        mf.step(model)
        mf.restore_(model)
        mf.quantize_(model, recipe, keep="nothing")
        model.a(torch.full((4, D), 1.0 + rank)).sum().backward()
        mf.step(model)
        if recipe == "fp8_delayed":
            assert mf.training_state(model)["a.amax_history"][0, 0] == 2.0


def test_a_list_that_changes_where_nothing_is_reduced():
    run_world(2, check_changes)


# ---- the last rank comes when another gives up ---------------------------------------------------


class LateStore:
    """A store whose wait ends with an error although what it waits for is there."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def wait(self, keys, *timeout):
        self.store.wait(keys)
        raise RuntimeError("wait timeout")


def check_late_ranks(rank):
    """Ranks count the same handshakes, so that later ones do not meet an old one."""
    model, store_of = linears("ab"), handshake._store_of
    for late in (0, 1):
        if rank == late:
            handshake._store_of = lambda group: LateStore(store_of(group))
        else:
            time.sleep(0.2)  # the other one waits
        mf.step(model)
        handshake._store_of = store_of
        dist.barrier()
        for _ in range(2):
            mf.step(model)
            counts = [None, None]
            dist.all_gather_object(counts, handshake.rounds[dist.group.WORLD])
            assert counts[0] == counts[1], counts
        text, _ = error_of(lambda: mf.step(linears("a" if rank else "ab")))
        assert "layer 1 is" in text, text


def test_the_last_rank_comes_when_another_gives_up():
    run_world(2, check_late_ranks)
