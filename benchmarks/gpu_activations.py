"""Activations of dense layers within their casts on the GPU, in TB/s beside a device copy.

python benchmarks/gpu_activations.py [--quick]

Bytes are the fewest: each result written once, each input read once, or twice where the scales need
amaxes of whole columns or matrices. The bar is 85% of a copy that reads and writes as many bytes in
all, and 70% with transforms or random bits. Beside it stands the composition, which writes the
values and quantizes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import torch
from minifloat._native import ops
from torch import Tensor

from tests.support.activation_casts import OF_POW2, PRESETS, Case, options_of

Shape = tuple[int, int]  # tokens, I
SHAPES: list[Shape] = [(16384, 14336), (8192, 3584)]
FORWARD = [
    ("e4m3/tensor+delayed", "e4m3/tensor+delayed"),
    ("e4m3/tensor", "e4m3/tensor"),
    ("e4m3/row", "e4m3/row"),
    ("e4m3/1x128", "e4m3/1x128"),
    ("mxfp8", "mxfp8"),
    ("mxfp4", "mxfp4+rht"),
    ("nvfp4", "nvfp4+rht"),
    ("nvfp4+pow2", "nvfp4+pow2+rht"),
]
BACKWARD = PRESETS[:8]
IN_PLACE = ("e4m3/tensor",)  # h's spec
# Specs of FP4 that is written as FP8, as layers on Hopper cast it.
FP8_FORWARD = ("nvfp4+pow2", "")
FP8_BACKWARD = OF_POW2


@dataclass
class Row:
    name: str
    shape: Shape
    gigabytes: float
    ms: float
    tb_s: float
    of_copy: float
    composition_ms: float


def draw(shape: Shape, device: torch.device, activation: str, is_gated: bool) -> Case:
    dh, gate, up = (torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(3))
    return Case(dh, gate, up if is_gated else None, activation)


def reads(specs: Sequence[str]) -> int:
    """Returns how often the inputs are read: an amax that is not of earlier steps needs a pass."""
    bases = [spec.split("+")[0] for spec in specs if "+delayed" not in spec]
    return 2 if any(base in ("nvfp4", "e4m3/row") or "tensor" in base for base in bases) else 1


def forward(
    case: Case, specs: Sequence[str], **forms: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    options: dict[str, Any] = dict(forms)
    for side, spec in zip(("row", "col"), specs, strict=True):
        if "+delayed" in spec:
            options[f"amax_{side}"] = torch.tensor(4.0, device=case.gate.device)
    return (
        lambda: case.forward(*specs, **options),
        lambda: case.forward_composition(*specs, **options),
    )


def backward(
    case: Case, specs: Sequence[str], **forms: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    options = options_of(*specs, case.gate) | forms
    return (
        lambda: case.backward(*specs, **options),
        lambda: case.backward_composition(*specs, **options),
    )


def in_place(case: Case, specs: Sequence[str]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """d_gate is written over dh, which each call reads as the last one left it."""
    options = {"h_amax": torch.tensor(4.0, device=case.gate.device)}

    def call() -> dict[str, Tensor]:
        tensors = case.dh, case.gate, case.up, case.activation
        d_up, amaxes, *h = ops.activation_gradients_(*tensors, *specs, **options)
        return case.gradients(case.dh, d_up, amaxes, h)

    return call, lambda: case.in_place_composition(*specs, **options)


# By the first words of a row's name; "as FP8": the operands that a product reads right afterwards.
MAKERS = {
    "": forward,
    "as FP8 ": partial(forward, fp8_row=True),
    "backward ": backward,
    "backward as FP8 ": partial(backward, fp8_row=True, fp8_col=True, fp8_h=True),
    "in place ": in_place,
}


def inputs(case: Case, is_backward: bool) -> list[Tensor]:
    tensors = [case.dh if is_backward else None, case.gate, case.up]
    return [t for t in tensors if t is not None]


def measure(
    shape: Shape, device: torch.device, repeats: int, activation: str, is_gated: bool
) -> list[Row]:
    found = []
    names: list[tuple[str, Sequence[str]]] = [("", pair) for pair in FORWARD]
    names += [("backward ", specs) for specs in BACKWARD] + [("in place ", IN_PLACE)]
    names += [("as FP8 ", FP8_FORWARD), ("backward as FP8 ", FP8_BACKWARD)]
    for prefix, specs in names:
        make = MAKERS[prefix]
        case = draw(shape, device, activation, is_gated)
        written = make(case, specs)[0]()
        read = timing.nbytes(inputs(case, prefix.startswith(("backward", "in place"))))
        read *= 1 if make is in_place else reads(specs)
        total = read + timing.nbytes(written.values())
        copies = timing.copies_of(total, device)
        cases = [case, *(draw(shape, device, activation, is_gated) for _ in range(copies - 1))]
        calls = [make(one, specs) for one in cases]
        ms, composition = (
            timing.kernel_ms([call[i] for call in calls], device, repeats) for i in range(2)
        )
        copy = timing.copy_ms(total // 2, device, repeats)
        name = f"{activation}{' · up' if is_gated else ''} {prefix}{' | '.join(specs)}"
        row = Row(name, shape, total / 1e9, ms, total / ms / 1e9, copy / ms, composition)
        found.append(row)
        bar = bar_of(name)
        mark = "" if row.of_copy >= bar else f"  below {bar:.0%}"
        print(
            f"{name:84}{row.gigabytes:8.3f}{ms:9.4f}{row.tb_s:8.2f}"
            f"{timing.percent(row.of_copy):>11}{composition:13.4f}{mark}"
        )
    return found


def bar_of(name: str) -> float:
    return 0.7 if "+rht" in name or "+sr" in name else 0.85


def main() -> int:
    options = timing.arguments(__doc__, "gpu_activations.json").parse_args()
    device = timing.require_device(options.device)
    repeats = 5 if options.quick else 30
    rows = []
    for shape in options.shapes or (SHAPES[:1] if options.quick else SHAPES):
        print(f"\n{shape}: tokens, I        {timing.device_name(device)}")
        print(f"{'':84}{'GB':>8}{'ms':>9}{'TB/s':>8}{'of a copy':>11}{'composed ms':>13}")
        for activation, is_gated in (("silu", True), ("gelu_tanh", False), ("gelu", True)):
            rows += measure(shape, device, repeats, activation, is_gated)
    timing.write_json(options.out, device, rows=[asdict(row) for row in rows])
    return 0 if all(row.of_copy >= bar_of(row.name) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
