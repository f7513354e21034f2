"""scaled_grouped_mm: products of experts against linear layers of each expert's rows."""

import copy
from itertools import pairwise

import minifloat as mf
import pytest
import torch
from minifloat._native import ops

from tests.support.specs import BLOCKS_RECIPE, ROWS_RECIPE

PRESETS = mf.presets()
MIXED = [
    "fprop=mxfp8*mxfp8 dgrad=bf16*bf16 wgrad=mxfp8*bf16",
    "fprop=bf16*nvfp4 dgrad=mxfp4*bf16 wgrad=bf16*bf16",
    "nvfp4+4over6",
    "e4m3/row+exact",
    BLOCKS_RECIPE,
    ROWS_RECIPE,
]
SIZES = [0, 7, 33, 16, 0, 1, 129, 0]


def recipe_of(text):
    """Returns the text of a recipe, or of one with this spec in every place."""
    if text in PRESETS or "=" in text:
        return text
    return " ".join(f"{product}={text}*{text}" for product in ("fprop", "dgrad", "wgrad"))


class Case:
    """Operands of experts with sizes SIZES; `tail` rows lie past the last end and hold NaN."""

    def __init__(
        self,
        recipe,
        *,
        layout="column",
        bias=False,
        tail=5,
        dtype=torch.bfloat16,
        k=64,
        n=48,
        sizes=SIZES,
    ):
        torch.manual_seed(0)
        experts, rows = len(sizes), sum(sizes) + tail
        self.recipe, self.layout, self.sizes, self.tail = recipe, layout, sizes, tail
        self.x = torch.randn(rows, k).to(dtype)
        self.g = torch.randn(rows, n).to(dtype)
        if tail:
            self.x[-tail:] = self.g[-tail:] = float("nan")
        self.w = (torch.randn(experts, n, k) / 8).to(dtype)
        self.bias = torch.randn(experts, n).to(dtype) if bias else None
        self.offs = torch.tensor(sizes).cumsum(0).int()
        self.rng = torch.tensor([3, 1])
        self.history = None
        if mf.Recipe(recipe).is_delayed:
            self.history = torch.zeros(6, experts, 4)
            self.history[:, :, 0] = torch.rand(6, experts) + 2

    def run(self, **options):
        """Returns y and the gradients of A, W and bias."""
        a = self.x.clone().requires_grad_()
        w = self.w if self.layout == "column" else self.w.transpose(-2, -1).contiguous()
        w = w.clone().requires_grad_()
        b = w.transpose(-2, -1) if self.layout == "column" else w
        if self.layout == "strided":  # neither rows nor columns are adjacent
            b = torch.stack([w, w], -1)[..., 0]
        bias = None if self.bias is None else self.bias.clone().requires_grad_()
        options = {"rng": self.rng, "amax_history": self.history, **options}
        y = mf.functional.scaled_grouped_mm(
            a, b, self.offs, self.recipe, self.x.dtype, bias=bias, **options
        )
        y.backward(self.g)
        dw = w.grad if self.layout == "column" else w.grad.transpose(-2, -1)
        return y.detach(), a.grad, dw, None if bias is None else bias.grad

    def alone(self, e, rows):
        """Returns the case of one expert and its rows."""
        part = copy.copy(self)
        part.x, part.g, part.w = self.x[rows], self.g[rows], self.w[e : e + 1]
        part.bias = None if self.bias is None else self.bias[e : e + 1]
        part.history = None if self.history is None else self.history[:, e : e + 1].clone()
        part.offs = torch.tensor([rows.stop - rows.start]).int()
        return part

    def layer(self, e, rows):
        """Returns what a linear layer computes from one expert's rows."""
        a, w = self.x[rows].clone().requires_grad_(), self.w[e].clone().requires_grad_()
        bias = None if self.bias is None else self.bias[e].clone().requires_grad_()
        history = None if self.history is None else self.history[:, e].clone()
        if history is not None:
            history[:, 1:] = 0
        y = mf.linear(a, w, bias, self.recipe, rng=self.rng, amax_history=history)
        y.backward(self.g[rows])
        return (y.detach(), a.grad, w.grad, None if bias is None else bias.grad), history


def groups_of(case):
    ends = [0, *case.offs.tolist()]
    return [(e, slice(begin, end)) for e, (begin, end) in enumerate(pairwise(ends))]


def require_close(got, want):
    """Compares two sums of the same products, at most 129, which float32 adds in any order.

    Float32 differs by at most 129 * 2^-24 of the products' magnitudes. That is small beside a step
    of bf16, so that both round to one value or to neighbours, at most 2^-7 of the value apart.
    """
    assert (got.float() - want.float()).norm() <= 2**-7 * want.float().norm()


@pytest.mark.parametrize("layout", ["column", "row"])
@pytest.mark.parametrize("text", [*PRESETS, *MIXED])
def test_experts_are_linear_layers_of_their_rows(text, layout):
    """Rows and experts are numbered for random bits: alone, as expert 0, each is the layer."""
    recipe = recipe_of(text)
    case = Case(recipe, layout=layout, bias=layout == "row")
    y, da, dw, db = case.run()
    for e, rows in groups_of(case):
        numbers = torch.arange(rows.start, rows.stop, dtype=torch.int32)
        same = case.alone(e, rows).run(row_ids=numbers, first_expert=e)
        of_expert = (y[rows], da[rows], dw[e : e + 1], None if db is None else db[e : e + 1])
        for got, want in zip(of_expert, same, strict=True):
            assert got is want is None or torch.equal(got, want)
        wanted, history = case.layer(e, rows)
        for got, want in zip(case.alone(e, rows).run(), wanted, strict=True):
            if want is not None:
                require_close(got.view_as(want), want)
        if rows.start == rows.stop:
            assert not dw[e].signbit().any()
        if history is not None:
            assert torch.equal(case.history[:, e, 1], history[:, 1])
    assert y[-case.tail :].eq(0).all()
    assert da[-case.tail :].eq(0).all()


@pytest.mark.parametrize(("layout", "reuses"), [("column", True), ("row", False)])
@pytest.mark.parametrize("text", [*PRESETS, *MIXED])
def test_backward_from_values_equals_that_from_saved_codes(text, layout, reuses):
    recipe = recipe_of(text)
    case, again = (Case(recipe, layout=layout, bias=True) for _ in range(2))
    _, *wanted = case.run()
    w = again.w if layout == "column" else again.w.transpose(-2, -1).contiguous().transpose(-2, -1)
    operands = None
    if reuses:
        operands = ops.layer_operands(w, recipe, "w", amax_history=again.history)
    options = {"rng": again.rng, "amax_history": again.history, "weight_operands": operands}

    def backward(needed):
        inputs = again.g, again.x, w.transpose(-2, -1), again.offs, recipe, needed
        return ops.scaled_grouped_mm_backward(*inputs, bias=again.bias, **options)

    found = backward([True] * 3)
    for a, b in zip(found, (wanted[0], wanted[1].transpose(-2, -1), wanted[2]), strict=True):
        assert torch.equal(a, b)
    for i in range(3):
        alone = backward([j == i for j in range(3)])
        assert [t is None for t in alone] == [j != i for j in range(3)]
        assert torch.equal(alone[i], found[i])
    if again.history is not None:  # the forward pass records the two rowwise operands
        assert torch.equal(again.history[2:], case.history[2:])


def quantizes_gradients(text):
    recipe = mf.Recipe(recipe_of(text))
    return "bf16" not in (recipe.dgrad.a, recipe.wgrad.a)


@pytest.mark.parametrize("text", [p for p in PRESETS if quantizes_gradients(p)])
def test_a_gradient_of_tokens_is_read_by_rows(text):
    """The results are those of the gathered gradient, also under stochastic rounding."""
    recipe = recipe_of(text)
    found = []
    for is_gathered in (False, True):
        case = Case(recipe)
        rows = case.x.shape[0]
        tokens = torch.randperm(rows, generator=torch.Generator().manual_seed(3)).int() // 2
        g, where = case.g[: (rows + 1) // 2], {"grad_rows_from": tokens}
        if is_gathered:
            g, where = g[tokens.long()], {}
        state = {"rng": case.rng, "amax_history": case.history, **where}
        inputs = g, case.x, case.w.transpose(-2, -1), case.offs, recipe, [True, True, False]
        found.append([*ops.scaled_grouped_mm_backward(*inputs, **state)[:2], case.history])
    for a, b in zip(*found, strict=True):
        assert a is b is None or torch.equal(a, b)
    for refused, needed in (("fp8_rowwise_gw_hp", [True, True, False]), ("mxfp8", [True] * 3)):
        inputs = case.g, case.x, case.w.transpose(-2, -1), case.offs, refused, needed
        with pytest.raises(ValueError, match="expected grad_rows_from of a quantized gradient"):
            ops.scaled_grouped_mm_backward(*inputs, bias=case.bias, grad_rows_from=tokens)


def test_backward_from_values_refuses():
    case = Case("mxfp8", tail=0)
    b = case.w.transpose(-2, -1)
    for g, needed, message in (
        (case.g[:-1], [True] * 3, "expected grad"),
        (case.g[:, 1:], [True, True, False], "expected grad"),
        (case.g, [False, False, True], "expected bias, whose gradient is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.scaled_grouped_mm_backward(g, case.x, b, case.offs, "mxfp8", needed)
    operands = ops.quantize(case.g[:-1], "mxfp8", "")
    inputs = case.g, case.x, b, case.offs, "mxfp8", [True, True, False]
    for g_operands, message in (
        (operands[:4], "expected g_operands as the eight tensors"),
        (operands, f"expected g_operands of {case.g.shape[0]} rows"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.scaled_grouped_mm_backward(*inputs, g_operands=g_operands)


@pytest.mark.parametrize("name", ["a_operands", "weight_operands"])
def test_a_refused_backward_writes_no_history(name):
    case = Case("fp8_delayed")
    before = case.history.clone()
    inputs = case.g, case.x, case.w.transpose(-2, -1), case.offs, "fp8_delayed", [True, True, False]
    operands = {name: [torch.zeros(1)] * 7}
    with pytest.raises(ValueError, match=f"expected {name} as the eight tensors"):
        ops.scaled_grouped_mm_backward(*inputs, amax_history=case.history, **operands)
    assert torch.equal(case.history, before)


@pytest.mark.parametrize("text", ["nvfp4", "mxfp8", "nvfp4/16x16+4over6", "fp8_rowwise"])
def test_all_layouts_give_the_same_bytes(text):
    weights = f"fprop=nvfp4*{text} dgrad=nvfp4*{text} wgrad=bf16*bf16"
    recipe = text if text in PRESETS else weights
    column, row, strided = (
        Case(recipe, layout=layout).run() for layout in ("column", "row", "strided")
    )
    for a, b, c in zip(column, row, strided, strict=True):
        assert a is b is c is None or (torch.equal(a, b) and torch.equal(a, c))


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_rowwise"])
def test_two_runs_give_the_same_bits_and_a_tail_may_be_left(recipe):
    first, second = Case(recipe).run(), Case(recipe).run(tail="undefined")
    for a, b in zip(first[:2], second[:2], strict=True):
        assert torch.equal(a[:-5], b[:-5])
    assert torch.equal(first[2], second[2])


def test_row_ids_and_first_expert_number_the_random_counter():
    # Experts 2 and 3 of four, with their rows' numbers, draw what the call of all four draws.
    recipe = "fprop=mxfp8+sr*mxfp8+sr dgrad=mxfp8+sr*mxfp8+sr wgrad=mxfp8+sr*mxfp8+sr"
    whole = Case(recipe, sizes=[5, 40, 33, 20], tail=0)
    y, da, dw, _ = whole.run()
    part = Case(recipe, sizes=[5, 40, 33, 20], tail=0)
    part.x, part.g, part.w = part.x[45:], part.g[45:], part.w[2:]
    part.offs = part.offs[2:] - 45
    ids = torch.arange(45, 98, dtype=torch.int32)
    got = part.run(row_ids=ids, first_expert=2)
    for a, b in zip(got, (y[45:], da[45:], dw[2:], None), strict=True):
        assert a is b is None or torch.equal(a, b)
    assert not torch.equal(part.run(row_ids=ids)[0], y[45:])
    assert not torch.equal(part.run(first_expert=2)[0], y[45:])


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "mxfp8", "nvfp4", "mxfp4", "fp8_delayed"])
def test_saved_bytes(recipe):
    case = Case(recipe, sizes=[300, 212], tail=0, k=256, n=128)
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr(), t.storage_offset()] = t.nbytes
        return t

    a, w = case.x.requires_grad_(), case.w.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        mf.functional.scaled_grouped_mm(
            a, w.transpose(-2, -1), case.offs, recipe, rng=case.rng, amax_history=case.history
        )
    of_a = 1.05 if "fp8" in recipe else 0.57
    columns = 512 + 32 * 2 + 32
    weights = w.numel() * of_a + 4 * (128 + 256) * 2
    table = 4 * 5 * 3
    assert sum(saved.values()) <= of_a * 256 * columns + weights + table + 2 * 4 * 256


def saved_shapes(run):
    """Returns the shapes of what `run` saves for backward."""
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, id):
        run()
    return {tuple(shape) for shape in shapes if len(shape) > 0}


def test_only_what_gradients_need_is_saved():
    case = Case("mxfp8", sizes=[100, 50], tail=0, k=96, n=48)
    a, b = case.x, case.w.transpose(-2, -1)
    of_a, of_w = (96, 160 + 64), (2, 96, 48)  # columnwise codes

    def shapes(x, w):
        return saved_shapes(lambda: mf.functional.scaled_grouped_mm(x, w, case.offs, "mxfp8"))

    both = shapes(a.clone().requires_grad_(), b.clone().requires_grad_())
    assert {of_a, of_w} <= both
    only_a = shapes(a.clone().requires_grad_(), b)
    assert of_w in only_a
    assert of_a not in only_a
    only_b = shapes(a, b.clone().requires_grad_())
    assert of_a in only_b
    assert of_w not in only_b
    assert not mf.functional.scaled_grouped_mm(a, b, case.offs, "mxfp8").requires_grad


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "nvfp4", "fp8_delayed", "bf16"])
def test_operands_of_the_caller_give_the_same_bits(recipe):
    case, other = Case(recipe, tail=0), Case(recipe, tail=0)
    want = case.run()
    table = ops.group_table(other.offs, other.x.shape[0])
    a, w = other.x.requires_grad_(), other.w.requires_grad_()
    of_w = ops.layer_operands(w, recipe, "w", amax_history=other.history)
    of_a = None
    if "+sr" not in mf.Recipe(recipe).text:
        of_a = ops.layer_operands(a, recipe, "x", amax_history=other.history, groups=table)
    y = ops.scaled_grouped_mm(
        a,
        w.transpose(-2, -1),
        other.offs,
        recipe,
        out_dtype=a.dtype,
        rng=other.rng,
        amax_history=other.history,
        a_operands=of_a,
        weight_operands=of_w,
    )
    y.backward(other.g)
    for got, expected in zip((y, a.grad, w.grad), want[:3], strict=True):
        assert torch.equal(got, expected)
    if case.history is not None:
        assert torch.equal(case.history, other.history)


def test_codes_do_not_round_a_float32_gradient():
    """Outside autocast, of x in bf16 and weights in float32."""
    grads = []
    for has_codes in (False, True):
        case = Case("mxfp8", tail=0)
        w = case.w.float().requires_grad_()
        codes = ops.layer_operands(case.w, "mxfp8", "w") if has_codes else None
        y = ops.scaled_grouped_mm(
            case.x, w.mT, case.offs, "mxfp8", out_dtype=torch.bfloat16, weight_operands=codes
        )
        y.backward(case.g)
        grads.append(w.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_tensorwise"])
def test_one_graph_for_any_number_of_rows(recipe):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        mf.functional.scaled_grouped_mm, fullgraph=True, dynamic=True, backend=backend
    )
    for rows in (40, 64, 97, 130, 200):
        case = Case(recipe, sizes=[rows - 30, 0, 30], tail=3)
        b = case.w.transpose(-2, -1)
        y = compiled(case.x, b, case.offs, recipe, rng=case.rng)
        assert torch.equal(
            y, mf.functional.scaled_grouped_mm(case.x, b, case.offs, recipe, rng=case.rng)
        )
    assert len(graphs) == 1


def test_compiled_gradients_equal_eager_ones():
    case = Case("nvfp4")
    want = case.run()
    torch._dynamo.reset()
    a, w = case.x.requires_grad_(), case.w.requires_grad_()
    run = torch.compile(mf.functional.scaled_grouped_mm, fullgraph=True, dynamic=True)
    y = run(a, w.transpose(-2, -1), case.offs, "nvfp4", rng=case.rng)
    y.backward(case.g)
    for got, expected in zip((y, a.grad, w.grad), want[:3], strict=True):
        assert torch.equal(got, expected)


def test_autocast_and_dtypes():
    case = Case("mxfp8", dtype=torch.float32, tail=0)
    b = case.w.transpose(-2, -1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mf.functional.scaled_grouped_mm(case.x, b, case.offs, "mxfp8")
    want = mf.functional.scaled_grouped_mm(case.x.bfloat16(), b.bfloat16(), case.offs, "mxfp8")
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, want)
    y = mf.functional.scaled_grouped_mm(case.x, b, case.offs, "mxfp8", torch.float32)
    assert y.dtype == torch.float32


@pytest.mark.parametrize(
    "ends", [[9, 4, 30], [-5, 10, 30], [10, 20, 99], [2**31 - 1, 0, 5], [-(2**31), 0, 0]]
)
def test_ends_that_are_not_legal_are_moved(ends):
    legal, begin = [], 0
    for end in ends:
        begin = min(max(end, begin), 30)
        legal.append(begin)
    case = Case("mxfp8", sizes=[10, 10, 10], tail=0)
    case.offs = torch.tensor(ends, dtype=torch.int64).int()
    got = case.run()
    case.offs = torch.tensor(legal).int()
    for a, b in zip(got, case.run(), strict=True):
        assert a is b is None or torch.equal(a, b)


def arguments(**changes):
    case = Case("mxfp8", tail=0)
    b = case.w.transpose(-2, -1)
    return {"A": case.x, "B": b, "offs": case.offs, "recipe": "mxfp8", **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offs": torch.tensor([1, 2])}, "offs as int32"),
        ({"offs": torch.zeros(3, dtype=torch.int32)}, "offs as int32"),
        ({"offs": torch.zeros(8, dtype=torch.int32, device="meta")}, "offs on cpu"),
        ({"B": torch.zeros(8, 32, 48, dtype=torch.bfloat16)}, "A .M, K. and B .E, K, N."),
        ({"B": torch.zeros(8, 64, 96, dtype=torch.bfloat16)[:, ::2, ::2]}, "A .M, K. and B"),
        ({"bias": torch.zeros(48)}, "bias"),
        ({"row_ids": torch.zeros(3, dtype=torch.int32)}, "row_ids"),
        ({"first_expert": -1}, "first_expert"),
        ({"tail": "none"}, "tail"),
        ({"out_dtype": torch.float16}, "out_dtype"),
        ({"recipe": "nvfp4"}, "rng"),
        ({"recipe": "fp8_delayed"}, "amax_history"),
        ({"recipe": "fp8_delayed", "amax_history": torch.zeros(6, 4)}, "experts"),
        ({"recipe": "fprop=mxfp8/32x32*mxfp8 dgrad=mxfp8*mxfp8 wgrad=mxfp8*mxfp8"}, "x/fprop"),
    ],
)
def test_errors_say_what_was_expected(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        mf.functional.scaled_grouped_mm(**arguments(**changes))
    assert "got" in str(error.value) or "needs" in str(error.value)


def test_no_second_derivative():
    case = Case("mxfp8", tail=0)
    a, b = case.x.requires_grad_(), case.w.transpose(-2, -1)
    y = mf.functional.scaled_grouped_mm(a, b, case.offs, "mxfp8")
    (grad,) = torch.autograd.grad(y.float().square().sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative"):
        grad.float().sum().backward()


def grouped_engine(product, capability, groups="m"):
    return ops.engine_of(product, capability, m=64, n=64, k=64, groups=groups)


def test_the_engine_of_grouped_products():
    # Builds with CUTLASS's headers have kernels of their own, and torch's else.
    has_kernels = grouped_engine("e5m2/tensor*e4m3/tensor", 90) == "cutlass_grouped"
    fp8 = "cutlass_grouped" if has_kernels else "fp8_grouped"
    exact = "cutlass_grouped_exact" if has_kernels else "exact_grouped"
    for product in (
        "e4m3/row*e4m3/row",
        "e4m3/tensor*e4m3/tensor",
        "mxfp4*mxfp4",
        "e4m3/row*mxfp4",
    ):
        assert grouped_engine(product, 90) == fp8
    blocks = grouped_engine("e4m3/1x128*e4m3/128x128", 90)
    assert blocks == (fp8 if has_kernels else exact)
    assert grouped_engine("e4m3/1x128*e4m3/128x128", 90, "k") == exact
    assert grouped_engine("e4m3/1x128*e4m3/1x128", 90) == exact
    assert grouped_engine("e4m3/1x128*e4m3/1x128", 90, "k") == blocks
    for product in ("e4m3/tensor*e5m2/tensor", "mxfp8*mxfp8", "nvfp4*bf16"):
        assert grouped_engine(product, 90) == exact
    elsewhere = [("bf16*bf16", 90), ("e4m3/row*e4m3/row", 100), ("nvfp4*bf16", 100)]
    for product, capability in [*elsewhere, ("nvfp4*nvfp4", 0), ("e4m3/row*e4m3/row", 0)]:
        assert grouped_engine(product, capability) == "exact_grouped"
