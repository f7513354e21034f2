"""The random state of stochastic rounding: (seed, count) in a tensor of the model's device.

    RngState           one for all layers that one mf.quantize_ call converts; .tensor: int64 (2)
    RngState.draw      returns the tensor that a layer's forward passes to the op
    AdvanceRng         forward pre-hook of the root: its training forward begins a new count
    AdvanceCompiled    forward hooks of modules between root and layers, for compiled code

A new count begins when the root is called, and when a layer would draw a second time with its last
count. So two forwards differ however a model is called: by its root, by another method, or module
by module. A forward that autograd recomputes gets the bits of the original forward, with any number
of forwards in flight. Evaluation does not advance the count.

Compiled code cannot record draws. There the outermost module of the compiled code advances the
count, on the device, unless the root or an eager module around it has done so since the last step
of an optimizer or the last mf.step. Where neither is called, a compiled module that an eager
checkpoint recomputes gets new bits: compiled code cannot tell that it runs in a backward pass.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .._native import ops
from .names import clean_name, unwrapped

FORWARDS_IN_FLIGHT = 256  # recorded forwards of one layer, which autograd may recompute


def distributed_rank() -> int:
    """Returns torch.distributed's rank; 0 without it."""
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


def is_in_backward() -> bool:
    """Tells whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


class Draws:
    """A record of one layer's forwards: their random bits and places in autograd's order."""

    def __init__(self) -> None:
        self.forward: int | None = None  # the last one, in RngState's numbers
        self.past: deque[tuple[int, Tensor]] = deque(maxlen=FORWARDS_IN_FLIGHT)

    def __reduce__(self) -> tuple[Any, ...]:
        return Draws, ()  # a copied layer has no recorded forwards

    def record(self, forward: int, rng: Tensor) -> None:
        """Records the random bits of a forward."""
        self.forward = forward
        self.past.append((torch._C._autograd._get_sequence_nr(), rng))

    def repeated(self) -> Tensor | None:
        """Finds the random bits of the forward that autograd recomputes now.

        Autograd numbers its nodes in the order of their creation. Recomputation begins in the node
        that first reads a saved tensor of the checkpointed block: a node with a number after the
        layer's. With `use_reentrant=True` it begins in the checkpoint's node, with a number before.

        Returns:
            (seed, count). None: autograd recomputes no recorded forward.
        """
        node = torch._C._current_autograd_node()
        if node is None or not self.past:
            return None
        at = node._sequence_nr()
        if "Checkpoint" in type(node).__name__:
            return next((rng for sequence, rng in self.past if sequence > at), None)
        found = next((rng for sequence, rng in reversed(self.past) if sequence <= at), None)
        if found is None and len(self.past) == FORWARDS_IN_FLIGHT:
            raise RuntimeError(
                f"linear: expected at most {FORWARDS_IN_FLIGHT} forwards of one layer between a "
                "checkpointed forward and its recomputation, got more: its random bits are gone"
            )
        return found


class RngState:
    """Seed and forward count. Ranks draw different bits, but their checkpoints are equal.

    tensor: int64 (2), the user's seed mixed with the data-parallel rank, and the count.
    """

    def __init__(self, seed: int, rank: int | None = None) -> None:
        self.rank = distributed_rank() if rank is None else rank
        self.seed = require_int64("seed", seed)
        self.tensor = as_normal(torch.tensor([self._mixed(), 0], dtype=torch.int64, device="cpu"))
        # Whether the root, or a module outside compiled code, began a forward since the last step.
        # If so, compiled code does not advance the count.
        self.is_driven = False
        self.is_traced = False  # whether a compiled module began a forward that has not ended
        self.forward = 0  # forwards begun so far
        self.agreed: set[str] = set()  # groups whose ranks were seen to share the seed
        self._close()
        STATES.add(self)

    def _close(self) -> None:
        """Makes the next draw begin a new forward."""
        self.is_open = False
        self.version = self.tensor._version  # after the last write by this class
        self.is_captured = False  # whether the open forward began in a CUDA graph's capture
        self.copies: dict[torch.device, Tensor] = {}  # (seed, count) of the open forward

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"forward": 0, "is_open": False, "copies": {}, "version": None, "is_traced": False}
        return self.__dict__ | fresh | {"agreed": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tensor = as_normal(self.tensor)
        self._close()
        STATES.add(self)

    def _mixed(self) -> int:
        return ops.mix_seed(self.seed, self.rank)

    def to(self, device: torch.device) -> None:
        if device.type == "meta" or self.tensor.device == device:
            return
        is_current = self.tensor._version == self.version
        self.tensor = as_normal(self.tensor.to(device))
        self.version = self.tensor._version if is_current else -1

    def advance(self) -> None:
        """Adds one to the count, in compiled code."""
        self.tensor[1].add_(1)

    def begin(self, device: torch.device, is_capturing: bool) -> None:
        """Begins a forward with the next count, or with the present one if a caller has set it."""
        self.to(device)
        if self.tensor._version == self.version:
            copy = ops.advance_random_state.default(self.tensor)
        else:
            copy = self.tensor.clone()
        self.version = self.tensor._version
        self.forward += 1
        self.is_open, self.is_captured = True, is_capturing
        self.copies = {} if is_capturing else {self.tensor.device: copy}

    def draw(self, draws: Draws, device: torch.device, is_training: bool) -> Tensor:
        """Returns (seed, count) of one forward of a layer, in memory that is not written to again.

        A replayed CUDA graph advances the count on the device, so a capture copies at each draw.

        Args:
            draws: the record of the layer's forwards.
            device: of the tensor that is returned.
            is_training: whether the forward is to be recorded, and may begin a new count.

        Returns:
            int64 (2).
        """
        if not is_training or torch.is_inference_mode_enabled():
            return self.tensor.to(device, copy=True)
        if is_in_backward() and (repeated := draws.repeated()) is not None:
            return repeated
        is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        is_open = self.is_open and self.is_captured == is_capturing
        is_open = is_open and self.tensor._version == self.version
        if not is_open or draws.forward == self.forward:
            self.begin(device, is_capturing)
        if is_capturing:
            rng = self.tensor.to(device, copy=True)
        else:
            if device not in self.copies:
                self.copies[device] = self.copies[self.tensor.device].to(device)
            rng = self.copies[device]
        draws.record(self.forward, rng)
        return rng

    def get(self) -> Tensor:
        """Returns (the user's seed, count): int64 (2), equal on every rank."""
        seed = torch.full_like(self.tensor[:1], self.seed)
        return torch.cat([seed, self.tensor[1:]])

    def set(self, state: Tensor) -> None:
        """Loads a state that get returned."""
        self.seed = int(state[0])
        self.tensor[0].fill_(self._mixed())
        self.tensor[1].copy_(state[1])
        self._close()


STATES: weakref.WeakSet[RngState] = weakref.WeakSet()  # of this process


def end_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Lets compiled code advance the counts again: the next step may not call the root.

    A step within a backward pass ends nothing, because checkpointed blocks are still recomputed.
    """
    if torch.compiler.is_compiling() or is_in_backward():
        return
    for state in list(STATES):
        state.is_driven = False


register_optimizer_step_post_hook(end_step)


class AdvanceRng:
    """A forward pre-hook of the root. The state moves to the device of the layer `home`."""

    def __init__(self, state: RngState, home: Any) -> None:
        self.state = state
        self.home = home

    def __call__(self, module: nn.Module, args: Any) -> None:
        state = self.state
        if not module.training:
            return
        if torch.compiler.is_compiling():
            state.advance()
            state.is_driven = True
        elif not (is_in_backward() or torch.is_inference_mode_enabled()):
            self.begin()

    def begin(self) -> None:
        """Begins a forward on the layer's device."""
        stream = self.home._buffers.get("stream")  # None: the layer was restored alone
        device = (self.home.weight if stream is None else stream).device
        is_cuda = device.type == "cuda"
        self.state.begin(device, is_cuda and torch.cuda.is_current_stream_capturing())
        self.state.is_driven = True


class AdvanceCompiled(AdvanceRng):
    """Hooks, before and after the forward, of a module between the root and its layers."""

    def __init__(self, state: RngState, home: Any) -> None:
        super().__init__(state, home)
        self.forward: int | None = None  # the last one that called the module
        self.is_outermost = False  # whether tracing entered compiled code through this module

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"forward": None, "is_outermost": False}

    def __call__(self, module: nn.Module, args: Any) -> None:
        state = self.state
        if not module.training:
            return
        if torch.compiler.is_compiling():
            if not (state.is_driven or state.is_traced):
                state.advance()
                state.is_traced = self.is_outermost = True
        elif not (is_in_backward() or torch.is_inference_mode_enabled()):
            if not state.is_open or self.forward == state.forward:
                self.begin()
            self.forward = state.forward
            state.is_driven = True

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() and self.is_outermost:
            self.state.is_traced = self.is_outermost = False


def add_hooks(root: nn.Module, state: RngState, layers: list[Any]) -> None:
    """Adds hooks to the root and to all modules between the root and the given layers."""
    drawing = {id(layer) for layer in layers}
    holders: set[str] = set()
    for name, module in root.named_modules():
        names = name.split(".") if id(module) in drawing else []
        holders.update(".".join(names[:i]) for i in range(1, len(names)))
    for name, module in root.named_modules():
        if name in holders and not any(type(h) is AdvanceCompiled for h in hooks_of(module)):
            hook = AdvanceCompiled(state, layers[0])
            module.register_forward_pre_hook(hook)
            module.register_forward_hook(hook.after)
    if find_hook(root) is None:
        root.register_forward_pre_hook(AdvanceRng(state, layers[0]))


def hooks_of(module: nn.Module) -> list[AdvanceRng]:
    return [h for h in module._forward_pre_hooks.values() if isinstance(h, AdvanceRng)]


def find_hook(module: nn.Module) -> AdvanceRng | None:
    """Finds the hook of a root; None where the module is no root."""
    return next((hook for hook in hooks_of(module) if type(hook) is AdvanceRng), None)


def states_of(model: nn.Module) -> Iterator[tuple[str, RngState]]:
    """Yields the name of each root in the model, and the state that its hook advances."""
    for fqn, module in unwrapped(model).named_modules():
        hook = find_hook(module)
        if hook is not None:
            yield clean_name(fqn), hook.state


def remove_hooks(module: nn.Module) -> None:
    for hooks, options in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", hook), AdvanceRng):
                del hooks[key]
                options.pop(key, None)


def require_shared_seed(state: RngState, group: dist.ProcessGroup, name: str = "linear") -> None:
    """Raises ValueError where ranks of a weight differ in seed or count; checks each group once.

    name: for errors.
    """
    if group.group_name in state.agreed:
        return
    both = torch.cat([state.tensor, -state.tensor])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    if not torch.equal(both[:2], -both[2:]):
        raise ValueError(
            f"{name}: expected tensor-parallel ranks to share the seed and count of stochastic "
            f"rounding, got {state.get().tolist()} mixed with rank {state.rank} here; pass "
            "mf.quantize_ the data_parallel_rank that they share"
        )
    state.agreed.add(group.group_name)
