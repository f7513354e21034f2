"""mf.grouped_mlp of ranks: the bytes and gradients of mf.MoE under mf.expert_parallel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.nn.grouped_product import product_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.support.expert_world import built, device_here, draw
from tests.support.worlds import run_world

grouped_mlp = sys.modules["minifloat.moe.grouped_mlp"]  # mf.grouped_mlp is the function

RECIPES = ["bf16", "fp8_rowwise", "fp8_delayed", "mxfp8", "nvfp4", "mxfp8_nvfp4"]
FORMS: list[dict[str, Any]] = [
    {"fused_w13": True, "bias": True, "limit": 7.0},
    {"fused_w13": False},
]
TOKENS = [20, 13, 0, 7]
WAYS: list[dict[str, Any]] = [
    {"dispatch": "compute_dtype"},
    {"dispatch": "codes"},
    {"dispatch": "codes", "capacity": 30},
]


def divided(recipe: str, form: dict[str, Any], way: dict[str, Any]) -> mf.MoE:
    """Returns a divided layer whose products draw random bits by the names of parameters."""
    moe = mf.expert_parallel(built(recipe, **form), dist.group.WORLD, **way)
    for name in moe.experts.weight_names:
        product = product_of(moe.experts, name)
        if product is not None:
            product.rename(name)
    return moe


def state_of(moe: mf.MoE, recipe: str, before: list[Tensor | None]) -> dict[str, Any]:
    """Returns the random state that the layer's last forward drew, and its histories before."""
    if recipe == "bf16":
        return {}
    product = product_of(moe.experts, "w2")
    assert product is not None
    rng = product.draws.past[-1].rng.clone() if product.rng_state is not None else None
    histories = None if before[0] is None else before
    return {"rng": rng, "amax_history": histories}


def histories_of(moe: mf.MoE) -> list[Tensor | None]:
    found = []
    for name in moe.experts.weight_names:
        product = product_of(moe.experts, name)
        has_one = product is not None and product.amax_history is not None
        found.append(product.amax_history.clone() if has_one else None)
    return found


def run(call: Callable[..., Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns y and the gradients of copies of the leaves, which `call` takes."""
    own = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    y = call(**own)
    y.backward(draw(9, y.shape[0]))
    return {"y": y.detach()} | {name: t.grad for name, t in own.items()}


def check_equal(rank: int, recipes: list[str]) -> None:
    for recipe in recipes:
        for form in FORMS:
            for way in WAYS:
                check_equal_of(rank, recipe, form, way)


def check_equal_of(rank: int, recipe: str, form: dict[str, Any], way: dict[str, Any]) -> None:
    moe = divided(recipe, form, way)
    experts, before = moe.experts, histories_of(moe)
    x = draw(rank, TOKENS[rank])
    with torch.no_grad():
        indices, weights = moe.router(x)
    found = run(lambda x, weights: experts(x, indices, weights), {"x": x, "weights": weights})
    found |= {name: p.grad for name, p in experts.named_parameters()}
    names = experts.input_names
    options = {"limit": form.get("limit"), **way, **state_of(moe, recipe, before)}

    def call(x: Tensor, weights: Tensor, w2: Tensor, **given: Tensor) -> Tensor:
        w13 = [given[name] for name in names]
        b13 = [given.get(name.replace("w", "b")) for name in names]
        return mf.grouped_mlp(
            x, w13, w2, indices, weights, recipe, b13=b13, b2=given.get("b2"),
            group=dist.group.WORLD, **options,
        )  # fmt: skip

    got = run(call, {"x": x, "weights": weights, **dict(experts.named_parameters())})
    assert got.keys() == found.keys()
    for name, value in found.items():
        assert torch.equal(got[name], value), (recipe, form, way, name)
    for a, b in zip(options.get("amax_history") or [], histories_of(moe)):
        assert torch.equal(a, b), (recipe, form, way)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_and_gradients_are_those_of_the_layer(ranks):
    run_world(ranks, check_equal, RECIPES if ranks == 2 else ["fp8_delayed", "nvfp4"])


# ---- ranks, dropped rows, bad input --------------------------------------------------------------


def arguments(tokens: int, experts: int = 2, seed: int = 0) -> tuple[Tensor, ...]:
    """Returns x, w13, w2, indices and weights, of `experts` experts on this rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, 32), (experts, 64, 32), (experts, 32, 32)
    x, w13, w2 = (torch.randn(s, generator=generator).bfloat16() for s in shapes)
    indices = torch.rand(tokens, 2 * experts, generator=generator).topk(2, dim=1)[1]
    weights = torch.rand(tokens, 2, generator=generator)
    return tuple(t.to(device_here()) for t in (x, w13, w2, indices, weights))


def check_ranks(rank: int) -> None:
    """Checks mesh dimensions, dropped rows, what is compared, and that calls may alternate."""
    mesh = init_device_mesh("cpu", (2,))
    given = arguments(8)
    want = mf.grouped_mlp(*given, "mxfp8", group=dist.group.WORLD)
    assert torch.equal(mf.grouped_mlp(*given, "mxfp8", group=mesh), want)
    assert torch.equal(mf.grouped_mlp(*given, "mxfp8", group=mesh, capacity="all"), want)
    dropped = torch.tensor([5])
    for _ in range(2):
        mf.grouped_mlp(*given, "mxfp8", group=mesh, capacity=1, dropped=dropped)
    assert dropped.item() == 5 + 2 * (16 - 2)
    for recipe in ("bf16", "mxfp8", "fp8_rowwise", "bf16"):
        mf.grouped_mlp(*arguments(5 + rank), recipe, group=mesh)
    grouped_mlp.SEEN.clear()
    grouped_mlp.MOST_SEEN = 4
    for tokens in (*range(3, 11), 3, 10):  # what is forgotten is compared again
        mf.grouped_mlp(*arguments(tokens), "mxfp8", group=mesh, capacity="all")
        assert len(grouped_mlp.SEEN[mesh.get_group()]) <= 4
    compiled = torch.compile(mf.grouped_mlp, backend="eager")
    assert torch.equal(compiled(*given, "mxfp8", group=mesh), want)


def check_bad_input(rank: int) -> None:
    group, given = dist.group.WORLD, arguments(8)
    wrong = [given[0][:, :-1], *given[1:]]
    with pytest.raises(ValueError, match=r"grouped_mlp: expected x \(T, "):  # on both
        mf.grouped_mlp(*(given if rank else wrong), "mxfp8", group=group)

    def refused(error: type[Exception], text: str, given: Any = given, **options: Any) -> None:
        with pytest.raises(error, match=text):
            mf.grouped_mlp(*given, options.pop("recipe", "mxfp8"), **options)

    refused(TypeError, "group: expected a DeviceMesh .*, got 'ep'", group="ep")
    mesh = init_device_mesh("cpu", (1, 2))
    refused(ValueError, "group: expected one dimension, got 2", group=mesh)
    refused(ValueError, r"dispatch: expected one of .*, got 'fp8'", group=group, dispatch="fp8")
    for capacity in (0, -3):
        text = f"capacity: expected at least 1 row, got {capacity}"
        refused(ValueError, text, group=group, capacity=capacity)
    refused(ValueError, "capacity: expected an int, got 1.5", group=group, capacity=1.5)
    refused(ValueError, "capacity: expected a number of rows, 'all'", group=group, capacity="x")
    refused(ValueError, r"beside a group, got \('codes', None, None\)", dispatch="codes")
    refused(ValueError, "got first_expert=3 and", group=group, first_expert=3)
    ids = torch.arange(8)
    refused(ValueError, r"got first_expert=0 and token_ids \(8,\)", group=group, token_ids=ids)
    for dropped in (torch.zeros(1), torch.zeros(2, dtype=torch.int64), 3):
        refused(ValueError, r"expected dropped as int64 \(1\) on cpu", group=group, dropped=dropped)
    refused(ValueError, "needs rng, got None", group=group, recipe="nvfp4")
    for rng in (torch.zeros(1, dtype=torch.int64), torch.zeros(2), [0, 0]):
        refused(ValueError, r"expected rng as int64 \(2\)", group=group, recipe="nvfp4", rng=rng)
    refused(ValueError, "token_ids as a tensor or None, got list", group=group, token_ids=[1])
    one = {"b2": "x"} if rank else {}
    refused(ValueError, "expected b2 as a tensor or None, got str", group=group, **one)
    refused(ValueError, "limit: expected a number, got 'x'", group=group, limit="x")
    needs = "needs amax_history, got None"
    refused(ValueError, needs, group=group, recipe="fp8_delayed")
    history = torch.zeros(6, given[2].shape[0], 3)
    for histories in ([history, None], [None, history]):
        refused(ValueError, needs, group=group, recipe="fp8_delayed", amax_history=histories)
    # The experts of all ranks are as many as this rank's times the ranks.
    uneven = arguments(8, experts=2 + rank)
    refused(
        ValueError,
        "same layer, but rank 0 has grouped_mlp: 4 experts .*; rank 1 has grouped_mlp: 6 experts",
        uneven,
        group=group,
    )
    refused(
        ValueError,
        "recipe mxfp8.*; rank 1 has .*recipe fp8_rowwise",
        group=group,
        recipe=("mxfp8", "fp8_rowwise")[rank],
    )
    mf.grouped_mlp(*given, "mxfp8", group=group)


@pytest.mark.parametrize("check", [check_ranks, check_bad_input])
def test_two_ranks(check):
    run_world(2, check)
