"""mf.quantize_(…, recompute="weight") of experts: the bits without it, and no codes of weights."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from minifloat.moe.convert.experts import require_recipe
from minifloat.nn.grouped_product import GroupedProduct
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.moe.test_convert import BLOCKS, run, tokens
from tests.support.compiled import compiled
from tests.support.foreign_experts import Batched, D, E
from tests.support.same_bits import require_same_results
from tests.support.saved_bytes import peak_bytes, saved_bytes

M, K, N, EXPERTS = 40, 64, 32, 3
# Blocks whose products are differentiable ops of their own in eager mode. The others compute all
# products in one function, which saves parameters.
OWN_PRODUCTS = ("grouped_mm method", "another activation")


def is_of_experts(recipe: str) -> bool:
    try:
        require_recipe("experts", mf.Recipe(recipe))
    except ValueError:
        return False
    return recipe != "bf16"


PRESETS = [recipe for recipe in mf.presets() if is_of_experts(recipe)]


class Product:
    """One product of experts, with a weight in either layout."""

    def __init__(self, recipe: str, dtype: torch.dtype, is_row_major: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (EXPERTS, K, N) if is_row_major else (EXPERTS, N, K)
        self.recipe, self.is_row_major = recipe, is_row_major
        self.a = torch.randn(M, K, generator=generator).to(dtype).requires_grad_()
        self.w = torch.randn(shape, generator=generator).requires_grad_()
        self.offs = torch.tensor([11, 11, 38], dtype=torch.int32)

    def state(self) -> dict[str, Any]:
        history = None
        if mf.Recipe(self.recipe).is_delayed:
            history = torch.full((6, EXPERTS, 4), 2.5)
        return {"rng": torch.tensor([3, 1, 4]), "amax_history": history}

    def y(self, recompute: str, **changes: Any) -> Tensor:
        b = self.w if self.is_row_major else self.w.transpose(-2, -1)
        options = self.state() | {"out_dtype": torch.float32, "recompute": recompute} | changes
        return ops.scaled_grouped_mm(self.a, b, self.offs, self.recipe, **options)

    def results(self, recompute: str) -> list[Tensor | None]:
        state = self.state()
        y = self.y(recompute, **state)
        return [y, *torch.autograd.grad(y.square().sum(), (self.a, self.w)), state["amax_history"]]


@pytest.mark.parametrize("is_row_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", [*PRESETS, "bf16"])
def test_bits_of_a_product(recipe, dtype, is_row_major):
    product = Product(recipe, dtype, is_row_major)
    require_same_results(product.results("weight"), product.results(""))


@pytest.mark.parametrize("is_row_major", [False, True])
@pytest.mark.parametrize(("recipe", "bits"), [("fp8_rowwise", 8), ("mxfp8", 8), ("nvfp4", 4)])
def test_saved_bytes_of_a_product(recipe, bits, is_row_major):
    product = Product(recipe, torch.bfloat16, is_row_major)
    speed, weights = (
        saved_bytes(lambda r=r: product.y(r), (product.a, product.w)) for r in ("", "weight")
    )
    codes = EXPERTS * K * N * bits // 8
    assert codes <= speed - weights <= 2 * codes  # with scales


def test_a_weight_that_changed_before_backward_raises():
    product = Product("mxfp8", torch.float32, False)
    y = product.y("weight")
    with torch.no_grad():
        product.w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_codes_of_the_caller_are_saved():
    product = Product("fp8_rowwise", torch.float32, False)
    codes = ops.layer_operands(product.w.detach(), "fp8_rowwise", "w")
    y = product.y("weight", weight_operands=codes)
    with torch.no_grad():
        product.w.add_(1)  # not read again
    y.sum().backward()


def test_bad_recompute():
    with pytest.raises(ValueError, match="expected recompute as '' or 'weight', got 'x'"):
        Product("mxfp8", torch.float32, False).y("x")


# ---- modules -------------------------------------------------------------------------------------


def pair(name: str, recipe: str) -> tuple[nn.Module, nn.Module]:
    """Returns one model that saves codes of weights, and one that recomputes them."""
    torch.manual_seed(0)
    model = nn.Sequential(BLOCKS[name]())
    twin = copy.deepcopy(model)
    mf.quantize_(model, recipe)
    mf.quantize_(twin, recipe, recompute="weight")
    return model, twin


def is_traceable(name: str) -> bool:
    return name != "grouped_mm method"  # its routing counts on the CPU


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "mxfp8", "nvfp4", "fp8_delayed"])
@pytest.mark.parametrize("name", BLOCKS)
def test_bits_of_modules(name, recipe):
    models = pair(name, recipe)
    for _ in range(2):
        for _ in range(2):  # micro-batches, which read cached codes in the second step
            want, got = (run(model, tokens()) for model in models)
            require_same_results(got, want)
        for model in models:
            mf.step(model)


@pytest.mark.parametrize(
    "recipe", ["fp8_delayed", pytest.param("fp8_tensorwise", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", [name for name in BLOCKS if is_traceable(name)])
def test_bits_of_compiled_modules(name, recipe):
    want, got = (run(compiled(model), tokens()) for model in pair(name, recipe))
    require_same_results(got, want)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_rowwise", "nvfp4"])
@pytest.mark.parametrize("name", BLOCKS)
def test_bits_under_checkpoints(name, recipe, is_reentrant):
    models = pair(name, recipe)
    results = []
    for model in models:
        x, found = tokens().requires_grad_(), []
        for _ in range(3):
            y = checkpoint(model, x, use_reentrant=is_reentrant)
            y.square().sum().backward()
            found += [y.detach(), x.grad.clone()]
        found += [p.grad.clone() for p in model.parameters()]
        results.append(found)
    require_same_results(results[1], results[0])


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_saved_bytes_of_modules(name, is_compiled):
    if is_compiled and not is_traceable(name):
        pytest.skip("its forward waits for the device")
    found = []
    for model in pair(name, "fp8_rowwise"):
        call = compiled(model) if is_compiled else model
        x = tokens().requires_grad_()
        found.append(saved_bytes(lambda call=call, x=x: call(x), [x, *model.parameters()]))
    of_experts = [p for p in model.parameters() if p.dim() == 3]
    linears = [m.weight for m in model.modules() if isinstance(m, mf.Linear)]
    fewer = sum(w.numel() for w in linears)
    if is_compiled or name in OWN_PRODUCTS:
        fewer += sum(w.numel() for w in of_experts)
    rows = sum(max(w.shape[-2:]) * (w.numel() // w[..., 0, 0].numel()) for w in of_experts)
    assert fewer <= found[0] - found[1] <= fewer + 64 * (rows + 64)


def test_copies_and_reports():
    _, small = pair("moe", "fp8_rowwise")
    copies = (small, copy.deepcopy(small), pickle.loads(pickle.dumps(small)))
    for model in copies:
        products = [m for m in model.modules() if isinstance(m, GroupedProduct)]
        assert [p.recompute for p in products] == ["weight"] * 3
        assert "recompute='weight'" in repr(products[0])
    mf.restore_(small)
    mf.quantize_(small, "fp8_rowwise")
    assert all(not m.recompute for m in small.modules() if isinstance(m, GroupedProduct))


def test_weight_that_changed_before_backward_raises_in_modules():
    for name in BLOCKS:
        _, model = pair(name, "mxfp8")
        y = model(tokens().requires_grad_())
        with torch.no_grad():
            next(p for p in model.parameters() if p.dim() == 3).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("is_cast", [False, True])
def test_a_copy_of_the_parameter_is_not_saved(is_cast):
    """A module that rounds its parameters itself: codes have fewer bytes than the copies."""
    dtype = torch.bfloat16 if is_cast else torch.float32
    x = torch.randn(E, 8, D).to(dtype).requires_grad_()
    found = []
    for recompute in (None, "weight"):
        torch.manual_seed(0)
        model = nn.ModuleDict({"experts": Batched()})
        mf.quantize_(
            model,
            "fp8_rowwise",
            experts={"experts": ["inputs", "outputs"]},
            recompute=recompute,
        )
        experts = model["experts"]
        found.append(saved_bytes(lambda e=experts: e(x), [x, *model.parameters()]))
    weights = sum(w.numel() for w in (experts.inputs, experts.outputs))
    # With x in bf16 `inputs` alone is rounded, and its codes saved: `outputs` multiplies h in fp32.
    if is_cast:
        assert found[0] - weights <= found[1] <= found[0]
    else:
        assert found[1] <= found[0] - weights


# Of few tokens, g's operand is smaller than the gradient of w2, and is what backward keeps.
# unit: of the columns' padding.
@pytest.mark.parametrize(
    ("recipe", "tokens", "experts", "i", "unit"),
    [
        ("fp8_rowwise", 512, 32, 96, 16),
        ("fp8_tensorwise", 512, 32, 96, 16),
        ("mxfp8", 512, 32, 96, 16),
        ("fp8_rowwise", 128, 128, 192, 16),
        ("fp8_tensorwise", 128, 128, 192, 16),
        ("mxfp8", 128, 128, 192, 32),
    ],
)
def test_peak_of_a_step_is_that_of_its_largest_product(recipe, tokens, experts, i, unit):
    """Backward frees an operand with the product that reads it."""
    torch.manual_seed(0)
    d, slots = 256, 8
    layer = mf.MoE(
        d, i, experts, slots, fused_w13=True, dtype=torch.bfloat16, recipe=recipe, balance=None
    )
    x = torch.randn(tokens, d, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0)  # no codes of an earlier step
        layer(x).backward(torch.ones(tokens, d, dtype=torch.bfloat16))
        layer.zero_grad()
        x.grad = None

    step()
    # dgrad of w13. Beside codes, of a byte, the CPU has their values in bf16.
    rows, with_padding = tokens * slots, tokens * slots + unit * experts
    saved = 2 * tokens * d + 2 * rows * 2 * i  # x, gate and up
    of_w2 = min(2 * experts * i * d, 3 * with_padding * d)  # its gradient, or g's operand
    gradient = 3 * (rows + with_padding) * 2 * i  # of gate and up, in both directions
    product = 3 * experts * 2 * i * d + 2 * rows * d  # w13, and the rows' gradients
    assert peak_bytes(step) < 1.1 * (saved + of_w2 + gradient + product)
