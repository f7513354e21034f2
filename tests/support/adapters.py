"""LoRA of drawn weights, and its training, for tests of loaded and converted models."""

from __future__ import annotations

import minifloat as mf
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn


def adapted(model: nn.Module, parameters: list[str] | None = None) -> nn.Module:
    """Adapts these 3D parameters, or all linear layers."""
    torch.manual_seed(7)
    modules = "all-linear" if parameters is None else []
    config = LoraConfig(r=4, target_modules=modules, target_parameters=parameters)
    config.init_lora_weights = False
    return get_peft_model(model, config)


def train(model: nn.Module, ids: Tensor, count: int) -> list[Tensor]:
    """Trains `count` tensors, all of adapters, for two steps; returns losses and all gradients."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert sum("lora_" in name for name in trained) == len(trained) == count
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    seen = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in trained.values())]
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
    return seen
