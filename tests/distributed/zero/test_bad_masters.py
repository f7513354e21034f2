"""Arguments of mf.distributed.quantize_master_weights that do not fit: one error on every rank."""

import copy

import minifloat as mf
import pytest
import torch

from tests.support.master_weights import (
    assert_same_weight,
    empty_weight,
    master_of,
    require_refused,
)
from tests.support.worlds import run_world


def weight_again(weight):
    """Returns another weight whose codes are in the memory of the first."""
    again = empty_weight((32, 48), ("nvfp4/16x16", None))
    mf.distributed.attach_wires(again, mf.distributed.wires(weight))
    return again


def master_in_codes(weight):
    """Returns a shard of a master in the memory of the weight's codes."""
    return mf.distributed.wires(weight)[0].view(-1).view(torch.float32)


BYTES = torch.zeros(768, dtype=torch.uint8)  # a fragment of the whole weight
WHOLE = torch.zeros(1536)
# What is changed in a call -> what the error says. A function is called with the weight.
BAD_INPUT = [
    ({"start_offsets": [1]}, "within the 1536 elements"),
    ({"start_offsets": [2**63 - 1]}, "within the 1536 elements"),
    ({"start_offsets": []}, "a start offset for each of 1 weights, got 0"),
    ({"start_offsets": ["0"]}, r"offset 0: expected an int, got '0' \(str\)"),
    ({"start_offsets": [0.0]}, r"offset 0: expected an int, got 0.0 \(float\)"),
    ({"start_offsets": [2**70]}, r"offset 0: expected an int from -2\^63 to 2\^63 - 1"),
    ({"start_offsets": "0"}, "start_offsets: expected a list, got str"),
    ({"start_offsets": None}, "start_offsets: expected a list, got NoneType"),
    ({"master_weights": [WHOLE.double()]}, "float32 or bfloat16"),
    ({"master_weights": ["x"]}, "master 0: expected a Tensor, got str"),
    ({"master_weights": [[0.0]]}, "master 0: expected a Tensor, got list"),
    ({"master_weights": WHOLE}, "master_weights: expected a list, got Tensor"),
    ({"master_weights": []}, "a master for each of 1 weights, got 0"),
    ({"master_weights": [WHOLE.view(32, 48).t()]}, "flat, contiguous shards"),
    (
        {"master_weights": lambda w: [master_in_codes(w)], "fsdp_shard_model_weights": None},
        "memory of its own for what is written",
    ),
    ({"fsdp_shard_model_weights": [BYTES[:7]]}, "expected 768"),
    ({"fsdp_shard_model_weights": [BYTES.float()]}, "expected 768 contiguous bytes"),
    ({"fsdp_shard_model_weights": [None]}, "expected 1 fragments"),
    ({"fsdp_shard_model_weights": [(BYTES, BYTES)]}, "expected 1 fragments .* got 2"),
    ({"fsdp_shard_model_weights": []}, "fragments for each of 1 weights"),
    ({"fsdp_shard_model_weights": [3]}, "fragments of weight 0: expected a list, got int"),
    ({"fsdp_shard_model_weights": [["x"]]}, "fragments of weight 0: expected a Tensor, got str"),
    ({"fsdp_shard_model_weights": 3}, "fsdp_shard_model_weights: expected a list, got int"),
    (
        {"fsdp_shard_model_weights": lambda w: [w.rowwise.scale.view(torch.uint8).view(-1)[:7]]},
        "expected 768 contiguous bytes",
    ),
    ({"model_weights": [torch.zeros(32, 48)]}, "QuantizedTensor"),
    ({"model_weights": None}, "model_weights: expected a list, got NoneType"),
    ({"model_weights": lambda w: w}, "model_weights: expected a list, got QuantizedTensor"),
    ({"names": []}, "a name for each of 1 weights, got 0"),
    ({"names": ["a", "b"]}, "a name for each of 1 weights, got 2"),
    ({"names": [3]}, "names: expected its text as str, got int"),
    ({"names": 3}, "names: expected a list, got int"),
    (
        {
            "model_weights": lambda w: [w, w],
            "master_weights": [WHOLE, WHOLE],
            "start_offsets": [0, 0],
        },
        "expected each weight once, got weight 0 again as 1",
    ),
    (
        {
            "model_weights": lambda w: [w, weight_again(w)],
            "master_weights": [WHOLE, WHOLE],
            "start_offsets": [0, 0],
        },
        "memory of its own for what is written, got codes and codes",
    ),
    ({"group": 3}, r"group: expected a process group .* got 3 \(int\)"),
    ({"group": "x"}, r"group: expected a process group .* got 'x' \(str\)"),
]


@pytest.mark.parametrize(("change", "message"), BAD_INPUT)
def test_bad_input_is_refused_before_anything_is_written(change, message):
    require_refused((32, 48), change, message)


def check_bad_input_of_one_rank(rank):
    weight = empty_weight((32, 48), ("nvfp4/16x16", None))
    right = {
        "model_weights": [weight],
        "master_weights": [master_of((32, 48), 5).flatten()],
        "start_offsets": [0],
        "group": None,
    }
    call = mf.distributed.quantize_master_weights
    for change, message in BAD_INPUT:
        wrong = {n: v(weight) if callable(v) else v for n, v in change.items()} if rank else {}
        before = copy.deepcopy(weight)
        with pytest.raises(ValueError, match=message + r".*\(ranks \[1\]\)"):
            call(**right | wrong)
        assert_same_weight(weight, before)
        call(**right)


def test_bad_input_of_one_rank_is_an_error_on_all():
    run_world(2, check_bad_input_of_one_rank)


def check_gathers(rank):
    """What rank 1 alone passes to a gather is an error on both, and nothing is written."""
    weight = empty_weight((32, 48), ("nvfp4/16x16", None))
    layout = mf.distributed.WireLayout.of([weight], 2)
    other = mf.distributed.WireLayout.of([weight], 2, [[0, 16, 32 * 48]])
    piece, alone = layout.new_piece(WHOLE), mf.distributed.WireLayout.of([weight], 1)
    for wrong, match in (
        ((layout, piece[1:]), r"piece: expected contiguous uint8 \(384\), got .* \(383,\) .*ranks"),
        ((layout, piece.int()), r"piece: expected contiguous .* got torch.int32 .*ranks \[1\]"),
        ((layout, None), r"piece: expected a Tensor, got NoneType \(ranks \[1\]"),
        ((layout, piece, 3), r"group: expected a process group or None, got 3 .*ranks \[1\]"),
        ((alone, alone.new_piece(WHOLE)), r"group: expected 1 ranks, got 2 \(ranks \[1\]"),
        (
            (other, other.new_piece(WHOLE)),
            r"one layout, but rank 0 has .* 384 bytes .*; rank 1 has",
        ),
    ):
        by, given, *group = wrong if rank else (layout, piece)
        before = copy.deepcopy(weight)
        with pytest.raises(ValueError, match=match):
            by.gather(given, [weight], *(group or [None]))
        assert_same_weight(weight, before)
        layout.gather(piece, [weight], None)


def test_bad_input_of_a_gather_is_an_error_on_all():
    run_world(2, check_gathers)
