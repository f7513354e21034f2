"""Trains the Llama of train_one_gpu.py in micro-batches, in bf16 weights with float32 masters.

    python examples/train_micro_batches.py [recipe]
    torchrun --nproc-per-node 2 examples/train_micro_batches.py     # data parallel

Each product of a weight's gradient adds it to a float32 sum (`accumulate`), each feed-forward is
one op (`fuse`), and backward casts weights again instead of saving their codes (`recompute`).
"""

import sys

import minifloat as mf
import torch
import torch.distributed as dist
from torch import nn
from train_one_gpu import DEVICE, STEPS, TRAINING, Llama, batch

MICRO_BATCHES = 2


def build(recipe):
    """Returns a converted model of bf16 weights, each with a float32 sum of gradients."""
    torch.manual_seed(0)
    model = Llama().to(DEVICE, torch.bfloat16)
    print(mf.quantize_(model, recipe, accumulate="main_grad", fuse=True, recompute="weight"))
    for m in model.modules():
        if isinstance(m, mf.Linear):
            m.weight.main_grad = torch.zeros(m.weight.shape, device=m.weight.device)
    return model


class Optimizer:
    """AdamW on masters of the converted weights, and on the other parameters."""

    def __init__(self, model):
        self.weights = dict.fromkeys(m.weight for m in model.modules() if isinstance(m, mf.Linear))
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        others = [p for p in model.parameters() if p not in self.weights]
        self.parameters = [*self.masters, *others]
        self.adam = torch.optim.AdamW(self.parameters, lr=1e-3, fused=True)

    def step(self):
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.main_grad
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()
        self.adam.zero_grad()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.detach().copy_(master)
            weight.main_grad.zero_()


def average_gradients(model):
    """Averages what backward has added, over the ranks."""
    for p in model.parameters():
        total = getattr(p, "main_grad", p.grad)
        if total is not None:
            dist.all_reduce(total)
            total /= dist.get_world_size()


def mean_of(loss):
    """Returns the mean over the ranks."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def train(recipe):
    model = build(recipe)
    optimizer = Optimizer(model)
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for step in range(STEPS):
        mean = torch.zeros((), device=DEVICE)
        for i in range(MICRO_BATCHES):
            seed = (rank * STEPS + step) * MICRO_BATCHES + i
            loss = model(batch(TRAINING, seed)) / MICRO_BATCHES
            loss.backward()
            mean += loss.detach()
        if dist.is_initialized():
            average_gradients(model)
        optimizer.step()
        mf.step(model)
        losses.append(mean_of(mean))
    if rank == 0:
        print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")


def main():
    if dist.is_torchelastic_launched():
        if DEVICE == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank())
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    train(sys.argv[1] if sys.argv[1:] else "fp8_tensorwise")
    if dist.is_initialized():
        mf.distributed.destroy_process_group()  # torch's, which waits until this process can exit


if __name__ == "__main__":
    main()
