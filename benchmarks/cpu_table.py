"""The CPU's casts against memcpy and against torchao's eager references: one table, and JSON.

    python benchmarks/cpu_table.py [--out build/cpu_table.json]

8192 x 8192 bf16. GB/s counts the input once and every output once; memcpy counts what it reads and
what it writes, in the same process. The C++ figures come from build/bench/benchmarks/quantize_bench
(Google Benchmark), which `make bench` builds; torchao's where torchao can be imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
from minifloat.spec import Spec

PROGRAM = timing.ROOT / "build" / "bench" / "benchmarks" / "quantize_bench"
SHAPE = (8192, 8192)

# Least fraction of memcpy, rowwise, with the tensor's amax passed where the rule has one.
BARS = {
    "e4m3/tensor": 0.40,
    "e4m3/row": 0.40,
    "e4m3/1x128": 0.40,
    "e4m3/128x128": 0.40,
    "mxfp8": 0.40,
    "mxfp8/32x32": 0.40,
    "nvfp4": 0.30,
    "nvfp4/16x16": 0.30,
    "nvfp4+sr": 0.15,
    "nvfp4+rht": 0.15,
}
PEER_BAR = 20.0  # times faster than torchao's eager CPU reference


def run_program() -> list[dict[str, float | str]]:
    """Runs the C++ benchmarks; returns a row each: name, spec, direction, ms, GB/s."""
    done = subprocess.run(
        [PROGRAM, "--benchmark_format=json", "--benchmark_repetitions=9",
         "--benchmark_enable_random_interleaving=true", "--benchmark_report_aggregates_only=true"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows: list[dict[str, float | str]] = []
    for entry in json.loads(done.stdout)["benchmarks"]:
        if entry.get("aggregate_name") != "median":
            continue
        what, spec, direction = entry["run_name"].split("/min_time")[0].split("|")
        rows.append(
            {
                "what": what,
                "spec": spec,
                "direction": direction,
                "ms": entry["real_time"],
                "GB/s": entry["bytes_per_second"] / 1e9,
            }
        )
    # The repetitions run in random order, so that other work on the machine slows all equally.
    directions = ["", "row", "col", "both"]
    rows.sort(key=lambda r: (r["what"], r["spec"], directions.index(str(r["direction"]))))
    return rows


def print_casts(rows: list[dict[str, float | str]]) -> bool:
    """Prints the C++ figures; returns False where a bar is missed."""
    copies = [float(row["GB/s"]) for row in rows if str(row["what"]).startswith("memcpy")]
    ceiling = max(copies)
    print(f"memcpy: {', '.join(f'{c:.1f}' for c in copies)} GB/s; ceiling {ceiling:.1f}")
    print(f"{'what':22} {'spec':15} {'dir':5} {'ms':>8} {'GB/s':>7} {'memcpy':>7} {'bar':>5}")
    met = True
    for row in rows:
        if str(row["what"]).startswith("memcpy"):
            continue
        fraction = float(row["GB/s"]) / ceiling
        row["of memcpy"] = fraction
        has_no_amax = Spec.parse(str(row["spec"])).amax_of != "tensor"
        given = "given" in str(row["what"]) or has_no_amax
        is_cast = str(row["what"]).startswith("quantize") and row["direction"] == "row"
        bar = BARS.get(str(row["spec"])) if is_cast and given else None
        met = met and (bar is None or fraction >= bar)
        print(
            f"{row['what']:22} {row['spec']:15} {row['direction']:5} {row['ms']:8.1f} "
            f"{row['GB/s']:7.2f} {fraction:7.1%} {'' if bar is None else f'{bar:.0%}':>5}"
        )
    return met


def print_peers() -> list[dict[str, float | str]]:
    """Prints minifloat's Python casts beside torchao's eager CPU references, with the amax."""
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
    except ImportError as error:
        print(f"torchao: not compared ({error}); pip install torchao")
        return []
    x = torch.randn(SHAPE).bfloat16()
    scale = x.abs().max().float() / (448 * 6)
    amax = x.abs().max().float()
    pairs: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        (
            "mxfp8 / to_mx",
            lambda: mf.tensor.quantize(x, "mxfp8"),
            lambda: to_mx(x, torch.float8_e4m3fn, 32),
        ),
        (
            "nvfp4 / nvfp4_quantize",
            lambda: mf.tensor.quantize(x, "nvfp4", amax=amax),
            lambda: nvfp4_quantize(x, 16, scale),
        ),
    ]
    rows: list[dict[str, float | str]] = []
    print(f"{'cast':24} {'minifloat ms':>13} {'torchao ms':>11} {'times':>7}   bar {PEER_BAR:.0f}")
    for name, ours, theirs in pairs:
        ours(), theirs()  # once before they are timed
        mine, peer = timing.host_ms(ours, 5), timing.host_ms(theirs, 3)
        rows.append({"cast": name, "minifloat ms": mine, "torchao ms": peer, "times": peer / mine})
        print(f"{name:24} {mine:13.1f} {peer:11.1f} {peer / mine:7.1f}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=timing.ROOT / "build" / "cpu_table.json")
    args = parser.parse_args()
    casts: list[dict[str, float | str]] = []
    met = True
    if PROGRAM.exists():
        casts = run_program()
        met = print_casts(casts)
    else:
        print(
            f"{PROGRAM.relative_to(timing.ROOT)}: not built (it needs Google Benchmark); run "
            "`make bench`"
        )
    peers = print_peers()
    met = met and all(float(row["times"]) >= PEER_BAR for row in peers)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"torch": torch.__version__, "casts": casts, "peers": peers}, indent=1)
    )
    print(f"{args.out}; every bar {'met' if met else 'NOT met'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
