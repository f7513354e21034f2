"""Activations and their casts as one op, beside the composition, for tests of both devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from minifloat._native import ops
from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
PARTS = ("codes", "scale", "amax", "decoded")
OUTPUTS = [f"{part}_{side}" for side in ("row", "col") for part in PARTS]
FORMS = ("decoded_row", "decoded_col", "fp8_row", "fp8_col")
# Gradients' specs, and that of h, of the presets.
PRESETS = [
    ("e5m2/tensor+delayed", "e5m2/tensor+delayed", "e4m3/tensor+delayed"),
    ("e5m2/tensor", "e5m2/tensor", "e4m3/tensor"),
    ("e4m3/row", "e4m3/row", "e4m3/row"),
    ("e4m3/1x128", "e4m3/1x128", "e4m3/1x128"),
    ("mxfp8", "mxfp8", "mxfp8"),
    ("mxfp4+sr+rht", "mxfp4+sr+rht", "mxfp4+rht"),
    ("nvfp4+sr", "nvfp4+sr+rht", "nvfp4+rht"),
    ("nvfp4+pow2+sr", "nvfp4+pow2+sr+rht", "nvfp4+pow2+rht"),
    ("e4m3/row", "", ""),
    ("", "mxfp8", "mxfp8"),
]
RNG = torch.tensor([-(2**61) + 3, 9])
# Specs of which some operands are written as FP8: of h, and of gradients and h.
POW2, SQUARE = "nvfp4+pow2", "nvfp4/16x16+pow2"
AS_FP8: list[tuple[str, str, dict[str, bool]]] = [
    (POW2, "", {"fp8_row": True}),
    (POW2, POW2, {"fp8_row": True}),
    ("", f"{POW2}+rht", {"fp8_col": True}),
    (f"{POW2}+rht", "", {"fp8_row": True}),
    (SQUARE, "", {"fp8_row": True}),
    ("mxfp4", "mxfp4+rht", {"fp8_row": True, "fp8_col": True}),
]
OF_POW2 = (f"{POW2}+sr", f"{POW2}+sr+rht", f"{POW2}+rht")
GRADIENTS_AS_FP8: list[tuple[str, str, str, dict[str, bool]]] = [
    (*OF_POW2, {"fp8_row": True, "fp8_col": True, "fp8_h": True}),
    (*OF_POW2[:2], "", {"fp8_row": True, "fp8_col": True}),
    (*OF_POW2, {"fp8_row": True, "fp8_col": True}),
    (*OF_POW2, {"fp8_row": True}),
    (*OF_POW2, {"fp8_h": True}),
    ("", *OF_POW2[1:], {"fp8_col": True, "fp8_h": True}),
    (POW2, POW2, POW2, {"fp8_row": True, "fp8_col": True, "fp8_h": True}),
    ("mxfp4", "mxfp4+sr+rht", "mxfp4+rht", {"fp8_row": True, "fp8_col": True, "fp8_h": True}),
]


def options_of(row: str, col: str, h_col: str, x: Tensor) -> dict[str, Any]:
    """Returns the options of quantize_activation_backward for these specs."""
    options: dict[str, Any] = {}
    for i, matrix in enumerate(("gate", "up")):
        for j, (side, spec) in enumerate((("row", row), ("col", col))):
            options[f"{matrix}_stream_{side}"] = 2**60 + 7 * i - 5 * j
            if "+delayed" in spec:
                options[f"{matrix}_amax_{side}"] = torch.tensor(1.75 + i + j, device=x.device)
        if "+sr" in row + col:
            options[f"{matrix}_rng"] = (RNG + i).to(x.device)
    options["h_stream"] = -77
    if "+delayed" in h_col:
        options["h_amax"] = torch.tensor(0.75, device=x.device)
    if "+sr" in h_col:
        options["h_rng"] = (RNG + 5).to(x.device)
    return options


@dataclass(frozen=True)
class Case:
    """The inputs of an activation's forward and backward."""

    dh: Tensor
    gate: Tensor
    up: Tensor | None
    activation: str

    def on(self, device: torch.device) -> Case:
        up = None if self.up is None else self.up.to(device)
        return Case(self.dh.to(device), self.gate.to(device), up, self.activation)

    def forward(self, row: str, col: str, **options: Any) -> dict[str, Tensor]:
        out = ops.quantize_activation(self.gate, self.up, self.activation, row, col, **options)
        return dict(zip(OUTPUTS, out, strict=True))

    def forward_composition(self, row: str, col: str, **options: Any) -> dict[str, Tensor]:
        h = ops.activation(self.gate, self.up, self.activation)
        return dict(zip(OUTPUTS, ops.quantize(h, row, col, **options), strict=True))

    def names(self, h_col: str) -> list[str]:
        matrices = [m for m in ("gate", "up") if m == "gate" or self.up is not None]
        names = [f"{m} {output}" for m in matrices for output in OUTPUTS]
        return names + ([f"h {part}_col" for part in PARTS] if h_col else [])

    def backward(self, row: str, col: str, h_col: str, **options: Any) -> dict[str, Tensor]:
        tensors = self.dh, self.gate, self.up, self.activation
        out = ops.quantize_activation_backward(*tensors, row, col, h_col, **options)
        return dict(zip(self.names(h_col), out, strict=True))

    def backward_composition(
        self, row: str, col: str, h_col: str, **options: Any
    ) -> dict[str, Tensor]:
        values = ops.activation_backward(self.dh, self.gate, self.up, self.activation)
        out: list[Tensor] = []
        for name, d in zip(("gate", "up"), values, strict=True):
            given = {
                key.removeprefix(f"{name}_"): value
                for key, value in options.items()
                if key.startswith(f"{name}_")
            }
            given |= {key: options[key] for key in FORMS if key in options}
            if name == "gate" or self.up is not None:
                out += ops.quantize(d, row, col, **given)
        if h_col:
            h = ops.activation(self.gate, self.up, self.activation)
            out += ops.quantize(
                h,
                "",
                h_col,
                amax_col=options.get("h_amax"),
                rng=options.get("h_rng"),
                stream_col=options.get("h_stream", 0),
                decoded_col=options.get("decoded_h", False),
                fp8_col=options.get("fp8_h", False),
            )[4:]
        return dict(zip(self.names(h_col), out, strict=True))

    def in_place(self, h_col: str, **options: Any) -> dict[str, Tensor]:
        """Returns d_gate, which is written over a copy of dh, d_up, their amaxes, and h's cast."""
        d_gate = self.dh.clone(memory_format=torch.preserve_format)
        tensors = d_gate, self.gate, self.up, self.activation
        d_up, amaxes, *h = ops.activation_gradients_(*tensors, h_col, **options)
        return self.gradients(d_gate, d_up, amaxes, h if h_col else [])

    def in_place_composition(self, h_col: str, **options: Any) -> dict[str, Tensor]:
        d_gate, d_up = ops.activation_backward(self.dh, self.gate, self.up, self.activation)
        both = [d_gate] if self.up is None else [d_gate, d_up]
        amaxes = torch.stack([ops.amax(d, "e4m3/tensor") for d in both])
        names = {"h_amax": "amax_col", "h_rng": "rng", "h_stream": "stream_col"}
        given = {names.get(key, "decoded_col"): value for key, value in options.items()}
        h = ops.activation(self.gate, self.up, self.activation)
        cast = ops.quantize(h, "", h_col, **given)[4:] if h_col else []
        return self.gradients(d_gate, d_up, amaxes, cast)

    @staticmethod
    def gradients(
        d_gate: Tensor, d_up: Tensor, amaxes: Tensor, h: Iterable[Tensor]
    ) -> dict[str, Tensor]:
        of_h = dict(zip([f"h {part}" for part in PARTS], h, strict=False))
        return {"d_gate": d_gate, "d_up": d_up, "amaxes": amaxes} | of_h


# h's spec and options of activation_gradients_.
IN_PLACE: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("e4m3/tensor", {}),
    ("e4m3/tensor", {"h_amax": torch.tensor(3.0)}),
    ("e4m3/tensor", {"h_amax": torch.tensor(0.25), "decoded_h": True}),
    ("e4m3/tensor+delayed", {"h_amax": torch.tensor(1.5)}),
    ("e4m3/row", {}),
    ("mxfp8", {}),
    ("nvfp4+sr+rht", {"h_rng": RNG, "h_stream": -77}),
]


def draw(
    rows: int,
    width: int,
    dtype: torch.dtype,
    activation: str,
    *,
    is_gated: bool = True,
    special: bool = False,
    scale: float = 2.0,
) -> Case:
    """Draws a case.   special: some values are NaN, Inf, huge, denormal or zero"""
    g = torch.Generator().manual_seed(rows * 7 + width)
    ends = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-40, 0.0, -0.0])

    def matrix() -> Tensor:
        x = torch.randn(rows, width, generator=g) * scale
        if special:
            at = torch.rand(rows, width, generator=g) < 0.02
            x[at] = ends[torch.randint(0, len(ends), (int(at.sum()),), generator=g)]
        return x.to(dtype)

    return Case(matrix(), matrix(), matrix() if is_gated else None, activation)
