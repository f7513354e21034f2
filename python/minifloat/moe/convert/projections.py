"""Hugging Face's experts: gate_up_proj and down_proj, as parameters of one module.

    layout       gate_up_proj      down_proj
    linear       (E, 2I, D)        (E, D, I)         Mixtral, Qwen3-MoE, DeepSeek-V3
    row-major    (E, D, 2I)        (E, I, D)         gpt-oss, Llama 4

Biases are gate_up_proj_bias (E, 2I) and down_proj_bias (E, D). The activation is SwiGLU, gpt-oss's
clamped one where the module has alpha and limit, or any other by the module's act_fn or
_apply_gate. same_forward.py compares all that with the module's own forward before a conversion.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..._native import ops
from ...nn.convert.reads import first_change
from ...nn.grouped_product import call_of, matrix_of
from ..feed_forward import (
    Gate,
    Products,
    add_slots,
    compute_dtype,
    order_rows,
    require_no_tangents,
    take_rows,
    weighted_biases,
)
from .converted import Converted
from .known import is_known
from .same_forward import (
    INTERFACE,
    code_starts,
    compare_forward,
    expected_sum,
    projection_kinds,
)
from .settings import read_settings, require_settings

NAMES = ("gate_up_proj", "down_proj")
IMPLEMENTATION = "minifloat"  # among transformers' implementations of experts
COMPARED = "_settings_of_same_forward"  # attribute of a module whose forward was compared
SILU = ("SiLU", "SiLUActivation")  # classes of torch and transformers


def is_row_major(module: nn.Module) -> bool | None:
    """Tells whether matrices are (E, K, N); None where the shapes are of neither layout."""
    gate_up, down = (tuple(getattr(module, name).shape) for name in NAMES)
    if gate_up[0] != down[0]:
        return None
    if gate_up[1] == 2 * down[2] and gate_up[2] == down[1]:
        return False
    return True if gate_up[2] == 2 * down[1] and gate_up[1] == down[2] else None


def gate_of(module: nn.Module) -> Gate | None:
    """Returns the form of the module's SwiGLU; None for another activation."""
    limit, alpha = getattr(module, "limit", None), getattr(module, "alpha", None)
    if isinstance(limit, (int, float)) and isinstance(alpha, (int, float)):
        is_interleaved = not getattr(module, "is_concatenated", False)  # transformers' attribute
        return Gate(float(limit), float(alpha), is_interleaved)
    act = getattr(module, "act_fn", None)
    if hasattr(module, "_apply_gate") or (isinstance(act, nn.Module) and runs_more(act)):
        return None
    return Gate() if act is F.silu or type(act).__name__ in SILU else None


def runs_more(module: nn.Module) -> bool:
    """Tells whether a call of a module runs more than its class's forward."""
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    has_hooks = any(map(len, (*tables, module._backward_pre_hooks)))
    return has_hooks or "forward" in module.__dict__


def activate(module: Any, gate_up: Tensor) -> Tensor:
    """Returns the module's own activation of gate and up."""
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return module.act_fn(gate) * up


def routing_of(arguments: Iterable[object]) -> tuple[Tensor, Tensor] | None:
    """Returns indices and weights, in whatever order; None where the call has neither."""
    given = [value for value in arguments if isinstance(value, Tensor)]
    indices = [t for t in given if not t.is_floating_point()]
    weights = [t for t in given if t.is_floating_point()]
    if not given:
        return None
    if len(indices) != 1 or len(weights) != 1:
        raise TypeError(
            "experts: expected the experts of each token and their weights, or neither, got "
            f"{len(indices)} tensors of integers and {len(weights)} of numbers"
        )
    return indices[0], weights[0]


def run_projections(
    module: nn.Module, hidden_states: Tensor, *args: object, **kwargs: object
) -> Tensor:
    """Computes the module's experts.

    Args:
        module: it has gate_up_proj and down_proj.
        hidden_states: (…, D), tokens; without routing, rows of equally many for each expert.
        args, kwargs: the experts of each token (T, k), integers, and weights (T, k) or (T, E),
            floating, in any order.

    Returns:
        The shape and dtype of hidden_states.

    Raises:
        TypeError: the other tensors are not one of integers and one of floating numbers.
        ValueError: rows without routing are not equally many for each expert.
    """
    require_no_tangents(type(module).__name__, (hidden_states, *module.parameters()))
    with nn.utils.parametrize.cached() if is_parametrized(module) else nullcontext():
        return multiply_projections(module, hidden_states, routing_of((*args, *kwargs.values())))


def multiply_projections(
    module: nn.Module, hidden_states: Tensor, routing: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Computes the module's experts, of parameters or of what parametrizations make of them."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    x = x.to(compute_dtype(x))
    row_major, gate = bool(is_row_major(module)), gate_of(module)
    inputs = call_of(module, NAMES[0], x, row_major)
    output = call_of(module, NAMES[1], x, row_major, needs_columnwise=True)
    w13, w2 = (matrix_of(getattr(module, name), row_major) for name in NAMES)
    b13, b2 = (getattr(module, f"{name}_bias", None) for name in NAMES)
    if routing is None:
        offs = ends_of_even_groups(x, w2.shape[0])
        gate_up = inputs.multiply(x, w13, offs, None, b13)
        ones = torch.ones(x.shape[0], dtype=torch.float32, device=x.device)
        if gate is None:
            h = activate(module, gate_up)
        else:
            h = ops.swiglu(gate_up, None, ones, **gate._asdict())
        y = output.multiply(h, w2, offs, None, b2)
    else:
        indices, scores = (t.reshape(x.shape[0], columns_of(t, x)) for t in routing)
        if scores.shape != indices.shape:  # of all experts
            scores = scores.gather(1, indices.clamp(0, scores.shape[1] - 1).long())
        order = order_rows(indices, w2.shape[0])
        if gate is not None:
            products = Products(gate, (inputs, output), (w13, w2), (b13,), b2)
            y = products.sum_slots(x, indices, scores, order)
        else:
            rows = take_rows(x, order)
            h = activate(module, inputs.multiply(rows, w13, order.offs, order.row_ids, b13))
            weights_M = scores.reshape(-1).index_select(0, order.pairs).float()
            h = (h.float() * weights_M[:, None]).to(h.dtype)
            y = output.multiply(h, w2, order.offs, order.row_ids)
            y = add_slots(y, order, weighted_biases(indices, scores, b2))
    return y.view(hidden_states.shape).to(hidden_states.dtype)


def columns_of(routing: Tensor, x_TD: Tensor) -> int:
    """Returns the columns of a tensor of routing that has T rows; of no tokens, its last size."""
    tokens = x_TD.shape[0]
    return routing.numel() // tokens if tokens else routing.shape[-1]


def ends_of_even_groups(rows: Tensor, experts: int) -> Tensor:
    """Returns the ends of rows that are in groups of one size already, as Llama 4 passes them."""
    if rows.shape[0] % experts:
        raise ValueError(
            f"experts: expected rows without routing as equally many for each of {experts} "
            f"experts, got {rows.shape[0]} rows"
        )
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=rows.device)
    return ends * (rows.shape[0] // experts)


def expected_projections(module: nn.Module, hidden_states: Tensor, *args: Tensor) -> Tensor:
    """Returns what run_projections returns, in float64."""
    routing, row_major = routing_of(args), bool(is_row_major(module))
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    matrices = [getattr(module, name) for name in NAMES]
    matrices = matrices if row_major else [matrix.mT for matrix in matrices]
    biases = [getattr(module, f"{name}_bias", None) for name in NAMES]
    experts = matrices[1].shape[0]
    if routing is None:
        indices = torch.arange(x.shape[0])[:, None] // (x.shape[0] // experts)
        scores = torch.ones_like(indices, dtype=torch.float32)
    else:
        indices, scores = (t.reshape(x.shape[0], columns_of(t, x)) for t in routing)
        if scores.shape != indices.shape:  # of all experts
            scores = scores.gather(1, indices.clamp(0, scores.shape[1] - 1).long())
    gate_form = gate_of(module)

    def activation(gate_up: Tensor) -> Tensor:
        return activate(module, gate_up) if gate_form is None else swiglu(gate_up, gate_form)

    y = expected_sum(x, matrices, biases, activation, indices, scores)
    return y.view(hidden_states.shape)


def swiglu(gate_up: Tensor, form: Gate) -> Tensor:
    """Returns SwiGLU by torch's ops."""
    pair = (gate_up[..., ::2], gate_up[..., 1::2]) if form.interleaved else gate_up.chunk(2, -1)
    gate, up = pair
    if form.limit is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    return (up + 1) * gate * torch.sigmoid(gate * form.alpha)


class ProjectionExperts(Converted):
    """Hugging Face's experts, converted."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        weights = [module._parameters.get(name) for name in NAMES]
        return all(weight is not None and weight.dim() == 3 for weight in weights)

    @staticmethod
    def reason_against(module: nn.Module) -> str | None:
        return None if is_known(module) else compare_projections(module)

    @staticmethod
    def replaced(module: nn.Module) -> tuple[Callable[..., object], ...]:
        return code_starts(module)

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        require_settings(self)
        return run_projections(self, hidden_states, *args, **kwargs)


def compare_projections(module: nn.Module) -> str | None:
    """Returns how a module's forward differs from run_projections; None: not at all."""
    row_major = bool(is_row_major(module))
    return compare_forward(module, NAMES[1], row_major, expected_projections, [*projection_kinds()])


# ---- transformers' interface ---------------------------------------------------------------------


def run_chosen(module: nn.Module, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Computes the experts of a module that is not converted and whose model chose this library.

    Raises:
        ValueError: the module computes something else. It is compared at its first call.
        RuntimeError: compiled code contains the first call. Without fullgraph=True torch then runs
            that call uncompiled.
    """
    compared = getattr(module, COMPARED, None)
    if compared is None or first_change(compared, module) is not None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"experts implementation {IMPLEMENTATION!r}: expected a first call of "
                f"{type(module).__name__} outside compiled code, which compares its results"
            )
        why = ProjectionExperts.reason_against(module)
        if why is not None:
            raise ValueError(
                f"experts implementation {IMPLEMENTATION!r}: expected experts that minifloat can "
                f"compute, got {type(module).__name__}, whose forward {why}; choose 'eager'"
            )
        setattr(module, COMPARED, read_settings(module, *code_starts(module)))
    return run_projections(module, hidden_states, *args, **kwargs)


def register_implementation() -> bool:
    """Registers run_chosen with transformers as experts implementation "minifloat".

    transformers is imported where it is installed, because models choose an implementation by name.

    Returns:
        Whether it is registered now.
    """
    try:
        functions = importlib.import_module(INTERFACE).ALL_EXPERTS_FUNCTIONS
    except (ImportError, AttributeError):  # not installed, or before version 5
        return False
    functions.register(IMPLEMENTATION, run_chosen)
    return True
