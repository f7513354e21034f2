"""What mf.GraphedStep has captured of a model's modes, on a CPU."""

import minifloat as mf
import pytest
from minifloat.graphed_modes import GraphedModes
from torch import nn


def built():
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.Dropout()), nn.Linear(32, 32))
    model[0][1].eval()
    mf.quantize_(model, "mxfp8", keep="nothing", primary=True)
    model[1].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("change", "undo", "says"),
    [
        (lambda m: m.eval(), lambda m: m.train()[0][1].eval(), "the model with training=True"),
        (lambda m: m[0][1].train(), lambda m: m[0][1].eval(), r"0\.1 with training=False"),
        (
            lambda m: m[1].weight.requires_grad_(),
            lambda m: m[1].weight.requires_grad_(False),
            r"1\.weight with requires_grad=False",
        ),
        (
            lambda m: m[0][0].bias.requires_grad_(False),
            lambda m: m[0][0].bias.requires_grad_(),
            r"0\.0\.bias with requires_grad=True",
        ),
    ],
    ids=["the model", "a submodule", "a weight is trained", "a bias is frozen"],
)
def test_modes_are_those_of_the_capture(change, undo, says):
    model = built()
    modes = GraphedModes(model)
    modes.require()
    change(model)
    with pytest.raises(ValueError, match=f"expected {says}, as at the capture, got .*; set it"):
        modes.require()
    undo(model)
    modes.require()


def test_a_model_without_parameters():
    model = nn.ReLU()
    modes = GraphedModes(model)
    modes.require()
    model.eval()
    with pytest.raises(ValueError, match="the model with training=True"):
        modes.require()
