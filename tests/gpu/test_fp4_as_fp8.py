"""FP4 as FP8: the CPU's bytes, the exact product's values, and no cast to bf16 values."""

from __future__ import annotations

from typing import Any

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.layer_cases import require_close
from tests.gpu.sweep import require_same, rng_tensor, values

pytestmark = pytest.mark.gpu

BASES = ["mxfp4", "mxfp4+floor", "nvfp4+pow2", "nvfp4/16x16+pow2"]
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
        want = ops.carry(*args)
        got = ops.carry(*(t.to(device) for t in args[:3]), *args[3:])
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
    want = ops.carry(codes, scale, amax, spec, cols)
    got = ops.carry(codes.to(device), scale.to(device), amax.to(device), spec, cols)
    require_same(got[0].view(torch.uint8), want[0].view(torch.uint8), f"{base}: codes")
    require_same(got[1], want[1], f"{base}: row scale")


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [0, 4, 12])
@pytest.mark.parametrize("spec", ["mxfp4", "nvfp4+pow2", "mxfp4+rht"])
def test_products_are_the_exact_ones(device, spec, spread, out_dtype):
    """Compares with exact products.

    FP8 tensor cores cut 32 products at 2^-13 of the largest, and promote the sums. Blocks spread by
    2^(spread sigma) leave the exact range, by less than that."""
    g = torch.Generator().manual_seed(spread)
    sides = []
    for rows in (256, 384):
        x = torch.randn(rows, 512, generator=g)
        x *= torch.exp2(spread * torch.randn(rows, 16, generator=g)).repeat_interleave(32, 1)
        sides.append(mf.quantize(x, spec))
    bias = torch.randn(384, generator=g, dtype=out_dtype)
    want = mf.scaled_mm(*sides, bias=bias, out_dtype=out_dtype)
    there = [
        mf.Quantized(q.codes.to(device), q.scale.to(device), q.amax.to(device), q.spec, q.shape)
        for q in sides
    ]
    got = mf.scaled_mm(*there, bias=bias.to(device), out_dtype=out_dtype)
    require_close(got, want, 2.0**-8, f"{spec}, spread {spread}")


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
    if torch.cuda.get_device_capability(cuda) < (9, 0):
        pytest.skip("FP8 products by rows need compute capability 9.0")
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
