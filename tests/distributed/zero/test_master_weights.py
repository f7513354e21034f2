"""Quantized weights from sharded masters: any cut, any format, the bytes of the whole."""

import copy
import random
from itertools import pairwise

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from minifloat._native import ops

from tests.support.master_weights import (
    assert_same_weight,
    empty_weight,
    master_of,
    require_refused,
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
# The ops alone cast any shards of these. A rule that reads values needs choices of all ranks.
BY_AMAX = [specs for specs in FORMATS if not any("4over6" in str(spec) for spec in specs)]
SHAPES = [(16, 16), (48, 96), (33, 70), (17, 31), (1, 129), (129, 1), (130, 40)]


# ---- one process: the cast alone -----------------------------------------------------------------


def entries(weight, start):
    """Returns (part, numbers) of each direction, the operators' arguments."""
    rounds = weight.dtype == torch.bfloat16
    parts = [p for p in (weight.rowwise, weight.columnwise) if p is not None]
    return [(p, [p.columnwise, *weight.shape, rounds, start, False]) for p in parts]


def cast_by_shards(weight, master, cuts):
    """Casts the shards between the cuts in place, one after the other, as ranks would."""
    flat, packed = master.flatten(), None
    for begin, end in pairwise(cuts):
        found = entries(weight, begin)
        amaxes = ops.partial_amax(
            [flat[begin:end]] * len(found),
            [p.spec for p, _ in found],
            [number for _, numbers in found for number in numbers],
        )
        packed = amaxes if packed is None else torch.maximum(packed, amaxes)
    rows, cols = weight.shape
    staged = [
        p.codes
        if not p.columnwise
        else p.codes.new_zeros(rows, ops.spec_sizes(p.spec, rows, cols)[0])
        for p, _ in entries(weight, 0)
    ]
    for begin, end in pairwise(cuts):
        found = entries(weight, begin)
        ops.partial_cast(
            packed,
            [flat[begin:end]] * len(found),
            [p.spec for p, _ in found],
            [number for _, numbers in found for number in numbers],
            staged,
            [p.scale for p, _ in found],
            [p.amax for p, _ in found],
        )
    for (part, _), flat_codes in zip(entries(weight, 0), staged):
        if part.columnwise:
            bits = 4 if flat_codes.shape[1] < cols else 8
            ops.transpose_many([flat_codes], [part.codes], [rows, cols, bits])


@settings(max_examples=150, deadline=None)
@given(
    specs=st.sampled_from([f for f in BY_AMAX if ("nvfp4/16x16+pow2" not in f)]),
    rows=st.integers(1, 70),
    cols=st.integers(2, 150),
    fractions=st.lists(st.floats(0, 1), max_size=5),
    seed=st.integers(0, 5),
    dtypes=st.sampled_from(
        [
            (torch.float32, torch.bfloat16),
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
        ]
    ),
    special=st.booleans(),
)
def test_any_cut_gives_the_bytes_of_the_whole(specs, rows, cols, fractions, seed, dtypes, special):
    master = master_of((rows, cols), seed, special).to(dtypes[0])
    weight = empty_weight((rows, cols), specs, dtypes[1])
    cuts = sorted([0, rows * cols, *(int(f * rows * cols) for f in fractions)])
    cast_by_shards(weight, master, cuts)
    assert_same_weight(weight, whole_cast(master, specs, dtypes[1]))


def test_delayed_scaling_casts_with_the_active_amax_and_reports_the_current_one():
    master, spec, active = master_of((20, 30), 1), "e4m3/tensor+delayed", torch.tensor(0.75)
    weight = mf.QuantizedTensor(mf.quantize(torch.zeros(20, 30), spec, amax=active), None)
    weight.rowwise.amax.copy_(active)
    mf.quantize_master_weights([weight], [master.flatten()], [0], None)
    want = mf.quantize(master.bfloat16(), spec, amax=active)
    assert_same_weight(weight, mf.QuantizedTensor(want, None))
    assert weight.rowwise.amax == master.bfloat16().abs().max()


def step_and_compare(weights, formats, seed):
    """Casts masters of `seed`; compares every weight with the cast of its whole master."""
    masters = [master_of(tuple(w.shape), seed + i) for i, w in enumerate(weights)]
    flat = [master.flatten() for master in masters]
    mf.quantize_master_weights(weights, flat, [0] * len(weights), None)
    mf.post_all_gather_processing(weights)
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
    mf.attach_wires(
        weights[1], [torch.zeros_like(flat_codes) for flat_codes in mf.wires(weights[1])]
    )
    step_and_compare(weights, formats, 6)
    for weight in weights:
        weight.rowwise.codes.data = torch.zeros_like(weight.rowwise.codes)  # other memory
    step_and_compare(weights, formats, 7)
    weights[0] = empty_weight((16, 16), formats[0])
    step_and_compare(weights, formats, 8)
    names = ["a", "b", "c"]
    with pytest.raises(ValueError, match="expected masters in float32 or bfloat16, got Double"):
        mf.quantize_master_weights(
            weights, [torch.zeros(1, dtype=torch.float64)] * 3, [0] * 3, None, names=names
        )


def test_processing_is_refused_where_it_is_needed_and_may_be_repeated():
    master = master_of((32, 48), 2)
    weight = empty_weight((32, 48), ("nvfp4/16x16", "nvfp4/16x16"))
    with pytest.raises(ValueError, match=r"manual_post_all_gather_processing=True.*nvfp4/16x16"):
        mf.quantize_master_weights([weight], [master.flatten()], [0], None, None, False)
    mf.quantize_master_weights([weight], [master.flatten()], [0], None)
    for _ in range(2):
        mf.post_all_gather_processing([weight])
        assert_same_weight(weight, whole_cast(master, weight.specs))
    rowwise = empty_weight((32, 48), ("nvfp4/16x16", None))
    mf.quantize_master_weights([rowwise], [master.flatten()], [0], None, None, False)
    assert_same_weight(rowwise, whole_cast(master, rowwise.specs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start_offsets": [1]}, "within the 1536 elements"),
        ({"start_offsets": []}, "a start offset"),
        ({"master_weights": [torch.zeros(1536, dtype=torch.float64)]}, "float32 or bfloat16"),
        ({"fsdp_shard_model_weights": [torch.zeros(7, dtype=torch.uint8)]}, "expected 768"),
        ({"fsdp_shard_model_weights": [None]}, "expected 1 fragments"),
        ({"model_weights": [torch.zeros(32, 48)]}, "QuantizedTensor"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(change, message):
    require_refused((32, 48), change, message)


def test_nvfp4_only():
    weight = empty_weight((32, 48), ("mxfp8", "nvfp4"))
    with pytest.raises(ValueError, match=r"expected nvfp4 .* got mxfp8 in weight w"):
        mf.cast_master_weights_to_nvfp4([weight], [torch.zeros(1536)], [0], None, names=["w"])


def test_transformed_and_wrong_layouts_are_refused():
    weight = mf.QuantizedTensor.from_tensor(torch.zeros(32, 48), "nvfp4+rht")
    with pytest.raises(ValueError, match="without a transform, got nvfp4"):
        mf.quantize_master_weights([weight], [torch.zeros(1536)], [0], None)
    weight = empty_weight((32, 48), ("nvfp4/16x16", None))
    with pytest.raises(ValueError, match="rise from 0 to 1536"):
        mf.WireLayout.of([weight], 2, [[0, 5, 1000]])
    with pytest.raises(ValueError, match="inside byte 2 before rank 1"):
        mf.WireLayout.of([weight], 2, [[0, 5, 1536]]).byte_ranges(0)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40))
def test_even_cuts_divide_no_byte_and_hold_everything(ranks, rows, cols):
    weight = empty_weight((rows, cols), ("nvfp4", None))
    layout = mf.WireLayout.of([weight], ranks)
    (ranges,) = layout.byte_ranges(0)
    assert next(b for b, e in ranges if b < e) == 0
    assert sum(e - b for b, e in ranges) == weight.rowwise.codes.numel()


# ---- several processes ---------------------------------------------------------------------------


def gather_in_place(layout, weights, group_size):
    for i, weight in enumerate(weights):
        for flat_codes, ranges in zip(mf.wires(weight), layout.byte_ranges(i)):
            for rank, (begin, end) in zip(range(group_size), ranges):
                if begin < end:
                    dist.broadcast(flat_codes.view(-1)[begin:end], src=rank)


def check_shards(rank, world_size, seed, shapes=SHAPES):
    """Casts all formats in one list: in place, as fragments, and as fragments of odd cuts."""
    pick = random.Random(seed)
    cases = [(specs, pick.choice(shapes)) for specs in FORMATS for _ in range(2)]
    masters = [master_of(shape, pick.randrange(9)) for _, shape in cases]
    want = [whole_cast(master, specs) for master, (specs, _) in zip(masters, cases)]
    for mode in ("in place", "fragments", "odd"):
        weights = [empty_weight(shape, specs) for specs, shape in cases]
        cuts = None
        if mode == "odd":
            inner = [
                sorted(pick.randint(0, w.numel()) for _ in range(world_size - 1)) for w in weights
            ]
            cuts = [[0, *inside, w.numel()] for inside, w in zip(inner, weights)]
        layout = mf.WireLayout.of(weights, world_size, cuts)
        shards = layout.shards(rank)
        shard_masters = [m.flatten()[b:e] if b < e else None for m, (b, e) in zip(masters, shards)]
        starts = [b for b, _ in shards]
        if mode == "in place":
            mf.quantize_master_weights(weights, shard_masters, starts, dist.group.WORLD)
            gather_in_place(layout, weights, world_size)
        else:
            shard_codes = layout.new_piece(masters[0])
            fragments = layout.fragments(shard_codes, rank)
            mf.quantize_master_weights(weights, shard_masters, starts, dist.group.WORLD, fragments)
            layout.gather(shard_codes, weights, dist.group.WORLD)
        mf.post_all_gather_processing(weights)
        for got, expected in zip(weights, want):
            assert_same_weight(got, expected)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_have_the_bytes_of_the_whole(world_size):
    run_world(world_size, check_shards, world_size, world_size)


def refused(match, weights, masters, names=None, starts=None):
    with pytest.raises(ValueError, match=match):
        mf.quantize_master_weights(
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
    refused("1 directions|2 directions", [good] * (1 + rank % 2), [whole] * (1 + rank % 2))
    refused("weight w to hold its 1536 elements, got 20", [good], [torch.ones(10)], ["w"])

    # A list that was refused once is compared again, and then agreed on.
    start = 768 * rank
    for step in range(2):
        master = torch.arange(1536.0)
        if step == 1:
            master[700] = float("nan")  # on rank 0 alone
        mf.quantize_master_weights(
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
    memory = [torch.zeros_like(flat_codes) for flat_codes in mf.wires(weight)]
    mf.attach_wires(weight, memory)
    twin = copy.deepcopy(weight)
    mf.quantize_master_weights([weight], [master.flatten()], [0], None)
    mf.post_all_gather_processing([weight])
    assert_same_weight(weight, whole_cast(master, weight.specs))
    assert_same_weight(twin, empty_weight((32, 48), ("mxfp8", "nvfp4")))
    assert mf.wires(weight)[0].data_ptr() == memory[0].data_ptr()
    assert mf.wires(weight)[1].data_ptr() == memory[1].data_ptr()
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(mf.wires(twin), memory))
