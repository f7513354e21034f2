"""A small GPTModel of Megatron-Core in its wrapper, with its distributed optimizer, on a CPU.

begin(tensor_parallel=2)             Megatron's groups of the world's ranks
job = Job("mxfp8_2d", holds_codes=True, clip=1.0, overlap_grad_reduce=True)
loss, norm = job.step(0)
"""

import warnings
from functools import cache

import minifloat as mf
import torch
import torch.distributed as dist

WIDTH, VOCABULARY, TOKENS, MICRO_BATCHES = 64, 96, 32, 2


@cache
def megatron():
    """Gives Megatron-Core the CPU, once a process, and returns the example's module."""
    warnings.filterwarnings("ignore")
    import minifloat.megatron  # noqa: F401, which `import minifloat` leaves out

    from examples import megatron_on_cpu

    megatron_on_cpu.CpuForGpu().__enter__()
    return megatron_on_cpu


def begin(tensor_parallel=1, **others):
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as random

    megatron()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel, **others)
    random.model_parallel_cuda_manual_seed(1)
    return parallel_state


def config_of(**changes):
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": WIDTH,
            "num_attention_heads": 4,
            "ffn_hidden_size": 2 * WIDTH,
            "use_cpu_initialization": True,
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm",
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        }
        | changes
    )


def gpt(config):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    with mf.megatron.backend():
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    torch.manual_seed(0)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).bfloat16()


class Job:
    """A converted GPTModel in Megatron's wrapper, with its optimizer."""

    def __init__(self, recipe, holds_codes, accumulate="main_grad", clip=0.0, **options):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        model, optimizer = (options.pop(name, {}) for name in ("model", "optimizer"))
        self.config = config_of(**model)
        self.model = gpt(self.config)
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
                lr=2e-3,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                clip_grad=clip,
                overlap_param_gather=of_ddp.get("overlap_param_gather", False),
                **optimizer,
            ),
            [self.wrapper],
        )
        self.finalize = finalize_model_grads
        self.same_layers = None  # the ranks that have the same layers; None: all

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
        draw = torch.Generator().manual_seed(100 * step + 10 * rank + i)
        places = torch.arange(TOKENS).expand(2, TOKENS)
        first = torch.randint(0, VOCABULARY, (2, 1), generator=draw)
        tokens = (first + places) % VOCABULARY  # each token follows the one before
        each = self.wrapper(tokens, places, None, labels=tokens.roll(-1, 1))
        loss = each.float().mean() / MICRO_BATCHES
        loss.backward()
        return loss.detach()

    def step(self, step):
        """Returns the loss of a step and the norm of its gradients."""
        loss = self.backward(step)
        _, norm, _ = self.optimizer.step()
        mf.step(self.model, self.same_layers)
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
