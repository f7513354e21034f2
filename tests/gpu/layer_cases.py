"""Data, a small model and tolerances of the layer tests."""

from __future__ import annotations

import minifloat as mf
import torch
from torch import Tensor, nn

HISTORY_LENGTH = 4


def history(amax: float = 3.0) -> Tensor:
    """Makes an amax history with an active amax."""
    h = torch.zeros(6, 1 + HISTORY_LENGTH)
    h[:, 0] = amax
    return h


def layer_data(size: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Draws x (M, K), W (N, K), bias (N), g (M, N)."""
    m, k, n = size
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=gen).to(dtype) for s in ((m, k), (n, k), (n,), (m, n))]


def build(recipe: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64, bias=False))
    mf.quantize_(model, recipe)
    return model.to(device, torch.bfloat16)


def require_close(got: Tensor, want: Tensor, limit: float, what: str) -> None:
    assert got.shape == want.shape, what
    assert got.dtype == want.dtype, what
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    assert got.isfinite().all(), f"{what}: {int((~got.isfinite()).sum())} are not finite"
    error = float((got - want).norm() / want.norm())
    assert error <= limit, f"{what}: relative error {error:.3g}, expected at most {limit:.3g}"
