"""Trains the Llama of train_one_gpu.py under tensor and sequence parallelism, with FSDP2 on top.

    torchrun --nproc-per-node 4 examples/train_tensor_parallel.py [recipe]

Two ranks share each layer; FSDP2 shards what each of them has over the other ranks. Between layers
a rank has its part of each sequence. wq, wk, wv, w1 and w3 gather the parts as codes of the recipe.
"""

import sys

import minifloat as mf
import torch
import torch.distributed as dist
from minifloat.distributed.tensor_parallel import QuantizedColwiseParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from train_one_gpu import DEVICE, STEPS, TRAINING, Llama, batch

RANKS = 2  # that share a layer

OF_BLOCK = {
    "attention_norm": SequenceParallel(),
    "wq": QuantizedColwiseParallel(input_layouts=Shard(1)),
    "wk": QuantizedColwiseParallel(input_layouts=Shard(1)),
    "wv": QuantizedColwiseParallel(input_layouts=Shard(1)),
    "wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward.w1": QuantizedColwiseParallel(input_layouts=Shard(1)),
    "feed_forward.w3": QuantizedColwiseParallel(input_layouts=Shard(1)),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
}
OF_MODEL = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def build(recipe, mesh):
    """Returns a converted, parallel and sharded model."""
    torch.manual_seed(0)
    model = Llama().to(DEVICE)
    dp_rank = mesh["dp"].get_local_rank()  # the same on all ranks that share a layer
    report = mf.quantize_(model, recipe, data_parallel_rank=dp_rank)
    if dist.get_rank() == 0:
        print(report)
    for block in model.layers:
        parallelize_module(block, mesh["tp"], OF_BLOCK)
    parallelize_module(model, mesh["tp"], OF_MODEL)
    for block in model.layers:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def train(recipe):
    shape = (dist.get_world_size() // RANKS, RANKS)
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "tp"))
    model = build(recipe, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        tokens = batch(TRAINING, seed=step).chunk(shape[0])[mesh["dp"].get_local_rank()]
        loss = model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh["dp"].get_group())
        losses.append(mean.item())
    if dist.get_rank() == 0:
        print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")


def main():
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    if dist.get_world_size() % RANKS != 0:
        raise ValueError(f"expected a multiple of {RANKS} ranks, got {dist.get_world_size()}")
    train(sys.argv[1] if sys.argv[1:] else "nvfp4")
    mf.distributed.destroy_process_group()  # torch's, which waits until this process can exit


if __name__ == "__main__":
    main()
