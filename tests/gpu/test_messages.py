"""Messages of gradients: the device's codes and sums are the CPU's."""

from __future__ import annotations

import pytest
import torch
from minifloat._native import ops

from tests.ops import test_messages as messages

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["codes", "any_bytes", "sums", "bf16", "not_finite"])
def test_messages(device, name):
    getattr(messages, f"check_{name}")(device)


def test_an_address_between_vectors(device):
    """A sum goes to any address of its dtype; codes are read from a multiple of 16 bytes alone."""
    x = messages.of_rank(0, 300, torch.float32).to(device)
    sent = ops.quantize_messages(x, "mxfp8")
    want, memory = torch.empty(300, device=device), torch.empty(301, device=device)
    ops.sum_messages(sent, "mxfp8", want)
    ops.sum_messages(sent, "mxfp8", memory[1:])
    assert torch.equal(memory[1:], want)
    values = torch.empty(3 * 2 * 300 + 2, dtype=torch.uint8, device=device)[2:].view(3, 600)
    values.copy_(x.bfloat16().view(torch.uint8))
    ops.sum_messages(values, "bf16", want)
    assert torch.equal(want, (x[0].bfloat16().float() + x[1].bfloat16()) + x[2].bfloat16())
    if device.type == "cuda":
        moved = torch.empty(sent.numel() + 1, dtype=torch.uint8, device=device)[1:].view_as(sent)
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            ops.sum_messages(moved, "mxfp8", want)
