"""Linear layers under a recipe: the functions, and the module that mf.quantize_ makes of nn.Linear.

y = x Wᵀ + bias     three products, forward and backward, each in the formats of the recipe
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from ._native import ops
from .fsdp import carry
from .gather import Plan, plan_gather
from .quantized import require_text
from .random_state import AdvanceRng, RngState
from .recipe import Recipe
from .reuse import SharedInput, WeightCodes, conditions_of, weight_codes
from .tensor import QuantizedTensor
from .travel import Travel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

OPERANDS = 6  # fprop x, W; dgrad g, W; wgrad g, x
DEFAULT_HISTORY = 16  # steps of amax history
ALGORITHMS = ("max", "most_recent")
MAX_MARGIN = 126  # powers of two


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "mxfp8",
    *,
    rng: Tensor | None = None,
    amax_history: Tensor | None = None,
) -> Tensor:
    """y = x · Wᵀ + bias under a recipe, differentiable. x: (…, K), weight: (N, K); fp32 or bf16.

    rng: int64 (seed, count, module stream), needed where the recipe rounds stochastically; backward
    reads it too, so nobody may write to it afterwards. amax_history: float32 (6, 1 + length),
    needed by delayed scaling, one row an operand: column 0 the amax in force, column 1 this step's
    own, written in place. A weight that is a DTensor: see dtensor.py.
    """
    if is_distributed(weight):
        from .dtensor import linear as sharded

        return sharded(x, weight, bias, Recipe(recipe), rng=rng, amax_history=amax_history)
    return ops.linear(x, weight, bias, recipe_text(recipe), rng=rng, amax_history=amax_history)


def recipe_text(recipe: str | Recipe) -> str:
    return recipe.text if isinstance(recipe, Recipe) else require_text("recipe", recipe)


def is_distributed(weight: Tensor) -> TypeGuard[DTensor]:
    """Is it a DTensor? Asked without loading what DTensor needs."""
    return type(weight) not in (Tensor, nn.Parameter) and hasattr(weight, "device_mesh")


def linear_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    recipe: str | Recipe = "mxfp8",
    *,
    rng: Sequence[Tensor] | None = None,
    amax_history: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """linear of one x and several weights (q, k, v; gate, up): x is quantized once."""
    biases = [None] * len(weights) if biases is None else list(biases)
    rng = None if rng is None else list(rng)
    amax_history = None if amax_history is None else list(amax_history)
    if any(is_distributed(weight) for weight in weights):
        none = [None] * len(weights)
        layers = zip(weights, biases, rng or none, amax_history or none)
        return [linear(x, w, b, recipe, rng=r, amax_history=h) for w, b, r, h in layers]
    return ops.linear_group(
        x, list(weights), biases, recipe_text(recipe), rng=rng, amax_history=amax_history
    )


def require_history(length: int, algorithm: str, margin: int) -> None:
    if length < 1:
        raise ValueError(f"amax_history_length: expected at least 1 step, got {length}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"amax_algorithm: expected one of {ALGORITHMS}, got {algorithm!r}")
    if not 0 <= margin <= MAX_MARGIN:
        raise ValueError(f"margin: expected 0 to {MAX_MARGIN} powers of two, got {margin}")


class Linear(nn.Linear):
    """nn.Linear under a recipe: the same parameters and state-dict keys.

    mf.quantize_ makes one of an nn.Linear in place. Built alone it draws its own random bits and
    advances them at its own forward; `name` tells its stream from other layers'.
    """

    recipe: Recipe
    fqn: str
    rng_state: RngState | None
    stream: Tensor
    amax_history: Tensor | None
    amax_algorithm: str
    margin: int
    stream_id: int  # what `stream` holds
    weight_codes: WeightCodes | None
    shared_input: SharedInput | None
    gather_plan: Plan | None  # how the weight travels; None: in the compute dtype
    travel: Travel | None = None  # of a weight that FSDP2 has sharded

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe,
        name: str = "linear",
        seed: int = 0,
    ) -> None:
        recipe = Recipe(recipe)
        super().__init__(in_features, out_features, bias, device, dtype)
        adopt(self, recipe, name, gather_plan=plan_gather(recipe)[0])
        if recipe.is_stochastic:
            self.rng_state = RngState(seed)
            self.register_forward_pre_hook(AdvanceRng(self.rng_state, self))

    def forward(self, input: Tensor) -> Tensor:
        if is_distributed(self.weight):
            from .dtensor import module_linear

            return module_linear(self, input)
        if torch.compiler.is_compiling():
            return self._traced_forward(input)
        weight, recipe = self.weight, self.recipe.text
        if self.travel is not None:
            self.travel.complete(weight, torch.is_grad_enabled() and input.requires_grad)
        rng = None if self.rng_state is None else self.rng_state.current(weight.device)
        x_operands = weight_operands = None
        if type(input) is Tensor and not (self.weight_codes is None and self.shared_input is None):
            x_operands, weight_operands = self._reused(input, weight)
        return ops.linear.default(
            input,
            weight,
            self.bias,
            recipe,
            rng=rng,
            amax_history=self.amax_history,
            stream=self.stream_id,
            x_operands=x_operands,
            weight_operands=weight_operands,
        )

    def _traced_forward(self, input: Tensor) -> Tensor:
        """The stream of random bits as a tensor: one graph serves layers of different names."""
        rng = None
        if self.rng_state is not None:
            base = self.rng_state.tensor
            rng = torch.cat([base.to(self.stream.device), self.stream])
        return ops.linear(
            input, self.weight, self.bias, self.recipe.text, rng=rng, amax_history=self.amax_history
        )

    def _reused(self, x: Tensor, weight: Tensor) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """x and the weight where they need not be quantized again; None where they must be."""
        conditions, recipe = conditions_of(x), self.recipe.text
        # Outside autocast a weight of another dtype has a gradient of its own dtype.
        is_cast = weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type)
        grad = torch.is_grad_enabled()
        x_operands = weight_operands = None
        if self.weight_codes is not None and not is_cast:
            columnwise = grad and x.requires_grad
            weight_operands = self.weight_codes.operands(
                weight, recipe, columnwise, conditions, self.amax_history
            )
        if self.shared_input is not None:
            columnwise = grad and weight.requires_grad
            x_operands = self.shared_input.operands(x, recipe, columnwise, conditions)
        return x_operands, weight_operands

    def unwrap_buffers(self) -> None:
        """torch's parallel styles make replicated DTensors of buffers; these are the rank's own."""
        for name in ("stream", "amax_history"):
            buffer = self._buffers[name]
            self._buffers[name] = getattr(buffer, "_local_tensor", buffer)

    def train(self, mode: bool = True) -> Linear:
        if mode != self.training and self.weight_codes is not None:
            self.weight_codes.start_over()
        super().train(mode)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            if self.travel is not None and self.travel.knows(value):  # twice a gather
                self._parameters[name] = value
                return
            carry(self, value)  # FSDP2 assigns the parameter that it has sharded
            if is_distributed(value):
                self.weight_codes = None  # its memory is refilled, uncounted
        super().__setattr__(name, value)

    def _forget(self) -> None:
        """Drops what was kept for reuse; the parameter that is there now may be reused."""
        self.weight_codes = weight_codes(self.weight, self.recipe)
        if self.travel is not None:
            self.travel.forget()
        if self.shared_input is not None:
            self.shared_input.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("weight_codes", "travel")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.travel = None
        self._forget()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._forget()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        """Moves. The history keeps dtype and values, the stream is a function of the name, and a
        quantized weight that came back plain (to_empty) is quantized again."""
        history = self._buffers.pop("amax_history")
        before = self.weight
        self.weight_codes = None  # refers to the parameter; torch swaps a DTensor with none alone
        super()._apply(fn, recurse)
        if isinstance(before, QuantizedTensor) and not isinstance(self.weight, QuantizedTensor):
            self.weight = nn.Parameter(
                QuantizedTensor.from_tensor(self.weight.detach(), *before.specs),
                requires_grad=before.requires_grad,
            )
        device = self.stream.device
        if device.type != "meta":
            self.stream.fill_(ops.stream(self.fqn))
        if history is not None and history.is_meta:
            history = torch.zeros_like(history, device=device)
        self._buffers["amax_history"] = None if history is None else history.to(device)
        if self.travel is not None:
            carry(self, self.weight)
        self._forget()
        return self

    def extra_repr(self) -> str:
        travel = "" if self.travel is None else f"; {self.travel}"
        return f"{super().extra_repr()}, recipe={self.recipe.text!r}{travel}"


def adopt(
    module: nn.Linear,
    recipe: Recipe,
    fqn: str,
    *,
    history_length: int = DEFAULT_HISTORY,
    algorithm: str = "max",
    margin: int = 0,
    gather_plan: Plan | None = None,
) -> Linear:
    """Makes `module` a Linear in place: the same object, parameters and hooks."""
    require_history(history_length, algorithm, margin)
    device = module.weight.device
    module.__class__ = Linear
    module = cast(Linear, module)
    module.recipe = recipe
    module.fqn = fqn
    module.rng_state = None
    module.amax_algorithm = algorithm
    module.margin = margin
    module.stream_id = ops.stream(fqn)
    stream = torch.full((1,), module.stream_id, dtype=torch.int64, device=device)
    module.register_buffer("stream", stream, persistent=False)
    history = None
    if recipe.is_delayed:
        shape = (OPERANDS, 1 + history_length)
        history = torch.zeros(shape, dtype=torch.float32, device=device)
    module.register_buffer("amax_history", history, persistent=False)
    module.shared_input = None
    module.gather_plan = gather_plan
    module.travel = None
    module._forget()
    return module


ADOPTED = (
    "recipe",
    "fqn",
    "rng_state",
    "amax_algorithm",
    "margin",
    "stream",
    "stream_id",
    "amax_history",
    "weight_codes",
    "shared_input",
    "gather_plan",
    "travel",
)


def release(module: Linear) -> nn.Linear:
    """The inverse of adopt; a quantized weight becomes the values of its codes."""
    if module.travel is not None:
        raise ValueError(
            f"restore_: expected a model that FSDP2 has not sharded, but {module.fqn}'s weight "
            "travels quantized; restore it before fully_shard"
        )
    weight = module.weight
    if isinstance(getattr(weight, "_local_tensor", weight), QuantizedTensor):
        module.weight = nn.Parameter(weight.detach() * 1, requires_grad=weight.requires_grad)
    module.__dict__.pop("weight_high_precision_init", None)
    for name in ADOPTED:
        delattr(module, name)
    plain = cast(nn.Linear, module)
    plain.__class__ = nn.Linear
    return plain
