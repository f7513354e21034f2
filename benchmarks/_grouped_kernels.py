"""Casts of 3D weights, amaxes, gathered casts, swizzles and the table of groups, on the GPU: a part
of gpu_grouped.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import torch
from _grouped_parts import CAST_SHAPE, even_ends, routed_ends
from minifloat._native import ops
from torch import Tensor

WEIGHTS = [(8, 2048, 7168), (128, 768, 2048)]
WEIGHT_SPECS = ["e4m3/tensor", "e4m3/row", "e4m3/128x128", "mxfp8", "mxfp4", "nvfp4/16x16"]
TABLE_MICROSECONDS = 5.0


@dataclass
class KernelRow:
    kernel: str
    tb_s: float
    reference_tb_s: float  # of the dense kernel, or of a copy
    bar: float


def op_ms(call: Callable[[Tensor], Any], like: Tensor) -> float:
    """Times a call on copies of an input that exceed the L2 cache."""
    count = timing.copies_of(like.nbytes, like.device)
    inputs = [torch.randn(like.shape, device=like.device).to(like.dtype) for _ in range(count)]
    return timing.kernel_ms([lambda x=x: call(x) for x in inputs], like.device, 7)


def measure_kernels(device: torch.device) -> list[KernelRow]:
    rows = []
    for size in WEIGHTS:
        w = torch.empty(size, device=device, dtype=torch.bfloat16)
        for spec in WEIGHT_SPECS:
            call = lambda x, spec=spec: ops.quantize(x, spec, spec)  # noqa: E731
            out = ops.quantize(w, spec, spec)
            moved = w.nbytes + sum(out[i].nbytes for i in (0, 1, 4, 5))
            dense = moved / op_ms(call, w.flatten(0, 1)) / 1e9
            got = moved / op_ms(call, w) / 1e9
            rows.append(KernelRow(f"cast of W {list(size)}, both, {spec}", got, dense, 0.95))
    m, k = CAST_SHAPE
    x = torch.empty(m, k, device=device, dtype=torch.bfloat16)
    copy = 2 * x.nbytes / timing.copy_ms(x.nbytes, device, 7) / 1e9
    for name, ends in (("8", even_ends(m, 8, device)), ("64", routed_ends(m, 64, device))):
        table = ops.group_table(ends, m)
        for spec, columnwise, bar in (
            ("e4m3/tensor", False, 0.90),
            ("e4m3/row", True, 0.90),
            ("nvfp4+rht", True, 0.85),
        ):
            call = lambda v, s=spec, c=columnwise, t=table: ops.amax(  # noqa: E731
                v, s, columnwise=c, groups=t
            )
            got = x.nbytes / op_ms(call, x) / 1e9
            rows.append(KernelRow(f"amaxes of {name} groups, {spec}", got, copy, bar))
        index = torch.randperm(m, device=device, dtype=torch.int32)
        for row, col in (("e4m3/row", ""), ("", "e4m3/1x128"), ("mxfp8", "mxfp8")):
            call = lambda v, r=row, c=col, t=table, i=index: ops.quantize(  # noqa: E731
                v, r, c, groups=t, rows_from=i
            )
            out = call(x)
            written = sum(out[i].nbytes for i in (0, 1, 4, 5))
            got = (x.nbytes + written) / op_ms(call, x) / 1e9
            label = f"gather and cast, {name} groups, {row or '-'}, {col or '-'}"
            rows.append(KernelRow(label, got, copy, 0.80))
    e, n, length = WEIGHTS[0]
    by_blocks = even_ends(m // 32, 8, device)
    for name, shape, groups in (
        ("rows", (m, k // 32), {"offs": even_ends(m, 8, device), "groups": "m"}),
        ("contraction", (k, m // 32), {"offs": by_blocks, "groups": "k"}),
        ("3D", (e, n, length // 32), {}),
    ):
        scale = torch.zeros(shape, device=device, dtype=torch.uint8)
        scales = [torch.zeros_like(scale) for _ in range(timing.copies_of(scale.nbytes, device))]
        calls = [lambda s=s, g=groups: ops.swizzle_scales(s, **g) for s in scales]
        ms = timing.kernel_ms(calls, device, 7)
        base = 2 * scale.nbytes / timing.copy_ms(scale.nbytes, device, 7) / 1e9
        rows.append(KernelRow(f"swizzle, {name}", 2 * scale.nbytes / ms / 1e9, base, 0.75))
    return rows


def table_microseconds(device: torch.device) -> float:
    ends = even_ends(CAST_SHAPE[0], 256, device)
    return 1e3 * timing.kernel_ms([lambda: ops.group_table(ends, CAST_SHAPE[0])] * 20, device, 7)


def print_kernels(rows: list[KernelRow], table_us: float) -> bool:
    print("\nother kernels: TB/s, and a share of the dense kernel (casts of W) or of a copy")
    met = table_us <= TABLE_MICROSECONDS
    for r in rows:
        share = r.tb_s / r.reference_tb_s
        met = met and share >= r.bar
        missed = "" if share >= r.bar else "  MISSED"
        print(f"{r.kernel:52} {r.tb_s:6.2f} {share:6.1%} {r.bar:5.0%}{missed}")
    print(f"the table of 256 groups: {table_us:.1f} µs, at most {TABLE_MICROSECONDS:.0f}")
    return met
