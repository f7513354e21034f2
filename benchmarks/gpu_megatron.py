"""A training step of a Megatron-Core GPTModel on one GPU: bf16, recipes, and Transformer Engine.

    python benchmarks/gpu_megatron.py                       # four layers of Llama3-8B
    python benchmarks/gpu_megatron.py --experts 8           # a mixture: 8 experts, 2 a token
    python benchmarks/gpu_megatron.py --tiny --device cpu   # to try the script

    local         Megatron's local spec in bf16, its attention included
    bf16          minifloat's spec (minifloat.megatron.backend), not converted
    others        the same under a recipe of mf.quantize_
    te …          Transformer Engine's spec, under its recipes, where it can be imported

A step is forward, backward and fused AdamW on random tokens, eager. Times are medians; the first
steps are left out. bf16 runs first and last, and the ratios are to the mean of both. Attention of
minifloat's spec is torch's scaled_dot_product_attention, with cuDNN's kernels where torch has them,
as Transformer Engine's are; `--attention flash` leaves the choice to torch.

    peak      GiB of a step, parameters and optimizer state included
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _measure import PeakMemory
from _peers import TRANSFORMER_ENGINE, installed
from torch.nn.attention import SDPBackend, sdpa_kernel

RECIPES = "fp8_tensorwise,fp8_rowwise,fp8_blockwise,nvfp4_pow2"
SIZES = {"num_layers": 4, "hidden_size": 4096, "ffn_hidden_size": 14336}
SIZES |= {"num_attention_heads": 32, "num_query_groups": 8}
TINY = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128}
TINY |= {"num_attention_heads": 4, "num_query_groups": 2}
VOCABULARY, WARM_UP, GIB = 8192, 3, 2**30
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Transformer Engine's, as TransformerConfig has them.
PEERS: dict[str, dict[str, str]] = {
    "te bf16": {},
    "te delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "te tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "te blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}


def build(name: str, arguments: Any, device: torch.device) -> torch.nn.Module:
    """Returns a GPTModel with random weights, converted where `name` is a recipe."""
    import minifloat.megatron
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    sizes: dict[str, Any] = dict(TINY if arguments.tiny else SIZES)
    if arguments.experts:
        sizes |= {"num_moe_experts": arguments.experts, "moe_router_topk": 2}
        sizes |= {"moe_ffn_hidden_size": sizes["ffn_hidden_size"] // 4}
        sizes |= {"moe_grouped_gemm": name != "local"}
        sizes |= {"moe_token_dispatcher_type": "alltoall"}
    config = TransformerConfig(
        **sizes,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        use_cpu_initialization=device.type == "cpu",
        **PEERS.get(name, {}),
    )
    is_ours = name != "local" and name not in PEERS
    with minifloat.megatron.backend() if is_ours else nullcontext():
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=name != "local")
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        arguments.length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model = model.to(device, torch.bfloat16)
    if is_ours and name != "bf16":
        mf.quantize_(model, name)
    return model


def measure(name: str, arguments: Any, device: torch.device) -> dict[str, float]:
    """Returns the median seconds of a step, and the peak of memory."""
    memory = PeakMemory(device.type)
    torch.manual_seed(0)
    model = build(name, arguments, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    shape = arguments.batch, arguments.length
    tokens = torch.randint(VOCABULARY, shape, device=device)
    positions = torch.arange(arguments.length, device=device).expand(shape)
    mask = None
    if name == "local":  # whose attention reads it
        ones = torch.ones(arguments.length, arguments.length, dtype=torch.bool, device=device)
        mask = ones.triu(1)[None, None]
    is_cudnn = arguments.attention == "cudnn"
    times = []
    for _ in range(WARM_UP + arguments.steps):
        start = time.perf_counter()
        with sdpa_kernel(CUDNN_FIRST, set_priority=True) if is_cudnn else nullcontext():
            loss = model(tokens, positions, mask, labels=tokens).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if name in arguments.recipes.split(","):
            mf.step(model)
        loss.item()  # waits for the device
        times.append(time.perf_counter() - start)
    return {"step": statistics.median(times[WARM_UP:]), "peak": memory.bytes()}


def run(arguments: Any, device: torch.device) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    peers = list(PEERS) if installed(TRANSFORMER_ENGINE) else []
    names = ["bf16", "local", *arguments.recipes.split(","), *peers, "bf16 again"]
    rows: dict[str, dict[str, float]] = {}
    for name in names:
        try:
            rows[name] = measure(name.removesuffix(" again"), arguments, device)
        except (RuntimeError, ValueError, AssertionError, TypeError) as error:  # of a peer
            print(f"{name:<16} {type(error).__name__}: {str(error)[:300]}", flush=True)
        parallel_state.get_global_memory_buffer().buffer.clear()  # of the attention of "local"
        gc.collect()
    print(f"attention: {arguments.attention}")
    bf16 = statistics.mean(rows[name]["step"] for name in ("bf16", "bf16 again"))
    print(f"{'':<16}{'ms a step':>11}{'of bf16':>9}{'peak GiB':>10}")
    for name, row in rows.items():
        ratio, peak = bf16 / row["step"], row["peak"] / GIB
        print(f"{name:<16}{row['step'] * 1e3:>11.1f}{ratio:>9.2f}{peak:>10.2f}")
    timing.write_json(arguments.out, device, rows=rows)


def main() -> None:
    parser = timing.arguments(__doc__, "gpu_megatron.json")
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="2 layers of width 64")
    parser.add_argument("--attention", default="cudnn", choices=("cudnn", "flash"))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    device = timing.require_device(arguments.device)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)
    if device.type == "cpu":
        import sys

        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
        from megatron_on_cpu import CpuForGpu

        with CpuForGpu():
            run(arguments, device)
    else:
        run(arguments, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
