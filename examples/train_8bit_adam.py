"""Trains a small network under MXFP8 with torchao's AdamW, whose moments have 8 bits.

    pip install torchao
    python examples/train_8bit_adam.py

torchao compiles the update, so the first step takes longer: two minutes on a CPU, where it needs a
C++ compiler. With TORCHDYNAMO_DISABLE=1 in the environment the update runs uncompiled.
"""

import minifloat as mf
import torch
from torch import nn
from torchao.optim import AdamW8bit

STEPS = 20


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    mf.quantize_(model, "mxfp8")
    optimizer = AdamW8bit(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(128, 64, device=device)
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
    moment = optimizer.state[model[0].weight]["exp_avg"]
    print("moment:", type(moment).__name__, moment.codes.dtype)


if __name__ == "__main__":
    main()
