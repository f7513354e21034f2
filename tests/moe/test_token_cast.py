"""Tokens are quantized once for routed and shared experts, with the bytes of casts of their own."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat._native import ops
from minifloat.moe import layer as moe_layer
from minifloat.moe.feed_forward import order_rows
from minifloat.nn.cache.operand_cache import SharedInput
from minifloat.spec import Spec
from minifloat.tensor.quantized import Operand, Operands
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.reuse_counts import casts, without_reuse
from tests.support.same_bits import require_same_results
from tests.support.saved_bytes import saved_bytes
from tests.support.worlds import run_world

T, D = 20, 64
# A scale a row or a block of x in fprop.
ONCE = ["fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_blockwise", "mxfp8", "mxfp4", "mxfp8_nvfp4"]


def layer(recipe: str | None, dtype: torch.dtype = torch.float32, **changes: object) -> mf.MoE:
    torch.manual_seed(0)
    arguments = {"dim": D, "hidden": 48, "experts": 6, "top_k": 2, "shared_experts": 1} | changes
    return mf.MoE(**arguments, recipe=recipe, dtype=dtype)


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    return x.to(dtype).requires_grad_()


def results(moe: mf.MoE, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Returns the output and all gradients of two micro-batches."""
    moe.zero_grad()
    x.grad = None
    found = []
    for _ in range(2):
        y = (run or moe)(x)
        y.float().square().sum().backward()
        found.append(y.detach())
    return [*found, x.grad, *(p.grad for p in moe.parameters())]


@pytest.mark.parametrize("fused_w13", [False, True])
@pytest.mark.parametrize("recipe", ONCE)
def test_tokens_are_cast_once(recipe, fused_w13):
    moe = layer(recipe, fused_w13=fused_w13)
    twin = without_reuse(moe)
    x = tokens()
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            assert casts(lambda: moe(x), (T, D)) == 1
            assert casts(lambda: twin(x), (T, D)) == 3  # routed, w1 and w3
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert casts(lambda: moe(x), (T, D)) == 1
    assert casts(lambda: checkpoint(moe, x, use_reentrant=False), (T, D)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", mf.presets())
def test_results_are_those_of_casts_of_their_own(recipe, dtype):
    moe = layer(recipe, dtype)
    twin, x = without_reuse(moe), tokens(dtype)
    require_same_results(results(moe, x), results(twin, x))
    moe, twin = (layer(recipe, dtype, fused_w13=True) for _ in range(2))
    twin = without_reuse(twin)
    with torch.autocast("cpu", torch.bfloat16):
        require_same_results(results(moe, x), results(twin, x))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_rowwise", "mxfp4"])
def test_recomputation(recipe, use_reentrant):
    def run(moe: mf.MoE) -> list[Tensor]:
        return results(moe, tokens(), lambda x: checkpoint(moe, x, use_reentrant=use_reentrant))

    require_same_results(run(layer(recipe)), run(without_reuse(layer(recipe))))


@pytest.mark.parametrize("recipe", ONCE)
def test_no_codes_are_kept(recipe, monkeypatch):
    moe, x, seen = layer(recipe), tokens(), []

    def seen_cast(*arguments: Any) -> Operand | None:
        found = cast_tokens(*arguments)
        seen.append(weakref.ref(found.codes))
        return found

    cast_tokens = moe_layer.cast_tokens
    monkeypatch.setattr(moe_layer, "cast_tokens", seen_cast)
    y = moe(x)
    gc.collect()
    assert [ref() for ref in seen] == [None]
    assert moe.shared_experts.w1.shared_input.cached is None
    y.sum().backward()
    monkeypatch.undo()
    twin = without_reuse(moe)
    # The twin saves the columnwise codes of w1 and of w3.
    assert saved_bytes(lambda: moe(x)) <= saved_bytes(lambda: twin(x))


def converted(recipes: str) -> mf.MoE:
    moe = layer(None)
    mf.quantize_(moe, recipes)
    return moe


@pytest.mark.parametrize(
    ("moe", "count"),
    [
        (lambda: layer("fp8_tensorwise"), 2),  # w1 and w3 share theirs
        (lambda: layer("fprop=mxfp8+sr*mxfp8 dgrad=mxfp8*mxfp8 wgrad=mxfp8*mxfp8"), 2),
        (lambda: layer(None), 0),
        (lambda: converted("*: mxfp8; experts: fp8_rowwise"), 2),
        (lambda: converted("*: mxfp8; shared_experts.*: bf16"), 1),
        (lambda: converted("*: mxfp8; experts: bf16"), 1),
        (lambda: converted("*: mxfp8; shared_experts.w3: nvfp4"), 3),
        (lambda: converted("mxfp8"), 1),
    ],
)
def test_each_casts_its_own_where_operands_differ(moe, count):
    moe, x = moe(), tokens()
    with torch.no_grad():
        assert casts(lambda: moe(x), (T, D)) == count


def test_hooks_may_change_the_input_of_either():
    moe, x = converted("mxfp8"), tokens()
    twin = without_reuse(moe)
    for m in (moe, twin):
        m.experts.register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:]))
        m.shared_experts.register_forward_pre_hook(lambda m, args: (args[0] * 3,))
    require_same_results(results(moe, x), results(twin, x))


@pytest.mark.parametrize("part", ["experts", "shared_experts"])
def test_restored_layers(part):
    moe, x = converted("mxfp8"), tokens()
    mf.restore_(getattr(moe, part))
    with torch.no_grad():
        assert casts(lambda: moe(x), (T, D)) == 1  # of the others
    require_same_results(results(moe, x), results(without_reuse(moe), x))
    mf.restore_(moe)
    require_same_results(results(moe, x), results(layer(None), x))


def test_a_write_between_the_readers_is_seen():
    moe = converted("mxfp8")
    twin, x = without_reuse(moe), tokens().detach()
    for m in (moe, twin):
        m.experts.register_forward_hook(lambda m, args, y: (args[0].mul_(2), y)[1])
    for m in (moe, twin):
        m.eval()
    with torch.no_grad():
        require_same_results([moe(x.clone())], [twin(x.clone())])


def test_copies_share_among_themselves():
    moe = converted("mxfp8")
    twin, x = copy.deepcopy(moe), tokens()
    with torch.no_grad():
        assert casts(lambda: twin(x), (T, D)) == 1
    assert twin.shared_experts.w1.shared_input is not moe.shared_experts.w1.shared_input


@pytest.mark.parametrize("recipe", ONCE)
def test_operands_of_a_linear_layer_in_every_form(recipe):
    """The engine of a linear layer may read codes where that of experts reads values."""
    x, spec = tokens(torch.bfloat16).detach(), Spec.parse(mf.Recipe(recipe).fprop.a)
    values = Operands.of(ops.layer_operands(x, recipe, "x")).rowwise
    assert values.decoded.dim() > 1
    codes = codes_of(x, spec)
    assert codes.has_codes
    assert codes.decoded.dim() == 1
    as_fp8 = codes._replace(codes=x.to(torch.float8_e4m3fn))  # which experts do not read
    matrices = [torch.randn(2, D, 2 * D), torch.randn(2, D, D)]
    indices = torch.arange(T)[:, None] % 2
    order = list(order_rows(indices, 2))
    rng = [torch.tensor([1, 2])] * 2  # of h
    options = {"streams": [0, 0], "recompute": ["", ""], "rng": rng}
    expected, *found = (
        ops.grouped_mlp(
            x,
            torch.ones(T, 1),
            order,
            matrices,
            [None],
            [recipe] * 2,
            x_operands=None if given is None else [*given, *Operand.none(x.device)],
            **options,
        )
        for given in (None, values, codes, as_fp8)
    )
    for y in found:
        require_same_results([y], [expected])


def codes_of(x: Tensor, spec: Spec) -> Operand:
    """Returns the tokens' codes without values."""
    return Operands.of(ops.quantize(x, spec.text, "")).rowwise


# ---- experts of several ranks --------------------------------------------------------------------


def check_ranks(rank: int) -> None:
    """Codes that the shared experts read are sent; where they read values, the sender casts."""
    cast_tokens, reads_codes = moe_layer.cast_tokens, False

    def read(shared: SharedInput, recipe: str, columnwise: bool, x: Tensor) -> Operand | None:
        found = cast_tokens(shared, recipe, columnwise, x)
        if not reads_codes:
            return found
        copied.append(1)
        with torch.no_grad():
            return codes_of(x, Spec.parse(mf.Recipe(recipe).fprop.a))

    moe_layer.cast_tokens = read
    for recipe in ("fp8_rowwise", "fp8_blockwise", "mxfp4", "nvfp4"):
        for dispatch in ("codes", "compute_dtype"):
            for reads_codes in (False, True):
                moe = mf.expert_parallel(layer(recipe), dist.group.WORLD, dispatch=dispatch)
                twin, x, copied = without_reuse(moe), tokens(), []
                require_same_results(results(moe, x), results(twin, x))
                is_copied = reads_codes and dispatch == "codes" and recipe in ONCE
                assert len(copied) == (2 if is_copied else 0)
                with torch.no_grad():
                    count = casts(lambda m=moe, x=x: m(x), (T, D))
                if is_copied or dispatch == "compute_dtype":  # values are sent as they are
                    assert count == 1 + is_copied, (recipe, dispatch)  # and one by `read`
                assert moe.shared_experts.w1.shared_input.cached is None


def test_codes_that_are_sent_may_be_those_of_the_shared_experts():
    run_world(2, check_ranks)
