"""A layer's inputs and one process's results, for tests of tensor parallelism."""

import minifloat as mf
import torch
from minifloat._native import ops
from minifloat.spec import Spec
from minifloat.tensor.quantized import read_direction

from tests.support.specs import stream_of

# Operands by their row of an amax history; a name is that of the operand's random stream.
PLACES = ("x/fprop", "w/fprop", "g/dgrad", "w/dgrad", "g/wgrad", "x/wgrad")
BATCH, TOKENS = 2, 128  # 32 tokens a rank in each of a batch, over 4 ranks


def sizes(recipe):
    """Returns (N, K): 128 a rank for 128-blocks and transforms of 128 points, else 32."""
    unit = 128 if any(name in recipe for name in ("blockwise", "x128", "eden")) else 32
    return 4 * unit, 8 * unit


def values(seed, *shape):
    """Draws rows of very different magnitude, so that the amaxes of shards differ."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * torch.randn(*shape[:-1], 1, generator=generator).exp2()


class Case:
    """Whole inputs of a layer, equal on every rank, and the results of one process."""

    def __init__(self, recipe, dtype=torch.float32, poisoned=False, device="cpu"):
        self.recipe = mf.Recipe(recipe)
        n, k = sizes(recipe)
        x, w, b = values(1, BATCH, TOKENS, k), values(2, n, k), values(3, 1, n)[0]
        g = values(4, BATCH, TOKENS, n)
        if poisoned:
            x[0, -1, 5] = float("nan")
            w[3, -1] = float("inf")
            g[-1, -1, -1] = float("nan")
        self.x = x.to(device, dtype).requires_grad_()
        self.w, self.b = (t.to(device).requires_grad_() for t in (w, b))
        self.g = g.to(device, dtype)
        self.rng = torch.tensor([7, 3, 11], device=device)
        self.history = torch.zeros(6, 5, device=device)
        self.history[:, 0] = torch.tensor([3.0, 2.5, 7.0, 2.0, 5.0, 3.5])

    def state(self):
        is_delayed = self.recipe.is_delayed
        return {
            "rng": self.rng if self.recipe.is_stochastic else None,
            "amax_history": self.history.clone() if is_delayed else None,
        }

    def alone(self):
        """Computes y, dx, dW, db of one process, and its history."""
        state = self.state()
        y = mf.linear(self.x, self.w, self.b, self.recipe, **state)
        found = torch.autograd.grad(y, (self.x, self.w, self.b), self.g)
        return (y.detach(), *found), state["amax_history"]

    def operand(self, place):
        """Returns one operand of one process: Quantized, or values under bf16."""
        product = (self.recipe.fprop, self.recipe.dgrad, self.recipe.wgrad)[place // 2]
        spec, name = (product.a, product.b)[place % 2], PLACES[place]
        x = {"x": self.x, "w": self.w.to(self.x.dtype), "g": self.g}[name[0]].detach()
        x = x.reshape(-1, x.shape[-1])
        columnwise = place >= 3
        if spec == "bf16":
            return x.t() if columnwise else x
        if spec.startswith("fprop."):  # the values of codes of forward
            codes = self.operand(PLACES.index(f"{name[0]}/fprop"))
            return codes.dequantize(x.dtype).t()
        amax = self.history[place, 0] if Spec.parse(spec).is_delayed else None
        stream = stream_of(spec, name)
        specs = ("", spec) if columnwise else (spec, "")
        out = ops.quantize(
            x, *specs, amax_row=None if columnwise else amax, amax_col=amax if columnwise else None,
            rng=self.rng, stream_row=stream, stream_col=stream,
        )  # fmt: skip
        return read_direction(out, x, spec, columnwise)
