"""The random state of stochastic rounding: (seed, count) in a tensor of the model's device.

    RngState           one for all layers that one mf.quantize_ call converts; .tensor: int64 (2)
    RngState.draw      returns what an eager layer's forward passes to the op
    RngState.trace     the same for a layer in compiled code
    AdvanceRng         hooks of the root and of the modules between it and the layers

A call of one of these modules begins a new count, unless it runs within such a call. So does a
layer that is called by itself, and one that would draw a second time with its last count. Two
forwards therefore differ however a model is called: by its root, by another method, or part by
part. A forward that autograd recomputes gets the bits of the original forward, with any number of
forwards in flight; docs/numerics.md, section 7, has the limits. Evaluation does not advance the
count.

    root called        tensor (seed, 4) -> (seed, 5);  current = a copy, (seed, 5)
      block, layers    read `current`
    root returns       current = None

`current` is never written to again, so autograd may save it, and code may be eager or compiled at
any of these places. torch compiles the hooks of a module that is itself compiled as functions of
their own, if they are compiled at all. So `eager_alone` exempts them: they run as in eager code,
except where a larger compiled function contains the call; there they are part of its graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._native import ops
from ...checks import require_int
from ..names import clean_name, unwrapped
from .draws import Draws, Replay, eager_alone, is_in_backward


def distributed_rank() -> int:
    """Returns torch.distributed's rank; 0 without it."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@eager_alone
def as_normal(tensor: Tensor) -> Tensor:
    """Copies a tensor made under inference_mode to one that may be written to at any time."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


class RngState:
    """Seed and forward count. Ranks draw different bits, but their checkpoints are equal.

    tensor: int64 (2), the user's seed mixed with the data-parallel rank, and the count.
    current: int64 (2), what the layers of the running forward draw with; None: no hooked module
        runs. It is not written to again.
    """

    def __init__(self, seed: int, rank: int | None = None) -> None:
        self.rank = distributed_rank() if rank is None else rank
        self.seed = require_int("seed", seed)
        mixed = ops.mix_seed(self.seed, self.rank)
        self.tensor = as_normal(torch.tensor([mixed, 0], dtype=torch.int64, device="cpu"))
        self.agreed: set[str] = set()  # groups whose ranks were seen to share the seed
        self.close()

    @eager_alone
    def close(self) -> None:
        """Ends the running forward: the next one begins a new count."""
        self.current: Tensor | None = None
        self.is_advanced = False  # whether the running forward began a new count
        self.is_captured = False  # whether it began in a CUDA graph's capture
        self.copies: dict[torch.device, Tensor] = {}  # `current` on other devices
        self.replay: Replay | None = None  # what autograd recomputes, if it is a hooked module

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"current": None, "copies": {}, "replay": None, "agreed": set()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.tensor = as_normal(self.tensor)
        self.close()

    @eager_alone
    def to(self, device: torch.device) -> None:
        if device.type != "meta" and self.tensor.device != device:
            self.tensor = as_normal(self.tensor.to(device))

    @eager_alone
    def advance(self) -> Tensor:
        """Adds one to the count, except in inference mode. Returns a copy: int64 (2).

        Raises:
            RuntimeError: autograd recomputes compiled code, which has no record of its draws.
        """
        return ops.advance_random_state.default(
            self.tensor, in_forward=torch.compiler.is_compiling()
        )

    @eager_alone
    def begin(self, is_training: bool, device: torch.device | None = None) -> Tensor:
        """Begins a forward, in training mode with the next count. Returns `current`.

        device: that the state moves to; None: in compiled code, where it stays.
        """
        if device is not None:
            self.to(device)
            self.is_captured = is_capturing(device)
        if is_training:
            self.current = self.advance()
        else:
            self.current = self.tensor.clone()
        self.is_advanced, self.copies = is_training, {}
        return self.current

    @eager_alone
    def repeat(self, current: Tensor | None) -> None:
        """Lets modules draw with the bits of the call that autograd recomputes."""
        if current is not None:
            self.current, self.is_advanced, self.copies = current, True, {}
            self.is_captured = is_capturing(current.device)

    def draw(self, draws: Draws, device: torch.device, is_training: bool) -> Tensor:
        """Returns (seed, count) of one forward of a layer, in memory that is not written to again.

        Args:
            draws: the record of the layer's forwards.
            device: of the tensor that is returned.
            is_training: whether the forward is to be recorded, and may begin a new count.

        Returns:
            int64 (2).
        """
        if not is_training:
            if self.current is None:
                return self.tensor.to(device, copy=True)
            return self.current.to(device)
        if is_in_backward():
            if self.replay is not None:
                repeated = self.replay.next(draws)
            else:
                _, repeated = draws.repeated() or (0, None)
            if repeated is not None:
                return repeated
        is_alone, current = self.current is None, self.current
        is_new = is_alone or not self.is_advanced or draws.last is current
        if current is None or is_new or self.is_captured != is_capturing(device):
            current = self.begin(True, device)
        if device not in self.copies:
            self.copies[device] = current.to(device)
        rng = self.copies[device]
        draws.record(current, rng)
        if is_alone:
            self.close()
        return rng

    def trace(self, is_training: bool) -> Tensor:
        """Returns (seed, count) of one forward of a layer in compiled code: int64 (2).

        Compiled code cannot record draws: all calls of a layer within one call of a module that
        compiled code contains have one count.
        """
        if self.current is None:
            if is_training:
                return self.advance()
            return self.tensor.clone()
        if is_training and not self.is_advanced:
            return self.begin(True)
        return self.current

    def get(self) -> Tensor:
        """Returns (the user's seed, count): int64 (2), equal on every rank."""
        seed = torch.full_like(self.tensor[:1], self.seed)
        return torch.cat([seed, self.tensor[1:]])

    def set(self, state: Tensor) -> None:
        """Loads a state that get returned."""
        self.seed = int(state[0])
        self.tensor[0].fill_(ops.mix_seed(self.seed, self.rank))
        self.tensor[1].copy_(state[1])
        self.close()


@eager_alone
def is_capturing(device: torch.device) -> bool:
    """Tells whether a CUDA graph is captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class AdvanceRng:
    """Hooks of a module that holds layers, before and after its forward.

    Args:
        state: of these layers.
        home: a layer that the module holds, on whose device the state is.
        is_root: whether the module is the one that mf.quantize_ was called with.
    """

    def __init__(self, state: RngState, home: nn.Module, is_root: bool) -> None:
        self.state = state
        self.home = home
        self.is_root = is_root
        self.draws = Draws()
        self.is_outermost = False  # whether the running call is within no other

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"is_outermost": False}

    @eager_alone
    def before(self, module: nn.Module, args: object) -> None:
        """Begins a count, unless the module runs within a call that did so."""
        state, is_training = self.state, module.training
        is_within = not self.is_root and state.current is not None
        if not is_within:
            self.is_outermost = True
        if torch.compiler.is_compiling():
            if not is_within or (is_training and not state.is_advanced):
                state.begin(is_training)
            return
        if not is_within:
            repeated = self.draws.repeated() if is_in_backward() else None
            if repeated is not None:
                state.replay = Replay(repeated[0])
        if state.replay is not None:
            state.repeat(state.replay.next(self.draws))
            return
        is_repeated = self.draws.last is state.current
        if not is_within or (is_training and (not state.is_advanced or is_repeated)):
            stream = self.home._buffers.get("stream")  # None: the layer was restored alone
            home = self.home.weight if stream is None else stream
            state.begin(is_training, cast(Tensor, home).device)
        if is_training and state.current is not None:
            self.draws.record(state.current, state.current)

    @eager_alone
    def after(self, module: nn.Module, args: object, output: object) -> None:
        """Ends the forward that `before` began, also where it raised an exception."""
        if self.is_outermost:
            self.is_outermost = False
            self.state.close()


def add_hooks(root: nn.Module, state: RngState, layers: Sequence[nn.Module]) -> None:
    """Adds hooks to the root and to all modules between the root and the given layers."""
    drawing = {id(layer) for layer in layers}
    homes: dict[str, nn.Module] = {"": layers[0]}  # of each such module, its first drawing layer
    for name, module in root.named_modules():
        names = name.split(".") if id(module) in drawing else []
        for i in range(1, len(names)):
            homes.setdefault(".".join(names[:i]), module)
    for name, module in root.named_modules():
        is_root = name == ""
        if name in homes and not any(
            hook.state is state and hook.is_root == is_root for hook in hooks_of(module)
        ):
            hook = AdvanceRng(state, homes[name], is_root)
            module.register_forward_pre_hook(hook.before)
            # Compiled code has a guard for the key of a hook after the forward. With the keys of
            # register_forward_hook, which counts them, no two blocks would share a graph.
            key = next(key for key in count(-1, -1) if key not in module._forward_hooks)
            module._forward_hooks[key] = hook.after
            module._forward_hooks_always_called[key] = True  # whatever the forward raises


def hooks_of(module: nn.Module) -> list[AdvanceRng]:
    owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    return [owner for owner in owners if isinstance(owner, AdvanceRng)]


def find_hook(module: nn.Module) -> AdvanceRng | None:
    """Finds the hooks of a root; None where the module is no root."""
    return next((hook for hook in hooks_of(module) if hook.is_root), None)


def states_of(model: nn.Module) -> Iterator[tuple[str, RngState]]:
    """Yields the name of each root in the model, and the state that its hook advances."""
    for fqn, module in unwrapped(model).named_modules():
        hook = find_hook(module)
        if hook is not None:
            yield clean_name(fqn), hook.state


def remove_hooks(module: nn.Module, kept: Sequence[AdvanceRng] = ()) -> None:
    """Removes the hooks that advance a state, except `kept`."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, AdvanceRng) and owner not in kept:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


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
