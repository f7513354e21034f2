"""mf.moe.balance_loss: its gradient has every factor of the loss that it is added to."""

import copy
import pickle

import minifloat as mf
import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

from tests.support.worlds import run_world

D, HIDDEN, E, K = 32, 48, 8, 2


class Block(nn.Module):
    """A residual block. It returns the sum of balance losses beside its output where it is told."""

    def __init__(self, returns_loss: bool = False, **options) -> None:
        super().__init__()
        self.returns_loss = returns_loss
        self.moe = mf.MoE(D, HIDDEN, E, K, **({"balance": "loss", "balance_loss": 0.1} | options))

    def forward(self, x, balance=None):
        y = x + self.moe(x)
        if not self.returns_loss:
            return y
        own = mf.moe.balance_loss(self)
        return y, own if balance is None else balance + own


def built(layers: int = 2, **options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**options) for _ in range(layers)))


def tokens(seed: int = 1, count: int = 64) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def written_loss(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """The loss as docs/moe.md writes it, from the routers' public results."""
    total = 0
    for block in model:
        router = block.moe.router
        scores = (x @ router.weight.T).sigmoid()
        indices, _ = copy.deepcopy(router).eval()(x)
        share = nn.functional.one_hot(indices, E).sum((0, 1)) / indices.numel()
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        total = total + router.balance_loss * E * (share * mean).sum()
        x = block(x)
    mf.moe.balance_loss(model)
    return total


def reference(model, x, task):
    """Gradients of task + the written loss."""
    (task(model.eval()(x)) + written_loss(model.train(), x)).backward()
    return gradients(model)


def assert_close(found, expected) -> None:
    """Two sums in fp32 of the same at most 64 · 48 terms, in another order: a few units of 2^-24
    of the largest terms, which are below 1."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def task(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


@pytest.mark.parametrize("recipe", [None, "nvfp4"])
def test_follows_the_loss(recipe):
    """Micro-batches, loss scaling, whose power of two changes no bit of a gradient, and zero."""
    model, x = built(), tokens()
    expected = reference(model, x, task)
    if recipe is not None:
        mf.quantize_(model, "*: nvfp4; *.experts: mxfp8")
    (task(model(x)) + mf.moe.balance_loss(model)).backward()
    once = gradients(model)
    if recipe is None:
        assert_close(once, expected)
    for _ in range(8):
        ((task(model(x)) + mf.moe.balance_loss(model)) / 8).backward()
    for a, b in zip(gradients(model), once):
        # 7 additions of equal numbers in fp32, each to 2^-24 of its result: 4.2e-7
        torch.testing.assert_close(a, b, rtol=4.2e-7, atol=0)
    (65536 * (task(model(x)) + mf.moe.balance_loss(model))).backward()
    for a, b in zip(gradients(model), once):
        assert torch.equal(a / 65536, b)
    (0 * (task(model(x)) + mf.moe.balance_loss(model))).backward()
    assert not any(g.any() for g in gradients(model))
    mf.step(model)


def test_value_is_that_of_the_written_loss():
    model, x = built(), tokens()
    expected = written_loss(model, x)
    model(x)
    found = mf.moe.balance_loss(model)
    assert (found.shape, found.dtype) == ((), torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)  # scalars of fp32 sums
    assert mf.moe.balance_loss(model).item() == 0  # it was taken


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_return_it(use_reentrant):
    """Both kinds of recomputation, with the loss beside the output."""
    model, x = built(returns_loss=True), tokens().requires_grad_()

    def run(call):
        y, balance = x, None
        for block in model:
            y, balance = call(block, y) if balance is None else call(block, y, balance)
        (task(y) + balance).backward()
        counts = [block.moe.router.counts.clone() for block in model]
        mf.step(model)
        return balance.detach(), [*gradients(model), x.grad.clone(), *counts]

    value, expected = run(lambda block, *inputs: block(*inputs))
    x.grad = None
    recomputed, found = run(
        lambda block, *inputs: checkpoint(block, *inputs, use_reentrant=use_reentrant)
    )
    assert torch.equal(recomputed, value)
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


def test_read_behind_checkpointed_blocks():
    """use_reentrant=False keeps the graph of the first forward; True has none, which raises."""
    model, x = built(), tokens().requires_grad_()
    (task(model(x)) + mf.moe.balance_loss(model)).backward()
    expected = gradients(model)
    y = x
    for block in model:
        y = checkpoint(block, y, use_reentrant=False)
    (task(y) + mf.moe.balance_loss(model)).backward()
    for a, b in zip(gradients(model), expected):
        assert torch.equal(a, b)
    mf.step(model)
    for block in model:
        y = checkpoint(block, y, use_reentrant=True)
    with pytest.raises(ValueError, match=r"balance_loss: 0\.moe: expected a forward with gradient"):
        mf.moe.balance_loss(model)


def test_compiled_models():
    """One graph, whether the loss is read behind it or within it."""
    model, x = built(), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inner = copy.deepcopy(model)

    def step(x):
        return task(inner(x)) + mf.moe.balance_loss(inner)

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x = tokens(seed)
        (task(model(x)) + mf.moe.balance_loss(model)).backward()
        expected = gradients(model)
        (task(compiled(x)) + mf.moe.balance_loss(model)).backward()
        assert_close(gradients(model), expected)
        whole(x).backward()
        assert_close(gradients(inner), expected)
    mf.step(model)
    mf.step(inner)


@torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
def test_compiled_checkpoints():
    """A checkpoint within compiled code, by the setting that torch's error names, as torchtitan."""
    model, x = built(), tokens()
    (task(model(x)) + mf.moe.balance_loss(model)).backward()
    expected = gradients(model)

    def blocks(x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    compiled = torch.compile(blocks, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        (task(compiled(x)) + mf.moe.balance_loss(model)).backward()
        assert_close(gradients(model), expected)
    mf.step(model)


def test_grad_scaler_skips_a_step_and_keeps_the_ratio():
    model, x = built(), tokens()
    (task(model(x)) + mf.moe.balance_loss(model)).backward()
    expected = gradients(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(task(model(x)) + mf.moe.balance_loss(model)).backward()
    scaler.unscale_(optimizer)
    for a, b in zip(gradients(model), expected):
        assert torch.equal(a, b)


def test_step_refuses_a_loss_that_nobody_read():
    model, x = built(), tokens()
    task(model(x)).backward()
    kept = [block.moe.router.loss for block in model]
    for _ in range(2):  # nothing is dropped
        with pytest.raises(ValueError, match=r"nobody read in 0\.moe, 1\.moe"):
            mf.step(model)
        assert all(block.moe.router.loss is loss for block, loss in zip(model, kept))
    mf.moe.balance_loss(model)  # of a forward that is given up
    mf.step(model)
    with torch.no_grad():
        model(x)
    mf.step(model)  # a forward without gradients balances nothing
    model.eval()(x)
    assert mf.moe.balance_loss(model).item() == 0


def test_forwards_without_gradients_leave_no_trace():
    model, x = built(), tokens()
    model(x)
    expected = mf.moe.balance_loss(model)
    for before, behind in ((True, False), (False, True)):
        with torch.no_grad():
            _ = model(tokens(5)) if before else None
        model(x)
        with torch.no_grad():
            _ = model(tokens(5)) if behind else None
        assert torch.equal(mf.moe.balance_loss(model), expected)


def test_copies_have_no_loss():
    model = built()
    model(tokens())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert mf.moe.balance_loss(other).item() == 0
    assert mf.moe.balance_loss(model).requires_grad


def test_models_without_the_loss():
    assert mf.moe.balance_loss(nn.Linear(2, 2)).item() == 0
    model = built(balance="bias")
    model(tokens())
    assert mf.moe.balance_loss(model).item() == 0
    with pytest.raises(TypeError, match=r"balance_loss: expected a torch\.nn.Module"):
        mf.moe.balance_loss([model])


class Stage(nn.Module):
    """Blocks that pass their output and the loss so far, of shape (1): schedules join outputs."""

    def __init__(self, blocks) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, balance=None):
        for block in self.blocks:
            x = block(x)
        own = mf.moe.balance_loss(self)[None]
        return x, own if balance is None else balance + own


def check_pipeline(rank: int) -> None:
    """Each stage adds its own loss to that of the stages before, and passes it on."""
    x, batches, layers = tokens(count=64), 4, 4
    alone = built(layers)
    for part in x.chunk(batches):
        ((task(alone(part)) + mf.moe.balance_loss(alone)) / batches).backward()
    of_block = [[p.grad for p in block.parameters()] for block in alone]

    def loss_fn(output, target):
        return task(output[0]) + output[1].sum()

    for kind, places in ((Schedule1F1B, [rank]), (ScheduleInterleaved1F1B, [rank, rank + 2])):
        model, each = built(layers), layers // (2 * len(places))
        stages = []
        for place in places:
            part = Stage(list(model)[place * each : (place + 1) * each])
            stages.append(PipelineStage(part, place, 2 * len(places), torch.device("cpu")))
        schedule = kind(stages if len(places) > 1 else stages[0], batches, loss_fn=loss_fn)
        is_last = places[-1] == 2 * len(places) - 1
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if is_last else {}))
        for place, stage in zip(places, stages):
            found = [p.grad for p in stage.submod.parameters()]
            expected = [g for gs in of_block[place * each : (place + 1) * each] for g in gs]
            for a, b in zip(found, expected, strict=True):
                # the same sums of four micro-batches, each divided by 4 before or after
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
            mf.step(
                stage.submod, torch.distributed.new_group([rank], use_local_synchronization=True)
            )


def test_stages_of_a_pipeline_pass_it_on():
    run_world(2, check_pipeline)
