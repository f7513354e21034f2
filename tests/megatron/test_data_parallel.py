"""Gradients of a GPTModel over tensor- and data-parallel ranks, by Megatron's DDP."""

import minifloat as mf
import pytest
import torch.distributed as dist

from tests.support import megatron_models as models
from tests.support.same_bits import require_same
from tests.support.worlds import run_world

pytest.importorskip("megatron.core")


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
