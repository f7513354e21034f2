"""Plans how FSDP2 gathers a sharded weight, as codes or in the compute dtype, and gathers it.

The recipe decides the plan:

    one      fprop and dgrad read one format whose codes transpose exactly: its rowwise codes are
             gathered, and dgrad's are transposed from them
    split    two formats, or two directions of one, whose codes have equal sizes: fprop's are
             gathered before forward, dgrad's before backward
    both     both are gathered each time, where they have less than 16 bits a weight together. It is
             for codes of unequal sizes, because each of FSDP2's gathers moves as many bytes as its
             first; and for one gather that serves forward and backward
    None     the weight is gathered in the compute dtype, as by FSDP2 alone; the report has the
             reason

The first gather changes "split" where one gather serves forward and backward, or where codes of the
shards have unequal sizes: to "both", or to None where both have 16 bits or more.

FSDP2's hooks call a Gather, which has the plan:

    the first gather    ranks compare their compute dtypes, and check that the shards allow the plan
    before a gather     `send`: the shard -> this rank's inputs of the all-gather
    after it            `receive`: the inputs of all ranks -> the gathered weight

linear_gather.py gathers the codes of linear layers, expert_gather.py those of experts.
recomputed.py gets what a forward reads that backward runs again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...nn.state.random_state import is_in_backward
from ...nn.state.recipe_state import RecipeState
from ...recipe import Recipe
from ...spec import Spec
from ...tensor.quantized_tensor import NOMINAL_DTYPES
from ..handshake import SAME_WEIGHT, agree, require_same
from .private_state import UnknownFsdpError, find_fsdp_group, policy_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .private_state import FSDPParamGroup

GatherInputs = tuple[Sequence[Tensor], object]  # of the all-gather, and what `receive` gets
Received = tuple[Tensor, tuple[Tensor, ...]] | None  # the gathered weight and its memory
BF16_BITS = 16
FORWARD, BACKWARD, BOTH_GATHERS = 0, 1, 2  # the gathers whose directions a cast selects


# ---- plans ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GatherPlan:
    """How a weight is gathered: the mode, and the specs in which fprop and dgrad read it."""

    mode: str  # "one", "both" or "split"
    row: str
    col: str
    is_cut_by_rows: bool = True  # False: between experts

    @property
    def is_smaller_than_bf16(self) -> bool:
        """Tells whether both directions together have fewer bits than bf16."""
        return Spec.parse(self.row).bits + Spec.parse(self.col).bits < BF16_BITS

    @property
    def bits_of_step(self) -> float:
        """The bits an element of the gathers before forward and before backward together."""
        row, col = Spec.parse(self.row).bits, Spec.parse(self.col).bits
        return {"one": 2 * row, "split": row + col, "both": 2 * (row + col)}[self.mode]

    def __str__(self) -> str:
        row, col = Spec.parse(self.row), Spec.parse(self.col)
        if self.mode == "one":
            return f"weight is gathered as {self.row}, {row.bits:.4g} bits"
        bits, points = row.bits + col.bits, col.transform
        if self.mode == "split":
            how = f"weight is gathered as {self.row}, for backward as columnwise {self.col}"
            each = " and ".join(dict.fromkeys((f"{row.bits:.4g}", f"{col.bits:.4g}")))
            both = "both" if self.is_smaller_than_bf16 else "unquantized"
            how = (
                f"{how}, {each} bits; for the backward of a checkpointed block as both, "
                f"{bits:.4g} bits; {both} where one gather serves forward and backward"
            )
        else:
            how = f"weight is gathered as {self.row} and columnwise {self.col}, {bits:.4g} bits"
        if points == 0 or not self.is_cut_by_rows:
            return how
        return f"{how}; unquantized where a chunk's rows are no multiple of {points}"


def plan_gather(recipe: Recipe) -> tuple[GatherPlan | None, str]:
    """Plans the gathers of a layer's weight.

    Args:
        recipe: the formats of the layer's three products.

    Returns:
        The plan, or None for the compute dtype; and the sentence that mf.quantize_ reports.
    """
    row, col = Spec.parse(recipe.fprop.b), Spec.parse(recipe.dgrad.b)
    for spec, product in ((row, "fprop"), (col, "dgrad")):
        if spec.is_bf16 or spec.is_stochastic:
            of_random = f"{spec.text} draws bits in each forward"
            why = f"{product} reads it so" if spec.is_bf16 else of_random
            return None, f"weight is gathered in the compute dtype: {why}"
    plan = GatherPlan("split", row.text, col.text)
    if row == col and row.transposes_exactly:
        plan = replace(plan, mode="one")
    elif row.code_bits != col.code_bits and plan.is_smaller_than_bf16:
        plan = replace(plan, mode="both")
    return plan, str(plan)


def plan_experts(recipe: Recipe) -> tuple[GatherPlan | None, str]:
    """Plans the gathers of experts' weights, which FSDP2 cuts between experts.

    Args, Returns: as those of plan_gather.
    """
    plan, sentence = plan_gather(recipe)
    if plan is None:
        return None, sentence
    if plan.mode == "split" and Spec.parse(plan.col).is_delayed:
        if plan.is_smaller_than_bf16:
            plan = replace(plan, mode="both", is_cut_by_rows=False)
            return plan, f"{plan}; in the compute dtype where it is cut along dimension 1"
        why = f"{plan.col} of dgrad alone has a history, which forward records"
        return None, f"weight is gathered in the compute dtype: {why}"
    plan = replace(plan, is_cut_by_rows=False)
    return plan, f"{plan}; in the compute dtype where it is cut along dimension 1"


# ---- gathers -------------------------------------------------------------------------------------


class Gather:
    """Gathers one parameter, which FSDP2 shards along dimension 0 over the ranks of a group.

    Args:
        module: it has the parameter.
        plan: the formats that are gathered, and when.
        name: of the parameter and its recipe, for messages.
        shape: of the parameter on all ranks of the group together.
        group: the ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: GatherPlan,
        name: str,
        shape: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        self._module = weakref.ref(module)
        self.plan, self.group, self.shape = plan, group, tuple(shape)
        self.title = f"{name}, weight {self.shape}"
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.chunk = -(-shape[0] // self.world)  # rows, or experts, of a full shard
        self.dtype: torch.dtype | None = None  # that all ranks agreed on; None before
        self.rounded_to: torch.dtype | None = None  # before the cast: autocast's dtype, or that one
        self.shard_dtype: torch.dtype | None = None  # of the last gather
        self.on_demand: set[int] = set()  # gathers whose directions were read after the other one
        self.reason = ""  # for a gather in that dtype instead of codes
        self._fsdp_group: Callable[[], FSDPParamGroup | None] = lambda: None  # a weak reference

    def __deepcopy__(self, memo: object) -> Gather:
        return self  # guards of compiled code copy it, and compare the copy

    def __str__(self) -> str:
        how = f"weight is gathered in {self.dtype}: {self.reason}" if self.reason else self.plan
        return f"{how}, in {self.world} shards"

    def module(self) -> RecipeState:
        return cast(RecipeState, self._module())

    @property
    def is_quantized(self) -> bool:
        return self.dtype is not None and not self.reason

    # ---- codes, of each kind of weight -----------------------------------------------------------

    def forget(self) -> None:
        """Looks at FSDP2's parameters and at the layers again in the next gather."""

    def note_write(self) -> None:
        """Notes that an op may have written to the shard."""

    def note_alias(self) -> None:
        """Notes that other tensors have the shard's memory, whose writes no method is told of."""

    def reason_against_codes(self) -> str:
        """Returns why the shards cannot be gathered as codes; "" where they can."""
        return ""

    def sends_alike(self) -> bool:
        """Tells whether the codes of both directions have equal sizes."""
        raise NotImplementedError

    def send_codes(self, shard: Tensor) -> GatherInputs:
        """Returns the codes that this rank sends, and what receive_codes gets."""
        raise NotImplementedError

    def receive_codes(self, outputs: Sequence[Tensor], sent: Any, is_first: bool) -> Received:
        """Fills the gathered weight; returns it and its memory at the first gather."""
        raise NotImplementedError

    # ---- FSDP2's hooks ---------------------------------------------------------------------------

    def send(self, shard: Tensor, dtype: torch.dtype | None) -> GatherInputs:
        """Returns this rank's inputs of the all-gather, and what `receive` gets.

        Args:
            shard: this rank's part of the parameter.
            dtype: FSDP2's compute dtype; None: its hook does not pass it.
        """
        self.require_dtype(shard)
        if self.dtype is None:
            self._decide(dtype, shard.device)
        if self.reason:
            return (self._padded(shard),), None
        return self.send_codes(shard)

    def receive(self, outputs: Sequence[Tensor], sent: Any, out: object) -> Received:
        """Makes the gathered weight and its memory in the first gather; later gathers fill them."""
        if sent is not None:
            return self.receive_codes(outputs, sent, out is None)
        whole = outputs[0].view(-1, *self.shape[1:])[: self.shape[0]]
        return None if out is not None else (whole, ())

    def _decide(self, dtype: torch.dtype | None, device: torch.device) -> None:
        """Agrees on the dtype that FSDP2 computes in, and decides whether codes are gathered.

        Raises:
            ValueError: as handshake.agree; or FSDP2 is to reshard to a smaller mesh.
        """
        if getattr(self.fsdp_group(), "_use_post_forward_mesh", False):
            raise ValueError(
                "fully_shard: reshard_after_forward: expected True or False around weights that "
                f"are gathered as codes ({self.title}), got a number of ranks; for such a number "
                "pass mf.quantize_ gather='compute_dtype'"
            )
        self.dtype = self.rounded_to = agree(self.title, dtype, self.group)
        if torch.is_autocast_enabled(device.type):
            self.rounded_to = torch.get_autocast_dtype(device.type)
        if self.rounded_to not in NOMINAL_DTYPES or self.dtype not in NOMINAL_DTYPES:
            self.reason = "codes are made of float32 or bfloat16"
            return
        self.reason = self.reason_against_codes()
        if self.reason or self.plan.mode != "split":
            return
        why = "" if self.sends_alike() else "codes of its two directions have unequal sizes"
        if not self.is_gathered_for_backward():
            why = "one gather is to serve forward and backward"
        if why and self.plan.is_smaller_than_bf16:
            self.plan = replace(self.plan, mode="both")
        else:
            self.reason = why

    def meet(self, kind: str, expected: str, absent: str) -> None:
        """Waits for all ranks before an exchange that not every gather makes.

        Args:
            kind, expected, absent: as those of handshake.meet.
        """
        differs, title = SAME_WEIGHT, self.title
        require_same(kind, title, self.group, expected=expected, absent=absent, differs=differs)

    def require_dtype(self, shard: Tensor) -> None:
        """Raises ValueError where FSDP2 would compute in another dtype than at the first gather."""
        before, self.shard_dtype = self.shard_dtype, shard.dtype
        if before in (None, shard.dtype):
            return
        group = self.fsdp_group()
        if group is None or policy_of(group).param_dtype is None:
            self.shard_dtype = before
            raise ValueError(
                f"fully_shard: expected shards of {before}, as at the first gather, of "
                f"{self.title}, got {shard.dtype}; FSDP2's memory has that dtype. Call .to before "
                "the first forward, or give fully_shard MixedPrecisionPolicy(param_dtype=...)"
            )

    def _padded(self, shard: Tensor) -> Tensor:
        """Returns the shard in the compute dtype, padded with zeros to the size of a full shard."""
        assert self.dtype is not None
        if len(shard) == self.chunk:
            return shard.to(self.dtype)
        chunk = shard.new_zeros(self.chunk, *shard.shape[1:], dtype=self.dtype)
        chunk[: len(shard)] = shard
        return chunk

    # ---- when FSDP2 gathers ----------------------------------------------------------------------

    def fsdp_group(self) -> FSDPParamGroup | None:
        """Returns FSDP2's parameter group; None where it is not found."""
        group = self._fsdp_group()
        if group is None:
            try:
                group = find_fsdp_group(self.module())
                self._fsdp_group = weakref.ref(group)
            except (LookupError, UnknownFsdpError):
                return None
        return group

    def is_gathered_for_backward(self) -> bool:
        """Tells whether FSDP2 reshards the weight after forward.

        FSDP2 has no public name for this flag. False where the private name has changed: the
        gathers then move more bits of the same values.
        """
        return bool(getattr(self.fsdp_group(), "_reshard_after_forward", False))

    def serves_forward_alone(self) -> bool:
        """Tells whether FSDP2 will gather again before backward; False without its state."""
        group: Any = None if is_in_backward() else self.fsdp_group()
        try:  # an enum's property `name` is slow
            is_forward = group._training_state._name_ == "FORWARD"
        except AttributeError:
            return False
        return is_forward and bool(getattr(group, "_reshard_after_forward", False))

    def held_shard(self, device: torch.device) -> Tensor:
        """Returns this rank's part of the parameter on the device that computes."""
        group = self.fsdp_group()
        for parameter in () if group is None else group.fsdp_params:
            local: Any = cast("DTensor", parameter.sharded_param)._local_tensor
            if getattr(local, "weight_gather", None) is self:
                return cast(Tensor, local.shard).to(device)
        raise UnknownFsdpError(f"no parameter of {self.title}")

    def gather_apart(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Gathers inputs of bytes of all ranks in one collective, apart from FSDP2's gathers."""
        of_rank = torch.cat(list(inputs))
        gathered = of_rank.new_empty(self.world, len(of_rank))
        dist.all_gather_into_tensor(gathered.view(-1), of_rank, group=self.group)
        outputs = [t.new_empty(self.world, len(t)) for t in inputs]
        torch.split_with_sizes_copy(gathered, [len(t) for t in inputs], dim=1, out=outputs)
        return [output.view(-1) for output in outputs]

    # ---- directions that FSDP2's last gather has not brought -------------------------------------

    @property
    def keeps_row(self) -> bool:
        """Tells whether the weight is read rowwise after backward's gather."""
        return FORWARD in self.on_demand

    def lacking(self, storage: int) -> int | None:
        """Returns the gather that would bring a direction, where the other one is in memory.

        Args:
            storage: without memory: of the direction's codes, scale or amax, or any other.
        """
        raise NotImplementedError

    def note_reading(self, selection: int) -> None:
        """Notes that a direction is read which FSDP2's gather has not brought; on all ranks."""
        raise NotImplementedError

    def bring(self, selection: int) -> None:
        """Brings a direction by this gather, apart from FSDP2's gathers; on all ranks."""
        raise NotImplementedError


def storages(tensors: Iterable[Tensor]) -> list[int]:
    """Lists the ids of the tensors' storages, which stay where memory is freed and allocated."""
    return [t.untyped_storage()._cdata for t in tensors]


def keep_for_current_stream(tensors: Sequence[Tensor]) -> None:
    """Keeps memory of another stream until the kernels that this one has been given have run.

    FSDP2 casts on a stream of its own. What a cast allocates and is read here may be freed before.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
