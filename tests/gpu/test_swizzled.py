"""Casts that write swizzled scales: the CPU's bytes, and layers that swizzle nothing besides.

The bytes need no Blackwell GPU: every GPU runs these casts. Of layers, a stand-in for torch's
block-scaled product reads the operands by the layout, so that any GPU runs Blackwell's plan.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.functional import SwizzleType
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.gpu.layer_cases import require_close
from tests.gpu.sweep import laid_out, require_same_quantize, rng_tensor, values
from tests.support.capability import assumed_capability
from tests.support.mlp_cases import Case
from tests.support.same_bits import require_same

pytestmark = pytest.mark.gpu

CONTEXTS = partial(create_selective_checkpoint_contexts, mf.checkpoint_policy)
NVFP4, POW2, SQUARE = "nvfp4", "nvfp4+pow2", "nvfp4/16x16"
# Specs of both directions. The kernels differ by them, and by whole tiles and rows of whole blocks.
CASTS = [
    ("mxfp8", ""), ("mxfp8+sr", ""), ("mxfp4", ""), ("mxfp4+sr", ""), (NVFP4, ""),
    (f"{NVFP4}+sr", ""), (POW2, ""), ("nvfp4+4over6", ""), ("nvfp4+eden", ""), ("nvfp4/row", ""),
    ("mxfp8/e5m2+rht", ""), ("mxfp8/32x32", ""), (SQUARE, ""),
    ("", "mxfp8"), ("", "mxfp4+rht"), ("", f"{NVFP4}+rht"), ("", "nvfp4+eden"), ("", SQUARE),
    ("mxfp8", "mxfp8"), ("mxfp8/32x32", "mxfp8/32x32"), ("mxfp4", "mxfp4+rht"),
    ("mxfp4+sr", "mxfp4+sr+rht"), (NVFP4, f"{NVFP4}+rht"), (f"{NVFP4}+sr", f"{NVFP4}+sr+rht"),
    (SQUARE, SQUARE), (f"{SQUARE}+4over6", f"{SQUARE}+4over6"), (POW2, f"{POW2}+rht"),
    ("mxfp8", f"{NVFP4}+rht"), (NVFP4, "mxfp8"),
]  # fmt: skip
SHAPES = [
    (128, 128), (384, 512), (1024, 640), (512, 2304), (131, 256), (300, 400), (130, 1000), (17, 33),
    (1, 1), (1, 4096), (1000, 1), (7, 16384), (0, 64), (64, 0), (2, 128, 640), (3, 33, 160),
    (2, 200, 72),
]  # fmt: skip


def forms(row: str, col: str) -> list[dict[str, bool]]:
    """Lists which directions are swizzled: all, or one of two."""
    both = {"swizzled_row": bool(row), "swizzled_col": bool(col)}
    return [both] if not (row and col) else [both, {"swizzled_row": True}, {"swizzled_col": True}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("row", "col"), CASTS)
def test_casts(device, row, col, dtype):
    for shape in SHAPES:
        for swizzled in forms(row, col):
            # What the padding's memory held before is not zero.
            dirt = torch.full((2**22,), 255, dtype=torch.uint8, device=device)
            del dirt
            require_same_quantize(device, values("wide", shape, dtype), row, col, **swizzled)


@pytest.mark.parametrize("layout", ["odd base", "odd pitch", "padded rows"])
def test_casts_of_any_layout(device, layout):
    for dtype in (torch.bfloat16, torch.float32):
        x = laid_out(values("normal", (1, 384, 2320), dtype), layout)[0]
        for row, col in CASTS:
            for part in (x, x[:, :384]):
                swizzled = forms(row, col)[0]
                require_same_quantize(device, part, row, col, note=f" {layout}", **swizzled)


@pytest.mark.parametrize(("row", "fp8"), [(POW2, True), (f"{POW2}+sr", True), ("e4m3/row", False)])
def test_beside_other_forms(device, row, fp8):
    for shape in SHAPES:
        for col in (POW2, f"{POW2}+rht", f"{POW2}+sr+rht"):
            forms = {"fp8_row": fp8, "swizzled_col": True}
            require_same_quantize(device, values("wide", shape, torch.bfloat16), row, col, **forms)


@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (1024, 1152)])
@pytest.mark.parametrize(
    ("row", "col", "h_col"),
    [
        ("mxfp8", "mxfp8", "mxfp8"),
        ("mxfp4", "mxfp4+rht", "mxfp4+rht"),
        ("nvfp4+sr", "nvfp4+sr+rht", "nvfp4+rht"),
        (POW2, f"{POW2}+rht", f"{POW2}+rht"),
    ],
)
def test_casts_of_activations(device, row, col, h_col, shape):
    dh, gate, up = (values("normal", shape, torch.bfloat16, seed) for seed in range(3))
    flags = {"swizzled_row": True, "swizzled_col": True}

    def results(to: torch.device) -> list[Tensor]:
        there = [t.to(to) for t in (dh, gate, up)]
        rng = rng_tensor().to(to)
        found: list[Tensor] = []
        for of in ((row, ""), ("", h_col), (row, col)):
            asked = {name: bool(spec) for name, spec in zip(flags, of)}
            found += ops.quantize_activation(*there[1:], "silu", *of, rng=rng, **asked)
        specs = (row, col, h_col)
        rngs = {f"{name}_rng": rng for name in ("gate", "up", "h")}
        flags_of_h = {**flags, "swizzled_h": True}
        found += ops.quantize_activation_backward(*there, "silu", *specs, **rngs, **flags_of_h)
        return found

    for i, (got, want) in enumerate(zip(results(device), results(torch.device("cpu")))):
        require_same(got, want, f"{row} {col} {h_col} {shape}: tensor {i}")


# ---- Layers --------------------------------------------------------------------------------------
SIDES = [(130, 160), (48, 160)]
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unswizzled(scale: Tensor, rows: int, cols: int) -> Tensor:
    """Returns the (rows, cols) bytes of a swizzled scale."""
    tiles = scale.view(torch.uint8).reshape(-(-rows // 128), -(-cols // 4), 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -1)[:rows, :cols]


def operand_values(codes: Tensor, scales: list[Tensor]) -> Tensor:
    """Computes the values that a block-scaled product multiplies: MXFP8 or NVFP4, in fp64."""
    if codes.dtype == torch.float8_e4m3fn:
        values, block = codes.double(), 32
        of_blocks = unswizzled(scales[0], len(codes), codes.shape[1] // block).double()
        return values * torch.exp2(of_blocks - 127).repeat_interleave(block, 1)
    nibbles = codes.view(torch.uint8)
    halves = torch.stack([nibbles & 0xF, nibbles >> 4], -1).flatten(1).long()
    values = torch.tensor([*FP4_VALUES, *(-v for v in FP4_VALUES)], device=codes.device)[halves]
    of_blocks = unswizzled(scales[0], len(codes), values.shape[1] // 16).contiguous()
    of_blocks = of_blocks.view(torch.float8_e4m3fn).double()
    return values.double() * of_blocks.repeat_interleave(16, 1) * scales[1].double()


def block_scaled_product(
    a: Tensor,
    b: Tensor,
    a_scale: list[Tensor],
    a_kind: list[int],
    a_swizzle: list[int],
    b_scale: list[Tensor],
    b_kind: list[int],
    b_swizzle: list[int],
    bias: Tensor | None,
    dtype: torch.dtype,
    *_: Any,
) -> Tensor:
    """Stands in for aten::_scaled_mm_v2, which multiplies these operands on Blackwell alone."""
    assert a_swizzle[0] == b_swizzle[0] == SwizzleType.SWIZZLE_32_4_4.value
    product = operand_values(a, a_scale) @ operand_values(b.t(), b_scale).t()
    return (product if bias is None else product + bias.double()).to(dtype)


@pytest.fixture
def stand_in(cuda):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the kernel that is replaced
        library = torch.library.Library("aten", "IMPL")
        library.impl("_scaled_mm_v2", block_scaled_product, "CUDA", allow_override=True)
    yield
    library._destroy()


def test_the_stand_in(device):
    for spec in ("mxfp8", "nvfp4"):
        sides = [values("normal", shape, torch.float32).to(device) for shape in SIDES]
        parts = [ops.quantize(x, spec, "", swizzled_row=True)[:3] for x in sides]
        want = ops.scaled_mm(*parts[0], *parts[1], f"{spec}*{spec}", k=SIDES[0][1])
        a, b = (ops.block_scaled_operand(*part, spec, SIDES[0][1]) for part in parts)
        got = block_scaled_product(a[0], b[0].t(), *a[1:], *b[1:], None, want.dtype)
        require_close(got, want, 2.0**-8, spec)


def linear(device: Any, recipe: str, mode: str) -> list[Tensor]:
    """Returns y, dx and dW of a layer, and of a call without gradients."""
    m, k, n = 256, 128, 384
    x, w, grad = (
        values("normal", shape, torch.bfloat16, i).to(device)
        for i, shape in enumerate([(m, k), (n, k), (m, n)])
    )
    rng = torch.tensor([1, 2, 3], device=device)
    layer = lambda x, w: mf.linear(x, w, None, recipe, rng=rng)  # noqa: E731
    if mode == "checkpointed":  # the cast of x is two, one a direction
        once = layer
        layer = lambda x, w: checkpoint(once, x, w, use_reentrant=False, context_fn=CONTEXTS)  # noqa: E731
    if mode != "eager":
        torch.compiler.reset()
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x.requires_grad_(), w.requires_grad_()
    y = layer(x, w)
    y.backward(grad)
    assert x.grad is not None and w.grad is not None  # noqa: PT018
    return [y.detach(), x.grad, w.grad]


def kernels_of(step: Any) -> tuple[Any, list[str]]:
    """Returns a step's result, and the names of its kernels and other work on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out = step()
        torch.cuda.synchronize()
    events = (e for e in profile.events() if e.device_type == DeviceType.CUDA)
    return out, [e.name for e in events]


@pytest.mark.parametrize("mode", ["eager", "compiled", "checkpointed"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_layers_by_blackwells_plan(cuda, stand_in, recipe, mode):
    """Three products read six operands as casts wrote them."""
    want = linear(cuda, recipe, "eager")
    with assumed_capability(10, 0):
        linear(cuda, recipe, mode)
        got, kernels = kernels_of(lambda: linear(cuda, recipe, mode))
    assert not [name for name in kernels if "swizzle_whole" in name]
    for name, a, b in zip(("y", "dx", "dw"), got, want, strict=True):
        require_close(a, b, 2.0**-7, f"{recipe} {mode}: {name}")


@pytest.mark.parametrize("is_gated", [True, False])
def test_feed_forwards_by_blackwells_plan(cuda, stand_in, is_gated):
    case = {"is_gated": is_gated, "sizes": (128, 384, 256), "tokens": (256,), "device": str(cuda)}
    want = (made := Case("mxfp8", **case)).results(made.fused)
    with assumed_capability(10, 0):
        made = Case("mxfp8", **case)
        got, kernels = kernels_of(lambda: made.results(made.fused))
    assert not [name for name in kernels if "swizzle_whole" in name]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        require_close(a, b, 2.0**-5, f"result {i}")


def test_a_cast_of_whole_tiles_is_one_kernel(cuda):
    """Its swizzled scales have no padding, so nothing else is launched."""
    x = torch.randn(1024, 1152, device=cuda, dtype=torch.bfloat16)
    cast = lambda: ops.quantize(x, "mxfp8", "mxfp8", swizzled_row=True, swizzled_col=True)  # noqa: E731
    cast()
    _, kernels = kernels_of(cast)
    assert len(kernels) == 1, kernels
    assert "quantize" in kernels[0]
