"""Arguments of conversion and of training state are checked first: on any error nothing changes."""

import copy

import minifloat as mf
import pytest
import torch
from minifloat.nn.convert import quantize as convert
from torch import nn


def build():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(32, 16), nn.Linear(16, 8))


def snapshot(model):
    """Records all that conversion may change, with the identity of each object."""
    state = {}
    for name, module in model.named_modules():
        state[name] = (
            type(module),
            {k: v for k, v in module.__dict__.items() if isinstance(v, (bool, int, float, str))},
            sorted(module.__dict__),
            {k: id(v) for k, v in module._parameters.items()},
            {k: id(v) for k, v in module._buffers.items()},
            [id(hook) for hook in module._forward_pre_hooks.values()],
            [id(hook) for hook in module._forward_hooks.values()],
        )
    return state


WRONG = [
    ({"model": nn.Linear}, TypeError, "quantize_: expected a torch.nn.Module"),
    ({"recipe": 3}, TypeError, "expected its text as str"),
    ({"filter_fqns": 3}, TypeError, "filter_fqns: expected a list of names, got 3"),
    (
        {"filter_fqns": ["1", 2]},
        TypeError,
        "filter_fqns: an entry: expected its text as str, got int",
    ),
    ({"filter_fn": "1"}, TypeError, "filter_fn: expected a function"),
    ({"primary": "no"}, TypeError, "primary: expected True or False, got 'no'"),
    ({"keep_high_precision_init": 1}, TypeError, "keep_high_precision_init: expected True"),
    ({"keep_high_precision_init": True}, ValueError, "expected primary=True with it"),
    ({"gather": 3}, ValueError, "gather: expected one of codes, compute_dtype, got 3"),
    ({"seed": 1.9}, TypeError, "seed: expected an int"),
    ({"seed": None}, TypeError, "seed: expected an int"),
    ({"data_parallel_rank": "a"}, TypeError, "data_parallel_rank: expected an int, got 'a'"),
    ({"data_parallel_rank": 1.0}, TypeError, "data_parallel_rank: expected an int, got 1.0"),
    ({"data_parallel_rank": True}, TypeError, "data_parallel_rank: expected an int, got True"),
    ({"data_parallel_rank": -1}, ValueError, "data_parallel_rank: expected at least 0, got -1"),
    (
        {"delayed_scaling": 16},
        TypeError,
        "delayed_scaling: expected an mf.nn.DelayedScaling, got 16",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_quantize_checks_first(arguments, error, message):
    model = build()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        mf.quantize_(**({"model": model, "recipe": "fp8_delayed"} | arguments))
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"amax_history_length": 1.5}, TypeError, "amax_history_length: expected an int, got 1.5"),
        ({"amax_history_length": 0}, ValueError, "amax_history_length: expected at least 1 step"),
        (
            {"amax_algorithm": 3},
            ValueError,
            "amax_algorithm: expected one of max, most_recent, got 3",
        ),
        ({"margin": 1.5}, TypeError, "margin: expected an int, got 1.5"),
        ({"margin": -1}, ValueError, "margin: expected 0 to 126 powers of two, got -1"),
        ({"margin": 127}, ValueError, "margin: expected 0 to 126 powers of two, got 127"),
    ],
)
def test_delayed_scaling_checks_its_fields(arguments, error, message):
    with pytest.raises(error, match=message):
        mf.nn.DelayedScaling(**arguments)


def fail_at(monkeypatch, name, n):
    """Makes the nth call of a function of the conversion run out of memory."""
    original, calls = getattr(convert, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) == n:
            raise torch.OutOfMemoryError("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(convert, name, failing)


@pytest.mark.parametrize("second", ["", "model", "part"])
@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("adopt", 1),
        ("adopt", 3),
        ("make_primary", 3),
        ("share_random_state", 1),
        ("share_inputs", 1),
        ("disable_fast_paths_in", 1),
    ],
)
def test_a_failure_in_the_middle_is_undone(monkeypatch, name, n, second):
    model = build()
    if second == "model":
        mf.quantize_(model, "0.layers.0.*: nvfp4")
    if second == "part":  # its hooks stay, and those of the failed call go
        mf.quantize_(model[0], "layers.0.*: nvfp4")
    before, values = snapshot(model), copy.deepcopy(model.state_dict())
    fail_at(monkeypatch, name, n)
    arguments = {"primary": True, "keep_high_precision_init": True}
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        mf.quantize_(model, "nvfp4", **arguments)
    assert snapshot(model) == before
    assert all(torch.equal(values[key], value) for key, value in model.state_dict().items())
    monkeypatch.undo()
    mf.quantize_(model, "nvfp4", **arguments)
    model(torch.randn(2, 3, 32)).sum().backward()


def test_a_history_that_does_not_fit_is_undone(monkeypatch):
    zeros, calls = torch.zeros, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("injected")
        return zeros(*args, **kwargs)

    model = build()
    before = snapshot(model)
    monkeypatch.setattr(torch, "zeros", failing)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        mf.quantize_(model, "fp8_delayed")
    assert snapshot(model) == before


# ---- one model, one seed -------------------------------------------------------------------------


def test_a_second_call_has_the_first_seed():
    model = build()
    mf.quantize_(model, "1: nvfp4", seed=1)
    before = snapshot(model)
    for arguments in ({"seed": 2}, {}):
        with pytest.raises(ValueError, match=r"seed: expected 1, .* got"):
            mf.quantize_(model, "2: nvfp4", **arguments)
        with pytest.raises(ValueError, match=r"data_parallel_rank: expected 0, .* got 3"):
            mf.quantize_(model, "2: nvfp4", seed=1, data_parallel_rank=3)
        assert snapshot(model) == before
    mf.quantize_(model, "0.layers.0.*: mxfp8", seed=2)  # draws no random bits
    mf.quantize_(model, "2: nvfp4", seed=1, data_parallel_rank=0)
    assert mf.training_state(model)["rng"].tolist() == [1, 0]


# ---- the other functions -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"in_features": 1.5}, TypeError, "in_features: expected an int"),
        ({"out_features": -1}, ValueError, "out_features: expected at least 0"),
        ({"bias": "no"}, TypeError, "bias: expected True or False"),
        ({"recipe": 3}, TypeError, "expected its text"),
        ({"recipe": "nvfp5"}, ValueError, "nvfp5"),
        ({"name": 3}, TypeError, "name: expected its text as str, got int"),
        ({"seed": 1.5}, TypeError, "seed: expected an int"),
        ({"dtype": torch.float16}, ValueError, "dtype: expected float32 or bfloat16"),
    ],
)
def test_linear_checks_first(arguments, error, message):
    with pytest.raises(error, match=message):
        mf.Linear(**({"in_features": 16, "out_features": 8, "recipe": "mxfp8"} | arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"recipe": "fp8_delayed"}, ValueError, "delayed"),
        ({"recipe": 3}, TypeError, "expected its text"),
        ({"keep_high_precision_init": "no"}, TypeError, "keep_high_precision_init: expected"),
        ({"seed": 1.5}, TypeError, "seed: expected an int"),
    ],
)
def test_quantized_model_init_checks_first(arguments, error, message):
    init = nn.Linear.__init__
    with (
        pytest.raises(error, match=message),
        mf.nn.quantized_model_init(**{"recipe": "mxfp8"} | arguments),
    ):
        pass
    assert nn.Linear.__init__ is init


def test_quantized_model_init_is_not_nested():
    init = nn.Linear.__init__
    with mf.nn.quantized_model_init("mxfp8"):
        with (
            pytest.raises(ValueError, match="expected no other"),
            mf.nn.quantized_model_init("nvfp4"),
        ):
            pass
        assert mf.Recipe("mxfp8") == nn.Linear(32, 32).recipe
    assert nn.Linear.__init__ is init


@pytest.mark.parametrize(
    "call",
    [
        mf.restore_,
        mf.step,
        mf.training_state,
        lambda model: mf.load_training_state(model, {}),
    ],
)
def test_a_module_is_expected(call):
    for wrong in (None, "model", [nn.Linear(2, 2)], nn.Linear):
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
            call(wrong)


def test_step_checks_its_group_first():
    model = build()
    mf.quantize_(model, "fp8_delayed")
    model(torch.randn(2, 3, 32))
    before = mf.training_state(model)
    with pytest.raises(TypeError, match="expected a process group"):
        mf.step(model, "world")
    assert all(torch.equal(before[key], v) for key, v in mf.training_state(model).items())


HISTORY = torch.ones(6, 17)


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (HISTORY.tolist(), TypeError, "expected a tensor"),
        (None, TypeError, "expected a tensor"),
        (HISTORY.numpy(), TypeError, "expected a tensor"),
        (HISTORY.double(), ValueError, "float32"),
        (HISTORY.to("meta"), ValueError, "dense tensor with values"),
        (HISTORY.to_sparse(), ValueError, "dense tensor with values"),
        (-HISTORY, ValueError, "at least 0"),
    ],
)
def test_load_training_state_checks_first(entry, error, message):
    model = build()
    mf.quantize_(model, "*: fp8_delayed; 1: nvfp4")
    before = mf.training_state(model)
    bad = {key: value + 3 for key, value in before.items()} | {"2.amax_history": entry}
    assert next(iter(bad)) == "rng"
    with pytest.raises(error, match=message):
        mf.load_training_state(model, bad)
    assert all(torch.equal(before[key], v) for key, v in mf.training_state(model).items())
    for wrong in (None, [("rng", 3)], "state"):
        with pytest.raises(TypeError, match="expected a dict"):
            mf.load_training_state(model, wrong)


def test_a_state_with_gradients_is_loaded_as_values():
    model = build()
    mf.quantize_(model, "fp8_delayed")
    state = {key: (value + 2).requires_grad_() for key, value in mf.training_state(model).items()}
    mf.load_training_state(model, state)
    assert torch.equal(model[2].amax_history, state["2.amax_history"])
    assert not model[2].amax_history.requires_grad
