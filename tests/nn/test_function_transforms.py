"""torch.func's transforms of layers: their results have the bits of autograd and of calls one by
one. What they cannot do raises.
"""

import minifloat as mf
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, stack_module_state, vjp, vmap

from tests.support import layer_cases as cases
from tests.support.fused_models import FeedForward
from tests.support.layer_cases import Options
from tests.support.same_bits import require_same

K, HIDDEN, N, BATCH = 32, 48, 16, 5
RECIPES = ["fp8_tensorwise", "fp8_delayed", "mxfp8", "nvfp4"]
WITHOUT_BITS = ["fp8_tensorwise", "fp8_delayed", "mxfp8"]  # nothing random: the loop may draw anew


def network(recipe: str, seed: int = 0, **options: object) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(K, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, N))
    mf.quantize_(model, recipe, keep="nothing", **options)
    return model


def batch() -> Tensor:
    return torch.randn(BATCH, K, generator=torch.Generator().manual_seed(1))


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


# ---- reverse mode --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (cases.linear_case, {}),
        (cases.linear_case, {"recompute": "weight"}),
        (cases.linear_case, {"accumulate": "main_grad"}),
        (cases.group_case, {}),
        (cases.mlp_case, {}),
        (cases.grouped_case, {}),
        (cases.experts_case, {}),
    ],
)
def test_vjp_of_each_op_is_its_backward_pass(make, options):
    for recipe in ["bf16", *RECIPES]:
        one, other = (make(recipe, Options(**options)) for _ in range(2))
        leaves = {name: t.detach() for name, t in other.leaves()}
        generator = torch.Generator().manual_seed(9)
        results, pull = vjp(lambda v, other=other: other.call({**other.values, **v}), leaves)
        outputs = [results] if isinstance(results, Tensor) else results
        grads = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
        (found,) = pull(grads[0] if isinstance(results, Tensor) else grads)
        want = one.backward(one.forward())
        for name, g in found.items():
            added = 1 if f"main_{name}" == "main_w" and options.get("accumulate") else 0
            require_same(g + added, want["main_grad"] if added else want[name], (recipe, name))
        for name, t in other.values.items():
            if "history" in name:
                require_same(t, one.values[name], (recipe, name))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [{}, {"primary": True}, {"recompute": "weight"}])
def test_gradients_of_a_model(recipe, options):
    if recipe == "fp8_delayed" and "primary" in options:
        return  # codes scale by an amax of their own
    x = batch().requires_grad_()
    network(recipe, **options)(x).square().sum().backward()
    model = network(recipe, **options)
    dx = grad(lambda x: model(x).square().sum())(batch())
    require_same(dx, x.grad, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_parameters(recipe):
    reference = network(recipe)
    reference(batch()).square().sum().backward()
    model, x = network(recipe), batch()

    def loss(p):
        return functional_call(model, p, (x,)).square().sum()

    found = grad(loss)(parameters_of(model))
    for name, p in reference.named_parameters():
        require_same(found[name], p.grad, (recipe, name))


@pytest.mark.parametrize("recipe", RECIPES)
def test_jacobians(recipe):
    model = network(recipe).eval()
    found = jacrev(model)(batch())
    x = batch().requires_grad_()
    y = model(x)
    for i in range(BATCH):
        for j in range(0, N, 5):
            (row,) = torch.autograd.grad(y[i, j], x, retain_graph=True)
            require_same(found[i, j], row, (recipe, i, j))


# ---- batches -------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_batch_of_inputs_of_weights_and_of_models(recipe):
    model = network(recipe).eval()
    for x in (batch(), batch()[:, None]):
        want = torch.stack([model(sample) for sample in x])
        require_same(vmap(model)(x), want, recipe)
        require_same(vmap(model, chunk_size=2)(x), want, recipe)
        require_same(vmap(model, in_dims=-1)(x.movedim(0, -1)), want, recipe)
    models = [network(recipe, seed).eval() for seed in range(3)]
    parameters, buffers = stack_module_state(models)

    x = batch()

    def run(p, b):
        return functional_call(models[0], (p, b), (x,))

    want = torch.stack([model(x) for model in models])
    require_same(vmap(run)(parameters, buffers), want, recipe)


@pytest.mark.parametrize("recipe", WITHOUT_BITS)
def test_gradients_of_each_sample(recipe):
    model = network(recipe)

    def loss(p, x):
        return functional_call(model, p, (x[None],)).square().sum()

    parameters = parameters_of(model)
    found = vmap(grad(loss), (None, 0))(parameters, batch())
    for i, x in enumerate(batch()):
        for name, g in grad(loss)(parameters, x).items():
            require_same(found[name][i], g, (recipe, name, i))
    total = grad(lambda p: vmap(loss, (None, 0))(p, batch()).sum())(parameters)
    for name, g in total.items():
        torch.testing.assert_close(g, found[name].sum(0), rtol=1e-5, atol=1e-5)


def test_a_batch_has_the_random_bits_of_one_call():
    """Samples are alike: each draws with the random state of the layer's one forward."""
    model = network("fprop=mxfp8+sr*mxfp8 dgrad=bf16*bf16 wgrad=bf16*bf16")
    y = vmap(model)(torch.ones(3, 1, K) / 3)
    require_same(y[1:], y[:1].expand(2, 1, N), "samples")


def feed_forward(recipe: str, fuse: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(width=K, hidden=HIDDEN))
    mf.quantize_(model, recipe, keep="nothing", fuse=fuse)
    return model


def experts(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    return mf.MoE(K, 64, 4, 2, recipe=recipe).eval()  # training counts tokens, in place


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["apart", "fused", "experts"])
def test_feed_forwards_whose_layers_share_their_input(recipe, kind):
    def build():
        return experts(recipe) if kind == "experts" else feed_forward(recipe, kind == "fused")

    x = batch().requires_grad_()
    want = build()(x)
    want.sum().backward()
    got, pull = vjp(build(), batch())
    require_same(got, want, kind)
    require_same(pull(torch.ones_like(got))[0], x.grad, kind)
    if kind == "experts":
        return  # a batch of the router's products sums in another order
    model = build().eval()
    stacked = torch.stack([model(sample) for sample in batch()[:, None]])
    require_same(vmap(model)(batch()[:, None]), stacked, kind)


# ---- what raises ---------------------------------------------------------------------------------
def test_second_derivatives_and_tangents_are_errors():
    w = torch.randn(N, K)

    def run(x):
        return mf.linear(torch.tanh(x), w, None, "mxfp8").square().sum()

    with pytest.raises(RuntimeError, match="no second derivative through a quantized product"):
        jacrev(grad(run))(batch())
    for transform in (jacfwd(run), jacfwd(grad(run))):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            transform(batch())


@pytest.mark.parametrize("balance", ["bias", "loss", None])
def test_experts_in_training_are_an_error(balance):
    """Nothing is counted or kept. In evaluation the same calls pass, a batch as its samples.

    The router's sums are exact, so they have the same bits in any order. Zeros may have another
    sign.
    """
    moe, x = mf.MoE(K, 64, 4, 2, balance=balance, recipe="mxfp8"), batch().mul(4).round()
    with torch.no_grad():
        moe.router.weight.copy_(moe.router.weight.mul(64).round().div(64))

    def loss(p, x):
        return functional_call(moe, p, (x,)).square().sum()

    parameters = parameters_of(moe)
    calls = {
        "grad": lambda: grad(loss)(parameters, x),
        "vjp": lambda: vjp(moe, x)[0],
        "jacrev": lambda: jacrev(moe)(x),
        "vmap": lambda: vmap(moe)(x[:, None]),
        "vmap of grad": lambda: vmap(grad(loss), (None, 0))(parameters, x[:, None]),
    }
    for call in calls.values():
        with pytest.raises(
            NotImplementedError, match=r"^mf.MoE: expected evaluation mode .*counts"
        ):
            call()
        assert moe.router.loss is None
        assert not moe.router.counts.any()
    moe.eval()
    found = {name: call() for name, call in calls.items()}
    for i in range(BATCH):
        require_same(found["vmap"][i], moe(x[i : i + 1]), i)
        for name, g in grad(loss)(parameters, x[i : i + 1]).items():
            assert torch.equal(found["vmap of grad"][name][i], g), (name, i)


def test_batches_of_gradients_are_errors():
    message = "expected the gradients of one backward pass, got a batch of them"
    for make in (cases.linear_case, cases.mlp_case, cases.grouped_case, cases.experts_case):
        case = make("mxfp8", Options())
        (y,) = case.forward()
        leaves = [t for _, t in case.leaves()]
        with pytest.raises(NotImplementedError, match=message):
            torch.autograd.grad(y, leaves, y.new_ones(2, *y.shape), is_grads_batched=True)


def test_batches_of_none_and_weights_that_ranks_cut_are_errors():
    w = torch.randn(N, K)
    with pytest.raises(ValueError, match="a batch of one sample or more under vmap, got none"):
        vmap(lambda x: mf.linear(x, w, None, "mxfp8"))(torch.randn(0, 1, K))
    for make in (cases.linear_case, cases.grouped_case):
        case = make("mxfp8", Options(where=cases.ONE_RANK))
        leaves = {name: t.detach() for name, t in case.leaves()}
        with pytest.raises(
            NotImplementedError, match=r"do not pass through weights that ranks cut"
        ):
            vjp(lambda v, case=case: case.call({**case.values, **v}), leaves)
