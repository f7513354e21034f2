"""torchtitan 0.2.2's own trainer: recipes beside bf16, from the same weights on the same text.

    python benchmarks/gpu_torchtitan.py                       # one GPU
    python benchmarks/gpu_torchtitan.py --layouts fsdp,tp,ep  # two GPUs
    python benchmarks/gpu_torchtitan.py --append --recipes …  # more rows of the same table
    python benchmarks/gpu_torchtitan.py --tiny                # on a CPU, to try the script

    one, fsdp   a Llama of 1.4B parameters, 6 layers of Llama 3 8B's sizes; FSDP2 gathers codes
    tp          the same, tensor and sequence parallel over two GPUs, weights in bf16; each block is
                compiled whole
    ep          a DeepSeek-V3 of 1.7B parameters, 32 experts divided over two GPUs, beside FSDP2

A run is one job of torchrun, with 16384 tokens a step on each GPU (tp: on both). The text is Python
source of the standard library and of torch; the tokenizer is trained on it. Loss, tokens/s, MFU (by
the bf16 peak) and memory are torchtitan's own metrics: speeds are medians after the first steps,
the last loss is the mean of the last logged ones, memory is the largest peak of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT)]  # the source tree's package, installed or not

import torch  # noqa: E402

from tests.support.titan_job import prepare, train, write_assets  # noqa: E402

RECIPES = "bf16,fp8_rowwise,fp8_tensorwise,nvfp4_pow2"
TEXT_BYTES, SAMPLE_BYTES, DOCUMENT_BYTES = 40_000_000, 4_000_000, 20_000
SKIPPED_STEPS = 20  # torch.compile, the allocator
LAST_LOGS = 5
FLAVOR = "minifloat_benchmark"


@dataclass(frozen=True)
class Layout:
    """How a model is trained: its name in torchtitan, the ranks, options of the command line."""

    model: str
    ranks: int
    options: tuple[str, ...]


LAYOUTS = {
    "one": Layout("llama3", 1, ("--training.local_batch_size=4",)),
    "fsdp": Layout("llama3", 2, ("--training.local_batch_size=4",)),
    "tp": Layout(
        "llama3",
        2,
        (
            "--training.local_batch_size=4",
            "--parallelism.tensor_parallel_degree=2",
            "--training.dtype=bfloat16",  # without FSDP2 torchtitan casts no weight
        ),
    ),
    "ep": Layout(
        "deepseek_v3",
        2,
        ("--training.local_batch_size=4", "--parallelism.expert_parallel_degree=2"),
    ),
}


@dataclass
class Row:
    layout: str
    recipe: str
    first_loss: float
    last_loss: float
    tokens_per_second: float  # of a GPU
    mfu: float  # percent of the bf16 peak
    active_gib: float
    reserved_gib: float


# ---- One run, in a process of torchrun -----------------------------------------------------------
def register_models(vocabulary: int, is_tiny: bool) -> None:
    """Adds the benchmark's sizes to torchtitan's Llama 3 and DeepSeek-V3."""
    from torchtitan.models.deepseek_v3 import deepseekv3_args
    from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
    from torchtitan.models.llama3 import llama3_args
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.moe import MoEArgs

    dim, layers, heads, experts = (256, 2, 8, 4) if is_tiny else (4096, 6, 32, 32)
    llama3_args[FLAVOR] = TransformerModelArgs(
        dim=dim,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=heads // 4,
        ffn_dim_multiplier=1.3,
        multiple_of=256 if is_tiny else 1024,
        rope_theta=500000,
        vocab_size=vocabulary,
    )
    deepseekv3_args[FLAVOR] = DeepSeekV3ModelArgs(
        vocab_size=vocabulary,
        dim=256 if is_tiny else 2048,
        inter_dim=512 if is_tiny else 8192,
        moe_inter_dim=128 if is_tiny else 1408,
        n_layers=layers,
        n_dense_layers=1,
        n_heads=4 if is_tiny else 16,
        moe_args=MoEArgs(
            num_experts=experts,
            num_shared_experts=2,
            top_k=2 if is_tiny else 6,
            score_func="softmax",
            route_norm=False,
            score_before_experts=False,
        ),
        q_lora_rank=0,
        kv_lora_rank=128 if is_tiny else 512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mscale=0.70,
    )


def options_of(args: argparse.Namespace, layout: Layout, recipe: str) -> list[str]:
    """Returns torchtitan's options of a run."""
    options = [
        f"--model.name={layout.model}",
        f"--model.flavor={FLAVOR}",
        f"--training.steps={args.steps}",
        f"--training.seq_len={64 if args.tiny else 4096}",
        f"--metrics.log_freq={args.log_freq}",
        "--metrics.disable_color_printing",
        f"--lr_scheduler.warmup_steps={max(args.steps // 10, 1)}",
        "--optimizer.lr=3e-4",
        f"--optimizer.implementation={'foreach' if args.tiny else 'fused'}",
        "--activation_checkpoint.mode=none",
        "--debug.seed=1",
        *layout.options,
    ]
    if not args.tiny:
        options += ["--training.dataloader.num_workers=1", "--training.dataloader.pin_memory"]
    if args.layout not in args.eager:
        options += ["--compile.enable", f"--compile.backend={args.backend}"]
    if recipe != "bf16":
        options += ["--model.converters=minifloat", f"--minifloat.recipe={recipe}"]
        options += [f"--minifloat.filter_fqns={args.filter}"]
    return [*options, *args.titan]


def run_job(args: argparse.Namespace) -> None:
    """Trains as one rank of a job, and writes the metrics."""
    prepare("cpu" if args.tiny else "cuda")
    from torchtitan.tools.logging import init_logger

    init_logger()
    vocabulary = json.loads((args.assets / "vocabulary.json").read_text())
    register_models(vocabulary, args.tiny)
    rows = train(args.assets, options_of(args, LAYOUTS[args.layout], args.recipe))
    if int(os.environ["RANK"]) == 0:
        (args.assets / "rows.json").write_text(json.dumps(rows, default=float))


# ---- All runs ------------------------------------------------------------------------------------
def documents(limit: int) -> list[str]:
    """Returns Python source of this machine, cut into documents, in a random order."""
    folders = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent]
    found, total = [], 0
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if folder == folders[0] and "site-packages" in path.parts:
                continue
            text = path.read_text(encoding="utf-8", errors="ignore")
            found += [text[i : i + DOCUMENT_BYTES] for i in range(0, len(text), DOCUMENT_BYTES)]
            total += len(text)
            if total > limit:
                break
    random.Random(1).shuffle(found)
    return found


def make_assets(args: argparse.Namespace) -> None:
    """Writes the text and its tokenizer, once for all runs."""
    vocabulary = 512 if args.tiny else 16384
    texts = documents(200_000 if args.tiny else TEXT_BYTES)
    sample = SAMPLE_BYTES // DOCUMENT_BYTES
    write_assets(args.assets, vocabulary, texts, sample)
    (args.assets / "vocabulary.json").write_text(json.dumps(vocabulary))


def row_of(layout: str, recipe: str, rows: list[dict[str, Any]]) -> Row:
    """Summarises torchtitan's metrics of one run."""
    timed = [row for row in rows if row["step"] > SKIPPED_STEPS] or rows[1:]
    losses = [row["loss_metrics/global_avg_loss"] for row in rows]
    return Row(
        layout,
        recipe,
        losses[0],
        statistics.mean(losses[-LAST_LOGS:]),
        statistics.median(row["throughput(tps)"] for row in timed),
        statistics.median(row["mfu(%)"] for row in timed),
        max(row["memory/max_active(GiB)"] for row in timed),
        max(row["memory/max_reserved(GiB)"] for row in timed),
    )


def run(args: argparse.Namespace, layout: str, recipe: str) -> tuple[Row, list[dict[str, Any]]]:
    """Trains one recipe in a job of torchrun."""
    ranks = LAYOUTS[layout].ranks
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc-per-node={ranks}", __file__, "--layout", layout, "--recipe", recipe]
    subprocess.run([*launch, *sys.argv[1:], "--assets", str(args.assets)], check=True)
    rows = json.loads((args.assets / "rows.json").read_text())
    return row_of(layout, recipe, rows), rows


def former_rows(args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Reads the rows and metrics of earlier runs."""
    if not args.out.exists():
        return [], {}
    report = json.loads(args.out.read_text())
    return [Row(**row) for row in report["rows"]], report["logs"]


def table(rows: list[Row]) -> str:
    """Formats rows as a table of the docs, each beside its layout's bf16."""
    lines = [
        "| layout | recipe | first loss | last loss "
        "| tokens/s a GPU | speed, bf16 = 1 | MFU | GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = next((r for r in rows if (r.layout, r.recipe) == (row.layout, "bf16")), None)
        speed = "-" if base is None else f"{row.tokens_per_second / base.tokens_per_second:.2f}"
        gap = ""
        if base is not None and base is not row:
            gap = f" ({100 * (row.last_loss / base.last_loss - 1):+.2f}%)"
        lines.append(
            f"| {row.layout} | `{row.recipe}` | {row.first_loss:.3f} | {row.last_loss:.3f}{gap} | "
            f"{row.tokens_per_second:,.0f} | {speed} | {row.mfu:.1f}% | "
            f"{row.active_gib:.1f} active, {row.reserved_gib:.1f} reserved |"
        )
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", default="one", help=f"some of {','.join(LAYOUTS)}")
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--steps", type=int, default=None, help="200; with --tiny 4")
    parser.add_argument("--filter", default=None, help="minifloat.filter_fqns")
    parser.add_argument("--eager", default="", help="layouts whose blocks are not compiled")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--titan", action="append", default=[], help="an option of torchtitan")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU, over gloo")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_torchtitan.json")
    parser.add_argument("--assets", type=Path, default=ROOT / "build" / "torchtitan_assets")
    parser.add_argument("--append", action="store_true", help="to the rows that --out has")
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--recipe", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.eager = args.eager.split(",")
    args.steps = args.steps or (4 if args.tiny else 200)
    args.log_freq = 1 if args.tiny else 10
    args.filter = args.filter or ("output" if args.tiny else "output,auto_filter_small_kn")
    return args


def main() -> None:
    args = parsed()
    if args.layout is not None:
        run_job(args)
        return
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("gpu_torchtitan.py: expected a CUDA device, torch sees none (--tiny: on a CPU)")
    if not (args.append and (args.assets / "vocabulary.json").exists()):
        make_assets(args)
    device = "CPU" if args.tiny else torch.cuda.get_device_name()
    rows, logs = former_rows(args) if args.append else ([], {})
    for layout in args.layouts.split(","):
        for recipe in args.recipes.split(","):
            row, logs[f"{layout}/{recipe}"] = run(args, layout, recipe)
            rows.append(row)
            report = {"device": device, "torch": torch.__version__, "steps": args.steps}
            report |= {"rows": [asdict(r) for r in rows], "logs": logs}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1))
            print(f"\n{device}, torch {torch.__version__}, {args.steps} steps\n{table(rows)}\n")


if __name__ == "__main__":
    main()
