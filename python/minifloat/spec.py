"""Operand specs: their elements, scales, blocks, rounding and transform.

    spec = Spec.parse("nvfp4/16x16+rht")     a text is parsed once
    spec.code_bits, spec.block, spec.amax_of, spec.sizes(rows, cols)

The native library parses specs and computes the fields (include/minifloat/spec.h). No other module
calls the operators that describe a spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ._native import ops
from .checks import require_text
from .private_torch import constant_in_graphs


class Sizes(NamedTuple):
    """Sizes of an operand read as (rows, cols)."""

    code_cols: int  # bytes of a row of codes
    padded_cols: int  # columns, padded to whole transforms
    scale_rows: int  # rows of block scales; under row scaling, `rows`; else 0
    scale_cols: int  # columns of block scales; else 0


@dataclass(frozen=True)
class Spec:
    """The properties of one operand spec.

    Code that torch.compile traces may read the fields and call parse. The methods run outside
    graphs.
    """

    text: str  # canonical
    elements: str  # "bf16", "e4m3", "e5m2", "e2m1" or "e1m2"
    rule: str  # the scale rule: "none", "tensor", "row", "block", "mx" or "nvfp4"
    scale_dtype: torch.dtype  # of Quantized.scale; the operators return one-byte scales as uint8
    amax_of: str  # "tensor" or "row" (as read): what has an amax; "": only blocks
    code_bits: int  # bits of an element: 4 or 8; 16 under bf16
    bits: float  # bits of an element, block scales included
    block: tuple[int, int]  # rows and columns as read that share a block scale; (0, 0): no blocks
    alignment: tuple[int, int]  # a cut at multiples splits no block, transform or byte of codes
    group_unit: int  # least unit of groups along the contraction dimension, in columns as read
    transform: int  # points of the Hadamard transform; 0: none
    is_bf16: bool  # the operand stays in high precision
    has_blocks: bool
    is_stochastic: bool
    is_delayed: bool
    is_fp4_by_powers_of_two: bool  # E4M3 represents codes times block scales exactly
    transposes_exactly: bool  # the transposed codes of one direction are those of the other
    draws_signs: bool  # +eden: the transform's signs are random bits
    casts_rows_alone: bool  # the codes of a row depend on no other row and on no random bits

    @staticmethod
    @constant_in_graphs
    def parse(text: str) -> Spec:
        """Parses a spec's text.

        Raises:
            TypeError: `text` is no str.
            ValueError: `text` is no spec; the message has the position and the legal texts.
        """
        return _parse(require_text("spec", text))

    def sizes(self, rows: int, cols: int) -> Sizes:
        """Returns the sizes of an operand read as (rows, cols)."""
        return _sizes(self.text, rows, cols)

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Returns the shape of the scales of an operand read as (rows, cols)."""
        if self.has_blocks:
            return self.sizes(rows, cols)[2:]
        return (rows,) if self.amax_of == "row" else ()

    def amax_shape(self, rows: int) -> tuple[int, ...]:
        """Returns the shape of Quantized.amax of an operand with `rows` rows as read."""
        if self.amax_of == "row":
            return (rows,)
        return (0,) if self.has_blocks and self.amax_of == "" else ()


@lru_cache(maxsize=1024)
def _parse(text: str) -> Spec:
    canonical, elements, rule, scale, amax_of, code_bits, bits, block, alignment, *others = (
        ops.spec_info(text)
    )
    of_codes = code_bits, bits, tuple(block), tuple(alignment)
    return Spec(canonical, elements, rule, getattr(torch, scale), amax_of, *of_codes, *others)


@lru_cache(maxsize=4096)
def _sizes(text: str, rows: int, cols: int) -> Sizes:
    return Sizes(*ops.spec_sizes(text, rows, cols))
