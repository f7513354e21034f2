"""Tensor parallelism of experts over the hidden width I: w1, w3 (E, I, D) and w2 (E, D, I).

    x, routing weights     whole on each rank                   gradients: summed over the ranks
    w1, w3, gate, up, h    cut along I
    w2                     cut along I, its contraction
    y                      a sum over the ranks

Operands equal one process's, byte for byte: where a scale covers values of several ranks, its amax
is the largest of all ranks. Along I it is the amax of a tensor, or of an expert, and of rows that
the ranks cut: those of h and w2 in fprop, of gate's and up's gradients and w1, w3 in dgrad. Ranks
exchange amaxes as int32 bit patterns.

The parameters are DTensors, w1 and w3 with Shard(1), w2 with Shard(2), over one mesh dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._native import ops
from ..nn.distributed_hooks import hooks, is_distributed
from ..nn.grouped_product import product_of
from ..recipe import Recipe, operand_names
from ..spec import Spec

COLUMNWISE = ("w/dgrad", "g/wgrad", "x/wgrad")  # operands that are read so


class Operand(NamedTuple):
    """One direction of a matrix: codes, scale and amax, as products read them."""

    codes: Tensor
    scale: Tensor
    amax: Tensor


@dataclass(frozen=True)
class CutProduct:
    """A product of experts whose weight (E, N, K) the ranks cut along N (1) or K (2).

    Args:
        name: of the weight, for errors.
        recipe: the formats of the three products.
        group: the ranks.
        dim: of the weight.
    """

    name: str
    recipe: Recipe
    group: Any
    dim: int

    def multiply(
        self,
        a_MK: Tensor,
        b_EKN: Tensor,
        offs_E: Tensor,
        row_ids_M: Tensor | None = None,
        bias_EN: Tensor | None = None,
        a_operands: Any = None,
    ) -> Tensor:
        """Returns this rank's part of the rows times their matrices, differentiable in a and b."""
        return CutMultiply.apply(self, a_MK, b_EKN, offs_E)

    def cut_of(self, matrix: str) -> int | None:
        """Returns the dimension, rows (0) or columns (1), of x, w or g that the ranks cut."""
        return {"x": (None, 1), "w": (0, 1), "g": (1, None)}[matrix][self.dim - 1]

    def cast(self, matrix: str, values: Tensor, spec: str, columnwise: bool, **at: Any) -> Operand:
        """Quantizes x, w or g in one direction, with the amaxes of all ranks."""
        cut, parsed, amax = self.cut_of(matrix), Spec.parse(spec), None
        if cut is not None:
            is_along = (cut == 1) != columnwise  # whether the ranks cut the operand's rows as read
            is_shared = parsed.amax_of == "tensor" or (parsed.amax_of == "row" and is_along)
            if is_shared:
                own = ops.amax(values, spec, columnwise, groups=at.get("groups"))
                amax = hooks().reduce_amaxes(own, self.group)
        row, col = ("", spec) if columnwise else (spec, "")
        given = {"amax_col" if columnwise else "amax_row": amax}
        out = ops.quantize(values, row, col, **given, **at)
        return Operand(*(out[4:7] if columnwise else out[:3]))

    def require_specs(self, weight: Tensor) -> None:
        """Raises ValueError where a spec is not supported, or its blocks reach over a cut."""
        recipe = self.recipe
        pairs = [text for p in (recipe.fprop, recipe.dgrad, recipe.wgrad) for text in (p.a, p.b)]
        length = weight.shape[self.dim]
        for operand, text in zip(operand_names(), pairs):
            spec = Spec.parse(text)
            if spec.is_bf16 or spec.is_stochastic or spec.is_delayed:
                raise ValueError(
                    f"{self.name}: expected a recipe without bf16, +sr and +delayed for a weight "
                    f"that the ranks cut along I, got {text} as {operand} ({recipe})"
                )
            columnwise = operand in COLUMNWISE
            cut = self.cut_of(operand[0])
            multiple = 1 if cut is None else ops.shard_multiple(text, columnwise, cut)
            if length % multiple:
                raise ValueError(
                    f"{self.name}: expected I over the ranks as a multiple of {multiple}, of "
                    f"{operand} in {text}, got {length}"
                )


class CutMultiply(torch.autograd.Function):
    """The rows of a times the matrices b. Arguments: the product, a (M, K), b (E, K, N), offs."""

    @staticmethod
    def forward(ctx: Any, call: CutProduct, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        recipe, w = call.recipe, b.transpose(-2, -1).to(a.dtype)
        table = ops.group_table(offs, a.shape[0])
        x = call.cast("x", a, recipe.fprop.a, False, groups=table)
        rows = call.cast("w", w, recipe.fprop.b, False)
        ctx.call = call
        ctx.save_for_backward(a, b, table)
        product, k = str(recipe.fprop), a.shape[1]
        return ops.scaled_mm(
            *x, *rows, product, k=k, out_dtype=a.dtype, groups=table, zero_tail=True
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call, (a, b, table) = ctx.call, ctx.saved_tensors
        recipe, (_, needs_a, needs_b, _) = call.recipe, ctx.needs_input_grad
        g = grads[0].to(a.dtype).contiguous()
        da = db = None
        if needs_a:
            w = b.transpose(-2, -1).to(a.dtype)
            left = call.cast("g", g, recipe.dgrad.a, False, groups=table)
            right = call.cast("w", w, recipe.dgrad.b, True)
            da = ops.scaled_mm(
                *left,
                *right,
                str(recipe.dgrad),
                k=g.shape[1],
                out_dtype=a.dtype,
                groups=table,
                zero_tail=True,
            )
        if needs_b:
            specs = recipe.wgrad.a, recipe.wgrad.b
            unit = max(Spec.parse(spec).group_unit for spec in specs)
            where = {"groups": table, "group_unit": unit}
            left = call.cast("g", g, specs[0], True, **where)
            right = call.cast("x", a, specs[1], True, **where)
            product, rows = str(recipe.wgrad), a.shape[0]
            dw = ops.scaled_mm(*left, *right, product, k=rows, out_dtype=b.dtype, **where)
            db = dw.transpose(-2, -1)
        return None, da, db, None


class CopyToRanks(torch.autograd.Function):
    """A tensor that is whole on each rank; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' tensors, on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def cut_dim(weight: Any) -> int:
    """Returns the dimension within matrices that ranks cut a weight along; 0: none."""
    if not is_distributed(weight):
        return 0
    dims = {getattr(placement, "dim", 0) for placement in weight.placements} - {0}
    return 0 if not dims else max(dims)


def are_cut(module: Any) -> bool:
    """Tells whether ranks cut a weight of experts along I."""
    return any(cut_dim(getattr(module, name)) > 0 for name in module.weight_names)


def cut_products(module: Any) -> list[CutProduct]:
    """Returns the products of experts that ranks cut along I; checks that they fit each other."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "experts: expected eager mode for weights that ranks cut along I, got torch.compile"
        )
    found = []
    for name in module.weight_names:
        weight, product = getattr(module, name), product_of(module, name)
        dim = 2 if name == "w2" else 1
        title = name if product is None else product.fqn
        is_one_dim = is_distributed(weight) and weight.device_mesh.ndim == 1
        if not is_one_dim or cut_dim(weight) != dim or name == "w13":
            got = getattr(weight, "placements", "no mesh")
            raise ValueError(
                f"{title}: expected w1 and w3 as DTensors with Shard(1), w2 with Shard(2), over "
                f"one mesh dimension, got {name} with {got}"
            )
        if type(weight._local_tensor) not in (Tensor, torch.nn.Parameter):
            kind = type(weight._local_tensor).__name__
            raise ValueError(
                f"{title}: expected high-precision weights that ranks cut along I, got a {kind}"
            )
        if product is None:
            raise ValueError(f"{title}: expected experts under a recipe, got high precision")
        if weight.shape[dim] % weight.device_mesh.size():
            raise ValueError(
                f"{title}: expected I as a multiple of the ranks, got {weight.shape[dim]} over "
                f"{weight.device_mesh.size()} ranks"
            )
        cut = CutProduct(title, product.recipe, weight.device_mesh.get_group(), dim)
        cut.require_specs(weight._local_tensor)
        found.append(cut)
    if any(b is not None for b in (*(getattr(module, n) for n in module.bias_names), module.b2)):
        raise ValueError(f"{found[0].name}: expected experts without biases, cut along I")
    return found
