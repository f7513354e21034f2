"""Every class `…Experts` of the installed transformers: equal after conversion, or left out."""

import copy
from functools import partial
from types import SimpleNamespace

import minifloat as mf
import pytest
import torch
from minifloat.moe.convert.implementations import code_starts
from minifloat.moe.convert.known import COUNTED, KNOWN, known_digest
from minifloat.moe.convert.projections import (
    ProjectionExperts,
    compare_projections,
    register_implementation,
)
from minifloat.nn.convert.foreign_code import code_of, digest_of
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tests.support.experts import relative_error
from tests.support.transformers_experts import SIZES, D, E, H, K, build, class_names

# Quantizes weights alone, and those of the tests are exact in E4M3: nothing is rounded.
EXACT = "fprop=bf16*mxfp8 dgrad=bf16*bf16 wgrad=bf16*bf16"

# Each element of y and of the gradients comes from at most n = 2 (D + H + K) additions, in three
# products and the sum over slots. Two orders of n terms differ by at most 2 n 2^-24 of the sum of
# their magnitudes, which is below sqrt(n) times the norm of sums of random signs. The activations'
# few roundings are within the factor 2 of D + H + K.
ADDITIONS = 2 * (D + H + K)
BOUND = 2 * ADDITIONS * 2.0**-24 * ADDITIONS**0.5

LEFT_OUT = {  # class: part of the reason
    "DbrxExperts": "a 2D parameter of DbrxExpertGLU",
    "InklingSharedExperts": "no experts module of a known form; `experts` can name it",
    "JetMoeParallelExperts": "no experts module of a known form; `experts` can name it",
    "MuseSparkExperts": "whose forward differs from minifloat's by",
    "NemotronHExperts": "no experts module of a known form; `experts` can name it",
}
OF_LINEAR_LAYERS = {"NllbMoeExperts", "SwitchTransformersExperts"}
KINDS = ("MixtralExperts", "MuseSparkExperts")
CLASSES = class_names()
CONVERTED = [
    name for name in CLASSES if name.rpartition(".")[2] not in {*LEFT_OUT, *OF_LINEAR_LAYERS}
]


def test_every_class_is_in_one_group():
    names = {name.rpartition(".")[2] for name in CLASSES}
    assert names >= {*LEFT_OUT, *OF_LINEAR_LAYERS}
    assert len(CLASSES) == 69
    assert len(CONVERTED) == 62


COMPARED = {"LongcatFlashExperts"}  # whose settings change the formula: compared at conversion


def digest(module: nn.Module) -> str | None:
    """Returns the digest of the code that a conversion replaces."""
    return digest_of(code_of(type(module), *code_starts(module)))


def test_the_table_has_the_digest_of_every_class():
    """A class with another digest is compared at conversion until the table has it."""
    missing = []
    for name in CONVERTED:
        module = build(name)
        if type(module).__name__ not in COMPARED and not known_digest(module):
            missing.append(f'"{digest(module)}": "{name}"')
    if (
        titan := pytest.importorskip("torchtitan.models.moe.moe", exc_type=ImportError)
    ) is not None:
        module = titan.GroupedExperts(D, H, E, False)
        if not known_digest(module):
            missing.append(f'"{digest(module)}": {COUNTED}')
    assert not missing, "known.py lacks " + ", ".join(missing)
    names = {(type(m).__module__, type(m).__qualname__) for m in map(build, CONVERTED)}
    assert {cls for cls in KNOWN if cls[0].startswith("transformers")} <= names


def test_the_table_has_the_digest_of_torchtitan():
    titan = pytest.importorskip("torchtitan.models.moe.moe", exc_type=ImportError)
    module = titan.GroupedExperts(D, H, E, False)
    assert known_digest(module), f'known.py lacks "{digest(module)}" of GroupedExperts'


@pytest.mark.slow  # tests/moe/test_same_experts.py visits the same code
def test_one_class_of_each_digest_equals_its_conversion_in_full():
    """The comparison of an unknown class, for each code in the table."""
    modules = {digest(module): module for module in map(build, CONVERTED)}
    assert len(modules) == len({d for c, d in KNOWN.items() if c not in COUNTED.values()}) + 1
    for module in modules.values():
        assert compare_projections(module) is None, type(module).__name__


def test_a_class_whose_code_is_patched_is_compared(monkeypatch):
    name = next(n for n in CLASSES if n.endswith("MixtralExperts"))
    kind, forward = type(build(name)), type(build(name)).forward.__wrapped__

    def patched(self, hidden_states, top_k_index, top_k_weights):
        return 2 * forward(self, hidden_states, top_k_index, top_k_weights)

    assert known_digest(build(name))
    monkeypatch.setattr(kind, "forward", patched)
    assert not known_digest(build(name))
    why = ProjectionExperts.reason_against(build(name))
    assert why is not None
    assert why.startswith("differs from minifloat's by 0.5 of")


class Clamped(nn.SiLU):
    """Differs from SiLU for large values alone."""

    def forward(self, x):
        return super().forward(x.clamp(max=100))


class Counting(nn.SiLU):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class OfTokens(nn.Module):
    """Reads other tokens, of which an expert has others than all experts together."""

    def forward(self, x):
        return x * torch.softmax(x, 0)


class Scaled(nn.SiLU):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


def hooked() -> nn.Module:
    act = nn.SiLU()
    act.register_forward_hook(lambda *args: args[-1].clamp(max=100))
    return act


def patched() -> nn.Module:
    act = nn.SiLU()
    act.forward = lambda x: nn.functional.silu(x.clamp(max=100))
    return act


def noisy(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.5)


FOREIGN = {  # part of the reason, or None: equal
    "clamped": (Clamped, None),
    "counting": (Counting, "changes its attribute act_fn.calls"),
    "random": (nn.RReLU, "draws random numbers, by rrelu_with_noise"),
    "noisy": (lambda: noisy, "draws random numbers, by"),
    "dropout": (lambda: partial(nn.functional.dropout, p=0.5), "draws random numbers, by"),
    "of tokens": (OfTokens, "differs from minifloat's by"),
    "buffer": (Scaled, None),
    "hook": (hooked, "calls act_fn, which has a forward_hook"),
    "patched": (patched, None),
    "partial": (lambda: partial(nn.functional.gelu, approximate="tanh"), None),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_known_class_with_an_activation_of_others_is_compared(name):
    build_activation, reason = FOREIGN[name]
    model = model_of(next(n for n in CLASSES if n.endswith("MixtralExperts")))
    experts = model["experts"]
    assert known_digest(experts)
    del experts.act_fn
    experts.act_fn = build_activation()
    assert not known_digest(experts)
    for parameter in experts.parameters():
        parameter.data = parameter.data.sign() * 0.25
    plain = copy.deepcopy(experts)
    skipped = mf.quantize_(model, f"*: mxfp8; experts: {EXACT}").skipped
    if reason is not None:
        assert reason in dict(skipped)["experts.down_proj"]
        return
    assert not [row for row, _ in skipped if row.startswith("experts.")]
    for scale in (1e-3, 1.0, 1e3):
        for found, expected in zip(run(experts, scale), run(plain, scale), strict=True):
            assert relative_error(found, expected) < BOUND


def test_experts_that_are_the_identity_are_left_out(monkeypatch):
    """LongCat-Flash has experts without matrices, and matrices of different numbers."""
    monkeypatch.setitem(SIZES, "zero_expert_num", 2)
    name = next(n for n in CLASSES if n.endswith("LongcatFlashExperts"))
    skipped = dict(mf.quantize_(model_of(name), "mxfp8").skipped)
    assert "of no known layout" in skipped["experts.down_proj"]


def model_of(name: str) -> nn.Module:
    return nn.ModuleDict({"experts": build(name), "other": nn.Linear(D, D)})


def run(experts: nn.Module, scale: float = 1.0) -> list[torch.Tensor]:
    """Returns y and the gradients of x, of the routing weights and of all parameters."""
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(24, D, generator=generator) * scale).requires_grad_()
    scores = torch.rand(24, E, generator=generator)
    weights, indices = scores.topk(K)
    weights.requires_grad_()
    is_routed = type(experts).__name__ != "Llama4TextExperts"  # which takes even groups of rows
    y = experts(x, indices, weights) if is_routed else experts(x)
    factors = torch.randn(y.shape, generator=generator)
    leaves = [x, *[weights] * is_routed, *experts.parameters()]
    return [y.detach(), *torch.autograd.grad((y * factors).sum(), leaves)]


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_experts_equal_their_own(name):
    model = model_of(name)
    for parameter in model["experts"].parameters():
        parameter.data = parameter.data.sign() * 0.25
    plain = copy.deepcopy(model["experts"])
    report = mf.quantize_(model, f"*: bf16; experts: {EXACT}")
    assert [row for row, _ in report.converted] == [
        f"experts.{row}" for row, p in model["experts"].named_parameters() if p.dim() == 3
    ]
    for found, expected in zip(run(model["experts"]), run(plain), strict=True):
        assert relative_error(found, expected) < BOUND


def doubled(self, hidden_states, index, weights):
    """Another package's implementation of experts."""
    return 2 * hidden_states


def test_implementations_that_models_choose():
    """Those of transformers stand for the eager forward; another one is the module's own."""
    mixtral, muse = (build(next(n for n in CLASSES if n.endswith(k))) for k in KINDS)
    x, indices, weights = torch.randn(6, D), torch.arange(12).view(6, 2) % E, torch.rand(6, 2)
    expected = mixtral(x, indices, weights)
    assert register_implementation()
    ALL_EXPERTS_FUNCTIONS.register("doubled", doubled)
    try:
        for name in ("minifloat", "grouped_mm", "deepgemm", None, "doubled"):
            for module in (mixtral, muse):
                module.config = SimpleNamespace(**SIZES | {"_experts_implementation": name})
                why = ProjectionExperts.reason_against(module)
                assert (why is None) == (module is mixtral and name != "doubled"), name
        for module in (mixtral, muse):
            module.config = SimpleNamespace(**SIZES | {"_experts_implementation": "minifloat"})
        for _ in range(2):
            assert relative_error(mixtral(x, indices, weights), expected) < BOUND
            with pytest.raises(ValueError, match="got MuseSparkExperts, whose forward differs"):
                muse(x, indices, weights)
    finally:
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop("doubled")


@pytest.mark.parametrize("name", [n for n in CLASSES if n.rpartition(".")[2] in LEFT_OUT])
def test_other_experts_are_left_out_with_a_reason(name):
    model = model_of(name)
    before = copy.deepcopy(model)
    report = mf.quantize_(model, "mxfp8")
    assert report.converted == [("other", "mxfp8")]
    skipped = dict(report.skipped)
    matrices = [n for n, p in model["experts"].named_parameters() if p.dim() > 1]
    assert set(skipped) == {f"experts.{row}" for row in matrices}
    assert all(LEFT_OUT[name.rpartition(".")[2]] in why for why in skipped.values())
    for (row, found), expected in zip(model.named_parameters(), before.parameters()):
        assert torch.equal(found, expected), row
    assert type(model["experts"]) is type(before["experts"])


@pytest.mark.parametrize("name", [n for n in CLASSES if n.rpartition(".")[2] in OF_LINEAR_LAYERS])
def test_experts_of_linear_layers_are_converted_as_such(name):
    model = model_of(name)
    report = mf.quantize_(model, "mxfp8")
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert sorted(row for row, _ in report.converted) == sorted(linear)
    assert len(linear) == 2 * E + 1
