"""quantize and the transforms: bytes against the oracle, over shapes, dtypes and values."""

import itertools
import pickle
from dataclasses import replace

import minifloat as mf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from minifloat._native import ops
from minifloat.spec import Spec

from tests.support import oracle
from tests.support.specs import SPECS, flagged

FLAGS = ["", "+sr", "+rht", "+sr+rht", "+rht32", "+rht64", "+sr+rht128"]
BLOCKS_2D = [
    "e4m3/tensor",
    "e4m3/128x128",
    "mxfp8/32x32",
    "nvfp4/16x16",
    "nvfp4/16x16+4over6",
]


def values(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Makes fp32 test data; `special` has every kind of number in the tables of numerics.md."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        if kind == "wide":
            x *= np.exp2(rng.uniform(-60, 60, shape)).astype(np.float32)
        elif kind == "tiny":
            x *= np.float32(2.0**-130)
        elif kind == "sparse":
            x *= rng.random(shape) < 0.03
        elif kind == "special":
            pool = np.array(
                [0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3e38, 448, 6], np.float32
            )
            x = np.where(rng.random(shape) < 0.01, rng.choice(pool, shape), x)
    return torch.from_numpy(x.astype(np.float32))


def with_strides(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Copies values to another memory layout, columns adjacent."""
    if layout == "contiguous":
        return x
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), float("nan"), dtype=x.dtype)
    wide[..., 2 : 2 + x.shape[-1]] = x
    return wide[..., 2 : 2 + x.shape[-1]]


def as_bytes(t) -> np.ndarray:
    t = t.contiguous()
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.uint8).numpy()


def same_floats(got: torch.Tensor, want: np.ndarray, what: str) -> None:
    """Compares bit for bit; all NaNs are equal."""
    got, want = got.numpy(), np.asarray(want, np.float32)
    assert got.shape == want.shape, what
    same = (got.view(np.int32) == want.view(np.int32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), f"{what}: {(~same).sum()} differ, first {got[~same][0]} for {want[~same][0]}"


def require_equal_bytes(q: mf.tensor.Quantized, x: torch.Tensor, **oracle_arguments) -> None:
    """Compares q with the oracle's cast of x, a matrix as read."""
    codes, scale, amax = oracle.quantize(x.float().numpy(), q.spec, **oracle_arguments)
    if scale.dtype == np.uint8:
        got = q.scale.view(torch.uint8).numpy()
        assert got.shape == scale.shape
        assert (got == scale).all(), (
            f"{q.spec} scale: {(got != scale).sum()} of {scale.size} differ"
        )
    else:
        same_floats(q.scale, scale, f"{q.spec} scale")
    if amax is not None:
        same_floats(q.amax, amax, f"{q.spec} amax")
    wrong = q.codes.numpy() != codes
    assert q.codes.shape == codes.shape
    first = tuple(np.argwhere(wrong)[0]) if wrong.any() else None
    assert not wrong.any(), (
        f"{q.spec}: {wrong.sum()} of {codes.size} code bytes differ, first at {first}: "
        f"{q.codes.numpy()[first]:#04x} for {codes[first]:#04x}"
    )


@pytest.mark.parametrize("kind", ["normal", "wide", "tiny", "sparse", "special"])
@pytest.mark.parametrize("spec", SPECS)
def test_every_spec_and_flag(spec, kind):
    x = values(kind, (37, 150), seed=len(spec))
    key = oracle.mix_seed(5, 0)
    for flag, columnwise in itertools.product(FLAGS, (False, True)):
        q = mf.tensor.quantize(x, flagged(spec, flag), columnwise=columnwise, seed=5, stream=-7)
        as_read = x.t().contiguous() if columnwise else x
        require_equal_bytes(q, as_read, key=key, stream=-7 & oracle.MASK, columnwise=columnwise)


@given(
    spec=st.sampled_from(SPECS),
    flag=st.sampled_from(FLAGS),
    rows=st.sampled_from([1, 2, 15, 16, 17, 31, 33, 64, 129]),
    cols=st.sampled_from([1, 2, 15, 16, 17, 31, 33, 127, 128, 130, 257]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layout=st.sampled_from(["contiguous", "strided"]),
    kind=st.sampled_from(["normal", "wide", "special"]),
    columnwise=st.booleans(),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=250, deadline=None)
def test_any_shape_dtype_stride(spec, flag, rows, cols, dtype, layout, kind, columnwise, seed):
    x = with_strides(values(kind, (rows, cols), seed % 1000).to(dtype), layout)
    q = mf.tensor.quantize(x, flagged(spec, flag), columnwise=columnwise, seed=seed, stream=seed)
    as_read = x.t() if columnwise else x
    key = oracle.mix_seed(seed & oracle.MASK, 0)
    require_equal_bytes(
        q, as_read.contiguous(), key=key, stream=seed & oracle.MASK, columnwise=columnwise
    )
    assert q.shape == tuple(as_read.shape)
    assert q.columnwise == columnwise


@pytest.mark.parametrize(
    "spec", ["nvfp4+sr", "mxfp8", "nvfp4+sr+rht", "nvfp4+eden", "e4m3/row", "e4m3/1x128"]
)
def test_both_directions_from_one_read(spec):
    x = values("normal", (70, 90), 1)
    rng = torch.tensor([3, 0])
    both = ops.quantize(x, spec, spec, rng=rng, stream_row=1, stream_col=2)
    row = mf.tensor.quantize(x, spec, seed=3, stream=1)
    col = mf.tensor.quantize(x, spec, columnwise=True, seed=3, stream=2)
    for got, want in zip(
        (*both[:3], *both[4:7]), (row.codes, row.scale, row.amax, col.codes, col.scale, col.amax)
    ):
        assert (as_bytes(got) == as_bytes(want)).all()


@pytest.mark.parametrize("spec", ["nvfp4+sr", "mxfp8/32x32+sr", "e4m3/row+sr", "mxfp4+sr+rht"])
def test_a_shard_gets_the_bytes_of_the_whole(spec):
    x = values("normal", (128, 192), 2)
    amax = mf.tensor.quantize(x, spec).amax if "nvfp4" in spec else None
    whole = mf.tensor.quantize(x, spec, amax=amax, seed=9)
    shard = mf.tensor.quantize(x[32:96, 64:192], spec, amax=amax, seed=9, origin=(32, 64))
    if "row" in spec:  # the scale would be the whole row's
        return
    first, last = 64 * whole.codes.shape[1] // 192, whole.codes.shape[1]
    assert torch.equal(shard.codes, whole.codes[32:96, first:last])
    down = mf.tensor.quantize(x[32:96], spec, columnwise=True, amax=amax, seed=9, origin=(32, 0))
    whole = mf.tensor.quantize(x, spec, columnwise=True, amax=amax, seed=9)
    first, last = (n * whole.codes.shape[1] // 128 for n in (32, 96))
    assert torch.equal(down.codes, whole.codes[:, first:last])


OF_BLOCKS = "mxfp8", "mxfp8+sr", "mxfp8/32x32", "e4m3/1x128", "e4m3/128x128", "nvfp4"


@pytest.mark.parametrize("spec", [*OF_BLOCKS, "nvfp4/16x16+sr", "mxfp4+rht64", "e4m3/tensor+sr"])
def test_an_origin_within_a_block_is_refused(spec):
    """Its codes would be others than the whole's."""
    parsed = Spec.parse(spec)
    cols = max(parsed.alignment[1], 16 * ("+sr" in spec))
    mf.tensor.quantize(torch.ones(128, 128), spec, origin=(0, 3 * cols))
    with pytest.raises(ValueError, match=f"origin .* a multiple of {cols} under"):
        mf.tensor.quantize(torch.ones(128, 128), spec, origin=(0, cols // 2))


@pytest.mark.parametrize("spec", ["nvfp4", "e4m3/tensor", "e4m3/row", "mxfp8/32x32", "nvfp4+rht"])
@pytest.mark.parametrize("columnwise", [False, True])
def test_a_batch_is_its_matrices(spec, columnwise):
    x = values("wide", (3, 40, 50), 3)
    batch = mf.tensor.quantize(x, spec, columnwise=columnwise)
    assert batch.shape == ((3, 50, 40) if columnwise else (3, 40, 50))
    for e in range(3):
        one = mf.tensor.quantize(x[e], spec, columnwise=columnwise)
        for name in ("codes", "scale"):
            assert (as_bytes(getattr(batch, name)[e]) == as_bytes(getattr(one, name))).all()
        if one.amax.shape != (0,):
            assert torch.equal(batch.amax[e], one.amax)


@pytest.mark.parametrize("columnwise", [False, True])
def test_given_amax(columnwise):
    x = values("normal", (20, 48), 4)
    as_read = x.t().contiguous() if columnwise else x
    key = oracle.mix_seed(0, 0)
    for spec, amax in [
        ("nvfp4", torch.tensor(9.5)),
        ("nvfp4", torch.tensor(0.5)),
        ("nvfp4+eden", torch.tensor(9.5)),
        ("nvfp4+eden", torch.tensor(0.5)),
        ("e5m2/tensor", torch.tensor(100.0)),
        ("e4m3/tensor+delayed", torch.tensor(0.0)),
        ("e4m3/row", torch.linspace(0.5, 4, len(as_read))),
    ]:
        q = mf.tensor.quantize(x, spec, columnwise=columnwise, amax=amax)
        require_equal_bytes(q, as_read, given_amax=amax.numpy(), key=key)


def test_stochastic_bytes_do_not_depend_on_threads():
    x = values("normal", (300, 500), 5)
    threads = torch.get_num_threads()
    try:
        codes = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            codes.append(mf.tensor.quantize(x, "nvfp4+sr+rht", columnwise=True, seed=1).codes)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(codes[0], codes[1])
    assert torch.equal(codes[0], codes[2])


def test_seed_and_stream_draw_other_bits_and_the_mean_is_unbiased():
    x = torch.full((64, 256), 1.3)
    x[:, ::16] = 6.0  # the block's scale is 1: 1.3 lies between 1 and 1.5
    keys = [(0, 0), (1, 0), (0, 1)]
    draws = [mf.tensor.quantize(x, "nvfp4+sr", seed=seed, stream=stream) for seed, stream in keys]
    assert not torch.equal(draws[0].codes, draws[1].codes)
    assert not torch.equal(draws[0].codes, draws[2].codes)
    # 15,360 draws from {1, 1.5}: the standard error of the mean is at most 0.25 / sqrt(15360)
    for q in draws:
        drawn = mf.tensor.dequantize(q).unflatten(1, (-1, 16))[..., 1:]
        assert drawn.unique().tolist() == pytest.approx([1.0, 1.5], rel=2**-22)
        assert abs(drawn.mean() - 1.3) < 4 * 0.25 / 15360**0.5


@pytest.mark.parametrize("spec", SPECS)
def test_dequantize_is_code_times_scale(spec):
    p = oracle.parse(spec)
    shape = (33, 256 if p.points else 70)
    x = values("normal", shape, 6)
    q = mf.tensor.quantize(x, spec, amax=torch.tensor(3.0) if "delayed" in spec else None)
    codes = q.codes.numpy()
    if p.elements.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(33, -1)[:, : shape[1]]
    elements = oracle.decode(codes, p.elements)
    if p.rule == "nvfp4":
        scale = oracle.decode(q.scale.view(torch.uint8).numpy(), oracle.E4M3)
        is_below = "pow2" in spec or "4over6" in spec
        top = np.float32(p.elements.max * (256 if is_below else 448))
        if "eden" in spec:
            top = np.float32(256) * np.float32(6 / (17 / 16 * 0.93))
        s = top / (q.amax.numpy()[:, None] if p.has_rows else q.amax.numpy())
        want = elements * oracle.spread(scale, p.block, shape) * (np.float32(1) / s)
    elif p.rule == "mx":
        scale = np.ldexp(np.float32(1), q.scale.view(torch.uint8).numpy().astype(int) - 127)
        want = elements * oracle.spread(scale, p.block, shape)
    else:
        scale = q.scale.numpy()
        if p.rule == "block":
            scale = oracle.spread(scale, p.block, shape)
        want = elements * (scale[:, None] if p.rule == "row" else scale)
    same_floats(mf.tensor.dequantize(q), want, spec)
    same_floats(q.dequantize(torch.bfloat16).float(), oracle.to_bf16(want), spec)


@pytest.mark.parametrize("spec", BLOCKS_2D)
def test_2d_blocks_agree_in_both_directions(spec):
    x = values("normal", (70, 90), 7)
    row, col = mf.tensor.quantize(x, spec), mf.tensor.quantize(x, spec, columnwise=True)
    assert torch.equal(mf.tensor.dequantize(row), mf.tensor.dequantize(col).t())
    if "nvfp4" in spec:
        assert torch.equal(mf.tensor.transpose_codes(row.codes, 90), col.codes)


def test_amax_is_what_quantize_uses():
    x = values("special", (5, 30, 40), 8)
    specs = ["nvfp4", "e4m3/row", "nvfp4+rht", "nvfp4+eden"]
    for spec, columnwise in itertools.product(specs, (False, True)):
        want = mf.tensor.quantize(x, spec, columnwise=columnwise).amax
        got = mf.tensor.amax(x, spec, columnwise=columnwise)
        assert got.shape == want.shape
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("points", [16, 32, 64, 128])
@pytest.mark.parametrize("columnwise", [False, True])
def test_hadamard(points, columnwise):
    x = values("normal", (45, 200), 9)
    as_read = (x.t() if columnwise else x).contiguous()
    y = mf.tensor.hadamard(x, points, columnwise=columnwise)
    same_floats(y.float(), oracle.hadamard(as_read.numpy(), points), f"{points} points")
    # An orthonormal transform preserves lengths, within bf16's rounding, 2^-9 an element.
    assert torch.allclose(y.float().norm(dim=1), as_read.norm(dim=1), rtol=2**-9)


def test_hadamard_signs():
    x = values("normal", (4, 32), 10)
    y = mf.tensor.hadamard(x, signs=0x0001)
    same_floats(y.float(), oracle.hadamard(x.numpy(), 16, 0x0001), "signs")


def swizzled(scale: np.ndarray) -> np.ndarray:
    rows, cols = scale.shape
    tiles = -(-cols // 4)
    out = np.zeros(-(-rows // 128) * 128 * 4 * tiles, np.uint8)
    r, c = np.arange(rows)[:, None], np.arange(cols)[None]
    at = ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    out[at] = scale
    return out


@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 20),
    dtype=st.sampled_from([torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu]),
)
@settings(max_examples=40, deadline=None)
def test_swizzle_and_back(rows, cols, dtype):
    scale = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
    tiled = mf.tensor.swizzle_scales(scale.view(dtype))
    assert tiled.dtype == dtype
    assert (tiled.view(torch.uint8).flatten().numpy() == swizzled(scale.numpy())).all()
    back = mf.tensor.unswizzle_scales(tiled, rows, cols)
    assert torch.equal(back.view(torch.uint8), scale)
    batch = torch.stack([scale, scale])
    assert torch.equal(
        mf.tensor.unswizzle_scales(mf.tensor.swizzle_scales(batch), rows, cols), batch
    )


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 5), (16, 17), (64, 130)])
def test_transpose_codes(rows, cols):
    codes = torch.randint(0, 16, (rows, cols), dtype=torch.uint8).numpy()
    got = mf.tensor.transpose_codes(torch.from_numpy(oracle.pack(codes)), cols)
    assert (got.numpy() == oracle.pack(np.ascontiguousarray(codes.T))).all()


@pytest.mark.parametrize(
    "spec", ["nvfp4", "mxfp8", "e4m3/tensor", "e4m3/row", "e4m3/128x128", "nvfp4+rht"]
)
@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 0), (0, 4, 32)])
def test_empty(spec, shape):
    q = mf.tensor.quantize(torch.empty(shape), spec)
    assert mf.tensor.dequantize(q).numel() == 0
    assert (
        mf.tensor.dequantize(mf.tensor.quantize(torch.empty(shape), spec, columnwise=True)).numel()
        == 0
    )


def test_quantized_pickles():
    q = mf.tensor.quantize(values("normal", (8, 32), 11), "nvfp4")
    twin = pickle.loads(pickle.dumps(q))
    assert torch.equal(twin.codes, q.codes)
    assert (twin.spec, twin.shape, twin.columnwise) == (q.spec, q.shape, q.columnwise)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mf.tensor.quantize(torch.ones(4, 4), "nvfp5"), "nvfp5"),
        (lambda: mf.tensor.quantize(torch.ones(4, 4), "bf16"), "bf16 is the identity"),
        (lambda: mf.tensor.quantize(torch.ones(4, 4).double(), "nvfp4"), "float32 or bfloat16"),
        (lambda: mf.tensor.quantize(torch.ones(4, 4).half(), "nvfp4"), "float32 or bfloat16"),
        (lambda: mf.tensor.quantize(torch.ones(4), "nvfp4"), "1 dimensions"),
        (lambda: mf.tensor.quantize(torch.ones(2, 2, 2, 2), "nvfp4"), "4 dimensions"),
        (lambda: mf.tensor.quantize(torch.ones(4, 6).t(), "nvfp4"), "adjacent columns"),
        (lambda: mf.tensor.quantize(torch.ones(4, 4), "nvfp4", amax=torch.ones(3)), "amax"),
        (lambda: mf.tensor.quantize(torch.ones(4, 4), "nvfp4", amax=torch.tensor(1)), "amax"),
        (
            lambda: mf.tensor.quantize(torch.ones(4, 4), "mxfp8", amax=torch.tensor(1.0)),
            "no tensor or row amax",
        ),
        (lambda: mf.tensor.quantize(torch.ones(4, 40), "nvfp4+sr", origin=(0, 8)), "16"),
        (lambda: mf.tensor.hadamard(torch.ones(4, 4), 24), "16, 32, 64 or 128"),
        (lambda: mf.tensor.amax(torch.ones(4, 4), "mxfp8"), "no tensor or row amax"),
        (
            lambda: mf.tensor.transpose_codes(torch.ones(4, 4, dtype=torch.uint8), 3),
            "2 bytes a row",
        ),
        (lambda: mf.tensor.swizzle_scales(torch.ones(4, 4)), "one-byte"),
        (
            lambda: mf.tensor.swizzle_scales(torch.ones(4, 4, dtype=torch.uint8), groups="x"),
            "groups",
        ),
        (lambda: mf.tensor.unswizzle_scales(torch.ones(4, 4, dtype=torch.uint8), 3, 3), "expected"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("read", [mf.tensor.dequantize, lambda q: mf.tensor.scaled_mm(q, q)])
@pytest.mark.parametrize("shape", [(63, 64), (2, 32, 64), (65, 64), (1, 64, 64)])
def test_a_shape_of_other_rows_than_the_codes_is_refused(shape, read):
    q = mf.tensor.quantize(torch.ones(64, 64), "mxfp8")
    with pytest.raises(ValueError, match=r"rows of shape .* got \(64, 64\)"):
        read(replace(q, shape=shape))
