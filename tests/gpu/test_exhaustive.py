"""Every float through the device's encoders, against the CPU's, which other tests check.

The device makes the floats too, and the CPU gets a copy: it would take longer to make them than to
cast them.
"""

from __future__ import annotations

import pytest
import torch
from minifloat.spec import Spec

from tests.gpu.sweep import require_same_quantize

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

CHUNK = 2**26


def floats(first: int, last: int, device: torch.device) -> torch.Tensor:
    every = torch.arange(first, last, dtype=torch.int64, device=device)
    return every.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("spec", ["e4m3/tensor", "e5m2/tensor", "e4m3/tensor+delayed"])
def test_every_float_to_fp8(cuda, spec):
    """Encodes under a scale of 1: the active amax is the format's largest value."""
    amax = torch.tensor(448.0 if spec.startswith("e4m3") else 57344.0)
    for first in range(0, 2**32, CHUNK):
        x = floats(first, first + CHUNK, cuda).view(-1, 4096)
        require_same_quantize(cuda, x, spec, "", amax_row=amax, note=f" from {first:#x}")


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("spec", "largest"), [("mxfp4", 6.0), ("e1m2/1x32", 1.75)])
def test_every_float_of_a_block_to_4_bits(cuda, spec, largest, sign):
    """Encodes blocks of 31 floats and one of the format's largest value, whose scale is 1."""
    end = int(torch.tensor(largest).view(torch.int32)) + 1
    step = 31 * 2**21
    for first in range(0, end, step):
        x = torch.full((step // 31, 32), largest, device=cuda)
        part = floats(first, min(first + step, end), cuda)
        padded = torch.zeros(step, device=cuda)
        padded[: part.numel()] = sign * part
        x[:, :31] = padded.view(-1, 31)
        note = f", {sign:+} floats from {first:#x}"
        require_same_quantize(cuda, x.view(-1, 4096), spec, "", note=note)


BLOCKS = [
    *("mxfp8", "mxfp8+floor", "mxfp8/e5m2", "mxfp4", "e4m3/1x128", "e4m3/1x128+exact"),
    *("nvfp4", "nvfp4+up", "nvfp4+pow2", "nvfp4+4over6", "e1m2/1x32", "e1m2/1x32+floor"),
    *("e1m2/1x16", "e1m2/1x16+up", "e1m2/1x16+pow2"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", BLOCKS)
def test_every_amax_of_a_block(cuda, spec, dtype):
    """Encodes an element a block: bfloat16 magnitudes, and fp32 mantissas at six exponents."""
    parsed = Spec.parse(spec)
    block = parsed.block[1]
    if dtype == torch.bfloat16:
        amaxes = torch.arange(0, 0x8000, dtype=torch.int32, device=cuda)
        amaxes = amaxes.to(torch.int16).view(dtype)
    else:
        exponents = [0, 1, 64, 127, 128, 254]
        amaxes = torch.cat([floats(e << 23, (e + 1) << 23, cuda) for e in exponents])
    for given in (None, 1.0, 1e-30, 3e38) if parsed.amax_of else (None,):
        amax = None if given is None else torch.tensor(given)
        for part in amaxes.split(2**22):
            x = torch.zeros(part.numel(), block, dtype=dtype, device=cuda)
            x[:, block // 3] = part
            x = x.view(-1, 16 * block) if part.numel() % 16 == 0 else x
            require_same_quantize(cuda, x, spec, "", amax_row=amax, note=f", amax {given}")


@pytest.mark.parametrize("block", ["nvfp4+4over6", "nvfp4/16x16+4over6"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_bf16_beside_every_scale_of_four_over_six(cuda, block, dtype):
    """Encodes blocks of an amax a, of every E4M3 scale, with each bfloat16 up to a.

    The bounded sums decide in some blocks. In others both scales have equal errors."""
    every = torch.arange(0, 0x8000, dtype=torch.int32, device=cuda)
    every = every.to(torch.int16).view(torch.bfloat16).float()
    scales = torch.arange(1, 127, dtype=torch.uint8, device=cuda).view(torch.float8_e4m3fn).float()
    for tensor_amax in (1536.0, 1.0, 1e-36, 3e38):
        for steps in (6.0, 5.9, 5.3):
            amaxes = scales * steps * (tensor_amax / 1536)
            x = every[(every > 0) & (every < 4e38)].repeat(len(scales), 1)
            x = torch.where(x <= amaxes[:, None], x, amaxes[:, None])
            x = torch.stack([x, x / 2, x * 0.75, amaxes[:, None].expand_as(x)], -1)
            x = torch.nn.functional.pad(x, (0, 12)).reshape(len(scales), -1)
            x = x[:, : x.shape[1] // 256 * 256].to(dtype)
            note, amax = f", tensor {tensor_amax}, {steps}", torch.tensor(tensor_amax)
            require_same_quantize(cuda, x, block, "", amax_row=amax, note=note)
            if "16x16" in block:  # both directions of whole tiles: the preset kernel of 2D blocks
                x, both = torch.cat([x, x[-2:]]), {"amax_row": amax, "amax_col": amax}
                require_same_quantize(cuda, x, block, block, **both, note=note)
