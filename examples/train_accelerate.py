"""Trains a small network under FP8 with accelerate: autocast, accumulation, save and resume.

    pip install accelerate safetensors
    python examples/train_accelerate.py
    torchrun --nproc-per-node 2 examples/train_accelerate.py     # data parallel

accelerate saves what is registered with it: minifloat's random counts and amax histories too.
"""

import os
import tempfile

import minifloat as mf
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RECIPE = "fprop=e4m3/tensor+delayed*e4m3/tensor+delayed dgrad=nvfp4+sr*nvfp4 wgrad=mxfp8*mxfp8"
STEPS, RESUMED = 20, 10


class TrainingState:
    """An object that accelerate saves and loads with the model."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return mf.training_state(self.model)

    def load_state_dict(self, state):
        mf.load_training_state(self.model, state)


def build(accelerator):
    set_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    mf.quantize_(model, RECIPE)
    x = torch.randn(640, 32)
    data = DataLoader(TensorDataset(x, x.flip(1)), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    accelerator.register_for_checkpointing(TrainingState(model))
    return model, optimizer, data


def train(model, optimizer, data, accelerator, begin=0, folder=None):
    """Trains from step `begin` on, and saves a checkpoint after step RESUMED."""
    losses, step = [], 0
    for i, (x, y) in enumerate(data):
        if i < 2 * begin:  # two micro-batches a step
            step = (i + 1) // 2
            continue
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
        losses.append(loss.item())
        mf.step(model)
        step += 1
        if step == RESUMED and folder:
            accelerator.save_state(folder)
        if step == STEPS:
            break
    return losses


def run():
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
    )
    folders = [tempfile.mkdtemp()]
    broadcast_object_list(folders)  # all processes use the first one's
    folder = os.path.join(folders[0], "checkpoint")

    model, optimizer, data = build(accelerator)
    losses = train(model, optimizer, data, accelerator, folder=folder)
    accelerator.print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")

    accelerator.free_memory()
    accelerator._custom_objects.clear()
    resumed, optimizer, data = build(accelerator)
    accelerator.load_state(folder)
    train(resumed, optimizer, data, accelerator, begin=RESUMED)
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    accelerator.print("resumed weights equal:", same)


def main():
    run()
    if dist.is_initialized():
        mf.distributed.destroy_process_group()  # torch's, which waits until this process can exit


if __name__ == "__main__":
    main()
