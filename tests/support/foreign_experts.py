"""Experts modules of the shapes and signatures that other libraries have, written for the tests."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .experts import ALPHA, LIMIT

D, H, E, K = 32, 48, 4, 2


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)


def order_of(indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the pairs by expert, the tokens of each row and the ends of groups."""
    pairs = indices.reshape(-1).argsort(stable=True)
    offs = torch.bincount(indices.reshape(-1), minlength=E).cumsum(0).to(torch.int32)
    return pairs, pairs // indices.shape[1], offs


def grouped(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Multiplies each group by its matrix, by a loop."""
    starts = [0, *offs.tolist()]
    return torch.cat([a[i:j] @ b[e] for e, (i, j) in enumerate(itertools.pairwise(starts))])


class GroupedMm(nn.Module):
    """Experts as torchtitan's: w1, w2, w3, and the method through which products go."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = weight(E, H, D), weight(E, D, H), weight(E, H, D)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return grouped(A, B_t, offs)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        w1, w2, w3 = (w.to(x.dtype).transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        h = F.silu(self._grouped_mm(A=x, B_t=w1, offs=offs))
        h = h * self._grouped_mm(A=x, B_t=w3, offs=offs)
        return self._grouped_mm(A=h, B_t=w2, offs=offs)


class GroupedMmBlock(nn.Module):
    """A mixture around GroupedMm, with torchtitan's names."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.ModuleDict({"gate": nn.Linear(D, E, bias=False)})
        self.experts = GroupedMm()
        self.shared_expert = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        scores, indices = self.router["gate"](x.float()).softmax(-1).topk(K)
        pairs, rows, offs = order_of(indices)
        y = self.experts(x[rows], offs) * scores.reshape(-1)[pairs, None]
        return torch.zeros_like(x).index_add(0, rows, y.to(x.dtype)) + self.shared_expert(x)


class Projections(nn.Module):
    """Experts as Hugging Face's Mixtral, Qwen3-MoE (linear layout) or gpt-oss (row-major)."""

    def __init__(self, row_major: bool, bias: bool, clamped: bool, act: nn.Module) -> None:
        super().__init__()
        shapes = ((E, D, 2 * H), (E, H, D)) if row_major else ((E, 2 * H, D), (E, D, H))
        self.row_major = row_major
        self.gate_up_proj, self.down_proj = weight(*shapes[0]), weight(*shapes[1])
        self.gate_up_proj_bias = weight(E, 2 * H) if bias else None
        self.down_proj_bias = weight(E, D) if bias else None
        self.act_fn = act
        if clamped:
            self.alpha, self.limit = ALPHA, LIMIT

    def activation(self, gate_up: Tensor) -> Tensor:
        if hasattr(self, "limit"):
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            return (up + 1) * gate * torch.sigmoid(gate * self.alpha)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(E):
            gate_up, down = self.gate_up_proj[e], self.down_proj[e]
            if not self.row_major:
                gate_up, down = gate_up.T, down.T
            y = hidden_states @ gate_up
            y = y if self.gate_up_proj_bias is None else y + self.gate_up_proj_bias[e]
            y = self.activation(y) @ down
            y = y if self.down_proj_bias is None else y + self.down_proj_bias[e]
            out = out + y * ((top_k_index == e) * top_k_weights).sum(1, keepdim=True)
        return out


class ProjectionBlock(nn.Module):
    """A mixture around Projections, with Hugging Face's names."""

    def __init__(
        self,
        row_major: bool = False,
        bias: bool = False,
        clamped: bool = False,
        act: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = Projections(row_major, bias, clamped, act or nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.gate(x).softmax(-1).topk(K)
        return self.experts(x, indices, top_k_weights=weights.to(x.dtype))


class Batched(nn.Module):
    """Experts that are products of batches, each of equally many rows, as Llama 4's."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = weight(E, D, H), weight(E, D, H)
        self.scale = weight(E, 1, 1)

    def forward(self, x_ECD: Tensor) -> Tensor:
        h = F.gelu(torch.bmm(x_ECD, self.inputs.to(x_ECD.dtype)))
        return h @ self.outputs.mT * self.scale
