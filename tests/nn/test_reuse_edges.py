"""Reused codes are current: after writes that torch does not count, and under threads."""

import copy
import threading

import minifloat as mf
import numpy as np
import pytest
import torch
from torch import nn

from tests.support.reuse_counts import K, N, casts, without_reuse
from tests.support.same_bits import require_same_numbers

MODES = {"eval": False, "train": True}


def layer(recipe="mxfp8", accumulate=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, bias=False))
    mf.quantize_(model, recipe, accumulate=accumulate)
    if accumulate == "main_grad":
        model[0].weight.main_grad = torch.zeros(N, K)
    return model


def batch(seed=1):
    torch.manual_seed(seed)
    return torch.randn(40, K)


def uncounted_writes(weight):
    """Writes to a weight without a change of weight._version."""
    shift = torch.randn(N, K)
    address = weight.data_ptr()

    def back_to_the_old_address():
        memory = weight.data
        weight.data = memory - shift
        assert weight.data_ptr() != address
        memory.copy_(weight.data)
        weight.data = memory
        assert weight.data_ptr() == address

    return {
        "data, in place": lambda: weight.data.add_(shift),
        "data, one element": lambda: weight.data[3, 5].add_(1000.0),
        "data, assigned": lambda: setattr(weight, "data", weight.data + shift),
        "data, the old address": back_to_the_old_address,
        "NumPy": lambda: weight.detach().numpy().__iadd__(shift.numpy()),
        "sign flips": lambda: weight.data.neg_(),
        "two rows swapped": lambda: weight.data.copy_(weight.data.flip(0)),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", uncounted_writes(nn.Parameter(torch.zeros(N, K))))
def test_no_uncounted_write_leaves_stale_codes(name, mode):
    model, x = layer(), batch()
    model.train(MODES[mode])
    for _ in range(4):
        y = model(x)
        if MODES[mode]:
            y.sum().backward()
    uncounted_writes(model[0].weight)[name]()
    for _ in range(3):
        require_same_numbers(model(x), without_reuse(model)(x))


def test_merging_an_adapter_as_peft_does():
    model, x = layer(), batch()
    model.eval()
    with torch.no_grad():
        before = [model(x) for _ in range(3)][-1]
        model[0].weight.data += 0.5
        merged = model(x)
        require_same_numbers(merged, without_reuse(model)(x))
        model[0].weight.data -= 0.5
        after = model(x)
    assert not torch.equal(before, merged)
    require_same_numbers(after, without_reuse(model)(x))


def test_another_recipe_is_followed():
    model, x = layer("mxfp8"), batch()
    with torch.no_grad():
        for _ in range(3):
            model(x)
        model[0].recipe = "nvfp4_mxfp8"
        for _ in range(3):
            require_same_numbers(model(x), without_reuse(model)(x))
        assert not torch.equal(model(x), layer("mxfp8")(x))
    with pytest.raises(ValueError, match="expected"):
        model[0].recipe = "mxfp9"


def test_a_shared_input_that_is_another_one_or_refilled():
    projections = nn.ModuleDict({n: nn.Linear(K, N) for n in ("q_proj", "k_proj", "v_proj")})
    mf.quantize_(projections, "mxfp8")
    q, k, v = projections.values()
    twins = without_reuse(projections)
    assert q.shared_input is k.shared_input is not None
    with torch.no_grad():
        z = torch.randn(8, K)
        q(z)
        z.data = torch.randn(4, K)
        assert k(z).shape == (4, N)
        require_same_numbers(v(z), twins.v_proj(z))

        z = torch.randn(8, K)
        q(z)
        z.data.mul_(-1)
        require_same_numbers(k(z), twins.k_proj(z))

        buffer = np.random.default_rng(0).standard_normal((8, K), dtype=np.float32)
        z = torch.from_numpy(buffer)
        for module, twin in ((q, twins.q_proj), (k, twins.k_proj), (v, twins.v_proj)):
            require_same_numbers(module(z), twin(z))
            buffer[:] = -2 * buffer[::-1]

        z = torch.randn(K, 8).t()  # not contiguous
        require_same_numbers(q(z), twins.q_proj(z))
        z.data.mul_(3)
        require_same_numbers(k(z), twins.k_proj(z))


@pytest.mark.parametrize("is_training", [False, True])
def test_threads_do_not_get_each_others_codes(is_training):
    """Runs one model in a thread in fp32 and in another under autocast."""
    model, x = layer().train(is_training), batch()
    want = {}
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            want[autocast] = without_reuse(model)(x).detach()
    wrong = []

    def run(autocast):
        for _ in range(400):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                if not torch.equal(model(x).detach(), want[autocast]):
                    wrong.append(autocast)

    threads = [threading.Thread(target=run, args=(autocast,)) for autocast in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- where there is no fingerprint: the rule of CUDA and of DTensors -----------------------------


@pytest.fixture
def no_fingerprints(monkeypatch):
    from minifloat.nn.cache import operand_cache as reuse

    monkeypatch.setattr(reuse, "COMPARES_BYTES", False)


def counted(model, run):
    twin = without_reuse(model)
    if hasattr(model[0].weight, "main_grad"):  # deepcopy leaves attributes of parameters out
        twin[0].weight.main_grad = model[0].weight.main_grad.clone()
    results = []
    count = casts(lambda: results.extend(run(model)), (N, K))
    for got, want in zip(results, run(twin), strict=True):
        require_same_numbers(got, want)
    return count


def gradient(weight):
    return getattr(weight, "main_grad", weight.grad)


@pytest.mark.usefixtures("no_fingerprints")
@pytest.mark.parametrize("accumulate", [None, "main_grad", "grad"])
def test_micro_batches_of_a_step_are_reused(accumulate):
    model = layer(accumulate=accumulate)
    counts = []
    for i in range(3):

        def step(m, i=i):
            m.zero_grad()
            losses = []
            for j in range(4):
                y = m(batch(10 * i + j))
                y.square().sum().backward()
                losses.append(y.detach())
            return [*losses, gradient(m[0].weight).clone()]

        counts.append(counted(model, step))
        with torch.no_grad():
            model[0].weight.sub_(0.01 * gradient(model[0].weight))
            if accumulate == "main_grad":
                model[0].weight.main_grad.zero_()
        mf.step(model)
    assert counts == [2, 1, 1]


@pytest.mark.usefixtures("no_fingerprints")
def test_main_grads_of_one_buffer_reuse_nothing():
    """Views share their count of writes, which then does not tell one weight's sums."""
    model = layer(accumulate="main_grad")
    buffer = torch.zeros(2 * N, K)
    model[0].weight.main_grad = buffer[:N]

    def step(m):
        for j in range(4):
            m(batch(j)).sum().backward()
            buffer[N:] += 1  # what another layer's backward does

    assert casts(lambda: step(model), (N, K)) == 4


@pytest.mark.usefixtures("no_fingerprints")
def test_nothing_is_reused_outside_of_training():
    model = layer()
    for mode, grad in ((False, False), (False, True), (True, False)):
        model.train(mode)
        with torch.set_grad_enabled(grad):
            assert casts(lambda: [model(batch()) for _ in range(4)], (N, K)) == 4


@pytest.mark.usefixtures("no_fingerprints")
@pytest.mark.parametrize("resets", ["None", "zero_", "main_grad.zero_"])
def test_updates_by_hand_through_data(resets):
    """Changes the weight in every iteration without torch's optimizers and mf.step."""
    accumulate = "main_grad" if "main_grad" in resets else None
    model, twin = layer(accumulate=accumulate), layer(accumulate=accumulate)
    twin[0].weight_codes = None
    for i in range(8):
        grads = []
        for m in (model, twin):
            m(batch(i)).square().sum().backward()
            weight = m[0].weight
            grads.append(gradient(weight).clone())
            weight.data -= 0.01 * gradient(weight)
            if resets == "None":
                weight.grad = None
            else:
                gradient(weight).zero_()
        require_same_numbers(*grads)


@pytest.mark.usefixtures("no_fingerprints")
def test_a_merge_between_two_steps():
    model = layer()
    for i in range(3):
        model(batch(i)).sum().backward()
    assert model[0].weight_codes.cached is not None
    for is_training in (True, False):
        model.train(is_training)
        model[0].weight.data += 0.5
        with torch.no_grad():
            require_same_numbers(model(batch()), without_reuse(model)(batch()))
        model[0].weight.data -= 0.5
    model.train()
    require_same_numbers(model(batch()), without_reuse(model)(batch()))


def test_swapped_tensors():
    """Loads a state dict by swap_tensors, which allows no weak reference."""
    model, x = layer(), batch()
    with torch.no_grad():
        for _ in range(3):
            model(x)
    state = {"0.weight": torch.randn(N, K)}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(state)
        model.to(torch.bfloat16).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.no_grad():
        require_same_numbers(model(x), without_reuse(model)(x))
    other = nn.Parameter(torch.randn(N, K))
    for _ in range(2):
        model(x)
    torch.utils.swap_tensors(model[0].weight, other)
    require_same_numbers(model(x), without_reuse(copy.deepcopy(model))(x))


def test_a_copied_layer_has_no_reference_to_its_originals_memory():
    """Copies the attributes of a layer separately, as torch does for a parametrized layer."""
    model, x = layer(), batch()
    for _ in range(3):
        model(x)
    codes = model[0].weight_codes
    assert codes.cached is not None
    assert copy.deepcopy(codes).cached is None
    attributes = copy.deepcopy(model[0].__dict__)
    assert attributes["weight_codes"].cached is None


def test_an_unknown_cache_is_refused_before_anything_is_written():
    x, history = torch.randn(40, K), torch.zeros(6, 17)
    with pytest.raises(ValueError, match="expected weight_cache as the id of a cache, or 0, got 7"):
        torch.ops.minifloat.linear(
            x, torch.randn(N, K), None, "fp8_delayed", amax_history=history, weight_cache=7 << 40
        )
    assert not history.any()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_refused_call_casts_nothing(autocast):
    """Refuses a bad x where the second read would cast the weight, which writes its amax."""
    model = nn.Sequential(nn.Linear(K, N, bias=False))
    mf.quantize_(model, "fp8_delayed")
    model(batch())
    history = model[0].amax_history
    history.zero_()
    refused = pytest.raises(ValueError, match=r"linear: expected weight .* for x")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), refused:
        model(torch.randn(40, K + 1))
    assert autocast or not history.any()  # autocast needs the codes before the op checks its input


def test_a_trace_has_no_number_of_a_cache():
    model, x = layer().eval(), batch()
    want = model(x)
    traced = torch.jit.trace(model, x, check_trace=False)
    model.load_state_dict(model.state_dict())  # which makes a new cache
    require_same_numbers(traced(x), want)
