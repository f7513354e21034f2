"""mf.MoE: against loops, its state, recomputation, compilation and mf.step."""

import copy
import pickle
import types

import minifloat as mf
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.collectives import Begun
from tests.support.experts import relative_error
from tests.support.same_bits import require_same, require_same_results

D, H, E, K = 64, 48, 6, 2


def layer(**changes: object) -> mf.MoE:
    torch.manual_seed(0)
    arguments = {"dim": D, "hidden": H, "experts": E, "top_k": K} | changes
    return mf.MoE(**arguments)


def tokens(count: int = 20, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def loop_moe(moe: mf.MoE, x: torch.Tensor) -> torch.Tensor:
    """Computes the layer expert by expert, in the dtype of its parameters."""
    indices, weights = moe.router(x)
    experts, out = moe.experts, torch.zeros_like(x)
    for e in range(experts.experts):
        if len(experts.input_names) == 1:
            w1, w3 = experts.w13[e].chunk(2)
            b1, b3 = (0, 0) if experts.b13 is None else experts.b13[e].chunk(2)
        else:
            w1, w3 = experts.w1[e], experts.w3[e]
            b1, b3 = (0, 0) if experts.b1 is None else (experts.b1[e], experts.b3[e])
        hidden = torch.nn.functional.silu(x @ w1.T + b1) * (x @ w3.T + b3)
        y = hidden @ experts.w2[e].T + (0 if experts.b2 is None else experts.b2[e])
        out = out + y * ((indices == e) * weights).sum(1, keepdim=True)
    if moe.shared_experts is not None:
        out = out + moe.shared_experts(x)
    return out


@pytest.mark.parametrize("fused_w13", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shared_experts", [0, 2])
@pytest.mark.parametrize("top_k", [1, 2, E])
def test_layer_is_that_of_a_loop(fused_w13, bias, shared_experts, top_k):
    # One normalised weight is 1 whatever the router computes: its gradient would be 0.
    options = {"route_norm": top_k > 1, "shared_experts": shared_experts, "top_k": top_k}
    moe = layer(fused_w13=fused_w13, bias=bias, **options)
    x = tokens().requires_grad_()
    y = moe(x)
    y.square().sum().backward()
    found = {"x": x.grad} | {name: p.grad for name, p in moe.named_parameters()}
    expected = copy.deepcopy(moe)
    expected.zero_grad()
    x_loop = x.detach().clone().requires_grad_()
    y_loop = loop_moe(expected, x_loop)
    y_loop.square().sum().backward()
    wanted = {"x": x_loop.grad} | {name: p.grad for name, p in expected.named_parameters()}
    # fp32 sums of up to 64 + 48 terms in another order
    assert relative_error(y.detach(), y_loop.detach()) < 1e-5
    for name, gradient in wanted.items():
        assert relative_error(found[name], gradient) < 1e-5, name


def test_layer_in_bf16_is_near_the_loop_in_fp32():
    moe = layer(dtype=torch.bfloat16, shared_experts=1, fused_w13=True)
    x = tokens(dtype=torch.bfloat16)
    exact = copy.deepcopy(moe).float()
    leaves = x.clone().requires_grad_(), x.float().requires_grad_()
    y, expected = moe(leaves[0]), loop_moe(exact, leaves[1])
    assert y.dtype == torch.bfloat16
    # Three roundings to bfloat16 in a row, each of at most 2^-9, in either pass.
    assert relative_error(y.detach(), expected.detach()) < 0.015
    y.float().square().sum().backward()
    expected.square().sum().backward()
    assert relative_error(leaves[0].grad, leaves[1].grad) < 0.03
    for (name, p), q in zip(moe.named_parameters(), exact.parameters()):
        assert relative_error(p.grad, q.grad) < 0.03, name


def test_leading_dimensions_autocast_and_no_tokens():
    moe = layer(shared_experts=1)
    x = tokens(24)
    y = moe(x)
    assert torch.equal(moe(x.view(2, 3, 4, D)), y.view(2, 3, 4, D))
    with torch.autocast("cpu", torch.bfloat16):
        z = moe(x)
    assert z.dtype == torch.bfloat16
    assert relative_error(z.detach(), y.detach()) < 0.015
    empty = moe(x[:0].requires_grad_())
    empty.sum().backward()
    assert empty.shape == (0, D)
    assert not any(p.grad.any() for p in moe.parameters())


@pytest.mark.parametrize("recipe", mf.presets())
def test_recipe_trains_and_repeats(recipe):
    """Two layers of one recipe have equal bytes, and a step lowers the loss."""
    losses = []
    for _ in range(2):
        moe = layer(recipe=recipe, shared_experts=1, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(moe.parameters(), lr=0.01)
        x = tokens(64, torch.bfloat16)
        found = []
        for _ in range(4):
            loss = (moe(x) - x.roll(1, 1)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mf.step(moe)
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", [None, "nvfp4", "fp8_delayed", "mxfp8"])
def test_checkpointing_repeats_the_bytes(recipe, use_reentrant):
    results = []
    for is_checkpointed in (False, True):
        moe = layer(recipe=recipe, shared_experts=1, dtype=torch.bfloat16)
        x = tokens(dtype=torch.bfloat16).requires_grad_()
        for _ in range(2):
            y = checkpoint(moe, x, use_reentrant=use_reentrant) if is_checkpointed else moe(x)
            y.float().square().sum().backward()
        state = [t for _, t in sorted(mf.training_state(moe).items())]
        assert moe.router.counts.sum() == 2 * 20 * K
        results.append([y, x.grad, *(p.grad for p in moe.parameters()), *state])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize(
    ("recipe", "fused_w13"),
    [
        pytest.param(None, False, marks=pytest.mark.slow),
        pytest.param("mxfp8", True, marks=pytest.mark.slow),
        ("nvfp4", False),
        ("fp8_delayed", True),
    ],
)
def test_one_compiled_graph_for_any_number_of_tokens(recipe, fused_w13):
    moe = layer(
        recipe=recipe, fused_w13=fused_w13, bias=fused_w13, shared_experts=1, dtype=torch.bfloat16
    )
    reference = copy.deepcopy(moe)
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (40, 57, 33, 96, 64):
        x = tokens(count, torch.bfloat16)
        # Not down to 32 tokens: one block along the contraction is another graph in mf.Linear.
        with torch._dynamo.config.patch(error_on_recompile=True):
            y = compiled(x)
        y.float().square().sum().backward()
        expected = reference(x)
        expected.float().square().sum().backward()
        assert relative_error(y.detach(), expected.detach()) < 0.02
        assert torch.equal(moe.router.counts, reference.router.counts)
    for p, q in zip(moe.parameters(), reference.parameters()):
        assert relative_error(p.grad, q.grad) < 0.1


def test_copies_and_state_dict():
    moe = layer(recipe="nvfp4", fused_w13=True, bias=True, shared_experts=1)
    keys = ["router.weight", "router.expert_bias", "experts.w13", "experts.w2", "experts.b13"]
    keys += ["experts.b2", *(f"shared_experts.{w}.weight" for w in ("w1", "w3", "w2"))]
    assert list(moe.state_dict()) == keys
    x = tokens()
    moe(x).sum().backward()
    copies = [copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))]
    fresh = layer(recipe="nvfp4", fused_w13=True, bias=True, shared_experts=1)
    fresh.load_state_dict(moe.state_dict())
    mf.load_training_state(fresh, mf.training_state(moe))
    expected = moe(x)
    for other in (*copies, fresh):
        assert torch.equal(other(x), expected)


def test_meta_device():
    with torch.device("meta"):
        moe = layer(recipe="fp8_delayed", shared_experts=1)
    moe = moe.to_empty(device="cpu")
    reference = layer(recipe="fp8_delayed", shared_experts=1)
    moe.load_state_dict(reference.state_dict())
    assert torch.equal(moe(tokens()), reference(tokens()))
    assert moe.experts.w1_product.amax_history.shape == (6, E, 17)


RECIPES = ["mxfp8", "nvfp4", "fp8_delayed"]
PARTS = {"shared_experts": 1, "bias": True, "balance": "bias"}


def converted(recipe: str, values: dict[str, torch.Tensor] | None = None) -> mf.MoE:
    """Returns a converted layer; with values: made on meta, and given those by assignment."""
    with torch.device("meta" if values else "cpu"):
        moe = layer(**PARTS)
        mf.quantize_(moe, recipe)
    if values:
        moe.load_state_dict(values, assign=True)
    return moe


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_assigned_to_a_converted_layer_on_meta(recipe):
    twin = converted(recipe)
    moe = converted(recipe, copy.deepcopy(twin.state_dict()))
    moe.train()
    for _ in range(3):
        results = [model(tokens()) for model in (moe, twin)]
        for y in results:
            y.sum().backward()
        require_same(*results)
        for found, expected in zip(moe.parameters(), twin.parameters(), strict=True):
            require_same(found.grad, expected.grad)
        require_same(moe.router.counts, twin.router.counts)
        mf.step(moe)
        mf.step(twin)
    states = (mf.training_state(model) for model in (moe, twin))
    require_same_results(*states)


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_a_forward_and_backward_on_meta(recipe):
    with torch.device("meta"):
        moe = layer(**PARTS)
        if recipe != "bf16":
            mf.quantize_(moe, recipe)
        y = moe(torch.empty(20, D))
    assert (y.shape, y.is_meta) == ((20, D), True)
    y.sum().backward()
    assert all(p.grad.shape == p.shape for p in moe.parameters())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert moe.eval()(torch.empty(3, D, device="meta")).shape == (3, D)


def test_step_moves_the_bias_of_every_layer():
    model = torch.nn.Sequential(layer(), layer(balance="loss"), layer(balance_speed=0.5))
    x = tokens()
    (model(model(x)).sum() + mf.moe.balance_loss(model)).backward()
    counts = [moe.router.counts.clone() for moe in model]
    assert [c.sum().item() for c in counts] == [2 * 20 * K] * 3
    mf.step(model)
    for moe, count in zip(model, counts):
        assert not moe.router.counts.any()
        assert torch.equal(moe.router.step_counts, count)
    for moe, count, speed in ((model[0], counts[0], 1e-3), (model[2], counts[2], 0.5)):
        expected = (count.float().mean() - count).sign() * speed
        assert torch.equal(moe.router.expert_bias, expected)
    assert model[1].router.expert_bias is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 0}, "hidden: expected at least 1"),
        ({"shared_experts": -1}, "shared_experts: expected at least 0"),
        ({"dtype": torch.float64}, "dtype: expected float32 or bfloat16"),
        ({"limit": -1.0}, "limit: expected a finite number of at least 0"),
        ({"limit": 0.0}, "limit: expected a number above 0, or None, got 0"),
        ({"limit": 7.0, "alpha": float("nan")}, "alpha: expected a finite number of at least 0"),
        ({"recipe": "fp9"}, "fp9"),
        ({"experts": 1024}, "experts: expected 1 to 1023, got 1024"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        layer(**changes)


@pytest.mark.parametrize("dtype", [torch.long, torch.float16, torch.float64])
def test_a_refused_forward_counts_no_token(dtype):
    moe = layer(recipe="mxfp8")
    with pytest.raises(ValueError, match=r"mf\.MoE: expected x as float32 or bfloat16, got"):
        moe(torch.ones(3, moe.experts.dim, dtype=dtype))
    assert not moe.router.counts.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gradients_are_those_of_eager_mode(dtype):
    """In float32 a cast does nothing, which torch 2.11's compiler takes for a lost gradient."""
    grads = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        moe = mf.MoE(32, 48, 5, 2, shared_experts=1, recipe="mxfp8", dtype=dtype)
        torch._dynamo.reset()
        run = torch.compile(moe, backend="aot_eager") if is_compiled else moe
        x = torch.randn(24, 32, dtype=dtype, requires_grad=True)
        run(x).float().square().sum().backward()
        grads.append({"x": x.grad, **{name: p.grad for name, p in moe.named_parameters()}})
    for name, grad in grads[0].items():
        assert torch.equal(grads[1][name], grad), name


def test_divided_experts_take_no_token_ids():
    experts = layer().experts
    experts.parallel = types.SimpleNamespace(name="moe")
    indices = torch.zeros(20, K, dtype=torch.int64)
    with pytest.raises(ValueError, match="moe: expected no token_ids of experts that ranks divide"):
        experts(tokens(), indices, torch.zeros(20, K), torch.arange(20))


@pytest.mark.parametrize("fused_w13", [False, True])
def test_the_products_of_a_pass_share_its_table_of_groups(fused_w13):
    x = tokens().requires_grad_()
    moe = layer(recipe="fp8_tensorwise", fused_w13=fused_w13)
    with Begun() as forward:
        y = moe(x)
    with Begun() as backward:
        y.sum().backward()
    assert [begun.names.count("group_table") for begun in (forward, backward)] == [1, 1]
