"""Where stochastic rounding's bits come from: (seed, count) in a tensor of the model's device.

    RngState.tensor    int64 (seed, count), one for all layers that one mf.quantize_ call converts
    AdvanceRng         forward pre-hook of the root: count += 1, once a training forward, in place
    Linear.forward     hands the op (seed, count), in a copy that its backward reads, and the stream
                       of the layer's name

So two forwards of one step differ, a graph replays with fresh bits, and recomputation repeats them
(up to the next forward of the root).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._native import ops


def distributed_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def require_int64(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected an integer of 64 bits with sign, got {value!r}")
    return value


def as_normal(tensor: Tensor) -> Tensor:
    """Copies a tensor made under inference_mode to one that may be written to at any time."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


class RngState:
    """Seed and forward count. Ranks draw different bits and have the same checkpoint.

    base: (user's seed, 0); tensor: (the seed mixed with the data-parallel rank, count).
    """

    def __init__(self, seed: int, rank: int | None = None) -> None:
        self.rank = distributed_rank() if rank is None else rank
        self.seed = require_int64("seed", seed)
        self.tensor = as_normal(torch.tensor([self._mixed(), 0], dtype=torch.int64, device="cpu"))
        # (0, 1), beside the tensor
        self.step = as_normal(torch.arange(2, dtype=torch.int64, device="cpu"))
        self.is_captured = False
        self.copy: tuple[Tensor, int, Tensor] | None = None  # of which tensor and version, the copy

    def _mixed(self) -> int:
        return ops.mix_seed(self.seed, self.rank)

    def to(self, device: torch.device) -> None:
        if device.type != "meta" and self.tensor.device != device:
            self.tensor = as_normal(self.tensor.to(device))
            self.step = as_normal(self.step.to(device))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tensor, self.step = as_normal(self.tensor), as_normal(self.step)

    def advance(self) -> None:
        if torch.compiler.is_compiling() or self.step.device != self.tensor.device:
            self.tensor[1].add_(1)
        else:
            self.tensor.add_(self.step)  # the same in one op

    def current(self, device: torch.device) -> Tensor:
        """(seed, count) as they are now, in memory that nobody writes to: one copy a root forward.

        In a CUDA graph, and ever after, each call copies: replays advance the count uncounted.
        """
        self.is_captured = self.is_captured or (
            self.tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        )
        if self.is_captured or torch.is_inference_mode_enabled():
            return self.tensor.to(device, copy=True)
        source, version = self.tensor, self.tensor._version
        if self.copy is None or self.copy[0] is not source or self.copy[1] != version:
            self.copy = (source, version, source.clone())
        return self.copy[2].to(device)

    def get(self) -> Tensor:
        """(user's seed, count): the same on every rank."""
        seed = torch.full_like(self.tensor[:1], self.seed)
        return torch.cat([seed, self.tensor[1:]])

    def set(self, state: Tensor) -> None:
        self.seed = int(state[0])
        self.tensor[0].fill_(self._mixed())
        self.tensor[1].copy_(state[1])


class AdvanceRng:
    """The hook. `home`: a converted layer, whose device the state follows."""

    def __init__(self, state: RngState, home: Any) -> None:
        self.state = state
        self.home = home

    def __call__(self, module: nn.Module, args: Any) -> None:
        stream = self.home._buffers.get("stream")  # None: the layer was restored alone
        self.state.to((self.home.weight if stream is None else stream).device)
        # A checkpointed block that backward recomputes must see the count of its first run.
        recomputing = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if module.training and not recomputing:
            self.state.advance()


def find_hook(module: nn.Module) -> AdvanceRng | None:
    hooks = module._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, AdvanceRng)), None)


def remove_hook(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, AdvanceRng):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
