"""Messages of gradients: the codes of a whole cast, and sums of their values in order."""

import itertools

import minifloat as mf
import pytest
import torch
from minifloat._native import ops

from tests.support.same_bits import require_same

SPECS = ["e4m3/1x128", "e4m3/1x128+sr", "mxfp8+sr", "mxfp8/e5m2", "mxfp4", "mxfp4+sr"]
SPECS += ["e1m2/1x32+sr"]
ANY_BYTES = ["e4m3/1x128", "mxfp8", "mxfp8/e5m2", "mxfp4", "e1m2/1x32"]
LENGTHS = [1, 2, 31, 128, 129, 300, 2048, 5000]  # around blocks, and a CPU's piece of 2048 columns
FLOATS = (torch.float32, torch.bfloat16)
RANKS, STREAM = 3, 9


def of_rank(rank, cols, dtype):
    """Returns what a rank sends, with magnitudes that make the order of a sum visible."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(RANKS, cols, generator=generator) * 10.0 ** (4 * rank)).to(dtype)


def sums(sent, spec, cols, dtype, device="cpu"):
    """Returns the sums of all ranks, each of what was sent to it. sent: messages by sender."""
    found = []
    for rank in range(RANKS):
        received = torch.stack([messages[rank] for messages in sent])
        out = torch.full((cols,), 7.0, dtype=dtype, device=device)
        ops.sum_messages(received, spec, out)
        found.append(out.cpu())
    return torch.stack(found)


def check_sums(device="cpu"):
    """Compares with casts of whole matrices on the CPU, whose values torch adds in order."""
    for spec, cols, dtype in itertools.product(SPECS, LENGTHS, FLOATS):
        sent, values = [], []
        for rank in range(RANKS):
            x, rng = of_rank(rank, cols, dtype), torch.tensor([rank, 5])
            on_device = {"rng": rng.to(device), "stream": STREAM}
            sent.append(ops.quantize_messages(x.to(device), spec, **on_device))
            codes, scale, amax, *_ = ops.quantize(x, spec, "", rng=rng, stream_row=STREAM)
            values.append(ops.dequantize(codes, scale, amax, spec, cols))
        assert sent[0].shape == (RANKS, ops.message_bytes(spec, cols))
        for out in FLOATS:
            want = ((values[0] + values[1]) + values[2]).to(out)
            require_same(sums(sent, spec, cols, out, device), want, f"{spec}, {cols}, {dtype}")


def check_any_bytes(device="cpu"):
    """Compares sums of 1 to 17 ranks of any codes and scales with values that torch adds in order.

    Products overflow, underflow and are NaN; fp32 scales are powers of two and other numbers.
    """
    generator = torch.Generator().manual_seed(7)
    for spec, ranks, cols in itertools.product(ANY_BYTES, (1, 2, 4, 7, 8, 9, 17), (129, 2048)):
        codes, scale, *_ = ops.quantize(torch.ones(ranks, cols), spec, "", rng=torch.tensor([1, 2]))
        codes = torch.randint(256, codes.shape, generator=generator, dtype=torch.uint8)
        if scale.dtype == torch.float32:
            exponents = torch.randint(-126, 128, scale.shape, generator=generator)
            scale = torch.exp2(exponents.float())
            scale[:, ::3] *= 1.25
        else:
            random = torch.randint(256, scale.shape, generator=generator, dtype=torch.uint8)
            scale = random.view(scale.dtype)
        values = ops.dequantize(codes, scale, None, spec, cols)
        want = values[0].clone()
        for value in values[1:]:
            want += value
        sent = torch.zeros(ranks, ops.message_bytes(spec, cols), dtype=torch.uint8)
        sent[:, : codes.shape[1]] = codes
        scales, begin = scale.view(torch.uint8), -(-codes.shape[1] // 16) * 16
        sent[:, begin : begin + scales.shape[1]] = scales
        out = torch.full((cols,), 7.0, device=device)
        ops.sum_messages(sent.to(device), spec, out)
        want = torch.where(want.isnan(), float("nan"), want)  # of one bit pattern
        require_same(out.cpu(), want, f"{spec}, {ranks} ranks, {cols} columns")


def check_codes(device="cpu"):
    """Compares with one cast on the CPU, where rows follow each other: rows of x that lie apart,
    and begin between vectors; lengths around 16384 columns, the most of a block of threads. What
    messages have besides codes and scales is zero.
    """
    lengths = [3, 16, 33, 48, 128, 144, 300, 8192 + 16, 16384 - 16, 16384 + 128]
    for spec, cols, dtype, begin in itertools.product(SPECS, lengths, FLOATS, (0, 1, 16)):
        x = torch.randn(RANKS, cols + 32).to(dtype)[:, begin : begin + cols]
        rng = torch.tensor([3, 4])
        on_device = {"rng": rng.to(device), "stream": STREAM}
        size = RANKS, ops.message_bytes(spec, cols)
        torch.full(size, 0xA5, dtype=torch.uint8, device=device)  # what the memory has before
        sent = ops.quantize_messages(x.to(device), spec, **on_device).cpu()
        codes, scale, *_ = ops.quantize(x.contiguous(), spec, "", rng=rng, stream_row=STREAM)
        scales = scale.contiguous().view(torch.uint8)
        at = -(-codes.shape[1] // 16) * 16
        what = f"{spec}, {cols} from {begin} on, {dtype}"
        require_same(sent[:, : codes.shape[1]].contiguous(), codes, f"codes of {what}")
        sent_scales = sent[:, at : at + scales.shape[1]].contiguous()
        require_same(sent_scales, scales, f"scales of {what}")
        padding = sent[:, codes.shape[1] : at], sent[:, at + scales.shape[1] :]
        assert not any(part.any() for part in padding), f"padding of {what}"


def check_bf16(device="cpu"):
    for cols, out in itertools.product(LENGTHS, FLOATS):
        values = [of_rank(rank, cols, torch.bfloat16) for rank in range(RANKS)]
        sent = [x.to(device).view(torch.uint8) for x in values]
        a, b, c = (x.float() for x in values)
        want = ((a + b) + c).to(out)
        require_same(sums(sent, "bf16", cols, out, device), want, f"bf16, {cols}")


def check_not_finite(device="cpu"):
    """An element that is not finite makes its block NaN, with the one NaN; all of bf16 is kept."""
    for bad in (float("nan"), float("inf")):
        x = torch.ones(1, 300, device=device)
        x[0, 130] = bad
        for spec, width in (("e4m3/1x128", 128), ("mxfp8+sr", 32), ("mxfp4", 32)):
            rng = torch.tensor([1, 2], device=device)
            out = torch.empty(300, device=device)
            ops.sum_messages(ops.quantize_messages(x, spec, rng=rng), spec, out)
            want = torch.ones(300)
            want[128 : 128 + width] = torch.tensor(0x7FC00000, dtype=torch.int32).view(
                torch.float32
            )
            require_same(out.cpu(), want, f"{spec} with {bad}")


def test_sums_are_those_of_whole_casts():
    check_sums()


def test_codes_are_those_of_a_whole_cast():
    check_codes()


def test_many_messages():
    x, rng = torch.randn(70, 272), torch.tensor([1, 2])
    sent = ops.quantize_messages(x, "mxfp8+sr", rng=rng)
    codes, *_ = ops.quantize(x, "mxfp8+sr", "", rng=rng)
    require_same(sent[:, :272].contiguous(), codes, "codes of 70 messages")


def test_sums_of_any_bytes():
    check_any_bytes()


def test_sums_of_bf16():
    check_bf16()


def test_what_is_not_finite():
    check_not_finite()


def test_codes_and_scales_lie_side_by_side():
    x = torch.randn(2, 300)
    q = mf.tensor.quantize(x, "e4m3/1x128")
    messages = ops.quantize_messages(x, "e4m3/1x128")
    assert messages.shape == (2, 304 + 16)  # 300 codes and 3 scales, each up to 16 bytes
    require_same(messages[:, :300], q.codes, "codes")
    require_same(messages[:, 304:316].contiguous().view(torch.float32), q.scale, "scales")


def test_empty_messages():
    assert ops.quantize_messages(torch.empty(2**40, 0), "mxfp8").shape == (2**40, 0)
    ops.sum_messages(torch.empty(3, 0, dtype=torch.uint8), "mxfp8", torch.empty(0))


def test_refusals():
    x = torch.randn(2, 64)
    for spec in ("nvfp4", "e4m3/row", "e4m3/128x128", "mxfp8+rht"):
        with pytest.raises(ValueError, match="messages: expected"):
            ops.quantize_messages(x, spec)
    with pytest.raises(ValueError, match="bf16 is the identity"):
        ops.quantize_messages(x, "bf16")
    with pytest.raises(ValueError, match="needs rng"):
        ops.quantize_messages(x, "mxfp8+sr")
    messages = ops.quantize_messages(x, "mxfp8")
    with pytest.raises(ValueError, match="contiguous bytes of messages"):
        ops.sum_messages(messages, "mxfp8", torch.empty(65))
    with pytest.raises(ValueError, match="one message or more"):
        ops.sum_messages(messages[:0], "mxfp8", torch.empty(64))
