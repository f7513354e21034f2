"""Element rounding against ml_dtypes, an independent library: equal codes from equal floats.

A scale of 1 leaves only the rounding of elements: under tensor scaling an amax equal to the
format's largest value, under MX blocks whose largest element is that value. Two things differ, by
design:

    past the largest   ours saturate; ml_dtypes' E4M3 gives NaN and its E5M2 infinity, so it gets
                       clamped values, and so does our E2M1, whose block amax must stay 6
    NaN                ours has one code, 0x7F, whatever the sign and payload; ml_dtypes keeps the
                       sign and writes 0x7F for E4M3 and 0x7E for E5M2. E2M1 has no NaN
"""

import minifloat as mf
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

SAMPLES = 1 << 20
NAN_CODE = 0x7F
FP8 = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
E2M1_MAX = 6.0


def from_bits(bits: np.ndarray) -> Tensor:
    """Returns float32 values of uint32 bit patterns."""
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def every_bf16() -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def random_floats(largest: float) -> Tensor:
    """Draws half from all floats, half between 2^-20 and twice the largest value, either sign."""
    rng = np.random.default_rng(2)
    anything = rng.integers(0, 1 << 32, SAMPLES, dtype=np.uint64)
    low, high = np.array([2.0**-20, 2 * largest], dtype=np.float32).view(np.uint32)
    near = rng.integers(low, high, SAMPLES, dtype=np.uint64)
    signs = rng.integers(0, 2, SAMPLES, dtype=np.uint64) << np.uint64(31)
    return from_bits(np.concatenate([anything, near | signs]))


def ties_and_neighbours(dtype: type, bits: int) -> Tensor:
    """Lists values, midpoints of two values, and the three floats on each side of those."""
    codes = np.arange(1 << bits, dtype=np.uint8)
    values = np.abs(codes.view(dtype).astype(np.float32))
    values = np.unique(values[np.isfinite(values)])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    near = points.view(np.uint32).astype(np.int64)[:, None] + np.arange(-3, 4)
    near = near[near >= 0].ravel()
    return from_bits(np.concatenate([near, near | 1 << 31]))


def expected_codes(x: Tensor, dtype: type, largest: float) -> np.ndarray:
    clamped = x.float().clamp(-largest, largest)  # NaN stays
    with np.errstate(invalid="ignore"):  # NaN is cast on purpose
        return clamped.numpy().astype(dtype).view(np.uint8)


def report(x: Tensor, got: np.ndarray, want: np.ndarray) -> str:
    wrong = np.flatnonzero(got != want)
    if wrong.size == 0:
        return ""
    i = int(wrong[0])
    value = float(x.flatten()[i])
    return (
        f"{wrong.size} of {got.size} wrong, the first: {value!r} ({value.hex()}) -> "
        f"0x{got[i]:02X}, expected 0x{want[i]:02X}"
    )


def check_fp8(x: Tensor, name: str) -> None:
    dtype, largest = FP8[name]
    q = mf.tensor.quantize(x.view(1, -1), f"{name}/tensor", amax=torch.tensor(largest))
    assert q.scale.item() == 1.0
    got = q.codes.view(torch.uint8).flatten().numpy()
    want = expected_codes(x, dtype, largest)
    nan = x.isnan().numpy()
    assert np.all(got[nan] == NAN_CODE)
    want = np.where(nan, NAN_CODE, want)
    assert not report(x, got, want)

    values = mf.tensor.dequantize(q).flatten().numpy()
    assert np.array_equal(values[~nan], want.view(dtype).astype(np.float32)[~nan])
    assert np.all(np.isnan(values[nan]))


@pytest.mark.parametrize("name", FP8)
def test_fp8_of_every_bf16(name: str):
    check_fp8(every_bf16(), name)


@pytest.mark.parametrize("name", FP8)
def test_fp8_of_random_floats(name: str):
    check_fp8(random_floats(FP8[name][1]), name)


@pytest.mark.parametrize("name", FP8)
def test_fp8_of_ties(name: str):
    check_fp8(ties_and_neighbours(FP8[name][0], 8), name)


def check_e2m1(x: Tensor) -> None:
    """Checks rows of 32 that begin with 6, the block's amax: the scale is 1, 31 values are x's."""
    x = x[~x.isnan()].clamp(-E2M1_MAX, E2M1_MAX)
    x = torch.cat([x, x.new_zeros(-len(x) % 31)])
    rows = torch.cat([x.new_full((len(x) // 31, 1), E2M1_MAX), x.view(-1, 31)], dim=1)

    q = mf.tensor.quantize(rows, "mxfp4")
    assert torch.all(q.scale.view(torch.uint8) == 127)  # E8M0 of 1
    packed = q.codes.numpy()
    got = np.stack([packed & 0xF, packed >> 4], axis=-1).ravel()
    want = expected_codes(rows.flatten(), ml_dtypes.float4_e2m1fn, E2M1_MAX)
    assert not report(rows, got, want)

    values = mf.tensor.dequantize(q).flatten().numpy()
    assert np.array_equal(values, want.view(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_e2m1_of_every_bf16():
    check_e2m1(every_bf16())


def test_e2m1_of_random_floats():
    check_e2m1(random_floats(E2M1_MAX))


def test_e2m1_of_ties():
    check_e2m1(ties_and_neighbours(ml_dtypes.float4_e2m1fn, 4))
