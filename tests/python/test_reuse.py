"""What layers quantize once: an unchanged weight, and the input of sibling projections. Each result
is compared, bit for bit, with the same model that reuses nothing.
"""

import copy
import gc
import io
from collections import Counter

import minifloat as mf
import pytest
import torch
from minifloat.train.config import ModelConfig
from minifloat.train.model import Attention, FeedForward, build_model, rotary_table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

RECIPES = [
    "fp8_delayed",
    "nvfp4",
    "mxfp8",
    "fp8_rowwise",
    "fp8_rowwise_gw_hp",
    "mxfp4",
    "nvfp4_pow2",
    "mxfp8_2d",
]
K, N = 48, 80


class Casts(TorchDispatchMode):
    """Counts quantizations by the shape of what is quantized."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.minifloat.quantize.default:
            self.count[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def casts(run, shape):
    with Casts() as seen:
        run()
    return seen.count[shape]


def without_reuse(model):
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, mf.Linear):
            module.weight_codes = module.shared_input = None
    return twin


def layer(recipe, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, dtype=dtype))
    mf.quantize_(model, recipe, verbose=False)
    return model


def batch(seed, rows=40, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.randn(rows, K, dtype=dtype, requires_grad=True)


def held(model):
    return model[0].weight_codes.codes


def require_same(a, b):
    assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


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
            require_same(got, want)
    assert counts == [2, 1, 1, 1]  # the first step cannot know that it has another micro-batch
    for p, q in zip(model.parameters(), twin.parameters()):
        require_same(p, q)


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
        require_same(model(x), without_reuse(model)(x))


def test_evaluation_first_then_gradients():
    model = layer("nvfp4")
    twin = without_reuse(model)
    x = batch(1)
    with torch.no_grad():
        for _ in range(3):
            require_same(model(x), twin(x))
    assert held(model)[4].numel() == 0  # only what a forward reads
    for m in (model, twin):
        mf.load_training_state(m, {"rng": torch.tensor([0, 7])})
    got, want = (torch.autograd.grad(m(x).sum(), [x, *m.parameters()]) for m in (model, twin))
    for a, b in zip(got, want):
        require_same(a, b)
    assert held(model)[4].numel() > 0


def test_frozen_weights_and_gradients_turned_on():
    model = layer("mxfp8").requires_grad_(False)
    twin = without_reuse(model)
    x = batch(1)
    for _ in range(2):
        require_same(*(torch.autograd.grad(m(x).sum(), x)[0] for m in (model, twin)))
    for m in (model, twin):
        m.requires_grad_(True)
    got, want = (torch.autograd.grad(m(x).sum(), [x, *m.parameters()]) for m in (model, twin))
    for a, b in zip(got, want):
        require_same(a, b)


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
    mf.quantize_(primary, "mxfp8_2d", primary=True, verbose=False)
    assert primary[0].weight_codes is None


def test_delayed_scales_are_followed():
    """A weight's codes are of the amax in force: after mf.step, and after another state."""
    model = layer("fp8_delayed")
    twin = without_reuse(model)
    x = batch(1)

    def require_alike():
        for _ in range(3):
            for m in (model, twin):
                m(x).sum().backward()
            require_same(model(x), twin(x))
            require_same(model[0].amax_history, twin[0].amax_history)

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
            require_same(a, b)


def test_modes_do_not_share():
    model = layer("mxfp8")
    x = batch(1)
    with torch.inference_mode():
        for _ in range(3):
            model(x)
    model(x).sum().backward()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            require_same(model(x), without_reuse(model)(x))
        require_same(model(x), without_reuse(model)(x))


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
            require_same(twin(batch(i)), without_reuse(twin)(batch(i)))
    assert type(mf.restore_(model)[0]) is nn.Linear
    assert not {"weight_codes", "shared_input", "stream_id"} & model[0].__dict__.keys()


# ---- The input -----------------------------------------------------------------------------------

CONFIG = ModelConfig(dim=64, layers=1, heads=4, kv_heads=2, ffn=96, vocab=64)
TABLE = rotary_table(16, 16)


def attention(recipe="nvfp4"):
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": Attention(CONFIG)})
    mf.quantize_(model, recipe, verbose=False)
    return model


def hidden(seed=1):
    torch.manual_seed(seed)
    return torch.randn(2, 15, 64, requires_grad=True)


def gradients(model, x, run):
    return torch.autograd.grad(run(x).sum(), [x, *model.parameters()])


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "fp8_delayed"])
def test_q_k_and_v_quantize_their_input_once(recipe):
    model = attention(recipe)
    twin = without_reuse(model)
    x = hidden()
    with torch.no_grad():
        assert casts(lambda: model.attention(x, TABLE), (30, 64)) == 2  # one for wo's
        assert casts(lambda: twin.attention(x, TABLE), (30, 64)) == 4
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got, want = (
                gradients(m, x, lambda x, m=m: m.attention(x, TABLE)) for m in (model, twin)
            )
        for a, b in zip(got, want):
            require_same(a, b)
    assert model.attention.wq.shared_input.slot is None  # all three have read it
    assert model.attention.wo.shared_input is None


def test_names_of_other_models():
    torch.manual_seed(0)
    model = nn.ModuleDict({n: nn.Linear(64, 32) for n in ("q_proj", "k_proj", "v_proj", "o_proj")})
    model["mlp"] = FeedForward(CONFIG)
    mf.quantize_(model, "*: mxfp8; v_proj: nvfp4", verbose=False)
    assert model.q_proj.shared_input is model.k_proj.shared_input is not None
    assert model.v_proj.shared_input is None  # another recipe
    assert model.o_proj.shared_input is None
    assert model.mlp.w1.shared_input is model.mlp.w3.shared_input is not None
    x = hidden()
    with torch.no_grad():
        assert casts(lambda: [model.q_proj(x), model.v_proj(x), model.k_proj(x)], (30, 64)) == 2
        assert casts(lambda: model.mlp(x), (30, 64)) == 1


def test_different_inputs_are_each_quantized():
    model = attention()
    a = model.attention
    x, y = hidden(1), hidden(2)
    with torch.no_grad():
        for run in (lambda m: m.wq(x), lambda m: m.wk(y), lambda m: m.wv(y), lambda m: m.wq(y)):
            require_same(run(a), run(without_reuse(a)))
        a.wq(x)
        x.mul_(2)  # a write between the siblings
        require_same(a.wk(x), without_reuse(a).wk(x))
        require_same(a.wk(x.clone()), without_reuse(a).wk(x))
    frozen = attention()
    frozen.attention.wk.requires_grad_(False)  # its input has no columnwise reader
    got, want = (
        torch.autograd.grad(
            m.attention(y, TABLE).sum(), [y, *(p for p in m.parameters() if p.requires_grad)]
        )
        for m in (frozen, without_reuse(frozen))
    )
    for p, q in zip(got, want):
        require_same(p, q)


def test_an_input_that_not_all_read_is_let_go():
    a = attention().attention
    x = hidden().detach()
    with torch.no_grad():
        a.wq(x)
        assert a.wq.shared_input.slot is not None
        del x
        gc.collect()
        assert a.wq.shared_input.slot is None


def test_stochastic_and_delayed_inputs_are_each_layers_own():
    own = "fprop=mxfp8+sr*mxfp8 dgrad=mxfp8*mxfp8 wgrad=mxfp8*mxfp8"
    assert attention(own).attention.wq.shared_input is None
    assert attention("fp8_delayed").attention.wq.shared_input is None


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant, early_stop):
    torch.manual_seed(0)
    model = build_model(CONFIG, 16, 1, "cpu")
    mf.quantize_(model, "nvfp4", verbose=False)
    twin = without_reuse(model)
    block = model.layers[0]
    options = {} if reentrant else {"early_stop": early_stop}
    for i in range(3):
        x = hidden(i)
        for m in (model, twin):
            mf.load_training_state(m, {"rng": torch.tensor([0, i])})
        y = checkpoint(block, x, model.rotary, use_reentrant=reentrant, **options)
        y.sum().backward()
        grads = [x.grad.clone(), *(p.grad.clone() for p in block.parameters())]
        x.grad = None
        twin.layers[0](x, twin.rotary).sum().backward()
        want = [x.grad, *(p.grad for p in twin.layers[0].parameters())]
        for a, b in zip(grads, want):
            require_same(a, b)
        model.zero_grad()
        twin.zero_grad()


def test_copies_of_a_model_share_among_themselves():
    model = attention()
    twin = copy.deepcopy(model)
    assert twin.attention.wq.shared_input is twin.attention.wv.shared_input
    assert twin.attention.wq.shared_input is not model.attention.wq.shared_input


def test_hooks_see_every_projection():
    model = attention()
    seen = []
    for name in ("wq", "wk", "wv"):
        layer_ = getattr(model.attention, name)
        layer_.register_forward_hook(lambda m, i, o, name=name: seen.append(name))
    model.attention(hidden(), TABLE)
    assert seen == ["wq", "wk", "wv"]
