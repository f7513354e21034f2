"""Training of a GPTModel over tensor- and data-parallel ranks, with Megatron's DDP."""

import math

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import megatron_models as models
from tests.support.same_bits import require_same
from tests.support.worlds import run_world

pytest.importorskip("megatron.core")

# ---- gradients -----------------------------------------------------------------------------------


def wrap(model):
    """Wraps a model in Megatron's DistributedDataParallel, whose sums are in float32."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    of = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(model.config, of, model)


def reduce_gradients(wrapped):
    """Has Megatron sum gradients over ranks: of data, and of tokens that tensor ranks cut."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([wrapped])


def alone(of, recipe, rank):
    """Returns the gradients of one data-parallel rank's batch, before any sum over ranks."""
    model = models.build(of)
    mf.quantize_(model, recipe, data_parallel_rank=rank)
    tokens, positions, labels = models.batch(0, rank)
    model(tokens, positions, None, labels=labels).float().mean().backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


def check_gradients(rank):
    """Checks that gradients are the mean of what each data-parallel rank has alone, to the bit.

    The ranks of a tensor-parallel group draw the same bits, and those of other data others.
    """
    groups = models.begin(tp=2)
    for cuts_tokens in (False, True):
        of = models.config(sequence_parallel=cuts_tokens)
        for recipe in ("mxfp8", "nvfp4"):
            parts = [alone(of, recipe, data) for data in (0, 1)]
            model = models.build(of)
            wrapped = wrap(model)
            report = mf.quantize_(model, recipe)
            assert len(report.converted) == 8
            wrapped.zero_grad_buffer()
            models.loss(wrapped).backward()
            reduce_gradients(wrapped)
            for name, parameter in model.named_parameters():
                want = parts[0][name] / 2 + parts[1][name] / 2  # two terms: exact in any order
                if getattr(parameter, "sequence_parallel", False):
                    dist.all_reduce(want, group=groups.get_tensor_model_parallel_group())
                require_same(parameter.main_grad, want, f"{recipe}, {cuts_tokens}: {name}")


def test_gradients_are_the_mean_of_data_parallel_ranks():
    run_world(4, check_gradients)


# ---- the loss ------------------------------------------------------------------------------------

STEPS, LAST = 200, 50
CHOICES = 4  # that follow a token alike: no loss is below their entropy, log 4


def text(step, rank):
    """Returns (tokens, positions, labels), of which each token is one of four after the last."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    count = models.TOKENS + 1
    moves = torch.randint(1, CHOICES + 1, (2 * models.BATCH, count), generator=draw)
    tokens = moves.cumsum(1) % models.VOCABULARY
    return tokens[:, :-1], torch.arange(count - 1).expand(len(tokens), -1), tokens[:, 1:]


def trained(groups, recipe, seed):
    """Returns the mean loss of the last steps, over all data."""
    of = models.config(sequence_parallel=True)
    model = models.build(of, seed=seed)
    wrapped = wrap(model)
    if recipe is not None:
        mf.quantize_(model, recipe)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=4e-3, weight_decay=0.0)
    data, losses = groups.get_data_parallel_group(), []
    for step in range(STEPS):
        wrapped.zero_grad_buffer()
        tokens, positions, labels = text(step, groups.get_data_parallel_rank())
        loss = wrapped(tokens, positions, None, labels=labels).float().mean()
        loss.backward()
        reduce_gradients(wrapped)
        for master, parameter in zip(masters, model.parameters()):
            master.grad = parameter.main_grad.clone()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters()):
                parameter.copy_(master)
        if recipe is not None:
            mf.step(model, data)
        losses.append(loss.detach())
    mean = torch.stack(losses[-LAST:]).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


# What a recipe may cost of the loss. docs/loss.md has at most 0.7% of FP8 and MXFP8 presets with W
# in rows or columns, and 1.3% of nvfp4 in all layers. Three seeds of bf16 lay within 0.05% of each
# other, with four ranks and twice the batch.
BOUNDS = {"fp8_delayed": 0.01, "nvfp4": 0.02}


def check_losses(rank):
    groups = models.begin(tp=2)
    plain = trained(groups, None, 0)
    assert math.log(CHOICES) < plain < math.log(2 * CHOICES)  # it has learned the task
    for recipe, bound in BOUNDS.items():
        loss = trained(groups, recipe, 0)
        assert abs(loss / plain - 1) < bound, f"{recipe}: {loss:.4f}, bf16: {plain:.4f}"


@pytest.mark.slow
def test_loss_of_200_steps_is_that_of_bf16():
    run_world(2, check_losses)
