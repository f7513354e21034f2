"""Casts that write swizzled scales: a cast's and then swizzle_scales' bytes, the same product."""

import pytest
import torch
from minifloat._native import ops

from tests.support.same_bits import require_all_same, require_same_bytes

PAIRS = [
    ("mxfp8", "mxfp8"),
    ("mxfp8/32x32", "mxfp8/32x32"),
    ("mxfp8/e5m2+sr", ""),
    ("", "mxfp4+rht32"),
    ("nvfp4+sr", "nvfp4+sr+rht"),
    ("nvfp4/16x16+4over6", "nvfp4/16x16+4over6"),
    ("nvfp4/row", "nvfp4+eden"),
    ("mxfp8", "nvfp4+pow2+rht"),
]
FORMS = [(True, True), (True, False), (False, True)]
# Rows about 128, blocks about 4, both of which the layout pads
SHAPES = [(1, 1), (40, 72), (127, 130), (128, 128), (129, 500), (1, 1000), (1000, 1), (384, 96)]
SHAPES += [(2, 33, 48), (3, 128, 64), (0, 32), (32, 0)]
RNG = torch.tensor([5, 6])


def block_rows(spec):
    return 32 if "/32x32" in spec else 16 if "/16x16" in spec else 1


def swizzled(scale, spec, rows):
    """Returns the tiles of row-major scales, (…, tiles down, tiles across, 512)."""
    of_rows = scale.repeat_interleave(block_rows(spec), -2)[..., :rows, :].contiguous()
    down, across = -(-rows // 128), -(-of_rows.shape[-1] // 4)
    return ops.swizzle_scales(of_rows).view(*scale.shape[:-2], down, across, 512)


def laid_out(outputs, x, specs, form):
    """Returns the eight tensors of a cast, with the scales swizzled that `form` names."""
    out = list(outputs)
    for side, rows in ((0, x.shape[-2]), (1, x.shape[-1])):
        if form[side] and specs[side]:
            out[4 * side + 1] = swizzled(out[4 * side + 1], specs[side], rows)
    return out


def flags(specs, form):
    named = zip(("swizzled_row", "swizzled_col"), form, specs, strict=True)
    return {name: is_swizzled and bool(spec) for name, is_swizzled, spec in named}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("specs", PAIRS)
def test_bytes_are_those_of_two_steps(specs, form, dtype):
    for shape in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        x = (x * torch.exp2(4 * x)).to(dtype)
        want = laid_out(ops.quantize(x, *specs, rng=RNG), x, specs, form)
        # What the allocator hands out is not zero, as the layout's padding is.
        dirty = [torch.full((2**16,), 255, dtype=torch.uint8) for _ in range(4)]
        del dirty
        got = ops.quantize(x, *specs, rng=RNG, **flags(specs, form))
        require_all_same(got, want, compare=require_same_bytes)
        meta = ops.quantize(x.to("meta"), *specs, rng=RNG.to("meta"), **flags(specs, form))
        assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in want]


def test_one_direction_may_be_fp8_beside_it():
    x = torch.randn(130, 96)
    want = ops.quantize(x, "nvfp4+pow2", "nvfp4+pow2", fp8_row=True)
    got = ops.quantize(x, "nvfp4+pow2", "nvfp4+pow2", fp8_row=True, swizzled_col=True)
    want = laid_out(want, x, ("", "nvfp4+pow2"), (False, True))
    require_all_same(got, want, compare=require_same_bytes)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_casts_of_activations(activation):
    gate, up, dh = (torch.randn(130, 72).bfloat16() for _ in range(3))
    specs, form = ("mxfp8", "nvfp4+rht"), (True, True)
    args = (gate, up, activation, *specs)
    want = laid_out(ops.quantize_activation(*args), gate, specs, form)
    got = ops.quantize_activation(*args, **flags(specs, form))
    require_all_same(got, want, compare=require_same_bytes)

    args = (dh, gate, up, activation, *specs, "mxfp4+rht")
    plain = ops.quantize_activation_backward(*args)
    want = [t for i in (0, 8) for t in laid_out(plain[i : i + 8], gate, specs, form)]
    want += laid_out([*plain[:4], *plain[16:]], gate, ("", "mxfp4+rht"), form)[4:]
    got = ops.quantize_activation_backward(*args, **flags(specs, form), swizzled_h=True)
    require_all_same(got, want, compare=require_same_bytes)
    with pytest.raises(ValueError, match="spec of h, whose swizzled scales"):
        ops.quantize_activation_backward(*args[:-1], "", swizzled_h=True)


@pytest.mark.parametrize("spec", ["e4m3/tensor", "e4m3/row", "e4m3/1x128"])
def test_other_specs_raise(spec):
    table = ops.group_table(torch.tensor([1, 4], dtype=torch.int32), 4)
    for device in ("cpu", "meta"):
        x = torch.ones(4, 32, device=device)
        with pytest.raises(ValueError, match="swizzled scales of MX or NVFP4.* got " + spec):
            ops.quantize(x, spec, "", swizzled_row=True)
        with pytest.raises(ValueError, match="no spec"):
            ops.quantize(x, "mxfp4", "", swizzled_col=True)
        with pytest.raises(ValueError, match="as FP8"):
            ops.quantize(x, "mxfp4", "", swizzled_row=True, fp8_row=True)
        with pytest.raises(ValueError, match="with groups"):
            ops.quantize(x, "mxfp4", "", swizzled_row=True, groups=table.to(device))


# ---- Products ------------------------------------------------------------------------------------
PRODUCTS = [
    ("mxfp8", "mxfp8/32x32"),
    ("mxfp4+rht", "mxfp4+rht"),
    ("nvfp4", "nvfp4/16x16"),
    ("nvfp4+pow2", "nvfp4+pow2"),
]


@pytest.mark.parametrize(("a_spec", "b_spec"), PRODUCTS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 32), (130, 48, 160), (256, 144, 544)])
def test_products_read_either_form(a_spec, b_spec, m, n, k):
    sides = [(torch.randn(m, k), a_spec), (torch.randn(n, k), b_spec)]
    plain = [ops.quantize(x, spec, "")[:3] for x, spec in sides]
    forms = [ops.quantize(x, spec, "", swizzled_row=True)[:3] for x, spec in sides]
    text = f"{a_spec}*{b_spec}"
    want = ops.scaled_mm(*plain[0], *plain[1], text, k=k)
    for a, b in ((forms[0], forms[1]), (plain[0], forms[1]), (forms[0], plain[1])):
        require_same_bytes(ops.scaled_mm(*a, *b, text, k=k), want)
    total = torch.ones(m, n)
    ops.add_scaled_mm(total, *forms[0], *forms[1], text, k=k)
    want = ops.scaled_mm(*plain[0], *plain[1], text, k=k, out_dtype=torch.float32) + 1
    require_same_bytes(total, want)
    for (_, spec), a, b in zip(sides, plain, forms, strict=True):
        (codes, scales, *rest), (want_codes, want_scales, *want_rest) = (
            ops.block_scaled_operand(*t, spec, k) for t in (b, a)
        )
        assert rest == want_rest
        for got, expected in zip([codes, *scales], [want_codes, *want_scales], strict=True):
            require_same_bytes(got, expected)


def test_scales_of_another_size_raise():
    codes, scale, amax = ops.quantize(torch.randn(130, 96), "mxfp8", "", swizzled_row=True)[:3]
    for wrong in (scale[:1], scale[..., :256], scale.float()):
        with pytest.raises(ValueError, match=r"swizzled scales \[2, 1, 512\] of a under mxfp8"):
            ops.scaled_mm(codes, wrong, amax, codes, scale, amax, "mxfp8*mxfp8", k=96)
        with pytest.raises(ValueError, match=r"or swizzled ones \[2, 1, 512\]"):
            ops.block_scaled_operand(codes, wrong, amax, "mxfp8", 96)
