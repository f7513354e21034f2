"""mf.MoE on several ranks: the balance of experts, and FSDP2."""

import copy

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.support.worlds import run_world

D, E, K = 32, 6, 2


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    options = {"top_k": K, "shared_experts": 1, "balance_speed": 0.25}
    blocks = [mf.MoE(D, 48, E, fused_w13=fused, **options) for fused in (False, True)]
    return torch.nn.Sequential(*blocks)


def tokens(seed: int, count: int = 16) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed))


def check_balance(rank: int) -> None:
    """Ranks with different tokens move their biases by the sum of counts, in one all-reduce."""
    layers = model()
    counts = [torch.zeros(E, dtype=torch.int64) for _ in layers]
    for other in range(dist.get_world_size()):
        alone = copy.deepcopy(layers)
        alone(tokens(other, 10 + other))
        for count, layer in zip(counts, alone):
            count += layer.router.counts
    layers(tokens(rank, 10 + rank))
    reduced = []
    real = dist.all_reduce
    dist.all_reduce = lambda t, *args, **kwargs: (reduced.append(t), real(t, *args, **kwargs))
    mf.step(layers)
    dist.all_reduce = real
    assert [t.shape for t in reduced] == [(2 * E,)]
    for count, layer in zip(counts, layers):
        assert torch.equal(layer.router.step_counts, count)
        expected = (count.sum() - count * E).sign() * 0.25
        assert torch.equal(layer.router.expert_bias, expected)
        assert not layer.router.counts.any()


def train(layers: torch.nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    losses = []
    for i in range(steps):
        for micro_batch in range(2):
            loss = layers(tokens(10 * i + micro_batch)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        mf.step(layers)
    return losses


def check_fsdp(rank: int, recipe: str) -> None:
    """Ranks with equal tokens train as one process does, whose weights they gather as codes."""
    alone, sharded = model(), model()
    for layers in (alone, sharded):
        mf.quantize_(layers, recipe, data_parallel_rank=0)
    for block in sharded:
        fully_shard(block)
    fully_shard(sharded)
    assert train(sharded) == train(alone)
    for found, expected in zip(sharded.parameters(), alone.parameters()):
        assert torch.equal(found.full_tensor(), expected)


@pytest.mark.parametrize("ranks", [2, 3])
def test_balance_counts_the_tokens_of_all_ranks(ranks):
    run_world(ranks, check_balance)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayed"])
def test_fsdp2_shards_experts(recipe):
    run_world(2, check_fsdp, recipe)
