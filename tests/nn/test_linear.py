"""mf.linear, linear_group, mf.Linear: products, what is saved, dtypes, shapes, randomness."""

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from minifloat.recipe import operand_names
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.exact_sums import require_same_sums
from tests.support.specs import (
    BLOCKS_RECIPE,
    EDEN_RECIPE,
    OF_FORWARD_RECIPES,
    ROWS_RECIPE,
    UNIFORM_POW2_RECIPE,
    UNIFORM_RECIPE,
    stream_of,
    untransformed,
)

RECIPES = [
    *mf.presets(),
    "fprop=nvfp4+up*nvfp4/16x16+up dgrad=bf16*bf16 wgrad=mxfp8*e4m3/row+exact",
    EDEN_RECIPE,
    BLOCKS_RECIPE,
    ROWS_RECIPE,
    UNIFORM_RECIPE,
    UNIFORM_POW2_RECIPE,
    "fprop=nvfp4+eden*nvfp4+eden dgrad=mxfp8*mxfp8 wgrad=mxfp8*mxfp8",
    *OF_FORWARD_RECIPES,
]
RNG = torch.tensor([17, 3, 12345])
M, K, N = 45, 70, 37  # no multiple of any block


def history(length: int = 4, amax: float = 3.0) -> torch.Tensor:
    """Makes an amax history with an active amax."""
    h = torch.zeros(6, 1 + length)
    h[:, 0] = amax
    return h


def data(dtype=torch.float32, seed=0, shape=(M, K)):
    torch.manual_seed(seed)
    x = torch.randn(*shape, dtype=dtype, requires_grad=True)
    w = torch.randn(N, shape[-1], dtype=dtype, requires_grad=True)
    b = torch.randn(N, dtype=dtype, requires_grad=True)
    return x, w, b, torch.randn(*shape[:-1], N, dtype=dtype)


def operand(x: torch.Tensor, spec: str, columnwise: bool, stream: str) -> torch.Tensor:
    """Quantizes an operand by the operator, and returns its values in float64."""
    x = x.detach()
    if spec == "bf16":
        return (x.t() if columnwise else x).double()
    given = torch.tensor(3.0) if "delayed" in spec else None
    amax = {"amax_col" if columnwise else "amax_row": given}
    streams = {"stream_col" if columnwise else "stream_row": stream_of(spec, stream)}
    row, col = ("", spec) if columnwise else (spec, "")
    rng = RNG if "sr" in spec or "eden" in spec else None
    out = ops.quantize(x, row, col, rng=rng, **amax, **streams)
    codes, scale, amax = out[4:7] if columnwise else out[:3]
    cols = x.shape[0] if columnwise else x.shape[1]
    return ops.dequantize(codes, scale, amax, spec, cols).double()


def of_backward(x: torch.Tensor, spec: str, of_forward: str, name: str) -> torch.Tensor:
    """Returns the second operand of dgrad or wgrad as `operand` does."""
    if not spec.startswith("fprop."):
        return operand(x, spec, True, f"{name}/{'dgrad' if name == 'w' else 'wgrad'}")
    values = operand(x, of_forward, False, f"{name}/fprop")
    if points := mf.spec.Spec.parse(of_forward).transform:
        values = untransformed(values, points)[:, : x.shape[1]]
    return values.to(x.dtype).double().t()


def reference(recipe: mf.Recipe, x, w, g):
    """Computes y, dx, dW in float64 from the dequantized operands, and from their magnitudes."""
    p = recipe
    pairs = [
        (operand(x, p.fprop.a, False, "x/fprop"), operand(w, p.fprop.b, False, "w/fprop")),
        (operand(g, p.dgrad.a, False, "g/dgrad"), of_backward(w, p.dgrad.b, p.fprop.b, "w")),
        (operand(g, p.wgrad.a, True, "g/wgrad"), of_backward(x, p.wgrad.b, p.fprop.a, "x")),
    ]
    return [(a @ b.t(), a.abs() @ b.abs().t()) for a, b in pairs]


def require_close(got, want, magnitude, dtype, what):
    """Compares a result with its reference, within a bound.

    fp32 sums of k products err by at most k * 2^-24 of the sum of magnitudes, and NVFP4's values by
    three roundings more. bf16 rounds the result once, by at most 2^-9 of it."""
    bound = 80 * 2.0**-23 * magnitude + (2.0**-8 * want.abs() if dtype == torch.bfloat16 else 0)
    excess = ((got.double() - want).abs() - bound).max()
    assert excess <= 0, f"{what}: past its bound by {excess}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", RECIPES)
def test_products_are_those_of_the_operands(text, dtype):
    recipe = mf.Recipe(text)
    x, w, _, g = data(dtype)
    y = mf.linear(x, w, None, recipe, rng=RNG, amax_history=history())
    dx, dw = torch.autograd.grad(y, (x, w), g)
    assert {t.dtype for t in (y, dx, dw)} == {dtype}
    for got, (want, magnitude), what in zip(
        (y, dx, dw), reference(recipe, x, w, g), ("y", "dx", "dW")
    ):
        require_close(got, want, magnitude, dtype, what)


def test_bf16_is_torchs_own_linear():
    """Compares in fp32: products may be rounded or fused, so a term has one rounding more."""
    x, w, b, g = data()
    ours = torch.autograd.grad(mf.linear(x, w, b, "bf16"), (x, w, b), g)
    theirs = torch.autograd.grad(torch.nn.functional.linear(x, w, b), (x, w, b), g)
    x, w, g = (t.detach().abs() for t in (x, w, g))
    magnitudes = (g @ w, N), (g.t() @ x, M), (g.sum(0), M)
    for a, c, (magnitude, terms), what in zip(ours, theirs, magnitudes, ("dx", "dW", "db")):
        require_same_sums(a, c, magnitude, terms + 1, what)


def test_bias():
    x, w, b, g = data()
    without_bias = mf.linear(x, w, None, "mxfp8")
    y = mf.linear(x, w, b, "mxfp8")
    magnitude = reference(mf.Recipe("mxfp8"), x, w, g)[0][1] + b.abs()
    require_same_sums(y, without_bias + b, magnitude, K + 1, "y")  # the bias is one more term
    db = torch.autograd.grad(y, b, g)[0]
    require_same_sums(db, g.sum(0), g.abs().sum(0), M, "db")


def test_hybrid_of_one_format_equals_the_plain_recipe():
    x, w, b, g = data()
    preset = mf.Recipe("nvfp4")
    hybrid = f"fprop={preset.fprop} dgrad={preset.dgrad} wgrad={preset.wgrad}"
    results = []
    for recipe in (preset, hybrid):
        y = mf.linear(x, w, b, recipe, rng=RNG)
        results.append([y, *torch.autograd.grad(y, (x, w, b), g)])
    assert all(torch.equal(a, c) for a, c in zip(*results))
    # and a direction of a mixed recipe is that of the recipe it comes from
    mixed = mf.linear(x, w, b, "mxfp8_nvfp4", rng=RNG)
    dx, dw = torch.autograd.grad(mixed, (x, w), g)
    assert torch.equal(dx, results[0][1])
    assert torch.equal(dw, results[0][2])


@pytest.mark.parametrize("shape", [(K,), (M, K), (3, 5, K), (2, 3, 4, K)])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_tensorwise", "mxfp8"])
def test_any_rank(shape, recipe):
    x, w, b, g = data(shape=shape)
    y = mf.linear(x, w, b, recipe, rng=RNG)
    flat = mf.linear(x.reshape(-1, K), w, b, recipe, rng=RNG)
    assert y.shape == (*shape[:-1], N)
    assert torch.equal(y.reshape(-1, N), flat)
    dx, dw = torch.autograd.grad(y, (x, w), g)
    dx2, dw2 = torch.autograd.grad(flat, (x, w), g.reshape(-1, N))
    assert dx.shape == x.shape
    assert torch.equal(dx, dx2)
    assert torch.equal(dw, dw2)


@pytest.mark.parametrize("recipe", mf.presets())
def test_empty_batch(recipe):
    _, w, b, _ = data()
    x = torch.empty(0, K, requires_grad=True)
    y = mf.linear(x, w, b, recipe, rng=RNG, amax_history=history())
    assert y.shape == (0, N)
    y.sum().backward()
    assert x.grad.shape == (0, K)
    assert not w.grad.any()
    assert not b.grad.any()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "fp8_rowwise", "fp8_blockwise"])
@pytest.mark.parametrize(
    "view", [lambda w: w.T.contiguous().T, lambda w: w[:1].expand(32, 64), lambda w: w[:, ::2]]
)
def test_weights_without_adjacent_elements(view, recipe):
    torch.manual_seed(0)
    strided, x = view(torch.randn(32, 64)), torch.randn(4, 64)
    results = []
    for w in (strided, strided.contiguous()):
        leaves = [x[:, : w.shape[1]].clone().requires_grad_(), w.detach().requires_grad_()]
        y = mf.linear(*leaves, None, recipe, rng=RNG)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_non_contiguous_inputs():
    x, w, b, g = data()
    y = mf.linear(x, w, b, "nvfp4", rng=RNG)
    wanted = torch.autograd.grad(y, (x, w), g)
    x2 = x.detach().t().contiguous().t().requires_grad_()
    y2 = mf.linear(x2, w, b, "nvfp4", rng=RNG)
    assert torch.equal(y, y2)
    got = torch.autograd.grad(y2, (x2, w), g.t().contiguous().t())
    assert all(torch.equal(a, c) for a, c in zip(got, wanted))
    expanded = mf.linear(x2, w, None, "nvfp4", rng=RNG).sum()  # its gradient has stride 0
    assert torch.autograd.grad(expanded, w)[0].isfinite().all()


# ---- what is computed, and what is saved ---------------------------------------------------------


class CountOps(TorchDispatchMode):
    """A record of the minifloat ops that run, and of the directions that they quantize."""

    def __init__(self):
        super().__init__()
        self.directions, self.products = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ops.linear.default:  # inference mode dispatches the composite op
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if func in (ops.quantize.default, ops.quantize_delayed.default):
            self.directions.append((bool(args[1]), bool(args[2])))
        self.products += func is ops.scaled_mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("x_grad", "w_grad", "forward", "backward", "products"),
    [
        (True, True, [(True, True), (True, True)], [(True, True)], 2),
        (False, True, [(True, False), (True, True)], [(False, True)], 1),
        (True, False, [(True, True), (True, False)], [(True, False)], 1),
        (False, False, [(True, False), (True, False)], [], 0),
    ],
)
def test_only_what_gradients_need(x_grad, w_grad, forward, backward, products):
    x, w, b, g = data()
    x, w = x.detach().requires_grad_(x_grad), w.detach().requires_grad_(w_grad)
    with CountOps() as counted:
        y = mf.linear(x, w, b, "nvfp4", rng=RNG)
    assert counted.directions == forward  # of w, then of x
    assert counted.products == 1
    with CountOps() as counted:
        y.backward(g)
    assert counted.directions == backward
    assert counted.products == products
    require_same_sums(b.grad, g.sum(0), g.abs().sum(0), M, "db")


def test_no_grad_keeps_nothing():
    x, w, b, _ = data()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, CountOps() as counted:
            y = mf.linear(x, w, b, "nvfp4", rng=RNG)
        assert not y.requires_grad
        assert counted.directions == [(True, False), (True, False)]


@pytest.mark.parametrize(
    ("recipe", "x_bytes", "w_bytes"),
    [
        ("bf16", 2, 2),
        ("fp8_tensorwise", 1, 1),
        ("fp8_rowwise_gw_hp", 2, 1),
        ("mxfp8", 1 + 1 / 32, 1 + 1 / 32),
        ("nvfp4", 1 / 2 + 1 / 16, 1 / 2 + 1 / 256),
    ],
)
def test_saved_bytes(recipe, x_bytes, w_bytes):
    """Counts codes and scales of the operands of dgrad and wgrad; 64 bytes for amaxes and rng."""
    m, k, n = 256, 512, 128
    x = torch.randn(m, k, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(n, k, dtype=torch.bfloat16, requires_grad=True)
    saved = []

    def pack(t):
        saved.append(t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        mf.linear(x, w, None, recipe, rng=RNG)
    slack = 4 * k + 64 if "row" in recipe else 64  # fp32 scales and amaxes, one a row of Wᵀ
    want = m * k * x_bytes + n * k * w_bytes
    assert want <= sum(saved) <= want + 2 * slack


def test_double_backward_is_refused_not_wrong():
    x, w, b, g = data()
    y = mf.linear(x, w, b, "mxfp8")
    dx = torch.autograd.grad(y, x, g, create_graph=True)[0]
    assert dx.requires_grad
    with pytest.raises(RuntimeError, match="linear: expected no second derivative"):
        dx.sum().backward()


# ---- dtypes and autocast -------------------------------------------------------------------------


def test_autocast_equals_bf16_inputs():
    x, w, b, g = data()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mf.linear(x, w, b, "nvfp4", rng=RNG)
    assert y.dtype == torch.bfloat16
    dx, dw, db = torch.autograd.grad(y, (x, w, b), g.bfloat16())
    assert {dx.dtype, dw.dtype, db.dtype} == {torch.float32}
    xb, wb, bb = (t.detach().bfloat16().requires_grad_() for t in (x, w, b))
    yb = mf.linear(xb, wb, bb, "nvfp4", rng=RNG)
    assert torch.equal(y, yb)
    for got, want in zip((dx, dw, db), torch.autograd.grad(yb, (xb, wb, bb), g.bfloat16())):
        assert torch.equal(got, want.float())


def test_weight_of_another_dtype():
    x, w, b, g = data()
    y = mf.linear(x.bfloat16(), w, b, "mxfp8")
    assert y.dtype == torch.bfloat16
    dw = torch.autograd.grad(y, w, g.bfloat16())[0]
    assert dw.dtype == torch.float32


# ---- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_rowwise_gw_hp", "fp8_delayed"])
def test_group_equals_its_layers(recipe):
    x, w, b, g = data()
    w2 = torch.randn(21, K, requires_grad=True)
    rngs = [RNG, RNG]
    histories = [history(), history()] if recipe == "fp8_delayed" else None
    with CountOps() as counted:
        ya, yb = mf.functional.linear_group(
            x, [w, w2], [b, None], recipe, rng=rngs, amax_history=histories
        )
    assert len(counted.directions) == 3  # x once, each weight once
    alone = [history(), history()]
    singles = [
        mf.linear(x, w, b, recipe, rng=RNG, amax_history=alone[0]),
        mf.linear(x, w2, None, recipe, rng=RNG, amax_history=alone[1]),
    ]
    assert torch.equal(ya, singles[0])
    assert torch.equal(yb, singles[1])
    g2 = torch.randn(M, 21)
    got = torch.autograd.grad((ya, yb), (x, w, w2, b), (g, g2))
    want = torch.autograd.grad(singles, (x, w, w2, b), (g, g2))
    # Each product is a repetition, and dx the sum of two of them, the same in both orders.
    assert all(torch.equal(a, c) for a, c in zip(got, want))
    assert histories is None or all(map(torch.equal, histories, alone))


def test_group_with_an_unused_output():
    x, w, _, g = data()
    w2 = torch.randn(21, K, requires_grad=True)
    ya, _ = mf.functional.linear_group(x, [w, w2], recipe="mxfp8")
    dw, dw2 = torch.autograd.grad(ya, (w, w2), g, allow_unused=True)
    assert dw2 is None or not dw2.any()
    assert torch.equal(dw, torch.autograd.grad(mf.linear(x, w, None, "mxfp8"), w, g)[0])


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(4, 9)}, "expected weight"),
        ({"x": torch.ones(4, 8).half()}, "float32 or bfloat16"),
        ({"x": torch.tensor(1.0)}, "scalar"),
        ({"weight": torch.ones(6)}, "expected weight"),
        ({"bias": torch.ones(5)}, "expected bias"),
        ({"recipe": "nvfp5"}, "nvfp5"),
        ({"recipe": "nvfp4"}, "needs rng"),
        ({"recipe": "nvfp4", "rng": torch.tensor([1])}, "rng"),
        ({"recipe": "nvfp4", "rng": torch.tensor([1.0, 2.0, 3.0])}, "rng"),
        ({"recipe": "fp8_delayed"}, "needs amax_history"),
        ({"recipe": "fp8_delayed", "amax_history": torch.zeros(5, 4)}, "amax_history"),
    ],
)
def test_bad_input(change, message):
    arguments = {"x": torch.ones(4, 8), "weight": torch.ones(6, 8, requires_grad=True)} | change
    recipe = arguments.pop("recipe", "mxfp8")
    with pytest.raises(ValueError, match=message):
        mf.linear(**arguments, recipe=recipe).sum().backward()


@pytest.mark.parametrize("recipe", [name for name in mf.presets() if name != "fp8_delayed"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_input_is_never_silent(recipe, bad):
    x, w, _, _ = data()
    x.data[3, 5] = bad
    y = mf.linear(x, w, None, recipe, rng=RNG)
    assert not y[3].isfinite().any()


def test_delayed_scaling_shows_a_bad_step_and_keeps_its_scale():
    x, w, _, _ = data()
    x.data[3, 5] = float("inf")
    h = history()
    y = mf.linear(x, w, None, "fp8_delayed", amax_history=h)
    assert y[3].isnan().all()
    assert y[:3].isfinite().all()
    assert h[0, 1] == float("inf")


def test_amaxes_of_two_transforms_are_recorded_apart():
    plain, turned = "e4m3/tensor+delayed", "e4m3/tensor+delayed+rht"
    recipe = f"fprop={plain}*{plain} dgrad={plain}*{plain} wgrad={turned}*{turned}"
    gen = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(*s, generator=gen).bfloat16() for s in ((32, 48), (16, 48), (32, 16)))
    history = torch.zeros(6, 3)
    history[:, 0] = 3.0  # the active amaxes
    y = mf.linear(x.requires_grad_(), w.requires_grad_(), None, recipe, amax_history=history)
    y.backward(g)
    newest = dict(zip(operand_names(), history[:, 1]))
    for name, values in (("x/fprop", x), ("g/dgrad", g)):
        assert newest[name] == mf.tensor.amax(values.detach(), plain), name
    for name, values in (("x/wgrad", x), ("g/wgrad", g)):
        assert newest[name] == mf.tensor.amax(values.detach(), turned, columnwise=True), name
    assert newest["x/wgrad"] != newest["x/fprop"]
