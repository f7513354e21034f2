"""Products of experts and mf.MoE on the GPU: against the CPU, without waits, in CUDA graphs."""

import copy

import minifloat as mf
import pytest
import torch
from minifloat._native import ops

from tests.support.graphs import captured
from tests.support.reuse_counts import casts, without_reuse
from tests.support.specs import BLOCKS_RECIPE, ROWS_RECIPE

pytestmark = pytest.mark.gpu

PRESETS = mf.presets()
SIZES = [0, 7, 133, 16, 1, 250, 0]
TAIL = 9
K, N = 256, 192


def relative(got, want):
    got, want = got.float().cpu(), want.float().cpu()
    return ((got - want).norm() / want.norm().clamp_min(1e-9)).item()


class Case:
    def __init__(self, recipe, device, *, layout="column", bias=False, k=K, n=N):
        random = torch.Generator().manual_seed(1)
        rows, experts = sum(SIZES) + TAIL, len(SIZES)

        def draw(*shape):
            return torch.randn(shape, generator=random).to(device, torch.bfloat16)

        self.recipe, self.layout = recipe, layout
        self.a, self.g, self.w = draw(rows, k), draw(rows, n), draw(experts, n, k) / 8
        self.bias = draw(experts, n) if bias else None
        self.a[-TAIL:] = self.g[-TAIL:] = float("nan")
        self.offs = torch.tensor(SIZES, device=device).cumsum(0).int()
        self.rng = torch.tensor([3, 1], device=device)
        self.history = torch.ones(6, experts, 4, device=device)

    def run(self):
        """Returns y and the gradients of A, W and bias."""
        a = self.a.clone().requires_grad_()
        is_column = self.layout == "column"
        w = (self.w if is_column else self.w.transpose(1, 2).contiguous()).clone().requires_grad_()
        bias = None if self.bias is None else self.bias.clone().requires_grad_()
        y = mf.functional.scaled_grouped_mm(
            a,
            w.transpose(1, 2) if is_column else w,
            self.offs,
            self.recipe,
            bias=bias,
            rng=self.rng,
            amax_history=self.history,
        )
        y.backward(self.g)
        dw = w.grad if is_column else w.grad.transpose(1, 2)
        return [y.detach(), a.grad, dw, *([] if bias is None else [bias.grad])]


@pytest.mark.parametrize("layout", ["column", "row"])
@pytest.mark.parametrize("recipe", [*PRESETS, BLOCKS_RECIPE, ROWS_RECIPE])
def test_equal_to_the_cpu_without_a_wait(cuda, recipe, layout):
    want = Case(recipe, "cpu", layout=layout, bias=layout == "row").run()
    case = Case(recipe, cuda, layout=layout, bias=layout == "row")
    case.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got, again = case.run(), case.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b, c in zip(got, want, again, strict=True):
        assert relative(a, b) <= 8e-3  # the engines round up to four times, in other orders
        if "delayed" not in recipe:
            assert torch.equal(a, c)
    assert got[0][-TAIL:].eq(0).all()
    assert got[1][-TAIL:].eq(0).all()


MIXED = "fprop=mxfp8*bf16 dgrad=mxfp8*bf16 wgrad=mxfp8*bf16"
# Multiples of 8, of 4 alone, of nothing; each larger for one of K and N.
ODD_SIZES = [(72, 40), (20, 28), (28, 20), (33, 7), (7, 33), (1, 1), (128, 9), (9, 128)]


@pytest.mark.parametrize("layout", ["column", "row"])
@pytest.mark.parametrize(("k", "n"), ODD_SIZES)
@pytest.mark.parametrize("recipe", ["bf16", MIXED, *PRESETS, BLOCKS_RECIPE, ROWS_RECIPE])
def test_sizes_that_engines_do_not_take(cuda, recipe, k, n, layout):
    want = Case(recipe, "cpu", layout=layout, bias=True, k=k, n=n).run()
    got = Case(recipe, cuda, layout=layout, bias=True, k=k, n=n).run()
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) <= 8e-3
    for out in got[:2]:
        assert out[-TAIL:].eq(0).all()
        assert out.untyped_storage().nbytes() == out.nbytes
    assert got[0].is_contiguous()


@pytest.mark.parametrize("spec", ["bf16", "mxfp8", "e4m3/row"])
def test_results_are_contiguous(cuda, spec):
    """Rows of torch's own results are whole multiples of 16 bytes."""
    table = mf.tensor.group_table(torch.tensor([3, 35], device=cuda).int(), 50)
    none = torch.empty(0, device=cuda)

    def operand(*shape, columnwise=False):
        x = torch.ones(*shape, device=cuda, dtype=torch.bfloat16)
        if spec == "bf16":
            return x.t() if columnwise else x, none, none
        groups = {"groups": table} if len(shape) == 2 else {}
        q = mf.tensor.quantize(x, spec, columnwise=columnwise, **groups)
        return q.codes, q.scale, none if q.amax is None else q.amax

    rows = operand(50, 32), operand(2, 9, 32)
    y = ops.scaled_mm(*rows[0], *rows[1], f"{spec}*{spec}", k=32, groups=table, zero_tail=True)
    columns = operand(50, 20, columnwise=True), operand(50, 9, columnwise=True)
    unit = 32 if spec == "mxfp8" else 16
    dw = ops.scaled_mm(
        *columns[0], *columns[1], f"{spec}*{spec}", k=50, groups=table, group_unit=unit
    )
    assert (y.shape, dw.shape) == ((50, 9), (2, 20, 9))
    assert y.is_contiguous()
    assert dw.is_contiguous()
    assert y[:35].eq(32).all()
    assert y[35:].eq(0).all()
    assert dw[0].eq(3).all()
    assert dw[1].eq(32).all()


def at_odd_address(t):
    """Returns a copy of t one element past a multiple of 16 bytes."""
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


@pytest.mark.parametrize("spec", ["bf16", "mxfp8", "e4m3/row", "e4m3/tensor", "mxfp4"])
def test_operands_at_any_address(cuda, spec):
    table = mf.tensor.group_table(torch.tensor([37, 90], device=cuda).int(), 100)
    a, b = torch.randn(100, 64, device=cuda), torch.randn(2, 48, 64, device=cuda)
    bias = torch.randn(2, 48, device=cuda).bfloat16()

    def tensors(x, **groups):
        if spec == "bf16":
            return [x.bfloat16(), *[torch.empty(0, device=cuda)] * 2]
        q = mf.tensor.quantize(x, spec, **groups)
        return [q.codes, q.scale, torch.empty(0, device=cuda) if q.amax is None else q.amax]

    operands = [*tensors(a, groups=table), *tensors(b)]
    given = {"k": 64, "groups": table, "zero_tail": True}
    want = ops.scaled_mm(*operands, f"{spec}*{spec}", bias=bias, **given)
    assert want[:90].any()
    moved = [at_odd_address(t) for t in operands]
    for at in range(len(operands)):
        one = [*operands[:at], moved[at], *operands[at + 1 :]]
        got = ops.scaled_mm(*one, f"{spec}*{spec}", bias=bias, **given)
        assert relative(got, want) <= 8e-3
    got = ops.scaled_mm(*moved, f"{spec}*{spec}", bias=at_odd_address(bias), **given)
    assert relative(got, want) <= 8e-3


@pytest.mark.parametrize("spec", ["bf16", "mxfp8", "e4m3/row"])
def test_columns_at_any_address(cuda, spec):
    table = mf.tensor.group_table(torch.tensor([37, 90], device=cuda).int(), 100)
    x, g = torch.randn(100, 64, device=cuda), torch.randn(100, 48, device=cuda)

    def tensors(x):
        if spec == "bf16":
            return [x.bfloat16().t(), *[torch.empty(0, device=cuda)] * 2]
        q = mf.tensor.quantize(x, spec, columnwise=True, groups=table)
        return [q.codes, q.scale, torch.empty(0, device=cuda) if q.amax is None else q.amax]

    operands = [*tensors(g), *tensors(x)]
    given = {"k": 100, "groups": table, "group_unit": 32}
    if spec != "bf16":
        given["group_unit"] = mf.tensor.quantize(x, spec, columnwise=True, groups=table).group_unit
    want = ops.scaled_mm(*operands, f"{spec}*{spec}", **given)
    got = ops.scaled_mm(*[at_odd_address(t) for t in operands], f"{spec}*{spec}", **given)
    assert relative(got, want) <= 8e-3


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", MIXED])
@pytest.mark.parametrize("ends", [[0, 0], [3, 3], [0, 5]])
def test_few_rows(cuda, recipe, ends):
    """No row, a row of no group, and K and N that are no multiples of 8."""
    for rows in sorted({ends[-1], ends[-1] + 1}):
        results = []
        for device in ("cpu", cuda):
            a = torch.ones(rows, 20, dtype=torch.bfloat16, device=device, requires_grad=True)
            w = torch.ones(2, 20, 12, dtype=torch.bfloat16, device=device, requires_grad=True)
            bias = torch.ones(2, 12, device=device, requires_grad=True)
            offs = torch.tensor(ends, device=device).int()
            y = mf.functional.scaled_grouped_mm(a, w, offs, recipe, bias=bias)
            y.float().sum().backward()
            results.append([y.detach(), a.grad, w.grad, bias.grad])
        for got, want in zip(*reversed(results), strict=True):
            assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4", "mxfp4"])
def test_a_graph_replays_with_other_ends(cuda, recipe):
    case = Case(recipe, cuda)
    case.a[-TAIL:] = case.g[-TAIL:] = 0
    case.run()
    graph, replayed = captured(case.run)
    for sizes in (SIZES, [100, 0, 0, 200, 3, 4, 101], [0, 0, 0, 0, 0, 0, 416]):
        case.offs.copy_(torch.tensor(sizes).cumsum(0).int())
        graph.replay()
        for a, b in zip(replayed, case.run(), strict=True):
            assert torch.equal(a, b)


def test_the_table_of_bad_ends(cuda):
    for ends in ([9, 4, 30], [-5, 10, 30], [10, 20, 99], [2**31 - 1, 0, 5]):
        offs = torch.tensor(ends, dtype=torch.int64).int()
        table = ops.group_table(offs.to(cuda), 30)
        assert torch.equal(table.cpu(), ops.group_table(offs, 30))


def layer(recipe, device):
    torch.manual_seed(1)
    made = mf.MoE(
        256, 128, 8, 2, shared_experts=1, fused_w13=True, dtype=torch.bfloat16, recipe=recipe
    )
    return made.to(device)


def step(made, x, g):
    x = x.detach().requires_grad_()
    y = made(x)
    y.backward(g)
    return [
        y.detach(),
        x.grad,
        *(p.grad for name, p in made.named_parameters() if "experts.w" in name),
    ]


@pytest.mark.parametrize("recipe", [None, *PRESETS])
def test_the_layer_equals_the_cpus(cuda, recipe):
    torch.manual_seed(2)
    x, g = (torch.randn(200, 256).bfloat16() for _ in range(2))
    want = step(layer(recipe, "cpu"), x, g)
    got = step(layer(recipe, cuda), x.to(cuda), g.to(cuda))
    # Sums in another order round some elements of h to another code, of FP4 to one far apart.
    limit = 0.12 if recipe and "fp4" in recipe else 0.05
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) <= limit


@pytest.mark.parametrize("recipe", PRESETS)
def test_one_cast_of_tokens_changes_no_byte(cuda, recipe):
    spec = mf.spec.Spec.parse(mf.Recipe(recipe).fprop.a)
    made = layer(recipe, cuda)
    twin = without_reuse(made)
    x, g = (torch.randn(200, 256, device=cuda).bfloat16() for _ in range(2))
    for a, b in zip(step(made, x, g), step(twin, x, g), strict=True):
        assert torch.equal(a, b)
    count = 0 if spec.is_bf16 else 2 if spec.amax_of == "tensor" else 1
    with torch.no_grad():
        assert casts(lambda: made(x), tuple(x.shape)) == count


@pytest.mark.parametrize("recipe", [None, "fp8_rowwise", "nvfp4"])
def test_the_layer_does_not_wait(cuda, recipe):
    made = layer(recipe, cuda)
    x, g = (torch.randn(200, 256, device=cuda).bfloat16() for _ in range(2))
    step(made, x, g)
    other = copy.deepcopy(made)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(made, x, g)
        step(other, x, g)
    finally:
        torch.cuda.set_sync_debug_mode("default")
