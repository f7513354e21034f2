"""A guard's ranks all leave a step out, or none does, and say the same of it."""

import math
import warnings

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.inspector import StepGuard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.same_bits import require_all_same
from tests.support.sharded_models import batch, built, sharded
from tests.support.worlds import last_words, run_world

STEPS, BAD = 4, 1
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def texts_of_ranks(text):
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def loss_of(model, x):
    return model(x).square().mean()


def train(model, optimizer, steps, spoil=None, guard=None, loss=True):
    """Spoils the gradients of step BAD."""
    for step in steps:
        x = batch(step)
        loss_of(model, x).backward()
        if step == BAD and spoil is not None:
            spoil(model)
        if guard is not None:
            guard.check(*[x] if loss else [])
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)


def spoil_on_last_rank(model):
    if dist.get_rank() == dist.get_world_size() - 1:
        model.blocks[0].down.weight.grad.to_local()[0, 0] = math.nan


def state_of(model, optimizer):
    found = {f"weights {n}": p.to_local() for n, p in model.named_parameters()}
    found |= {f"training {n}": t for n, t in mf.training_state(model).items()}
    for p, states in optimizer.state.items():
        for n, t in states.items():
            found[f"{n} of {p.shape}"] = getattr(t, "_local_tensor", t)
    return found


def check_skip(rank, name):
    guarded, plain = sharded(built("fp8_delayed")), sharded(built("fp8_delayed"))
    optimizer, without = (OPTIMIZERS[name](model.parameters()) for model in (guarded, plain))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with StepGuard(guarded, optimizer, on_nonfinite="skip") as guard:
            train(guarded, optimizer, range(STEPS), spoil_on_last_rank, guard, loss=False)
    said = [str(w.message) for w in warned if "gradients are not finite" in str(w.message)]
    want = "minifloat: step 2: 1 of 12 gradients are not finite, the last in the model, where "
    want += "backward begins, that of blocks.0.down.weight on ranks [1]; no other is wrong"
    assert [text.startswith(want) for text in said] == [True] * (rank == 0)
    train(plain, without, [step for step in range(STEPS) if step != BAD])
    require_all_same(state_of(guarded, optimizer), state_of(plain, without))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fsdp2_skips_on_all_ranks(name):
    run_world(2, check_skip, name)


def check_raise(rank, name):
    model = sharded(built("fp8_delayed"))
    optimizer = OPTIMIZERS[name](model.parameters())
    guard = StepGuard(model, optimizer, on_nonfinite="raise", loss=loss_of)
    with pytest.raises(FloatingPointError) as raised:
        train(model, optimizer, range(STEPS), spoil_on_last_rank, guard)
    assert len(set(texts_of_ranks(str(raised.value)))) == 1
    assert "step 2: 1 of 12" in str(raised.value)
    assert "Repeated, the batch has finite values alone" in str(raised.value)
    optimizer.zero_grad()
    train(model, optimizer, range(BAD + 1, STEPS), None, guard)  # a caller may go on
    plain = sharded(built("fp8_delayed"))
    without = OPTIMIZERS[name](plain.parameters())
    train(plain, without, [step for step in range(STEPS) if step != BAD])
    require_all_same(state_of(model, optimizer), state_of(plain, without))


@pytest.mark.parametrize("name", ["adamw", "fused adamw"])
def test_fsdp2_raises_on_all_ranks(name):
    run_world(2, check_raise, name)


def check_batch(rank):
    """One rank's batch has an Inf, which the reduction spreads; each repeats its own."""
    model = sharded(built("mxfp8"))
    optimizer = OPTIMIZERS["fused adamw"](model.parameters())
    guard = StepGuard(model, optimizer, on_nonfinite="raise", loss=loss_of)
    x = batch(0)
    if rank == 0:
        x[2, 3] = math.inf
    loss_of(model, x).backward()
    guard.check(x)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with pytest.raises(FloatingPointError) as raised:
        guard.remove()
    assert len(set(texts_of_ranks(str(raised.value)))) == 1
    assert "step 1: 12 of 12 gradients" in str(raised.value)
    assert "in blocks.0.norm, x: 1 of 1152 values on ranks [0]. The" in str(raised.value)


def test_each_rank_repeats_its_batch():
    run_world(2, check_batch)


def check_stages(rank):
    """Ranks with other parameters, as stages of a pipeline or experts."""
    model = nn.ModuleDict({f"of_rank_{rank}": nn.Linear(4, 4 + rank)})
    optimizer = torch.optim.AdamW(model.parameters(), fused=rank == 0)
    before = [p.detach().clone() for p in model.parameters()]
    guard = StepGuard(model, optimizer, on_nonfinite="raise")
    if rank != 1:  # which has no gradient at all
        model[f"of_rank_{rank}"](torch.ones(2, 4)).sum().backward()
    if rank == 2:
        model.of_rank_2.weight.grad[0, 0] = math.inf
    with pytest.raises(FloatingPointError) as raised:
        guard.check()  # at once also where the optimizer is fused: others wait
    require_all_same([p.detach() for p in model.parameters()], before)
    assert len(set(texts_of_ranks(str(raised.value)))) == 1
    assert "that of of_rank_2.weight on ranks [2]; no other" in str(raised.value)
    optimizer.zero_grad()
    if rank != 1:
        model[f"of_rank_{rank}"](torch.ones(2, 4)).sum().backward()
    guard.check()
    optimizer.step()  # is taken
    assert all(torch.equal(p, b) == (rank == 1) for p, b in zip(model.parameters(), before))


def test_ranks_with_other_parameters():
    run_world(3, check_stages)


def check_tensor_parallel(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    mf.quantize_(model, "mxfp8", keep="nothing")
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    before = [p.to_local().clone() for p in model.parameters()]
    model(torch.ones(32, 32)).sum().backward()
    if rank == 1:
        model[0].weight.grad.to_local()[3, 4] = math.inf
    for parts in ([model], [model[0], model[2]]):
        optimizers = [torch.optim.AdamW(part.parameters(), fused=True) for part in parts]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with StepGuard(model, optimizers, on_nonfinite="skip") as guard:
                guard.check()
                for optimizer in optimizers:
                    optimizer.step()
        require_all_same([p.to_local() for p in model.parameters()], before)
    assert not any(p.grad.to_local().any() for p in model.parameters())  # no check finds them again


def test_tensor_parallel():
    run_world(2, check_tensor_parallel)


def check_group(rank):
    """Two ranks train a model each."""
    groups = [dist.new_group([i]) for i in range(2)]
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    before = model.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with StepGuard(model, optimizer, on_nonfinite="skip", group=groups[rank]) as guard:
            (model(torch.ones(2, 4)).sum() * (math.inf if rank == 0 else 1)).backward()
            guard.check()
            optimizer.step()
    assert torch.equal(model.weight, before) == (rank == 0)


def test_ranks_of_a_group_decide_without_others():
    run_world(2, check_group)


def check_arguments(rank):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(
        ValueError, match=r"expected one of raise, skip, got 'stop' \(ranks \[1\]\)"
    ):
        StepGuard(model, optimizer, on_nonfinite="stop" if rank == 1 else "skip")
    with pytest.raises(
        ValueError, match="expected the same arguments on all ranks, but rank 0 has"
    ):
        StepGuard(model, optimizer, on_nonfinite="raise" if rank == 1 else "skip")
    StepGuard(model, optimizer, on_nonfinite="skip")


def test_every_rank_raises_what_one_rank_passed():
    run_world(2, check_arguments)


def make_none(rank):
    model = nn.Linear(4, 4)
    if rank == 0:
        StepGuard(model, torch.optim.SGD(model.parameters()), on_nonfinite="skip")


def test_a_rank_without_a_guard_is_named():
    words = last_words(2, make_none, seconds=4)
    assert "expected all 2 ranks to make one of" in words[0]
    assert "ranks [1] have not arrived" in words[0]


def check_batches(rank):
    """Ranks with other numbers of batches would wait for each other in a gather."""
    model = sharded(built("mxfp8"))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    guard = StepGuard(model, optimizer, on_nonfinite="raise", loss=loss_of)
    x = batch(0)
    x[2, 3] = math.inf
    loss_of(model, x).backward()
    batches = [x] if rank == 0 else [x, x]
    with pytest.raises(FloatingPointError) as raised:
        guard.check(*batches)
    assert len(set(texts_of_ranks(str(raised.value)))) == 1
    assert "expected as many batches on all ranks, got [1, 2]" in str(raised.value)


def test_ranks_with_other_numbers_of_batches():
    run_world(2, check_batches)


def check_batch_without_a_loss(rank, name):
    """One rank's error is that of all, before anything is applied."""
    model = sharded(built("mxfp8"))
    optimizer = OPTIMIZERS[name](model.parameters())
    before = [p.to_local().clone() for p in model.parameters()]
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    loss_of(model, batch(0)).backward()

    def step():
        guard.check(*[batch(0)] * rank)
        optimizer.step()
        guard.remove()

    with pytest.raises(ValueError, match=r"expected a loss to repeat .* on ranks \[1\]$"):
        step()
    require_all_same([p.to_local() for p in model.parameters()], before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_batch_without_a_loss_on_one_rank(name):
    run_world(2, check_batch_without_a_loss, name)


def leave(rank):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), fused=True)
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    guard.check()
    if rank == 0:
        guard.remove()


def test_a_rank_without_a_report_is_named():
    words = last_words(2, leave, seconds=4)
    assert "expected all 2 ranks to report step 1, but ranks [1] have not arrived" in words[0]


def check_empty_shard(rank):
    """A rank without a row of a weight takes no step of it either."""
    model = sharded(nn.Sequential(nn.Linear(8, 1)), by_block=False)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    (model(torch.ones(2, 8)).sum() * math.inf).backward()
    assert (model[0].weight.grad.to_local().numel() == 0) == (rank == 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guard.check()
    optimizer.step()
    assert not optimizer.state


def test_a_shard_that_is_empty():
    run_world(2, check_empty_shard)


def check_partial(rank, name):
    """Each rank's part is finite, and their sum is not."""
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    model = nn.ParameterList([weight])
    weight.grad = DTensor.from_local(torch.full((4,), 3e38), mesh, [Partial()])
    guard = StepGuard(model, OPTIMIZERS[name](model), on_nonfinite="raise")

    def step():
        guard.check()
        guard.remove()

    with pytest.raises(FloatingPointError, match="1 of 1 gradients"):
        step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_of_a_sum(name):
    run_world(2, check_partial, name)


def check_two_places(rank):
    """Each rank's shard of another weight is wrong: none is the only one."""
    model = sharded(built("mxfp8"))
    guard = StepGuard(model, OPTIMIZERS["adamw"](model.parameters()), on_nonfinite="raise")
    loss_of(model, batch(0)).backward()
    model.blocks[rank].down.weight.grad.to_local()[0, 0] = math.nan
    with pytest.raises(FloatingPointError) as raised:
        guard.check()
    text = "1 of 12 gradients are not finite, the last in the model, where backward begins, that of"
    first, second = (f"{text} blocks.{i}.down.weight on ranks [{i}]" for i in range(2))
    assert str(raised.value) == f"step 1: {first}; {second}. The step was left out"


def test_ranks_with_other_wrong_gradients():
    run_world(2, check_two_places)


def check_error_of_one(rank):
    """Of a repetition, in which the other rank waits: what gradients say is not lost."""
    model = sharded(built("mxfp8"))

    def loss(model, x):
        if rank == 1:
            raise MemoryError("of this rank")
        raise ValueError("of the rank that waits")

    optimizer = OPTIMIZERS["adamw"](model.parameters())
    guard = StepGuard(model, optimizer, on_nonfinite="raise", loss=loss)
    x = batch(0)
    x[2, 3] = math.inf
    loss_of(model, x).backward()
    with pytest.raises(FloatingPointError) as raised:
        guard.check(x)
    assert "12 of 12 gradients" in str(raised.value)
    assert "Repeating the batch raised ValueError: of the rank that waits" in str(raised.value)


def test_an_error_of_one_rank_while_batches_are_repeated():
    run_world(2, check_error_of_one)


def check_change(rank, on_nonfinite):
    """One rank's optimizer is no longer fused: all raise, before anything is applied."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    before = model.weight.detach().clone()
    guard = StepGuard(model, optimizer, on_nonfinite=on_nonfinite)
    optimizer.param_groups[0]["fused"] = rank == 0
    model(torch.ones(2, 4)).sum().backward()
    guard.check()
    optimizer.step()
    assert torch.equal(model.weight, before)
    with pytest.raises(ValueError, match=r"expected optimizers that are fused.* on ranks \[1\]$"):
        guard.remove()


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_an_optimizer_of_one_rank_that_is_no_longer_fused(on_nonfinite):
    run_world(2, check_change, on_nonfinite)


def check_one_rank_alone(rank):
    """All gradients of one rank are wrong, and none of the other's."""
    model = nn.Linear(4, 4)
    guard = StepGuard(model, torch.optim.SGD(model.parameters()), on_nonfinite="raise")
    (model(torch.ones(2, 4)).sum() * (math.inf if rank else 1)).backward()
    with pytest.raises(FloatingPointError) as raised:
        guard.check()
    assert "that of bias on ranks [1]; none behind it is wrong" in str(raised.value)


def test_gradients_of_one_rank_alone():
    run_world(2, check_one_rank_alone)
