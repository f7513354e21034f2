"""QuantizedTensor: ops on its codes, copies, slices, writes, and errors."""

import copy
import io
import pickle

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import nn

ROWS, COLS = 96, 160
PAIRS = [
    ("nvfp4", "nvfp4/16x16"),
    ("nvfp4/16x16", None),
    (None, "nvfp4+rht"),
    ("mxfp8", "mxfp8"),
    ("mxfp8/32x32", "nvfp4"),
    ("mxfp4", "mxfp4+rht"),
    ("e4m3/tensor", "e5m2/tensor"),
    ("e4m3/row", "e4m3/row"),
    (None, "e4m3/128x128"),
]


def values(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(ROWS, COLS, dtype=dtype)


def parts(t):
    return [p for p in (t.rowwise, t.columnwise) if p is not None]


def as_bytes(t):
    return t if t.dtype == torch.float32 else t.view(torch.uint8)


def same(a, b):
    """Tells whether two have the same specs and bytes."""
    if a.specs != b.specs or a.shape != b.shape or a.dtype != b.dtype:
        return False
    pairs = [(p, q) for p, q in zip(parts(a), parts(b))]
    names = ("codes", "scale", "amax")
    return all(
        torch.equal(as_bytes(getattr(p, n)), as_bytes(getattr(q, n)))
        for p, q in pairs
        for n in names
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("row", "col"), PAIRS)
def test_holds_what_quantize_gives(row, col, dtype):
    x = values(dtype)
    w = mf.QuantizedTensor.from_tensor(x, row, col)
    assert w.shape == (ROWS, COLS)  # columnwise-only too
    assert w.dtype == dtype
    assert w.specs == (row, col)
    for spec, part, columnwise in ((row, w.rowwise, False), (col, w.columnwise, True)):
        if spec is None:
            assert part is None
            continue
        want = mf.tensor.quantize(x, spec, columnwise=columnwise)
        assert torch.equal(part.codes, want.codes)
        assert part.shape == want.shape
    assert repr(row) in repr(w)
    if w.specs == (None, "nvfp4+rht"):
        with pytest.raises(ValueError, match="transformed"):
            w.dequantize()
        return
    want = mf.tensor.quantize(x, row) if row else mf.tensor.quantize(x, col, columnwise=True)
    decoded = want.dequantize(dtype)
    assert torch.equal(w.dequantize(), decoded if row else decoded.t())


def test_answers_quantize_with_its_codes():
    x = values()
    w = mf.QuantizedTensor.from_tensor(x, "nvfp4", "mxfp8")
    got = ops.quantize(w, "nvfp4", "mxfp8", decoded_row=True)
    want = ops.quantize(x, "nvfp4", "mxfp8", decoded_row=True)
    for a, b in zip(got, want):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert torch.equal(as_bytes(a), as_bytes(b))
    assert got[0] is w.rowwise.codes
    q = mf.tensor.quantize(w, "mxfp8", columnwise=True)
    assert torch.equal(q.codes, w.columnwise.codes)


def test_answers_quantize_with_fp8_of_its_fp4_codes():
    x, spec = values(), "nvfp4/16x16+pow2"
    w = mf.QuantizedTensor.from_tensor(x, spec, spec)
    got, want = (ops.quantize(t, spec, spec, fp8_row=True) for t in (w, x))
    assert got[0].dtype == torch.float8_e4m3fn
    for a, b in zip(got, want):
        assert a.dtype == b.dtype
        assert torch.equal(as_bytes(a), as_bytes(b))


def test_refuses_what_it_does_not_hold():
    w = mf.QuantizedTensor.from_tensor(values(), "nvfp4", "mxfp8")
    with pytest.raises(
        ValueError, match=r"asked for rowwise mxfp8.*rowwise='nvfp4', columnwise='mxfp8'"
    ):
        mf.tensor.quantize(w, "mxfp8")
    with pytest.raises(ValueError, match="keeps its own amax"):
        mf.tensor.quantize(w, "nvfp4", amax=torch.tensor(1.0))
    with pytest.raises(ValueError, match="asked for"):
        mf.linear(torch.randn(4, COLS), w, None, "fp8_rowwise")


@pytest.mark.parametrize("spec", ["e4m3/tensor", "e4m3/128x128", "mxfp8/32x32", "nvfp4/16x16"])
def test_specs_of_2d_blocks_serve_both_directions(spec):
    x = values()
    both = mf.QuantizedTensor.from_tensor(x, spec, spec)
    one = mf.QuantizedTensor.from_tensor(x, spec)
    got, want = mf.tensor.quantize(one, spec, columnwise=True), both.columnwise
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(as_bytes(got.scale), as_bytes(want.scale))
    one.update_usage(columnwise=True)
    assert same(one, both)
    one.update_usage(rowwise=False)
    assert one.rowwise is None
    assert one.shape == (ROWS, COLS)
    one.update_usage(rowwise=True)
    assert same(one, both)


def test_update_usage_refuses_a_rounding():
    w = mf.QuantizedTensor.from_tensor(values(), "mxfp8")
    with pytest.raises(ValueError, match="columnwise mxfp8"):
        w.update_usage(columnwise=True)
    with pytest.raises(ValueError, match="drop both"):
        w.update_usage(rowwise=False)
    assert w.specs == ("mxfp8", None)


@pytest.mark.parametrize(("row", "col"), PAIRS)
def test_copies_are_bytes(row, col):
    w = mf.QuantizedTensor.from_tensor(values(), row, col)
    file = io.BytesIO()
    torch.save({"w": w, "p": nn.Parameter(w)}, file)
    file.seek(0)
    loaded = torch.load(file)  # weights_only, the default
    assert isinstance(loaded["p"], nn.Parameter)
    twins = [
        w.clone(),
        w.detach(),
        w.view(ROWS, -1),
        copy.deepcopy(w),
        pickle.loads(pickle.dumps(w)),
    ]
    for twin in [*twins, loaded["w"], loaded["p"].data, w.to(torch.bfloat16).to(torch.float32)]:
        assert same(twin, w)
    assert twins[0]._map(lambda p: p) is not w
    if w.rowwise is not None:
        assert twins[0].rowwise.codes.data_ptr() != w.rowwise.codes.data_ptr()
        assert twins[1].rowwise.codes.data_ptr() == w.rowwise.codes.data_ptr()
    target = mf.QuantizedTensor.from_tensor(torch.zeros(ROWS, COLS), row, col)
    codes = [p.codes for p in parts(target)]
    target.copy_(w)
    assert same(target, w)
    assert all(p.codes is c for p, c in zip(parts(target), codes))  # in place


def saved_and_loaded(p):
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), saved_and_loaded]
)
def test_parameters_are_copied_with_their_gradient_flag_and_attributes(copied):
    p = nn.Parameter(mf.QuantizedTensor.from_tensor(values(), "mxfp8"), requires_grad=False)
    p.mine, p.master_plan = [1], "of this library"
    twin = copied(p)
    assert not hasattr(twin, "master_plan")
    assert isinstance(twin, nn.Parameter)
    assert not twin.requires_grad
    assert twin.mine == [1]
    assert twin.mine is not p.mine


def test_copy_from_values_rounds():
    w = mf.QuantizedTensor.from_tensor(torch.zeros(ROWS, COLS), "nvfp4", "nvfp4/16x16")
    w.copy_(values())
    assert same(w, mf.QuantizedTensor.from_tensor(values(), "nvfp4", "nvfp4/16x16"))
    w.copy_(torch.ones(1, COLS))
    assert torch.allclose(w.dequantize(), torch.ones(ROWS, COLS))
    copied = torch.empty(ROWS, COLS)
    copied.copy_(w)
    assert torch.equal(copied, w.dequantize())
    other = mf.QuantizedTensor.from_tensor(values(), "e5m2/tensor")  # its codes are as many bytes
    rounded = mf.QuantizedTensor.from_tensor(torch.zeros(ROWS, COLS), "e4m3/tensor")
    assert same(
        rounded.copy_(other), mf.QuantizedTensor.from_tensor(other.dequantize(), "e4m3/tensor")
    )
    with pytest.raises(RuntimeError, match="size"):
        w.copy_(torch.ones(3, 5))


@pytest.mark.parametrize(("row", "col"), PAIRS)
@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_hold_the_same_values(row, col, dim):
    if (row, col) in [(None, "e4m3/128x128")] or "rht" in str(col):
        row, col = row or "mxfp8", None
    w = mf.QuantizedTensor.from_tensor(values(), row, col)
    pieces = w.split(32, dim)
    assert [p.shape[dim] for p in pieces] == [32] * (w.shape[dim] // 32)
    assert all(isinstance(p, mf.QuantizedTensor) and p.specs == w.specs for p in pieces)
    assert torch.equal(torch.cat([p.dequantize() for p in pieces], dim), w.dequantize())
    if w.columnwise is not None:
        whole = w.columnwise.dequantize()
        columnwise = [p.columnwise.dequantize() for p in pieces]
        assert torch.equal(torch.cat(columnwise, 1 - dim), whole)
    assert same(w.narrow(dim, 32, 32), pieces[1])
    assert same(w.chunk(w.shape[dim] // 32, dim)[0], pieces[0])
    assert same(torch.split(w, [32, w.shape[dim] - 32], dim)[0], pieces[0])


def test_a_ragged_end_is_a_boundary():
    w = mf.QuantizedTensor.from_tensor(values()[:90], "nvfp4", "nvfp4/16x16")
    assert [p.shape[0] for p in w.split(32)] == [32, 32, 26]


def test_cuts_off_block_boundaries_are_refused():
    w = mf.QuantizedTensor.from_tensor(values(), "nvfp4", "nvfp4/16x16")
    with pytest.raises(ValueError, match=r"multiples of its block, 16, got \[0, 8\) of 96"):
        w[:8]
    with pytest.raises(ValueError, match="multiples of its block"):
        w.split(24)
    transformed = mf.QuantizedTensor.from_tensor(values(), "mxfp4", "mxfp4+rht128")
    with pytest.raises(ValueError, match="its block, 128"):
        transformed.narrow(0, 32, 32)


@pytest.mark.parametrize(
    "update",
    [
        lambda w, g: w.add_(g, alpha=-0.1),
        lambda w, g: w.mul_(0.9),
        lambda w, g: w.addcdiv_(g, g.abs() + 1, value=-0.1),
        lambda w, g: w.lerp_(g, 0.25),
        lambda w, g: w.zero_(),
        lambda w, g: torch._foreach_add_([w], [g], alpha=2),
    ],
)
def test_in_place_ops_round_the_new_values(update):
    w = mf.QuantizedTensor.from_tensor(values(), "mxfp8", "nvfp4")
    g = torch.randn(ROWS, COLS)
    want = w.dequantize()
    update(want, g)
    result = update(w, g)
    assert result is w or result is None or result[0] is w
    assert same(w, mf.QuantizedTensor.from_tensor(want, "mxfp8", "nvfp4"))


@pytest.mark.parametrize("index", [1, (slice(None), 3), slice(2, 5), [4, 2], (..., 0), ...])
def test_elements_are_written_by_index(index):
    w = mf.QuantizedTensor.from_tensor(values(), "mxfp8", "nvfp4")
    want = w.dequantize()
    want[index] = w[index] = 3.0
    assert same(w, mf.QuantizedTensor.from_tensor(want, "mxfp8", "nvfp4"))
    parameter = nn.Parameter(w)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        parameter[index] = 1.0


def test_the_diagonal_is_written():
    w = mf.QuantizedTensor.from_tensor(values(), "mxfp8", "nvfp4")
    want = w.dequantize().fill_diagonal_(9.0)
    assert w.fill_diagonal_(9.0) is w
    assert same(w, mf.QuantizedTensor.from_tensor(want, "mxfp8", "nvfp4"))


WRITES = {
    "element": lambda w: w.__setitem__((0, slice(3)), 2.0),
    "rows": lambda w: w.__setitem__(slice(2, 5), torch.full((3, COLS), 0.5)),
    "diagonal": lambda w: w.fill_diagonal_(fill_value=0.0),
    "mul_": lambda w: w.mul_(0.5),
    "zero_": lambda w: w.zero_(),
    "copy_": lambda w: w.copy_(values()),
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
}


@pytest.mark.parametrize("write", WRITES)
def test_gradients_pass_a_write_as_those_of_values(write):
    w = mf.QuantizedTensor.from_tensor(values(), "mxfp8", "mxfp8")
    factors, found = torch.randn(ROWS, COLS), []
    for leaf in (nn.Parameter(w), nn.Parameter(w.dequantize())):
        written = leaf.clone()
        WRITES[write](written)
        (written * factors).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("write", WRITES)
def test_inference_mode_writes_to_weights_from_outside(write):
    w, other = (mf.QuantizedTensor.from_tensor(values(), "mxfp8", "mxfp8") for _ in range(2))
    WRITES[write](other)
    with torch.inference_mode():
        WRITES[write](w)
    assert same(w, other)


def steps(kind):
    def step(w):
        w.grad = torch.ones(w.shape)
        torch.optim.SGD([w], 0.1, foreach=kind == "foreach").step()

    return step


USES = {"ops": lambda x, w: x @ w.mT, "layer": lambda x, w: mf.linear(x, w, None, "mxfp8")}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(
    "write", [*WRITES.values(), steps("single"), steps("foreach")], ids=[*WRITES, "step", "steps"]
)
def test_backward_does_not_read_what_was_written_after_forward(write, use):
    w = nn.Parameter(mf.QuantizedTensor.from_tensor(values(), "mxfp8", "mxfp8"))
    x = torch.randn(7, COLS, requires_grad=True)
    loss = use(x, w).sum()
    with torch.no_grad():
        write(w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


PARTS = [
    lambda w: w[1:3],
    lambda w: w.split(2)[0],
    lambda w: w.chunk(2, 1)[1],
    lambda w: w.tensor_split(2)[0],
    lambda w: w.unsafe_split(2)[0],
    lambda w: w.unsafe_chunk(2, 1)[1],
]


@pytest.mark.parametrize("part_of", PARTS)
@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda t: t.copy_(t.clone())])
def test_a_slice_is_not_written_to(write, part_of):
    w = mf.QuantizedTensor.from_tensor(values(), "e4m3/tensor")
    part = part_of(w)
    with pytest.raises(ValueError, match="a write to it would not reach the whole"):
        write(part.detach())
    write(part.clone())
    write(copy.deepcopy(part))
    assert same(w, mf.QuantizedTensor.from_tensor(values(), "e4m3/tensor"))


def test_other_ops_run_on_values():
    w = mf.QuantizedTensor.from_tensor(values(), "mxfp8")
    dequantized = w.dequantize()
    assert torch.equal(w + 1, dequantized + 1)
    assert torch.equal(w.t(), dequantized.t())
    assert torch.equal(w.half(), dequantized.half())
    assert torch.equal(torch.stack([w, w]), torch.stack([dequantized, dequantized]))
    for like in (torch.zeros_like(w), w.new_empty(2, 2), w.new_zeros(2, 2)):
        assert type(like) is torch.Tensor
        assert like.dtype == w.dtype
    assert type(torch.empty_like(w, dtype=torch.float64)) is torch.Tensor


def test_empty_like_is_memory_for_the_same_codes():
    w = mf.QuantizedTensor.from_tensor(values(), "mxfp8", "nvfp4/16x16")
    like = torch.empty_like(w)
    assert same(like.copy_(w), w)
    like = torch.empty_like(w, dtype=torch.bfloat16)
    assert (like.specs, like.shape, like.dtype) == (w.specs, w.shape, torch.bfloat16)


def test_gradients_reach_a_parameter():
    p = nn.Parameter(mf.QuantizedTensor.from_tensor(values(), "mxfp8", "mxfp8"))
    x = torch.randn(7, COLS)
    mf.linear(x, p, None, "mxfp8").sum().backward()
    want = nn.Parameter(values())
    mf.linear(x, want, None, "mxfp8").sum().backward()
    assert type(p.grad) is torch.Tensor
    assert torch.equal(p.grad, want.grad)
    nn.functional.linear(x, p).sum().backward()  # any other op differentiates through the values


def test_autocast_and_inference_read_the_codes():
    w, x = values(), torch.randn(7, COLS)
    p = nn.Parameter(mf.QuantizedTensor.from_tensor(w, "nvfp4", "nvfp4/16x16"))
    recipe = "fprop=nvfp4*nvfp4 dgrad=bf16*nvfp4/16x16 wgrad=bf16*bf16"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mf.linear(x, p, None, recipe)
    q = mf.tensor.quantize(x.bfloat16(), "nvfp4")
    assert torch.equal(y, mf.tensor.scaled_mm(q, p.data.rowwise))
    with torch.inference_mode():
        assert torch.equal(mf.linear(x, p, None, recipe), mf.linear(x, w, None, recipe))


def test_a_dgrad_in_bf16_reads_the_values_of_the_codes():
    recipe = "fprop=mxfp8*mxfp8 dgrad=bf16*bf16 wgrad=bf16*bf16"
    p = mf.QuantizedTensor.from_tensor(values(), "mxfp8")  # no codes for dgrad
    found = []
    for w in (p, p.dequantize()):
        x = torch.linspace(-1, 1, 7 * COLS).view(7, COLS).requires_grad_()
        y = mf.linear(x, w, None, recipe)
        found.append((y, *torch.autograd.grad(y.square().sum(), x)))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_delayed_scaling_reads_the_codes_and_raises_the_history_to_their_amax():
    """The codes' scale and amax are those of their cast, not of the layer's history."""
    w, x, spec = values(), torch.randn(7, COLS), "e4m3/tensor+delayed"
    given = torch.tensor(2.0)  # less than the amax of w
    row, col = (mf.tensor.quantize(w, spec, amax=given, columnwise=c) for c in (False, True))
    codes = mf.QuantizedTensor(row, col, torch.float32)
    history = torch.zeros(6, 4)
    history[:, 0] = 3
    y = ops.linear(x.requires_grad_(), codes, None, "fp8_delayed", amax_history=history)
    assert torch.equal(history[[1, 3], 1], w.abs().max().expand(2))
    y.sum().backward()  # reads the history, of which forward wrote no version
    q = mf.tensor.quantize(x.detach(), spec, amax=torch.tensor(3.0))
    assert torch.equal(y, mf.tensor.scaled_mm(q, row, out_dtype=torch.float32))
    got = ops.quantize_delayed(codes, spec, "", history, 1, 3)
    assert torch.equal(got[0], row.codes)
    assert got[2].numel() == 0
    mxfp8 = mf.QuantizedTensor.from_tensor(w, "mxfp8")
    with pytest.raises(ValueError, match="asked for rowwise"):
        ops.linear(x, mxfp8, None, "fp8_delayed", amax_history=history)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_parameter_is_made_again_by_its_class(requires_grad):
    p = nn.Parameter(mf.QuantizedTensor.from_tensor(values(), "mxfp8", "nvfp4/16x16"))
    for again in (
        type(p)(p.detach(), requires_grad=requires_grad),
        type(p)(p, requires_grad=requires_grad),
        nn.Parameter(p.detach(), requires_grad),
    ):
        assert isinstance(again, nn.Parameter)
        assert again is not p
        assert (again.requires_grad, again.is_leaf) == (requires_grad, True)
        assert same(again, p)
        assert again.rowwise.codes.data_ptr() == p.rowwise.codes.data_ptr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((values(),), r"expected codes.*got values, a Tensor.*from_tensor\(values"),
        ((mf.QuantizedTensor.from_tensor(values(), "mxfp8"), None, torch.bfloat16), "alone"),
        (([1.0],), "rowwise: expected Quantized, got list"),
    ],
)
def test_what_is_no_codes(arguments, message):
    with pytest.raises(TypeError, match=message):
        mf.QuantizedTensor(*arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mf.QuantizedTensor(None, None), "got neither"),
        (lambda: mf.QuantizedTensor.from_tensor(values(), None), "got neither"),
        (lambda: mf.QuantizedTensor.from_tensor(values(), "nvfp4+sr"), "stochastic"),
        (lambda: mf.QuantizedTensor.from_tensor(values(), "e4m3/tensor+delayed"), "delayed"),
        (lambda: mf.QuantizedTensor.from_tensor(values(), "bf16"), "got bf16"),
        (lambda: mf.QuantizedTensor.from_tensor(values()[0], "nvfp4"), "expected"),
        (lambda: mf.QuantizedTensor.from_tensor(values().double(), "nvfp4"), "float32"),
        (
            lambda: mf.QuantizedTensor(mf.tensor.quantize(values(), "nvfp4"), None, torch.half),
            "float16",
        ),
        (lambda: mf.QuantizedTensor(None, mf.tensor.quantize(values(), "nvfp4")), "columnwise"),
        (
            lambda: mf.QuantizedTensor(
                mf.tensor.quantize(values(), "nvfp4"),
                mf.tensor.quantize(values()[:32], "nvfp4", columnwise=True),
            ),
            "parts of one matrix",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
