"""ModuleGather: what the gathers of a layer's weight and of experts' weights have in common.

They read FSDP2's parameter group, whose state has no public names.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...nn.state.draws import is_in_backward
from ...nn.state.recipe_state import RecipeState
from ...tensor.quantized_tensor import NOMINAL_DTYPES
from ..handshake import agree

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

SERVES_BOTH = "one gather is to serve forward and backward"  # a reason against mode "split"


class FsdpParameter(Protocol):
    """What this library reads of a parameter in FSDP2's group."""

    sharded_param: DTensor
    _unsharded_param: nn.Parameter
    _module_info: Any


class FsdpGroup(Protocol):
    """What this library reads of FSDP2's parameter group."""

    fsdp_params: list[FsdpParameter]
    modules: Sequence[nn.Module]
    mp_policy: MixedPrecisionPolicy
    _reshard_after_forward: bool


class ModuleGather:
    """The gathers of a parameter of one module.

    Args:
        module: it has the parameter.
    """

    title: str  # the parameter's name, recipe and shape
    chunk: int  # rows, or experts, of a full shard

    def __init__(self, module: nn.Module) -> None:
        self.layer = weakref.ref(module)
        self.dtype: torch.dtype | None = None  # that all ranks agreed on; None before
        self.shard_dtype: torch.dtype | None = None  # of the last gather
        self.reason = ""  # for a gather in that dtype instead of codes
        # A reference to FSDP2's parameter group.
        self._fsdp_group: Callable[[], FsdpGroup | None] = lambda: None

    def __deepcopy__(self, memo: object) -> ModuleGather:
        return self  # guards of compiled code copy it, and compare the copy

    def module(self) -> RecipeState:
        return cast(RecipeState, self.layer())

    @property
    def is_quantized(self) -> bool:
        return self.dtype is not None and not self.reason

    def agree_on_dtype(
        self, dtype: torch.dtype | None, group: dist.ProcessGroup, device: torch.device
    ) -> torch.dtype:
        """Agrees on the dtype that FSDP2 computes in; sets the reason where codes have no such one.

        Args: as those of handshake.agree.

        Returns:
            The dtype that values are rounded to before the cast: autocast's, or that of FSDP2.

        Raises:
            ValueError: as handshake.agree; or FSDP2 is to reshard to a smaller mesh.
        """
        if getattr(self.fsdp_group(), "_use_post_forward_mesh", False):
            raise ValueError(
                "fully_shard: reshard_after_forward: expected True or False around weights that "
                f"are gathered as codes ({self.title}), got a number of ranks; for such a number "
                "pass mf.quantize_ gather='compute_dtype'"
            )
        self.dtype = rounded_to = agree(self.title, dtype, group, device)
        if torch.is_autocast_enabled(device.type):
            rounded_to = torch.get_autocast_dtype(device.type)
        if rounded_to not in NOMINAL_DTYPES or self.dtype not in NOMINAL_DTYPES:
            self.reason = "codes are made of float32 or bfloat16"
        return rounded_to

    def require_dtype(self, shard: Tensor) -> None:
        """Raises ValueError where FSDP2 would compute in another dtype than at the first gather."""
        before, self.shard_dtype = self.shard_dtype, shard.dtype
        if before in (None, shard.dtype):
            return
        policy = getattr(self.fsdp_group(), "mp_policy", None)
        if getattr(policy, "param_dtype", None) is None:
            self.shard_dtype = before
            raise ValueError(
                f"fully_shard: expected shards of {before}, as at the first gather, of "
                f"{self.title}, got {shard.dtype}; FSDP2's memory has that dtype. Call .to before "
                "the first forward, or give fully_shard MixedPrecisionPolicy(param_dtype=...)"
            )

    def padded(self, shard: Tensor) -> Tensor:
        """Returns a whole chunk of values in the compute dtype; a full shard itself has it."""
        assert self.dtype is not None
        if len(shard) == self.chunk:
            return shard.to(self.dtype)
        chunk = shard.new_zeros(self.chunk, *shard.shape[1:], dtype=self.dtype)
        chunk[: len(shard)] = shard
        return chunk

    def fsdp_group(self) -> FsdpGroup | None:
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
        group = self.fsdp_group()
        state = getattr(getattr(group, "_training_state", None), "name", "")
        if group is None or state != "FORWARD":
            return False
        return group._reshard_after_forward and not is_in_backward()


def recomputes_compiled(modules: Sequence[nn.Module]) -> bool:
    """Tells whether compiled code of these modules recomputes a forward in backward.

    Such code reads weights rowwise then, and cannot ask for them. Compiled are modules whose
    .compile() was called, and what torch.compile returned.
    """
    inner = [m for module in modules for m in module.modules()]
    is_compiled = any(
        m._compiled_call_impl is not None or type(m).__name__ == "OptimizedModule" for m in inner
    )
    return is_compiled and any("CheckpointWrapper" in type(m).__name__ for m in inner)


class UnknownFsdpError(RuntimeError):
    """FSDP2 lacks a private name that this library reads."""


def require_names(owner: object, *names: str) -> None:
    """Raises UnknownFsdpError where an object of FSDP2 has none of these attributes."""
    if not any(hasattr(owner, name) for name in names):
        what = getattr(owner, "__name__", type(owner).__name__)
        raise UnknownFsdpError(
            f"FSDP2: expected {what}.{' or '.join(names)}, as torch 2.11 has it, got none in torch "
            f"{torch.__version__}"
        )


def fsdp_state_class() -> type:
    """Imports the class of the states of modules that FSDP2 shards."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    except ImportError as error:
        raise UnknownFsdpError(
            f"FSDP2: expected FSDPState where torch 2.11 has it: {error}"
        ) from error
    return FSDPState


def groups_of_state(state: object) -> list[FsdpGroup]:
    """Returns the parameter groups of a module's state; none of a state that is not FSDP2's."""
    if not isinstance(state, fsdp_state_class()):
        return []
    require_names(state, "_fsdp_param_groups", "_fsdp_param_group")
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = groups or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def find_fsdp_group(layer: nn.Module) -> FsdpGroup:
    """Finds FSDP2's parameter group of this module's weight.

    Raises:
        LookupError: FSDP2 has not sharded the module.
        UnknownFsdpError: FSDP2's state has other names than those that are read here.
    """
    from torch.distributed import _composable_state as states

    require_names(states, "_module_state_mapping")
    for reference in list(states._module_state_mapping.values()):
        for group in groups_of_state(reference()):
            require_names(group, "fsdp_params")
            for parameter in group.fsdp_params:
                require_names(parameter, "_module_info")
                info = parameter._module_info
                if info.module is layer or layer in info.shared_modules:
                    return group
    raise LookupError("no parameter group of FSDP2 has the layer")
