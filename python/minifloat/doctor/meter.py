"""Measures what predict.py reads: layers, casts, attention, host time and a copy on this machine.

A layer's forward and backward run as in training, with x and the gradient of y cast in each call.
On a GPU its time is the device's alone. The host's is that of small blocks of the same structure,
whose kernels take less than their launches; two depths tell what a block takes from what a step
takes. On a CPU both are one, and the host's is 0. There a large layer is measured with fewer
outputs, and attention with a shorter sequence.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._native import ops
from ..functional import scaled_grouped_mm
from ..nn.convert.quantize import quantize_
from ..nn.state.model_state import step
from ..private_torch import sleep_cycles
from ..recipe import Recipe
from ..spec import Spec
from .model_sizes import Part
from .predict import BF16, HostTime, Job, Measured, PartTime

MOST_TOKENS = {"cuda": 16384, "cpu": 64}  # of a batch that is measured
MOST_SEQ = 1024  # tokens of a sequence whose attention is measured on a CPU
MOST_WEIGHTS = 1 << 21  # elements of the weights that a CPU measures
MULTIPLE = 128  # of their outputs, which each format divides into blocks
SHARE = 0.5  # of the free memory that a measurement may take
CYCLES = 2e9  # of a GPU's clock in a second
DEPTHS = (2, 8)  # blocks whose launches are timed
SMALL = {"hidden": 256, "heads": 2, "kv_heads": 1, "ffn": 512}  # of them
SMALL_TOKENS = 128
STEPS = 5  # of them one after the other


class Meter:
    """Measures on a device, each thing once.

    Args:
        device: where.
        seconds: of work before and while a thing is timed on a GPU; GPUs slow down under load.
    """

    def __init__(self, device: torch.device, seconds: float = 0.2) -> None:
        self.device, self.seconds = device, seconds if device.type == "cuda" else 0.0
        self.known: dict[Any, Any] = {}

    def measure(self, job: Job, recipes: Iterable[str]) -> Measured:
        """Returns the times that a prediction of a job reads."""
        all_recipes = list(dict.fromkeys([BF16, *recipes]))
        model = job.model
        parts: dict[str, dict[Part, PartTime]] = {}
        for recipe in all_recipes:
            chosen = [p for p in model.parts() if p.is_converted or recipe == BF16]
            parts[recipe] = {p: self.part(p, recipe, job.tokens) for p in chosen}
        shape = (model.heads, model.kv_heads, job.seq, model.head_dim)
        return Measured(
            parts=parts,
            attention=self.once(("attention", *shape), lambda: self.attention(*shape)),
            host={recipe: self.host(recipe, job.is_compiled) for recipe in all_recipes},
            copy=self.once("copy", self.copy),
        )

    def once(self, key: Any, find: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = find()
        return self.known[key]

    # ---- Layers ----------------------------------------------------------------------------------

    def part(self, part: Part, recipe: str, tokens: int) -> PartTime:
        key = (part.k, part.ns, part.experts, part.rows, recipe, min(tokens, self.most(part)))
        return self.once(key, lambda: self.time_part(part, recipe, key[-1]))

    def most(self, part: Part) -> int:
        """Returns the tokens of a batch that is measured at most: what fits."""
        most = MOST_TOKENS[self.device.type]
        if self.device.type == "cuda":
            # x, its gradient, y, its gradient and as much again for codes; W, its gradient, codes
            each = 2 * 4 * part.rows * (part.k + sum(part.ns))
            torch.cuda.empty_cache()  # what torch has cached is free, too
            left = SHARE * torch.cuda.mem_get_info(self.device)[0] - 2 * 3 * part.weights
            while most > 256 and most * each > left:
                most //= 2
        return most

    def time_part(self, part: Part, recipe: str, tokens: int) -> PartTime:
        whole, part = part, part if self.device.type == "cuda" else with_fewer_outputs(part)
        larger = whole.weights / part.weights
        prepare = expert_call if part.experts else layer_call
        total = self.device_ms(prepare(part, recipe, tokens, self.device))
        if recipe == BF16:
            return PartTime(larger * total, 0.0, 0.0, tokens)
        how, rows = Recipe(recipe), tokens * part.rows
        of_x = self.cast((rows, part.k), how.fprop.a, how.wgrad.b)
        of_g = self.cast((rows, sum(part.ns)), how.dgrad.a, how.wgrad.a)
        of_w = self.cast((part.weights // part.k, part.k), how.fprop.b, how.dgrad.b)
        products = max(total - of_x - of_g - of_w, 0.0)
        return PartTime(larger * products, of_x + larger * of_g, larger * of_w, tokens)

    def cast(self, shape: tuple[int, int], row: str, col: str) -> float:
        """Returns the ms in which both directions of a matrix are cast."""
        return self.once(("cast", shape, row, col), lambda: self.time_cast(shape, row, col))

    def time_cast(self, shape: tuple[int, int], row: str, col: str) -> float:
        sides = {"row": row, "col": col}
        sides = {side: "" if Spec.parse(spec).is_bf16 else spec for side, spec in sides.items()}
        if not any(sides.values()):
            return 0.0
        given: dict[str, Any] = {"x": self.draw(*shape), **sides, "stream_row": 0, "stream_col": 1}
        given["rng"] = torch.tensor([1, 2], device=self.device)
        for side, spec in sides.items():
            if spec and Spec.parse(spec).is_delayed:
                given[f"amax_{side}"] = torch.tensor(5.0, device=self.device)
        return self.device_ms(lambda: ops.quantize(**given))

    # ---- The rest of a step ----------------------------------------------------------------------

    def attention(self, heads: int, kv_heads: int, seq: int, width: int) -> float:
        """Returns the ms of one sequence's attention, forward and backward."""
        whole, seq = seq, seq if self.device.type == "cuda" else min(seq, MOST_SEQ)
        q, g = (self.draw(1, heads, seq, width) for _ in range(2))
        k, v = (self.draw(1, kv_heads, seq, width) for _ in range(2))
        leaves = [t.requires_grad_() for t in (q, k, v)]

        def call() -> None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.autograd.grad(y, leaves, g)

        return (whole / seq) ** 2 * self.device_ms(call)

    def copy(self) -> float:
        """Returns the bytes that a copy reads and writes in a ms."""
        size = 1 << (28 if self.device.type == "cuda" else 24)
        made: dict[str, Any] = {"dtype": torch.uint8, "device": self.device}
        source, target = (torch.zeros(size, **made) for _ in range(2))
        return 2 * size / self.device_ms(lambda: target.copy_(source))

    def host(self, recipe: str, is_compiled: bool) -> HostTime:
        """Returns the time in which the host launches a step under a recipe."""
        if self.device.type != "cuda":
            return HostTime(0.0, 0.0)
        key = ("host", recipe, is_compiled)
        return self.once(key, lambda: time_host(recipe, is_compiled, self.device))

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def device_ms(self, call: Callable[[], object]) -> float:
        """Returns the median ms of a call on the device, without the host's launches."""
        call()
        if self.device.type != "cuda":
            times = []
            for _ in range(2):
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
            return 1e3 * min(times)
        return time_on_gpu(call, self.seconds)


def time_on_gpu(call: Callable[[], object], seconds: float) -> float:
    """Returns the ms of a call on the GPU, under load: the median of what runs for `seconds`.

    Before each group of calls the GPU waits until the host has launched them.
    """
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    launch = time.perf_counter() - begin
    torch.cuda.synchronize()
    whole = time.perf_counter() - begin
    calls = max(2, min(16, round(0.02 / whole)))
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sleep_cycles(int(1.3 * CYCLES * launch * calls))
        first.record()
        for _ in range(calls):
            call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / calls)
    return statistics.median(times[len(times) // 2 :])  # the GPU is warm in the later ones


def with_fewer_outputs(part: Part) -> Part:
    """Returns a part of at most about MOST_WEIGHTS elements, with as many layers and experts."""
    share = min(MOST_WEIGHTS / part.weights, 1.0)
    ns = (min(n, MULTIPLE * max(round(share * n / MULTIPLE), 1)) for n in part.ns)
    return replace(part, ns=tuple(ns)) if share < 1 else part


class Siblings(nn.Module):
    """Linear layers that read one input."""

    def __init__(self, k: int, ns: Iterable[int], made: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=False, **made) for n in ns)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def layer_call(part: Part, recipe: str, tokens: int, device: torch.device) -> Callable[[], object]:
    """Returns a forward and backward of a part's layers."""
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    net = Siblings(part.k, part.ns, made)
    x = torch.randn(tokens, part.k, **made).requires_grad_()
    gradients = [torch.randn(tokens, n, **made) for n in part.ns]
    if recipe != BF16:
        quantize_(net, recipe, keep="nothing")
        layers: Iterable[Any] = net.layers
        for layer in layers:
            layer.weight_codes = None  # which later micro-batches of a step would read

    def call() -> None:
        torch.autograd.backward(net(x), gradients)
        net.zero_grad()
        x.grad = None

    for _ in range(2 if recipe != BF16 else 0):  # delayed scaling has its first scales after two
        call()
        step(net)
    return call


def expert_call(part: Part, recipe: str, tokens: int, device: torch.device) -> Callable[[], object]:
    """Returns a forward and backward of experts, each with as many rows as the others."""
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    rows, n = tokens * part.rows, sum(part.ns)
    x = torch.randn(rows, part.k, **made).requires_grad_()
    w = torch.randn(part.experts, n, part.k, **made).requires_grad_()
    g = torch.randn(rows, n, **made)
    ends = torch.arange(1, part.experts + 1, device=device) * rows // part.experts
    offs = ends.to(torch.int32)
    how: dict[str, Any] = {"rng": torch.tensor([17, 3, 1], device=device)}
    how["amax_history"] = torch.full((6, part.experts, 4), 5.0, device=device)

    def call() -> None:
        y = scaled_grouped_mm(x, w.transpose(1, 2), offs, recipe, **how)
        torch.autograd.grad(y, (x, w), g)

    return call


# ---- The host ------------------------------------------------------------------------------------


class SmallBlock(nn.Module):
    """A block of Llama's structure, for the time of its launches."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.first_norm, self.second_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.wq, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(hidden, kv_heads * self.width, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first_norm(x)
        all_heads = (w(y).unflatten(-1, (-1, self.width)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (heads.transpose(1, 2) for heads in all_heads)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(o.transpose(1, 2).flatten(2))
        y = self.second_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def time_host(recipe: str, is_compiled: bool, device: torch.device) -> HostTime:
    """Times the launches of small blocks' step: forward, backward, AdamW and mf.step."""
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    few, many = DEPTHS
    net = nn.Sequential(*(SmallBlock(**SMALL) for _ in range(many))).to(**made)
    if recipe != BF16:
        quantize_(net, recipe, keep="nothing")
    if is_compiled:
        torch.compiler.reset()  # or a limit of graphs a function makes later recipes eager
        for layer in net:
            layer.compile()
    x = torch.randn(1, SMALL_TOKENS, SMALL["hidden"], **made)
    ms = {depth: step_ms(net[:depth], x, recipe) for depth in DEPTHS}
    block = max(ms[many] - ms[few], 0.0) / (many - few)
    return HostTime(max(ms[few] - few * block, 0.0), block)


def step_ms(net: nn.Module, x: Tensor, recipe: str) -> float:
    """Returns the ms of a step where steps follow each other without a wait, as in training."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=x.is_cuda)

    def train() -> None:
        net(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if recipe != BF16:
            step(net)

    wait = torch.cuda.synchronize if x.is_cuda else (lambda: None)
    times = []
    for _ in range(6):
        wait()
        begin = time.perf_counter()
        for _ in range(STEPS):
            train()
        wait()
        times.append(1e3 * (time.perf_counter() - begin) / STEPS)
    return statistics.median(times[1:])  # the first has what is made once
