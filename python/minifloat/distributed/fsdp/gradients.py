"""mf.distributed.quantize_gradients_ makes FSDP2's reduce-scatters send gradients as codes.

    gradients of a rank    (world, cols): row d is the flat chunk of all parameters for rank d
    cast                   each row becomes a message for its rank: codes, then scales
    all-to-all             one collective sends all messages
    sum                    adds a rank's messages in fp32, rank 0's first, and rounds once, to
                           FSDP2's reduce_dtype
    FSDP2                  all-reduces the sum under HSDP, then divides by the number of ranks

include/minifloat/messages.h has the layout of a message. docs/distributed.md says why the division
comes last, and which random bits are drawn.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._native import ops
from ...checks import require_int, require_module
from ...nn.names import clean_name, join, unwrapped
from ...nn.state.random_state import GRADIENT_RNG, Place, RngState
from ...spec import Spec
from ..handshake import raise_on_all, require_same
from .private_state import UnknownFsdpError, groups_of, mesh_of, policy_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from .private_state import FSDPParamGroup

ALIKE = "quantize_gradients_: expected all ranks to send gradients alike"
ARRIVE = "quantize_gradients_: expected all {} ranks to call it, for {}"


@dataclass
class GradientCodes:
    """The settings that all reduce-scatters of one model share.

    Args:
        spec: of the codes in messages.
        state: seed and count of stochastic rounding; its rank is not used.
        model: the argument of mf.distributed.quantize_gradients_.
    """

    spec: Spec
    state: RngState
    model: weakref.ref[nn.Module]
    is_complete: bool = False  # whether all sharded modules were seen to have such a reduce-scatter


class ReduceScatterOfCodes:
    """The reduce-scatter of one FSDP2 module: torch's ReduceScatter protocol.

    Args:
        name: of the module, from which its stream of random bits comes.
        rank: this rank's place among those that the module's gradients are summed over.
        shared: by the modules of the model.
    """

    def __init__(self, name: str, rank: int, shared: GradientCodes) -> None:
        self.name, self.rank, self.shared = name, rank, shared
        self.stream = ops.stream(join(name, "gradients"))

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocates FSDP2's input and output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Writes the sum of all ranks' chunks of this rank. It is ordered on the current stream.

        Args:
            output_tensor: (cols), float32 or bfloat16.
            input_tensor: (world * cols), as output_tensor.
            group: the ranks that shard the module.
            op: SUM: set_force_sum_reduction_for_comms is on.
            async_op: is ignored; FSDP2 passes False.
        """
        self._require_complete()
        spec = self.shared.spec
        chunks = input_tensor.view(group.size(), output_tensor.numel())
        if spec.is_bf16:
            sent = chunks.to(torch.bfloat16).view(torch.uint8)
        else:
            rng = self._draw(input_tensor.device) if spec.is_stochastic else None
            sent = ops.quantize_messages(chunks, spec.text, rng=rng, stream=self.stream)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        ops.sum_messages(received, spec.text, output_tensor)

    def _draw(self, device: torch.device) -> Tensor:
        """Returns (seed, count) of this reduction: int64 (2).

        All modules of a step have one count. It begins with the first module that draws again.
        """
        state = self.shared.state
        if state.running.is_spent(self, device):
            state.begin(True, device)
        state.running.drawn.add(self)
        rng = cast(Tensor, state.running.current).clone()
        rng[0].fill_(ops.mix_seed(state.seed, self.rank))  # a fill waits for no copy from the host
        return rng

    def _require_complete(self) -> None:
        """Raises ValueError in the first reduction where fully_shard was called later."""
        model = None if self.shared.is_complete else self.shared.model()
        for name, _, fsdp_group in () if model is None else sharded_modules(model):
            if not isinstance(fsdp_group._reduce_scatter_comm, ReduceScatterOfCodes):
                raise ValueError(
                    "quantize_gradients_: expected all calls of fully_shard before it, got "
                    f"{name or 'the model'!r} sharded later; call it again"
                )
        self.shared.is_complete = True


def quantize_gradients_(model: nn.Module, spec: str = "e4m3/1x128+sr", *, seed: int = 0) -> None:
    """Makes FSDP2 send the gradients of a sharded model to their ranks as codes, in place.

    Each rank casts its gradients to `spec`, in runs of a block's length of the flat chunk of each
    rank. One all-to-all moves codes and scales; the receiver adds them up in float32, in the order
    of ranks. Call it after the last fully_shard, on all ranks: they wait for each other and compare
    what they passed. A second call, on all ranks too, replaces the first.

    Args:
        model: with modules that torch.distributed.fsdp.fully_shard has sharded.
        spec: "e4m3/1x128", "mxfp8", "mxfp8/e5m2", "mxfp4" or "e1m2/1x32", with `+exact` or `+floor`
            or without, to nearest or `+sr`; "bf16": values in bfloat16, with the same sums in
            float32.
        seed: of `+sr`, equal on all ranks. Ranks, modules and steps draw other bits.
            mf.training_state has seed and count as "gradients.rng".

    Raises:
        TypeError: `model` is no module, `spec` no str, or `seed` no int. Where there are other
            ranks it is a ValueError.
        ValueError: nothing is sharded; the spec has a scale of a tensor, a row or 2D blocks, or a
            transform; a module's gradients are not reduced in float32 or bfloat16, or by another
            reduce-scatter than torch's; blocks would span parameters that tensor-parallel ranks
            share and others; modules, spec or seed differ between ranks, or one is missing. Every
            rank raises it, and the model is unchanged then.
        UnknownFsdpError: this torch's FSDP2 has other private names than those that are read here.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> model = torch.nn.Linear(64, 32)
        >>> model = fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        >>> mf.distributed.quantize_gradients_(model, "e4m3/1x128+sr", seed=7)
        >>> mf.training_state(model)
        {'gradients.rng': tensor([7, 0])}
        >>> mf.distributed.destroy_process_group()
    """
    modules: list[tuple[str, FSDPModule, FSDPParamGroup]] = []
    try:
        model = unwrapped(require_module("quantize_gradients_", model))
        modules = list(sharded_modules(model))
        parsed = Spec.parse(spec)
        ops.message_bytes(parsed.text, 0)  # raises for a spec that messages cannot have
        state = RngState(require_int("quantize_gradients_: seed", seed), rank=0)
        if not modules:
            raise ValueError(
                "quantize_gradients_: expected a model that fully_shard has sharded, got "
                f"{type(model).__name__} without a sharded module; FSDP1, DistributedDataParallel "
                "and sharded masters reduce gradients by other calls"
            )
        ranks = [_checked_rank(name or "the model", group, parsed) for name, _, group in modules]
    except (TypeError, ValueError) as error:
        raise_on_all(error, _group_of(modules[0][2]) if modules else None)
    state.place = Place()  # several threads reduce the gradients of one step
    shared = GradientCodes(parsed, state, weakref.ref(model))
    drawn = f" from seed {state.seed}" if parsed.is_stochastic else ""
    _require_same(modules, f"{parsed.text}{drawn}")
    for (name, module, group), rank in zip(modules, ranks):
        module.set_custom_reduce_scatter(cast(Any, ReduceScatterOfCodes(name, rank, shared)))
        # Of a rank alone torch's copy divides, and a forced sum would be divided again.
        is_alone = cast(Any, _group_of(group)).size() == 1
        module.set_force_sum_reduction_for_comms(not is_alone)
    for part in model.modules():  # of earlier calls, on parts too
        part.__dict__.pop(GRADIENT_RNG, None)
    if parsed.is_stochastic:
        model.__dict__[GRADIENT_RNG] = state


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, FSDPModule, FSDPParamGroup]]:
    """Yields the name, module and parameter group of each module that FSDP2 has sharded."""
    from torch.distributed.fsdp import FSDPModule

    for fqn, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in groups_of(module._get_fsdp_state()):
                yield clean_name(fqn), module, group


def _group_of(group: FSDPParamGroup) -> dist.ProcessGroup | None:
    """Returns the ranks that shard a parameter group; None: no ranks do."""
    return getattr(group.mesh_info, "shard_process_group", None)


def _require_same(modules: Sequence[tuple[str, FSDPModule, FSDPParamGroup]], how: str) -> None:
    """Raises ValueError on all ranks where they send gradients otherwise, or one does not call."""
    names: dict[dist.ProcessGroup, list[str]] = {}
    for name, _, group in modules:
        ranks = cast("dist.ProcessGroup", _group_of(group))
        names.setdefault(ranks, []).append(name or "the model")
    for ranks, of_ranks in names.items():
        require_same(
            "mf.distributed.quantize_gradients_ of",
            f"the gradients of {', '.join(map(repr, of_ranks))} as {how}",
            ranks,
            expected=ARRIVE,
            differs=ALIKE,
        )


def _checked_rank(name: str, group: FSDPParamGroup, spec: Spec) -> int:
    """Returns this rank's place among those that sum the group's gradients, after all checks.

    Raises:
        ValueError, UnknownFsdpError: as those of quantize_gradients_.
    """
    mesh, found, is_torchs = mesh_of(group)
    try:
        parameters = [cast(Any, p.sharded_param) for p in group.fsdp_params]
        policy = policy_of(group)
    except AttributeError as error:
        raise UnknownFsdpError(error) from error
    if mesh is None:
        raise ValueError(
            f"quantize_gradients_: expected {name!r} sharded by fully_shard, got replicate, whose "
            "gradients are reduced by all-reduce alone"
        )
    if not is_torchs and not isinstance(found, ReduceScatterOfCodes):
        raise ValueError(
            f"quantize_gradients_: expected torch's reduce-scatter in {name!r}, got "
            f"{type(found).__name__}"
        )
    dtypes = {policy.reduce_dtype or policy.param_dtype or p.dtype for p in parameters}
    if not dtypes <= {torch.float32, torch.bfloat16}:
        raise ValueError(
            "quantize_gradients_: expected gradients that are reduced in float32 or bfloat16 "
            f"(MixedPrecisionPolicy's reduce_dtype), got {', '.join(map(str, dtypes))} in {name!r}"
        )
    is_cut = {any(at.is_shard() for at in p.placements[mesh.ndim :]) for p in parameters}
    if len(is_cut) > 1 and not spec.is_bf16:
        raise ValueError(
            f"quantize_gradients_: expected parameters of {name!r} that tensor-parallel ranks all "
            "shard or all share, got both: blocks would span them, and round the shared ones "
            "differently on each of these ranks; shard the two kinds apart, or pass 'bf16'"
        )
    return cast("list[int]", mesh.mesh.flatten().tolist()).index(dist.get_rank())
