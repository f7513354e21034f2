"""mf.calibrate where one rank has an error or another model: all ranks raise it."""

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.support.worlds import last_words

RANKS, SECONDS = 2, 20
BATCHES = [torch.ones(2, 64)]


def model(recipe="fp8_tensorwise"):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    mf.quantize_(made, recipe, keep="nothing")
    return made


def calibrations():
    """Returns what each of two ranks passes to mf.calibrate, and the error of both."""
    return (
        ((model(), BATCHES), (model(), [torch.ones(2, 63)]), r"63.* \(ranks \[1\]\)$"),
        ((model(), BATCHES), (model(), None), r"batches, got NoneType \(ranks \[1\]\)$"),
        (
            (model(), None),
            (None, BATCHES),
            r"NoneType \(ranks \[0\]\); .*, got None.* \(ranks \[1\]\)$",
        ),
        ((model(), BATCHES), (model("mxfp8"), BATCHES), r"whose x has one amax.* \(ranks \[1\]\)$"),
        (
            (model(), BATCHES),
            (model("nvfp4"), BATCHES),
            r"got 0 of e4m3/tensor on ranks \[0\] and 0 of nvfp4 on ranks \[1\]$",
        ),
        (
            (model(), BATCHES),
            (nn.Sequential(model()), BATCHES),
            r"got 0 of e4m3/tensor on ranks \[0\] and 0.0 of e4m3/tensor on ranks \[1\]$",
        ),
        (
            (model(), BATCHES),
            (model("*: fp8_tensorwise; 1: bf16"), BATCHES),
            r"got 1 of e4m3/tensor on ranks \[0\] and none on ranks \[1\]$",
        ),
    )


def check_calibrations(rank):
    for *of_ranks, expected in calibrations():
        with pytest.raises(ValueError, match=expected):
            mf.calibrate(*of_ranks[rank])


def test_errors_of_one_rank_in_a_calibration_are_raised_on_all():
    assert last_words(RANKS, check_calibrations, seconds=SECONDS) == [None] * RANKS
