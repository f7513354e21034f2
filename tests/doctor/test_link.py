"""`minifloat doctor --model`: the bytes that it counts on the link are those that FSDP2 gathers."""

from __future__ import annotations

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.doctor.predict import gathered_bytes
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.worlds import run_world

N, K, EXPERTS = 256, 128, 4  # whole blocks in every format, on each of two ranks


class Dense(nn.Module):
    """A layer alone, so that FSDP2 reshards it after forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(K, N, bias=False)

    def forward(self, x):
        return self.layer(x)


def sent_in_a_step(recipe, part, rest):
    """Returns the bytes of all ranks' inputs of all-gathers in a forward and backward.

    `part`, within `rest`, is resharded after forward.
    """
    if recipe != "bf16":
        mf.quantize_(rest, recipe, keep="nothing", data_parallel_rank=0)
    for module in (part, rest):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    sent, gather = [], dist.all_gather_into_tensor

    def count(output, *args, **options):
        sent.append(output.nbytes)
        return gather(output, *args, **options)

    x = torch.randn(2, 8, K, dtype=torch.bfloat16, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_into_tensor", count)
        for _ in range(2):  # the first gathers decide on the plan
            sent.clear()
            rest(x).float().sum().backward()
            mf.step(rest)
    return sum(sent)


def check_dense(rank):
    for recipe in mf.presets():
        net = nn.Sequential(Dense(), nn.Identity())
        sent = sent_in_a_step(recipe, net[0], net)
        assert sent == gathered_bytes(recipe, experts=False) * N * K, recipe


def check_experts(rank):
    """Compares all but scales and amaxes of rows: up to 16 bytes a row that either side reads."""
    for recipe in mf.presets():
        net = nn.Sequential(mf.MoE(K, N, EXPERTS, 2), nn.Identity())
        router, rows = 2 * EXPERTS * K, 3 * EXPERTS * (N + K)
        sent = sent_in_a_step(recipe, net[0].experts, net) - router
        counted = gathered_bytes(recipe, experts=True) * 3 * EXPERTS * N * K
        assert counted <= sent <= counted + 16 * rows, (recipe, sent, counted)


@pytest.mark.parametrize("check", [check_dense, check_experts])
def test_each_preset_gathers_what_is_counted(check):
    run_world(2, check)
