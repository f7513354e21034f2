"""A small Llama, dense or with mixtures of experts, for tests and benchmarks.

    tokens -> tok_embeddings -> layers.0 .. layers.L-1 -> norm -> output -> logits

    layer:  x = x + wo(attention(wq(n), wk(n), wv(n)))       n = RMSNorm(x)     rotary q and k
            x = x + w2(silu(w1(n)) * w3(n))                  n = RMSNorm(x)     (SwiGLU)

    With experts every layer but the first has an mf.MoE, `moe`, for the SwiGLU, and routes as
    DeepSeek-V3 does (arXiv 2412.19437): sigmoid scores, normalised over the chosen experts,
    balanced by a bias.

Parameters are fp32, and the caller's autocast chooses the dtype of the products; or they are bf16,
without autocast. The residual stream has the parameters' dtype. A norm returns the compute dtype,
so layers that share an input share one copy of it.

Shape suffixes: B sequences, S positions, D model width, H query heads, G key/value heads,
E width of a head, F hidden width of the feed-forward, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import cast

import minifloat as mf
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-5  # of norms


@dataclass(frozen=True)
class ModelConfig:
    """Sizes. With experts: ffn is the first layer's, hidden that of one expert."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    hidden: int = 0
    experts: int = 0
    top_k: int = 0
    shared: int = 0

    @classmethod
    def parse(cls, text: str, vocab: int) -> "ModelConfig":
        """Parses `dim,layers,heads,kv_heads,ffn[,hidden,experts,top_k,shared]`."""
        dim, layers, heads, kv_heads, ffn, *experts = map(int, text.split(","))
        return cls(dim, layers, heads, kv_heads, ffn, vocab, *experts)


class RMSNorm(nn.RMSNorm):
    """torch's norm, computed in fp32, in the compute dtype: autocast's, else x's. x: (..., D)."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)
        device = x.device.type
        narrow = torch.is_autocast_enabled(device)
        return y.to(torch.get_autocast_dtype(device) if narrow else x.dtype)


def rotary_table(seq: int, width: int, theta: float = 10000.0) -> Tensor:
    """Computes cos and sin of position * theta^(-2i / width): (2, seq, width / 2), fp32."""
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(seq, dtype=torch.float64)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()]).float()


def rotate(x_BSHE: Tensor, table: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + E/2]) by its position's angle, in fp32; keeps the dtype."""
    cos, sin = table[:, : x_BSHE.shape[1], None, :]  # (S, 1, E / 2) each
    a, b = x_BSHE.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x_BSHE.dtype)


class Attention(nn.Module):
    """Causal attention; heads / kv_heads query heads share a key and value head. x: (B, S, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.dim // config.heads
        kv_dim = config.kv_heads * self.width
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.width)  # (B, S, H or G, E)
        q = rotate(self.wq(x).view(heads), table).transpose(1, 2)
        k = rotate(self.wk(x).view(heads), table).transpose(1, 2)
        v = self.wv(x).view(heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """The feed-forward w2(silu(w1(x)) * w3(x)), hidden width F. x: (B, S, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the residual."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, EPSILON)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, EPSILON)
        self.moe: nn.Module | None = None
        self.feed_forward: nn.Module | None = None
        if config.experts and number > 0:
            sizes = (config.dim, config.hidden, config.experts, config.top_k)
            self.moe = mf.MoE(*sizes, shared_experts=config.shared, fused_w13=True)
        else:
            self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        y: Tensor = (self.moe or self.feed_forward)(self.ffn_norm(x))  # type: ignore[misc]
        return x + y


class Llama(nn.Module):
    """A Llama, from token ids (B, S) to logits (B, S, V). Head and embedding are not tied."""

    def __init__(self, config: ModelConfig, seq: int) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.dim, EPSILON)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        self.register_buffer(
            "rotary", rotary_table(seq, config.dim // config.heads), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        logits: Tensor = self.output(self.norm(x))
        return logits


def init_weights(model: Llama, seed: int) -> None:
    """Draws normal weights of a model on the CPU: equal for every device and recipe.

    The standard deviation is 0.02. That of matrices that write to the residual stream is divided by
    sqrt(2 layers), and that of the head is 1 / sqrt(dim).
    """
    generator = torch.Generator().manual_seed(seed)
    into_residual = 0.02 / math.sqrt(2 * model.config.layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        std = 0.02
        if name.endswith((".wo.weight", ".w2.weight", ".experts.w2")):
            std = into_residual
        elif name == "output.weight":
            std = model.config.dim**-0.5
        nn.init.normal_(parameter, std=std, generator=generator)


def build_model(config: ModelConfig, seq: int, seed: int, device: str) -> Llama:
    """Builds the model with its initial weights, a function of (config, seed) only."""
    model = Llama(config, seq)
    init_weights(model, seed)
    return model.to(device)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Computes the mean loss in nats a token, in fp32. logits: (B, S, V), targets: (B, S)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def compile_layers(model: nn.Module) -> None:
    """Compiles each layer, and forgets the code of other models: its number is limited."""
    torch.compiler.reset()
    for layer in cast(nn.ModuleList, model.layers):
        layer.compile()
