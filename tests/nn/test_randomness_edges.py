"""Random bits repeat only where they must: in a recomputed forward, and where a state is restored.

A layer's gradients show its bits: with one x, one W and one gradient, other bits round otherwise.
"""

import copy
import pickle

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import nn
from torch.utils.checkpoint import checkpoint

RECIPE = "nvfp4"
STOCHASTIC_FORWARD = "fprop=nvfp4+sr*nvfp4 dgrad=nvfp4+sr*nvfp4 wgrad=nvfp4+sr+rht*nvfp4+sr+rht"


def data(rows=24, features=64):
    torch.manual_seed(3)
    return torch.randn(rows, features), torch.randn(rows, features)


def block(features=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, features))


def converted(recipe=RECIPE, model=None, **arguments):
    model = block() if model is None else model
    mf.quantize_(model, recipe, **arguments)
    return model


def gradients(run, parameters, x, g):
    parameters = list(parameters)
    return torch.autograd.grad(run(x), parameters, g)


def are_equal(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def require_all_differ(results):
    for i, a in enumerate(results):
        for b in results[:i]:
            assert not any(torch.equal(s, t) for s, t in zip(a, b) if s.dim() == 2)


# ---- however a model is called -------------------------------------------------------------------


class Trained(nn.Module):
    """A model whose root's forward is never called, as in some trainers."""

    def __init__(self):
        super().__init__()
        self.net = block()

    def training_step(self, x):
        return self.net(x)

    def parts(self, x):
        return self.net[2](torch.relu(self.net[0](x)))


@pytest.mark.parametrize(("name", "calls"), [("training_step", 1), ("parts", 2)])
def test_methods_beside_forward_draw_fresh_bits(name, calls):
    model = converted(model=Trained())
    x, g = data()
    run = getattr(model, name)
    require_all_differ([gradients(run, model.parameters(), x, g) for _ in range(4)])
    assert mf.training_state(model)["rng"].tolist() == [0, 4 * calls]


def test_a_part_that_trains_while_the_root_is_in_evaluation():
    model = converted(model=Trained())
    model.eval()
    model.net.train()
    x, g = data()
    require_all_differ([gradients(model.net, model.parameters(), x, g) for _ in range(3)])


def test_a_layer_that_is_called_twice_in_one_forward():
    layer = converted(model=nn.Sequential(nn.Linear(64, 64)))
    x, g = data()
    y, z = layer[0](x), layer[0](x)
    first, second = (torch.autograd.grad(t, layer[0].weight, g)[0] for t in (y, z))
    assert not torch.equal(first, second)


def test_a_layer_that_one_forward_of_the_model_calls_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.layer(x), self.layer(x)

    model = converted(model=Twice())
    x, g = data()
    first, second = (torch.autograd.grad(y, model.layer.weight, g)[0] for y in model(x))
    assert not torch.equal(first, second)
    state = mf.training_state(model)
    assert [value.tolist()[1] for value in state.values()] == [2]  # the count: one a draw


def test_compiled_parts_draw_fresh_bits():
    model = converted(model=Trained())
    model.net.compile(backend="aot_eager", fullgraph=True)
    x, g = data()
    require_all_differ([gradients(model.training_step, model.parameters(), x, g) for _ in range(4)])
    state = mf.training_state(model)
    later = gradients(model.training_step, model.parameters(), x, g)
    mf.load_training_state(model, state)
    assert are_equal(later, gradients(model.training_step, model.parameters(), x, g))


def test_a_part_that_is_compiled_after_an_eager_step_draws_fresh_bits():
    model = converted(model=Trained())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, g = data()
    results = []
    for step in range(4):
        results.append(gradients(model.training_step, model.parameters(), x, g))
        optimizer.step()
        if step == 0:
            model.net.compile(backend="aot_eager", fullgraph=True)
    require_all_differ(results)
    assert mf.training_state(model)["rng"].tolist() == [0, 4]


def test_compiled_parts_under_an_eager_root_are_the_eager_ones():
    models = [converted(model=nn.Sequential(block(), block())) for _ in range(2)]
    for part in models[1]:
        part.compile(backend="aot_eager", fullgraph=True)
    x, g = data()
    for _ in range(3):
        results = [gradients(m, m.parameters(), x, g) for m in models]
        assert are_equal(*results)
        for m in models:
            mf.step(m)


# ---- however a model is converted ----------------------------------------------------------------


def parts(seeds):
    """Converts the parts of a model one by one, with layers of equal names."""
    model = nn.ModuleDict({str(i): nn.ModuleDict({"mlp": block()}) for i in range(len(seeds))})
    for part, seed in zip(model.values(), seeds):
        converted(model=part["mlp"], seed=seed)
    return model


def test_parts_that_are_converted_one_by_one_draw_their_own_bits():
    model = parts(range(3))
    x, g = data()
    require_all_differ([gradients(p["mlp"], p.parameters(), x, g) for p in model.values()])
    mf.step(model)


def test_parts_with_the_same_bits_are_refused():
    model = parts([4, 5, 4])
    with pytest.raises(ValueError, match=r"'2.mlp.0' and '0.mlp.0' .* of '0' under seed 4;"):
        mf.step(model)
    model["2"].eval()
    mf.step(model)
    model.train()["0"].requires_grad_(False)  # an average of weights, for example
    mf.step(model)


def test_layers_with_the_same_bits_are_refused():
    layers = [mf.Linear(16, 16, recipe=RECIPE, name=name) for name in ("up", "down", "up")]
    mf.step(nn.Sequential(*layers[:2]))
    with pytest.raises(ValueError, match="'2' and '0' draw those of 'up' under seed 0"):
        mf.step(nn.Sequential(*layers))


@pytest.mark.parametrize("converts_first", [False, True])
def test_copies_of_converted_layers_are_refused(converts_first):
    model = parts([4])
    whole = nn.ModuleList([converted(model=block()) if converts_first else model])
    mf.step(whole)
    whole.append(copy.deepcopy(whole[0] if converts_first else model["0"]["mlp"][0]))
    with pytest.raises(ValueError, match="after layers are copied"):
        mf.step(whole)
    whole[1].eval()
    mf.step(whole)


def unnamed(seed=0):
    torch.manual_seed(1)
    experts = mf.MoE(64, 64, experts=2, top_k=1, shared_experts=1, recipe=RECIPE, seed=seed)
    layers = [mf.Linear(64, 64, recipe=RECIPE, seed=seed) for _ in range(2)]
    return nn.Sequential(*layers, nn.Sequential(experts, mf.MoE(64, 64, 2, 1, recipe=RECIPE)))


def test_layers_without_a_name_take_their_places():
    model, named = unnamed(), [layer for layer in unnamed().modules() if hasattr(layer, "fqn")]
    assert {layer.fqn for layer in named[:2]} == {"linear"}
    alone = model[0]
    mf.step(alone)  # has no name in itself
    mf.step(model)
    names = {name: layer for name, layer in model.named_modules() if hasattr(layer, "fqn")}
    for name, layer in names.items():
        assert layer.fqn == name.removesuffix("_product")
        assert layer.stream_id == layer.stream.item() == ops.stream(layer.fqn)
    assert len({layer.stream_id for layer in names.values()}) == len(names) == 11
    mf.step(nn.Sequential(nn.Identity(), model))  # keeps the names
    assert names["1"].fqn == "1"


def test_layers_without_a_name_resume():
    """Trains on, and from the state of the first step in a model that was built anew."""
    x, _ = data()

    def train(model, steps):
        for _ in range(steps):
            model(x).square().mean().backward()
            for p in model.parameters():
                p.data.sub_(0.1 * p.grad)
                p.grad = None
            mf.step(model)

    model = unnamed()
    train(model, 1)
    state, weights = mf.training_state(model), copy.deepcopy(model.state_dict())
    train(model, 2)
    resumed = unnamed()
    resumed.load_state_dict(weights)
    mf.load_training_state(resumed, state)
    train(resumed, 2)
    assert are_equal(model.parameters(), resumed.parameters())


def test_bits_do_not_depend_on_other_modules():
    """Converts a part that an outer module holds, and one that none holds."""
    outer = nn.ModuleDict({"inner": nn.Sequential(block())})
    held, alone = converted(model=outer["inner"][0]), converted()
    x, g = data()
    assert are_equal(*(gradients(m, m.parameters(), x, g) for m in (held, alone)))


def test_two_models_of_one_seed_are_equal():
    x, g = data()
    a, b = converted(), converted()
    assert are_equal(gradients(a, a.parameters(), x, g), gradients(b, b.parameters(), x, g))
    c = converted(seed=1)
    assert not are_equal(gradients(a, a.parameters(), x, g), gradients(c, c.parameters(), x, g))


# ---- copies and restored states ------------------------------------------------------------------


@pytest.mark.parametrize("forwards", range(5))
@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_goes_on_and_repeats_nothing(make, forwards):
    model = converted()
    x, g = data()
    past = [gradients(model, model.parameters(), x, g) for _ in range(forwards)]
    twin = make(model)
    own = gradients(twin, twin.parameters(), x, g)
    require_all_differ([*past, own])
    # The copied state equals the original's, and both advance from it.
    assert are_equal(own, gradients(model, model.parameters(), x, g))


def test_a_copied_part_holds_no_other_part():
    model = converted(model=nn.Sequential(block(), block()))
    sizes = [len(pickle.dumps(part)) for part in model]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


def test_a_restored_state_repeats():
    model = converted()
    x, g = data()
    gradients(model, model.parameters(), x, g)
    state = mf.training_state(model)
    runs = []
    for _ in range(2):
        runs.append([gradients(model, model.parameters(), x, g) for _ in range(2)])
        mf.load_training_state(model, state)
    for a, b in zip(*runs):
        assert are_equal(a, b)


# ---- recomputation -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("recipe", [RECIPE, STOCHASTIC_FORWARD])
def test_recomputed_forwards_in_flight_get_the_original_bits(recipe, is_reentrant, order):
    """Runs three forwards, then their backward passes in any order, as pipelines do."""
    model, twin = converted(recipe), converted(recipe)
    x, g = data()

    def backwards(outputs):
        return [torch.autograd.grad(outputs[i], leaves[i], g)[0] for i in order]

    leaves = [x.clone().requires_grad_() for _ in range(3)]
    want = backwards([twin(leaf) for leaf in leaves])
    for p in model.parameters():
        p.requires_grad_(True)
    outputs = [checkpoint(model, leaf, use_reentrant=is_reentrant) for leaf in leaves]
    if is_reentrant:  # does not work with autograd.grad
        for i in order:
            outputs[i].backward(g)
        got = [leaves[i].grad for i in order]
    else:
        got = backwards(outputs)
    assert are_equal(got, want)
    assert mf.training_state(model)["rng"].tolist() == [0, 3]


def test_the_first_checkpointed_block_of_a_training_step():
    """Begins a forward in the block itself: no root's hook runs before."""
    results = []
    for is_checkpointed in (False, True):
        model = converted(STOCHASTIC_FORWARD, Trained())
        x, g = data()
        run = model.net

        def run_checkpointed(x, run=run):
            return checkpoint(run, x, use_reentrant=False)

        for _ in range(2):
            results.append(
                gradients(run_checkpointed if is_checkpointed else run, model.parameters(), x, g)
            )
    assert are_equal(results[0], results[2])
    assert are_equal(results[1], results[3])


class CallsTwice(nn.Module):
    """Calls one block, and so each of its layers, twice."""

    def __init__(self):
        super().__init__()
        self.block = block()

    def forward(self, x):
        return self.block(self.block(x))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_recomputed_module_that_calls_a_layer_twice(is_reentrant):
    results = []
    for is_checkpointed in (False, True):
        model = converted(STOCHASTIC_FORWARD, CallsTwice())
        x, g = data()
        x.requires_grad_()
        y = checkpoint(model, x, use_reentrant=is_reentrant) if is_checkpointed else model(x)
        y.backward(g)
        results.append([x.grad, *(p.grad for p in model.parameters())])
        assert mf.training_state(model)["rng"].tolist() == [0, 2]
    assert are_equal(*results)


# ---- evaluation ----------------------------------------------------------------------------------


def forwards_that_train_nothing(model, x):
    model.eval()
    model(x)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    model.train()
    with torch.inference_mode():
        model(x)


@pytest.mark.parametrize("recipe", ["fp8_delayed", RECIPE, STOCHASTIC_FORWARD])
def test_evaluation_changes_no_state(recipe):
    model = converted(recipe)
    x, g = data()
    gradients(model, model.parameters(), x, g)
    mf.step(model)
    gradients(model, model.parameters(), x, g)
    before = {name: t.clone() for name, t in mf.training_state(model).items()}
    forwards_that_train_nothing(model, 100 * x)
    for name, value in mf.training_state(model).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("recipe", ["fp8_delayed", RECIPE])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_training_with_evaluation_in_between_is_the_same(recipe, is_compiled):
    x, g = data()
    results = []
    for evaluates in (False, True):
        model = converted(recipe)
        run = model
        if is_compiled:
            run = torch.compile(model, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            run(x).backward(g)
            if evaluates:
                model.eval()
                with torch.no_grad():
                    run(50 * x)
                model.train()
            optimizer.step()
            mf.step(model)
        results.append([*model.parameters(), *mf.training_state(model).values()])
    assert are_equal(*results)


def test_a_model_that_was_restored_in_parts():
    """Its random state goes with its layers: another recipe's state is that of a fresh model."""
    model, fresh = (nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in "123")) for _ in "12")
    mf.quantize_(model, "nvfp4", keep="nothing")
    for part in model:
        mf.restore_(part)
    for each in (model, fresh):
        mf.quantize_(each, "mxfp8", keep="nothing")
    mf.load_training_state(fresh, mf.training_state(model))
    assert mf.training_state(model) == {}
