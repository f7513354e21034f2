"""Trains a small GPTModel of Megatron-Core with its distributed optimizer, under a recipe.

    torchrun --nproc-per-node 4 examples/train_megatron.py [recipe] [--tensor 2] [--experts 4]

Backward adds weight gradients to Megatron's float32 sums (main_grad), which it scatters over the
data-parallel ranks. Its optimizer steps float32 masters, a shard on each of them, and gathers the
weights: in bf16 first, then, in a second training, as codes, a byte or half of one an element. Each
training resumes from its checkpoint. The text is that of train_one_gpu.py, a token a byte.

Megatron-Core asks for a GPU. Without one, CpuForGpu gives it the CPU.
"""

import argparse
import tempfile
from contextlib import nullcontext
from pathlib import Path

import minifloat as mf
import minifloat.megatron
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron_on_cpu import CpuForGpu
from train_one_gpu import BATCH, DEVICE, DIM, HEADS, HIDDEN, LAYERS, SEQUENCE, TRAINING, batch

STEPS, SAVED_AT, MICRO_BATCHES = 20, 14, 2
# Weights of these have one direction to gather. Buffers for 4 bits begin with Megatron-Core 0.19.
FLAGS = dict.fromkeys(("fp8_tensorwise", "fp8_blockwise", "mxfp8_2d"), "fp8_param_gather")
if hasattr(DistributedDataParallelConfig, "fp4_param_gather"):
    FLAGS["nvfp4"] = "fp4_param_gather"


def config_of(arguments):
    experts = {"num_moe_experts": arguments.experts, "moe_ffn_hidden_size": HIDDEN // 2}
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=DIM,
        num_attention_heads=HEADS,
        ffn_hidden_size=HIDDEN,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=arguments.tensor,
        sequence_parallel=arguments.tensor > 1,
        use_cpu_initialization=DEVICE == "cpu",
        moe_token_dispatcher_type="alltoall",
        **(experts if arguments.experts else {}),
    )


class Training:
    """A converted model, Megatron's wrapper of it, its optimizer, and this rank's checkpoint."""

    def __init__(self, arguments, path, holds_codes):
        torch.manual_seed(0)
        model_parallel_cuda_manual_seed(0)
        config = config_of(arguments)
        with mf.megatron.backend():
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        self.model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=256,
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope",
        ).to(DEVICE, torch.bfloat16)
        mf.quantize_(
            self.model,
            arguments.recipe,
            accumulate="main_grad",
            primary=holds_codes,  # the parameters are codes
            keep_high_precision_init=holds_codes,  # masters begin with the values before the cast
        )
        self.wrapper = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,  # main_grad is float32
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                **({FLAGS[arguments.recipe]: True} if holds_codes else {}),
            ),
            self.model,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=2e-3,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                overlap_param_gather=True,
            ),
            [self.wrapper],
        )
        self.path = path / f"{dist.get_rank()}.pt"

    def loss(self, tokens):
        """Returns the mean loss of tokens (B, T + 1), in nats a token."""
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        places = torch.arange(SEQUENCE, device=DEVICE).expand_as(inputs)
        return self.wrapper(inputs, places, None, labels=labels).float().mean()

    def run(self, begin=0):
        """Trains from step `begin` on. Saves after step SAVED_AT, and returns the losses."""
        group, losses = parallel_state.get_data_parallel_group(), []
        for step in range(begin, STEPS):
            self.wrapper.zero_grad_buffer()
            self.optimizer.zero_grad()
            mean = torch.zeros((), device=DEVICE)
            rows = batch(TRAINING, seed=step).chunk(group.size())[group.rank()]
            for i, tokens in enumerate(rows.chunk(MICRO_BATCHES)):
                is_last = i + 1 == MICRO_BATCHES
                with nullcontext() if is_last else self.wrapper.no_sync():
                    loss = self.loss(tokens) / MICRO_BATCHES
                    loss.backward()
                mean += loss.detach()
            finalize_model_grads([self.wrapper])
            self.optimizer.step()
            mf.step(self.model)
            dist.all_reduce(mean, dist.ReduceOp.AVG, group)
            losses.append(mean.item())
            if step + 1 == SAVED_AT:
                self.save()
        self.tensors()  # gathers what the last step wrote
        return losses

    def tensors(self):
        """Returns the parameters, gathered, and this rank's masters."""
        self.wrapper.start_param_sync(force_sync=True)  # else the next forward would
        masters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [*self.model.parameters(), *masters]

    def save(self):
        """Saves this rank's checkpoint: mf.training_state has random counts and amax histories."""
        (distributed,) = self.optimizer.chained_optimizers
        parts = {"tensors": self.tensors(), "minifloat": mf.training_state(self.model)}
        torch.save(parts | {"adam": distributed.optimizer.state_dict()}, self.path)

    @torch.no_grad()
    def load(self):
        (distributed,) = self.optimizer.chained_optimizers
        parts = torch.load(self.path, map_location=DEVICE)
        for tensor, saved in zip(self.tensors(), parts["tensors"], strict=True):
            tensor.copy_(saved)
        distributed.optimizer.load_state_dict(parts["adam"])
        mf.load_training_state(self.model, parts["minifloat"])

    def values(self):
        return torch.cat([p.detach().float().flatten() for p in self.model.parameters()])


def report(name, is_true):
    """Prints whether something holds on all ranks."""
    found = torch.tensor(is_true, dtype=torch.int32, device=DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print(f"{name}: {bool(found)}")


def train_and_resume(name, arguments, path, holds_codes):
    """Trains, resumes and compares. Returns the losses."""
    training = Training(arguments, path, holds_codes)
    losses = training.run()
    if dist.get_rank() == 0:
        gathered = sum(buffer.param_data.nbytes for buffer in training.wrapper.buffers)
        print(f"{name}: a step gathers {gathered:,} bytes")
        print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
    values = training.values()
    of_first = values.clone()
    dist.broadcast(of_first, group_src=0, group=parallel_state.get_data_parallel_group())
    report(f"{name}: weights of the data-parallel ranks equal", torch.equal(values, of_first))
    resumed = Training(arguments, path, holds_codes)
    resumed.load()
    resumed.run(begin=SAVED_AT)
    report(f"{name}: resumed weights equal", torch.equal(values, resumed.values()))
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", nargs="?", default="fp8_tensorwise")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that divide each weight")
    parser.add_argument("--experts", type=int, help="of each layer, in place of one feed-forward")
    arguments = parser.parse_args()
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    with nullcontext() if DEVICE == "cuda" else CpuForGpu():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=arguments.tensor)
        if BATCH % (parallel_state.get_data_parallel_world_size() * MICRO_BATCHES) != 0:
            raise ValueError(f"expected a divisor of {BATCH // MICRO_BATCHES} data-parallel ranks")
        with tempfile.TemporaryDirectory() as folder:
            losses = train_and_resume("bf16", arguments, Path(folder), holds_codes=False)
            if arguments.recipe in FLAGS:
                codes = train_and_resume("codes", arguments, Path(folder), holds_codes=True)
                # The norm, by which gradients are clipped, has other last bits, as shards are cut
                # elsewhere. Where ranks divide a weight, each shard of codes has its own scale.
                most = max(abs(a - b) for a, b in zip(losses, codes, strict=True))
                if dist.get_rank() == 0:
                    print(f"codes: losses differ from bf16's by at most {most:.3f}")
    mf.distributed.destroy_process_group()  # torch's, which waits until this process can exit


if __name__ == "__main__":
    main()
