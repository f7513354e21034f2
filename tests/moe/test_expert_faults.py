"""mf.expert_parallel where a rank is lost, or has another layer than the others."""

import time

import minifloat as mf
import pytest
import torch.distributed as dist
from minifloat.distributed.handshake import rounds
from minifloat.nn.grouped_product import product_of

from tests.distributed.test_faults import TIMEOUT, die
from tests.support.expert_world import E, K, built, draw
from tests.support.host_reads import HostReads
from tests.support.worlds import LOST, last_words, require_lost, run_world


def step(moe: mf.MoE, rank: int) -> None:
    moe(draw(rank, 12)).float().square().sum().backward()


def divided(dispatch: str) -> mf.MoE:
    moe = built("mxfp8", experts=3 * dist.get_world_size())
    return mf.expert_parallel(moe, dist.group.WORLD, dispatch=dispatch)


def lose_a_rank_in_forward(rank: int, dispatch: str) -> None:
    """Ends rank 1 before it sends rows that others wait for."""
    moe = divided(dispatch)
    step(moe, rank)
    real, calls = dist.all_to_all_single, []

    def counted(*args, **kwargs):
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            time.sleep(0.5)
            die()
        return real(*args, **kwargs)

    dist.all_to_all_single = counted
    step(moe, rank)


def lose_a_rank_in_backward(rank: int, dispatch: str) -> None:
    moe = divided(dispatch)
    step(moe, rank)
    y = moe(draw(rank, 12))
    if rank == 1:
        time.sleep(0.5)
        die()
    y.float().square().sum().backward()


@pytest.mark.parametrize("dispatch", ["compute_dtype", "codes"])
@pytest.mark.parametrize("lose_a_rank", [lose_a_rank_in_forward, lose_a_rank_in_backward])
def test_others_end_when_a_rank_is_lost(lose_a_rank, dispatch):
    require_lost(3, lose_a_rank, dispatch, seconds=TIMEOUT, word="all_to_all_single")


DIFFERENT = {
    "recipe": ({"recipe": "mxfp8"}, {"recipe": "nvfp4"}, "recipe nvfp4"),
    "experts": ({}, {"experts": 2 * E}, f"{2 * E} experts"),
    "k": ({}, {"top_k": K - 1}, f"k = {K - 1}"),
    "hidden": ({}, {"hidden": 32}, "64 x 32"),
    "gate": ({}, {"limit": 7.0}, "limit=7.0"),
    "biases": ({}, {"bias": True}, "w1, w3, w2, b1, b3, b2"),
    "fused": ({}, {"fused_w13": True}, "w13, w2"),
    "dispatch": ({}, {"dispatch": "codes"}, "dispatch='codes'"),
    "capacity": ({"capacity": 9}, {"capacity": 8}, "capacity=8"),
    "tokens": ({"capacity": "all"}, {"capacity": "all", "tokens": 5}, "5 tokens"),
}


def run_different(rank: int, name: str) -> None:
    arguments = {"recipe": "mxfp8", "tokens": 6} | DIFFERENT[name][rank]
    tokens = arguments.pop("tokens")
    options = {key: arguments.pop(key) for key in ("dispatch", "capacity") if key in arguments}
    moe = mf.expert_parallel(built(**arguments), dist.group.WORLD, **options)
    moe(draw(rank, tokens))


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_are_one_error_on_every_rank(name):
    for traceback in last_words(2, run_different, name, seconds=TIMEOUT):
        assert "ValueError: expert_parallel: expected all ranks to have the same layer" in traceback
        assert "rank 0 has moe: " in traceback
        assert DIFFERENT[name][2] in traceback.partition("rank 1 has")[2]


def divide_on_one(rank: int) -> None:
    moe = built("mxfp8")
    if rank == 0:
        mf.expert_parallel(moe, dist.group.WORLD)
    moe(draw(rank, 6))


def test_a_layer_divided_on_some_ranks_is_named():
    first, _ = last_words(2, divide_on_one, seconds=TIMEOUT)
    assert "expert_parallel: expected all 2 ranks to divide moe: 8 experts" in first
    assert "ranks [1] have not arrived" in first
    assert "not divided" in first


# ---- layers that change later --------------------------------------------------------------------

LONG = 120  # seconds, longer than ranks take to start on a busy machine
CHANGES = {
    "recipe": "recipe fp8_blockwise",
    "amaxes": "recipe fp8_tensorwise",  # which ranks would reduce
    "k": f"k = {K - 1}",
    "tokens": "5 tokens",
    "dtype": "torch.float64",  # which no cast takes
}


def change(moe: mf.MoE, name: str) -> int:
    """Changes a layer, or the number of its tokens, which it returns."""
    if name in ("recipe", "amaxes"):
        for weight in moe.experts.weight_names:
            recipe = mf.Recipe(CHANGES[name].removeprefix("recipe "))
            product_of(moe.experts, weight).recipe = recipe
    if name == "k":
        moe.router.top_k = K - 1
    return 5 if name == "tokens" else 6


def change_on_one(rank: int, name: str, options: dict[str, object]) -> None:
    moe = mf.expert_parallel(built("mxfp8"), dist.group.WORLD, **options)
    moe(draw(rank, 6))
    x = draw(rank, change(moe, name) if rank == 1 else 6)
    moe(x.double() if rank == 1 and name == "dtype" else x)


@pytest.mark.parametrize("dispatch", ["compute_dtype", "codes"])
@pytest.mark.parametrize("name", ["recipe", "k", "amaxes", "dtype"])
def test_a_later_change_on_one_rank_is_one_error_on_every_rank(name, dispatch):
    begin = time.monotonic()
    for traceback in last_words(2, change_on_one, name, {"dispatch": dispatch}, seconds=LONG):
        assert "ValueError: expert_parallel: expected all ranks to have the same layer" in traceback
        assert CHANGES[name] in traceback.partition("rank 1 has")[2]
    assert time.monotonic() - begin < LONG / 2  # the wait for a missing rank


@pytest.mark.parametrize(
    ("name", "capacity"), [("recipe", 40), ("k", 40), ("recipe", "all"), ("tokens", "all")]
)
def test_with_a_capacity_the_changed_rank_has_the_error(name, capacity):
    begin = time.monotonic()
    options = {"dispatch": "codes", "capacity": capacity}
    first, second = last_words(2, change_on_one, name, options, seconds=LONG)
    assert "ValueError: expert_parallel: expected all ranks to have the same layer" in second
    assert CHANGES[name] in second.partition("rank 1 has")[2].partition("now, and ranks [0]")[0]
    assert "all had moe: 8 experts" in second
    assert any(lost in first for lost in LOST), first
    assert time.monotonic() - begin < LONG / 2  # the wait for a missing rank


def change_on_all(rank: int) -> None:
    """Equal changes are no error, and ranks meet at the store in the first forward alone."""
    for options in ({}, {"capacity": "all"}, {"capacity": 40}):
        moe = mf.expert_parallel(built("mxfp8"), dist.group.WORLD, **options)
        met = rounds.get(dist.group.WORLD, 0)
        for i in range(3):
            for name in CHANGES:
                count = change(moe, name) + i
                with HostReads() as copies:
                    moe(draw(rank, count)).float().square().sum().backward()
                    moe(draw(rank, count))
                # With exact sizes both forwards copy, and the first one of all in any case.
                assert len(copies.found) <= 1 + (i == 0) + (not options)
        assert rounds[dist.group.WORLD] == met + 1


def test_equal_changes_on_all_ranks():
    run_world(2, change_on_all)
