"""The operations between the products of experts on the GPU, in TB/s beside a device copy.

python benchmarks/gpu_moe_kernels.py [--quick]

Bytes are the fewest: each input read once, each result written once. The bar is 80% of a copy that
reads and writes as many bytes in all; of SwiGLU within its cast 85%, and 70% with transforms or
random bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import torch
from minifloat._native import ops
from minifloat.moe.feed_forward import Order, add_slots, order_rows, take_rows
from torch import Tensor

Shape = tuple[int, int, int, int, int]  # T, D, I, E, k
SHAPES: list[Shape] = [(16384, 7168, 2048, 8, 2), (16384, 2048, 768, 128, 8)]
CASTS = [
    ("e4m3/row", ""),
    ("e4m3/1x128", ""),
    ("", "e4m3/1x128"),
    ("mxfp8", ""),
    ("", "mxfp8"),
    ("mxfp4", ""),
    ("mxfp4+sr", ""),
    ("", "mxfp4+rht"),
    ("", "mxfp4+sr+rht"),
    ("e4m3/tensor+delayed", ""),
    ("", "e4m3/tensor+delayed"),
    ("e4m3/1x128", "e4m3/1x128"),
    ("mxfp8", "mxfp8"),
]
Make = Callable[[], tuple[Callable[[], Any], list[Tensor]]]


@dataclass
class Row:
    name: str
    shape: Shape
    gigabytes: float
    ms: float
    tb_s: float
    of_copy: float


def draw(rows: int, cols: int, device: torch.device) -> Tensor:
    return torch.randn(rows, cols, device=device).to(torch.bfloat16)


def routing(shape: Shape, device: torch.device) -> Order:
    """Draws distinct experts for each token."""
    tokens, _, _, experts, slots = shape
    scores = torch.rand(tokens, experts, device=device)
    return order_rows(scores.topk(slots, dim=1).indices, experts)


def cases(shape: Shape, device: torch.device) -> dict[str, Make]:
    """Returns for each name a function that makes a call, and the tensors that it reads once."""
    tokens, dim, hidden, experts, slots = shape
    rows = tokens * slots
    order = routing(shape, device)
    groups = ops.group_table(order.offs, rows)
    weights = torch.rand(tokens, slots, device=device)
    where = {"pairs": order.pairs, "groups": groups}

    def forward(parts: str, **form: Any) -> Make:
        def make() -> tuple[Callable[[], Any], list[Tensor]]:
            product, other = products(parts)
            options = {**where, **form, "interleaved": parts == "interleaved"}
            read = [t for t in (product, other, weights) if t is not None]
            return lambda: ops.swiglu(product, other, weights, **options), read

        return make

    def backward(parts: str, **form: Any) -> Make:
        def make() -> tuple[Callable[[], Any], list[Tensor]]:
            product, other = products(parts)
            dh = draw(rows, hidden, device)
            options = {**where, **form, "interleaved": parts == "interleaved"}
            read = [t for t in (dh, product, other, weights) if t is not None]
            return lambda: ops.swiglu_backward(dh, product, other, weights, **options), read

        return make

    def cast(row: str, col: str) -> Make:
        def make() -> tuple[Callable[[], Any], list[Tensor]]:
            product, _ = products("apart")
            options: dict[str, Any] = {**where, "stream_row": 1, "stream_col": 2}
            if "+sr" in row + col:
                options["rng"] = torch.tensor([1, 2], device=device)
            for side, spec in (("row", row), ("col", col)):
                if "+delayed" in spec:
                    options[f"amax_{side}"] = torch.full((experts,), 4.0, device=device)
            return (
                lambda: ops.quantize_swiglu(product, None, weights, row, col, **options),
                [product, weights],
            )

        return make

    def products(parts: str) -> tuple[Tensor, Tensor | None]:
        if parts == "two":
            return draw(rows, hidden, device), draw(rows, hidden, device)
        return draw(rows, 2 * hidden, device), None

    def take() -> tuple[Callable[[], Any], list[Tensor]]:
        x = draw(tokens, dim, device)
        return lambda: take_rows(x, order), [x, order.places]

    def take_codes() -> tuple[Callable[[], Any], list[Tensor]]:
        x = torch.randint(0, 255, (tokens, dim), dtype=torch.uint8, device=device)
        return lambda: take_rows(x, order), [x, order.places]

    def add() -> tuple[Callable[[], Any], list[Tensor]]:
        y = draw(rows, dim, device)
        return lambda: add_slots(y, order), [y, order.places]

    return {
        "swiglu": forward("apart"),
        "swiglu, two products": forward("two"),
        "swiglu, interleaved, a limit": forward("interleaved", limit=7.0),
        "swiglu_backward": backward("apart"),
        "swiglu_backward, two products": backward("two"),
        "swiglu_backward, interleaved, a limit": backward("interleaved", limit=7.0),
        **{f"swiglu + {' | '.join(pair)}": cast(*pair) for pair in CASTS},
        "take_rows; gradient of add_slots": take,
        "take_rows of codes": take_codes,
        "add_slots; gradient of take_rows": add,
    }


def bar_of(name: str) -> float:
    """Returns the share of a copy that an operation is to reach."""
    if not name.startswith("swiglu +"):
        return 0.8
    return 0.7 if "+rht" in name or "+sr" in name else 0.85


def measure(shape: Shape, device: torch.device, repeats: int) -> list[Row]:
    found = []
    for name, make in cases(shape, device).items():
        call, read = make()
        written = call()
        results = [written] if isinstance(written, Tensor) else list(written)
        total = timing.nbytes(read) + timing.nbytes(results)
        calls = [call, *(make()[0] for _ in range(timing.copies_of(total, device) - 1))]
        ms = timing.kernel_ms(calls, device, repeats)
        copy = timing.copy_ms(total // 2, device, repeats)
        found.append(Row(name, shape, total / 1e9, ms, total / ms / 1e9, copy / ms))
    return found


def measure_order(shape: Shape, device: torch.device, repeats: int) -> float:
    """Times order_rows in ms, without the host."""
    tokens, _, _, experts, slots = shape
    scores = torch.rand(tokens, experts, device=device)
    indices = scores.topk(slots, dim=1).indices
    return timing.kernel_ms([lambda: order_rows(indices, experts)] * 4, device, repeats)


def main() -> int:
    options = timing.arguments(__doc__, "gpu_moe_kernels.json").parse_args()
    device = timing.require_device(options.device)
    repeats = 5 if options.quick else 30
    chosen = options.shapes or (SHAPES[:1] if options.quick else SHAPES)
    rows, orders = [], {}
    for shape in chosen:
        print(f"\n{shape}: T, D, I, E, k        {timing.device_name(device)}")
        print(f"{'':40}{'GB':>8}{'ms':>9}{'TB/s':>8}{'of a copy':>11}")
        for row in measure(shape, device, repeats):
            bar = bar_of(row.name)
            mark = "" if row.of_copy >= bar else f"  below {bar:.0%}"
            share = timing.percent(row.of_copy)
            print(f"{row.name:40}{row.gigabytes:8.3f}{row.ms:9.4f}{row.tb_s:8.2f}{share:>11}{mark}")
            rows.append(row)
        orders[str(shape)] = measure_order(shape, device, repeats)
        print(f"{'order_rows':40}{'':8}{orders[str(shape)]:9.4f}")
    listed = [asdict(row) for row in rows]
    timing.write_json(options.out, device, rows=listed, order_rows_ms=orders)
    return 0 if all(row.of_copy >= bar_of(row.name) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
