"""Delayed scaling against a loop in Python, and the training state through checkpoints."""

import copy
import math
import warnings

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import nn

from tests.support.worlds import run_world

FLT_MAX = torch.finfo(torch.float32).max


def delayed_amax(history, algorithm, margin):
    """Computes the rule for one operand. history: the active amax, then newest first."""
    previous, *seen = history
    usable = [h for h in seen if math.isfinite(h) and h != 0]
    if not usable:
        return previous
    best = max(usable) if algorithm == "max" else usable[0]
    return min(best * 2.0**margin, FLT_MAX)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 1, 126])
def test_histories_roll_as_a_loop_does(algorithm, margin):
    pool = torch.tensor([0.0, 0.0, 1.5, 3.25, 1e-40, 3e38, float("inf"), float("nan")])
    torch.manual_seed(0)
    for length in (1, 2, 7):
        whole = pool[torch.randint(len(pool), (200, 1 + length))]
        rolled = whole.clone()
        histories = list(rolled.view(20, 2, 5, 1 + length))
        versions = [history._version for history in histories]
        ops.roll_amax_histories(histories, algorithm=algorithm, margin=margin)
        assert all(h._version > before for h, before in zip(histories, versions, strict=True))
        got = rolled
        want = torch.tensor([delayed_amax(row.tolist(), algorithm, margin) for row in whole])
        assert torch.equal(got[:, 0].nan_to_num(-1.0), want.nan_to_num(-1.0))
        assert not got[:, 1].any()
        assert torch.equal(got[:, 2:].nan_to_num(-1.0), whole[:, 1:-1].nan_to_num(-1.0))


def test_a_random_state_advances_and_is_copied():
    state = torch.tensor([-3, 41])
    version = state._version
    copy = ops.advance_random_state(state)
    assert state.tolist() == copy.tolist() == [-3, 42]
    assert state._version > version
    assert copy.data_ptr() != state.data_ptr()
    for wrong in (torch.tensor([1]), torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="expected state as int64"):
            ops.advance_random_state(wrong)
    with pytest.raises(ValueError, match="16 contiguous bytes of state"):
        ops.advance_random_state(torch.arange(4)[::2])


def test_wrong_histories_are_refused():
    history = torch.rand(6, 4)
    for histories, options, match in (
        ([history], {"algorithm": "newest"}, "expected algorithm 'max' or 'most_recent'"),
        ([history], {"margin": -1}, "expected a margin of 0 to 126"),
        ([history.double()], {}, "expected histories as float32"),
        ([history[:, :1]], {}, "with one step or more"),
        ([history, history[:3]], {}, "of one shape"),
        ([history, torch.rand(4, 6).t()], {}, "contiguous bytes of each history"),
    ):
        with pytest.raises(ValueError, match=match):
            ops.roll_amax_histories(histories, **options)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_training_against_a_loop(algorithm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16, bias=False))
    mf.quantize_(
        model,
        "fp8_delayed",
        delayed_scaling=mf.nn.DelayedScaling(3, algorithm, margin=1),
    )
    weight = model[0].weight
    active, seen = [0.0] * 6, [[] for _ in range(6)]
    for scale in (1.0, 8.0, 0.25, 0.0, 3.0, 100.0, 1.0):
        running = [0.0] * 6
        for _ in range(2):
            x, g = scale * torch.randn(5, 24), scale * torch.randn(5, 16)
            x.requires_grad_()
            model(x).backward(g)
            for i, t in enumerate((x, weight, g, weight, g, x)):
                running[i] = max(running[i], t.abs().max().item())
        mf.step(model)
        for i in range(6):
            seen[i] = [running[i], *seen[i]][:3]
            active[i] = delayed_amax([active[i], *seen[i]], algorithm, 1)
        history = model[0].amax_history
        assert history[:, 0].tolist() == active
        assert not history[:, 1].any()
        for i in range(6):
            assert history[i, 2:].tolist() == (seen[i] + [0.0, 0.0])[:2]
        with torch.no_grad():
            weight.mul_(1.5)


def test_products_use_the_active_amax():
    torch.manual_seed(0)
    layer = mf.Linear(24, 16, bias=False, recipe="fp8_delayed")
    x = torch.randn(5, 24)
    layer(x)
    mf.step(layer)
    active = layer.amax_history[:, 0]
    y = layer(10 * x)  # ten times the active amax: saturates
    a = mf.tensor.quantize(10 * x, "e4m3/tensor", amax=active[0])
    b = mf.tensor.quantize(layer.weight.detach(), "e4m3/tensor", amax=active[1])
    assert torch.equal(y, mf.tensor.scaled_mm(a, b, fast=True, out_dtype=torch.float32))


def test_step_without_histories_does_nothing():
    model = nn.Sequential(nn.Linear(4, 4))
    mf.step(model)
    mf.quantize_(model, "nvfp4")
    model(torch.ones(2, 4)).sum().backward()
    before = {**model.state_dict(), **mf.training_state(model)}
    before = {name: t.clone() for name, t in before.items()}
    mf.step(model)
    after = {**model.state_dict(), **mf.training_state(model)}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], t) for name, t in before.items())


def build(recipe="0: nvfp4; 2: fp8_delayed", length=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
    mf.quantize_(model, recipe, delayed_scaling=mf.nn.DelayedScaling(length), seed=5)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model, optimizer, n, seed):
    torch.manual_seed(seed)
    for _ in range(n):
        optimizer.zero_grad()
        model(torch.randn(16, 24)).square().mean().backward()
        optimizer.step()
        mf.step(model)


def test_resume_equals_an_uninterrupted_run():
    whole = build()
    steps(*whole, 3, 1)
    parameters, optimizer, state = copy.deepcopy(
        (whole[0].state_dict(), whole[1].state_dict(), mf.training_state(whole[0]))
    )
    assert set(state) == {"rng", "2.amax_history"}
    resumed = build()
    resumed[0].load_state_dict(parameters)
    resumed[1].load_state_dict(optimizer)
    mf.load_training_state(resumed[0], state)
    steps(*whole, 3, 2)
    steps(*resumed, 3, 2)
    for a, b in zip(whole[0].parameters(), resumed[0].parameters()):
        assert torch.equal(a, b)
    for a, b in zip(mf.training_state(whole[0]).values(), mf.training_state(resumed[0]).values()):
        assert torch.equal(a, b)


def test_training_state_is_a_copy():
    model, optimizer = build()
    state = mf.training_state(model)
    steps(model, optimizer, 1, 0)
    assert state["rng"].tolist() == [5, 0]
    assert mf.training_state(model)["rng"].tolist() == [5, 1]


def test_the_seed_is_saved_before_the_rank_is_mixed_in():
    states = []
    for rank in (0, 1):
        layer = nn.Sequential(nn.Linear(4, 4))
        mf.quantize_(layer, "nvfp4", seed=11, data_parallel_rank=rank)
        states.append((mf.training_state(layer)["rng"], layer[0].rng_state.tensor))
        mf.load_training_state(layer, {"rng": torch.tensor([12, 7])})
        assert layer[0].rng_state.tensor[1] == 7
        states.append((None, layer[0].rng_state.tensor.clone()))
    assert torch.equal(states[0][0], states[2][0])
    assert states[1][1][0] != states[3][1][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rng": None}, r"missing \['rng'\]"),
        ({"3.amax_history": torch.zeros(6, 4)}, "not of this model"),
        ({"2.amax_history": torch.zeros(6, 5)}, r"\(6, 4\)"),
        ({"rng": torch.zeros(2)}, "int64"),
    ],
)
def test_a_state_of_another_model_is_refused(change, message):
    model, _ = build()
    state = {k: v for k, v in (mf.training_state(model) | change).items() if v is not None}
    before = mf.training_state(model)
    with pytest.raises(ValueError, match=message):
        mf.load_training_state(model, state)
    assert all(torch.equal(before[k], v) for k, v in mf.training_state(model).items())


# ---- two ranks -----------------------------------------------------------------------------------


def check_ranks_agree_on_amax_and_draw_other_bits(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8))
    mf.quantize_(model, "0: fp8_delayed; 1: nvfp4")
    x = torch.full((4, 24), 2.0 + rank)
    if rank == 0:
        x[0, 0] = float("nan")
    y = model[0](x).detach()
    assert y.isnan().any() == (rank == 0)
    model[0].amax_history[1, 1] = 0.5 * (rank + 1)
    mf.step(model)
    history = model[0].amax_history[:2, :3].tolist()
    assert math.isnan(history[0][2])  # a NaN of one rank reaches all
    assert history[1] == [1.0, 0.0, 1.0]
    states = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    torch.distributed.all_gather(states, model[1].rng_state.tensor)
    assert not torch.equal(*states)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert mf.training_state(wrapped).keys() == mf.training_state(model).keys()


def test_ranks_agree_on_amax_and_draw_other_bits():
    run_world(2, check_ranks_agree_on_amax_and_draw_other_bits)


def delayed(recipe="fp8_delayed"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    mf.quantize_(model, recipe)
    return model


def evaluation_warnings(model, is_training=False):
    """Returns the texts of the warnings of a forward without gradients, in either mode."""
    model.train(is_training)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        model(torch.ones(8, 64))
    model.train()
    return {str(warning.message) for warning in caught}


def test_an_evaluation_without_amax_histories_warns_until_there_are_some():
    model, x = delayed(), torch.randn(8, 64)
    assert not evaluation_warnings(model, is_training=True)
    texts = sorted(evaluation_warnings(model))
    assert [text[:27] for text in texts] == [f"minifloat: {i}, under delayed" for i in (0, 2)]
    assert all("scale of 1; call mf.load_training_state" in text for text in texts)
    mf.load_training_state(model, mf.training_state(model))  # of a model that has none either
    assert evaluation_warnings(model)
    model(x).sum().backward()
    mf.step(model)
    assert not evaluation_warnings(model)
    assert not evaluation_warnings(copy.deepcopy(model))

    other = delayed()
    other.load_state_dict(model.state_dict())
    assert evaluation_warnings(other)
    assert not torch.equal(other(x), model(x))
    mf.load_training_state(other, mf.training_state(model))
    assert not evaluation_warnings(other)
    assert torch.equal(other(x), model(x))


def test_no_warning_where_the_forward_reads_no_history():
    backward_alone = "fprop=mxfp8*mxfp8 dgrad=e5m2/tensor+delayed*e4m3/tensor wgrad=mxfp8*mxfp8"
    assert not evaluation_warnings(delayed(backward_alone))
    assert not evaluation_warnings(delayed("mxfp8"))
