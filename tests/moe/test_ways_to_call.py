"""Experts of other libraries that compute something else in another kind of call are left out."""

import minifloat as mf
import pytest
import torch
from minifloat.moe.convert.projections import ProjectionExperts
from torch import nn

from tests.moe.test_same_experts import Foreign, report_of


class OfAnyShape(Foreign):
    """Experts that take tokens and routing of any shape, in any dtype, under autocast too."""

    def factor(self, x, index, weights):
        return 1.0

    def forward(self, x, index=None, weights=None):
        rows = x.reshape(-1, self.dim)
        shape = rows.shape if index is None else x.shape  # as Llama 4's
        if index is None:
            index = torch.arange(len(rows))[:, None] // (len(rows) // self.experts)
            weights = torch.ones_like(index, dtype=x.dtype)
        slots = index.shape[-1]
        index, scores = index.reshape(-1, slots), weights.reshape(-1, slots)
        y = torch.zeros(rows.shape)
        for e in range(self.experts):
            hidden = self.hidden(rows @ self.gate_up_proj[e].T)
            share = (scores * (index == e)).sum(-1, keepdim=True)
            y = y + (hidden @ self.down_proj[e].T) * share
        return y.view(shape).to(x.dtype) * self.factor(x, index, weights)


class OfFloat32(OfAnyShape):
    def factor(self, x, index, weights):
        return 2 - (x.dtype == torch.float32)


class OfSizeOfElements(OfAnyShape):
    """Tells dtypes without naming one."""

    def factor(self, x, index, weights):
        return 1 if x.element_size() == 4 else 0.5


class OfWeightsInFloat32(OfAnyShape):
    def factor(self, x, index, weights):
        return 1 if weights is None or weights.element_size() == x.element_size() else 0.5


class DetachedInBfloat16(OfAnyShape):
    def hidden(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate.detach() if gate.element_size() == 2 else gate) * up


class UnderAutocast(OfAnyShape):
    def factor(self, x, index, weights):
        return 1 + torch.is_autocast_enabled("cpu")


class ByDtypeUnderAutocast(OfAnyShape):
    def factor(self, x, index, weights):
        return (x[..., :1] @ x.new_ones(1, 1)).element_size() / x.element_size()


class OfOneSlot(OfAnyShape):
    def factor(self, x, index, weights):
        return 1 + (index.shape[1] == 1)


class OfThreeSlots(OfAnyShape):
    def factor(self, x, index, weights):
        return 1 + (index.shape[1] == 3)


class OfAllExperts(OfAnyShape):
    def factor(self, x, index, weights):
        return 1 + (index.shape[1] == self.experts)


class OfSequences(OfAnyShape):
    def factor(self, x, index, weights):
        return 1 + (x.dim() == 3)


class OfTwoSequences(OfAnyShape):
    def factor(self, x, index, weights):
        return 1 + (x.shape[0] == 2)


class OfRoutingOfSequences(OfAnyShape):
    def forward(self, x, index=None, weights=None):
        y = super().forward(x, index, weights)
        return 2 * y if index is not None and index.dim() == 3 else y


class OfTokensAlone(OfAnyShape):
    def forward(self, x, index=None, weights=None):
        y = super().forward(x, index, weights)
        return 2 * y if index is None else y


KINDS = {
    OfFloat32: "compares dtypes or devices, by x.dtype == torch.float32",
    OfSizeOfElements: "(in bfloat16)",
    OfWeightsInFloat32: "(in bfloat16, routed in float32)",
    DetachedInBfloat16: "differs from minifloat's by",
    UnderAutocast: "reads by is_autocast_enabled",
    ByDtypeUnderAutocast: "(under autocast)",
    OfOneSlot: "(of 1 slots)",
    OfThreeSlots: "(of 3 slots)",
    OfAllExperts: "(of 4 slots)",
    OfSequences: "(of tokens (B, S, D))",
    OfTwoSequences: "(of tokens (B, S, D))",
    OfRoutingOfSequences: "(of tokens (B, S, D) and routing (B, S, k))",
    OfTokensAlone: "(of tokens alone)",
}


@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_differ_in_another_kind_of_call_are_left_out(kind):
    assert KINDS[kind] in dict(report_of(kind()).skipped)["experts.down_proj"]


def test_experts_that_are_equal_in_every_kind_of_call_are_converted():
    assert len(report_of(OfAnyShape()).converted) == 3


class AllWeights(Foreign):
    """Takes a weight for each expert of all, which the conversion does not."""

    def forward(self, x, index, weights):
        return super().forward(x, index, weights.gather(1, index))


def test_weights_of_all_experts_are_refused():
    """With k = E nothing tells them from those of the slots."""
    assert ProjectionExperts.reason_against(AllWeights()) is not None
    experts = Foreign()
    mf.quantize_(nn.ModuleList([experts]), "mxfp8")
    x, index = torch.randn(6, 32), torch.arange(12).view(6, 2) % 4
    expected = (
        r"the experts of each of 6 tokens, .* got experts of shape \({}\) and weights of \({}\)"
    )
    with pytest.raises(ValueError, match=expected.format("6, 2", "6, 4")):
        experts(x, index, torch.ones(6, 4))
    for shape in ((12, 1), (3, 4), (4, 2)):  # of other tokens
        text = f"{shape[0]}, {shape[1]}"
        routing = index.flatten()[: shape[0] * shape[1]].view(shape), torch.ones(shape)
        with pytest.raises(ValueError, match=expected.format(text, text)):
            experts(x, *routing)


def test_arguments_that_are_no_tensors_are_refused():
    experts = Foreign()
    mf.quantize_(nn.ModuleList([experts]), "mxfp8")
    x, index = torch.randn(6, 32), torch.arange(12).view(6, 2) % 4
    with pytest.raises(TypeError, match=r"their weights as tensors, got 0.5"):
        experts(x, index, torch.ones(6, 2), scale=0.5)
