"""Spec beside a table that was written by hand: every spec of the grammar, and no other text."""

import re
from itertools import product

import minifloat as mf
import pytest
import torch
from minifloat.spec import Sizes, Spec

from tests.support import specs

# text: elements, rule, bits, block, scale dtype, amax of
BASES = {
    "bf16": ("bf16", "none", 16, (0, 0), torch.float32, ""),
    "e4m3/tensor": ("e4m3", "tensor", 8, (0, 0), torch.float32, "tensor"),
    "e5m2/tensor": ("e5m2", "tensor", 8, (0, 0), torch.float32, "tensor"),
    "e4m3/row": ("e4m3", "row", 8, (0, 0), torch.float32, "row"),
    "e4m3/1x128": ("e4m3", "block", 8, (1, 128), torch.float32, ""),
    "e4m3/128x128": ("e4m3", "block", 8, (128, 128), torch.float32, ""),
    "mxfp8": ("e4m3", "mx", 8, (1, 32), torch.float8_e8m0fnu, ""),
    "mxfp8/32x32": ("e4m3", "mx", 8, (32, 32), torch.float8_e8m0fnu, ""),
    "mxfp8/e5m2": ("e5m2", "mx", 8, (1, 32), torch.float8_e8m0fnu, ""),
    "mxfp4": ("e2m1", "mx", 4, (1, 32), torch.float8_e8m0fnu, ""),
    "nvfp4": ("e2m1", "nvfp4", 4, (1, 16), torch.float8_e4m3fn, "tensor"),
    "nvfp4/16x16": ("e2m1", "nvfp4", 4, (16, 16), torch.float8_e4m3fn, "tensor"),
    "nvfp4/row": ("e2m1", "nvfp4", 4, (1, 16), torch.float8_e4m3fn, "row"),
    "e1m2/1x16": ("e1m2", "nvfp4", 4, (1, 16), torch.float8_e4m3fn, "tensor"),
    "e1m2/16x16": ("e1m2", "nvfp4", 4, (16, 16), torch.float8_e4m3fn, "tensor"),
    "e1m2/1x32": ("e1m2", "mx", 4, (1, 32), torch.float8_e8m0fnu, ""),
}
# rule, or spec: its flags, of which a spec has at most one
OWN_FLAGS = {
    "none": [],
    "tensor": ["+delayed"],
    "row": ["+exact"],
    "block": ["+exact"],
    "mx": ["+floor"],
    "nvfp4": ["+up", "+pow2", "+4over6"],
    "nvfp4/row": ["+up"],
    "e1m2/1x16": ["+up", "+pow2"],
    "e1m2/16x16": ["+up", "+pow2"],
}
EDEN = "nvfp4+eden"  # alone: stochastic, and transformed over 128 points
TRANSFORMS = {"": 0, "+rht": 16, "+rht32": 32, "+rht64": 64, "+rht128": 128}
CUT = {
    "nvfp4": 4 + 0.5,
    "nvfp4/row": 4 + 0.5,
    "nvfp4/16x16": 4 + 1 / 32,
    "mxfp8": 8.25,
    "mxfp4": 4.25,
    "e1m2/1x16": 4 + 0.5,
    "e1m2/16x16": 4 + 1 / 32,
    "e1m2/1x32": 4.25,
}


def own_flags(base):
    return OWN_FLAGS[base if base in OWN_FLAGS else BASES[base][1]]


def specs_of(base):
    if base == "bf16":
        return [("bf16", "", "", "")]
    flags = product(["", *own_flags(base)], ["", "+sr"], TRANSFORMS)
    return [(base + own + rounding + rht, own, rounding, rht) for own, rounding, rht in flags]


def ceil_div(a, b):
    return -(-a // b)


@pytest.mark.parametrize("base", BASES)
def test_answers_against_the_table(base):
    elements, rule, bits, block, scale_dtype, amax_of = BASES[base]
    for text, own, rounding, rht in specs_of(base):
        spec = Spec.parse(text)
        assert spec is Spec.parse(text), "a text is parsed once"
        assert (spec.text, spec.elements, spec.rule) == (text, elements, rule)
        assert (spec.code_bits, spec.block, spec.scale_dtype) == (bits, block, scale_dtype)
        assert (spec.amax_of, spec.transform) == (amax_of, TRANSFORMS[rht])
        assert spec.is_stochastic == (rounding == "+sr")
        assert spec.is_delayed == (own == "+delayed")
        is_pow2 = base in ("mxfp4", "e1m2/1x32") or own == "+pow2"
        assert spec.is_fp4_by_powers_of_two == is_pow2
        assert spec.is_bf16 == (base == "bf16")
        assert spec.has_blocks == (block != (0, 0))
        is_2d = base in ("e4m3/128x128", "mxfp8/32x32", "nvfp4/16x16", "e1m2/16x16")
        is_whole = is_2d or base in ("bf16", "e4m3/tensor", "e5m2/tensor")
        assert spec.transposes_exactly == (is_whole and rht == "")
        if base in CUT:
            assert spec.bits == CUT[base]


@pytest.mark.parametrize("base", BASES)
def test_sizes_against_the_table(base):
    _, _, bits, (height, width), _, amax_of = BASES[base]
    for text, _, _, rht in specs_of(base):
        spec, points = Spec.parse(text), max(TRANSFORMS[rht], 1)
        assert spec.alignment[0] == max(height, 1)
        assert spec.alignment[1] == max(width, points, 2 if bits == 4 else 1)
        for rows, cols in ((1, 1), (37, 77), (128, 256), (300, 1000)):
            padded = points * ceil_div(cols, points)
            scales = (rows, 0) if amax_of == "row" else (0, 0)
            if height:
                scales = ceil_div(rows, height), ceil_div(padded, width)
            code_cols = ceil_div(padded, 2) if bits == 4 else padded
            assert spec.sizes(rows, cols) == Sizes(code_cols, padded, *scales)
            if base == "bf16":
                continue
            q = mf.tensor.quantize(torch.ones(rows, cols), text)
            assert q.scale.shape == spec.scale_shape(rows, cols)
            assert q.amax.shape == spec.amax_shape(rows)
            assert q.scale.dtype == spec.scale_dtype
            assert q.codes.shape == (rows, code_cols)


def expected_in(text, around):
    with pytest.raises(ValueError, match=r"position \d+") as error:
        Spec.parse(text)
    return re.split(", | or ", str(error.value).partition(around)[2])


def test_the_tables_of_tests_have_every_base_and_every_flag():
    bases = {Spec.parse(name).text for name in expected_in("?", "expected one of ")}
    flags = {f"+{name}" for name in expected_in("nvfp4+?", "is not a flag; expected ")}
    assert bases == BASES.keys()
    assert flags == {
        "+sr",
        "+eden",
        *TRANSFORMS,
        *(f for own in OWN_FLAGS.values() for f in own),
    } - {""}
    own = [text for base in BASES for text, _, sr, rht in specs_of(base) if not sr and not rht]
    assert {*own} - {"bf16"} == {*specs.BASES, "e4m3/tensor+delayed", "e5m2/tensor+delayed"}


def test_eden():
    spec = Spec.parse(EDEN)
    assert (spec.text, spec.rule, spec.bits, spec.block) == (EDEN, "nvfp4", 4.5, (1, 16))
    assert (spec.is_stochastic, spec.transform, spec.draws_signs) == (True, 128, True)
    assert (spec.group_unit, spec.alignment) == (128, (1, 128))
    assert spec.sizes(3, 130) == Sizes(128, 256, 3, 16)
    assert not Spec.parse("nvfp4+sr+rht128").draws_signs
    flags = ("+sr", "+up", "+pow2", "+4over6", "+eden", *filter(None, TRANSFORMS))
    for text in (*(EDEN + flag for flag in flags), *(f"nvfp4{flag}+eden" for flag in flags)):
        with pytest.raises(ValueError, match=r"position \d+"):
            Spec.parse(text)
    for base in BASES.keys() - {"nvfp4"}:
        with pytest.raises(ValueError, match=r"position \d+"):
            Spec.parse(base + "+eden")


def test_specs_that_cast_rows_alone():
    alone = {"e4m3/row", "e4m3/1x128", "mxfp8", "mxfp4+rht", "nvfp4/row", "e1m2/1x32"}
    others = {"bf16", "e4m3/tensor", "nvfp4", "mxfp4+sr", "e4m3/row+sr", "mxfp8/32x32"}
    assert {text for text in alone | others if Spec.parse(text).casts_rows_alone} == alone


def test_other_texts_are_refused():
    for base, flag in product(BASES, {f for flags in OWN_FLAGS.values() for f in flags}):
        if flag not in own_flags(base):
            with pytest.raises(ValueError, match=r"position \d+"):
                Spec.parse(base + flag)
    for text in ("", "mxfp9", "nvfp4+sr+sr", "nvfp4*nvfp4", "mxfp8,fast", "mxfp8+rht16"):
        with pytest.raises(ValueError, match=r"position \d+"):
            Spec.parse(text)
    with pytest.raises(TypeError, match="expected its text as str"):
        Spec.parse(None)


def test_another_order_of_flags_has_the_same_canonical_text():
    assert Spec.parse("nvfp4+rht+up+sr") == Spec.parse("nvfp4+up+sr+rht")


def test_parts_of_a_product():
    info = torch.ops.minifloat.product_info
    assert info("nvfp4+rht+sr*mxfp8+rht") == ("nvfp4+sr+rht", "mxfp8+rht", False)
    assert info("e4m3/row*e4m3/row,fast") == ("e4m3/row", "e4m3/row", True)
    with pytest.raises(ValueError, match=r"position \d+"):
        info("nvfp4")


def test_a_graph_reads_a_spec():
    def read(x, text):
        spec = Spec.parse(text)
        if spec.has_blocks and not spec.is_stochastic:
            x = x + spec.block[1]
        return x.to(spec.scale_dtype), spec.code_bits, spec.alignment, spec.text

    compiled = torch.compile(read, fullgraph=True, backend="eager")
    for text in ("mxfp8", "nvfp4/16x16", "e4m3/row", "nvfp4+sr"):
        got, want = compiled(torch.ones(4), text), read(torch.ones(4), text)
        assert got[0].dtype == want[0].dtype
        assert torch.equal(got[0].float(), want[0].float())
        assert got[1:] == want[1:]
