"""Weight gradients that the product's kernel adds to float32 sums.

A fused addition rounds once what product and addition round twice, so the sums differ by the order
of sums within the product (test_layers.py derives its tolerance) and two roundings of the result.
"""

from __future__ import annotations

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import Tensor, nn

from tests.gpu.layer_cases import history
from tests.gpu.test_layers import tolerance

pytestmark = pytest.mark.gpu

# Where wgrad reads fprop's codes, layers alone know them.
PRESETS = [r for r in mf.presets() if r != "bf16" and mf.Recipe(r).wgrad.b != "fprop.x"]
SIZES = [(256, 384, 128), (45, 70, 37)]  # tokens, K, N
ROUNDINGS = 2.0**-22  # two, of float32
FUSED = [
    "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "fp8_delayed", "fp8_rowwise_gw_hp", "mxfp4",
    "nvfp4_pow2", "mxfp8", "nvfp4",
]  # fmt: skip


def operands(recipe: str, size: tuple[int, int, int], device: torch.device) -> tuple[list, str]:
    """Returns g and x as wgrad reads them, three tensors each, and the product's text."""
    tokens, k, n = size
    product, sides = mf.Recipe(recipe).wgrad, []
    gen = torch.Generator().manual_seed(1)
    rng, amax = torch.tensor([5, 6, 7], device=device), torch.tensor(3.0, device=device)
    for spec, cols in ((product.a, n), (product.b, k)):
        x = torch.randn(tokens, cols, generator=gen).to(device, torch.bfloat16)
        if spec == "bf16":
            sides += [x.t(), torch.empty(0, device=device), torch.empty(0, device=device)]
            continue
        given = amax if "delayed" in spec else None
        sides += ops.quantize(x, "", spec, rng=rng, amax_col=given)[4:7]
    return sides, str(product)


def sums(recipe: str, size: tuple[int, int, int], device: torch.device) -> tuple[Tensor, ...]:
    """Returns the old sum, the product, and the new sum."""
    sides, text = operands(recipe, size, device)
    tokens, k, n = size
    old = torch.randn(n, k, generator=torch.Generator().manual_seed(2)).to(device)
    product = ops.scaled_mm(*sides, text, k=tokens, out_dtype=torch.float32)
    new = old.clone()
    ops.add_scaled_mm(new, *sides, text, k=tokens)
    return old, product, new


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("recipe", PRESETS)
def test_sum_is_old_sum_plus_product(device, recipe, size):
    old, product, new = sums(recipe, size, device)
    error = (new.double() - (old + product).double()).norm().item()
    limit = tolerance(mf.Recipe(recipe).wgrad, torch.float32) * product.norm().item()
    assert error <= limit + ROUNDINGS * new.norm().item(), (recipe, error, limit)
    assert not torch.equal(old, new)


@pytest.mark.parametrize("recipe", PRESETS)
def test_strided_sums_take_the_same_product(device, recipe):
    sides, text = operands(recipe, SIZES[0], device)
    tokens, k, n = SIZES[0]
    product = ops.scaled_mm(*sides, text, k=tokens, out_dtype=torch.float32)
    total = torch.zeros(k, n, device=device).t()
    ops.add_scaled_mm(total, *sides, text, k=tokens)
    assert torch.equal(total, product)


@pytest.mark.parametrize("recipe", FUSED)
def test_no_product_is_written(cuda, recipe):
    """The kernel adds: nothing as large as the product is allocated. A workspace is 32 MiB."""
    size = (512, 4096, 4096)
    sides, text = operands(recipe, size, cuda)
    total = torch.zeros(4096, 4096, device=cuda)
    torch.cuda.synchronize(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    ops.add_scaled_mm(total, *sides, text, k=512)
    assert torch.cuda.max_memory_allocated(cuda) - before < 60 << 20


def layer(recipe: str, accumulate: str | None, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    linear = nn.Linear(256, 128, device=device, dtype=torch.bfloat16)
    mf.quantize_(linear, recipe, accumulate=accumulate)
    if linear.amax_history is not None:
        linear.amax_history.copy_(history(8.0)[:, :1].expand_as(linear.amax_history))
    linear.weight.main_grad = torch.zeros(128, 256, device=device)
    linear.weight.grad_dtype = torch.float32
    return linear


def step(call: nn.Module, i: int, device: torch.device) -> None:
    gen = torch.Generator().manual_seed(i)
    x = torch.randn(64, 256, generator=gen).to(device, torch.bfloat16)
    call(x).float().square().mean().backward()


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_delayed", "mxfp8", "nvfp4"])
def test_layers_add_alike(device, recipe):
    """Eager and compiled layers call one kernel; .grad begins with the product that it writes."""
    eager, compiled = (layer(recipe, "main_grad", device) for _ in range(2))
    into_grad = layer(recipe, "grad", device)
    call = torch.compile(compiled, fullgraph=True)
    for i in range(3):
        step(eager, i, device)
        step(call, i, device)
        step(into_grad, i, device)
    assert torch.equal(eager.weight.main_grad, compiled.weight.main_grad)
    assert eager.weight.grad is None
    got, want = into_grad.weight.grad, eager.weight.main_grad
    limit = tolerance(mf.Recipe(recipe).wgrad, torch.float32)
    assert (got - want).norm() <= limit * want.norm()


@pytest.mark.parametrize("how", ["main_grad", "grad"])
@pytest.mark.parametrize("recipe", ["fp8_rowwise", "fp8_delayed", "nvfp4"])
def test_reduce_overhead_adds_as_compiled_code_does(device, recipe, how):
    """Three steps of three micro-batches: warm-up, capture and replays.

    Every .grad is allocated before. A replay overwrites one that a graph has allocated.
    """
    dtype = torch.bfloat16 if how == "main_grad" else torch.float32  # compiled code rounds a .grad
    found = []
    for mode in ("default", "reduce-overhead"):
        torch.compiler.reset()
        linear = layer(recipe, how, device).to(dtype)
        linear.weight.main_grad = torch.zeros(128, 256, device=device)
        linear.bias.grad = torch.zeros_like(linear.bias)
        if how == "grad":
            linear.weight.grad = torch.zeros_like(linear.weight)
        call, sums = torch.compile(linear, mode=mode, fullgraph=True), []
        for i in range(9):
            gen = torch.Generator().manual_seed(i)
            x = torch.randn(64, 256, generator=gen).to(device, dtype)
            call(x).float().square().mean().backward()
            if i % 3 == 2:
                total = linear.weight.main_grad if how == "main_grad" else linear.weight.grad
                sums.append(total.clone())
                linear.weight.main_grad.zero_()
                linear.zero_grad(set_to_none=False)
                mf.step(linear)
        assert (linear.weight.grad is None) == (how == "main_grad")
        found.append(sums)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(bool(total.any()) for total in found[0])


@pytest.mark.parametrize("how", ["main_grad", "grad"])
def test_captured_micro_batches_replay(cuda, how):
    """A graph adds at each replay."""
    eager, captured = layer("fp8_rowwise", how, cuda), layer("fp8_rowwise", how, cuda)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=gen).to(cuda, torch.bfloat16)

    def run(linear: nn.Module) -> None:
        linear(x).float().square().mean().backward()

    def total(linear: nn.Module) -> Tensor:
        return linear.weight.main_grad if how == "main_grad" else linear.weight.grad

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(captured)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(captured)
    for _ in range(2):
        graph.replay()
    for _ in range(3):
        run(eager)
    assert torch.equal(total(eager), total(captured))
