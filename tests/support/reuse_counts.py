"""Counts of quantizations of layers, and twins of layers that reuse nothing, for tests of reuse.

A layer and its twin multiply the same codes in the same shapes: repetitions (exact_sums.py).
"""

import copy
from collections import Counter

import minifloat as mf
import torch
from torch.utils._python_dispatch import TorchDispatchMode

RECIPES = [
    "fp8_delayed",
    "nvfp4",
    "mxfp8",
    "fp8_rowwise",
    "fp8_rowwise_gw_hp",
    "mxfp4",
    "nvfp4_pow2",
    "mxfp8_2d",
]
K, N = 48, 80


class Casts(TorchDispatchMode):
    """A count of quantizations by the shape of the operand."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ops = torch.ops.minifloat
        if func in (ops.quantize.default, ops.quantize_delayed.default):
            self.count[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def casts(run, shape):
    with Casts() as seen:
        run()
    return seen.count[shape]


def without_reuse(model):
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, mf.Linear):
            module.weight_codes = module.shared_input = None
    return twin
