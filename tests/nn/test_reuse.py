"""An unchanged weight is quantized once. Each result is compared, bit for bit, with the same model
that reuses nothing.
"""

import copy
import io

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.support.reuse_counts import RECIPES, K, N, casts, without_reuse
from tests.support.same_bits import require_same_numbers


def layer(recipe, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, dtype=dtype))
    mf.quantize_(model, recipe)
    return model


def batch(seed, rows=40, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.randn(rows, K, dtype=dtype, requires_grad=True)


def held(model):
    return model[0].weight_codes.cached


# ---- The weight ----------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_quantize_a_weight_once_a_step(recipe, autocast):
    model = layer(recipe)
    twin = without_reuse(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin)]

    def step(m, optimizer, i):
        grads = []
        for j in range(4):
            x = batch(10 * i + j)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = m(x)
            y.float().pow(2).sum().backward()
            grads += [y.detach(), x.grad]
        grads += [p.grad.clone() for p in m.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        mf.step(m)
        return grads + list(mf.training_state(m).values())

    counts = []
    for i in range(4):
        results = []
        counts.append(casts(lambda i=i, r=results: r.extend(step(model, optimizers[0], i)), (N, K)))
        for got, want in zip(results, step(twin, optimizers[1], i)):
            require_same_numbers(got, want)
    assert counts == [2, 1, 1, 1]  # the first step does not expect another micro-batch
    for p, q in zip(model.parameters(), twin.parameters()):
        require_same_numbers(p, q)


def test_without_micro_batches_nothing_is_held():
    model = layer("mxfp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        model(batch(i)).sum().backward()
        assert held(model) is None
        optimizer.step()


def test_nothing_stays_of_an_evaluation():
    model = layer("mxfp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        model.eval()
        with torch.no_grad():
            assert casts(lambda: [model(batch(j)) for j in range(3)], (N, K)) == 2
        assert held(model) is not None
        model.train()
        for _ in range(2):
            model(batch(i)).sum().backward()
            assert held(model) is None
            optimizer.step()


def changes(model):
    weight = model[0].weight
    other = {k: torch.randn_like(v) for k, v in model.state_dict().items()}

    def in_place():
        with torch.no_grad():
            weight.mul_(1.5)

    def new_memory():
        weight.data = weight.data * 2

    def uncounted():
        weight.data.mul_(3)
        mf.step(model)

    def assigned():
        model[0].weight = nn.Parameter(torch.randn(N, K))

    return {
        "in place": in_place,
        "new memory": new_memory,
        "uncounted, then mf.step": uncounted,
        "assigned": assigned,
        "load_state_dict": lambda: model.load_state_dict(other),
        "load_state_dict, assign": lambda: model.load_state_dict(other, assign=True),
        "to": lambda: model.to(torch.bfloat16).to(torch.float32),
        "fused optimizer": lambda: torch.optim.AdamW(model.parameters(), lr=0.3, fused=True).step(),
        "foreach optimizer": lambda: torch.optim.SGD(
            model.parameters(), lr=0.3, foreach=True
        ).step(),
    }


@pytest.mark.parametrize("name", changes(layer("mxfp8")))
def test_a_changed_weight_is_quantized_again(name):
    model = layer("mxfp8")
    x = batch(1)
    for _ in range(3):
        before = model(x)
        before.sum().backward()
    assert held(model) is not None
    changes(model)[name]()
    after = model(x)
    assert not torch.equal(before, after)
    for _ in range(3):
        require_same_numbers(model(x), without_reuse(model)(x))


def test_evaluation_first_then_gradients():
    model = layer("nvfp4")
    twin = without_reuse(model)
    x = batch(1)
    with torch.no_grad():
        for _ in range(3):
            require_same_numbers(model(x), twin(x))
    assert held(model)[4].numel() == 0  # only the codes that a forward reads
    for m in (model, twin):
        mf.load_training_state(m, {"rng": torch.tensor([0, 7])})
    got, want = (torch.autograd.grad(m(x).sum(), [x, *m.parameters()]) for m in (model, twin))
    for a, b in zip(got, want):
        require_same_numbers(a, b)
    assert held(model)[4].numel() > 0


def test_frozen_weights_and_enabled_gradients():
    model = layer("mxfp8").requires_grad_(False)
    twin = without_reuse(model)
    x = batch(1)
    for _ in range(2):
        require_same_numbers(*(torch.autograd.grad(m(x).sum(), x)[0] for m in (model, twin)))
    for m in (model, twin):
        m.requires_grad_(True)
    got, want = (torch.autograd.grad(m(x).sum(), [x, *m.parameters()]) for m in (model, twin))
    for a, b in zip(got, want):
        require_same_numbers(a, b)


def test_a_stochastic_weight_is_not_kept():
    model = layer("fprop=mxfp8*mxfp8+sr dgrad=mxfp8*mxfp8 wgrad=mxfp8*mxfp8")
    assert model[0].weight_codes is None
    assert casts(lambda: [model(batch(i)) for i in range(3)], (N, K)) == 3


def test_other_parameters_are_never_reused():
    model = layer("mxfp8")
    other = {"0.weight": torch.randn(N, K), "0.bias": torch.zeros(N)}
    x = batch(1)
    for _ in range(3):
        model(x)
    assert casts(lambda: torch.func.functional_call(model, other, x), (N, K)) == 1
    primary = nn.Sequential(nn.Linear(64, 64))
    mf.quantize_(primary, "mxfp8_2d", primary=True)
    assert primary[0].weight_codes is None


def test_delayed_scales_are_followed():
    """Checks codes after mf.step and after another state is loaded: the active amax differs."""
    model = layer("fp8_delayed")
    twin = without_reuse(model)
    x = batch(1)

    def require_alike():
        for _ in range(3):
            for m in (model, twin):
                m(x).sum().backward()
            require_same_numbers(model(x), twin(x))
            require_same_numbers(model[0].amax_history, twin[0].amax_history)

    require_alike()
    assert held(model) is not None
    for m in (model, twin):
        mf.step(m)
    require_alike()
    state = {name: 2 * value for name, value in mf.training_state(model).items()}
    for m in (model, twin):
        mf.load_training_state(m, state)
    require_alike()


def test_mixed_dtypes_without_autocast():
    model = layer("mxfp8")
    twin = without_reuse(model)
    x = batch(1, dtype=torch.bfloat16)
    for _ in range(3):
        got, want = (torch.autograd.grad(m(x).sum(), [x, *m.parameters()]) for m in (model, twin))
        for a, b in zip(got, want):
            assert a.dtype == b.dtype
            require_same_numbers(a, b)


def test_modes_do_not_share():
    model = layer("mxfp8")
    x = batch(1)
    with torch.inference_mode():
        for _ in range(3):
            model(x)
    model(x).sum().backward()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            require_same_numbers(model(x), without_reuse(model)(x))
        require_same_numbers(model(x), without_reuse(model)(x))


def test_copies_and_pickles_hold_nothing():
    model = layer("mxfp8")
    for i in range(3):
        model(batch(i))
    assert held(model) is not None
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
    for twin in twins:
        assert held(twin) is None
        with torch.no_grad():
            twin[0].weight.mul_(2)
        for i in range(3):
            require_same_numbers(twin(batch(i)), without_reuse(twin)(batch(i)))
    assert type(mf.restore_(model)[0]) is nn.Linear
    assert not {"weight_codes", "shared_input", "stream_id"} & model[0].__dict__.keys()
