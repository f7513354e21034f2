"""Trains a small network under NVFP4 in two pipeline stages, with torch's own schedules.

    torchrun --nproc-per-node 2 examples/train_pipeline.py

Each process has one stage. Convert the whole model before it is cut: then the layers have the
random bits and the names that they have in one process. Each stage calls mf.step.
"""

import minifloat as mf
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

STEPS, BATCH, MICRO_BATCHES, WIDTH = 20, 128, 4, 64


def build_model():
    """Returns two stages, of equal bytes on every process."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()),
        nn.Sequential(nn.Linear(4 * WIDTH, WIDTH)),
    )
    # Stages share their data, so they have one data-parallel rank.
    mf.quantize_(model, "nvfp4", data_parallel_rank=0)
    return model


def batch(step):
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.flip(1)


def train():
    rank, world = dist.get_rank(), dist.get_world_size()
    stage_module = build_model()[rank]
    # With inputs and outputs given, torch runs no forward to find their shapes.
    widths = (WIDTH, 4 * WIDTH, WIDTH)
    some = [torch.zeros(BATCH // MICRO_BATCHES, width) for width in widths[rank : rank + 2]]
    stage = PipelineStage(
        stage_module,
        rank,
        world,
        torch.device("cpu"),
        input_args=some[0],
        output_args=some[1],
    )
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(stage_module.parameters(), lr=1e-2)
    means = []
    for step in range(STEPS):
        x, y = batch(step)
        losses = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
            means.append(torch.stack(losses).mean().item())
        optimizer.step()
        optimizer.zero_grad()
        mf.step(stage_module)
    if rank == world - 1:
        print(f"loss: {means[0]:.3f} -> {means[-1]:.3f}")


def main():
    dist.init_process_group("gloo")
    train()
    mf.distributed.destroy_process_group()  # torch's, which waits until this process can exit


if __name__ == "__main__":
    main()
