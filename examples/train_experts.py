"""Trains a Llama with mixtures of experts, whose experts are divided over all ranks.

    torchrun --nproc-per-node 2 examples/train_experts.py [recipe or map]

Copy the order of the calls in `build`. Each rank routes tokens of its own, which are sent to the
experts as codes of the recipe. FSDP2 shards all other parameters over the same ranks.
"""

import sys

import minifloat as mf
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_one_gpu import DEVICE, DIM, HIDDEN, STEPS, TRAINING, Llama, batch

EXPERTS, CHOSEN = 8, 2


def new_experts():
    """Returns what a block has in place of its feed-forward."""
    return mf.MoE(DIM, HIDDEN // CHOSEN, EXPERTS, CHOSEN, shared_experts=1, fused_w13=True)


def build(recipe):
    """Returns a converted, divided and sharded model."""
    torch.manual_seed(0)
    model = Llama(new_experts).to(DEVICE)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("ep",))
    report = mf.quantize_(model, recipe)
    if dist.get_rank() == 0:
        print(report)
    mf.expert_parallel(model, mesh["ep"], dispatch="codes")
    layers = [m for m in model.modules() if isinstance(m, mf.MoE)]
    experts = {p for moe in layers for p in moe.experts.parameters()}
    for block in model.layers:
        fully_shard(block, mesh=mesh["ep"], ignored_params=experts)
    fully_shard(model, mesh=mesh["ep"], ignored_params=experts)
    return model


def train(recipe):
    model = build(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank = dist.get_rank()
    losses = []
    for step in range(STEPS):
        loss = model(batch(TRAINING, seed=rank * STEPS + step))
        loss.backward()
        mf.moe.average_expert_gradients(model)  # FSDP2 has averaged the others
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)  # also balances the experts
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    if rank == 0:
        print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")


def main():
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    train(sys.argv[1] if sys.argv[1:] else "*: nvfp4; *.experts: fp8_rowwise")
    mf.distributed.destroy_process_group()  # torch's, which waits until this process can exit


if __name__ == "__main__":
    main()
