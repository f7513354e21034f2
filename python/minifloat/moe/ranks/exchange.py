"""Rows of tokens at the experts of other ranks: as values or as codes.

    forward     Dispatch   x       -> ranks of their experts     products of w13 read it
                Combine    results -> ranks of their tokens
    backward    Combine    g       -> ranks of their experts     dgrad reads it
                Dispatch   gradients of tokens and routing weights -> ranks of their tokens

Each line is one collective; before x and g, where their spec has a tensor amax, one all-reduce of
each expert's. What travels as codes has those that one process with all ranks' tokens
has for x in fprop and for g in dgrad; what wgrad reads is cast from the bfloat16 values of the
codes. Rows that arrive are sorted by expert and id, in the order of one process with all tokens.

Shape suffixes: M rows that this rank sends, A rows that arrive, E experts of all ranks, n of this
one, T tokens, k slots, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..._native import ops
from ...nn.grouped_product import ProductCall
from ...nn.registry import distributed_functions
from ...nn.state.recipe_state import ExpertRange
from ...recipe import Recipe, operand_names
from ...spec import Spec
from ...tensor.quantized import Operand
from ..feed_forward import Order, Products, order_rows
from .dispatch import Route, RowLayout

X, G = "x/fprop", "g/dgrad"  # the operands that can travel as codes
ACTIVE, CURRENT = 0, 1  # columns of an amax history
# The fields of a row besides values or codes: its routing weight; the number of its pair among all
# ranks; and one more than the number of its expert among those of its rank, 0 where no expert
# computes the row.
ROW_METADATA = ((torch.float32, 1), (torch.int32, 1), (torch.int32, 1))


def spec_of(name: str, recipe: str | Recipe) -> Spec:
    """Returns the spec of X or G in a recipe."""
    products = Recipe(recipe)
    return Spec.parse(products.fprop.a if name == X else products.dgrad.a)


def why_values(name: str, calls: Sequence[ProductCall]) -> str | None:
    """Returns why an operand travels as values under dispatch="codes"; None: it travels as codes.

    Args:
        name: X or G.
        calls: those of the products that read the operand.
    """
    spec = spec_of(name, calls[0].recipe)
    if spec.is_bf16:
        return "the recipe has bf16 there"
    if any(Recipe(call.recipe) != Recipe(calls[0].recipe) for call in calls):
        return "w1 and w3 have two recipes"
    if len(calls) > 1 and (spec.is_stochastic or spec.is_delayed):
        return "w1 and w3 each quantize it, with random bits or a scale of their own"
    if spec.draws_signs:
        return "the signs of its transform are those of one product"
    return None


@dataclass(frozen=True)
class Way:
    """How one forward's operands travel.

    Args:
        route: of the rows.
        x: the cast of x; None: x travels as values.
        g: the cast of the gradient; None: it travels as values.
        sent: the order of the rows that this rank sends.
        ids: int32 (M), the numbers of their pairs among all ranks.
        experts: int32 (M), their experts, as the last field of ROW_METADATA.
    """

    route: Route
    x: CodeSender | None
    g: CodeSender | None
    sent: Order
    ids: Tensor
    experts: Tensor

    def send(
        self,
        x: Tensor,
        sender: CodeSender | None,
        codes: Operand | None = None,
        weights: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sends the rows of x to their experts, as values or as codes.

        Args:
            x: (T, D), of the tokens.
            sender: the cast of x; None: values.
            codes: as `CodeSender.quantize` takes them.
            weights: (T, k), the routing weights, which travel with the metadata; None: neither.

        Returns:
            Of the rows that arrive, values, or what `CodeSender.received` returns; and the fields
            of ROW_METADATA, or none.
        """
        fields, slots, kinds = [x], self.sent.slots, [(x.dtype, x.shape[1])]
        shared: list[Tensor] = []
        if sender is not None:
            fields, shared, slots = sender.quantize(x, self, codes)
            kinds = sender.fields(x.shape[1])
        count, of_field = len(kinds), [slots] * len(kinds)
        if weights is not None:
            fields += [weights.reshape(-1).float(), self.ids, self.experts]
            kinds += ROW_METADATA
            of_field += [1, 0, 0]
        layout, route = RowLayout(*kinds), self.route
        arrived = layout.unpack(
            route.send(layout.pack(fields, self.sent.pairs, of_field, route.rows_from))
        )
        rows = arrived[:count] if sender is None else sender.received(arrived[:count], shared)
        return rows, arrived[count:]


@dataclass(frozen=True)
class CodeSender:
    """The cast of one operand by the ranks of its tokens.

    Args:
        name: X or G.
        call: the product's arguments.
        experts: those of this rank, and the ranks, which amaxes are reduced over.
    """

    name: str
    call: ProductCall
    experts: ExpertRange

    @property
    def spec(self) -> Spec:
        return spec_of(self.name, self.call.recipe)

    def fields(self, width: int) -> list[tuple[torch.dtype, int]]:
        """Returns the fields of a row of `width` elements: its codes, and its scales if it has."""
        spec, sizes = self.spec, self.spec.sizes(1, width)
        found = [(torch.uint8, sizes.code_cols)]
        if spec.has_blocks:
            one_byte = spec.scale_dtype.itemsize == 1
            found.append((torch.uint8 if one_byte else torch.float32, sizes.scale_cols))
        elif spec.amax_of == "row":
            found.append((torch.float32, 1))
        return found

    def quantize(
        self, x: Tensor, way: Way, codes: Operand | None = None
    ) -> tuple[list[Tensor], list[Tensor], int]:
        """Casts the rows that this rank sends: tokens, where rows are cast alone, else each row.

        Args:
            x: (T, D), of the tokens.
            way: of the rows.
            codes: x as a linear layer reads it, or None. Where its product is exact it has values
                alone.

        Returns:
            The tensors of `fields`, of tokens or of rows; scale and amax of this rank's experts,
            float32 (n), an empty scale where rows have their own, an empty amax where no expert
            has one; and the slots by which to pack the fields: k of tokens, 0 of rows.
        """
        none = torch.empty(0, device=x.device)
        if self.spec.casts_rows_alone:
            if codes is None or not codes.has_codes:
                codes = Operand(*ops.quantize(x, self.spec.text, "")[:4])
            return [codes.codes, codes.scale], [none, none], way.sent.slots
        spec, call, tokens = self.spec, self.call, way.sent.tokens
        table = ops.group_table(way.sent.offs, way.ids.shape[0])
        active = current = None
        if spec.amax_of == "tensor":
            active, current = self._amaxes(x, table, tokens, way)
        found, scale, *_ = ops.quantize(
            x,
            spec.text,
            "",
            amax_row=active,
            rng=call.rng if spec.is_stochastic else None,
            stream_row=ops.stream(self.name) ^ call.stream,
            groups=table,
            row_ids=way.ids if spec.is_stochastic else None,
            rows_from=tokens,
        )
        amaxes = none if current is None else current[self._own]
        if spec.has_blocks or spec.amax_of == "row":
            return [found, scale], [none, amaxes], 0
        return [found], [scale[self._own], amaxes], 0

    @property
    def _own(self) -> slice:
        """This rank's experts among all."""
        return slice(self.experts.begin, self.experts.begin + self.experts.count)

    def _amaxes(self, x: Tensor, table: Tensor, tokens: Tensor, way: Way) -> tuple[Tensor, Tensor]:
        """Returns the active and the current amax of each of the E experts, from one all-reduce.

        Rows that are dropped do not count. Under delayed scaling it records the current amaxes of
        this rank's experts.
        """
        way.route.wait()  # ranks that differ may not reduce amaxes
        if (kept := way.route.sent_groups(way.sent.offs)) is not None:
            numbers, table = kept
            tokens = tokens.index_select(0, numbers)
        found = ops.amax(x, self.spec.text, groups=table, rows_from=tokens)
        history, group = self.call.amax_history, self.experts.group
        if not self.spec.is_delayed or history is None:
            found = distributed_functions.reduce_amaxes(found, group)
            return found, found
        place, own = operand_names().index(self.name), self._own
        active = torch.zeros_like(found)
        active[own] = history[place, :, ACTIVE]
        found, active = distributed_functions.reduce_amaxes(torch.stack([found, active]), group)
        # .data: no cast reads current amaxes, so backward does not take this for a write.
        current = history.data[place, :, CURRENT]
        torch.maximum(current, found[own], out=current)
        return active, found

    def received(self, fields: Sequence[Tensor], shared: Sequence[Tensor]) -> list[Tensor]:
        """Returns codes, scale and amax of rows that arrived, of what `quantize` returned."""
        scale, amax = shared
        return [fields[0], fields[1] if len(fields) > 1 else scale, amax]


# ---- the exchange --------------------------------------------------------------------------------


class Dispatch(torch.autograd.Function):
    """Sends tokens' rows and weights to the experts' ranks.

    Arguments: way, x, weights, and x as codes or None. Returns the rows that arrive, their weights,
    ids and experts. Where x travels as codes, the rows are a tensor of no memory for the gradient
    of x, and codes, scale and amax follow.
    """

    @staticmethod
    def forward(
        ctx: Any, way: Way, x: Tensor, weights: Tensor, tokens: Operand | None
    ) -> tuple[Any, ...]:
        found, (weights_A, ids, experts) = way.send(x, way.x, tokens, weights)
        values, codes, metadata = found[0], [], [ids.reshape(-1), experts.reshape(-1)]
        if way.x is not None:
            values, codes = x.new_zeros(()).expand(ids.shape[0], x.shape[1]), found
        ctx.route, ctx.dtypes = way.route, (x.dtype, weights.dtype)
        ctx.save_for_backward(*way.sent)
        ctx.mark_non_differentiable(*metadata, *codes)
        ctx.set_materialize_grads(False)
        return values, weights_A, *metadata, *codes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Sends gradients of received rows and weights back, and sums the rows of each token."""
        d_rows, d_weights, *_ = grads
        order = Order(*ctx.saved_tensors)
        x_dtype, weights_dtype = ctx.dtypes
        layout = RowLayout((d_rows.dtype, d_rows.shape[1]), (torch.float32, 1))
        found, d_weights_M = layout.unpack(ctx.route.back(layout.pack([d_rows, d_weights])))
        places = ctx.route.places(order.places)
        dx = ops.add_slots(found, places).to(x_dtype)
        # The place -1 is that of the zero at the end.
        d_weights = F.pad(d_weights_M.reshape(-1), (0, 1)).take(places.long()).to(weights_dtype)
        return None, dx, d_weights, None


class Combine(torch.autograd.Function):
    """Sends the experts' rows back, and sums those of each token: (A, D), sorted, -> (T, D).

    Arguments: way, what takes the gradient's codes or None, rows, pairs and places of the order in
    which they were received, and the base of the sums or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        way: Way,
        gradient: torch.ScriptObject | None,
        rows: Tensor,
        pairs: Tensor,
        places: Tensor,
        base: Tensor | None,
    ) -> Tensor:
        ctx.way, ctx.gradient, ctx.shape = way, gradient, rows.shape
        ctx.save_for_backward(pairs)
        layout = RowLayout((rows.dtype, rows.shape[1]))
        returned = way.route.back(layout.pack([rows], places.reshape(-1), [1]))
        (found,) = layout.unpack(returned)
        return ops.add_slots(found, way.route.places(way.sent.places), base)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_base = grads[0].float() if ctx.needs_input_grad[5] else None
        if not ctx.needs_input_grad[2]:
            return None, None, None, None, None, d_base
        g, (pairs,), way = grads[0].contiguous(), ctx.saved_tensors, ctx.way
        found, _ = way.send(g, way.g)
        if way.g is None:
            g_A = found[0].index_select(0, pairs)
        else:
            ctx.gradient.set(found)
            g_A = g.new_zeros(()).expand(ctx.shape)
        return None, None, g_A, None, None, d_base


def run_on_ranks(
    way: Way,
    products: Products,
    x: Tensor,
    weights_Tk: Tensor,
    tokens: Operand | None,
    base: Callable[[], Tensor | None],
) -> Tensor:
    """Sends rows to their experts, computes them there, and returns the tokens' sums, (T, D).

    Args:
        way, products, weights_Tk: of the layer.
        x: (T, D).
        tokens: x as codes, where x is quantized already.
        base: returns float32 (T, D), which the sums begin with, or None: zeros. It is called last,
            when the ranks are known to have the same layer.
    """
    values, weights_A, ids_A, local_A, *codes = Dispatch.apply(way, x, weights_Tk, tokens)
    order = order_rows(local_A[:, None] - 1, products.matrices[-1].shape[0], ids_A)
    gradient = None if way.g is None else torch.classes.minifloat.GradientCodes()
    rows = products.run(
        values, weights_A, order, sums=False, x_codes=codes or None, gradient=gradient
    )
    return Combine.apply(way, gradient, rows, order.pairs, order.places, base())
