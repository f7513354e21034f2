"""Transformer blocks whose feed-forward is one op, and twins that call its layers one by one."""

import copy

import minifloat as mf
import torch
import torch.nn.functional as F
from minifloat.nn.fuse.mlp import restore_mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.compiled import compiled

WIDTH, HIDDEN = 64, 96
PRESETS = [name for name in mf.presets() if name != "bf16"]
# Presets of which no feed-forward is one op.
READ_AS_VALUES = ("fp8_rowwise_gw_hp", "mxfp4_weights_served")


RUNS = {
    "eager": lambda model: model,
    "checkpoint": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
    "reentrant": lambda model: lambda x: checkpoint(model, x, use_reentrant=True),
    "compiled": compiled,
}


class Attention(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))
        self.wq, self.wk, self.wv, self.wo = layers

    def forward(self, hidden, scale=None):
        batch, positions, _ = hidden.shape
        heads = (batch, positions, -1, 16)
        q, k, v = (w(hidden).view(heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return self.wo(y.transpose(1, 2).flatten(2))


class Activation(torch.autograd.Function):
    """The library's activation, alone or times `up`."""

    @staticmethod
    def forward(ctx, gate, up, name):
        ctx.save_for_backward(gate, up)
        ctx.name = name
        return torch.ops.minifloat.activation(gate, up, name)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        found = torch.ops.minifloat.activation_backward(grad, gate, up, ctx.name)
        return found[0], None if up is None else found[1], None


class FeedForward(nn.Module):
    def __init__(self, bias=False, width=WIDTH, hidden=None):
        super().__init__()
        hidden = hidden or HIDDEN  # which tests change
        self.w1 = nn.Linear(width, hidden, bias=bias)
        self.w2 = nn.Linear(hidden, width, bias=bias)
        self.w3 = nn.Linear(width, hidden, bias=bias)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class OfTheLibrary(FeedForward):
    """Its activation is the library's op."""

    def forward(self, x):
        return self.w2(Activation.apply(self.w1(x), self.w3(x), "silu"))


class Mlp(nn.Module):
    """A feed-forward without a gate."""

    def __init__(self, act, bias=True):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.fc2 = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.act_fn = act

    def forward(self, x):
        return self.fc2(self.act_fn(self.fc1(x)))


class LibraryActivation(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return Activation.apply(x, None, self.name)


class Block(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.attention = Attention(bias)
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.feed_forward = FeedForward(bias)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


def unfused(model, activation_of_torch=False):
    """Returns a copy of a converted model whose layers are called one by one.

    activation_of_torch: whether the activation of a FeedForward is torch's, or the library's.
    """
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        if isinstance(module, mf.MLP):
            restore_mlp(module)
            if isinstance(module, FeedForward) and not activation_of_torch:
                module.__class__ = OfTheLibrary
    return model


def block(recipe="nvfp4", dtype=torch.bfloat16, bias=False, **options):
    """Returns a converted block with weights that are no powers of two."""
    torch.manual_seed(0)
    model = Block(bias).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    mf.quantize_(model, recipe, **{"fuse": True, **options})
    return model


def hidden(dtype=torch.bfloat16, seed=1):
    torch.manual_seed(seed)
    return torch.randn(2, 32, WIDTH, dtype=dtype).requires_grad_()


def results(model, run=None, x=None):
    """Returns the result, the gradients and the amax histories of one forward and backward."""
    model.zero_grad()
    x = hidden(next(model.parameters()).dtype) if x is None else x
    x.grad = None
    y = (model if run is None else run)(x)
    y.float().square().mean().backward()
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    histories = {n: t for n, t in mf.training_state(model).items() if n.endswith("amax_history")}
    return found | histories


def without_up_inputs(found):
    """Drops what up's history has of x: the op reads gate's alone."""
    return {
        name: value[1:5] if name.endswith("w3.amax_history") else value
        for name, value in found.items()
    }
