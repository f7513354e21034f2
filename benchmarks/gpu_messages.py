"""Casts to messages and sums of messages against a device copy of the same run.

    python benchmarks/gpu_messages.py [--quick] [--shapes 8x27262976,64x3407872]

A shape is the ranks and the gradients of a rank's chunk: those of a Llama3-8B block, 218 million,
on 8 and 64 ranks. TB/s counts the minimum bytes: a cast reads the gradients and writes codes and
scales, a sum reads these and writes bf16 or fp32. The ceiling is a device copy of 256 MiB.
"""

from __future__ import annotations

import sys

import _gpu_timing as timing  # first: it makes minifloat importable
import torch
from minifloat._native import ops

SHAPES = [(8, 27262976), (64, 3407872)]
SPECS = ["e4m3/1x128+sr", "e4m3/1x128", "mxfp8+sr", "mxfp4+sr", "bf16"]
COPY_BYTES = 256 << 20


def main() -> int:
    args = timing.arguments(__doc__, "gpu_messages.json").parse_args()
    device = timing.require_device(args.device)
    repeats = 5 if args.quick else 20
    ceiling = 2 * COPY_BYTES / timing.copy_ms(COPY_BYTES, device, repeats) / 1e9
    print(f"{timing.device_name(device)}, torch {torch.__version__}; copy {ceiling:.2f} TB/s")
    rng, rows = torch.tensor([1, 2], device=device), []
    for ranks, cols in (args.shapes or SHAPES)[: 1 if args.quick else None]:
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(ranks, cols, device=device).to(dtype)
            out = torch.empty(cols, dtype=dtype, device=device)
            for spec in SPECS:
                if spec == "bf16":
                    sent = x.bfloat16().view(torch.uint8)
                else:
                    sent = ops.quantize_messages(x, spec, rng=rng)
                calls = {"cast": lambda: ops.quantize_messages(x, spec, rng=rng)}  # noqa: B023
                calls["sum"] = lambda: ops.sum_messages(sent, spec, out)  # noqa: B023
                least = {"cast": x.nbytes + sent.nbytes, "sum": sent.nbytes + out.nbytes}
                for name in ("sum",) if spec == "bf16" else ("cast", "sum"):
                    ms = timing.kernel_ms([calls[name]], device, repeats)
                    rate = least[name] / ms / 1e9
                    what = f"{ranks} x {cols}, {dtype}"
                    print(f"{what:32} {spec:14} {name} {1e3 * ms:9.1f} us {rate:6.2f} TB/s "
                          f"{timing.percent(rate / ceiling):>7}")  # fmt: skip
                    row = {"ranks": ranks, "cols": cols, "dtype": str(dtype), "spec": spec}
                    rows.append(row | {"call": name, "us": 1e3 * ms, "tb_s": rate})
    timing.write_json(args.out, device, ceiling=ceiling, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
