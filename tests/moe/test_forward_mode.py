"""Forward-mode differentiation at experts: refused, with what helps."""

import minifloat as mf
import pytest
import torch
from torch.autograd import forward_ad

T, D, E = 5, 32, 2
MESSAGE = "expected tensors without a tangent, got one .* use reverse mode, or leave the experts"


def arguments():
    return {
        "x": torch.randn(T, D),
        "w13": torch.randn(E, 2 * D, D),
        "w2": torch.randn(E, D, D),
        "weights": torch.ones(T, 1),
    }


def run(x, w13, w2, weights):
    return mf.grouped_mlp(x, w13, w2, torch.zeros(T, 1, dtype=torch.long), weights, "mxfp8")


@pytest.mark.parametrize("of", list(arguments()))
def test_grouped_mlp(of):
    values = arguments()
    with forward_ad.dual_level():
        run(**values)
        values[of] = forward_ad.make_dual(values[of], torch.ones_like(values[of]))
        with pytest.raises(NotImplementedError, match="^grouped_mlp: " + MESSAGE):
            run(**values)


def test_jvp():
    values = arguments()
    x = values.pop("x")
    with pytest.raises(NotImplementedError, match="^grouped_mlp: " + MESSAGE):
        torch.func.jvp(lambda x: run(x, **values), (x,), (torch.ones_like(x),))


def test_a_mixture():
    model, x = mf.MoE(dim=D, hidden=D, experts=E, top_k=1, recipe="mxfp8"), torch.randn(T, D)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="^mf.MoE: " + MESSAGE):
        model(forward_ad.make_dual(x, torch.ones_like(x)))
    assert model(x).shape == x.shape
