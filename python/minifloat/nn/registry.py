"""The functions of `distributed` and `moe` that layers, conversion and mf.step call.

`nn` imports neither package. `distributed/register.py` and `moe/register.py` assign their functions
to `distributed_functions` and `expert_functions` when `minifloat/__init__.py` imports them. A
function may import its package at its first call, when the first DTensor is passed to a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeGuard

from torch import Tensor, nn

from ..recipe import Recipe
from .names import clean_name, join, unwrapped

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

# ---- several processes ---------------------------------------------------------------------------

CODES, COMPUTE_DTYPE = "codes", "compute_dtype"  # how a weight is gathered, and rows are sent

GatherPlan = object  # of distributed/fsdp, which alone reads it
PlannedGather = tuple[GatherPlan | None, str]  # and the sentence for the report


class WeightGather(Protocol):
    """The gathers of one layer's sharded weight, which distributed/fsdp attaches to the layer."""

    def has_assigned(self, parameter: object) -> bool:
        """Tells whether FSDP2 has assigned this parameter before, or gathers into it."""

    def forget(self) -> None:
        """Looks at the layer again in the next gather."""

    def complete(self, whole: Tensor, reads_columnwise: bool) -> None:
        """Fetches the parts that a forward reads and no gather has brought."""


class ExpertWeightGather(Protocol):
    """The gathers of a sharded 3D parameter, which distributed/fsdp attaches to its product."""

    def operands(self, columnwise: bool) -> list[Tensor]:
        """Returns the gathered weight as the op layer_operands would; on all ranks."""


class DistributedFunctions:
    """The functions that layers call for several processes."""

    # Recipe of a linear layer, or of a 3D weight of experts -> how FSDP2 gathers the weight.
    plan_gather: Callable[[Recipe], PlannedGather]
    plan_experts: Callable[[Recipe], PlannedGather]
    # (layer, parameter): before the parameter becomes the layer's weight.
    adopt_weight: Callable[[nn.Module, Tensor], None]
    # layer: FSDP2 assigns its gathered and its sharded weight without a call of its __setattr__.
    let_fsdp_assign: Callable[[nn.Module], None]
    # (module, product, parameter until now, parameter): before it becomes the module's.
    adopt_experts: Callable[[nn.Module, Any, Tensor | None, Tensor], None]
    # (module, name, weight): raises where FSDP2 has sharded a weight to be gathered as codes.
    require_no_shard: Callable[[nn.Module, str, Tensor], None]
    # layers: exchanges the maxima of their sharded weights, after a step.
    exchange_scales: Callable[[Iterable[nn.Module]], None]
    # ((layer, its amax history to be), this rank's error or None): raises on all ranks where those
    # that gather a weight as codes would have other scales.
    require_same_scales: Callable[[Sequence[tuple[nn.Module, Tensor]], Exception | None], None]
    # model: frees the weights that FSDP2 has gathered.
    reshard: Callable[[nn.Module], None]
    # (model, layers, routers, group of mf.step, error of this rank or None) -> the ranks that end
    # the step with this one.
    group_of_step: Callable[..., dist.ProcessGroup | None]
    # (error of arguments, group as it was passed): raises it on all ranks, which would wait here.
    raise_on_all: Callable[[Exception, object], NoReturn]
    # (kind of exchange, names, group): all ranks of the group are there, and have these names.
    require_same_names: Callable[[str, list[str], dist.ProcessGroup], None]
    # (amaxes, group) -> the largest of all ranks.
    reduce_amaxes: Callable[[Tensor, dist.ProcessGroup], Tensor]
    # (layer, parameter): before the parameter, which FSDP2 has gathered, becomes the weight of a
    # layer whose gradients are added to .grad in float32.
    accumulate_gradients: Callable[[nn.Module, Tensor], None]
    # mf.linear, and (layer, x) -> y, of a weight that is a DTensor.
    linear: Callable[..., Tensor]
    forward: Callable[[nn.Module, Tensor], Tensor]


distributed_functions = DistributedFunctions()


def is_distributed(weight: Tensor) -> TypeGuard[DTensor]:
    """Tells whether a weight is a DTensor, without importing torch.distributed.tensor."""
    return type(weight) not in (Tensor, nn.Parameter) and hasattr(weight, "device_mesh")


# ---- layers of other libraries -------------------------------------------------------------------


class LibraryLayers(Protocol):
    """The linear layers of a library that are no nn.Linear."""

    def is_layer(self, module: nn.Module) -> bool:
        """Tells whether a module is such a layer, converted or not."""

    def reason(self, module: nn.Module) -> str | None:
        """Returns why a layer cannot be converted; None where it can."""

    def weights(self, module: nn.Module) -> tuple[str, ...]:
        """Returns the names of the parameters that a layer multiplies with."""

    def convert(self, choice: Choice, delayed: Any) -> list[Any]:
        """Converts a layer, and returns what has its state."""

    def hold_codes(self) -> None:
        """Prepares the library for weights that are codes."""

    def restore(self, module: nn.Module) -> None:
        """Undoes `convert`, complete or not."""

    def numbers(self, module: nn.Module) -> Mapping[str, int]:
        """Returns the number among all ranks of each part of a module that is numbered by rank.

        Parts have their names in the module: "layers.0" -> 12.
        """

    def blocks(self, model: nn.Module) -> tuple[str, int] | None:
        """Returns the name of a model's list of blocks, and how many it has on all ranks.

        None: it has no such list.
        """

    def stage(self, model: nn.Module) -> int | None:
        """Returns the number of the pipeline stage that a model is; None: it is a whole model."""

    def require_same(self, layers: list[str]) -> None:
        """Raises ValueError on all ranks that cut layers, where theirs differ or one is missing."""

    def data_parallel_rank(self) -> int:
        """Returns this process's number among those with other tokens."""


# The module that knows a library's layers -> the packages that their classes are of.
LIBRARIES = {"minifloat.megatron.register": ("megatron.core.", "minifloat.megatron.")}


def library_of(module: nn.Module) -> LibraryLayers | None:
    """Returns who knows the layers of a module's library; None: no such library."""
    for knows, packages in LIBRARIES.items():
        if any(cls.__module__.startswith(packages) for cls in type(module).__mro__):
            layers: LibraryLayers = import_module(knows).LAYERS
            return layers
    return None


def layers_of(module: nn.Module) -> LibraryLayers | None:
    """Returns the library whose layer a module is; None: it is none."""
    library = library_of(module)
    return library if library is not None and library.is_layer(module) else None


def is_linear(module: nn.Module) -> bool:
    """Tells whether a module is an nn.Linear, or a linear layer of another library."""
    return isinstance(module, nn.Linear) or layers_of(module) is not None


def first_of_library(model: nn.Module) -> tuple[LibraryLayers, nn.Module] | None:
    """Returns the outermost module of a library, and who knows its layers; None: there is none."""
    found = ((library_of(module), module) for module in model.modules())
    return next(((library, module) for library, module in found if library is not None), None)


def require_layers_of_torch(function: str, model: nn.Module) -> None:
    """Raises ValueError for a model of another library, whose layers a function does not know."""
    if first_of_library(model) is not None:
        raise ValueError(
            f"{function}: expected linear layers of torch, got {type(model).__name__} of "
            "Megatron-Core; convert it to Hugging Face's first"
        )


def stage_of(model: nn.Module) -> int | None:
    """Returns the number of the pipeline stage that a library's model is; None: it is none."""
    found = first_of_library(unwrapped(model))
    return None if found is None else found[0].stage(found[1])


def stages_in(model: nn.Module) -> list[nn.Module]:
    """Returns the stages of a pipeline that a model is, or that an nn.ModuleList has.

    Empty: it is neither.
    """
    parts = list(model) if isinstance(model, nn.ModuleList) else [model]
    return [] if any(stage_of(part) is None for part in parts) else list(map(unwrapped, parts))


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a model by the names that recipes and random bits go by.

    Those are free of the names of wrappers, and of the number of a stage in an nn.ModuleList. A
    block or an expert has its number among those of all ranks.
    """
    for part in stages_in(model) or [model]:
        yield from named_modules_of(part)


def named_modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields those of a model that is no list of stages."""
    numbers: dict[str, int] = {}
    for raw_fqn, module in model.named_modules():
        if (library := library_of(module)) is not None:
            for part, number in library.numbers(module).items():
                numbers[join(raw_fqn, part)] = number
        raw = raw_fqn.split(".")
        parts = [str(numbers.get(".".join(raw[: i + 1]), part)) for i, part in enumerate(raw)]
        yield clean_name(".".join(parts)), module


# ---- mixtures of experts -------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A module to convert.

    Args:
        fqn: its name in the whole model, which streams of random bits come from.
        module: an nn.Linear, or an experts module.
        names: its parameters that products read: "weight", or 3D parameters.
        recipe: of the products.
        form: the class of the module, or the part that its conversion adds to its class.
        reads_codes: whether its products read the parameters themselves, which may be codes.
        library: whose layer it is; None: an nn.Linear, or experts.
    """

    fqn: str
    module: nn.Module
    names: tuple[str, ...]
    recipe: Recipe
    form: type[nn.Module]
    reads_codes: bool = True
    library: LibraryLayers | None = None

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters that products read."""
        return [self.module.get_parameter(name) for name in self.names]

    @property
    def is_of_experts(self) -> bool:
        """Whether it is an experts module with 3D parameters."""
        return self.library is None and not isinstance(self.module, nn.Linear)

    @property
    def rows(self) -> list[str]:
        """The names of the rows of a report: the layer's, or those of 3D parameters."""
        is_3d = self.is_of_experts
        return [join(self.fqn, name) for name in self.names] if is_3d else [self.fqn]


@dataclass(frozen=True)
class Selection:
    """What to convert, (name, reason) of the rest, and routers beside chosen experts.

    routers: module -> (name, reason).
    unfit: the names of layers that cannot be converted, whatever the arguments say.
    """

    chosen: list[Choice]
    skipped: list[tuple[str, str]]
    routers: dict[nn.Module, tuple[str, str]] = field(default_factory=dict)
    unfit: list[str] = field(default_factory=list)


NamedModules = Sequence[tuple[str, nn.Module]]


class ExpertFunctions:
    """The functions for models with experts."""

    # (model, filters, experts, primary) -> what to convert.
    select: Callable[..., Selection]
    # (choice, plan, primary weights, delayed scaling) -> the new products.
    convert: Callable[..., list[Any]]
    # module: undoes one conversion, complete or not.
    revert: Callable[[nn.Module], None]
    # model: undoes all conversions.
    restore: Callable[[nn.Module], None]
    # (name, module) of a model -> mf.step's error where a balance loss was not read; else None.
    unread_losses: Callable[[NamedModules], str | None]
    # (name, module) of a model -> (name, router) of those that mf.step ends the step of.
    routers: Callable[[NamedModules], NamedModules]
    # ((name, module) of a model, ranks, 1 where the step was left out): moves the balance of
    # routers by this step's counts, of all of these ranks.
    end_step: Callable[[NamedModules, dist.ProcessGroup | None, Tensor | None], None]


expert_functions = ExpertFunctions()
