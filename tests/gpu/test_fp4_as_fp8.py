"""FP4 as FP8: the CPU's bytes, the exact product's values, and no cast to bf16 values."""

from __future__ import annotations

import contextlib
from typing import Any

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.layer_cases import require_close
from tests.gpu.sweep import laid_out, require_same_quantize, rng_tensor, values
from tests.support.mlp_cases import Case
from tests.support.same_bits import require_same, require_same_results

pytestmark = pytest.mark.gpu

BASES = ["mxfp4", "mxfp4+floor", "nvfp4+pow2", "nvfp4/16x16+pow2"]
BASES += ["e1m2/1x32", "e1m2/1x16+pow2", "e1m2/16x16+pow2"]
SPECS = [base + flags for base in BASES for flags in ("", "+rht", "+sr", "+rht128")]
SHAPES = [(1, 1), (17, 33), (2, 31, 127), (130, 1000), (3, 16, 256), (5, 4096), (0, 64)]
KINDS = ["normal", "wide", "tiny", "huge", "sparse", "zeros", "special", "rare"]


def quantized(spec: str, shape: tuple[int, ...], kind: str) -> list[Any]:
    """Returns codes, scale, amax on the CPU; spec, columns."""
    rng = rng_tensor() if "+sr" in spec else None
    x = values(kind, shape, torch.float32)
    return [*ops.quantize(x, spec, "", rng=rng)[:3], spec, shape[-1]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_codes_and_row_scales(device, spec, kind):
    for shape in SHAPES:
        args = quantized(spec, shape, kind)
        want = ops.fp4_as_fp8(*args)
        got = ops.fp4_as_fp8(*(t.to(device) for t in args[:3]), *args[3:])
        for name, a, b in zip(("codes", "row scale"), got, want):
            a, b = (t.view(torch.uint8) if name == "codes" else t for t in (a, b))
            require_same(a, b, f"{spec} {kind} {shape}: {name}")


@pytest.mark.parametrize("base", BASES)
def test_every_code_under_every_scale(device, base):
    """Converts 256 rows of all code bytes, with block scales of every byte."""
    g = torch.Generator().manual_seed(0)
    codes, scale, amax, spec, cols = quantized(base, (256, 512), "normal")
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.randint(256, scale.shape, generator=g, dtype=torch.uint8)
    want = ops.fp4_as_fp8(codes, scale, amax, spec, cols)
    got = ops.fp4_as_fp8(codes.to(device), scale.to(device), amax.to(device), spec, cols)
    require_same(got[0].view(torch.uint8), want[0].view(torch.uint8), f"{base}: codes")
    require_same(got[1], want[1], f"{base}: row scale")


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [0, 4, 12])
@pytest.mark.parametrize(
    "product",
    ["mxfp4*mxfp4", "nvfp4+pow2*nvfp4+pow2", "mxfp4+rht*mxfp4+rht", "nvfp4+pow2*mxfp4",
     "e4m3/row*mxfp4", "mxfp4*e4m3/row", "e4m3/row*nvfp4/16x16+pow2"],
)  # fmt: skip
def test_products_are_the_exact_ones(device, product, spread, out_dtype):
    """Compares with exact products.

    FP8 tensor cores cut 32 products at 2^-13 of the largest, and promote the sums. Blocks spread by
    2^(spread sigma) leave the exact range, by less than that."""
    g = torch.Generator().manual_seed(spread)
    sides = []
    for rows, spec in zip((256, 384), product.split("*")):
        x = torch.randn(rows, 512, generator=g)
        x *= torch.exp2(spread * torch.randn(rows, 16, generator=g)).repeat_interleave(32, 1)
        sides.append(mf.tensor.quantize(x, spec))
    bias = torch.randn(384, generator=g, dtype=out_dtype)
    want = mf.tensor.scaled_mm(*sides, bias=bias, out_dtype=out_dtype)
    there = [
        mf.tensor.Quantized(
            q.codes.to(device), q.scale.to(device), q.amax.to(device), q.spec, q.shape
        )
        for q in sides
    ]
    got = mf.tensor.scaled_mm(*there, bias=bias.to(device), out_dtype=out_dtype)
    require_close(got, want, 2.0**-8, f"{product}, spread {spread}")


class Asked(TorchDispatchMode):
    """A record of casts with bf16 values, and of decoded operands."""

    def __init__(self) -> None:
        super().__init__()
        self.values = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = [a.name for a in func._schema.arguments]
        given = {**dict(zip(names, args)), **kwargs}
        self.values |= func is ops.decode.default
        self.values |= bool(given.get("decoded_row") or given.get("decoded_col"))
        return func(*args, **kwargs)


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4_pow2"])
def test_layers_ask_for_no_values(cuda, recipe):
    if torch.cuda.get_device_capability(cuda) < (8, 9):
        pytest.skip("FP8 products by rows need compute capability 8.9")
    x = torch.randn(256, 128, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(384, 128, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    rng = torch.tensor([1, 2, 3], device=cuda)
    saved: list[int] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.nbytes)
        return t

    with Asked() as asked, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = mf.linear(x, w, None, recipe, rng=rng)
    assert not asked.values
    assert sum(saved) <= 0.57 * (x.numel() + w.numel())  # both stay in 4 bits
    assert y.isfinite().all()


# ---- Casts that write FP8 ------------------------------------------------------------------------
POW2, SQUARE = "nvfp4+pow2", "nvfp4/16x16+pow2"
# Specs of both directions, and which are written as FP8. Those of the preset have kernels.
CASTS = [
    (POW2, "", True, False),
    (f"{POW2}+sr", "", True, False),
    (POW2, f"{POW2}+rht", True, False),
    (POW2, POW2, True, False),
    (f"{POW2}+sr", f"{POW2}+sr+rht", True, True),
    ("", f"{POW2}+sr+rht", False, True),
    # in two steps
    ("", POW2, False, True),
    (SQUARE, SQUARE, True, False),
    (SQUARE, "", True, False),
    ("", SQUARE, False, True),
    ("mxfp4", "mxfp4+rht", True, True),
    (f"{POW2}+rht", "", True, False),
    (POW2, POW2, True, True),
    (f"{POW2}+sr", f"{POW2}+sr+rht", False, True),
]
CAST_SHAPES = [
    (128, 1152), (1152, 128), (384, 512), (1024, 640), (384, 1008), (300, 400), (2000, 16),
    (128, 128), (130, 1000), (17, 33), (1, 1), (0, 64), (64, 0), (2, 128, 640),
]  # fmt: skip


def far_apart(shape: tuple[int, ...]) -> torch.Tensor:
    """Makes rows and columns of far magnitudes, with rows and columns of zeros."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=g)
    for dim in (-1, -2):
        size = [1] * len(shape)
        size[dim] = shape[dim]
        x = x * torch.exp2(9 * torch.randn(size, generator=g))
    x[..., ::5, :] = 0
    x[..., 1::7] = -0.0
    return x.bfloat16()


@pytest.mark.parametrize("kind", [*KINDS, "far apart"])
@pytest.mark.parametrize(("row", "col", "fp8_row", "fp8_col"), CASTS)
def test_casts_that_write_fp8(device, row, col, fp8_row, fp8_col, kind):
    for shape in CAST_SHAPES:
        x = far_apart(shape) if kind == "far apart" else values(kind, shape, torch.bfloat16)
        forms = {"fp8_row": fp8_row, "fp8_col": fp8_col}
        require_same_quantize(device, x, row, col, note=f" {kind}", **forms)


@pytest.mark.parametrize("layout", ["odd base", "odd pitch", "padded rows"])
def test_casts_that_write_fp8_of_any_layout(device, layout):
    x = laid_out(values("normal", (1, 384, 400), torch.bfloat16), layout)[0]
    for row, col, fp8_row, fp8_col in CASTS:
        forms = {"fp8_row": fp8_row, "fp8_col": fp8_col}
        require_same_quantize(device, x, row, col, note=f" {layout}", **forms)
        require_same_quantize(device, x[:, :384], row, col, note=f" {layout}, tiles", **forms)


def unfused(x: Any, w: Any, grad: Any, rng: Any) -> list[torch.Tensor]:
    """Computes y, dx and dW under nvfp4_pow2 from FP4 codes, which the products convert."""
    recipe = mf.Recipe("nvfp4_pow2")
    fprop, dgrad, wgrad = recipe.fprop, recipe.dgrad, recipe.wgrad

    def cast(t: Any, spec: Any, name: str, transposed: bool = False) -> list[torch.Tensor]:
        texts, stream = ("", str(spec)) if transposed else (str(spec), ""), ops.stream(name)
        out = ops.quantize(t, *texts, rng=rng, stream_row=stream, stream_col=stream)
        return list(out[4:7] if transposed else out[:3])

    def multiply(product: Any, a: Any, b: Any, k: int) -> torch.Tensor:
        return ops.scaled_mm(*a, *b, str(product), k=k)

    m, n = grad.shape
    return [
        multiply(fprop, cast(x, fprop.a, "x/fprop"), cast(w, fprop.b, "w/fprop"), x.shape[1]),
        multiply(dgrad, cast(grad, dgrad.a, "g/dgrad"), cast(w, dgrad.b, "w/dgrad", True), n),
        multiply(wgrad, cast(grad, wgrad.a, "g/wgrad", True), cast(x, wgrad.b, "x/wgrad", True), m),
    ]


@pytest.mark.parametrize("mode", ["eager", "dispatched", "compiled"])
@pytest.mark.parametrize("sizes", [(384, 512, 640), (256, 512, 648), (130, 640, 512), (64, 64, 32)])
def test_layers_have_the_bytes_of_fp4_operands(cuda, sizes, mode):
    """The sizes of fused casts; of a product that takes no FP8; of casts in two steps."""
    if torch.cuda.get_device_capability(cuda) < (8, 9):
        pytest.skip("FP8 products by rows need compute capability 8.9")
    m, k, n = sizes
    g = torch.Generator().manual_seed(0)
    x, w, grad = (
        (torch.randn(s, generator=g) * torch.exp2(4 * torch.randn(s[0], 1, generator=g)))
        .bfloat16()
        .to(cuda)
        for s in ((m, k), (n, k), (m, n))
    )
    rng = torch.tensor([1, 2], device=cuda)
    want = unfused(x, w, grad, rng)
    x.requires_grad_(), w.requires_grad_()
    layer = lambda x, w: mf.linear(x, w, None, "nvfp4_pow2", rng=rng)  # noqa: E731
    if mode == "compiled":
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with Asked() if mode == "dispatched" else contextlib.nullcontext():
        y = layer(x, w)
        y.backward(grad)
    for name, a, b in zip(("y", "dx", "dw"), (y, x.grad, w.grad), want, strict=True):
        require_same(a, b, f"{sizes} {mode}: {name}")


def conversions(step: Any) -> tuple[Any, int]:
    """Returns a step's result, and how many kernels of it convert FP4 to FP8."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        out = step()
        torch.cuda.synchronize()
    counts = [e.count for e in profile.key_averages() if "write_as_fp8" in e.key]
    return out, sum(counts)


@pytest.mark.parametrize("sizes", [(384, 512, 640), (1024, 384, 384)])
def test_operands_that_are_not_saved_are_cast_to_fp8(cuda, sizes):
    """Forward converts nothing; backward converts x and w, which forward saved."""
    if torch.cuda.get_device_capability(cuda)[0] != 9:
        pytest.skip("Hopper multiplies FP4 as FP8")
    m, k, n = sizes
    x = torch.randn(m, k, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(n, k, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    rng = torch.tensor([1, 2], device=cuda)

    y, forward = conversions(lambda: mf.linear(x, w, None, "nvfp4_pow2", rng=rng))
    _, backward = conversions(lambda: y.backward(torch.randn_like(y)))
    assert (forward, backward) == (0, 2)


# ---- Feed-forwards -------------------------------------------------------------------------------
def feed_forward(
    cuda: torch.device, sizes: tuple[int, int, int], tokens: int, **options: Any
) -> Case:
    if torch.cuda.get_device_capability(cuda)[0] != 9:
        pytest.skip("Hopper multiplies FP4 as FP8")
    return Case("nvfp4_pow2", tokens=(tokens,), sizes=sizes, device=str(cuda), **options)


@pytest.mark.parametrize("mode", ["eager", "dispatched", "compiled"])
@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(384, (512, 640, 384)), (208, (512, 640, 384)), (72, (96, 160, 64)), (40, (96, 100, 64))],
)
@pytest.mark.parametrize(("is_gated", "has_bias"), [(True, False), (False, True)])
def test_feed_forwards_have_the_bytes_of_layers(cuda, tokens, sizes, is_gated, has_bias, mode):
    """The sizes of fused casts; of casts in steps; of products that take no FP8."""
    case = feed_forward(cuda, sizes, tokens, is_gated=is_gated, has_bias=has_bias)
    want = case.results(case.composed)
    run = case.fused
    if mode == "compiled":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    with Asked() if mode == "dispatched" else contextlib.nullcontext():
        require_same_results(case.results(run), want)


@pytest.mark.parametrize("is_gated", [True, False])
def test_feed_forwards_convert_what_is_saved(cuda, is_gated):
    """Forward converts nothing; backward converts x and the weights, which forward saved."""
    case = feed_forward(cuda, (512, 640, 512), 1024, is_gated=is_gated)
    y, forward = conversions(case.fused)
    _, backward = conversions(lambda: torch.autograd.grad(y, case.leaves, case.dy))
    assert (forward, backward) == (0, len(case.weights) + 1)
