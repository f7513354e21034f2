"""A training step of four Llama3-8B blocks on one GPU, beside bf16, torchao and Transformer Engine.

    python benchmarks/gpu_blocks.py [--recipes fp8_delayed,…] [--peers torchao] [--fuse] [--profile]

step     forward, backward and fused AdamW under torch.compile, batch 2 x 8192, median of steps
peak     GiB of a step, parameters and optimizer state included
profile  where one step's kernels spend their time: products, attention, casts, the rest

Compiled bf16 runs first and last, and the ratios are to the mean of both. torchao and Transformer
Engine run where they can be imported; Transformer Engine's blocks are its own, eager.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
import torch.nn.functional as F
from _peers import (
    TORCHAO,
    TRANSFORMER_ENGINE,
    UnderAutocast,
    convert_by_torchao,
    installed,
    transformer_engine_recipes,
)
from torch import Tensor, nn

LAYERS, BATCH, TOKENS = 4, 2, 8192
DIM, HEADS, KV_HEADS, FFN = 4096, 32, 8, 14336
QUICK = (1, 1, 256)  # layers, batch, tokens
BF16 = "bf16"
# Least speed against compiled bf16.
BARS = {
    "fp8_delayed": 1.48,
    "fp8_tensorwise": 1.46,
    "fp8_rowwise": 1.43,
    "fp8_blockwise": 1.33,
    "mxfp4": 1.43,
    "nvfp4_pow2": 1.38,
    "mxfp8": 1.00,
    "mxfp8_nvfp4": 1.00,
    "nvfp4": 0.97,
}
FP8_GIB, FP4_GIB = 13.2, 12.4
# Kernels by parts of their names; the first that fits.
KINDS = {
    "the rest": ("triton_", "Memcpy", "Memset"),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "products": ("gemm", "matmul", "nvjet", "cutlass", "cublas", "xmma"),
    "casts": ("quantize", "cast", "amax", "minifloat", "fp4_as_fp8", "raise", "roll"),
    "optimizer": ("adam", "multi_tensor"),
}


class FeedForward(nn.Module):
    """A gated feed-forward."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn, bias=False)
        self.w3 = nn.Linear(dim, ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A block of Llama 3, with attention of grouped heads and without rotary embeddings."""

    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.width = dim // heads
        kv_dim = kv_heads * self.width
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_dim, bias=False)
        self.wv = nn.Linear(dim, kv_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.feed_forward = FeedForward(dim, ffn)

    def heads_of(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (self.heads_of(w(y)) for w in (self.wq, self.wk, self.wv))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(o.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.ffn_norm(x))


@dataclass
class Row:
    name: str
    ms: float
    peak_gib: float
    speed: float | None = None  # against bf16
    bar: float | None = None
    kinds: dict[str, float] = field(default_factory=dict)  # ms


@dataclass(frozen=True)
class Sizes:
    layers: int
    batch: int
    tokens: int


def blocks(sizes: Sizes, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    parts = [Block(DIM, HEADS, KV_HEADS, FFN) for _ in range(sizes.layers)]
    return nn.Sequential(*parts).to(device, torch.bfloat16)


def ours(recipe: str, options: dict[str, Any]) -> Callable[[nn.Module], nn.Module]:
    def convert(net: nn.Module) -> nn.Module:
        mf.quantize_(net, recipe, **options)
        return net

    return convert


def transformer_engine_layers(sizes: Sizes) -> nn.Module:
    """Builds Transformer Engine's own layers of the same sizes."""
    import transformer_engine.pytorch as te

    return nn.Sequential(
        *(
            te.TransformerLayer(
                DIM,
                FFN,
                HEADS,
                num_gqa_groups=KV_HEADS,
                normalization="RMSNorm",
                activation="swiglu",
                hidden_dropout=0.0,
                attention_dropout=0.0,
                bias=False,
                params_dtype=torch.bfloat16,
                attn_input_format="bshd",
                self_attn_mask_type="causal",
            )
            for _ in range(sizes.layers)
        )
    ).cuda()


def profiled(step: Callable[[], object]) -> dict[str, float]:
    """Returns the ms of a step's kernels by kind."""
    times: dict[str, float] = defaultdict(float)
    for kernel in timing.kernels_of(step):
        times[timing.kind_of(kernel, KINDS)] += kernel.ms
    return dict(times)


def measure(
    name: str,
    net: nn.Module,
    sizes: Sizes,
    device: torch.device,
    is_profiled: bool,
    is_compiled: bool = True,
) -> Row:
    """Trains the model for some steps, and times one."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=device.type == "cuda")
    run = torch.compile(net) if is_compiled else net
    x = torch.randn(sizes.batch, sizes.tokens, DIM, device=device, dtype=torch.bfloat16)

    def step() -> None:
        run(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if any(isinstance(m, mf.Linear) for m in net.modules()):
            mf.step(net)

    for _ in range(3):
        step()
    if device.type != "cuda":
        return Row(name, timing.host_ms(step, 1), 0.0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    ms = sorted(timing.event_ms(step, 12))[6]
    peak = torch.cuda.max_memory_allocated() / 2**30
    return Row(name, ms, peak, kinds=profiled(step) if is_profiled else {})


def models(
    sizes: Sizes,
    device: torch.device,
    recipes: list[str],
    peers: list[str],
    options: dict[str, Any],
) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yields names and constructors, bf16 first and last."""

    def converted(convert: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: convert(blocks(sizes, device))

    yield BF16, lambda: blocks(sizes, device)
    for recipe in recipes:
        yield recipe, converted(ours(recipe, options))
    if TORCHAO in peers:
        for recipe in ("tensorwise", "rowwise"):
            yield f"torchao {recipe}", converted(partial(convert_by_torchao, recipe=recipe))
    if TRANSFORMER_ENGINE in peers:
        for name, recipe in [("te bf16", None), *transformer_engine_recipes().items()]:
            yield (
                name,
                lambda recipe=recipe: UnderAutocast(transformer_engine_layers(sizes), recipe),
            )
    yield f"{BF16} again", lambda: blocks(sizes, device)


def judge(rows: list[Row]) -> bool:
    """Fills in the ratios, prints the table, and tells whether every bar is met."""
    base = [row.ms for row in rows if row.name.startswith(BF16)]
    bf16 = sum(base) / len(base)
    is_met = True
    print(f"{'':18} {'ms':>8} {'speed':>7} {'bar':>5} {'GiB':>6}")
    for row in rows:
        row.speed, row.bar = bf16 / row.ms, BARS.get(row.name)
        gib = FP4_GIB if "fp4" in row.name else FP8_GIB
        missed = row.bar is not None and (row.speed < row.bar or row.peak_gib > gib)
        is_met = is_met and not missed
        kinds = "  ".join(f"{kind} {ms:.1f}" for kind, ms in sorted(row.kinds.items()))
        bar = "" if row.bar is None else f"{row.bar:.2f}"
        print(
            f"{row.name:18} {row.ms:8.2f} {row.speed:7.3f} {bar:>5} {row.peak_gib:6.2f} "
            f"{'MISSED' if missed else ''}  {kinds}"
        )
    return is_met


def main() -> int:
    parser = timing.arguments(__doc__, "gpu_blocks.json")
    parser.add_argument("--recipes", default=",".join(BARS), help="%(default)s")
    parser.add_argument("--peers", default=f"{TORCHAO},{TRANSFORMER_ENGINE}", help="%(default)s")
    parser.add_argument("--fuse", action="store_true", help="mf.quantize_(…, fuse=True)")
    parser.add_argument("--recompute", help="mf.quantize_(…, recompute=…)")
    parser.add_argument("--profile", action="store_true", help="also the time of kinds of kernels")
    arguments = parser.parse_args()
    device = timing.require_device(arguments.device)
    sizes = Sizes(*QUICK) if arguments.quick else Sizes(LAYERS, BATCH, TOKENS)
    recipes = [r for r in arguments.recipes.split(",") if r]
    asked = [p for p in arguments.peers.split(",") if p]
    peers = installed(*asked)
    for peer in asked:
        if peer not in peers:
            print(f"{peer}: left out, not installed")
    rows = []
    options = {"fuse": arguments.fuse, "recompute": arguments.recompute}
    for name, build in models(sizes, device, recipes, peers, options):
        timing.compile_each_shape()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rows.append(
            measure(name, build(), sizes, device, arguments.profile, not name.startswith("te "))
        )
        print(f"{name}: {rows[-1].ms:.2f} ms, {rows[-1].peak_gib:.2f} GiB", flush=True)
    is_met = judge(rows)
    versions = {peer: version(peer) for peer in peers}
    timing.write_json(arguments.out, device, peers=versions, rows=[asdict(row) for row in rows])
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
