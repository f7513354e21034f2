"""Feed-forwards that are converted twice, with fuse=True and without, and what both leave."""

import copy
import types

import minifloat as mf
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.fused_models import WIDTH, FeedForward
from tests.support.same_bits import require_same_results

AUXILIARY = []  # what a forward appends to


def plain(module, x):
    return module.w2(F.silu(module.w1(x)) * module.w3(x))


def module_of(forward, **settings):
    """Returns a feed-forward of a class of its own."""
    torch.manual_seed(0)
    module = types.new_class("Feed", (FeedForward,), {}, lambda d: d.update(forward=forward))()
    for name, value in settings.items():
        setattr(module, name, value)
    return module


def twins(module):
    """Returns a model with one op where its graph allows it, one without, and the report."""
    fused = nn.Sequential(module)
    unfused = copy.deepcopy(fused)
    report = mf.quantize_(fused, "mxfp8", keep="nothing", fuse=True)
    mf.quantize_(unfused, "mxfp8", keep="nothing")
    return fused, unfused, report


def results(model, rows=80, run=None):
    """Returns the result, all gradients, and what the forward has left behind."""
    AUXILIARY.clear()
    model.zero_grad()
    torch.manual_seed(rows)  # of dropout too
    x = (torch.randn(2, rows, WIDTH) * 40).requires_grad_()
    y = (run or model)(x)
    if y.requires_grad:
        y.square().mean().backward()
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: p.grad for name, p in model.named_parameters()}
    buffers = {n: b for n, b in model.named_buffers() if b is not None}
    return found | buffers | {f"auxiliary {i}": t.detach() for i, t in enumerate(AUXILIARY)}


def require_twins(fused, unfused, **options):
    for rows in (3, 80):
        for mode in (True, False):
            found = [results(model.train(mode), rows, **options) for model in (fused, unfused)]
            require_same_results(*found, (rows, mode))
