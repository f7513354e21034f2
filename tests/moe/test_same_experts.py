"""Experts of other libraries are converted where their own forward computes the same."""

import copy
import os
from contextlib import nullcontext

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minifloat.moe.convert import converted
from minifloat.moe.convert.converted import CountedExperts, GroupedMmExperts
from minifloat.moe.convert.projections import ProjectionExperts
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.foreign_experts import GroupedMm, grouped, weight

D, H, E = 32, 48, 4


class Foreign(nn.Module):
    """Experts under Hugging Face's names, whose formula a subclass changes."""

    def __init__(self, dim: int = D, hidden: int = H, experts: int = E) -> None:
        super().__init__()
        self.dim, self.experts = dim, experts
        self.gate_up_proj = weight(experts, 2 * hidden, dim)
        self.down_proj = weight(experts, dim, hidden)
        self.act_fn = nn.SiLU()

    def hidden(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up

    def weighted(self, y, weights):
        return y * weights

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for e in range(self.experts):
            t, k = torch.where(index == e)
            y = F.linear(self.hidden(F.linear(x[t], self.gate_up_proj[e])), self.down_proj[e])
            out.index_add_(0, t, self.weighted(y, weights[t, k, None]))
        return out


class Interleaved(Foreign):
    def hidden(self, gate_up):
        return self.act_fn(gate_up[..., ::2]) * gate_up[..., 1::2]


class UpBeforeGate(Foreign):
    def hidden(self, gate_up):
        up, gate = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up


class UpAndOne(Foreign):
    def hidden(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * (up + 1)


class NoWeight(Foreign):
    def weighted(self, y, weights):
        return y


class Doubled(Foreign):
    def weighted(self, y, weights):
        return 2 * y * weights


class NearlySame(Foreign):
    """An activation that differs from SiLU in its fifth digit."""

    def hidden(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return gate * torch.sigmoid(1.0001 * gate) * up


class Bounded(Foreign):
    def hidden(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate.clamp(max=20)) * up


class UnusedBias(Foreign):
    """A bias that begins as zeros, which the conversion would not add."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(D))

    def forward(self, x, index, weights):
        return super().forward(x, index, weights) + self.shift


DIFFERENT = [Interleaved, UpBeforeGate, UpAndOne, NoWeight, Doubled, NearlySame, Bounded]
DIFFERENT += [UnusedBias]


def report_of(experts: nn.Module, **options: object) -> mf.Report:
    model = nn.ModuleDict({"experts": experts, "other": nn.Linear(32, 32)})
    return mf.quantize_(model, "mxfp8", **options)


@pytest.mark.parametrize("kind", DIFFERENT)
def test_other_formulas_are_left_out(kind):
    torch.manual_seed(0)
    experts = kind().eval()
    report = report_of(experts)
    assert report.converted == [("other", "mxfp8")]
    skipped = dict(report.skipped)
    for name in ("gate_up_proj", "down_proj"):
        start = f"a 3D parameter of {kind.__name__}, whose forward differs from minifloat's by "
        assert skipped[f"experts.{name}"].startswith(start)
    assert type(experts) is kind


class WeightsFirst(Foreign):
    def forward(self, x, weights, index):
        return super().forward(x, index, weights)


class Batches(Foreign):
    """Tokens (B, S, D) alone."""

    def forward(self, hidden_states, indices=None, scores=None):
        batch, count, dim = hidden_states.shape
        x, k = hidden_states.reshape(-1, self.dim), indices.shape[-1]
        y = super().forward(x, indices.view(-1, k), scores.view(-1, k))
        return y.view(batch, count, dim)


class OwnWidths(Foreign):
    """Sizes within a tuple, which a replica of small widths does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (D, H)

    def forward(self, x, index, weights):
        return super().forward(x.view(len(x), self.sizes[0]), index, weights)


class EqualSizes(Foreign):
    def __init__(self) -> None:
        super().__init__(dim=16, hidden=16, experts=16)


@pytest.mark.parametrize("kind", [Foreign, WeightsFirst, Batches, OwnWidths, EqualSizes])
def test_signatures_and_sizes_that_are_converted(kind):
    torch.manual_seed(0)
    assert len(report_of(kind()).converted) == 3


class FourArguments(Foreign):
    def forward(self, x, index, weights, capacity):
        return super().forward(x, index, weights)


class Raises(Foreign):
    def forward(self, x, index, weights):
        raise NotImplementedError("only where a kernel is installed\nand more")


class Pair(Foreign):
    def forward(self, x, index, weights):
        return super().forward(x, index, weights), None


CANNOT = {
    FourArguments: "takes (x, index, weights, capacity), which no known call fits",
    Raises: "cannot run on a small input: NotImplementedError: only where a kernel is installed",
    Pair: "returns a tuple, not a tensor",
}


@pytest.mark.parametrize("kind", CANNOT)
def test_what_cannot_be_compared_is_left_out(kind):
    skipped = dict(report_of(kind()).skipped)
    assert (
        skipped["experts.down_proj"]
        == f"a 3D parameter of {kind.__name__}, whose forward {CANNOT[kind]}"
    )


class Noting(Foreign):
    """Has state that its forward does not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log = 0, []
        self.register_buffer("seen", torch.zeros(1))


def test_the_module_is_left_as_it_was():
    torch.manual_seed(0)
    experts, seen = Noting(), []
    hook = experts.act_fn.register_forward_hook(lambda *_: seen.append("act"))
    assert ProjectionExperts.reason_against(experts) == "calls act_fn, which has a forward_hook"
    hook.remove()
    experts.register_forward_pre_hook(lambda *_: seen.append("experts"))
    experts.down_proj.requires_grad_(False)
    experts.eval()
    experts.act_fn.train()
    parameters, values = dict(experts.named_parameters()), copy.deepcopy(experts.state_dict())
    before, random_state = dict(experts.__dict__), torch.get_rng_state()
    assert ProjectionExperts.reason_against(experts) is None
    assert torch.equal(torch.get_rng_state(), random_state)
    assert seen == []
    assert (experts.calls, experts.log) == (0, [])
    assert (experts.training, experts.act_fn.training) == (False, True)
    assert experts.__dict__ == before
    assert {n: id(p) for n, p in experts.named_parameters()} == {
        n: id(p) for n, p in parameters.items()
    }
    assert all(torch.equal(values[name], t) for name, t in experts.state_dict().items())
    assert [p.grad for p in experts.parameters()] == [None, None]
    assert [p.requires_grad for p in experts.parameters()] == [True, False]
    assert torch.backends.mkldnn.enabled


def test_values_contexts_and_dtypes_do_not_matter():
    """Parameters of any value and dtype, on meta too, within any context."""
    experts = Foreign().bfloat16()
    with torch.no_grad():
        experts.down_proj.zero_()
        experts.gate_up_proj.fill_(float("nan"))
    wrong = copy.deepcopy(experts)
    wrong.__class__ = Doubled
    for module in (experts, experts.to("meta")):
        wrong.to(module.down_proj.device)
        with (
            torch.device("meta"),
            torch.autocast("cpu", torch.bfloat16),
            torch.inference_mode(),
        ):
            assert ProjectionExperts.reason_against(module) is None
            assert "differs" in str(ProjectionExperts.reason_against(wrong))


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_fake_experts_are_compared_by_values(inside):
    """Experts of a FakeTensorMode, converted inside the mode or outside."""
    mode = FakeTensorMode()
    with mode:
        experts, wrong = Foreign(), Doubled()
    with mode if inside else nullcontext():
        assert ProjectionExperts.reason_against(experts) is None
        assert "differs" in str(ProjectionExperts.reason_against(wrong))
        assert len(report_of(experts).converted) == 3


def test_experts_are_compared_under_any_default_dtype():
    experts = Foreign()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert ProjectionExperts.reason_against(experts) is None
    finally:
        torch.set_default_dtype(torch.float32)


def test_shards():
    """A DTensor's parameter is replaced by values of its whole shape."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for kind in (Foreign, Doubled):
            experts = fully_shard(kind(), mesh=init_device_mesh("cpu", (1,)))
            assert isinstance(experts.down_proj, DTensor)
            why = ProjectionExperts.reason_against(experts)
            assert (why is None) == (kind is Foreign)
            assert isinstance(experts.down_proj, DTensor)
    finally:
        dist.destroy_process_group()


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of a tensor that is not on meta."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor) and not value.is_meta:
                self.elements = max(self.elements, value.numel())
        return out


@pytest.mark.parametrize(
    ("kind", "hidden"), [(Foreign, 2048), (Doubled, 2048), (OwnWidths, 2048), (Foreign, 128)]
)
def test_large_experts_are_compared_by_small_ones(kind, hidden):
    """128 experts of 7168 x 2048 have 5.6e9 elements. E may equal a width."""
    with torch.device("meta"):
        experts = kind() if kind is OwnWidths else kind(experts=128)
        experts.dim = 7168
        experts.gate_up_proj = nn.Parameter(torch.empty(128, 2 * hidden, 7168))
        experts.down_proj = nn.Parameter(torch.empty(128, 7168, hidden))
    with Largest() as largest:
        why = ProjectionExperts.reason_against(experts)
    assert (why is None) == (kind is Foreign)
    assert largest.elements < 2**20


# ---- other kinds ---------------------------------------------------------------------------------


class ScaledGroupedMm(GroupedMm):
    def _grouped_mm(self, *, A, B_t, offs):
        return grouped(A, B_t, offs) * 0.5


class GroupedMmOfTheEnvironment(GroupedMm):
    def _grouped_mm(self, *, A, B_t, offs):
        return grouped(A, B_t, offs) * float(os.environ.get("NO_SUCH_FACTOR", "1"))


class TorchGroupedMm(GroupedMm):
    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)


def test_grouped_mm_methods():
    assert GroupedMmExperts.reason_against(GroupedMm()) is None
    assert GroupedMmExperts.reason_against(TorchGroupedMm()) is None
    skipped = dict(report_of(ScaledGroupedMm()).skipped)
    assert (
        "whose forward calls _grouped_mm, which differs from minifloat's" in skipped["experts.w1"]
    )
    reads = "calls _grouped_mm, which reads by environ, whose changes are not seen"
    assert GroupedMmExperts.reason_against(GroupedMmOfTheEnvironment()) == reads


class Counted(nn.Module):
    """Experts as torchtitan 0.2's."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = weight(E, H, D), weight(E, D, H), weight(E, H, D)
        self.use_grouped_mm = True

    def forward(self, x, num_tokens_per_expert):
        assert not self.use_grouped_mm
        offs = num_tokens_per_expert.cumsum(0)
        h = F.silu(grouped(x, self.w1.mT, offs)) * grouped(x, self.w3.mT, offs)
        y = grouped(h, self.w2.mT, offs)
        return torch.cat([y, y.new_zeros(x.shape[0] - y.shape[0], y.shape[1])])


class OffCounted(Counted):
    def forward(self, x, num_tokens_per_expert):
        return super().forward(x, num_tokens_per_expert) * 1.001


def test_rows_and_counts(monkeypatch):
    classes = tuple((kind.__module__, kind.__name__) for kind in (Counted, OffCounted))
    monkeypatch.setattr(converted, "CLASSES", classes)
    experts = Counted()
    assert CountedExperts.reason_against(experts) is None
    assert experts.use_grouped_mm
    assert len(report_of(experts).converted) == 4
    assert "differs" in dict(report_of(OffCounted()).skipped)["experts.w2"]


# ---- hints ---------------------------------------------------------------------------------------


def test_only_what_could_be_experts_is_said_to_be_nameable():
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(1, 8, D))

    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(E, 8, D))

    parts = {"conv": nn.Conv1d(4, 4, 3), "embeds": Embeds(), "matrices": Matrices()}
    skipped = dict(report_of(nn.ModuleDict(parts)).skipped)
    known = "no experts module of a known form"
    assert skipped["experts.conv.weight"] == f"a 3D parameter of Conv1d, {known}"
    assert skipped["experts.embeds.position"] == f"a 3D parameter of Embeds, {known}"
    assert skipped["experts.matrices.w"].endswith(f"{known}; `experts` can name it")
