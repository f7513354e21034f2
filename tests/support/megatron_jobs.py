"""A small GPTModel of Megatron-Core in its wrapper, with its distributed optimizer, on a CPU.

models.begin(tp=2)                   Megatron's groups of the world's ranks
job = Job("mxfp8_2d", holds_codes=True, clip=1.0, overlap_grad_reduce=True)
loss, norm = job.step(0)
"""

import minifloat as mf
import torch
import torch.distributed as dist

from tests.support import megatron_models as models

MICRO_BATCHES = 2


class Job:
    """A converted GPTModel in Megatron's wrapper, with its optimizer."""

    def __init__(
        self, recipe, holds_codes, accumulate="main_grad", clip=0.0, names="local", **options
    ):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        model, optimizer = (options.pop(name, {}) for name in ("model", "optimizer"))
        self.config = models.config(**model)
        self.model = models.build(self.config, names)
        mf.quantize_(
            self.model,
            recipe,
            accumulate=accumulate,
            primary=holds_codes,
            keep_high_precision_init=holds_codes,
        )
        self.model.bfloat16()  # as Megatron's Float16Module does
        of_ddp = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True} | options
        if holds_codes:
            of_ddp[f"fp{4 if recipe == 'nvfp4' else 8}_param_gather"] = True
        of_wrapper = DistributedDataParallelConfig(**of_ddp)
        self.wrapper = DistributedDataParallel(self.config, of_wrapper, self.model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                clip_grad=clip,
                overlap_param_gather=of_ddp.get("overlap_param_gather", False),
                **({"lr": 2e-3} | optimizer),
            ),
            [self.wrapper],
        )
        self.finalize = finalize_model_grads

    def backward(self, step):
        """Runs both micro-batches of a step, and returns the loss of all ranks."""
        from megatron.core import parallel_state

        self.wrapper.zero_grad_buffer()
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for i in range(MICRO_BATCHES):
            sync = torch.enable_grad if i + 1 == MICRO_BATCHES else self.wrapper.no_sync
            with sync():
                total += self.micro_batch(step, i)
        self.finalize([self.wrapper])
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.item()

    def micro_batch(self, step, i):
        """Runs one micro-batch of this data-parallel rank, and returns its loss."""
        from megatron.core import parallel_state

        rank = parallel_state.get_data_parallel_rank()
        tokens, places, labels = models.batch(step, 10 * rank + i)
        each = self.wrapper(tokens, places, None, labels=labels)
        loss = each.float().mean() / MICRO_BATCHES
        loss.backward()
        return loss.detach()

    def step(self, step):
        """Returns the loss of a step and the norm of its gradients."""
        loss = self.backward(step)
        _, norm, _ = self.optimizer.step()
        mf.step(self.model)
        return loss, norm

    def pause(self):
        """Gathers the parameters as Megatron does before it evaluates or saves."""
        if self.wrapper.ddp_config.overlap_param_gather:
            self.wrapper.disable_forward_pre_hook()
            self.wrapper.enable_forward_pre_hook()

    def values(self):
        """Returns the parameters' values, gathered."""
        if self.wrapper.ddp_config.overlap_param_gather:
            self.wrapper.start_param_sync(force_sync=True)
        return {n: p.detach().float() for n, p in self.model.named_parameters()}


def linear_layers(model):
    return [module for module in model.modules() if hasattr(module, "recipe")]
