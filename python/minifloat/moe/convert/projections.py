"""Hugging Face's experts: gate_up_proj and down_proj, as parameters of one module.

    layout       gate_up_proj      down_proj
    linear       (E, 2I, D)        (E, D, I)         Mixtral, Qwen3-MoE, DeepSeek-V3
    row-major    (E, D, 2I)        (E, I, D)         gpt-oss, Llama 4

Biases are gate_up_proj_bias (E, 2I) and down_proj_bias (E, D). The activation is SwiGLU, gpt-oss's
clamped one by alpha and limit, or any other by the module's act_fn or its class's _apply_gate.

What of these a module's code reads is its `Formula`. known.py has it of known classes. Others are
taken by their attributes; same_forward.py compares the result with the module's own forward.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._native import ops
from ...nn.cache.operand_cache import compute_dtype
from ...nn.convert.reads import first_change, has_hooks
from ...nn.grouped_product import call_of, matrix_of
from ...nn.names import own_parameter
from ..feed_forward import (
    Gate,
    Products,
    add_slots,
    order_rows,
    require_no_tangents,
    take_rows,
    weighted_biases,
)
from .calls import PROJECTION_CALLS
from .converted import Converted
from .implementations import (
    GATE,
    INTERFACE,
    code_starts,
    is_dispatched,
    reason_of_choice,
    reason_of_implementation,
)
from .known import ACTIVATIONS, CLAMPED, known_digest
from .same_forward import compare_forward, expected_sum, swiglu
from .settings import read_settings, require_settings

NAMES = ("gate_up_proj", "down_proj")
IMPLEMENTATION = "minifloat"  # among transformers' implementations of experts
COMPARED = "_same_forward"  # attribute of a module whose forward was compared: settings, form
FORMULA = "_formula"  # attribute of a converted module


class Formula(NamedTuple):
    """What a module's code reads besides its two matrices and act_fn.

    Args:
        clamped: gpt-oss's clamped SwiGLU, by the attributes limit and alpha at the conversion;
            None: the class's _apply_gate where it has one, else act_fn(gate) * up.
        biases: whether the products have biases.
        dispatched: whether a model of transformers chooses which function runs.
    """

    clamped: Gate | None
    biases: bool
    dispatched: bool


def is_row_major(module: nn.Module) -> bool | None:
    """Tells whether a module's matrices are (E, K, N); None where they are of neither layout."""
    return are_row_major(*(getattr(module, name).shape for name in NAMES))


def are_row_major(gate_up: Sequence[int], down: Sequence[int]) -> bool | None:
    """Tells of their shapes whether matrices are (E, K, N); None of neither layout."""
    if gate_up[0] != down[0]:
        return None
    if gate_up[1] == 2 * down[2] and gate_up[2] == down[1]:
        return False
    return True if gate_up[2] == 2 * down[1] and gate_up[1] == down[2] else None


def formula_of(module: Any) -> Formula:
    """Returns the form of a module that is not converted."""
    digest = known_digest(module)
    if digest is not None:
        has_gate, interleaved = digest in CLAMPED, CLAMPED.get(digest, False)
        biases = has_gate
    else:
        has_gate = all(is_number(getattr(module, name, None)) for name in ("limit", "alpha"))
        interleaved = not getattr(module, "is_concatenated", False)  # transformers' attribute
        biases = any(getattr(module, f"{name}_bias", None) is not None for name in NAMES)
    clamped = Gate(float(module.limit), float(module.alpha), interleaved) if has_gate else None
    return Formula(clamped, biases, is_dispatched(module))


def is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def gate_of(module: nn.Module, form: Formula) -> Gate | None:
    """Returns the form of the module's SwiGLU; None for another activation."""
    act = getattr(module, "act_fn", None)
    if form.clamped is not None or hasattr(type(module), GATE):
        return form.clamped
    if is_silu_module(act):
        return None if has_hooks(act) or "forward" in act.__dict__ else Gate()
    return Gate() if act is F.silu else None


def is_silu_module(act: object) -> TypeGuard[nn.Module]:
    """Tells whether a module is torch's SiLU, or transformers', without importing that."""
    cls = type(act)
    return cls is nn.SiLU or (cls.__name__, cls.__module__) == ("SiLUActivation", ACTIVATIONS)


def activate(module: Any, gate_up: Tensor) -> Tensor:
    """Returns the module's own activation of gate and up."""
    if hasattr(type(module), GATE):
        return module._apply_gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return module.act_fn(gate) * up


def routing_of(arguments: Sequence[object]) -> tuple[Tensor, Tensor] | None:
    """Returns indices and weights, in whatever order; None where the call has neither."""
    given = [value for value in arguments if isinstance(value, Tensor)]
    others = [value for value in arguments if not isinstance(value, Tensor) and value is not None]
    if others:
        raise TypeError(
            "experts: expected the experts of each token and their weights as tensors, got "
            f"{others[0]!r}"
        )
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
    module: nn.Module, form: Formula, hidden_states: Tensor, *args: object, **kwargs: object
) -> Tensor:
    """Computes the module's experts.

    Args:
        module: it has gate_up_proj and down_proj.
        form: what else its code reads.
        hidden_states: (…, D), tokens; without routing, rows of equally many for each expert.
        args, kwargs: the experts of each token (T, k), integers, and their weights (T, k),
            floating, in any order.

    Returns:
        The shape and dtype of hidden_states; rows (T, D) without routing.

    Raises:
        TypeError: the other arguments are not a tensor of integers and one of floating numbers.
        ValueError: the weights are not of the experts' shape; rows without routing are not equally
            many for each expert.
    """
    require_no_tangents(type(module).__name__, (hidden_states, *module.parameters()))
    routing = routing_of((*args, *kwargs.values()))
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    x = x.to(compute_dtype(x))
    w13, w2 = (getattr(module, name) for name in NAMES)  # computed, perhaps
    row_major, gate = bool(are_row_major(w13.shape, w2.shape)), gate_of(module, form)
    inputs = call_of(module, NAMES[0], w13, x, row_major)
    output = call_of(module, NAMES[1], w2, x, row_major, needs_columnwise=True)
    w13, w2 = matrix_of(w13, inputs, row_major), matrix_of(w2, output, row_major)
    b13, b2 = biases_of(module, form)
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
        indices, scores = rows_of(routing, x)
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
    return y.view(x.shape if routing is None else hidden_states.shape).to(hidden_states.dtype)


def biases_of(module: nn.Module, form: Formula) -> tuple[Tensor | None, Tensor | None]:
    """Returns the biases of both products, None where the module's code adds none."""
    if not form.biases:
        return None, None
    b13, b2 = (getattr(module, f"{name}_bias", None) for name in NAMES)
    return b13, b2


def rows_of(routing: tuple[Tensor, Tensor], x_TD: Tensor) -> list[Tensor]:
    """Returns indices and weights as (T, k) each."""
    tokens = x_TD.shape[0]
    rows = [t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t.reshape(tokens, -1) for t in routing]
    if rows[0].shape != rows[1].shape or rows[0].shape[0] != tokens:
        indices, weights = (tuple(t.shape) for t in routing)
        raise ValueError(
            f"experts: expected the experts of each of {tokens} tokens, and a weight for each of "
            f"those, got experts of shape {indices} and weights of {weights}"
        )
    return rows


def ends_of_even_groups(rows: Tensor, experts: int) -> Tensor:
    """Returns the ends of rows that are in groups of one size already, as Llama 4 passes them."""
    if rows.shape[0] % experts:
        raise ValueError(
            f"experts: expected rows without routing as equally many for each of {experts} "
            f"experts, got {rows.shape[0]} rows"
        )
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=rows.device)
    return ends * (rows.shape[0] // experts)


def expected_projections(
    form: Formula, module: nn.Module, hidden_states: Tensor, *args: Tensor
) -> Tensor:
    """Returns what run_projections returns, in float64."""
    routing, row_major = routing_of(args), bool(is_row_major(module))
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    matrices = [getattr(module, name) for name in NAMES]
    matrices = matrices if row_major else [matrix.mT for matrix in matrices]
    experts = matrices[1].shape[0]
    if routing is None:
        indices = torch.arange(x.shape[0])[:, None] // (x.shape[0] // experts)
        scores = torch.ones_like(indices, dtype=torch.float32)
    else:
        indices, scores = rows_of(routing, x)
    gate = gate_of(module, form)

    def activation(gate_up: Tensor) -> Tensor:
        return activate(module, gate_up) if gate is None else swiglu(gate_up, gate)

    y = expected_sum(x, matrices, biases_of(module, form), activation, indices, scores)
    return y if routing is None else y.view(hidden_states.shape)


class ProjectionExperts(Converted):
    """Hugging Face's experts, converted."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        weights = [own_parameter(module, name) for name in NAMES]
        return all(weight is not None and weight.dim() == 3 for weight in weights)

    @staticmethod
    def reason_against(module: nn.Module) -> str | None:
        if GATE in module.__dict__:
            return f"may call {GATE}, which is replaced on the instance"
        if (why := reason_of_choice(module)) is not None:
            return why
        return None if known_digest(module) is not None else compare_projections(module)

    @staticmethod
    def replaced(module: nn.Module) -> tuple[Callable[..., object], ...]:
        return code_starts(module)

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        if not isinstance(self, ProjectionExperts):  # kept by a wrapper past mf.restore_
            return type(self).forward(self, hidden_states, *args, **kwargs)
        require_settings(self)
        form: Formula = self.__dict__[FORMULA]
        if form.dispatched and (why := reason_of_implementation(self)) is not None:
            raise RuntimeError(
                f"{type(self).__name__}: expected an experts implementation of transformers or "
                f"minifloat, got a config that {why}; call mf.restore_ before such a change"
            )
        return run_projections(self, form, hidden_states, *args, **kwargs)


def compare_projections(module: nn.Module) -> str | None:
    """Returns how a module's forward differs from run_projections; None: not at all."""
    expect = partial(expected_projections, formula_of(module))
    return compare_forward(module, NAMES[1], bool(is_row_major(module)), expect, PROJECTION_CALLS)


# ---- transformers' interface ---------------------------------------------------------------------


def run_chosen(module: nn.Module, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Computes the experts of a module that is not converted and whose model chose this library.

    Raises:
        ValueError: the module computes something else. It is compared at its first call.
        RuntimeError: compiled code contains the first call. Without fullgraph=True torch then runs
            that call uncompiled.
    """
    settings, form = module.__dict__.get(COMPARED, (None, None))
    if settings is None or first_change(settings, module) is not None:
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
        form = formula_of(module)
        setattr(module, COMPARED, (read_settings(module, *code_starts(module)), form))
    return run_projections(module, form, hidden_states, *args, **kwargs)


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
