"""mf.expert_parallel over gloo: operands and results of one process with all ranks' tokens."""

import copy
import warnings

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.expert_ranks import require_same_operands
from tests.support.expert_world import (
    SIZES,
    D,
    E,
    K,
    Pass,
    built,
    draw,
    own,
    passes,
    require_same_results,
)
from tests.support.host_reads import HostReads
from tests.support.specs import EDEN_RECIPE
from tests.support.worlds import run_world

EACH = "nvfp4+sr*nvfp4+sr"
STOCHASTIC = f"fprop={EACH} dgrad={EACH} wgrad={EACH}"
RECIPES = ["bf16", "fp8_rowwise", "fp8_tensorwise", "fp8_delayed", "mxfp8", "nvfp4", "mxfp4"]
RECIPES += ["fp8_blockwise", "nvfp4_mxfp8", "nvfp4_served", STOCHASTIC, EDEN_RECIPE]
FEW = ["bf16", "fp8_delayed", "nvfp4", STOCHASTIC]
LAYERS = [
    {"fused_w13": True, "bias": True},
    {"fused_w13": False, "limit": 3.0, "dtype": torch.float32},
]


def sizes_here() -> list[int]:
    return SIZES[: dist.get_world_size()]


# ---- values --------------------------------------------------------------------------------------


def check_values(rank: int, recipes: list[str], largest: float = 3e-3) -> None:
    """All six operands, y, dx and dW are those of one process, with random bits too."""
    for recipe in recipes:
        for layer in LAYERS:
            cut, found, alone = passes(built(recipe, **layer), sizes_here())
            first = cut.experts.parallel.first_expert
            compared = require_same_operands(found.products, alone.products, first)
            products = 3 * 2 + 1 if layer["fused_w13"] else 3 * 3  # one for the sum of biases
            assert compared == 2 * products * E // dist.get_world_size()
            require_same_results(cut, found, alone, sizes_here(), largest)


@pytest.mark.parametrize("ranks", [2, 4])
def test_operands_and_results_are_those_of_one_process(ranks):
    run_world(ranks, check_values, RECIPES if ranks == 2 else FEW)


def check_mesh(rank: int) -> None:
    """Parameters on a mesh are DTensors, and a layer can be converted after the cut."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    sizes = sizes_here()
    for recipe in ("nvfp4", "fp8_delayed"):
        whole = built(recipe, fused_w13=True)
        cut, found, alone = passes(whole, sizes, mesh=mesh["ep"])
        require_same_operands(found.products, alone.products, cut.experts.parallel.first_expert)
        require_same_results(cut, found, alone, sizes)
        for name, parameter in cut.experts.named_parameters():
            assert torch.equal(parameter.full_tensor(), whole.experts.get_parameter(name)), name
        late = mf.expert_parallel(built("bf16", fused_w13=True), mesh["ep"])
        mf.quantize_(late, recipe, data_parallel_rank=rank)
        again = Pass(
            late, own(draw(1, sum(sizes)), sizes, rank), own(draw(2, sum(sizes)), sizes, rank)
        )
        require_same_operands(again.products, found.products, 0)


def test_a_mesh_dimension_gives_dtensors():
    run_world(2, check_mesh)


def check_steps(rank: int, is_on_mesh: bool, is_checkpointed: bool) -> None:
    for recipe in ("bf16", "nvfp4", "fp8_delayed"):
        mesh = dist.group.WORLD
        if is_on_mesh:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))["ep"]
        check_steps_of(rank, recipe, mesh, is_checkpointed)


def check_steps_of(rank: int, recipe: str, mesh: object, is_checkpointed: bool) -> None:
    """Ranks train as one process does: random states, histories, weight codes, balance."""
    whole = built(recipe, fused_w13=True, balance_speed=0.25)
    for _, state in mf.nn.state.random_hooks.states_of(whole):
        state.rank = 0
        state.set(state.get())
    cut = mf.expert_parallel(copy.deepcopy(whole), mesh)
    sizes = sizes_here()
    optimizers = [torch.optim.SGD(m.experts.parameters(), lr=1e-3) for m in (cut, whole)]

    def micro_batch(moe, x):
        if is_checkpointed:
            return torch.utils.checkpoint.checkpoint(moe, x, use_reentrant=False)
        return moe(x)

    for i in range(3):
        for j in range(2):
            x = draw(10 * i + j, sum(sizes))
            y = micro_batch(cut, own(x, sizes, rank))
            expected = micro_batch(whole, x)
            assert y.isfinite().all(), recipe
            assert torch.equal(y, own(expected, sizes, rank)), (recipe, i, j)
            y.float().square().sum().backward()
            expected.float().square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mf.step(cut)
        mf.step(whole, dist.new_group([rank], use_local_synchronization=True))
        assert torch.equal(cut.router.expert_bias, whole.router.expert_bias)
        assert i > 0 or cut.router.expert_bias.any()
    state, expected = mf.training_state(cut), mf.training_state(whole)
    assert state.keys() == expected.keys()
    assert all(state[name].shape == expected[name].shape for name in state)
    fresh = mf.expert_parallel(built(recipe, fused_w13=True), dist.group.WORLD)
    mf.load_training_state(fresh, state)
    again = mf.training_state(fresh)
    assert all(torch.equal(again[name], state[name]) for name in state)
    if recipe == "fp8_delayed":
        # The first history is that of x in fprop, which no sum has changed.
        names = [name for name in state if name.endswith("w13_product.amax_history")]
        assert torch.equal(state[names[0]][0], expected[names[0]][0])
        assert state[names[0]].all(dim=1).any()


@pytest.mark.parametrize(
    ("is_on_mesh", "is_checkpointed"), [(False, False), (False, True), (True, False)]
)
def test_steps_are_those_of_one_process(is_on_mesh, is_checkpointed):
    run_world(2, check_steps, is_on_mesh, is_checkpointed)


def check_compiled(rank: int) -> None:
    """Compiled code calls the divided experts between its graphs; a copy shares the group."""
    x, g = draw(rank, 9), draw(5 + rank, 9)
    cut = mf.expert_parallel(built("mxfp8", shared_experts=1), dist.group.WORLD)
    eager, compiled = Pass(cut, x, g), copy.deepcopy(cut)
    assert compiled.experts.parallel is not cut.experts.parallel
    compiled.compile(backend="eager")
    found = Pass(compiled, x, g)
    assert torch.equal(found.y, eager.y)
    assert torch.equal(found.dx, eager.dx)


def test_compiled_code_calls_divided_experts():
    run_world(2, check_compiled)


# ---- sizes ---------------------------------------------------------------------------------------


def check_one_copy(rank: int) -> None:
    """A forward copies counts to the host once, a backward nothing; with a capacity neither."""
    for options, expected in (({}, ["tolist"]), ({"capacity": 5}, [])):
        moe = mf.expert_parallel(built("mxfp8"), dist.group.WORLD, **options)
        for _ in range(3):
            with HostReads() as forward:
                y = moe(draw(rank, 12))
            assert forward.found == expected, options
            with HostReads() as backward:
                y.float().square().sum().backward()
            assert backward.found == [], options


def test_exact_sizes_take_one_copy_to_the_host():
    run_world(2, check_one_copy)


def check_empty(rank: int) -> None:
    """No token on any rank, and experts of one rank alone."""
    for options in ({}, {"capacity": 4}, {"capacity": "all"}):
        moe = mf.expert_parallel(built("nvfp4", bias=True), dist.group.WORLD, **options)
        x = draw(0, 0).requires_grad_()
        y = moe(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == (0, D)
        assert not any(p.grad.any() for p in moe.experts.parameters())
    whole = built("nvfp4")
    whole.router.expert_bias[: E // 2] = -100.0  # every token goes to the second rank
    sizes = [9, 9]
    for options in ({}, {"capacity": "all"}):
        cut, found, alone = passes(whole, sizes, **options)
        require_same_operands(found.products, alone.products, cut.experts.parallel.first_expert)
        require_same_results(cut, found, alone, sizes)


def test_ranks_and_experts_may_be_empty():
    run_world(2, check_empty)


def check_capacity_that_drops_none(rank: int, recipes: list[str]) -> None:
    for recipe in recipes:
        for capacity in ("all", 12 * K):
            sizes = [12] * dist.get_world_size()
            for layer in LAYERS:
                whole = built(recipe, **layer)
                cut, found, alone = passes(whole, sizes, capacity=capacity)
                first = cut.experts.parallel.first_expert
                require_same_operands(found.products, alone.products, first)
                require_same_results(cut, found, alone, sizes)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    mf.step(cut)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_large_capacity_drops_nothing(ranks):
    run_world(ranks, check_capacity_that_drops_none, ["fp8_tensorwise", "nvfp4"][: 4 // ranks])


def check_dropped_rows(rank: int) -> None:
    """Rows past the capacity add nothing, bias included; mf.step warns of their number once."""
    capacity, sizes = 7, [12, 10]
    whole = built("mxfp8", fused_w13=True, bias=True, name="moe")
    cut = mf.expert_parallel(copy.deepcopy(whole), dist.group.WORLD, capacity=capacity)
    x = own(draw(1, sum(sizes)), sizes, rank).requires_grad_()
    y = cut(x)
    y.float().sum().backward()
    indices, weights = whole.router(own(draw(1, sum(sizes)), sizes, rank))
    kept = torch.zeros_like(indices, dtype=torch.bool)
    for ranks_experts in range(2):
        pairs = [
            (e, t, slot)
            for t, chosen in enumerate(indices.tolist())
            for slot, e in enumerate(chosen)
            if e // (E // 2) == ranks_experts
        ]
        for _, t, slot in sorted(pairs)[:capacity]:
            kept[t, slot] = True
    dropped = int((~kept).sum())
    assert dropped > 0
    experts = whole.experts
    expected = experts(x.detach(), indices.masked_fill(~kept, E), weights)
    assert torch.equal(y, expected)
    with pytest.warns(
        UserWarning, match=rf"rank {rank} dropped {dropped} rows of .*\(capacity 7\)"
    ) as seen:
        mf.step(cut)
    assert len(seen) == 1
    assert cut.experts.parallel.step_dropped == dropped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mf.step(cut)


def test_rows_past_the_capacity_are_dropped_and_reported():
    run_world(2, check_dropped_rows)


# ---- a caller's dispatcher -----------------------------------------------------------------------


class Gathering:
    """A dispatcher that gathers all rows on all ranks, and delivers them in reverse."""

    def __init__(self, experts: int) -> None:
        self.each = experts // dist.get_world_size()
        self.calls: list[str] = []

    def gathered(self, t: torch.Tensor) -> list[torch.Tensor]:
        found: list = [None] * dist.get_world_size()
        dist.all_gather_object(found, t)
        return found

    def dispatch(self, rows, experts, handle):
        self.calls.append("dispatch")
        assert (rows.dtype, rows.is_contiguous()) == (torch.uint8, True)
        assert rows.shape[1] % 16 == 0
        assert (handle is None) == (self.calls.count("dispatch") == 1)
        mine, found, taken = dist.get_rank(), [], []
        for source, (others, chosen) in enumerate(zip(self.gathered(rows), self.gathered(experts))):
            for i in range(len(others)):
                if chosen[i] // self.each == mine:
                    found.append(others[i])
                    taken.append((source, i))
        found.append(torch.zeros_like(rows[0]))  # rows of zeros are ignored
        return torch.stack(found[::-1]), (len(rows), taken)

    def combine(self, rows, handle):
        self.calls.append("combine")
        count, taken = handle
        out = rows.new_zeros(count, rows.shape[1])
        answers = zip(self.gathered(rows.flip(0)), self.gathered(torch.tensor(taken).view(-1, 2)))
        for others, places in answers:
            for i, (source, place) in enumerate(places.tolist()):
                if source == dist.get_rank():
                    out[place] = others[i]
        return out


def check_own_dispatcher(rank: int) -> None:
    sizes = [9, 6]
    for recipe in ("nvfp4", "fp8_tensorwise"):
        own_dispatcher = Gathering(E)
        whole = built(recipe, fused_w13=True, bias=True)
        cut, found, alone = passes(whole, sizes, dispatcher=own_dispatcher)
        assert own_dispatcher.calls == ["dispatch", "combine", "dispatch", "combine"]
        require_same_operands(found.products, alone.products, cut.experts.parallel.first_expert)
        require_same_results(cut, found, alone, sizes)
    for answer in (None, torch.zeros(3), torch.zeros(3, 5, dtype=torch.uint8)):
        own_dispatcher.dispatch = lambda rows, experts, handle, answer=answer: (answer, 1)
        with pytest.raises(
            (TypeError, ValueError), match="expert_parallel: dispatch: expected uint8"
        ):
            cut(draw(0, 4))


def test_a_callers_dispatcher_replaces_torchs_collective():
    run_world(2, check_own_dispatcher)


# ---- bad input -----------------------------------------------------------------------------------


def check_bad_input(rank: int) -> None:
    group = dist.group.WORLD

    def refused(error, text, model, mesh=group, **options):
        before = [(name, p, p.shape) for name, p in model.named_parameters()]
        with pytest.raises(error, match=text):
            mf.expert_parallel(model, mesh, **options)
        after = [(name, p, p.shape) for name, p in model.named_parameters()]
        assert all(a[1] is b[1] and a[2] == b[2] for a, b in zip(before, after))

    both = torch.nn.Sequential(built("bf16"), built("bf16", experts=7))
    refused(ValueError, "1: expected experts as a multiple of the group's 2 ranks, got 7", both)
    moe = built("bf16")
    refused(ValueError, "capacity: expected at least 1 row, got 0", moe, capacity=0)
    refused(ValueError, "capacity: expected at least 1 row, got -3", moe, capacity=-3)
    refused(TypeError, "capacity: expected an int, got 1.5", moe, capacity=1.5)
    refused(ValueError, "capacity: expected a number of rows, 'all' or None", moe, capacity="some")
    refused(ValueError, "dispatch: expected one of .*, got 'fp8'", moe, dispatch="fp8")
    refused(TypeError, "dispatch and combine, got .* without combine", moe, dispatcher=Half())
    refused(ValueError, "got both", moe, dispatcher=Gathering(E), capacity=3)
    refused(ValueError, "expected a model with an mf.MoE, got Linear", torch.nn.Linear(3, 3))
    refused(TypeError, "mesh: expected a DeviceMesh", moe, mesh="ep")
    refused(ValueError, "expected one dimension, got 2", moe, mesh=init_device_mesh("cpu", (1, 2)))
    mf.expert_parallel(moe, group)
    refused(ValueError, "expected whole experts, got experts", moe)
    shared = torch.nn.Sequential(built("bf16"), built("bf16"))
    shared[1].experts = shared[0].experts
    mf.expert_parallel(shared, group)  # once
    assert shared[1].experts.w2.shape[0] == E // 2


class Half:
    def dispatch(self, rows, experts, handle): ...


def test_bad_input_is_one_error_and_changes_nothing():
    run_world(2, check_bad_input)
