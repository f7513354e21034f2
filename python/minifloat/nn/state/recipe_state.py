"""Keeps what a product under a recipe has besides parameters: random state, amax history, codes.

mf.Linear and GroupedProduct derive from RecipeState. Its tensors are not registered as buffers,
because DistributedDataParallel overwrites buffers with rank 0's before each forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._native import ops
from ...checks import require_int, require_one_of
from ...recipe import Recipe, operand_names
from ...spec import Spec
from ..cache.operand_cache import WeightCodes, fingerprint_of_ranks
from ..names import clean_name, unwrapped
from ..registry import ExpertWeightGather, WeightGather
from .random_state import RngState, as_normal
from .recomputation import Draws

if TYPE_CHECKING:
    from typing_extensions import Self

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)  # that layers read
DEFAULT_HISTORY = 16  # steps of amax history
RECOMPUTE = (None, "weight")  # what backward may compute again
MAX_MARGIN = 126  # powers of two
UNSCALED = (
    "minifloat: {}, under delayed scaling, is evaluated before its amax history has values, so "
    "its forward casts with a scale of 1; call mf.load_training_state(model, state) with the state "
    "that was saved beside the weights, or mf.step(model) after a training step"
)


@dataclass(frozen=True)
class DelayedScaling:
    """How delayed scaling finds a scale: docs/numerics.md, section 3.

    Args:
        amax_history_length: the steps whose amaxes are kept.
        amax_algorithm: which of them counts, "max" or "most_recent".
        margin: by how many powers of two scales are enlarged.

    Raises:
        TypeError, ValueError: an argument is not as expected.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> of_64_steps = mf.nn.DelayedScaling(amax_history_length=64)
        >>> report = mf.quantize_(model, "fp8_delayed", delayed_scaling=of_64_steps)
        >>> mf.training_state(model)["0.amax_history"].shape  # a step's own amaxes, and the history
        torch.Size([6, 65])
    """

    amax_history_length: int = DEFAULT_HISTORY
    amax_algorithm: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        require_int("amax_history_length", self.amax_history_length, 1, unit="step")
        require_one_of("amax_algorithm", self.amax_algorithm, ("max", "most_recent"))
        require_int("margin", self.margin, 0, MAX_MARGIN, "powers of two")


DEFAULT_DELAYED = DelayedScaling()


def require_delayed_scaling(value: object) -> None:
    """Raises TypeError for what is no DelayedScaling."""
    if not isinstance(value, DelayedScaling):
        raise TypeError(f"delayed_scaling: expected an mf.nn.DelayedScaling, got {value!r}")


@dataclass(frozen=True)
class ExpertRange:
    """The range of experts that this rank has.

    Args:
        begin: the number of its first expert among all.
        count: how many it has.
        experts: E, the experts of all ranks.
        group: the ranks that divide them.
    """

    begin: int
    count: int
    experts: int
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: object) -> ExpertRange:
        return self  # a process group cannot be copied

    def of_all(self, history: Tensor) -> Tensor:
        """Returns (6, n, …) with zeros for the experts of other ranks, (6, E, …)."""
        whole = history.new_zeros(history.shape[0], self.experts, *history.shape[2:])
        self.own(whole).copy_(history)
        return whole

    def own(self, whole: Tensor) -> Tensor:
        """Returns the view of this rank's experts, (6, n, …) of (6, E, …)."""
        return whole[:, self.begin : self.begin + self.count]


class RecipeState(nn.Module):
    """The base of mf.Linear and of GroupedProduct, the modules whose op quantizes.

    It keeps the recipe, the random state, the amax history and cached codes. It computes nothing.
    """

    recipe: Recipe
    fqn: str  # its name when it was converted, which seeds its random stream
    is_named: bool  # whether that is its own; else mf.step names it
    rng_state: RngState | None  # None: no spec of the recipe is stochastic
    draws: Draws
    stream: Tensor
    amax_history: Tensor | None
    delayed: DelayedScaling
    stream_id: int  # what `stream` holds
    weight_codes: WeightCodes | None  # None: the weight is quantized each time
    recompute: str = ""  # "weight": backward quantizes the weight again, instead of saving codes
    accumulate: str = ""  # where backward adds the weight's gradient (accumulation.py); "": nowhere
    expert_range: ExpertRange | None = None  # None: this process has all experts
    is_of_rank: bool = False  # whether other ranks have other layers here, so that none is reduced
    # A number of the names of all layers that one call of mf.quantize_ converted; 0: of none.
    conversion: int = 0
    evaluates_unscaled: bool = False  # whether an evaluation would read a history without values
    has_loaded_codes: bool = False  # whether the weight's codes are those of a checkpoint
    loaded_crc: int | None = None  # of them; forwards do not read it: torch.compile would guard it
    # None: FSDP2 has not sharded the weight.
    weight_gather: WeightGather | ExpertWeightGather | None = None
    TRANSIENT: tuple[str, ...] = ("weight_codes", "weight_gather")  # attributes not pickled

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "recipe":
            value = Recipe(value)
            if "draws" in self.__dict__:
                self._require_state_for(value)
        super().__setattr__(name, value)
        if name == "recipe" and "weight_codes" in self.__dict__:
            self._forget()

    def _forget(self) -> None:
        """Drops cached operands; a linear layer begins a new cache of its present weight."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> Self:
        if mode != self.training and self.weight_codes is not None:
            self.weight_codes.start_over()
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the module, as nn.Module does, except that its state keeps its dtypes."""
        self.weight_codes = None  # refers to the parameter; torch swaps no DTensor with references
        super()._apply(fn, recurse)
        self._move_state(fn(self.stream).device)
        self._forget()
        return self

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k not in self.TRANSIENT}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.weight_gather = None
        self.stream, history = as_normal(self.stream), self.amax_history
        self.amax_history = None if history is None else as_normal(history)
        self._forget()

    def _require_state_for(self, recipe: Recipe) -> None:
        """Raises ValueError where a recipe needs state that the conversion did not give."""
        lacks = []
        if recipe.is_stochastic and self.rng_state is None:
            lacks.append("stochastic rounding")
        if recipe.is_delayed and self.amax_history is None:
            lacks.append("delayed scaling")
        if lacks:
            raise ValueError(
                f"{self.fqn}.recipe: expected a recipe without {' and '.join(lacks)}, for which "
                f"the conversion under {self.recipe} made no state, got {recipe}; call "
                "mf.restore_(model), and then mf.quantize_(model, …) with this recipe"
            )

    def set_state(
        self,
        recipe: Recipe,
        fqn: str,
        device: torch.device,
        delayed: DelayedScaling,
        experts: tuple[int, ...] = (),
    ) -> None:
        """Sets a new state. `fqn` is the name that the stream of random bits comes from.

        experts: (E) where the weight has a matrix an expert.
        """
        stream_id = ops.stream(fqn)
        stream = as_normal(torch.full((1,), stream_id, dtype=torch.int64, device=device))
        history = None
        if recipe.is_delayed:
            shape = len(operand_names()), *experts, 1 + delayed.amax_history_length
            history = as_normal(torch.zeros(shape, dtype=torch.float32, device=device))
        in_forward = (recipe.fprop.a, recipe.fprop.b)
        self.evaluates_unscaled = any(Spec.parse(spec).is_delayed for spec in in_forward)
        self.recipe = recipe
        self.fqn, self.is_named = fqn, True
        self.rng_state = None
        self.draws = Draws()
        self.delayed = delayed
        self.stream_id = stream_id
        self.stream = stream
        self.amax_history = history

    def rename(self, fqn: str) -> None:
        """Draws random bits by another name."""
        self.fqn, self.stream_id, self.is_named = fqn, ops.stream(fqn), True
        self._move_state(self.stream.device)

    def op_state(self, device: torch.device) -> dict[str, Any]:
        """Returns rng, amax_history and stream of this forward by name, those that there are.

        Compiled code has the stream in the random state, so that layers of all names share one
        graph.

        device: of the random state.
        """
        found: dict[str, Any] = {}
        if not (is_compiling := torch.compiler.is_compiling()):
            found["stream"] = self.stream_id
            if self.stream.device != device and device.type != "meta":
                self._move_state(device)  # the weight's memory was moved, and no method called
        if self.amax_history is not None:
            found["amax_history"] = self.step_history()
        if self.rng_state is not None and is_compiling:
            state = self.rng_state.trace(self.training).to(self.stream.device)
            found["rng"] = torch.cat([state, self.stream])
        elif self.rng_state is not None:
            found["rng"] = self.rng_state.draw(self.draws, device, self.training)
        return found

    def cached_operands(
        self,
        cache: WeightCodes | None,
        weight: Tensor,
        matrix: Tensor,
        x: Tensor,
        columnwise: bool,
        amax_history: Tensor | None,
        process_group: dist.ProcessGroup | None = None,
        **shards: object,
    ) -> list[Tensor] | None:
        """Returns the weight's cached operands; None where the op is to quantize it.

        Args:
            cache: of the weight; None: there is none.
            weight: the parameter.
            matrix: W (…, N, K), what a cast reads of the parameter.
            x: what the product's conditions are those of.
            columnwise: whether a backward pass would read the weight.
            amax_history: of the product, for delayed scaling.
            process_group: the ranks of a sharded weight, which change their shards together.
            shards: arguments of its cast.
        """
        if cache is None:
            return None
        total = None if process_group is None else fingerprint_of_ranks(matrix, process_group)
        cache.notice_capture(x)
        return cache.native.operands(
            weight,
            matrix,
            x,
            self.recipe.text,
            columnwise,
            self.training,
            bool(self.recompute),
            amax_history,
            getattr(weight, "main_grad", None) if self.accumulate == "main_grad" else None,
            total,
            **shards,
        )

    def step_history(self) -> Tensor | None:
        """Returns the amax history that an op writes to: a copy outside training steps."""
        history = self.amax_history
        if history is None:
            return None
        if self.is_in_step():
            return history
        if not (torch.compiler.is_compiling() or self.training) and self.evaluates_unscaled:
            warnings.warn(UNSCALED.format(self.fqn or "the layer"), stacklevel=2)
        return history.clone()

    def _replicate_for_data_parallel(self) -> Self:
        """Refuses replicas of nn.DataParallel whose amaxes this layer would not see."""
        if self.amax_history is not None and self.is_in_step():
            raise ValueError(
                f"{self.fqn or 'a layer'}: expected one process a GPU under delayed scaling, got "
                "nn.DataParallel, whose replicas record amaxes that are lost; use "
                "DistributedDataParallel, or another recipe"
            )
        return super()._replicate_for_data_parallel()

    def is_in_step(self) -> bool:
        """Tells whether a forward now is part of a training step."""
        return self.training and torch.is_grad_enabled()

    def extra_repr(self) -> str:
        recompute = f", recompute={self.recompute!r}" if self.recompute else ""
        sums = f", accumulate={self.accumulate!r}" if self.accumulate else ""
        gather = "" if self.weight_gather is None else f"; {self.weight_gather}"
        return f"recipe={self.recipe.text!r}{recompute}{sums}{gather}"

    def follow(self, weight: object) -> None:
        """Moves the state to the device of a parameter that is assigned, as FSDP2 moves them."""
        stream = self.__dict__.get("stream")
        if stream is None or not isinstance(weight, Tensor) or weight.is_meta:
            return
        if stream.device != weight.device:
            self._move_state(weight.device)

    def _move_state(self, device: torch.device) -> None:
        """Moves the stream and the history to a device, with values where they had none on meta."""
        stream, history = self.stream, self.amax_history
        if stream.device != device:
            stream = torch.empty_like(stream, device=device)
        if device.type != "meta":
            stream.fill_(self.stream_id)
        self.stream = as_normal(stream)
        if self.rng_state is not None and device.type != "meta":
            draw_from(self, self.rng_state)
        if history is not None:
            history = torch.zeros_like(history, device=device) if history.is_meta else history
            self.amax_history = as_normal(history.to(device))


def draw_from(layer: RecipeState, state: RngState) -> None:
    """Makes `state` the source of the layer's random bits, from its next forward on."""
    state.to(layer.stream.device)  # here: memory that compiled code allocates is reused
    layer.rng_state = state


def converted(model: nn.Module) -> list[tuple[str, RecipeState]]:
    """Finds (name, layer) of each layer and product under a recipe."""
    return converted_among(unwrapped(model).named_modules())


def converted_among(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, RecipeState]]:
    """Finds those of a model's (name, module)."""
    return [(clean_name(fqn), module) for fqn, module in modules if isinstance(module, RecipeState)]


def histories_of(
    layers: Iterable[tuple[str, RecipeState]],
) -> Iterator[tuple[str, RecipeState, Tensor]]:
    """Yields (name, layer, amax history) of those under delayed scaling."""
    for fqn, layer in layers:
        if layer.amax_history is not None:
            yield fqn, layer, layer.amax_history


def require_converted(name: str, model: nn.Module | None) -> nn.Module:
    """Returns the model; raises ValueError, with the caller's name, where nothing is converted."""
    if model is None or not converted(model):
        raise ValueError(
            f"{name}: expected a model that mf.quantize_ has converted, got "
            f"{'None' if model is None else type(model).__name__} without converted layers"
        )
    return model


def forget_weights(layers: Iterable[tuple[str, RecipeState]]) -> None:
    """Makes layers quantize their weights again, after the weights or their scales changed."""
    for _, layer in layers:
        if layer.weight_codes is not None:
            layer.weight_codes.forget()
