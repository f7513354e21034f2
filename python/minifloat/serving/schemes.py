"""How servers store a layer: the one table of formats, which export and loading read.

    W                              format                 tensors of a layer
    nvfp4, nvfp4/16x16             nvfp4-pack-quantized   weight_packed, weight_scale and, of the
                                                          tensor, weight_global_scale
    mxfp4                          mxfp4-pack-quantized   weight_packed, weight_scale
    mxfp8, mxfp8/32x32             mxfp8-quantized        weight, weight_scale
    e4m3/tensor, /row, /128x128    float-quantized        weight, weight_scale

These are compressed-tensors' names. ModelOpt calls the codes weight in all of them, and stores the
factor of NVFP4's tensor, weight_scale_2, where compressed-tensors stores its inverse. Blocks of
16x16 and 32x32 are stored as the blocks of one row that they consist of. transformers' own formats
have other ends of names: gpt-oss's _blocks and _scales, and _scale_inv of FP8.

compressed-tensors: quantization/quant_scheme.py of version 0.20.1. ModelOpt: export/quant_utils.py
and convert_hf_config.py of version 0.47.0, and what vLLM 0.33.0 reads of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from ..spec import Spec

COMPRESSED_TENSORS, MODELOPT = "compressed-tensors", "modelopt"
FORMATS = (COMPRESSED_TENSORS, MODELOPT)  # that are written
METHODS = (*FORMATS, "fp8", "mxfp4")  # quant_method that is read
INDEX = "model.safetensors.index.json"
# Ends of names, after that of the parameter: of codes, of scales, of a factor of the matrix.
PACKED, BLOCKS = "_packed", "_blocks"
SCALE, INVERSE, SCALES = "_scale", "_scale_inv", "_scales"
DIVIDES, MULTIPLIES = "_global_scale", "_scale_2"
E4M3, E8M0, UINT8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8


@dataclass(frozen=True)
class Scheme:
    """The storage of an operand.

    Args:
        format: compressed-tensors' name of the layout; "": of activations, which have none.
        strategy: what shares a scale: "tensor", "channel", "token", "block", "group" or
            "tensor_group".
        bits: of an element.
        group: the columns that share a scale; 0: no groups.
        block: the rows and columns that share a scale; (): no 2D blocks.
        scale_dtype: of weight_scale; None: float32.
    """

    format: str
    strategy: str
    bits: int
    group: int = 0
    block: tuple[int, ...] = ()
    scale_dtype: torch.dtype | None = None

    @property
    def is_packed(self) -> bool:
        """Whether a byte has two codes."""
        return self.bits == 4

    @property
    def has_global_scale(self) -> bool:
        """Whether the tensor has a scale besides those of its groups."""
        return self.strategy == "tensor_group"

    @property
    def columns(self) -> int:
        """The number that the columns of a weight are a multiple of."""
        return self.group or (self.block[1] if self.block else 1)

    def codes_name(self, format: str) -> str:
        """Returns the name of the codes in a folder of this format."""
        return f"weight{PACKED}" if self.is_packed and format == COMPRESSED_TENSORS else "weight"

    def arguments(self, dynamic: bool | str = False) -> dict[str, Any]:
        """Returns compressed-tensors' QuantizationArgs."""
        found: dict[str, Any] = {"num_bits": self.bits, "type": "float", "symmetric": True}
        found |= {"strategy": self.strategy, "dynamic": dynamic, "group_size": self.group or None}
        if self.block:
            found["block_structure"] = list(self.block)
        if self.scale_dtype:
            found["scale_dtype"] = str(self.scale_dtype)
        return found

    def reads(self, codes: torch.dtype, scale: torch.dtype) -> bool:
        """Tells whether tensors of these dtypes are codes and scales of this storage."""
        if codes not in ((UINT8, torch.int8) if self.is_packed else (E4M3,)):
            return False
        if self.scale_dtype is not None:
            return scale in ((UINT8, E8M0) if self.scale_dtype == UINT8 else (E4M3,))
        return scale == E8M0 or (scale.is_floating_point and scale.itemsize > 1)

    def has_grid(self, grid: tuple[int, ...], n: int, k: int) -> bool:
        """Tells whether the scales of a weight (N, K) may have this shape."""
        if self.strategy == "tensor":
            return prod(grid) == 1
        if self.strategy == "channel":
            return grid in ((n,), (n, 1))
        if self.block:
            rows, cols = -(-n // self.block[0]), -(-k // self.block[1])
            return grid in ((rows, cols), (rows, 1, cols, 1))
        return grid == (n, k / self.group if self.scale_dtype else -(-k // self.group))


# By elements and scale rule of W's spec.
WEIGHTS = {
    ("e2m1", "nvfp4"): Scheme(
        "nvfp4-pack-quantized", "tensor_group", 4, group=16, scale_dtype=E4M3
    ),
    ("e2m1", "mx"): Scheme("mxfp4-pack-quantized", "group", 4, group=32, scale_dtype=UINT8),
    ("e4m3", "mx"): Scheme("mxfp8-quantized", "group", 8, group=32, scale_dtype=UINT8),
    ("e4m3", "tensor"): Scheme("float-quantized", "tensor", 8),
    ("e4m3", "row"): Scheme("float-quantized", "channel", 8),
    ("e4m3", "block"): Scheme("float-quantized", "block", 8, block=(128, 128)),
}
NVFP4 = WEIGHTS["e2m1", "nvfp4"]
FP8_GROUPS = Scheme("", "group", 8, group=128)
TOKEN = Scheme("", "token", 8).arguments(dynamic=True)
STATIC = WEIGHTS["e4m3", "tensor"].arguments()
GROUP_128 = FP8_GROUPS.arguments(dynamic=True)
LOCAL = NVFP4.arguments(dynamic="local")
MXFP4, MXFP8 = (WEIGHTS[e, "mx"].arguments(dynamic=True) for e in ("e2m1", "e4m3"))

# Of a weight's elements and rule: those of x -> input_activations. What differs from training's
# cast of x is in docs/serve.md.
INPUTS = {
    ("e2m1", "nvfp4"): {("e2m1", "nvfp4"): LOCAL},
    ("e2m1", "mx"): {("e2m1", "mx"): MXFP4, ("e4m3", "row"): TOKEN, ("e4m3", "block"): GROUP_128},
    ("e4m3", "mx"): {("e4m3", "mx"): MXFP8},
    ("e4m3", "tensor"): {("e4m3", "tensor"): TOKEN, ("e4m3", "row"): TOKEN},
    ("e4m3", "row"): {("e4m3", "tensor"): TOKEN, ("e4m3", "row"): TOKEN},
    ("e4m3", "block"): {("e4m3", "block"): GROUP_128},
}
# The format and input_activations of a layer -> ModelOpt's quant_algo, as far as vLLM reads it.
ALGORITHMS = (
    ("nvfp4-pack-quantized", "tensor_group", LOCAL, "NVFP4"),
    ("nvfp4-pack-quantized", "tensor_group", None, "W4A16_NVFP4"),
    ("mxfp8-quantized", "group", MXFP8, "MXFP8"),
    ("float-quantized", "tensor", STATIC, "FP8"),
    ("float-quantized", "channel", TOKEN, "FP8_PER_CHANNEL_PER_TOKEN"),
    ("float-quantized", "block", GROUP_128, "FP8_PB_WO"),
)
EXPERTS = ("NVFP4", "W4A16_NVFP4", "MXFP8", "FP8")  # of these, those that vLLM reads experts in
# Modules that vLLM reads in high precision, whatever a folder of one quant_algo has of them.
IN_HIGH_PRECISION = ("vision_tower", "vision_model", "vit_large_projector")


@dataclass(frozen=True)
class Storage:
    """How a folder stores a layer.

    Args:
        scheme: of the weight.
        inputs: compressed-tensors' QuantizationArgs of x; None: x stays in high precision.
    """

    scheme: Scheme
    inputs: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def needs_input_amax(self) -> bool:
        """Whether the layer has a scale of x that is not computed as it runs."""
        return self.inputs is not None and self.inputs["dynamic"] is not True

    @property
    def algorithm(self) -> str | None:
        """ModelOpt's quant_algo; None: it has none."""
        key = self.scheme.format, self.scheme.strategy, self.inputs
        return next((row[-1] for row in ALGORITHMS if row[:-1] == key), None)

    @property
    def format(self) -> str:
        """compressed-tensors' name of the layout."""
        is_fp8 = self.scheme.format == "float-quantized"
        return "naive-quantized" if is_fp8 and self.inputs is None else self.scheme.format


def is_nvfp4_row(spec: Spec) -> bool:
    """Tells whether each row of NVFP4 has a scale beside those of its blocks."""
    return spec.rule == "nvfp4" and spec.amax_of == "row"


def scheme_of(spec: Spec) -> Scheme | str:
    """Returns the storage of a weight under a spec, or why there is none."""
    if spec.is_bf16:
        return "its forward reads the weight in high precision"
    if spec.transform:
        return f"servers know no transform of the weight, got {spec.text}"
    if spec.is_stochastic:
        return f"the codes of {spec.text} are drawn anew in each step"
    scheme = WEIGHTS.get((spec.elements, spec.rule))
    if scheme is None or is_nvfp4_row(spec) or (scheme.block and spec.block != scheme.block):
        return f"no server reads weights of {spec.text}"
    return scheme


def storage_of(w: Spec, x: Spec, weight_only: bool, has_amax: bool) -> Storage | str:
    """Returns the storage of a layer whose forward multiplies x and W, or why there is none.

    Args:
        w, x: the specs.
        weight_only: whether servers leave x in high precision.
        has_amax: whether an amax of x is known.
    """
    scheme = scheme_of(w)
    if isinstance(scheme, str):
        return scheme
    # Formats have no name for NVFP4's scale a token, which some servers compute without one.
    is_by_token = scheme is NVFP4 and is_nvfp4_row(x) and not has_amax
    if weight_only or x.is_bf16 or is_by_token:
        return Storage(scheme)
    inputs = INPUTS[w.elements, w.rule].get((x.elements, x.rule))
    if inputs is None or x.block[0] > 1 or (inputs is GROUP_128 and x.block != (1, 128)):
        return f"no server casts x as {x.text} beside weights of {w.text}"
    if has_amax and (x.rule, w.rule) == ("tensor", "tensor"):
        inputs = STATIC
    return Storage(scheme, inputs)
