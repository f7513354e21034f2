"""Known experts of transformers: which attributes a conversion reads, whose code it replaces."""

import copy
import functools
from types import SimpleNamespace

import minifloat as mf
import pytest
import torch
from minifloat.moe.convert.known import known_digest
from torch import nn
from transformers.integrations import moe as interface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tests.clients.test_transformers_experts import BOUND, EXACT, model_of
from tests.support.experts import relative_error
from tests.support.transformers_experts import SIZES, D, E, H, K, class_names

CLASSES = {name.rpartition(".")[2]: name for name in class_names()}


def results(experts: nn.Module) -> list[torch.Tensor]:
    """Returns y and the gradients of x and of the matrices."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, D, generator=generator).requires_grad_()
    weights, indices = torch.rand(24, E, generator=generator).topk(K)
    routing = () if type(experts).__name__ == "Llama4TextExperts" else (indices, weights)
    y = experts(x, *routing)
    factors = torch.randn(y.shape, generator=generator)
    leaves = [x, experts.gate_up_proj, experts.down_proj]
    return [y.detach(), *torch.autograd.grad((y * factors).sum(), leaves)]


def bias(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape))


# ---- attributes ----------------------------------------------------------------------------------

ATTRIBUTES = {  # that some class of experts reads
    "limit": 0.01,
    "alpha": 3.0,
    "is_concatenated": False,
    "has_bias": True,
    "gate_up_proj_bias": bias(E, 2 * H),
    "down_proj_bias": bias(E, D),
}
OF_CONFIG = {"swiglu_limit": 0.01, "swiglu_alpha": 3.0, "mlp_bias": True}


def set_all(experts: nn.Module) -> None:
    """Sets each attribute that the class does not have by itself."""
    for name, value in ATTRIBUTES.items():
        if not hasattr(experts, name) or name in ("is_concatenated", "has_bias"):
            setattr(experts, name, copy.deepcopy(value))
    if hasattr(experts, "config"):
        experts.config = SimpleNamespace(**vars(experts.config) | OF_CONFIG)


KINDS = ("MixtralExperts", "DeepseekV4Experts", "Step3p7Experts", "Llama4TextExperts")
KINDS += ("AriaExperts", "GptOssExperts", "OpenAIPrivacyFilterExperts")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_attributes_that_a_class_does_not_read_change_nothing(kind, after):
    model = model_of(CLASSES[kind])
    experts = model["experts"]
    for parameter in experts.parameters():
        parameter.data = parameter.data.sign() * 0.25
    plain = copy.deepcopy(experts)
    expected = results(plain)
    set_all(plain)
    assert torch.equal(results(plain)[0], expected[0])
    assert known_digest(plain) is not None
    if not after:
        set_all(experts)
    mf.quantize_(model, f"*: bf16; experts: {EXACT}")
    if after:
        set_all(experts)
    for copied in (experts, copy.deepcopy(experts)):
        for found, want in zip(results(copied), expected, strict=True):
            assert relative_error(found, want) < BOUND


@pytest.mark.parametrize("name", ["limit", "alpha"])
def test_attributes_that_a_class_reads_raise_where_they_change(name):
    model = model_of(CLASSES["GptOssExperts"])
    mf.quantize_(model, "mxfp8")
    setattr(model["experts"], name, 0.01)
    with pytest.raises(RuntimeError, match=f"expected {name} as at its conversion, got 0.01"):
        results(model["experts"])


def doubled_gate(gate_up: torch.Tensor) -> torch.Tensor:
    return 2 * gate_up[..., ::2]


def test_a_gate_of_the_instance_is_left_out():
    """One implementation of transformers calls it, another does not."""
    model = model_of(CLASSES["MixtralExperts"])
    model["experts"]._apply_gate = doubled_gate
    skipped = dict(mf.quantize_(model, "mxfp8").skipped)
    assert "may call _apply_gate, which is replaced on the instance" in skipped["experts.down_proj"]
    model = model_of(CLASSES["MixtralExperts"])
    mf.quantize_(model, "mxfp8")
    model["experts"]._apply_gate = doubled_gate
    with pytest.raises(RuntimeError, match="expected _apply_gate as at its conversion"):
        results(model["experts"])


# ---- implementations -----------------------------------------------------------------------------


def doubled(self, hidden_states, top_k_index, top_k_weights):
    return 2 * hidden_states


def wrapped(function):
    return functools.wraps(function)(lambda *args: 2 * function(*args))


def renamed():
    function = functools.partial(doubled)
    functools.update_wrapper(function, interface.grouped_mm_experts_forward)
    return function


FOREIGN = {
    "function": lambda: doubled,
    "wrapped": lambda: wrapped(interface.grouped_mm_experts_forward),
    "partial": renamed,
}
NAMES = ("eager", "grouped_mm", "batched_mm", "minifloat", None, "of another package")


@pytest.fixture
def registry():
    before = dict(ALL_EXPERTS_FUNCTIONS._global_mapping)
    yield ALL_EXPERTS_FUNCTIONS
    ALL_EXPERTS_FUNCTIONS._global_mapping.clear()
    ALL_EXPERTS_FUNCTIONS._global_mapping.update(before)
    ALL_EXPERTS_FUNCTIONS._local_mapping.clear()


def config_of(name: str | None) -> SimpleNamespace:
    return SimpleNamespace(**SIZES | {"_experts_implementation": name})


def register(registry, name, function, is_local):
    if is_local:
        registry[name] = function
    else:
        registry.register(name, function)


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", NAMES)
def test_implementations_of_others_are_left_out(name, kind, registry):
    for is_local in (False, True):
        model = model_of(CLASSES["MixtralExperts"])
        model["experts"].config = config_of(name)
        register(registry, name, FOREIGN[kind](), is_local)
        skipped = dict(mf.quantize_(model, "mxfp8").skipped)
        text = f"runs the experts implementation {name!r} of another package than transformers"
        assert text in skipped["experts.down_proj"]
        registry._local_mapping.clear()


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", NAMES)
def test_implementations_of_others_raise_after_the_conversion(name, kind, registry):
    model = model_of(CLASSES["MixtralExperts"])
    mf.quantize_(model, "mxfp8")
    experts = model["experts"]
    experts.config = config_of("deepgemm")
    expected = results(experts)
    for is_local in (False, True):
        register(registry, name, FOREIGN[kind](), is_local)
        assert torch.equal(results(experts)[0], expected[0])  # as the model chose before
        chosen = experts.config
        experts.config = config_of(name)
        with pytest.raises(
            RuntimeError, match="expected an experts implementation of transformers"
        ):
            results(experts)
        experts.config = chosen
        assert torch.equal(results(experts)[0], expected[0])
        registry._local_mapping.clear()


def test_a_switch_among_own_implementations_hides_no_other_change():
    model = model_of(CLASSES["MixtralExperts"])
    mf.quantize_(model, "mxfp8")
    experts = model["experts"]
    expected = results(experts)
    for name in ("grouped_mm", "batched_mm", "deepgemm", "sonicmoe", "minifloat", None):
        experts.config._experts_implementation = name
        assert torch.equal(results(experts)[0], expected[0])
        act = experts.act_fn
        experts.act_fn = nn.GELU()
        with pytest.raises(RuntimeError, match="act_fn"):
            results(experts)
        experts.act_fn = act


def test_compiled_code_follows_the_implementation(registry):
    model = model_of(CLASSES["MixtralExperts"])
    mf.quantize_(model, "mxfp8")
    experts = model["experts"]
    x, index, weights = torch.randn(6, D), torch.arange(12).view(6, 2) % E, torch.rand(6, 2)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    expected = experts(x, index, weights)
    assert torch.equal(compiled(x, index, weights), expected)
    experts.config._experts_implementation = "grouped_mm"
    assert torch.equal(compiled(x, index, weights), expected)
    registry.register("grouped_mm", wrapped(interface.grouped_mm_experts_forward))
    with pytest.raises(RuntimeError, match="expected an experts implementation of transformers"):
        compiled(x, index, weights)
