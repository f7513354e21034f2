"""Trains the Llama of train_one_gpu.py with Megatron-Core's buffers and distributed optimizer.

    torchrun --nproc-per-node 2 examples/train_megatron.py [recipe]

Backward adds weight gradients to Megatron's float32 sums (main_grad), which it scatters over the
ranks. Its optimizer steps float32 masters, a shard on each rank, and gathers the weights: in bf16
first, then, in a second training, as codes. Both have the same losses and weights, bit for bit.

Megatron-Core asks for a GPU. Where there is none, CpuForGpu gives it the CPU.
"""

import sys
import tempfile
from contextlib import nullcontext

import minifloat as mf
import torch
import torch.distributed as dist
from megatron.core import fp8_utils, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch.overrides import TorchFunctionMode
from train_one_gpu import BATCH, DEVICE, DIM, HEADS, LAYERS, TRAINING, Llama, batch

STEPS, SAVED_AT, MICRO_BATCHES = 20, 14, 2
# Megatron's buffer of codes has a byte for an element, and one direction of each weight.
HELD_AS_CODES = ["fp8_tensorwise", "fp8_blockwise", "mxfp8_2d"]


# ---- Megatron-Core's hooks -----------------------------------------------------------------------
def take_codes():
    """Has Megatron take mf.QuantizedTensor for Transformer Engine's FP8 tensor.

    Its buffers then hold the codes, and its optimizer casts its shards of the masters to codes.
    """
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS = True
    fp8_utils.FP8_TENSOR_CLASS = mf.QuantizedTensor
    fp8_utils._modify_underlying_storage_impl = lambda w, memory: mf.distributed.attach_wires(
        w, [memory]
    )
    fp8_utils._quantize_param_shard_impl = mf.distributed.quantize_master_weights
    fp8_utils.te_post_all_gather_processing = mf.distributed.post_all_gather_processing


class CpuForGpu(TorchFunctionMode):
    """Gives Megatron-Core the CPU where it asks for a GPU."""

    def __enter__(self):
        torch.cuda.current_device = lambda: "cpu"
        torch.cuda.current_stream = lambda: None
        # gloo returns wrong bytes where joined all-gathers have several dtypes: each goes alone.
        param_and_grad_buffer._coalescing_manager = lambda *group, **options: nullcontext()
        return super().__enter__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):  # compared with CUDA's names
            result = result.replace("torch.", "torch.cuda.")
        return result


# ---- The training --------------------------------------------------------------------------------
def build(recipe, holds_codes):
    """Returns a converted model, Megatron's wrapper of it, and its optimizer."""
    torch.manual_seed(0)
    model = Llama().to(DEVICE, torch.bfloat16)
    mf.quantize_(
        model,
        recipe,
        accumulate="main_grad",
        primary=holds_codes,
        keep_high_precision_init=holds_codes,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
    )
    wrapper = DistributedDataParallel(
        TransformerConfig(num_layers=LAYERS, hidden_size=DIM, num_attention_heads=HEADS),
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,  # main_grad is float32
            fp8_param_gather=holds_codes,
        ),
        model,
    )
    config = OptimizerConfig(
        lr=1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        # Megatron's default is 1.0. The norm adds up shards, which are cut elsewhere where weights
        # are codes, and its last bit may differ. Without it the two trainings are equal.
        clip_grad=0.0,
    )
    return model, wrapper, get_megatron_optimizer(config, [wrapper])


def masters_of(optimizer):
    return [master for group in optimizer.param_groups for master in group["params"]]


def save(path, model, optimizer):
    """Saves this rank's checkpoint: mf.training_state has random counts and amax histories."""
    parts = {"model": model.state_dict(), "minifloat": mf.training_state(model)}
    parts |= {"masters": masters_of(optimizer), "adam": optimizer.optimizer.state_dict()}
    torch.save(parts, path)


def load(path, model, optimizer):
    parts = torch.load(path)
    model.load_state_dict(parts["model"])
    for master, saved in zip(masters_of(optimizer), parts["masters"], strict=True):
        master.data.copy_(saved)
    optimizer.optimizer.load_state_dict(parts["adam"])
    mf.load_training_state(model, parts["minifloat"])


def train(model, wrapper, optimizer, path, begin=0):
    """Trains from step `begin` on. Saves a checkpoint after step SAVED_AT, returns the losses."""
    group = parallel_state.get_data_parallel_group()
    losses = []
    for step in range(begin, STEPS):
        wrapper.zero_grad_buffer()
        optimizer.zero_grad()
        mean = torch.zeros((), device=DEVICE)
        rows = batch(TRAINING, seed=step).chunk(group.size())[group.rank()]
        for i, tokens in enumerate(rows.chunk(MICRO_BATCHES)):
            is_last = i + 1 == MICRO_BATCHES
            with nullcontext() if is_last else wrapper.no_sync():
                loss = wrapper(tokens) / MICRO_BATCHES
                loss.backward()
            mean += loss.detach()
        finalize_model_grads([wrapper])
        optimizer.step()
        mf.step(model, group)
        dist.all_reduce(mean, dist.ReduceOp.AVG, group)
        losses.append(mean.item())
        if step + 1 == SAVED_AT:
            save(path, model, optimizer)
    return losses


# ---- What holds ----------------------------------------------------------------------------------
def on_all_ranks(is_true):
    found = torch.tensor(is_true, dtype=torch.int32, device=DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)


def values_of(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def report(name, is_true):
    is_true = on_all_ranks(is_true)
    if dist.get_rank() == 0:
        print(f"{name}: {is_true}")


def run(recipe, path, holds_codes):
    """Trains, resumes from the checkpoint and compares. Returns losses and the model."""
    name = "codes" if holds_codes else "bf16"
    model, wrapper, optimizer = build(recipe, holds_codes)
    losses = train(model, wrapper, optimizer, path)
    if dist.get_rank() == 0:
        gathered = sum(buffer.param_data.nbytes for buffer in wrapper.buffers)
        print(f"{name}: a step gathers {gathered:,} bytes")
        print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
    values = values_of(model)
    of_first_rank = values.clone()
    dist.broadcast(of_first_rank, src=0)
    report(f"{name}: weights of the ranks equal", torch.equal(values, of_first_rank))

    resumed, wrapper, optimizer = build(recipe, holds_codes)
    load(path, resumed, optimizer)
    train(resumed, wrapper, optimizer, path, begin=SAVED_AT)
    report(f"{name}: resumed weights equal", torch.equal(values, values_of(resumed)))
    return losses, model


def is_cast_of(codes, weight):
    """Returns whether a weight's codes are those of casting its bf16 values whole."""
    if isinstance(codes, mf.QuantizedTensor):
        weight = mf.QuantizedTensor.from_tensor(weight, *codes.specs)
    return torch.equal(codes.detach().float(), weight.detach().float())


def train_both_ways(recipe, path):
    losses, model = run(recipe, path, holds_codes=False)
    if recipe in HELD_AS_CODES:
        take_codes()
        others, held = run(recipe, path, holds_codes=True)
        report("codes: losses equal bf16's", losses == others)
        pairs = zip(held.parameters(), model.parameters(), strict=True)
        report("codes: casts of bf16's weights", all(is_cast_of(*pair) for pair in pairs))


def main():
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    if BATCH % (dist.get_world_size() * MICRO_BATCHES) != 0:
        raise ValueError(f"expected a divisor of {BATCH // MICRO_BATCHES} as the number of ranks")
    recipe = sys.argv[1] if sys.argv[1:] else "fp8_tensorwise"
    with nullcontext() if DEVICE == "cuda" else CpuForGpu():
        parallel_state.initialize_model_parallel()
        with tempfile.TemporaryDirectory() as folder:
            train_both_ways(recipe, f"{folder}/checkpoint.pt")
    mf.distributed.destroy_process_group()  # torch's, which waits until this process can exit


if __name__ == "__main__":
    main()
