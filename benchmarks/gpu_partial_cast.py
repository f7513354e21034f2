"""Partial casts of many weights against a device copy of the same run, and the host's time.

    python benchmarks/gpu_partial_cast.py [--quick] [--out build/gpu_partial_cast.json]

100 weights of 4096 x 4096, each with a quarter shard of its fp32 master. TB/s counts the minimum
bytes. A cast reads the shard twice, each time once for both directions: for the amaxes, and then to
write codes of the shard and scales of whole weights. A transpose
reads and writes whole codes. The ceiling is a device copy of 256 MiB: larger copies of torch run
slower. The host's time is that of a step without its collectives, for weights too small to keep the
device busy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch

SHAPES = [(4096, 4096)]
WEIGHTS, RANKS = 100, 4
COPY_BYTES = 256 << 20
FORMATS = [
    ("nvfp4/16x16", "nvfp4/16x16"),
    ("e4m3/tensor", "e4m3/tensor"),
    ("e4m3/128x128", "e4m3/128x128"),
    ("mxfp8/32x32", "mxfp8/32x32"),
    ("mxfp8", "mxfp8"),
    ("mxfp8", "nvfp4/16x16"),
]
BAR, TRANSPOSE_BAR = 0.75, 0.85
STEP_BARS_MS = {1: 0.150, 100: None, 1000: 3.0}


@dataclass
class Row:
    name: str
    us: float
    tb_s: float
    of_ceiling: float
    bar: float | None


class Step:
    """The casts of one rank for one format."""

    def __init__(
        self, specs: tuple[str, str], shape: tuple[int, ...], count: int, device: torch.device
    ) -> None:
        rows, cols = shape
        size = rows * cols // RANKS
        self.masters = [torch.randn(size, device=device) for _ in range(count)]
        one = torch.zeros(shape, device=device, dtype=torch.bfloat16)
        self.weights = [mf.QuantizedTensor.from_tensor(one, *specs) for _ in range(count)]
        parts = [(w, p) for w in self.weights for p in (w.rowwise, w.columnwise)]
        if specs[0] == specs[1] and len(mf.distributed.wires(self.weights[0])) == 1:
            parts = parts[::2]  # the columnwise codes are transposed ones
        self.codes = [wire for w in self.weights for wire in mf.distributed.wires(w)]
        self.scales = [p.scale for _, p in parts]

    def transpose(self) -> None:
        mf.distributed.post_all_gather_processing(self.weights)

    def cast(self) -> None:
        starts = [m.numel() for m in self.masters]
        mf.distributed.quantize_master_weights(self.weights, self.masters, starts, "")

    def cast_bytes(self) -> int:
        written = timing.nbytes(self.codes) // RANKS + timing.nbytes(self.scales)
        return 2 * timing.nbytes(self.masters) + written

    def transpose_bytes(self) -> int:
        return 2 * sum(w.columnwise.codes.nbytes for w in self.weights)


def measure(
    specs: tuple[str, str], shape: tuple[int, ...], count: int, device: torch.device, repeats: int
) -> tuple[list[Row], float]:
    step = Step(specs, shape, count, device)
    copies = [timing.copy_ms(COPY_BYTES, device, repeats)]
    phases: list[tuple[str, Callable[[], object], int, float | None]] = [
        ("amax, scales and cast", step.cast, step.cast_bytes(), BAR),
        ("transpose", step.transpose, step.transpose_bytes(), TRANSPOSE_BAR),
    ]
    times = [timing.kernel_ms([run], device, repeats) for _, run, _, _ in phases]
    copies.append(timing.copy_ms(COPY_BYTES, device, repeats))
    ceiling = 2 * COPY_BYTES / min(copies) / 1e9
    name = specs[0] if specs[0] == specs[1] else " + ".join(specs)
    return [
        Row(f"{name}: {phase}", 1e3 * ms, least / ms / 1e9, least / ms / 1e9 / ceiling, bar)
        for (phase, _, least, bar), ms in zip(phases, times)
    ], ceiling


def host_ms(count: int, device: torch.device, repeats: int) -> float:
    """Times a step of small NVFP4 weights on the host, from the call to its return."""
    step = Step(FORMATS[0], (32, 32), count, device)

    def once() -> None:
        step.cast()
        step.transpose()

    once()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(timing.host_ms(once, 1))
    return sorted(times)[len(times) // 2]


def main() -> int:
    args = timing.arguments(__doc__, "gpu_partial_cast.json").parse_args()
    device = timing.require_device(args.device)
    torch.manual_seed(0)
    repeats = 5 if args.quick else 20
    print(f"{timing.device_name(device)}, torch {torch.__version__}")
    rows: list[Row] = []
    met = True
    for shape in args.shapes or SHAPES:
        for specs in FORMATS[:1] if args.quick else FORMATS:
            here, ceiling = measure(specs, shape, WEIGHTS, device, repeats)
            print(f"\n{WEIGHTS} weights of {shape[0]}x{shape[1]}; copy {ceiling:.2f} TB/s")
            for r in here:
                missed = r.bar is not None and r.of_ceiling < r.bar
                met = met and not missed
                print(
                    f"{r.name:40} {r.us:9.1f} us {r.tb_s:6.2f} TB/s "
                    f"{timing.percent(r.of_ceiling):>7} {timing.percent(r.bar):>6}"
                    f"{'  MISSED' if missed else ''}"
                )
            rows += here
    host = {count: host_ms(count, device, repeats) for count in STEP_BARS_MS}
    print("\nhost's time of a step, without collectives")
    for count, bar in STEP_BARS_MS.items():
        missed = bar is not None and host[count] > bar
        met = met and not missed
        wanted = "" if bar is None else f"at most {bar:.3f} ms"
        print(f"{count:5} weights {host[count]:9.3f} ms  {wanted}{'  MISSED' if missed else ''}")
    timing.write_json(args.out, device, rows=[asdict(r) for r in rows], host_ms=host)
    print(f"{args.out}; every bar {'met' if met else 'NOT met'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
