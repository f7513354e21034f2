"""Casts whose rule is written in Python, to try it before it is written in C++.

    x  ->  as read, float32  ->  blocks (n, elements)  ->  rule  ->  values  ->  x's shape and dtype

A rule gets the blocks of one matrix, a block a row, and returns the values that their codes would
stand for. There are no codes: products multiply the values. `round_to` rounds to the values of a
format, which it decodes by the library's own ops, or to those of a grid that a caller makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import require_bool, require_int, require_one_of, require_text
from ..spec import Spec
from ..tensor.directions import require_memory
from ..tensor.quantized import Quantized, dequantize, quantize, require_tensor

# ---- Rounding ------------------------------------------------------------------------------------

# Format of elements -> a spec that has it, and bytes with each code that is not negative.
ELEMENTS = {
    "e2m1": ("mxfp4", range(0x10, 0x80, 0x22)),  # two codes a byte
    "e1m2": ("e1m2/1x32", range(0x10, 0x80, 0x22)),
    "e4m3": ("mxfp8", range(0x80)),
    "e5m2": ("mxfp8/e5m2", range(0x80)),
}
SCALES = "e8m0"
ROUNDINGS = ("nearest", "up", "down")
LARGEST = torch.finfo(torch.float64).max / 2  # of a grid, whose neighbours' sums are computed


def round_to(x: Tensor, grid: str | Tensor, rounding: str = "nearest") -> Tensor:
    """Rounds magnitudes to the values of a format, or of a grid; signs stay.

    Args:
        x: any shape, a floating dtype.
        grid: "e2m1", "e1m2", "e4m3", "e5m2" or "e8m0", or the magnitudes of another format: (n),
            rising, none negative, none above half of float64's largest.
        rounding: "nearest": of two values equally near, the one with an even place in the grid,
            which for a format is an even code. "up": away from zero. "down": towards zero.

    Returns:
        x's shape and dtype. Magnitudes past the ends of the grid become the end, infinities too.
        NaN stays. "e8m0", the format of scales, has no zero and no infinity: 0 becomes 2^-127, and
        an infinity NaN.

    Raises:
        TypeError: `x` is no Tensor, or `grid` neither str nor Tensor.
        ValueError: an argument is not as expected.

    Source: docs/numerics.md, section 2.

    Example:
        >>> x = torch.tensor([0.3, 2.5, -3.5, 100.0])
        >>> mf.lab.round_to(x, "e2m1")  # 2.5 and 3.5 are ties
        tensor([ 0.5000,  2.0000, -4.0000,  6.0000])
        >>> mf.lab.round_to(x, "e8m0", "up")
        tensor([  0.5000,   4.0000,  -4.0000, 128.0000])
        >>> mf.lab.round_to(x, torch.arange(8.0))  # INT4
        tensor([ 0.,  2., -4.,  7.])
    """
    x = require_tensor("round_to: x", x).detach()
    if not x.is_floating_point():
        raise ValueError(f"round_to: x: expected a floating dtype, got {x.dtype}")
    require_dense("round_to", x)
    if not isinstance(grid, (str, Tensor)):
        name = type(grid).__name__
        raise TypeError(f"round_to: grid: expected a format's name or a Tensor, got {name}")
    require_one_of("round_to: rounding", rounding, ROUNDINGS)
    values, nan = require_grid(grid).to(x.device), x.isnan()
    if isinstance(grid, str) and grid == SCALES:
        nan = ~x.isfinite()
    doubled = x.abs().double().contiguous() * 2
    place = torch.bucketize(doubled, boundaries_of(values, rounding))
    return values[place].masked_fill(nan, torch.nan).copysign(x).to(x.dtype)


def boundaries_of(values: Tensor, rounding: str) -> Tensor:
    """Returns the boundaries of a grid: past k of them, twice a magnitude becomes that of place k.

    Twice a middle is the sum of two values. Where float64 rounds it up, the float below is the last
    that belongs to the lower value, and where it rounds it down, the sum is. A sum that is exact is
    a tie.
    """
    zero = torch.zeros_like(values[1:])
    if rounding == "up":
        return values[:-1] * 2
    if rounding == "down":
        return (values[1:] * 2).nextafter(zero)
    sums = values[1:] + values[:-1]
    lost = values[:-1] - (sums - values[1:])  # exact, because values[1:] is the larger (Fast2Sum)
    is_odd = torch.arange(len(sums), device=values.device) % 2 == 1  # of the place below
    goes_up = (lost < 0) | ((lost == 0) & is_odd)  # a magnitude of half this sum
    return torch.where(goes_up, sums.nextafter(zero), sums)


def require_grid(grid: str | Tensor) -> Tensor:
    """Returns the magnitudes in float64: those of a format, or a caller's after their check."""
    if isinstance(grid, str):
        return format_grid(grid)
    values = grid.detach().double()
    rises = values.dim() == 1 and len(values) > 0 and bool((values.diff() > 0).all())
    if not rises or not 0 <= values[0] <= values[-1] <= LARGEST:
        raise ValueError(
            "round_to: grid: expected rising finite magnitudes (n), none negative and none above "
            f"{LARGEST}, got {grid.tolist()}"
        )
    return values


def format_grid(name: str) -> Tensor:
    """Returns the magnitudes of a format, by code, in float64 on the CPU."""
    require_one_of("round_to: grid", name, (*ELEMENTS, SCALES))
    if name == SCALES:
        values = torch.arange(0xFF, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        return values.double()
    spec, codes = ELEMENTS[name]
    packed = torch.tensor([codes], dtype=torch.uint8)
    parsed = Spec.parse(spec)
    cols = packed.numel() * 8 // parsed.code_bits
    scale = torch.ones(1, -(-cols // parsed.block[1])).to(parsed.scale_dtype)
    q = Quantized(packed, scale, torch.empty(0), spec, (1, cols))
    values = dequantize(q)[0].double()
    return values[values.isfinite()]


# ---- Rules ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A cast as a function of blocks, for mf.lab.fake_quantize and mf.lab.errors.

    Args:
        function: blocks of a matrix, float32 (n, elements), one a row -> their values, of the same
            shape. Elements of a block lie in the order of its rows. Those past the edge of the
            matrix are zeros. The function sees all blocks at once, so it can take an amax of the
            whole matrix.
        block: rows and columns of a block, as read. -1: all of them.
        name: in tables; "": the function's own.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a size of `block` is neither positive nor -1.

    Example:
        >>> def int4(blocks):
        ...     scale = mf.lab.round_to(blocks.abs().amax(-1, keepdim=True) / 7, "e8m0", "up")
        ...     return scale * mf.lab.round_to(blocks / scale, torch.arange(8.0))
        >>> rule = mf.lab.Rule(int4, block=(1, 16))
        >>> mf.lab.fake_quantize(torch.tensor([[0.1, 0.2, 0.4, 6.0]]), rule)
        tensor([[0., 0., 0., 6.]])
    """

    function: Callable[[Tensor], Tensor]
    block: tuple[int, int]
    name: str = ""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"Rule: function: expected a function of blocks, got {type(self.function).__name__}"
            )
        if not isinstance(self.block, tuple) or len(self.block) != 2:
            raise TypeError(f"Rule: block: expected (rows, cols), got {self.block!r}")
        for size in self.block:
            if require_int("Rule: block", size, least=-1) == 0:
                raise ValueError(f"Rule: block: expected positive sizes or -1, got {self.block}")
        if not require_text("Rule: name", self.name):
            name = getattr(self.function, "__name__", type(self.function).__name__)
            object.__setattr__(self, "name", name)


def fake_quantize(
    x: Tensor, rule: str | Rule, *, columnwise: bool = False, seed: int = 0, stream: int = 0
) -> Tensor:
    """Computes the values that a cast of x gives, in x's dtype. Gradients pass through unchanged.

    Args:
        x: (rows, cols) or (batch, rows, cols), float32 or bfloat16. The matrices of a batch are
            cast one by one.
        rule: an operand spec: the values are dequantize(quantize(x, rule), x.dtype). Or a
            mf.lab.Rule: a rule in Python, which gets x in float32.
        columnwise: whether to cast the transpose, with blocks along x's rows.
        seed, stream: of a spec's random bits, as quantize takes them. A Rule draws its own.

    Returns:
        (…, rows, cols) as read. Under a spec with `+rht` or `+eden` the values stay transformed.

    Raises:
        TypeError, ValueError: an argument is not as expected, `x` requires a gradient under a spec
            with a transform, or the values of a mf.lab.Rule require one.

    Example:
        >>> x = torch.tensor([[0.1, 0.2, 0.4, 6.0] * 8], requires_grad=True)
        >>> y = mf.lab.fake_quantize(x, "mxfp4")
        >>> y[0, :4]
        tensor([0.0000, 0.0000, 0.5000, 6.0000], grad_fn=<SliceBackward0>)
        >>> y.square().sum().backward()
        >>> x.grad[0, :4]  # of the values
        tensor([ 0.,  0.,  1., 12.])
    """
    require_values("fake_quantize", x)
    require_rule("fake_quantize: rule", rule)
    require_bool("fake_quantize: columnwise", columnwise)
    require_int("fake_quantize: seed", seed)
    require_int("fake_quantize: stream", stream)
    has_gradient = x.requires_grad and torch.is_grad_enabled()
    if has_gradient and isinstance(rule, str) and Spec.parse(rule).transform:
        raise ValueError(
            "fake_quantize: expected a spec without a transform for x that requires a gradient, "
            f"got {rule}: its values are transformed"
        )
    cast: str | Rule | Tensor = rule
    if isinstance(rule, Rule):
        cast = values = apply_rule((x.mT if columnwise else x).detach(), rule).to(x.dtype)
        if values.requires_grad:
            raise ValueError(
                f"fake_quantize: rule {rule.name}: expected values without a gradient, got some "
                "that require one, of a tensor that the rule's function reads, such as a learned "
                "scale: gradients pass to x alone. Call .detach() on it in the function"
            )
    y: Tensor = StraightThrough.apply(x, cast, columnwise, seed, stream)
    return y


class StraightThrough(torch.autograd.Function):
    """The values of a cast; backward passes gradients to x as they are."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cast: str | Tensor, columnwise: bool, seed: int, stream: int
    ) -> Tensor:
        ctx.columnwise = columnwise
        if isinstance(cast, Tensor):  # the values of a rule in Python
            return cast.clone()
        q = quantize(x, cast, columnwise=columnwise, seed=seed, stream=stream)
        return dequantize(q, x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return g.mT if ctx.columnwise else g, None, None, None, None


def apply_rule(x: Tensor, rule: Rule) -> Tensor:
    """Returns a rule's values of x (…, rows, cols), as read."""
    if x.numel() == 0:
        return x.float()
    if x.dim() == 3:
        batch = torch.empty(x.shape, device=x.device)
        for e in range(len(x)):
            batch[e] = apply_rule(x[e], rule)
        return batch
    (rows, cols), sizes = x.shape, zip(rule.block, x.shape)
    height, width = (most if size == -1 else size for size, most in sizes)
    # A copy, which the function may write to. Rows of blocks, height, columns of blocks, width.
    tiles = F.pad(x.to(torch.float32, copy=True), (0, -cols % width, 0, -rows % height))
    tiles = tiles.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    blocks = tiles.transpose(1, 2).reshape(-1, height * width)
    values = rule.function(blocks)
    if not isinstance(values, Tensor):
        raise TypeError(f"rule {rule.name}: expected a Tensor, got {type(values).__name__}")
    if values.shape != blocks.shape:
        shapes = f"{tuple(blocks.shape)}, got {tuple(values.shape)}"
        raise ValueError(f"rule {rule.name}: expected values of the blocks' shape {shapes}")
    tiles = values.reshape(tiles.shape[0], tiles.shape[2], height, width).transpose(1, 2)
    return tiles.flatten(2, 3).flatten(0, 1)[:rows, :cols].contiguous()


# ---- Checks --------------------------------------------------------------------------------------


def require_values(function: str, x: object) -> Tensor:
    """Returns a tensor that a cast takes: one matrix or a batch, in float32 or bfloat16."""
    x = require_tensor(f"{function}: x", x)
    if x.dim() not in (2, 3):
        form = "(rows, cols) or (batch, rows, cols)"
        raise ValueError(f"{function}: expected x of shape {form}, got {x.dim()} dimensions")
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{function}: expected x in float32 or bfloat16, got {x.dtype}")
    require_dense(function, x)
    return x


def require_dense(function: str, x: Tensor) -> None:
    """Raises ValueError where x is not dense, or has elements outside its storage."""
    if x.layout != torch.strided:
        raise ValueError(f"{function}: expected dense x, got {x.layout}")
    require_memory(f"{function}: x", x)


def require_rule(name: str, rule: object) -> str | Rule:
    """Returns `rule`; TypeError where it is neither a spec's text nor a Rule."""
    if not isinstance(rule, (str, Rule)):
        raise TypeError(f"{name}: expected a spec or a mf.lab.Rule, got {type(rule).__name__}")
    return rule
