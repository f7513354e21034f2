"""Every class `…Experts` of the installed transformers, each built tiny from a config."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

D, H, E, K = 32, 48, 4, 2
SIZES = {
    "hidden_size": D,
    "moe_hidden_size": D,
    "d_model": D,
    "intermediate_size": H,
    "moe_intermediate_size": H,
    "expert_ffn_hidden_size": H,
    "ffn_hidden_size": H,
    "d_ff": H,
    "expert_ffn_dim": H,
    "num_experts": E,
    "num_local_experts": E,
    "moe_num_experts": E,
    "n_routed_experts": E,
    "zero_expert_num": 0,
    "moe_num_shared_experts": 1,
    "n_shared_experts": 2,
    "moe_latent_size": None,
    "mlp_bias": False,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_hidden_act": "relu2",
    "activation_function": "relu",
    "dense_act_fn": "relu",
    "ffn_act_fn": {"name": "silu"},
    "activation_dropout": 0.0,
    "dropout_rate": 0.0,
    "moe_token_dropout": 0.2,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "post_norm_eps": 1e-5,
    "_experts_implementation": "eager",
}
ARGUMENTS = {"JetMoeParallelExperts": (E, D, H), "NllbMoeExperts": (SimpleNamespace(**SIZES), H)}


def class_names() -> list[str]:
    """Returns module and name of each class whose name ends with Experts, without importing."""
    models = Path(transformers.__file__).parent / "models"
    return [
        f"{path.parent.name}.{path.stem}.{node.name}"
        for path in sorted(models.glob("*/modeling_*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Experts")
    ]


def build(name: str) -> nn.Module:
    """Returns a seeded module of a class. Parameters differ, also those that begin as ones."""
    path, _, cls = name.rpartition(".")
    found: Any = getattr(importlib.import_module(f"transformers.models.{path}"), cls)
    module = found(*ARGUMENTS.get(cls, (SimpleNamespace(**SIZES),)))
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 0.3, generator)
    return module
