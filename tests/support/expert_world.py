"""An mf.MoE on several ranks beside one process with all ranks' tokens."""

from __future__ import annotations

import copy
from typing import Any

import minifloat as mf
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.expert_ranks import Product, Products, in_one_order

D, H, E, K = 64, 64, 8, 3
SCALE = 2.0**-6  # of weights
LARGEST = 7  # of the integers that values are drawn from
SIZES = [20, 13, 0, 7]  # tokens of each rank


def device_here() -> torch.device:
    """Returns the device of this rank's group."""
    is_cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def built(recipe: str, **changes: Any) -> mf.MoE:
    """Returns a layer with the same weights on every rank.

    The router's sums are exact, so that tokens have the same routes and weights in any batch: a
    GPU's fp32 product sums in an order that depends on the number of tokens.
    """
    torch.manual_seed(0)
    options = {"dim": D, "hidden": H, "experts": E, "top_k": K, "dtype": torch.bfloat16} | changes
    moe = mf.MoE(**options)
    with torch.no_grad():
        for i, parameter in enumerate(moe.experts.parameters()):
            parameter.copy_(integers(100 + i, *parameter.shape) * SCALE)
        moe.router.weight.copy_(integers(99, *moe.router.weight.shape) * SCALE)
        if moe.router.expert_bias is not None:
            moe.router.expert_bias.copy_(torch.arange(moe.router.experts) * SCALE)  # no ties
    if recipe != "bf16":
        # Each rank has a random state of its own; the first rank's is used.
        rank = dist.get_rank() if dist.is_initialized() else 0
        mf.quantize_(moe, recipe, data_parallel_rank=rank)
    return moe.to(device_here()) if dist.is_initialized() else moe


def integers(seed: int, *shape: int) -> Tensor:
    """Draws small integers, so that the sums which later operands depend on are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-LARGEST, LARGEST + 1, shape, generator=generator).float()


def draw(seed: int, count: int, width: int = D) -> Tensor:
    return integers(seed, count, width).bfloat16().to(device_here())


def own(whole: Tensor, sizes: list[int], rank: int) -> Tensor:
    """Returns the rows of one rank's tokens."""
    begin = sum(sizes[:rank])
    return whole[begin : begin + sizes[rank]]


class Pass:
    """A forward and a backward pass, its products, its results, and the rows that were sent."""

    def __init__(self, moe: mf.MoE, x: Tensor, g: Tensor) -> None:
        x = x.clone().requires_grad_()
        moe.zero_grad()
        with Products() as products:
            y = moe(x)
            y.backward(g)
        self.products: list[Product] = in_one_order(products.found)
        self.y, self.dx = y.detach(), x.grad
        self.dw = {name: p.grad for name, p in moe.named_parameters() if p.grad is not None}


def local_gradient(gradient: Tensor) -> Tensor:
    """Returns this rank's part of a gradient, which may be a DTensor."""
    return getattr(gradient, "_local_tensor", gradient)


def passes(whole: mf.MoE, sizes: list[int], **options: Any) -> tuple[mf.MoE, Pass, Pass]:
    """Runs `whole` on all tokens, and an equal layer cut over the ranks on this rank's.

    Args:
        whole: an mf.MoE that is not cut.
        sizes: tokens of each rank.
        options: of mf.expert_parallel, with `mesh` or the whole world.

    Returns:
        The layer that is cut, its pass, and one process's.
    """
    rank, total = dist.get_rank(), sum(sizes)
    cut = copy.deepcopy(whole)
    mf.expert_parallel(cut, options.pop("mesh", dist.group.WORLD), **options)
    for _, state in mf.nn.state.random_hooks.states_of(whole):
        state.rank = 0
        state.set(state.get())
    dtype = whole.experts.w2.dtype
    x, g = (draw(seed, total, whole.router.dim).to(dtype) for seed in (1, 2))
    alone = Pass(whole, x, g)
    return cut, Pass(cut, own(x, sizes, rank), own(g, sizes, rank)), alone


def require_same_results(
    cut: mf.MoE, found: Pass, alone: Pass, sizes: list[int], largest: float = 3e-3
) -> None:
    """Compares y, dx and dW within their rounding to bfloat16, of sums in any order."""
    rank, link = dist.get_rank(), cut.experts.parallel
    begin, end = link.first_expert, link.first_expert + link.local
    pairs = {
        "y": (found.y, own(alone.y, sizes, rank)),
        "dx": (found.dx, own(alone.dx, sizes, rank)),
    }
    for name, gradient in found.dw.items():
        if name.startswith("experts."):
            pairs[name] = local_gradient(gradient), alone.dw[name][begin:end]
    for name, (got, wanted) in pairs.items():
        assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
        error = (got.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-30)
        assert error <= largest, f"{name}: {error}"
