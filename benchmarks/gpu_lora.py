"""LoRA on a frozen Llama3-8B on one GPU: memory and speed over bf16, codes, and bitsandbytes' NF4.

    python benchmarks/gpu_lora.py                          # every base, the default sizes
    python benchmarks/gpu_lora.py --bases bf16,nvfp4       # two of them
    python benchmarks/gpu_lora.py --tiny --device cpu      # to try the script

    base           weights of the blocks' linear layers     x and gradients
    bf16           bf16                                     bf16
    nvfp4, mxfp4   codes, and block scales                  bf16
    fp8            E4M3, a scale a row                      bf16
    fp8:rowwise    the same                                 FP8 (fp8_rowwise)
    nvfp4:nvfp4    codes, and block scales                  NVFP4 (nvfp4)
    nf4            bitsandbytes' 4 bits, where it is there  bf16

Weights are random, made and quantized on the device a layer at a time; the codes' layers are those
of mf.load_quantized_. PEFT's adapters of rank 16 are on all linear layers of the blocks, in
float32. A step is forward, backward and AdamW on random tokens, with transformers' model as it is,
or with its gradient checkpointing. Times are medians of steps, without the first two.

    base      GiB that the model takes before the first step
    peak      GiB of all tensors at the most
    of bf16   tokens a second over those of bf16
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
from _measure import PeakMemory
from torch import Tensor, nn

BASES = {
    "bf16": None,
    "nvfp4": ("nvfp4", "bf16"),
    "mxfp4": ("mxfp4", "bf16"),
    "fp8": ("e4m3/row+exact", "bf16"),
    "fp8:rowwise": ("e4m3/row+exact", "fp8_rowwise"),
    "nvfp4:nvfp4": ("nvfp4", "nvfp4"),
    "nf4": None,
}
LLAMA3_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA3_8B |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
WARM_UP = 2
GIB = 2**30


def build(base: str, sizes: dict[str, int], device: torch.device) -> nn.Module:
    """Returns a frozen model with random weights, none of which was whole in bf16 but one."""
    import accelerate
    from minifloat.recipe import Recipe
    from minifloat.serving.load import recipe_on_codes
    from transformers import LlamaConfig, LlamaForCausalLM

    with accelerate.init_empty_weights(include_buffers=False):
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).bfloat16()
    choice = BASES[base]
    if choice is not None:
        mf.quantize_(model, recipe_on_codes(Recipe(choice[1]), choice[0]), keep="head")
    for fqn, module in list(model.named_modules()):
        module._buffers.update({k: b.to(device) for k, b in module._buffers.items()})
        is_quantized = isinstance(module, nn.Linear) and module is not model.lm_head
        for name, parameter in module.named_parameters(recurse=False):
            values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            values.normal_(0, 0.02) if values.dim() > 1 else values.fill_(1)
            if is_quantized and choice is not None:
                values = mf.QuantizedTensor.from_tensor(values, choice[0])
            if is_quantized and base == "nf4":
                model.set_submodule(fqn, nf4_layer(values))
            else:
                setattr(module, name, nn.Parameter(values, requires_grad=False))
    model.is_loaded_in_4bit = base == "nf4"  # which PEFT reads
    return model


def nf4_layer(values: Tensor) -> nn.Module:
    """Returns bitsandbytes' linear layer, which quantizes when it is moved."""
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(*values.shape[::-1], False, torch.bfloat16, device="meta")
    layer.weight = bnb.nn.Params4bit(values, quant_type="nf4", module=layer)
    return layer.to(values.device)


def measure(base: str, arguments: Any, device: torch.device) -> dict[str, float]:
    """Trains adapters for some steps; returns bytes and the median time of a step."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    memory = PeakMemory(device.type)
    model: Any = build(base, TINY if arguments.tiny else LLAMA3_8B, device)
    found = {"base": torch.cuda.memory_allocated() if device.type == "cuda" else memory.bytes()}
    if arguments.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    targets = r"model\.layers\..*_proj"
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    shape = arguments.batch, 32 if arguments.tiny else arguments.length
    ids = torch.randint(TINY["vocab_size"], shape, device=device)
    times = []
    for _ in range(WARM_UP + arguments.steps):
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
        loss.item()  # waits for the device
        times.append(time.perf_counter() - start)
    return found | {"peak": memory.bytes(), "step": statistics.median(times[WARM_UP:])}


def main() -> None:
    parser = timing.arguments(__doc__, "gpu_lora.json")
    parser.add_argument("--bases", default=",".join(BASES), help="such as bf16,nvfp4")
    parser.add_argument("--tiny", action="store_true", help="2 layers of dim 128")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true", help="of the blocks' activations")
    arguments = parser.parse_args()
    device = timing.require_device(arguments.device)
    print(f"{'base':<13}{'base GiB':>9}{'peak GiB':>9}{'ms a step':>11}{'of bf16':>9}")
    rows: dict[str, dict[str, float]] = {}
    for base in arguments.bases.split(","):
        if base == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
            print(f"{base:<13} bitsandbytes is not installed")
            continue
        rows[base] = row = measure(base, arguments, device)
        gc.collect()
        ratio = f"{rows['bf16']['step'] / row['step']:.2f}" if "bf16" in rows else "-"
        sizes = f"{row['base'] / GIB:>9.2f}{row['peak'] / GIB:>9.2f}"
        print(f"{base:<13}{sizes}{row['step'] * 1e3:>11.1f}{ratio:>9}", flush=True)
    timing.write_json(arguments.out, device, rows=rows)


if __name__ == "__main__":
    main()
