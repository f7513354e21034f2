"""Quantized weights from sharded masters: any cut, any format, the bytes of the whole."""

import copy
import random

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.support.master_weights import (
    assert_same_weight,
    empty_weight,
    master_of,
    whole_cast,
)
from tests.support.worlds import run_world

FORMATS = [
    ("e4m3/tensor", "e4m3/tensor"),
    ("e4m3/tensor", "e5m2/tensor"),
    ("e4m3/tensor", None),
    ("e4m3/row", "e4m3/row"),
    ("e4m3/1x128", "e4m3/1x128"),
    ("e4m3/128x128", "e4m3/128x128"),
    (None, "e4m3/128x128"),
    ("mxfp8", "mxfp8"),
    ("mxfp8/32x32", "mxfp8/32x32"),
    ("mxfp8", "nvfp4/16x16"),
    ("mxfp4", "mxfp4"),
    ("nvfp4/16x16", "nvfp4/16x16"),
    ("nvfp4/16x16", None),
    ("nvfp4", "nvfp4"),
    ("nvfp4/16x16", "mxfp8"),
    ("nvfp4/16x16+pow2", "nvfp4/16x16+pow2"),
    ("nvfp4+4over6", "nvfp4+4over6"),
    ("nvfp4/16x16+4over6", "nvfp4/16x16+4over6"),
    ("mxfp8", "nvfp4+4over6"),
]
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(16, 16), (48, 96), (33, 70), (17, 31), (1, 129), (129, 1), (130, 40)]


# ---- one process ---------------------------------------------------------------------------------


def test_delayed_scaling_casts_with_the_active_amax_and_reports_the_current_one():
    master, spec, active = master_of((20, 30), 1), "e4m3/tensor+delayed", torch.tensor(0.75)
    weight = mf.QuantizedTensor(mf.tensor.quantize(torch.zeros(20, 30), spec, amax=active), None)
    weight.rowwise.amax.copy_(active)
    mf.distributed.quantize_master_weights([weight], [master.flatten()], [0], None)
    want = mf.tensor.quantize(master.bfloat16(), spec, amax=active)
    assert_same_weight(weight, mf.QuantizedTensor(want, None))
    assert weight.rowwise.amax == master.bfloat16().abs().max()


def test_backward_does_not_read_codes_that_a_cast_wrote_after_forward():
    weight = torch.nn.Parameter(mf.QuantizedTensor.from_tensor(torch.ones(32, 64), "mxfp8/32x32"))
    x = torch.ones(4, 64, requires_grad=True)
    loss = mf.linear(x, weight, None, "mxfp8_2d").sum()
    mf.distributed.quantize_master_weights([weight], [torch.zeros(32 * 64)], [0], None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def step_and_compare(weights, formats, seed):
    """Casts masters of `seed`; compares every weight with the cast of its whole master."""
    masters = [master_of(tuple(w.shape), seed + i) for i, w in enumerate(weights)]
    flat = [master.flatten() for master in masters]
    mf.distributed.quantize_master_weights(weights, flat, [0] * len(weights), None)
    mf.distributed.post_all_gather_processing(weights)
    for weight, master, specs in zip(weights, masters, formats):
        assert_same_weight(weight, whole_cast(master, specs))
    return masters


def test_what_steps_keep_of_a_list_follows_its_weights():
    formats = [("nvfp4/16x16", "nvfp4/16x16"), ("mxfp8", "mxfp8"), ("e4m3/tensor", "e4m3/tensor")]
    weights = [empty_weight((32, 48), specs) for specs in formats]
    step_and_compare(weights, formats, 1)
    step_and_compare(weights, formats, 2)  # the same list
    step_and_compare(weights[:2], formats[:2], 3)  # another list with the same first weights
    masters = step_and_compare(weights, formats, 4)
    twins = copy.deepcopy(weights)
    step_and_compare(twins, formats, 5)
    for weight, master, specs in zip(weights, masters, formats):  # copies have their memory
        assert_same_weight(weight, whole_cast(master, specs))
    mf.distributed.attach_wires(
        weights[1],
        [torch.zeros_like(flat_codes) for flat_codes in mf.distributed.wires(weights[1])],
    )
    step_and_compare(weights, formats, 6)
    for weight in weights:
        weight.rowwise.codes.data = torch.zeros_like(weight.rowwise.codes)  # other memory
    step_and_compare(weights, formats, 7)
    weights[0] = empty_weight((16, 16), formats[0])
    step_and_compare(weights, formats, 8)
    names = ["a", "b", "c"]
    with pytest.raises(ValueError, match="expected masters in float32 or bfloat16, got Double"):
        mf.distributed.quantize_master_weights(
            weights, [torch.zeros(1, dtype=torch.float64)] * 3, [0] * 3, None, names=names
        )


def test_processing_is_refused_where_it_is_needed_and_may_be_repeated():
    master = master_of((32, 48), 2)
    weight = empty_weight((32, 48), ("nvfp4/16x16", "nvfp4/16x16"))
    with pytest.raises(ValueError, match=r"manual_post_all_gather_processing=True.*nvfp4/16x16"):
        mf.distributed.quantize_master_weights([weight], [master.flatten()], [0], None, None, False)
    mf.distributed.quantize_master_weights([weight], [master.flatten()], [0], None)
    for _ in range(2):
        mf.distributed.post_all_gather_processing([weight])
        assert_same_weight(weight, whole_cast(master, weight.specs))
    rowwise = empty_weight((32, 48), ("nvfp4/16x16", None))
    mf.distributed.quantize_master_weights([rowwise], [master.flatten()], [0], None, None, False)
    assert_same_weight(rowwise, whole_cast(master, rowwise.specs))


def test_transformed_and_wrong_layouts_are_refused():
    for spec in ("nvfp4+rht", "nvfp4+rht64", "nvfp4/row"):  # 64 points fill up 48 columns
        weight = mf.QuantizedTensor.from_tensor(torch.zeros(32, 48), spec)
        with pytest.raises(ValueError, match="weight 0: expected a spec of weights, without"):
            mf.distributed.quantize_master_weights([weight], [torch.zeros(1536)], [0], None)
    weight = empty_weight((32, 48), ("nvfp4/16x16", None))
    with pytest.raises(ValueError, match="rise from 0 to 1536"):
        mf.distributed.WireLayout.of([weight], 2, [[0, 5, 1000]])
    with pytest.raises(ValueError, match=r"4 cuts .* rise from 0 to 1536, got \[0, 1000, 5"):
        mf.distributed.WireLayout.of([weight], 3, [[0, 1000, 5, 1536]])
    with pytest.raises(ValueError, match="inside byte 2 before rank 1"):
        mf.distributed.WireLayout.of([weight], 2, [[0, 5, 1536]]).byte_ranges(0)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40))
def test_even_cuts_divide_no_byte_and_hold_everything(ranks, rows, cols):
    weight = empty_weight((rows, cols), ("nvfp4", None))
    layout = mf.distributed.WireLayout.of([weight], ranks)
    (ranges,) = layout.byte_ranges(0)
    assert next(b for b, e in ranges if b < e) == 0
    assert sum(e - b for b, e in ranges) == weight.rowwise.codes.numel()


# ---- several processes ---------------------------------------------------------------------------


def gather_in_place(layout, weights, group_size):
    for i, weight in enumerate(weights):
        for flat_codes, ranges in zip(mf.distributed.wires(weight), layout.byte_ranges(i)):
            for rank, (begin, end) in zip(range(group_size), ranges):
                if begin < end:
                    dist.broadcast(flat_codes.view(-1)[begin:end], src=rank)


def check_shards(rank, world_size, seed, shapes=SHAPES):
    """Casts all formats in one list: in place, as fragments, and as fragments of odd cuts."""
    pick = random.Random(seed)
    cases = [
        (specs, pick.choice(shapes), pick.choice(DTYPES)) for specs in FORMATS for _ in range(2)
    ]
    masters = [
        master_of(shape, pick.randrange(9), pick.random() < 0.3).to(pick.choice(DTYPES))
        for _, shape, _ in cases
    ]
    want = [whole_cast(master, specs, dtype) for master, (specs, _, dtype) in zip(masters, cases)]
    for mode in ("in place", "fragments", "odd"):
        weights = [empty_weight(shape, specs, dtype) for specs, shape, dtype in cases]
        cuts = None
        if mode == "odd":
            inner = [
                sorted(pick.randint(0, w.numel()) for _ in range(world_size - 1)) for w in weights
            ]
            cuts = [[0, *inside, w.numel()] for inside, w in zip(inner, weights)]
        layout = mf.distributed.WireLayout.of(weights, world_size, cuts)
        shards = layout.shards(rank)
        shard_masters = [m.flatten()[b:e] if b < e else None for m, (b, e) in zip(masters, shards)]
        starts = [b for b, _ in shards]
        if mode == "in place":
            mf.distributed.quantize_master_weights(weights, shard_masters, starts, dist.group.WORLD)
            gather_in_place(layout, weights, world_size)
        else:
            shard_codes = layout.new_piece(masters[0])
            fragments = layout.fragments(shard_codes, rank)
            mf.distributed.quantize_master_weights(
                weights, shard_masters, starts, dist.group.WORLD, fragments
            )
            layout.gather(shard_codes, weights, dist.group.WORLD)
        mf.distributed.post_all_gather_processing(weights)
        for got, expected in zip(weights, want):
            assert_same_weight(got, expected)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_have_the_bytes_of_the_whole(world_size):
    run_world(world_size, check_shards, world_size, world_size)


def refused(match, weights, masters, names=None, starts=None):
    with pytest.raises(ValueError, match=match):
        mf.distributed.quantize_master_weights(
            weights, masters, starts or [0] * len(weights), dist.group.WORLD, names=names
        )


def check_faults(rank):
    nvfp4, fp8 = ("nvfp4/16x16", "nvfp4/16x16"), ("e4m3/tensor", "e4m3/tensor")
    whole = torch.ones(32 * 48)

    good = empty_weight((32, 48), nvfp4)
    odd = empty_weight((32, 48) if rank == 0 else (48, 32), nvfp4)
    refused("weight b .*rows differs; here", [good, odd], [whole, whole], ["a", "b"])
    refused(
        "weight #0 .*dtype differs",
        [empty_weight((32, 48), fp8 if rank else nvfp4)],
        [whole],
        ["#0"],
    )
    refused("weight . .*name differs", [good], [whole], ["x" if rank else "y"])
    several = [good, empty_weight((32, 48), nvfp4)][: 1 + rank % 2]
    refused("1 directions|2 directions", several, [whole] * len(several))
    refused(
        r"weight w to hold its 1536 elements, got elements \[10, 1536\) on no rank",
        [good],
        [torch.ones(10)],
        ["w"],
    )
    one = slice(rank, 1)  # rank 1 has no weight
    refused(f"got {1 - rank} directions here and 0 to 1", [good][one], [whole][one])
    mf.distributed.quantize_master_weights([], [], [], dist.group.WORLD)

    # A list that was refused once is compared again, and then agreed on.
    start = 768 * rank
    for step in range(2):
        master = torch.arange(1536.0)
        if step == 1:
            master[700] = float("nan")  # on rank 0 alone
        mf.distributed.quantize_master_weights(
            [good], [master[start : start + 768]], [start], dist.group.WORLD, names=["w"]
        )
        is_nan = bool(good.rowwise.amax.isnan())
        assert is_nan == (step == 1)
        assert bool(good.rowwise.scale.float().isnan().all()) == (step == 1)


def test_ranks_that_differ_are_refused_by_name_and_nan_reaches_all():
    run_world(2, check_faults)


def test_a_copy_of_a_weight_has_wires_of_its_own():
    master = master_of((32, 48), 4)
    weight = empty_weight((32, 48), ("mxfp8", "nvfp4"))
    memory = [torch.zeros_like(flat_codes) for flat_codes in mf.distributed.wires(weight)]
    mf.distributed.attach_wires(weight, memory)
    twin = copy.deepcopy(weight)
    mf.distributed.quantize_master_weights([weight], [master.flatten()], [0], None)
    mf.distributed.post_all_gather_processing([weight])
    assert_same_weight(weight, whole_cast(master, weight.specs))
    assert_same_weight(twin, empty_weight((32, 48), ("mxfp8", "nvfp4")))
    assert mf.distributed.wires(weight)[0].data_ptr() == memory[0].data_ptr()
    assert mf.distributed.wires(weight)[1].data_ptr() == memory[1].data_ptr()
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(mf.distributed.wires(twin), memory))


def test_memory_for_wires_that_does_not_fit_is_refused():
    weight = empty_weight((32, 48), ("mxfp8", None))
    (before,) = mf.distributed.wires(weight)
    for memory in (
        torch.zeros(32, 47, dtype=torch.uint8),
        torch.zeros(32, 48, dtype=torch.int8),
        torch.zeros(48, 32, dtype=torch.uint8).t(),
    ):
        with pytest.raises(ValueError, match="attach_wires: expected contiguous memory"):
            mf.distributed.attach_wires(weight, [memory])
    assert mf.distributed.wires(weight)[0].data_ptr() == before.data_ptr()


def check_weights_of_a_gather(rank):
    """Those that do not fit on one rank are an error on both, before anything is sent."""
    weight = empty_weight((32, 48), ("mxfp8", None))
    layout = mf.distributed.WireLayout.of([weight], 2)
    piece = layout.new_piece(like=torch.empty(0))
    other = empty_weight((32, 96), ("mxfp8", None))
    for wrong in ([], None, [weight, weight], [torch.ones(3)], [other]):
        with pytest.raises(
            ValueError, match=r"expected (a list|flat codes|QuantizedTensor weights)"
        ):
            layout.gather(piece, [weight] if rank else wrong, None)
    layout.gather(piece, [weight], None)


def test_weights_that_do_not_fit_a_gather():
    run_world(2, check_weights_of_a_gather)


def check_changes_on_one(rank):
    """A list that changes on one rank after steps that agreed is an error on both."""
    master = torch.arange(1536.0)
    mine, starts = master[768 * rank :][:768], [768 * rank]
    weight = empty_weight((32, 48), ("mxfp8/32x32", "mxfp8/32x32"))

    def cast(weight, *names):
        mf.distributed.quantize_master_weights(
            [weight] * len(names), [mine] * len(names), starts * len(names), None, names=names
        )

    cast(weight, "a")
    cast(weight, "a")
    refused("name differs", [weight], [mine], ["b" if rank else "a"], starts)
    several = [weight, copy.deepcopy(weight)][: 1 + rank]
    refused("directions here and 1 to 2", several, [mine] * len(several))
    cast(weight, "a")
    want = weight.dequantize()
    # New weights on one rank alone, whose list is not new to the other.
    other = empty_weight((32, 48), ("mxfp8/32x32", "mxfp8/32x32")) if rank else weight
    for _ in range(2):
        cast(other, "a")
    shard = slice(768 * rank, 768 * (rank + 1))
    assert torch.equal(other.dequantize().view(-1)[shard], want.view(-1)[shard])


def test_a_list_that_changes_on_one_rank():
    run_world(2, check_changes_on_one)


# Each rank's shard -> what the error says. The sizes add up to the weight, or to more.
WRONG_SHARDS = {
    "overlap": (
        [(0, 800), (700, 1536)],
        r"elements \[0, 800\) on rank 0 and \[700, 1536\) on rank 1",
    ),
    "within": (
        [(0, 1536), (700, 800)],
        r"elements \[0, 1536\) on rank 0 and \[700, 800\) on rank 1",
    ),
    "one begin": ([(0, 1536), (0, 9)], r"elements \[0, 9\) on rank 1 and \[0, 1536\) on rank 0"),
    "twice": ([(0, 768), (0, 768)], r"its 1536 elements, got elements \[768, 1536\) on no rank"),
    "gap": ([(0, 700), (701, 1536)], r"its 1536 elements, got elements \[700, 701\) on no rank"),
    "no begin": ([(1, 768), (768, 1536)], r"its 1536 elements, got elements \[0, 1\) on no rank"),
}
RIGHT_SHARDS = {
    "halves": [(0, 768), (768, 1536)],
    "replicas": [(0, 1536), (0, 1536)],
    "one alone": [(0, 0), (0, 1536)],
    "reversed": [(5, 1536), (0, 5)],
}


def check_intervals(rank, specs):
    """Shards are equal or disjoint, and the whole, at first and where they change."""
    master = master_of((32, 48), 5)
    want = whole_cast(master, specs)

    def cast(weight, shards):
        begin, end = shards[rank]
        held = [master.flatten()[begin:end]]
        mf.distributed.quantize_master_weights(
            [weight], held, [begin], dist.group.WORLD, names=["w"]
        )

    for name, (wrong, message) in WRONG_SHARDS.items():
        for is_first in (True, False):
            weight = empty_weight((32, 48), specs)
            if not is_first:
                cast(weight, RIGHT_SHARDS["halves"])
            before = copy.deepcopy(weight)
            for _ in range(2):
                with pytest.raises(ValueError, match=message):
                    cast(weight, wrong)
                assert_same_weight(weight, before)
            for right in RIGHT_SHARDS.values():
                cast(weight, right)
                assert torch.equal(weight.rowwise.scale, want.rowwise.scale), name


@pytest.mark.parametrize("specs", [("mxfp8", None), ("nvfp4/16x16+4over6", None)])
def test_shards_of_ranks_are_equal_or_disjoint(specs):
    run_world(2, check_intervals, specs)
