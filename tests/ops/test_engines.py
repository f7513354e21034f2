"""The engine of each product on GPUs of any capability. The choice needs no GPU."""

import re
from pathlib import Path

import minifloat as mf
import pytest
import torch
from minifloat._native import ops

ADA, HOPPER, BLACKWELL, BLACKWELL_ULTRA, RTX_BLACKWELL, DGX_SPARK = 89, 90, 100, 103, 120, 121
WHOLE = {"m": 256, "n": 256, "k": 512}  # sizes that every engine takes

# product: on sm_89; on Hopper; on sm_100 and sm_103; on sm_120 and sm_121
ENGINES = {
    "e4m3/tensor*e4m3/tensor,fast": ("fp8_tensor", "fp8_tensor", "fp8_tensor", "fp8_tensor"),
    "e5m2/tensor*e4m3/tensor": ("fp8_tensor", "fp8_tensor", "fp8_tensor", "fp8_tensor"),
    "e5m2/tensor*e5m2/tensor": ("exact", "exact", "exact", "exact"),
    "e4m3/row*e4m3/row": ("fp8_row", "fp8_row", "fp8_row", "fp8_row"),
    "e4m3/1x128*e4m3/128x128": ("exact", "fp8_block", "exact", "exact"),
    "e4m3/1x128*e4m3/1x128": ("exact", "fp8_block", "exact", "exact"),
    "e4m3/128x128*e4m3/128x128": ("exact", "exact", "exact", "exact"),
    "mxfp8*mxfp8": ("exact", "exact", "block_scaled", "block_scaled"),
    "mxfp8+sr*mxfp8/32x32+floor": ("exact", "exact", "block_scaled", "block_scaled"),
    "mxfp8/e5m2*mxfp8": ("exact", "exact", "exact", "exact"),
    "mxfp8/e5m2*mxfp8/e5m2": ("exact", "exact", "exact", "exact"),
    "mxfp4*mxfp4": ("fp4_by_fp8", "fp4_by_fp8", "block_scaled", "fp4_by_fp8"),
    "mxfp4+sr+rht*mxfp4+rht": ("fp4_by_fp8", "fp4_by_fp8", "block_scaled", "fp4_by_fp8"),
    "nvfp4*nvfp4/16x16": ("exact", "exact", "block_scaled", "block_scaled"),
    "nvfp4+sr+rht*nvfp4+up+rht": ("exact", "exact", "block_scaled", "block_scaled"),
    "nvfp4+pow2*nvfp4/16x16+pow2": ("fp4_by_fp8", "fp4_by_fp8", "block_scaled", "block_scaled"),
    "mxfp4*mxfp8": ("exact", "exact", "exact", "exact"),
    "nvfp4*mxfp4": ("exact", "exact", "exact", "exact"),
    "nvfp4+pow2*mxfp4": ("fp4_by_fp8", "fp4_by_fp8", "fp4_by_fp8", "fp4_by_fp8"),
    "e4m3/row*mxfp4": ("fp4_by_fp8", "fp4_by_fp8", "fp4_by_fp8", "fp4_by_fp8"),
    "nvfp4+pow2*e4m3/row": ("fp4_by_fp8", "fp4_by_fp8", "fp4_by_fp8", "fp4_by_fp8"),
    "e4m3/row+exact*mxfp4": ("fp4_by_fp8", "fp4_by_fp8", "fp4_by_fp8", "fp4_by_fp8"),
    "e4m3/tensor*mxfp4": ("exact", "exact", "exact", "exact"),
    "e4m3/row*nvfp4": ("exact", "exact", "exact", "exact"),
    "e4m3/tensor*e4m3/row": ("exact", "exact", "exact", "exact"),
    "e1m2/1x16*e1m2/1x16": ("exact", "exact", "exact", "exact"),
    "e1m2/1x16+up+rht*e1m2/16x16+rht": ("exact", "exact", "exact", "exact"),
    "e1m2/1x16+pow2+sr*e1m2/16x16+pow2": ("fp4_by_fp8",) * 4,
    "e1m2/1x32*e1m2/1x32+floor": ("fp4_by_fp8",) * 4,
    "e1m2/1x32*e1m2/1x16+pow2": ("fp4_by_fp8",) * 4,
    "e4m3/row*e1m2/1x32": ("fp4_by_fp8",) * 4,
    "nvfp4+pow2*e1m2/1x16+pow2": ("fp4_by_fp8",) * 4,
    "nvfp4*e1m2/1x16": ("exact", "exact", "exact", "exact"),
    "nvfp4*bf16": ("exact", "exact", "exact", "exact"),
    "bf16*bf16": ("exact", "exact", "exact", "exact"),
}


@pytest.mark.parametrize("product", ENGINES)
def test_of_each_capability(product):
    ada, hopper, blackwell, rtx = ENGINES[product]
    of_capability = {ADA: ada, HOPPER: hopper, BLACKWELL: blackwell, BLACKWELL_ULTRA: blackwell}
    of_capability |= {RTX_BLACKWELL: rtx, DGX_SPARK: rtx, 0: "exact", 80: "exact", 86: "exact"}
    for capability, engine in of_capability.items():
        assert ops.engine_of(product, capability, **WHOLE) == engine, capability


def test_every_engine_is_a_row_of_the_table():
    folder = Path(__file__).parents[2] / "torch" / "products"
    declarations = re.findall(
        r"^extern const Engine (.+?);", (folder / "engines.h").read_text(), re.DOTALL | re.MULTILINE
    )
    declared = [name for names in declarations for name in re.split(r",\s*", names)]
    listed = re.findall(r"&(k\w+)", (folder / "engines.cpp").read_text())
    assert sorted(listed) == sorted(declared)


def test_every_preset_has_an_engine_everywhere():
    for preset in ops.preset_names():
        for product in ops.parse_recipe(preset)[1:]:
            for capability in (0, 80, 86, 89, 90, 100, 103, 110, 120, 121):
                assert ops.engine_of(product, capability, **WHOLE)


@pytest.mark.parametrize("product", ["mxfp8*mxfp8/32x32", "nvfp4*nvfp4/16x16"])
@pytest.mark.parametrize("capability", [BLACKWELL, BLACKWELL_ULTRA, RTX_BLACKWELL])
def test_sizes_that_block_scales_do_not_take(product, capability):
    def engine(m, n, k, **asked):
        return ops.engine_of(product, capability, m=m, n=n, k=k, **asked)

    for m in (1, 33, 128, 200):
        assert engine(m, 16, 32) == "block_scaled"
        assert engine(m, 272, 544, out_dtype=torch.float32, bias=True) == "block_scaled"
    for sizes in [(0, 16, 32), (16, 0, 32), (16, 16, 0), (16, 24, 32), (16, 16, 48), (16, 16, 40)]:
        assert engine(*sizes) == "exact"


def test_a_transform_grows_the_contraction():
    product = "nvfp4+rht*nvfp4+rht"
    assert ops.engine_of(product, BLACKWELL, m=32, n=32, k=50) == "block_scaled"  # 64 columns
    assert ops.engine_of(product, BLACKWELL, m=32, n=32, k=33) == "exact"  # 48


@pytest.mark.parametrize("product", ["mxfp4*mxfp4", "nvfp4+pow2*nvfp4+pow2"])
def test_fp4_by_fp8_is_the_next_best(product):
    def engine(**asked):
        return ops.engine_of(product, BLACKWELL, **{**WHOLE, **asked})

    is_mx = product.startswith("mx")  # its product writes bf16 alone, without a bias
    assert engine() == "block_scaled"
    assert engine(bias=True) == ("fp4_by_fp8" if is_mx else "block_scaled")
    assert engine(out_dtype=torch.float32) == ("exact" if is_mx else "block_scaled")
    assert engine(k=48) == "fp4_by_fp8"
    assert engine(k=48, out_dtype=torch.float32) == "exact"
    assert engine(k=40) == "exact"


def test_rows_of_fp8_in_fp32_on_hopper_alone():
    asked = {**WHOLE, "out_dtype": torch.float32}
    assert ops.engine_of("e4m3/row*e4m3/row", HOPPER, **asked) == "fp8_row"
    for other in (ADA, BLACKWELL, RTX_BLACKWELL):
        assert ops.engine_of("e4m3/row*e4m3/row", other, **asked) == "exact"


def test_engines_of_a_recipe():
    fprop, dgrad, wgrad = mf.engines("mxfp8_nvfp4", (9, 0))
    assert [e.product for e in (fprop, dgrad, wgrad)] == ["fprop", "dgrad", "wgrad"]
    assert fprop.specs == "mxfp8*mxfp8"
    assert not fprop.native
    assert fprop.does == (
        "a bf16 GEMM of the decoded values; codes are multiplied by compute capability "
        "10.0, 10.3, 12.0, 12.1"
    )
    assert all(e.native for e in mf.engines("mxfp8_nvfp4", (12, 0)))
    assert all(e.native for e in mf.engines("bf16", (8, 0)))
    assert {e.name for e in mf.engines("fp8_rowwise", (0, 0))} == {"exact"}
    assert {e.name for e in mf.engines("mxfp8", (10, 0), experts=True)} == {"block_scaled_grouped"}
    assert mf.engines("nvfp4")[0].native == mf.engines("nvfp4", current())[0].native
    for bad in ("9.0", (9,), [9, 0]):
        with pytest.raises(TypeError, match="engines: expected capability as"):
            mf.engines("nvfp4", bad)
    with pytest.raises(ValueError, match="engines: capability: expected at least 0"):
        mf.engines("nvfp4", (-1, 0))


def test_a_library_for_the_cpu_alone_multiplies_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for has_cuda, name in ((True, "fp8_row"), (False, "exact")):
        monkeypatch.setattr(ops, "has_cuda", lambda has=has_cuda: has)
        assert {engine.name for engine in mf.engines("fp8_rowwise")} == {name}


def current():
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
