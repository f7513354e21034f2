"""Sharded masters under a rule that reads values, Four Over Six, with cuts inside blocks."""

import random
from itertools import pairwise

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.distributed.zero.test_master_weights import refused
from tests.support.master_weights import assert_same_weight, empty_weight, whole_cast
from tests.support.worlds import run_world

FORMATS = [
    ("nvfp4+4over6", "nvfp4+4over6"),
    ("nvfp4/16x16+4over6", "nvfp4/16x16+4over6"),
    ("nvfp4/16x16+4over6", None),
    (None, "nvfp4+4over6"),
    ("nvfp4+4over6", "mxfp8"),
    ("nvfp4/16x16", "nvfp4/16x16"),  # reads no values: its amaxes are packed among the others'
]
SHAPES = [(16, 16), (48, 96), (33, 70), (17, 31), (1, 129), (129, 1), (70, 40)]
BLOCKS = ("nvfp4/16x16+4over6", "nvfp4/16x16+4over6")


def values_of(shape, seed, special=None):
    """Returns fp32 values of which about half of the blocks take the second scale."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if special is not None:
        x[0, shape[1] // 2] = special
    return x


def random_cuts(pick, size, ranks):
    """Returns cuts anywhere; some lie close together, so that a block is of several shards."""
    around = pick.randint(0, size)
    inner = [
        min(around + pick.randint(0, 9), size) if pick.random() < 0.3 else pick.randint(0, size)
        for _ in range(ranks - 1)
    ]
    return [0, *sorted(inner), size]


def cast(rank, weights, masters, cuts, names=None):
    """Casts this rank's shards to fragments, and gathers those of all ranks."""
    layout = mf.distributed.WireLayout.of(weights, len(cuts[0]) - 1, cuts)
    shards = layout.shards(rank)
    held = [m.flatten()[b:e] if b < e else None for m, (b, e) in zip(masters, shards)]
    codes = layout.new_piece(masters[0])
    fragments = layout.fragments(codes, rank)
    starts = [begin for begin, _ in shards]
    mf.distributed.quantize_master_weights(
        weights, held, starts, dist.group.WORLD, fragments, names=names
    )
    layout.gather(codes, weights, dist.group.WORLD)
    mf.distributed.post_all_gather_processing(weights)


# ---- bytes ---------------------------------------------------------------------------------------


def check_any_cut(rank, world_size):
    """Casts one list of weights, step after step, with other cuts and values in each step."""
    pick = random.Random(world_size)
    cases = [
        (specs, pick.choice(SHAPES), dtype, masters)
        for specs in FORMATS
        for dtype, masters in (
            (torch.bfloat16, (torch.float32,)),
            (torch.float32, (torch.float32,)),
            (torch.bfloat16, (torch.bfloat16,)),
            (torch.float32, (torch.bfloat16,)),
            (torch.bfloat16, (torch.float32, torch.bfloat16)),  # by rank
        )
    ]
    weights = [empty_weight(shape, specs, dtype) for specs, shape, dtype, _ in cases]
    specials = [None, None, None, float("nan"), float("inf"), -float("inf")]
    cuts = []
    for step, special in enumerate(specials):
        if step != 2:  # one step has the cuts of the step before
            cuts = [random_cuts(pick, w.numel(), world_size) for w in weights]
        masters = [
            values_of(shape, 100 * step + i, special) for i, (_, shape, _, _) in enumerate(cases)
        ]
        want = [
            whole_cast(of_ranks(x, cut, dtypes), specs, dtype)
            for x, cut, (specs, _, dtype, dtypes) in zip(masters, cuts, cases)
        ]
        held = [x.to(dtypes[rank % len(dtypes)]) for x, (*_, dtypes) in zip(masters, cases)]
        cast(rank, weights, held, cuts)
        for got, expected in zip(weights, want):
            assert_same_weight(got, expected)


def of_ranks(x, cuts, dtypes):
    """Returns the whole master of shards whose dtypes differ by rank."""
    flat = x.flatten().clone()
    for rank, (begin, end) in enumerate(pairwise(cuts)):
        flat[begin:end] = flat[begin:end].to(dtypes[rank % len(dtypes)]).float()
    return flat.view(x.shape)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_cut_has_the_bytes_of_the_whole(world_size):
    run_world(world_size, check_any_cut, world_size)


def check_every_cut(rank, specs, shape):
    """Casts a weight for each cut of it into two shards, all in one list."""
    rows, cols = shape
    master = values_of(shape, 7)
    weights = [empty_weight(shape, specs) for _ in range(rows * cols + 1)]
    want = whole_cast(master, specs)
    assert want.rowwise.scale.view(torch.uint8).unique().numel() > 1
    cast(
        rank,
        weights,
        [master] * len(weights),
        [[0, cut, rows * cols] for cut in range(len(weights))],
    )
    for weight in weights:
        assert_same_weight(weight, want)


@pytest.mark.parametrize(
    ("specs", "shape"),
    [(("nvfp4+4over6", "nvfp4+4over6"), (3, 37)), (BLOCKS, (18, 35))],
)
def test_every_cut_of_a_small_weight(specs, shape):
    run_world(2, check_every_cut, specs, shape)


# ---- what is sent --------------------------------------------------------------------------------


def all_reduces(run):
    """Counts the all-reduces of a call."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    return sum(event.name == "c10d::allreduce_" for event in seen.events())


def check_counts(rank):
    shape, size = (64, 32), 64 * 32
    master = values_of(shape, 1)
    weights = {specs: empty_weight(shape, specs) for specs in (("nvfp4", None), BLOCKS)}

    def count(specs, cuts):
        begin, end = cuts[rank], cuts[rank + 1]
        arguments = [weights[specs]], [master.flatten()[begin:end]], [begin], dist.group.WORLD
        found = all_reduces(lambda: mf.distributed.quantize_master_weights(*arguments))
        want = whole_cast(master, specs)
        assert torch.equal(weights[specs].rowwise.scale, want.rowwise.scale)
        return found

    between, inside, other = [0, 512, 1024, size], [0, 500, 1024, size], [0, 1000, 1024, size]
    # At a list's first step, and where shards change, ranks compare its length, weights and shards.
    assert count(("nvfp4", None), inside) == 3 + 1
    assert count(("nvfp4", None), inside) == 1
    assert count(("nvfp4", None), other) == 3 + 1
    assert count(BLOCKS, between) == 3 + 2  # amaxes, choices
    assert count(BLOCKS, between) == 2
    assert count(BLOCKS, inside) == 3 + 3  # rank 2 has the shard that it had, and compares it again
    assert count(BLOCKS, inside) == 3  # amaxes, values of split blocks, choices
    assert count(BLOCKS, other) == 3 + 3
    assert count(BLOCKS, between) == 3 + 2
    assert count(BLOCKS, between) == 2


def test_ranks_send_more_only_where_cuts_split_blocks():
    run_world(3, check_counts)


# ---- refusals ------------------------------------------------------------------------------------


def bytes_of(weight):
    parts = [part for part in (weight.rowwise, weight.columnwise) if part is not None]
    return [
        t.clone().reshape(-1).view(torch.uint8) for p in parts for t in (p.codes, p.scale, p.amax)
    ]


def check_refusals(rank):
    shape, size = (32, 48), 32 * 48
    master = values_of(shape, 3).flatten()
    shards = [(0, 700), (700, size)]
    begin, end = shards[rank]
    mine = master[begin:end]
    weight = empty_weight(shape, BLOCKS)
    before = bytes_of(weight)
    refused("weight . .*name differs", [weight], [mine], ["x" if rank else "y"], [begin])
    refused(
        r"to hold its 1536 elements, got elements \[0, 700\) on no rank",
        [weight],
        [mine if rank else master[:0]],
        ["w"],
        [begin],
    )
    refused("float32 or bfloat16", [weight], [mine.double()], ["w"], [begin])
    refused("within the 1536 elements", [weight], [mine], ["w"], [size - 3])
    assert all(map(torch.equal, bytes_of(weight), before))
    mf.distributed.quantize_master_weights([weight], [mine], [begin], dist.group.WORLD, names=["w"])
    want = whole_cast(master.view(shape), BLOCKS)
    assert torch.equal(weight.rowwise.scale, want.rowwise.scale)


def test_nothing_is_written_where_ranks_refuse():
    run_world(2, check_refusals)


def test_a_process_without_ranks_needs_the_whole_weight():
    weight = empty_weight((32, 48), BLOCKS)
    before = bytes_of(weight)
    with pytest.raises(ValueError, match="reads the values of every block; expected chosen scales"):
        mf.distributed.quantize_master_weights([weight], [torch.ones(700)], [0], None)
    assert all(map(torch.equal, bytes_of(weight), before))
