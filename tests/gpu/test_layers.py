"""Linear layers on the GPU: the CPU's operands, products within the order of accumulation, and the
CPU's errors.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import Tensor, nn

from tests.gpu.layer_cases import build, history, layer_data, require_close
from tests.support.capability import assumed_capability
from tests.support.same_bits import require_same
from tests.support.specs import (
    BLOCKS_RECIPE,
    OF_FORWARD_RECIPES,
    ROWS_RECIPE,
    UNIFORM_POW2_RECIPE,
    UNIFORM_RECIPE,
)

pytestmark = pytest.mark.gpu

PRESETS = mf.presets()
RECIPES = [
    *PRESETS,
    BLOCKS_RECIPE,
    ROWS_RECIPE,
    UNIFORM_RECIPE,
    UNIFORM_POW2_RECIPE,
    *OF_FORWARD_RECIPES,
]
SIZES = [(256, 384, 128), (45, 70, 37)]  # M, K, N: whole blocks, and multiples of nothing


@contextlib.contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Lists the tensors that forward saves for backward, in order."""
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t.detach().clone())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield saved


def run_layer(device: torch.device, recipe: str, data: list[Tensor]) -> dict[str, Any]:
    x, w, b, g = (t.to(device) for t in data)
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    rng = torch.tensor([17, 3, 12345], device=device)
    amaxes = history().to(device)
    with saved_tensors() as saved:
        y = mf.linear(x, w, b, recipe, rng=rng, amax_history=amaxes)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), g)
    return {"saved": saved, "amax": amaxes, "y": y.detach(), "dx": dx, "dW": dw, "db": db}


def is_fp8(product: mf.recipe.Product) -> bool:
    """Tells whether FP8 tensor cores may run it, whose sums are shorter than fp32."""
    families = {"tensor", "row", "1x128", "128x128"}
    specs = [spec.split("+")[0] for spec in (product.a, product.b)]
    return all(s.startswith("e") and s.split("/")[1] in families for s in specs)


def is_fp4_by_fp8(product: mf.recipe.Product) -> bool:
    """Tells whether it may run as an FP8 product of the same values."""
    return all(
        s.startswith(("mxfp4", "e1m2/1x32", "e4m3/row")) or "+pow2" in s
        for s in (product.a, product.b)
    )


def tolerance(product: mf.recipe.Product, dtype: torch.dtype) -> float:
    """Returns the largest relative error, in the Frobenius norm, between two engines.

    Exact products: fp32 sums of up to 400 terms in two orders, 400 * 2^-24 in the worst case; where
    the result is bf16, both round it once, and differ by at most one place, 2^-8. FP8 tensor cores
    cut 32 products at 2^-13 of the largest; over 400 of them that stays under 2^-7 of the result.
    """
    if is_fp8(product) or is_fp4_by_fp8(product):
        return 2.0**-7
    return 400 * 2.0**-24 if dtype == torch.float32 else 2.0**-8


def require_close_layers(got: dict, want: dict, recipe: str, dtype: torch.dtype) -> None:
    r = mf.Recipe(recipe)
    for name, product in (("y", r.fprop), ("dx", r.dgrad), ("dW", r.wgrad)):
        require_close(got[name], want[name], tolerance(product, dtype), f"{recipe} {name}")
    limit = 2.0**-8 if dtype == torch.bfloat16 else 400 * 2.0**-24
    require_close(got["db"], want["db"], limit, f"{recipe} db")


# ---- Against the CPU -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_layer_is_the_cpus(device, recipe, size, dtype):
    data = layer_data(size, dtype)
    want, got = run_layer(torch.device("cpu"), recipe, data), run_layer(device, recipe, data)
    assert len(got["saved"]) == len(want["saved"])
    for i, (a, b) in enumerate(zip(got["saved"], want["saved"])):
        require_same(a, b, f"{recipe}: saved tensor {i}")
    require_same(got["amax"], want["amax"], f"{recipe}: amax history")
    require_close_layers(got, want, recipe, dtype)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layer_by_the_engines_of_other_gpus(cuda, recipe, capability):
    """On Ampere all products are exact; on 8.9 those of FP8 by row, off the default stream."""
    data = layer_data(SIZES[0], torch.bfloat16)
    want = run_layer(torch.device("cpu"), recipe, data)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with assumed_capability(*capability), torch.cuda.stream(stream):
            got = run_layer(cuda, recipe, data)
        torch.cuda.synchronize()
        require_close_layers(got, want, recipe, torch.bfloat16)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "nvfp4"])
def test_leading_dimensions_and_empty_batches(device, recipe):
    x, w, b, _ = (t.to(device) for t in layer_data((30, 64, 48), torch.bfloat16))
    rng = torch.tensor([1, 2, 3], device=device)
    flat = mf.linear(x, w, b, recipe, rng=rng)
    assert torch.equal(mf.linear(x.view(3, 10, 64), w, b, recipe, rng=rng), flat.view(3, 10, 48))
    empty = torch.empty(0, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    w.requires_grad_()
    y = mf.linear(empty, w, b, recipe, rng=rng)
    y.sum().backward()
    assert y.shape == (0, 48)
    assert empty.grad.shape == (0, 64)
    assert not w.grad.any()


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed", "fp8_rowwise_gw_hp", "mxfp8"])
def test_group_is_its_layers(device, recipe):
    x, w, b, g = (t.to(device) for t in layer_data(SIZES[0], torch.bfloat16))
    w2, g2 = torch.randn_like(w[:64]), torch.randn_like(g[:, :64])
    leaves = [t.requires_grad_() for t in (x, w, w2, b)]
    rng = torch.tensor([1, 2, 3], device=device)
    histories = [history().to(device) for _ in range(4)]
    group = mf.functional.linear_group(
        x, [w, w2], [b, None], recipe, rng=[rng, rng], amax_history=histories[:2]
    )
    singles = [
        mf.linear(x, w, b, recipe, rng=rng, amax_history=histories[2]),
        mf.linear(x, w2, None, recipe, rng=rng, amax_history=histories[3]),
    ]
    for a, c in zip(group, singles):
        require_close(a, c, 2.0**-8, f"{recipe} y")
    got = torch.autograd.grad(group, leaves, (g, g2))
    want = torch.autograd.grad(singles, leaves, (g, g2))
    for name, a, c in zip(("dx", "dW", "dW2", "db"), got, want):
        require_close(a, c, 2.0**-7, f"{recipe} {name}")  # dx: one more rounding to bf16


def test_autocast_equals_bf16_inputs(device):
    x, w, b, g = (t.to(device) for t in layer_data(SIZES[0], torch.float32))
    leaves = [t.requires_grad_() for t in (x, w, b)]
    rng = torch.tensor([1, 2, 3], device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = mf.linear(*leaves, "nvfp4", rng=rng)
    narrow = [t.detach().bfloat16().requires_grad_() for t in leaves]
    y_narrow = mf.linear(*narrow, "nvfp4", rng=rng)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, y_narrow)
    gradients = torch.autograd.grad(y, leaves, g.bfloat16())
    for a, c in zip(gradients, torch.autograd.grad(y_narrow, narrow, g.bfloat16())):
        assert a.dtype == torch.float32
        assert torch.equal(a, c.float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", [r for r in PRESETS if r != "fp8_delayed"])
def test_non_finite_input_is_never_silent(device, recipe, bad):
    for size in SIZES:
        x, w, b, _ = layer_data(size, torch.bfloat16)
        x[3, 5] = bad
        rng = torch.tensor([1, 2, 3], device=device)
        y = mf.linear(x.to(device), w.to(device), b.to(device), recipe, rng=rng)
        assert not y[3].isfinite().any()


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed", "fp8_rowwise", "mxfp8", "mxfp4"])
def test_ten_steps_of_training(device, recipe):
    """Trains from one start on both devices, and compares the losses.

    bf16 sums in another order, and codes that flip with them, change single losses by a percent or
    two."""
    losses = []
    for place in (torch.device("cpu"), device):
        model = build(recipe, place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        x, _, _, target = layer_data((192, 128, 64), torch.bfloat16, seed=5)
        run = []
        for _ in range(10):
            error = model(x.to(place)).float() - target.to(place).float()
            loss = error.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mf.step(model)
            run.append(loss.item())
        losses.append(run)
    assert losses[1][-1] < losses[1][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", [r for r in PRESETS if r != "bf16"])
def test_what_is_reused_is_what_would_be_computed(device, recipe, autocast):
    """Compares micro-batches and sibling layers with layers that reuse nothing."""
    torch.manual_seed(0)
    model = nn.ModuleDict({n: nn.Linear(128, 96) for n in ("q_proj", "k_proj", "v_proj")})
    mf.quantize_(model, recipe)
    model.to(device, torch.float32 if autocast else torch.bfloat16)
    twin = copy.deepcopy(model)
    for layer in twin.values():
        layer.weight_codes = layer.shared_input = None
    for step in range(3):
        for micro in range(3):
            x = layer_data((96, 128, 96), torch.bfloat16, seed=10 * step + micro)[0].to(device)
            results = []
            for m in (model, twin):
                leaf = x.clone().requires_grad_()
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                    y = sum(layer(leaf) for layer in m.values())
                results.append([y, *torch.autograd.grad(y.sum(), [leaf, *m.parameters()])])
            for a, b in zip(*results):
                require_same(a, b, f"{recipe} step {step}, micro-batch {micro}")
        with torch.no_grad():
            for m in (model, twin):
                for p in m.parameters():
                    p.mul_(1.25)


# ---- Bad input -----------------------------------------------------------------------------------


def bad_calls(device: torch.device) -> dict[str, Any]:
    """Lists calls that every device must refuse with the same message."""
    x = torch.ones(4, 64, device=device)
    w = torch.ones(6, 64, device=device)
    byte = torch.ones(4, 4, dtype=torch.uint8, device=device)
    rng = torch.tensor([1, 2, 3], device=device)
    return {
        "spec": lambda: ops.quantize(x, "nvfp5", ""),
        "identity": lambda: ops.quantize(x, "bf16", ""),
        "dtype": lambda: ops.quantize(x.half(), "nvfp4", ""),
        "dimensions": lambda: ops.quantize(x[0], "nvfp4", ""),
        "strides": lambda: ops.quantize(x.t(), "nvfp4", ""),
        "no rng": lambda: ops.quantize(x, "nvfp4+sr", ""),
        "rng dtype": lambda: ops.quantize(x, "nvfp4+sr", "", rng=rng.float()),
        "rng size": lambda: ops.quantize(x, "nvfp4+sr", "", rng=rng[:1]),
        "amax shape": lambda: ops.quantize(x, "nvfp4", "", amax_row=torch.ones(3, device=device)),
        "amax of none": lambda: ops.quantize(x, "mxfp8", "", amax_row=x[0, 0].clone()),
        "origin": lambda: ops.quantize(x, "nvfp4+sr", "", rng=rng, origin=[0, 8]),
        "amax": lambda: ops.amax(x, "mxfp8"),
        "points": lambda: ops.hadamard(x, 24),
        "signs": lambda: ops.hadamard(x, 16, False, 1 << 16),
        "code bytes": lambda: ops.dequantize(byte, x[:, :1], x, "e4m3/row", 5),
        "scale count": lambda: ops.decode(byte, x[0, :3].clone(), "e4m3/row", 4),
        "transpose": lambda: ops.transpose_codes(byte, 3),
        "groups": lambda: ops.swizzle_scales(byte, groups="x"),
        "no offs": lambda: ops.swizzle_scales(byte, groups="m"),
        "swizzled shape": lambda: ops.unswizzle_scales(byte, 3, 3),
        "linear K": lambda: mf.linear(x, w[:, :9], None, "mxfp8"),
        "linear bias": lambda: mf.linear(x, w, w[0, :5], "mxfp8"),
        "linear rng": lambda: mf.linear(x, w.requires_grad_(), None, "nvfp4"),
        "linear history": lambda: mf.linear(x, w, None, "fp8_delayed", amax_history=x),
    }


def message(call: Any) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    return str(caught.value).splitlines()[0].lower().replace("cuda:0", "cpu").replace("cuda", "cpu")


@pytest.mark.parametrize("name", bad_calls(torch.device("cpu")))
def test_bad_input_is_refused_in_the_cpus_words(device, name):
    assert message(bad_calls(device)[name]) == message(bad_calls(torch.device("cpu"))[name])


def test_operands_of_two_devices_are_refused(cuda):
    x, w = torch.ones(4, 64, device=cuda), torch.ones(6, 64)
    rng = torch.tensor([1, 2, 3])
    for call in (
        lambda: mf.linear(x, w, None, "mxfp8"),
        lambda: ops.quantize(x, "nvfp4+sr", "", rng=rng),
        lambda: ops.quantize(x, "nvfp4", "", amax_row=torch.tensor(1.0)),
    ):
        with pytest.raises(ValueError, match=r"expected .* on cuda"):
            call()
