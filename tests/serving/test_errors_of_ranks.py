"""mf.calibrate and mf.export where one rank has an error or another model: all ranks raise it."""

from pathlib import Path

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.support.served_models import llama
from tests.support.worlds import last_words

RANKS, SECONDS = 2, 20
BATCHES = [torch.ones(2, 64)]


def model(recipe="fp8_tensorwise"):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    mf.quantize_(made, recipe, keep="nothing")
    return made


class BrokenAdapter:
    def to_hf(self, tensors):
        raise KeyError("name")


def without_k_proj(made):
    """Replaces a layer whose amax others share."""
    made.model.layers[0].self_attn.k_proj = nn.Linear(128, 64, bias=False)
    return made


def shared_amaxes():
    made = llama()
    mf.quantize_(made, "nvfp4_served", share_amax="servers")
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


def exports():
    """Returns what each of two ranks passes to mf.export besides the folder, and the error."""
    other = r"expected the same tensors on every rank, got 0.weight"
    return (
        ({}, {"amaxes": [1]}, r"amaxes: expected a mapping of names, got list \(ranks \[1\]\)$"),
        ({}, {"amaxes": {0: 1}}, r"amaxes: 0: "),
        ({}, {"folder": None}, r"NoneType.* \(ranks \[1\]\)$"),
        ({"folder": None}, {"format": "gguf"}, r" \(ranks \[0\]\); format: .* \(ranks \[1\]\)$"),
        ({}, {"model": 3}, r"export: .* \(ranks \[1\]\)$"),
        ({}, {"adapter": 3}, r"AttributeError: .* \(ranks \[1\]\)$"),
        (
            {},
            {"model": model("*: mxfp8; 1: bf16"), "adapter": BrokenAdapter()},
            r"adapter of this model, got KeyError\('name'\) \(ranks \[1\]\)$",
        ),
        (
            {"model": shared_amaxes()},
            {"model": without_k_proj(shared_amaxes())},
            r"k_proj: expected a layer under .* \(ranks \[1\]\)$",
        ),
        (
            {},
            {"dtype": torch.bfloat16},
            r"same arguments on every rank, but rank 0 has .*dtype=None; rank 1 has .*bfloat16$",
        ),
        ({}, {"weight_only": True}, r"same arguments .*only=False.*; rank 1 has .*only=True"),
        (
            {"model": model("mxfp8")},
            {"model": model("fp8_rowwise")},
            rf"{other} \(64, 64\) of mxfp8\*mxfp8 on ranks \[0\] and .*e4m3/row on ranks \[1\]$",
        ),
        (
            {},
            {"amaxes": {"0": torch.ones(())}},
            rf"{other} .* and 0.weight .*, a scale of x on ranks",
        ),
        ({}, {"model": nn.Sequential(model())}, rf"{other} .* and 0.0.weight .* on ranks \[1\]$"),
    )


def check_calibrations(rank):
    for *of_ranks, expected in calibrations():
        with pytest.raises(ValueError, match=expected):
            mf.calibrate(*of_ranks[rank])


def check_exports(rank, folder):
    for *of_ranks, expected in exports():
        options = {"model": model(), "folder": folder} | of_ranks[rank]
        with pytest.raises(ValueError, match=expected):
            mf.export(**options)
        assert not Path(folder).exists(), expected


def test_errors_of_one_rank_in_a_calibration_are_raised_on_all():
    assert last_words(RANKS, check_calibrations, seconds=SECONDS) == [None] * RANKS


def test_errors_of_one_rank_in_an_export_are_raised_on_all(tmp_path):
    ends = last_words(RANKS, check_exports, str(tmp_path / "served"), seconds=SECONDS)
    assert ends == [None] * RANKS
