"""mf.grouped_mlp: against loops, against the composition of its products, and what it saves."""

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from minifloat.moe.feed_forward import order_rows
from minifloat.nn.cache.operand_cache import can_reuse
from minifloat.spec import Spec
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.experts import LIMIT, loop_mlp, relative_error, routing, state_of, tensors
from tests.support.reuse_counts import Casts
from tests.support.saved_bytes import saved_bytes

D, H, E, K = 64, 96, 5, 2

# The largest relative error of values and gradients in bf16: each of the three roundings in a row
# (gate and up, h, y; in backward g, dh, dgate) adds at most 2^-9, and three add up to 1.5 of a
# hundred where all go one way.
BF16_ERROR = 0.015


def arguments(tokens: int, slots: int, dtype: torch.dtype, **changes: object) -> dict:
    """Returns the arguments of mf.grouped_mlp, with gradients."""
    indices, weights = routing(tokens, slots, E)
    found = tensors(tokens, D, H, E, dtype) | {"indices": indices}
    return found | {"weights": weights.requires_grad_()} | changes


def gradients(y: torch.Tensor, given: dict, g: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = {k: t for k, t in given.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    found = torch.autograd.grad(y, list(leaves.values()), g.to(y.dtype), allow_unused=True)
    return dict(zip(leaves, found))


def check_against_loop(given: dict, bound: float, **options: object) -> None:
    """Compares values and every gradient with the fp64 loop's."""
    y = mf.grouped_mlp(**given, recipe="bf16", **options)
    exact = {
        k: t.detach().double().requires_grad_() if t.is_floating_point() else t
        for k, t in given.items()
    }
    expected = loop_mlp(**exact, limit=options.get("limit"))
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    assert y.dtype == given["x"].dtype
    assert relative_error(y.detach(), expected.detach()) < bound
    wanted = gradients(expected, exact, g.double())
    for name, found in gradients(y, given, g).items():
        assert found.dtype == given[name].dtype
        assert relative_error(found, wanted[name]) < bound, name


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, BF16_ERROR)])
@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("slots", [1, 2, E])
def test_values_and_gradients_are_those_of_a_loop(dtype, bound, limit, has_bias, slots):
    given = arguments(23, slots, dtype)
    if not has_bias:
        del given["b13"], given["b2"]
    check_against_loop(given, bound, limit=limit)


def test_all_tokens_to_one_expert_and_empty_experts():
    given = arguments(23, 1, torch.float32)
    given["indices"] = torch.full_like(given["indices"], 3)
    check_against_loop(given, 1e-5)
    y = mf.grouped_mlp(**given, recipe="fp8_rowwise")
    found = gradients(y, given, torch.ones_like(y))
    for name in ("w13", "b13", "w2", "b2"):
        assert found[name][3].any()
        assert not found[name][[0, 1, 2, 4]].any()


@pytest.mark.parametrize("recipe", ["bf16", "fp8_rowwise", "mxfp8", "nvfp4"])
def test_no_tokens(recipe):
    given = arguments(0, 2, torch.bfloat16)
    y = mf.grouped_mlp(**given, recipe=recipe, **state_of(recipe, E))
    assert y.shape == (0, D)
    for name, found in gradients(y, given, torch.ones_like(y)).items():
        assert found.shape == given[name].shape
        assert not found.any()


def test_slots_without_an_expert_add_nothing():
    given = arguments(9, 2, torch.float32)
    given["indices"][:, 1] = torch.tensor([-1, E, E + 4] * 3)
    given["indices"] = given["indices"].int()
    one = given | {"indices": given["indices"][:, :1]}
    one["weights"] = given["weights"].detach()[:, :1].requires_grad_()
    y, expected = (mf.grouped_mlp(**a, recipe="bf16") for a in (given, one))
    assert torch.equal(y, expected)
    found, wanted = (gradients(t, a, torch.ones_like(y)) for t, a in ((y, given), (expected, one)))
    assert not found["weights"][:, 1].any()
    for name in ("x", "w13", "w2", "b2"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("is_row_major", [False, True])
def test_forms_of_the_weights_give_equal_results(interleaved, is_row_major):
    """One product or two, gate and up apart or interleaved, either layout."""
    given = arguments(20, 2, torch.bfloat16)
    parts = {name: list(given[name].detach().chunk(2, dim=1)) for name in ("w13", "b13")}
    leaves = {name: [t.clone().requires_grad_() for t in part] for name, part in parts.items()}
    y = mf.grouped_mlp(**given | leaves, recipe="mxfp8", limit=LIMIT)

    def fuse(part: list[torch.Tensor]) -> torch.Tensor:
        if interleaved:
            return torch.stack(part, dim=2).flatten(1, 2)
        return torch.cat(part, dim=1)

    fused = given | {name: fuse(part) for name, part in parts.items()}
    if is_row_major:
        fused["w13"] = fused["w13"].transpose(1, 2).contiguous().transpose(1, 2)
        fused["w2"] = given["w2"].detach().transpose(1, 2).contiguous().transpose(1, 2)
    for name in ("w13", "b13", "w2"):
        fused[name] = fused[name].detach().requires_grad_()
    found = mf.grouped_mlp(**fused, recipe="mxfp8", limit=LIMIT, interleaved=interleaved)
    assert torch.equal(found, y)
    g = torch.randn_like(y)
    wanted = torch.autograd.grad(y, [*leaves["w13"], given["w2"]], g)
    d_w13, d_w2 = torch.autograd.grad(found, [fused["w13"], fused["w2"]], g)
    assert torch.equal(d_w13, fuse(list(wanted[:2])))
    assert torch.equal(d_w2, wanted[2])


def composition(given: dict, recipe: str, state: dict) -> torch.Tensor:
    """Computes grouped_mlp from scaled_grouped_mm, swiglu and torch's functions."""
    indices, weights, slots = given["indices"], given["weights"], given["indices"].shape[1]
    order = order_rows(indices, E)
    histories = state.get("amax_history")

    def product(a, w, name, history):
        return ops.scaled_grouped_mm(
            a,
            w.transpose(1, 2),
            order.offs,
            recipe,
            out_dtype=a.dtype,
            rng=state.get("rng"),
            row_ids=order.row_ids,
            amax_history=history,
            stream=ops.stream(name),
        )

    tokens = order.pairs.long() // slots
    names = [name for name in ("w13", "w1", "w3", "w2") if name in given]
    *products, history = [None] * len(names) if histories is None else histories
    products = [
        product(given["x"][tokens], given[name], name, own) for name, own in zip(names, products)
    ]
    other = products[1] if len(products) > 1 else None
    h = ops.swiglu(products[0], other, weights.reshape(-1)[order.pairs.long()])
    y = product(h, given["w2"], "w2", history)
    total = torch.zeros(given["x"].shape)
    for slot in range(slots):
        total = total + y[order.places[:, slot].long()].float()
    return total.to(y.dtype)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("recipe", mf.presets())
def test_presets_equal_the_composition_of_their_products(recipe, is_fused):
    given = arguments(33, K, torch.bfloat16)
    del given["b13"], given["b2"]
    if not is_fused:
        parts = given.pop("w13").detach().chunk(2, dim=1)
        given |= {name: t.clone().requires_grad_() for name, t in zip(("w1", "w3"), parts)}
    named = {name: t for name, t in given.items() if name not in ("w1", "w3")}
    if not is_fused:
        named["w13"] = [given["w1"], given["w3"]]
    states = [state_of(recipe, E, 2 if is_fused else 3) for _ in range(2)]
    y = mf.grouped_mlp(**named, recipe=recipe, **states[0])
    expected = composition(given, recipe, states[1])
    assert torch.equal(y, expected)
    g = torch.randn_like(y)
    found, wanted = gradients(y, given, g), gradients(expected, given, g)
    for name in set(found) - {"x"}:
        assert torch.equal(found[name], wanted[name]), name
    # Torch rounds the sum of a token's rows after each slot: by a bfloat16 step.
    assert relative_error(found["x"], wanted["x"]) < BF16_ERROR
    for a, b in zip(*(state.get("amax_history", []) for state in states)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", [r for r in mf.presets() if not mf.Recipe(r).is_stochastic])
def test_each_expert_equals_a_call_for_it_alone(recipe):
    """Without stochastic rounding, an expert's rows and gradients are those of a call alone."""
    given = arguments(40, 1, torch.bfloat16)
    del given["b13"], given["b2"]
    state = state_of(recipe, E)
    y = mf.grouped_mlp(**given, recipe=recipe, **state)
    found = gradients(y, given, torch.ones_like(y))
    for e in range(E):
        chosen = (given["indices"][:, 0] == e).nonzero()[:, 0]
        alone = {
            "x": given["x"].detach()[chosen],
            "w13": given["w13"].detach()[e : e + 1],
            "w2": given["w2"].detach()[e : e + 1],
            "weights": given["weights"].detach()[chosen],
        }
        alone = {k: t.clone().requires_grad_() for k, t in alone.items()}
        alone["indices"] = torch.zeros(len(chosen), 1, dtype=torch.int64)
        expected = mf.grouped_mlp(**alone, recipe=recipe, **state_of(recipe, 1))
        assert torch.equal(y[chosen], expected)
        wanted = gradients(expected, alone, torch.ones_like(expected))
        assert torch.equal(found["x"][chosen], wanted["x"])
        assert torch.equal(found["weights"][chosen], wanted["weights"])
        assert torch.equal(found["w13"][e], wanted["w13"][0])
        assert torch.equal(found["w2"][e], wanted["w2"][0])


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("recipe", mf.presets())
def test_products_read_one_cast_of_x(recipe, is_fused):
    """x is cast once in each direction.

    Its tokens are cast where the scales are those of rows or blocks, and its rows elsewhere.
    """
    parsed = mf.Recipe(recipe)
    given = arguments(33, K, torch.bfloat16)
    count = 1 if is_fused else 2
    leaves = {
        n: [t.clone().requires_grad_() for t in given[n].detach().chunk(count, dim=1)]
        for n in ("w13", "b13")
    }
    with Casts() as seen:
        y = mf.grouped_mlp(**given | leaves, recipe=recipe, **state_of(recipe, E, 1 + count))
        inputs = [given["x"], *leaves["w13"], *leaves["b13"], given["w2"], given["weights"]]
        torch.autograd.grad(y, inputs, torch.ones_like(y))
    x_specs = [parsed.fprop.a, parsed.wgrad.b]
    if x_specs[1] == "fprop.x":  # whose codes backward makes again
        x_specs[1] = x_specs[0]
    shared = sum(can_reuse(spec, allows_delayed=False) for spec in x_specs)
    quantized = sum(not Spec.parse(spec).is_bf16 for spec in x_specs)
    g_specs = [Spec.parse(spec) for spec in (parsed.dgrad.a, parsed.wgrad.a)]
    of_g = [spec.is_bf16 for spec in g_specs]
    # Tokens are read where the cast is shared, even where their rows have one scale together.
    assert seen.count[33, D] == shared + (not any(of_g))
    assert seen.count[33 * K, D] == count * (quantized - shared) + (any(of_g) and not all(of_g))


@pytest.mark.parametrize("recipe", mf.presets())
def test_two_runs_give_the_same_bits(recipe):
    runs = []
    for _ in range(2):
        given = arguments(33, K, torch.bfloat16)
        y = mf.grouped_mlp(**given, recipe=recipe, **state_of(recipe, E))
        runs.append([y, *gradients(y, given, torch.ones_like(y)).values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs))


@pytest.mark.parametrize("recipe", mf.presets())
def test_order_of_tokens_changes_nothing_with_their_ids(recipe):
    given = arguments(33, K, torch.bfloat16)
    ids = torch.arange(33) * 3 + 7
    y = mf.grouped_mlp(**given, recipe=recipe, token_ids=ids, **state_of(recipe, E))
    shuffled = torch.randperm(33, generator=torch.Generator().manual_seed(2))
    moved = dict(given)
    for name in ("x", "weights"):
        moved[name] = given[name].detach()[shuffled].requires_grad_()
    moved["indices"] = given["indices"][shuffled]
    options = state_of(recipe, E) | {"token_ids": ids[shuffled]}
    found_y = mf.grouped_mlp(**moved, recipe=recipe, **options)
    assert torch.equal(found_y, y[shuffled])
    g = torch.randn_like(y)
    found, wanted = gradients(found_y, moved, g[shuffled]), gradients(y, given, g)
    for name in wanted:
        expected = wanted[name][shuffled] if name in ("x", "weights") else wanted[name]
        if name == "b2":  # torch's product sums the tokens, whose order differs
            torch.testing.assert_close(found[name], expected, rtol=2**-7, atol=1e-3)
        else:
            assert torch.equal(found[name], expected), name


def test_stochastic_rows_draw_by_token_id():
    given = arguments(33, K, torch.bfloat16)
    options = {"recipe": "nvfp4", "rng": torch.tensor([3, 5])}
    y, same, other = (
        mf.grouped_mlp(**given, **options, token_ids=ids)
        for ids in (None, torch.arange(33), torch.arange(33) + 1000)
    )
    g = torch.randn_like(y)
    found = [gradients(t, given, g)["x"] for t in (y, same, other)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("recipe", "slots"), [*((recipe, 2) for recipe in mf.presets()), ("nvfp4", 1), ("nvfp4", 4)]
)
def test_bytes_saved_for_backward(recipe, slots):
    """x once, gate and up once, at most 32 bytes a row, and amaxes of columns."""
    tokens = 64
    given = arguments(tokens, slots, torch.bfloat16)
    del given["b13"], given["b2"]

    def run() -> torch.Tensor:
        return mf.grouped_mlp(**given, recipe=recipe, **state_of(recipe, E))

    rows = tokens * slots
    of_columns = E * (D + 2 * H) * 4 if recipe.startswith("fp8_rowwise") else 0
    most = rows * (2 * D / slots + 4 * H + 32) + of_columns
    assert saved_bytes(run, (given["w13"], given["w2"])) <= most
    run().sum().backward()


def test_gradients_that_are_not_needed_are_not_computed():
    for name in ("x", "w13", "b13", "w2", "b2", "weights"):
        given = arguments(12, 2, torch.bfloat16)
        expected = gradients(
            mf.grouped_mlp(**given, recipe="fp8_rowwise"), given, torch.ones(12, D)
        )
        for other, tensor in given.items():
            tensor.requires_grad_(other == name)
        y = mf.grouped_mlp(**given, recipe="fp8_rowwise")
        found = gradients(y, given, torch.ones(12, D))
        assert list(found) == [name]
        assert torch.equal(found[name], expected[name])


class CastAmaxes(TorchDispatchMode):
    """Lists casts, each with whether an amax was passed: columnwise ones alone, and of gradients.

    Those of gradients cast in both directions, and are listed with both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []
        self.of_gradients: list[tuple[bool, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        if func._opname in ("quantize", "quantize_swiglu") and not given["row"]:
            self.found.append((given["col"], given.get("amax_col") is not None))
        if func._opname == "quantize" and given["row"] and given["col"]:
            amaxes = given.get("amax_row"), given.get("amax_col")
            self.of_gradients.append((amaxes[0] is not None, amaxes[1] is not None))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("recipe", "shared"), [("fp8_tensorwise", 4), ("fp8_rowwise", 3), ("nvfp4", 2)]
)
def test_backward_takes_the_amaxes_that_forward_has_found(recipe, shared):
    """A tensor's of h, x and both weights; by rows of h and the weights; nvfp4's of the weights."""
    torch.manual_seed(0)
    layer = mf.MoE(64, 32, 4, 2, fused_w13=True, dtype=torch.bfloat16, recipe=recipe, balance=None)
    y = layer(torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True))
    with CastAmaxes() as seen:
        y.sum().backward()
    assert len(seen.found) == 4
    assert sum(is_given for _, is_given in seen.found) == shared


@pytest.mark.parametrize(
    ("recipe", "taken"),
    [
        ("fp8_tensorwise", (True, True)),
        ("fp8_rowwise", (True, True)),
        ("nvfp4", (True, False)),  # columns are transformed
        ("fp8_blockwise", (False, False)),
    ],
)
@pytest.mark.parametrize("is_fused", [False, True])
def test_casts_of_gradients_take_the_amaxes_that_swiglu_backward_finds(is_fused, recipe, taken):
    torch.manual_seed(0)
    options = {"fused_w13": is_fused, "dtype": torch.bfloat16, "balance": None}
    layer = mf.MoE(64, 32, 4, 2, recipe=recipe, **options)
    y = layer(torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True))
    with CastAmaxes() as seen:
        y.sum().backward()
    of_result, *of_products = seen.of_gradients
    assert of_result == (False, False)
    assert of_products == [taken] * (1 if is_fused else 2)


def test_double_backward_is_refused():
    given = arguments(12, 2, torch.bfloat16)
    y = mf.grouped_mlp(**given, recipe="mxfp8")
    (dx,) = torch.autograd.grad(y.sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


def test_checkpoint_with_create_graph():
    given = arguments(12, 2, torch.bfloat16)
    expected = torch.autograd.grad(mf.grouped_mlp(**given, recipe="mxfp8").sum(), given["x"])

    def run(x: torch.Tensor) -> torch.Tensor:
        return mf.grouped_mlp(**given | {"x": x}, recipe="mxfp8")

    y = checkpoint(run, given["x"], use_reentrant=False)
    (dx,) = torch.autograd.grad(y.sum(), given["x"], create_graph=True)
    assert torch.equal(dx, expected[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w13": torch.zeros(E, H, D)}, r"expected w13 as \(5, 192, 64\)"),
        ({"w13": [torch.zeros(E, 2 * H, D)] * 2}, r"expected w1 and w3 as \(5, 96, 64\)"),
        ({"w13": [torch.zeros(E, H, D)] * 3}, "got 3 tensors"),
        ({"x": torch.zeros(4, 4, D)}, "expected x of 2 dimensions"),
        ({"weights": torch.zeros(4, 3)}, r"weights \(T, k\)"),
        ({"indices": torch.zeros(4, 2)}, "expected indices as integers"),
        *(
            (
                {"weights": torch.ones(4, 2).to(dtype)},
                f"float64, got {dtype}; convert others by weights.float",
            )
            for dtype in (torch.complex64, torch.bool, torch.int64, torch.float8_e4m3fn)
        ),
        ({"recipe": "nvfp4"}, "needs rng"),
        ({"recipe": "fp8_delayed"}, "needs amax_history"),
        ({"recipe": "fprop=mxfp8/32x32*mxfp8 dgrad=bf16*bf16 wgrad=bf16*bf16"}, "x/fprop"),
        ({"amax_history": [torch.zeros(6, E, 2)]}, "amax_history for 2 products, got 1"),
        ({"b13": [torch.zeros(E, 2 * H)] * 2}, "b13 for each of 1 matrices, got 2"),
        ({"w13": [torch.zeros(E, H, D)] * 2, "b13": torch.zeros(E, H)}, "of 2 matrices, got 1"),
        ({"b2": torch.zeros(E - 1, D)}, r"expected b2 as \(5, 64\), .*, got \(4, 64\)"),
        ({"b2": torch.zeros(E, D, dtype=torch.int32)}, "b2 in floating point, got torch.int32"),
        ({"limit": 0}, "limit: expected a number above 0, or None, got 0"),
        ({"first_expert": -1}, "first_expert: expected at least 0, got -1"),
        ({"token_ids": torch.arange(3)}, r"token_ids as \(4,\) integers, got torch.int64 \(3,\)"),
        ({"token_ids": torch.arange(4.0)}, "token_ids as .*, got torch.float32"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        mf.grouped_mlp(**arguments(4, 2, torch.bfloat16) | {"recipe": "mxfp8"} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [0, 1, 2, 3]}, "expected token_ids as a tensor or None, got list"),
        ({"b2": "x"}, "expected b2 as a tensor or None, got str"),
        ({"b13": ["x"]}, "expected b13 as a tensor or None, got str"),
        ({"limit": "x"}, "limit: expected a number, got 'x'"),
        ({"alpha": None}, "alpha: expected a number, got None"),
        ({"interleaved": 1}, "interleaved: expected True or False, got 1"),
        ({"first_expert": 1.5}, "first_expert: expected an int, got 1.5"),
    ],
)
def test_refuses_other_types(changes, message):
    with pytest.raises(TypeError, match=message):
        mf.grouped_mlp(**arguments(4, 2, torch.bfloat16) | {"recipe": "mxfp8"} | changes)


@pytest.mark.parametrize("bad", [{"limit": -1.0}, {"interleaved": True}])
def test_a_refused_swiglu_writes_no_amax(bad):
    given = arguments(12, 2, torch.bfloat16)
    given["w13"] = list(given["w13"].chunk(2, 1))
    histories = [torch.zeros(6, E, 2) for _ in range(3)]
    with pytest.raises(ValueError, match=": expected"):
        mf.grouped_mlp(**given, recipe="fp8_delayed", amax_history=histories, **bad)
    assert not torch.stack(histories).any()
