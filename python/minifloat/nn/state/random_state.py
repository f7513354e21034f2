"""Keeps the random state of stochastic rounding: (seed, count), in a tensor of the model's device.

    RngState           the state of all layers that one mf.quantize_ call converts: int64 (2)
    RngState.draw      returns (seed, count), which an eager layer's forward passes to the op
    RngState.trace     the same for a layer in compiled code
    random_hooks.py    hooks of the root, and of the modules between it and the layers
    recomputation.py   finds what a forward drew, where autograd recomputes it

Casts make the random bits from (seed, count), those of g in backward included. So each forward
needs a count of its own. The count is advanced in three cases:

    a module with hooks is called                   outside any other such call
    a layer is called                               outside any such call
    a layer draws a second time with one count      as where a part of the model is called twice

So two forwards draw different bits, whether the root, another method or a part of the model is
called. Evaluation advances no count, nor does a forward that no backward can follow. A recomputed
forward draws the bits of the original one (docs/numerics.md, section 7, has the limits). Several
threads may run forwards of one model at a time: they share the count, each with its own `running`.

    root is called     tensor (seed, 4) -> (seed, 5);  running.current = a copy, (seed, 5)
      block, layers    read `running.current`, to which nothing writes: backward reads it too
    root returns       running.current = None

Hooks of a compiled module run eagerly: torch would compile each as a function of its own, and
`eager_alone` forbids that. Where compiled code calls a module with hooks, they are in its graph.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import Tensor

from ..._native import ops
from ...checks import require_int
from ...private_torch import backward_id
from .recomputation import Draws, Replay, Replays, eager_alone, functions_around

CPU, META = torch.device("cpu"), torch.device("meta")  # compared faster than the names of types
GRADIENT_RNG = "gradient_rng"  # the attribute of a model with its RngState of gradients


@eager_alone
def is_in_backward() -> bool:
    """Tells whether autograd runs a backward pass in this thread."""
    return backward_id() != -1


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


class Running:
    """The forward that the layers with one RngState run now.

    Attributes:
        current: int64 (2), (seed, count) for its layers; None: no module with hooks runs. Nothing
            writes to the tensor again.
        is_advanced: whether the forward advanced the count.
        is_captured: whether it began while a CUDA graph was captured.
        copies: `current` on other devices.
        drawn: the records (Draws) of the modules that drew with `current`.
        outermost: the hooks of the module whose call is the forward.
        replay: the forwards that autograd recomputes now, if a module with hooks is recomputed.
        thread: the number that autograd gives the thread.
    """

    @eager_alone
    def __init__(self) -> None:  # torch.compile finds no attributes of the class
        self.thread: int = ops.autograd_threads.default()[0]
        self.close()

    @eager_alone
    def close(self) -> None:
        """Ends the running forward: the next one begins a new count."""
        self.begin(None, False)
        self.is_captured = False
        self.outermost: object = None
        self.replay: Replay | None = None

    @eager_alone
    def begin(self, current: Tensor | None, is_advanced: bool) -> None:
        """Sets what layers draw with from now on."""
        self.current, self.is_advanced = current, is_advanced
        self.copies: dict[torch.device, Tensor] = {}
        self.drawn: set[object] = set()

    @eager_alone
    def is_spent(self, drawer: object, device: torch.device) -> bool:
        """Tells whether a drawer needs a new count: none is there, or it is of another capture."""
        is_here = self.current is not None and drawer not in self.drawn
        return not is_here or self.is_captured != is_capturing(device)


class Place:
    """Holds the running forward of an RngState, one for all threads."""

    @eager_alone
    def __init__(self) -> None:
        self.running = Running()


class PlaceOfThread(Place, threading.local):
    """Holds one running forward for each thread."""


@eager_alone
def functions_of_training(
    is_training: bool, device: torch.device | None = None
) -> tuple[int, ...] | None:
    """Returns the autograd functions around a forward that a backward pass may follow.

    A forward of meta tensors has no values. One under no_grad has no backward pass, unless it is
    that of an autograd function, which may recompute it.

    Args:
        is_training: whether the module is in training mode.
        device: of its state; None: in compiled code.

    Returns:
        Their numbers in autograd's order. None: no backward pass may follow.
    """
    if not is_training or device == META:
        return None
    if torch.is_grad_enabled():
        return ()
    return None if torch.compiler.is_compiling() else functions_around() or None


class RngState:
    """The seed and the count of forwards. Ranks draw different bits, but save equal checkpoints.

    Several threads may run forwards at a time. Each forward has a count of its own.

    tensor: int64 (2), the user's seed mixed with the data-parallel rank, and the count.
    """

    def __init__(self, seed: int, rank: int | None = None) -> None:
        self.rank = distributed_rank() if rank is None else rank
        self.seed = require_int("seed", seed)
        mixed = ops.mix_seed(self.seed, self.rank)
        self.tensor = as_normal(torch.tensor([mixed, 0], dtype=torch.int64, device="cpu"))
        self._prepare()

    def _prepare(self) -> None:
        """Sets what a copy does not share."""
        self.agreed: set[str] = set()  # groups whose ranks were seen to share the seed
        self.place: Place = PlaceOfThread()
        self.replays = Replays()
        self.lock = threading.Lock()  # of the tensor's place

    def __getstate__(self) -> dict[str, object]:
        return {"rank": self.rank, "seed": self.seed, "tensor": self.tensor}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.tensor = as_normal(self.tensor)
        self._prepare()

    @property
    @eager_alone
    def running(self) -> Running:
        """The running forward of this thread."""
        return self.place.running

    @eager_alone
    def to(self, device: torch.device) -> None:
        if self.tensor.device != device and device != META:
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
    def begin(self, is_advanced: bool, device: torch.device | None = None) -> Tensor:
        """Begins a forward, with the next count or the present one. Returns `running.current`.

        device: that the state moves to; None: in compiled code, where it stays.
        """
        running = self.running
        if device is None:
            current = self.advance() if is_advanced else self.tensor.clone()
        else:
            with self.lock:
                self.to(device)
                current = self.advance() if is_advanced else self.tensor.clone()
            running.is_captured = is_capturing(device)
        running.begin(current, is_advanced)
        return current

    def draw(self, draws: Draws, device: torch.device, is_training: bool) -> Tensor:
        """Returns (seed, count) of one forward of a layer, in memory that is not written to again.

        Args:
            draws: the record of the layer's forwards.
            device: of the tensor that is returned.
            is_training: whether the layer is in training mode.

        Returns:
            int64 (2).
        """
        running = self.running
        functions = functions_of_training(is_training, device)
        if functions is None:
            current = self.tensor if running.current is None else running.current
            return current.to(device, copy=running.current is None)
        if is_in_backward():
            replay = running.replay or self.replays.find(draws)
            repeated = None if replay is None else replay.next(draws)
            if repeated is not None:
                return repeated
        if running.current is None:  # the layer is called by itself
            with self.lock:
                self.to(device)
                rng = self.advance()
            if running.replay is not None:
                running.close()
        else:
            if not running.is_advanced or running.is_spent(draws, device):
                self.begin(True, device)
            rng = running.current
            if rng.device != device:
                if device not in running.copies:
                    running.copies[device] = rng.to(device)
                rng = running.copies[device]
            running.drawn.add(draws)
        draws.record(rng, running.thread, functions)
        return rng

    def trace(self, is_training: bool) -> Tensor:
        """Returns (seed, count) of one forward of a layer in compiled code: int64 (2).

        Compiled code cannot record draws. So where it calls a module with hooks, and that calls a
        layer several times, all these calls draw with one count.
        """
        is_advanced = functions_of_training(is_training) is not None
        current = self.running.current
        if current is None:
            return self.advance() if is_advanced else self.tensor.clone()
        if is_advanced and not self.running.is_advanced:
            return self.begin(True)
        return current

    def get(self) -> Tensor:
        """Returns (the user's seed, count): int64 (2), equal on every rank."""
        seed = torch.full_like(self.tensor[:1], self.seed)
        return torch.cat([seed, self.tensor[1:]])

    def set(self, state: Tensor) -> None:
        """Loads a state that get returned."""
        self.seed = int(state[0])
        self.tensor[0].fill_(ops.mix_seed(self.seed, self.rank))
        self.tensor[1].copy_(state[1])
        self.running.close()


@eager_alone
def is_capturing(device: torch.device) -> bool:
    """Tells whether a CUDA graph is captured."""
    return device != CPU and device.type == "cuda" and torch.cuda.is_current_stream_capturing()


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
