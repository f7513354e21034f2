"""mf.quantize_ of experts: which are converted, what stays, and what they compute."""

import copy
import pickle
import sys
import types

import minifloat as mf
import pytest
import torch
from minifloat.moe.convert.experts import ROUTER_REASON, find_routers
from minifloat.moe.convert.projections import register_implementation
from minifloat.moe.layer import Experts
from minifloat.nn.registry import Choice, Selection
from torch import nn

from tests.support.experts import relative_error
from tests.support.foreign_experts import Batched, D, E, GroupedMmBlock, H, ProjectionBlock


def mixture(**changes: object) -> mf.MoE:
    return mf.MoE(D, 48, E, 2, shared_experts=1, **changes)


def model_of(*blocks: nn.Module, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*blocks)


def tokens(count: int = 24) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(1))


BLOCKS = {
    "moe": mixture,
    "fused moe": lambda: mixture(fused_w13=True, bias=True),
    "grouped_mm method": GroupedMmBlock,
    "linear layout": ProjectionBlock,
    "row-major": lambda: ProjectionBlock(row_major=True, bias=True, clamped=True),
    "another activation": lambda: ProjectionBlock(bias=True, act=nn.GELU()),
}
EXPERTS = {
    "moe": ("experts.w1", "experts.w3", "experts.w2"),
    "fused moe": ("experts.w13", "experts.w2"),
    "grouped_mm method": ("experts.w1", "experts.w2", "experts.w3"),
}
PROJECTIONS = ("experts.gate_up_proj", "experts.down_proj")
ROUTERS = {"moe": "router", "fused moe": "router", "grouped_mm method": "router.gate"}


def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns y and all gradients of a forward and a backward pass."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", BLOCKS)
def test_report_lists_every_parameter(name):
    torch.manual_seed(0)
    model = model_of(BLOCKS[name](), nn.Linear(D, D))
    report = mf.quantize_(model, "*: nvfp4; *.experts: fp8_rowwise")
    converted, skipped = dict(report.converted), dict(report.skipped)
    for parameter in EXPERTS.get(name, PROJECTIONS):
        assert converted[f"0.{parameter}"] == "fp8_rowwise"
    assert converted["1"] == "nvfp4"
    assert skipped == {f"0.{ROUTERS.get(name, 'gate')}": ROUTER_REASON}
    assert "experts." in str(report)


def visits(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    """Counts the modules that the search for routers looks at."""
    count = 0
    named_modules = nn.Module.named_modules

    def counted(self: nn.Module, *args: object):
        nonlocal count
        for found in named_modules(self, *args):
            count += 1
            yield found

    fqns = [f"{name}.experts" for name, m in model.named_modules() if isinstance(m, mf.MoE)]
    fqns += [name for name, m in model.named_modules() if name.startswith("list.")]
    recipe = mf.Recipe("mxfp8")
    choices = [Choice(n, model.get_submodule(n), ("w2",), recipe, Experts, True) for n in fqns]
    selection = Selection([c for c in choices if isinstance(c.module, Experts)], [], {})
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "named_modules", counted)
        find_routers(model, selection)
    assert len(selection.routers) == len([m for m in model.modules() if isinstance(m, mf.MoE)])
    return count


def test_routers_are_found_in_linear_time(monkeypatch):
    """Also where one module holds many experts."""

    def model(layers: int) -> nn.Module:
        moes = nn.ModuleList(mixture() for _ in range(layers))
        lone = nn.ModuleList(mixture().experts for _ in range(layers))
        return nn.ModuleDict({"layers": moes, "list": lone})

    counts = [visits(model(layers), monkeypatch) for layers in (4, 8, 16)]
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])


def test_gates_beside_experts_are_left_out_by_name_and_shape():
    block = ProjectionBlock()
    block.shared_expert_gate = nn.Linear(D, 1, bias=False)
    block.gate_proj = nn.Linear(D, E)
    block.shared_expert = nn.ModuleDict({"gate": nn.Linear(D, D)})
    skipped = dict(mf.quantize_(model_of(block), "mxfp8").skipped)
    assert skipped == dict.fromkeys(("0.gate", "0.shared_expert_gate"), ROUTER_REASON)
    alone = model_of(nn.ModuleDict({"gate": nn.Linear(D, E), "router": nn.Linear(D, E)}))
    assert not mf.quantize_(alone, "mxfp8").skipped


def linears(container):
    layers = [nn.Linear(D, D) for _ in range(E)]
    return container(layers) if container is nn.ModuleList else container(zip("abcdefgh", layers))


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
@pytest.mark.parametrize("name", ["experts", "mlp_experts"])
def test_gates_beside_lists_of_experts_are_left_out(name, container):
    block = nn.ModuleDict({"gate": nn.Linear(D, E, bias=False), name: linears(container)})
    report = mf.quantize_(model_of(block), "mxfp8")
    assert dict(report.skipped) == {"0.gate": ROUTER_REASON}
    assert len(report.converted) == E
    blocks = nn.ModuleDict({"gate": nn.Linear(D, E, bias=False), "blocks": linears(container)})
    assert not mf.quantize_(model_of(blocks), "mxfp8").skipped


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayed"])
@pytest.mark.parametrize("name", BLOCKS)
def test_conversion_keeps_the_model_and_restore_undoes_it(name, recipe):
    torch.manual_seed(0)
    model = model_of(BLOCKS[name]())
    experts = model[0].experts
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    classes = [type(m) for m in model.modules()]
    modules = list(model.modules())
    before = run(model, tokens())
    mf.quantize_(model, recipe)
    assert isinstance(experts, classes[modules.index(experts)])
    assert model[0].experts is experts
    assert list(model.state_dict()) == keys
    assert {n: id(p) for n, p in model.named_parameters()} == {
        n: id(p) for n, p in parameters.items()
    }
    after = run(model, tokens())
    # FP4 has one mantissa bit: errors of up to 25% an element, and of several products in a row.
    for found, expected in zip(after, before):
        assert relative_error(found, expected) < (0.7 if recipe == "nvfp4" else 0.3)
        assert not torch.equal(found, expected)
    mf.restore_(model)
    assert [type(m) for m in model.modules()] == classes
    assert list(model.modules()) == modules
    assert all(torch.equal(a, b) for a, b in zip(run(model, tokens()), before))


@pytest.mark.parametrize("name", [*BLOCKS, "named"])
def test_a_forward_that_a_wrapper_keeps_is_restored(name):
    """As accelerate's hooks keep it."""
    torch.manual_seed(0)
    model = model_of(Batched() if name == "named" else BLOCKS[name]())
    x = torch.randn(E, 6, D) if name == "named" else tokens()
    experts = model[0] if name == "named" else model[0].experts
    want = model(x)
    mf.quantize_(model, "mxfp8", experts={"*": ["inputs", "outputs"]} if name == "named" else None)
    kept = experts.forward
    experts.forward = lambda *args, **kwargs: kept(*args, **kwargs)
    assert not torch.equal(model(x), want)
    mf.restore_(model)
    assert torch.equal(model(x), want)


@pytest.mark.parametrize("name", BLOCKS)
def test_bf16_products_of_converted_experts_equal_the_unconverted(name):
    """Under a recipe without quantization only sums are in another order."""
    torch.manual_seed(0)
    model = model_of(BLOCKS[name]())
    # One quantizing spec, of a weight that is exact in E4M3: the recipe bf16 converts nothing.
    for _name_of, p in model.named_parameters():
        if p.dim() == 3:
            p.data.copy_(p.data.sign() * 0.25)
    before = run(model, tokens())
    recipe = "fprop=bf16*mxfp8 dgrad=bf16*bf16 wgrad=bf16*bf16"
    mf.quantize_(model, f"*: bf16; *.experts: {recipe}")
    for found, expected in zip(run(model, tokens()), before):
        assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayed"])
@pytest.mark.parametrize("name", BLOCKS)
def test_copies_and_checkpoints(name, recipe):
    torch.manual_seed(0)
    model = model_of(BLOCKS[name]())
    mf.quantize_(model, recipe)
    run(model, tokens())
    mf.step(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    torch.manual_seed(5)
    fresh = model_of(BLOCKS[name](), seed=5)
    mf.quantize_(fresh, recipe)
    fresh.load_state_dict(model.state_dict())
    mf.load_training_state(fresh, mf.training_state(model))
    expected = run(model, tokens())
    for other in (*copies, fresh):
        assert all(torch.equal(a, b) for a, b in zip(run(other, tokens()), expected))
    if recipe == "fp8_delayed":
        shapes = [t.shape for k, t in mf.training_state(model).items() if "experts." in k]
        assert torch.Size([6, E, 17]) in shapes
        mf.restore_(copies[0])
        assert not mf.training_state(copies[0])


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayed"])
@pytest.mark.parametrize("name", BLOCKS)
def test_values_assigned_to_converted_experts_on_meta(name, recipe):
    plain = model_of(BLOCKS[name]())
    with torch.device("meta"):
        model = model_of(BLOCKS[name]())
        mf.quantize_(model, recipe)
    model.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)
    mf.quantize_(plain, recipe)
    for _ in range(2):
        found, expected = run(model, tokens()), run(plain, tokens())
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("act", [nn.SiLU, nn.GELU])
def test_projections_of_no_tokens_and_of_uneven_rows(act):
    model = model_of(ProjectionBlock(act=act()))
    mf.quantize_(model, "mxfp8")
    experts = model[0].experts
    x, indices = torch.randn(0, D), torch.zeros(0, 2, dtype=torch.int64)
    assert experts(x, indices, torch.zeros(0, 2)).shape == (0, D)
    with pytest.raises(ValueError, match=f"each of {E} experts, got {E + 1} rows"):
        experts(torch.randn(E + 1, D))


def test_filters_and_maps_match_the_module_name():
    model = model_of(mixture(), GroupedMmBlock(), ProjectionBlock())
    report = mf.quantize_(
        model,
        "*: mxfp8; 2.*: bf16",
        filter_fqns=["1.exp"],
        filter_fn=lambda module, fqn: not isinstance(module, nn.Linear),
    )
    assert [name for name, _ in report.converted] == [f"0.{name}" for name in EXPERTS["moe"]]
    skipped = dict(report.skipped)
    assert skipped["1.experts.w1"] == "filter_fqns has '1.exp'"
    assert skipped["2.experts.down_proj"] == "the recipe map says bf16"
    again = mf.quantize_(model, "mxfp8", filter_fqns=["1.", "2."])
    assert (
        dict(again.skipped)["0.experts.w1"] == "already converted (mxfp8); mf.restore_ undoes that"
    )


def test_auto_filter_leaves_experts_in():
    model = model_of(mixture())
    report = mf.quantize_(model, "fp8_rowwise", filter_fqns=["auto_filter_small_kn"])
    assert [name for name, _ in report.converted] == [f"0.{name}" for name in EXPERTS["moe"]]
    mf.restore_(model)
    report = mf.quantize_(model, "fp8_rowwise", mf.nn.auto_filter_small_kn("fp8_rowwise"))
    assert [name for name, _ in report.converted] == [f"0.{name}" for name in EXPERTS["moe"]]


def test_other_3d_parameters_have_a_reason():
    model = model_of(Batched(), nn.Linear(D, D), nn.Conv1d(4, 4, 3))
    report = mf.quantize_(model, "mxfp8")
    skipped = dict(report.skipped)
    assert set(skipped) == {"0.inputs", "0.outputs", "0.scale", "2.weight"}
    assert "`experts` can name it" in skipped["0.inputs"]
    assert "Conv1d" in skipped["2.weight"]


def test_primary_and_unfit_experts_have_a_reason():
    shapes = (E, D, 7), (E - 1, D, H), (E + 1, D, H)
    model = model_of(mixture(), *(ProjectionBlock() for _ in shapes))
    for block, shape in zip(model[1:], shapes):
        block.experts.down_proj = nn.Parameter(torch.zeros(shape))
    skipped = dict(mf.quantize_(model, "mxfp8", keep="nothing").skipped)
    for i in range(1, 4):
        assert "of no known layout" in skipped[f"{i}.experts.down_proj"]
    model = model_of(mixture(), ProjectionBlock().double(), nn.Linear(D, D))
    skipped = dict(mf.quantize_(model, "mxfp8_2d", primary=True).skipped)
    assert isinstance(model[0].experts.w1, mf.QuantizedTensor)
    assert "0.experts.w1" not in skipped
    model = model_of(mixture(), ProjectionBlock().double())
    skipped = dict(mf.quantize_(model, "mxfp8").skipped)
    assert "float64; expected float32 or bfloat16" in skipped["1.experts.down_proj"]


def test_named_experts():
    model = model_of(Batched())
    x = torch.randn(E, 6, D)
    before = run(model, x)
    names = {"*": ["inputs", "outputs"]}
    report = mf.quantize_(model, "mxfp8", experts=names)
    assert dict(report.converted) == {"0.inputs": "mxfp8", "0.outputs": "mxfp8"}
    assert [name for name, _ in report.skipped] == ["0.scale"]
    for found, expected in zip(run(model, x), before):
        assert 0 < relative_error(found, expected) < 0.2
    same = pickle.loads(pickle.dumps(model))
    assert torch.equal(same(x), model(x))
    mf.restore_(model)
    assert all(torch.equal(a, b) for a, b in zip(run(model, x), before))


class Indexed(nn.Module):
    """Experts whose forward has no product of the whole parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(E, D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w[0]


def test_named_experts_that_no_product_reads_raise():
    model = model_of(Indexed())
    mf.quantize_(model, "mxfp8", experts={"0": ["w"]})
    with pytest.raises(RuntimeError, match="expected its forward to multiply with w"):
        model(tokens())


class Keywords(nn.Module):
    """Experts whose forward passes the operands of its product by name."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(E, D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(input=x, mat2=self.w)


def test_named_experts_with_operands_by_name():
    model, x = model_of(Keywords()), torch.randn(E, 6, D)
    expected = model(x)
    mf.quantize_(model, "mxfp8", experts={"0": ["w"]})
    assert 0 < relative_error(model(x), expected) < 0.2


@pytest.mark.parametrize(
    ("experts", "error", "message"),
    [
        (["w"], TypeError, "expected a dict"),
        ({"*": "w"}, TypeError, "expected a list of parameters' names"),
        ({"*": []}, ValueError, "expected at least one"),
        ({"0": ["v"]}, ValueError, r"named 3D parameters, got no match for '0\.v'; .* 0\.w"),
        ({"0": ["w"], "9": ["w"]}, ValueError, r"3D parameters, got no match for '9\.w'"),
    ],
)
def test_refuses_experts(experts, error, message):
    model = model_of(Indexed(), nn.Linear(D, D))
    with pytest.raises(error, match=message):
        mf.quantize_(model, "mxfp8", experts=experts)
    assert type(model[0]) is Indexed
    assert type(model[1]) is nn.Linear


@pytest.mark.parametrize("place", ["fprop=mxfp8/32x32*mxfp8", "wgrad=mxfp8*e4m3/128x128"])
def test_refuses_2d_blocks_of_rows_before_anything_is_converted(place):
    products = {p: "bf16*bf16" for p in ("fprop", "dgrad", "wgrad")}
    products |= dict([place.split("=")])
    recipe = " ".join(f"{k}={v}" for k, v in products.items())
    model = model_of(nn.Linear(D, D), mixture())
    with pytest.raises(ValueError, match=r"1\.experts: expected x/.* with blocks of one row"):
        mf.quantize_(model, recipe)
    with pytest.raises(ValueError, match=r"moe\.experts: expected x/.* with blocks of one row"):
        mf.MoE(D, D, experts=4, top_k=2, recipe=recipe)
    assert type(model[0]) is nn.Linear
    mf.quantize_(model, f"*: {recipe}; *.experts: mxfp8")


def test_failure_undoes_the_conversion(monkeypatch):
    model = model_of(mixture(), GroupedMmBlock(), ProjectionBlock())
    classes = [type(m) for m in model.modules()]
    monkeypatch.setattr("minifloat.nn.convert.quantize.share_inputs", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mf.quantize_(model, "nvfp4")
    assert [type(m) for m in model.modules()] == classes


def test_transformers_experts_implementation(monkeypatch):
    registered = {}
    package, module = (types.ModuleType(n) for n in ("transformers", "transformers.moe"))
    functions = types.SimpleNamespace(register=registered.__setitem__)
    module.ALL_EXPERTS_FUNCTIONS = functions
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)  # as if not installed
    assert not register_implementation()
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.integrations", types.ModuleType("t.i"))
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", module)
    model = model_of(ProjectionBlock(bias=True), nn.Linear(D, D))
    mf.quantize_(model, "*: bf16; 1: mxfp8")
    assert register_implementation()
    experts, x = model[0].experts, tokens()
    weights, indices = model[0].gate(x).softmax(-1).topk(2)
    found = registered["minifloat"](experts, x, indices, weights)
    assert relative_error(found, experts(x, indices, weights)) < 1e-5
