"""The mixture-of-experts layer: router, routed experts and shared experts.

    y = Σ over the k slots of weight · w2(silu(w1 x) · w3 x)    of the slot's expert
        + shared w2(silu(w1 x) · w3 x)                          of every token

Tokens (T, D) are cast once for routed and shared experts, where both have one recipe and each scale
belongs to a row or a block. A token then has the same codes in both, and each of its rows is a copy
of them.

State-dict keys: router.weight, router.expert_bias, experts.w1, experts.w3, experts.w2 (or w13 for
w1 and w3), experts.b1, b3, b2, b13, shared_experts.w1.weight and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from ..checks import require_bool, require_int, require_text
from ..nn.cache.operand_cache import SharedInput, compute_dtype, conditions_of, share_inputs
from ..nn.grouped_product import (
    HasProducts,
    ProductCall,
    add_products,
    call_of,
    local_of,
    matrix_of,
    product_of,
    require_recipe,
)
from ..nn.linear import Linear, adopt
from ..nn.registry import distributed_functions, is_distributed
from ..nn.state.random_hooks import add_hooks
from ..nn.state.random_state import RngState
from ..nn.state.recipe_state import WEIGHT_DTYPES, RecipeState, draw_from
from ..private_torch import has_transform
from ..recipe import Recipe
from ..spec import Spec
from ..tensor.quantized import Operand, Operands
from .feed_forward import (
    ALPHA,
    Gate,
    Products,
    input_names,
    order_rows,
    require_no_tangents,
)
from .ranks.parallel_experts import ExpertParallel
from .ranks.width import are_cut, forward_cut
from .router import Router

TokenCast = Callable[[Tensor], Operand | None]  # of x; None: each reader quantizes x itself


class Experts(HasProducts, nn.Module):
    """The routed experts of a mixture. Their matrices are 3D parameters, one matrix an expert.

    Args:
        dim: D.
        hidden: I.
        experts: E.
        fused_w13: whether w1 and w3 are one parameter w13 (E, 2I, D).
        bias: whether the matrices have biases.
        gate: the form of SwiGLU.
        device: of the parameters.
        dtype: of the parameters; None: torch's default dtype.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        *,
        fused_w13: bool,
        bias: bool,
        gate: Gate,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.hidden, self.experts, self.gate = dim, hidden, experts, gate
        self.parallel: ExpertParallel | None = None  # None: all experts are here
        self.b2: nn.Parameter | None
        self.input_names = input_names(1 if fused_w13 else 2)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(experts, *shape, device=device, dtype=dtype))

        width = 2 * hidden if fused_w13 else hidden
        for name in self.input_names:
            setattr(self, name, parameter(width, dim))
        self.w2 = parameter(dim, hidden)
        self.bias_names = tuple(name.replace("w", "b") for name in self.input_names)
        for name in self.bias_names:
            self.register_parameter(name, parameter(width) if bias else None)
        self.register_parameter("b2", parameter(dim) if bias else None)
        self.reset_parameters()

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The names of the 3D parameters."""
        return *self.input_names, "w2"

    def reset_parameters(self) -> None:
        """Draws each parameter uniformly within 1 / sqrt(inputs), as nn.Linear does."""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                bound = (self.hidden if name.endswith("2") else self.dim) ** -0.5
                nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x_TD: Tensor,
        indices_Tk: Tensor,
        weights_Tk: Tensor,
        token_ids_T: Tensor | None = None,
        cast: TokenCast | None = None,
    ) -> Tensor:
        """Computes each token's weighted sum of its experts.

        Args:
            x_TD: (T, D).
            indices_Tk: (T, k), the experts of each token.
            weights_Tk: (T, k), of the slots.
            token_ids_T: (T), as that of mf.grouped_mlp; None where ranks divide the experts.
            cast: of the tokens, which shared experts read too; None: the experts' own.

        Returns:
            (T, D), in x's dtype or autocast's.

        Raises:
            ValueError: token_ids_T is given where ranks divide the experts.
        """
        weights = [getattr(self, name) for name in self.weight_names]  # computed, perhaps
        if are_cut(weights):
            return forward_cut(self, weights, x_TD, indices_Tk, weights_Tk, token_ids_T)
        prepare = partial(self.prepare, weights)
        if self.parallel is not None:
            if token_ids_T is not None:
                raise ValueError(
                    f"{self.parallel.name}: expected no token_ids of experts that ranks divide, "
                    "which number tokens by their ranks"
                )
            return self.parallel.forward(prepare, x_TD, indices_Tk, weights_Tk, cast)
        x = x_TD.to(compute_dtype(x_TD))
        products = prepare(x, tokens=None if cast is None else cast(x_TD))
        order = order_rows(indices_Tk, self.experts, token_ids_T)
        return products.sum_slots(x, indices_Tk, weights_Tk, order)

    def prepare(
        self,
        weights: Sequence[Tensor],
        x: Tensor,
        needs_columnwise: bool | None = None,
        tokens: Operand | None = None,
    ) -> Products:
        """Begins a forward of x, and returns its products.

        Args:
            weights: the parameters `weight_names`.
            x: (T, D), in the dtype of the products.
            needs_columnwise: whether a gradient of the rows of x is computed; None: where x has
                one.
            tokens: x, where it is quantized already.
        """
        needed = [needs_columnwise] * len(self.input_names) + [True]
        calls = [
            call_of(self, name, weight, x, needs_columnwise=columnwise)
            for name, weight, columnwise in zip(self.weight_names, weights, needed)
        ]
        return self.products(weights, calls, tokens=tokens)

    def products(
        self, weights: Sequence[Tensor], calls: Sequence[ProductCall], **more: Any
    ) -> Products:
        """Returns the products of this rank's parameters, which `calls` compute."""
        matrices = []
        for weight, call in zip(map(local_of, weights), calls):
            matrices.append(matrix_of(weight.flatten(1, 2) if weight.dim() == 4 else weight, call))
        biases = [getattr(self, name) for name in (*self.bias_names, "b2")]
        biases = [bias if bias is None else local_of(bias).flatten(1) for bias in biases]
        return Products(self.gate, calls, matrices, biases[:-1], biases[-1], **more)

    def extra_repr(self) -> str:
        product = product_of(self, "w2")
        recipe = "" if product is None else f", recipe={product.recipe.text!r}"
        parallel = "" if self.parallel is None else f"; {self.parallel.describe(self)}"
        return f"{self.dim}, hidden={self.hidden}, experts={self.experts}{recipe}{parallel}"


def divided_experts(modules: Iterable[nn.Module]) -> dict[Experts, ExpertParallel]:
    """Returns those modules that are experts which ranks divide, and how."""
    found = (module for module in modules if isinstance(module, Experts))
    return {module: module.parallel for module in found if module.parallel is not None}


class SharedExperts(nn.Module):
    """A SwiGLU that every token goes through: linear layers w1, w3 and w2."""

    def __init__(self, dim: int, hidden: int, device: Device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False, device=device, dtype=dtype)
        self.w3 = nn.Linear(dim, hidden, bias=False, device=device, dtype=dtype)
        self.w2 = nn.Linear(hidden, dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    """A drop-less mixture of SwiGLU experts. Any expert may be empty.

    Args:
        dim: D, the width of x.
        hidden: I, the width of an expert's hidden layer.
        experts: E.
        top_k: k, the experts of a token.
        shared_experts: how many experts' widths the shared SwiGLU has; 0: there is none.
        fused_w13: whether w1 and w3 are one parameter, so that one product computes both.
        bias: whether the experts' matrices have biases.
        limit: bound of gate and up, with up + 1, as in gpt-oss; None: silu(gate) * up.
        alpha: factor within the sigmoid where there is a limit.
        recipe: of the experts, routed and shared; None: high precision, until mf.quantize_.
        name: of the layer. Layers of different names have different random bits. None: "moe",
            until mf.step, or mf.training_state or its load, names it as the model that is passed.
        seed: of stochastic rounding, 64 bits with sign.
        device: of the parameters.
        dtype: of the experts' parameters, float32 or bfloat16; None: torch's default dtype. The
            router's are float32.
        routing: the options of the router, which docs/moe.md describes: score, route_norm,
            route_scale, expert_groups, groups_chosen, balance, balance_speed, balance_loss.

    Raises:
        TypeError, ValueError: an argument is not as expected.

    Example:
        >>> moe = mf.MoE(64, 32, experts=4, top_k=2, recipe="mxfp8")
        >>> moe(torch.ones(3, 64)).shape
        torch.Size([3, 64])
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        shared_experts: int = 0,
        fused_w13: bool = False,
        bias: bool = False,
        limit: float | None = None,
        alpha: float = ALPHA,
        recipe: str | Recipe | None = None,
        name: str | None = None,
        seed: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **routing: Any,
    ) -> None:
        super().__init__()
        require_int("hidden", hidden, 1)
        require_int("shared_experts", shared_experts, 0)
        require_bool("fused_w13", fused_w13)
        require_bool("bias", bias)
        fqn = "moe" if name is None else require_text("name", name)
        require_int("seed", seed)
        if (weight_dtype := dtype or torch.get_default_dtype()) not in WEIGHT_DTYPES:
            raise ValueError(f"dtype: expected float32 or bfloat16, got {weight_dtype}")
        self.router = Router(dim, experts, top_k, device=device, **routing)
        self.experts = Experts(
            dim,
            hidden,
            experts,
            fused_w13=fused_w13,
            bias=bias,
            gate=Gate.of(limit, alpha),
            device=device,
            dtype=dtype,
        )
        width = hidden * shared_experts
        self.shared_experts = SharedExperts(dim, width, device, dtype) if width else None
        if recipe is not None:
            for state in self._quantize(Recipe(recipe), fqn, seed):
                state.is_named = name is not None

    def _quantize(self, recipe: Recipe, name: str, seed: int) -> list[RecipeState]:
        """Gives the experts a recipe and a random state of their own; returns their states."""
        require_recipe(f"{name}.experts", recipe)
        names, plan = self.experts.weight_names, distributed_functions.plan_experts(recipe)[0]
        products = add_products(self.experts, names, recipe, f"{name}.experts", gather_plan=plan)
        linears = {
            adopt(module, recipe, f"{name}.{fqn}"): recipe
            for fqn, module in self.named_modules()
            if isinstance(module, nn.Linear)
        }
        share_inputs(self, {module: recipe for module in linears})
        states: list[RecipeState] = [*products, *linears]
        if recipe.is_stochastic:
            rng_state = RngState(seed)
            add_hooks(self, rng_state, states)
            for state in states:
                draw_from(state, rng_state)
        return states

    def forward(self, x: Tensor) -> Tensor:
        """Computes the layer: (…, D) -> (…, D), in x's dtype or autocast's."""
        require_no_tangents("mf.MoE", (x, *self.parameters()))
        if x.is_nested:
            raise ValueError("mf.MoE: expected x as a dense tensor, got a nested tensor")
        # Before the router counts its tokens. Ranks that divide experts raise it together below;
        # under autocast the products check its dtype.
        is_whole = getattr(self.experts, "parallel", None) is None
        if is_whole and compute_dtype(x) == x.dtype and x.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"mf.MoE: expected x as float32 or bfloat16, got {x.dtype}")
        x_TD = x.reshape(-1, x.shape[-1])
        indices, weights = self.router(x_TD)
        cast = self._token_cast(x_TD)
        y = self.experts(x_TD, indices, weights, **({} if cast is None else {"cast": cast}))
        if self.shared_experts is not None:
            y = y + self.shared_experts(x_TD)
        return y.view(x.shape)

    def _token_cast(self, x_TD: Tensor) -> TokenCast | None:
        """Returns the cast of x that both kinds of experts read; None: each casts x itself."""
        experts, shared = self.experts, self.shared_experts
        if not isinstance(experts, Experts) or not isinstance(shared, SharedExperts):
            return None
        if torch.compiler.is_compiling() or type(x_TD) is not Tensor or x_TD.is_meta:
            return None
        if has_transform():
            return None
        products = [product_of(experts, name) for name in experts.input_names]
        readers = [layer for layer in (shared.w1, shared.w3) if isinstance(layer, Linear)]
        if None in products or len(readers) < 2:
            return None
        shared_input, recipe = readers[0].shared_input, readers[0].recipe
        recipes = {module.recipe for module in (*products, *readers) if module is not None}
        is_one = (
            all(reader.shared_input is shared_input for reader in readers) and len(recipes) == 1
        )
        read = [parameter for reader in readers for parameter in reader.parameters()]
        if shared_input is None or not is_one or any(is_distributed(p) for p in read):
            return None
        if not Spec.parse(recipe.fprop.a).casts_rows_alone:
            return None
        columnwise = torch.is_grad_enabled() and any(p.requires_grad for p in read)
        return partial(cast_tokens, shared_input, recipe.text, columnwise)


def cast_tokens(shared: SharedInput, recipe: str, columnwise: bool, x_TD: Tensor) -> Operand | None:
    """Quantizes tokens for all readers, and returns their rowwise codes; None: nothing is cast."""
    found = shared.cast_first(x_TD, recipe, columnwise, conditions_of(x_TD))
    return None if found is None else Operands.of(found).rowwise
