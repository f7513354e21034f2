"""What an operand spec is: its elements, scales, blocks, rounding and transform.

    spec = Spec.parse("nvfp4/16x16+rht")     a text is parsed once
    spec.code_bits, spec.block, spec.amax_of, spec.sizes(rows, cols)

The grammar and every answer are the native library's (include/minifloat/spec.h). No other module
asks the operators about a spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from ._native import ops
from .checks import require_text

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """Makes torch.compile call `function` once a graph and take its result as a constant.

    torch.compiler.assume_constant_result does the same, but imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Sizes(NamedTuple):
    """Sizes of an operand read as (rows, cols)."""

    code_cols: int  # bytes of a row of codes
    padded_cols: int  # columns after the transform has grown them
    scale_rows: int  # of block scales; the rows where each has a scale; else 0
    scale_cols: int  # of block scales; else 0


@dataclass(frozen=True)
class Spec:
    """The answers of the native library about one operand spec."""

    text: str  # canonical
    elements: str  # "bf16", "e4m3", "e5m2" or "e2m1"
    rule: str  # of scales: "none", "tensor", "row", "block", "mx" or "nvfp4"
    code_bits: int  # of an element: 4 or 8; 16 under bf16
    scale_dtype: torch.dtype  # as a reader sees scales; the operators hand bytes over as uint8
    amax_of: str  # what an amax is of: the "tensor", a "row" as read; "": nothing but blocks
    block: tuple[int, int]  # rows and columns as read that share a block scale; (0, 0): no blocks
    transform: int  # points of the Hadamard transform; 0: none
    is_stochastic: bool
    is_delayed: bool

    @staticmethod
    @constant_in_graphs
    def parse(text: str) -> Spec:
        """Reads a spec's text.

        Raises:
            TypeError: `text` is no str.
            ValueError: it is no spec; the message has the position and what would be legal.
        """
        return _parse(require_text("spec", text))

    @property
    def is_bf16(self) -> bool:
        """Whether the operand stays in high precision."""
        return self.elements == "bf16"

    @property
    def has_blocks(self) -> bool:
        return self.block != (0, 0)

    @property
    def transposes_exactly(self) -> bool:
        """Whether the codes of one direction, transposed, are those of the other."""
        height, width = self.block
        return height == width and self.amax_of != "row" and self.transform == 0

    @property
    def bits(self) -> float:
        """Bits an element, block scales included."""
        height, width = self.block
        scale_bits = 8 * self.scale_dtype.itemsize
        return self.code_bits + (scale_bits / (height * width) if self.has_blocks else 0)

    def unit(self, dim: int) -> int:
        """Returns how many elements along rows (0) or columns (1) as read stay together.

        They share a block scale, a transform or a byte of codes.
        """
        block = max(self.block[dim], 1)
        return block if dim == 0 else max(block, self.transform, 8 // self.code_bits)

    def sizes(self, rows: int, cols: int) -> Sizes:
        """Returns the sizes of an operand read as (rows, cols)."""
        return _sizes(self.text, rows, cols)

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Returns the shape of the scales of an operand read as (rows, cols)."""
        if self.has_blocks:
            return self.sizes(rows, cols)[2:]
        return (rows,) if self.amax_of == "row" else ()

    def amax_shape(self, rows: int) -> tuple[int, ...]:
        """Returns the shape of the amax that an operand of so many rows, as read, keeps."""
        if self.amax_of == "row":
            return (rows,)
        return (0,) if self.has_blocks and self.amax_of == "" else ()


def product_parts(canonical: str) -> tuple[str, str, bool]:
    """Returns a product's operand specs, and whether it accumulates fast."""
    operands, _, fast = canonical.partition(",")
    a, _, b = operands.partition("*")
    return a, b, bool(fast)


@lru_cache(maxsize=1024)
def _parse(text: str) -> Spec:
    canonical = ops.parse_spec(text)
    flags = canonical.split("+")[1:]
    code_cols, _, rows, cols = ops.spec_sizes(canonical, 4096, 4096)
    try:
        amax_of = ("tensor", "row")[ops.amax(torch.zeros(1, 1), canonical).dim()]
    except ValueError:
        amax_of = ""
    transform = ops.spec_sizes(canonical, 1, 1)[1]
    head = canonical.split("+")[0]
    rule = next((r for r in ("mx", "nvfp4") if head.startswith(r)), "block" if cols else amax_of)
    elements = "e2m1" if "fp4" in head else "e5m2" if "e5m2" in head else "e4m3"
    return Spec(
        canonical,
        "bf16" if canonical == "bf16" else elements,
        rule or "none",
        16 if canonical == "bf16" else 8 * code_cols // 4096,
        getattr(torch, ops.scale_dtype(canonical)),
        amax_of,
        (4096 // rows, 4096 // cols) if cols else (0, 0),
        transform if transform > 1 else 0,
        "sr" in flags,
        "delayed" in flags,
    )


@lru_cache(maxsize=4096)
def _sizes(text: str, rows: int, cols: int) -> Sizes:
    return Sizes(*ops.spec_sizes(text, rows, cols))
