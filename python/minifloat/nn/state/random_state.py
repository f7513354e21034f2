"""The random state of stochastic rounding: (seed, count) in a tensor of the model's device.

    RngState           one for all layers that one mf.quantize_ call converts; .tensor: int64 (2)
    RngState.draw      returns (seed, count), which an eager layer's forward passes to the op
    RngState.trace     the same for a layer in compiled code
    AdvanceRng         hooks of the root and of the modules between it and the layers
    Draws, Replay      what a module drew in which forward, for autograd's recomputation

A call of one of these modules begins a new count, unless it runs within such a call. So does a
layer that is called by itself, and one that would draw a second time with its last count. Two
forwards therefore differ however a model is called: by its root, by another method, or part by
part. A forward that autograd recomputes gets the bits of the original forward, with any number of
forwards in flight; docs/numerics.md, section 7, has the limits. Evaluation does not advance the
count.

    root called        tensor (seed, 4) -> (seed, 5);  current = a copy, (seed, 5)
      block, layers    read `current`
    root returns       current = None

No random bits are made here: casts, those of g in backward too, make them from (seed, count).
`current` is never written to again, so backward may read it, and code may be eager or compiled at
any of these places. torch compiles the hooks of a module that is itself compiled as functions of
their own, if they are compiled at all. So `eager_alone` exempts them: they run as in eager code,
except where a larger compiled function contains the call; there they are part of its graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._native import ops
from ...checks import require_int
from ..names import clean_name, join, unwrapped

Function = TypeVar("Function", bound=Callable[..., object])
GRADIENT_RNG = "gradient_rng"  # the attribute of a model with its RngState of gradients
FORWARDS_IN_FLIGHT = 256  # recorded forwards of one layer, which autograd may recompute


def eager_alone(function: Function) -> Function:
    """Lets compiled code contain this function, and never be the function alone.

    torch compiles a hook of a compiled module as a function of its own. In it no draw could be
    recorded, and a checkpointed call could not be recomputed. And once torch has found no operation
    in a function, as in a hook that does nothing in evaluation, it skips the function for good.

    The function has no comprehension, whose code torch compiles by itself.
    """
    dynamo = torch._C._dynamo.eval_frame  # torch._dynamo itself takes seconds to import
    alone, called = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    strategy = dynamo._FrameExecStrategy(alone, called)
    dynamo.set_code_exec_strategy(function.__code__, strategy)
    return function


@eager_alone
def is_in_backward() -> bool:
    """Tells whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


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


class Draws:
    """A record of one module's forwards: their random bits and places in autograd's order."""

    def __init__(self) -> None:
        self.last: Tensor | None = None  # RngState.current of the last forward
        self.past: deque[tuple[int, Tensor]] = deque(maxlen=FORWARDS_IN_FLIGHT)

    def __reduce__(self) -> tuple[object, ...]:
        return Draws, ()  # a copied layer has no recorded forwards

    @eager_alone
    def record(self, current: Tensor, rng: Tensor) -> None:
        """Records a forward: the state's `current`, and the same bits on the module's device."""
        self.last = current
        self.past.append((torch._C._autograd._get_sequence_nr(), rng))

    @eager_alone
    def repeated(self) -> tuple[int, Tensor] | None:
        """Finds the forward that autograd recomputes now.

        Autograd numbers its nodes in the order of their creation. Recomputation begins in the node
        that first reads a saved tensor of the checkpointed block: a node with a number after the
        layer's. With `use_reentrant=True` it begins in the checkpoint's node, with a number before.

        Returns:
            Its place in autograd's order, and (seed, count). None: no recorded forward.
        """
        node = torch._C._current_autograd_node()
        if node is None or not self.past:
            return None
        at = node._sequence_nr()
        if "Checkpoint" in type(node).__name__:
            for forward in self.past:
                if forward[0] > at:
                    return forward
            return None
        for forward in reversed(self.past):
            if forward[0] <= at:
                return forward
        if len(self.past) == FORWARDS_IN_FLIGHT:
            raise RuntimeError(
                f"linear: expected at most {FORWARDS_IN_FLIGHT} forwards of one layer between a "
                "checkpointed forward and its recomputation, got more: its random bits are gone"
            )
        return None


class Replay:
    """A call of a hooked module that autograd recomputes.

    The modules in it draw in the order of the original call, which began at `start` in autograd's
    order. So a module that it calls twice draws the bits of its first call, then of its second.
    """

    @eager_alone
    def __init__(self, start: int) -> None:
        self.start = start
        self.rest: dict[Draws, list[Tensor]] = {}  # what is left to draw, the next one last

    @eager_alone
    def next(self, draws: Draws) -> Tensor | None:
        """Returns the random bits of a module's next forward; None: it was not recorded."""
        if draws not in self.rest:
            self.rest[draws] = []
            for at, rng in reversed(draws.past):
                if at >= self.start:
                    self.rest[draws].append(rng)
        rest = self.rest[draws]
        return rest.pop() if rest else None


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
        self.current = self.advance() if is_training else self.tensor.clone()
        self.is_advanced, self.copies = is_training, {}
        return self.current

    def is_spent(self, last: Tensor | None, device: torch.device) -> bool:
        """Tells whether a drawer needs a new count: none is there, or it is of another capture.

        last: `current` of the drawer's last draw, which it does not draw with again.
        """
        is_here = self.current is not None and self.current is not last
        return not is_here or self.is_captured != is_capturing(device)

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
        is_alone = self.current is None
        if not self.is_advanced or self.is_spent(draws.last, device):
            self.begin(True, device)
        current = cast(Tensor, self.current)
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
            return self.advance() if is_training else self.tensor.clone()
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
            current = state.replay.next(self.draws)
            if current is not None:
                state.current, state.is_advanced, state.copies = current, True, {}
                state.is_captured = is_capturing(current.device)
            return
        is_repeated = self.draws.last is state.current
        if not is_within or (is_training and (not state.is_advanced or is_repeated)):
            stream = self.home.__dict__.get("stream")  # None: the layer was restored alone
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
    for name, home in homes.items():
        module, is_root = root.get_submodule(name), name == ""
        if not any(hook.state is state and hook.is_root == is_root for hook in hooks_of(module)):
            hook = AdvanceRng(state, home, is_root)
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
    """Yields the name of each root in the model, and the state that its hook advances.

    Also of each model whose gradients are cast stochastically: its name and `gradients`.
    """
    for fqn, module in unwrapped(model).named_modules():
        hook = find_hook(module)
        if hook is not None:
            yield clean_name(fqn), hook.state
        if GRADIENT_RNG in module.__dict__:
            yield join(clean_name(fqn), "gradients"), module.__dict__[GRADIENT_RNG]


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
