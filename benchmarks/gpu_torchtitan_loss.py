"""Loss over 3,000 steps of torchtitan 0.2.2's own trainer, paired with bf16 by seed and data.

    python benchmarks/gpu_torchtitan_loss.py --data FOLDER --limit 560
    python benchmarks/gpu_torchtitan_loss.py --tiny      # on a CPU, to try the script

FOLDER is what `parity_data.py` made. A run is a process of its own on one GPU. The command again
trains the runs without a record; without --data or --tiny it prints the tables alone.

    dense    torchtitan's Llama 3 at the sizes of gpu_parity.py: 122M parameters
    moe      torchtitan's DeepSeek-V3, 122M of 392M parameters active: a dense first layer, then
             seven of 16 experts of 1024 x 896, of which a token takes 2, and one that all take

Model, initial weights, dataset class, loaders, loss, clipping, AdamW, schedule, validator and
metrics are torchtitan's; the trial's settings are those of gpu_parity.py, but for moe's batch.
Blocks are compiled, parameters fp32, products in bf16 autocast. Two things are put in:

    tokens       a document of torchtitan's dataset is a window of seq + 1 ids of the trial's text,
                 and its tokenizer returns them as they are. Windows and their order for a seed are
                 those of gpu_parity.py
    validation   reads the whole batches of the validation text every EVAL_EVERY steps, and not
                 after the first one. The counts by which experts are balanced do not see it

    loss         of each step, as logged; a run's training loss is the mean of the last 100
    val          of the last step, by torchtitan's validator
    tokens/s     median of torchtitan's metric, of single steps after the first 20; MFU is relative
                 to the bf16 peak, memory the largest peak of active bytes
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import torch
from _entries import RunSpec, parse_entry
from _parity_records import (
    BF16,
    RESULTS,
    Record,
    losses_of,
    noise,
    records_in,
    table,
    write_record,
)
from _parity_run import Trial, Windows, rounded
from _parity_tokens import VOCABULARY, load_tokens
from gpu_parity import Plan
from gpu_torchtitan import FLAVOR, row_of

from tests.support.titan_job import Texts, prepare, train

LAST_LINES = 15  # of the log of a run that failed
TRAIN, VALIDATION = "trial_train", "trial_validation"  # among torchtitan's datasets
NVFP4 = "nvfp4 keep=nvfp4_paper"
SEEDS = "1,2"
# What torchrun tells a process that is alone. Port 0: a free one.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
# Names of models -> the trial, and the recipes of the table.
MODELS = {
    "dense": (Trial(), f"{BF16},{NVFP4}"),
    "moe": (Trial("deepseek_v3:1024,8,16,896,16,2,1", batch=24), f"{BF16},fp8_rowwise,{NVFP4}"),
}
TINY = {
    "model": "tiny",
    "seq": 64,
    "batch": 2,
    "steps": 4,
    "warmup": 2,
    "eval_every": 2,
    "device": "cpu",
}


# ---- One run, in a process of its own ------------------------------------------------------------
def sizes_of(model: str, vocabulary: int, is_tiny: bool) -> tuple[str, Any]:
    """Returns the name of a model in torchtitan, and its sizes."""
    from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.moe import MoEArgs

    dim, layers, heads = (256, 3, 4) if is_tiny else (1024, 8, 16)
    if model == "dense":
        return "llama3", TransformerModelArgs(
            dim=dim,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=heads // 4,
            multiple_of=64,  # the hidden width is 8 / 3 dim rounded up to that: 2752
            rope_theta=10000,
            vocab_size=vocabulary,
        )
    return "deepseek_v3", DeepSeekV3ModelArgs(
        vocab_size=vocabulary,
        dim=dim,
        inter_dim=512 if is_tiny else 2752,
        moe_inter_dim=128 if is_tiny else 896,
        n_layers=layers,
        n_dense_layers=1,
        n_heads=heads,
        moe_args=MoEArgs(
            num_experts=4 if is_tiny else 16,
            num_shared_experts=1,
            top_k=2,
            score_func="sigmoid",
            route_norm=True,
            score_before_experts=False,
        ),
        q_lora_rank=0,
        kv_lora_rank=256,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=64,
    )


def windows_of(ids: Any, trial: Trial, order: Any) -> Texts:
    """Returns windows of seq + 1 ids, in an order, as documents of torchtitan's dataset."""
    seq = trial.seq
    return Texts([ids[i * seq : (i + 1) * seq + 1] for i in order.tolist()])


def register(name: str, trial: Trial, tokens: Any, seed: int, sizes: Any) -> None:
    """Adds the trial's texts, sizes, tokenizer and validator to torchtitan."""
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    class Ids(BaseTokenizer):
        """The tokenizer of documents that are ids."""

        def encode(self, ids: Any, **_: Any) -> list[int]:
            found: list[int] = ids.tolist()
            return found

        def decode(self, *_: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return int(sizes.vocab_size)

    class TrialValidator(Validator):
        """torchtitan's validator, which leaves the balance of experts alone."""

        def should_validate(self, step: int) -> bool:
            return step % trial.eval_every == 0

        def post_dataloading_process(
            self, input_dict: Any, labels: torch.Tensor, model_parts: list[torch.nn.Module]
        ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], dict[str, Any]]:
            return input_dict["input"], labels, {}, {}  # causal attention has no other mask

        def validate(self, model_parts: list[torch.nn.Module], step: int) -> None:
            named = [buffer for part in model_parts for buffer in part.named_buffers()]
            counts = [b for name, b in named if name.endswith("tokens_per_expert")]
            former = [count.clone() for count in counts]
            super().validate(model_parts, step)
            for count, value in zip(counts, former, strict=True):
                count.copy_(value)

    def train_texts(path: str) -> Texts:
        cut = Windows(tokens.train, replace(trial, device="cpu"))
        wanted = trial.steps * trial.batch
        if cut.count < wanted:
            sys.exit(f"--data: expected {wanted} windows of {trial.seq} tokens, got {cut.count}")
        return windows_of(tokens.train, trial, next(cut.orders(seed))[:wanted])

    def validation_texts(path: str) -> Texts:
        count = Windows(tokens.validation, replace(trial, device="cpu")).count
        whole = torch.arange(count // trial.batch * trial.batch)
        return windows_of(tokens.validation, trial, whole)

    for dataset, loader in ((TRAIN, train_texts), (VALIDATION, validation_texts)):
        text_datasets.DATASETS[dataset] = DatasetConfig(
            path="", loader=loader, sample_processor=lambda window: window
        )
    spec = get_train_spec(name)
    changed = {"model_args": {FLAVOR: sizes}, "build_tokenizer_fn": lambda _: Ids()}
    register_train_spec(name, replace(spec, **changed, build_validator_fn=TrialValidator))


def options_of(name: str, spec: RunSpec, trial: Trial, is_tiny: bool) -> list[str]:
    """Returns torchtitan's options of a run."""
    options = [
        f"--model.name={name}",
        f"--model.flavor={FLAVOR}",
        f"--training.dataset={TRAIN}",
        f"--training.steps={trial.steps}",
        f"--training.seq_len={trial.seq}",
        f"--training.local_batch_size={trial.batch}",
        f"--training.max_norm={trial.clip}",
        f"--optimizer.lr={trial.lr}",
        f"--optimizer.weight_decay={trial.weight_decay}",
        f"--optimizer.implementation={'foreach' if is_tiny else 'fused'}",
        f"--lr_scheduler.warmup_steps={trial.warmup}",
        "--lr_scheduler.decay_type=cosine",
        "--lr_scheduler.min_lr_factor=0.05",
        "--validation.enable",
        f"--validation.dataset={VALIDATION}",
        f"--validation.seq_len={trial.seq}",
        f"--validation.local_batch_size={trial.batch}",
        "--metrics.log_freq=1",
        "--metrics.disable_color_printing",
        "--activation_checkpoint.mode=none",
        f"--debug.seed={spec.seed}",
        "--compile.enable",
    ]
    if is_tiny:
        options += ["--compile.backend=aot_eager"]
    else:
        options += ["--training.dataloader.num_workers=1", "--training.dataloader.pin_memory"]
    if spec.converts:
        options += ["--model.converters=minifloat", f"--minifloat.recipe={spec.recipe}"]
        options += [f"--minifloat.keep={spec.keep}", f"--minifloat.seed={spec.seed}"]
    return options


def tokens_of(args: argparse.Namespace) -> Any:
    """Returns the ids of the text; random ones of a small vocabulary for --tiny."""
    if not args.tiny:
        return load_tokens(args.data)
    ids = torch.randint(512, (3000,), generator=torch.Generator().manual_seed(1)).numpy()
    return SimpleNamespace(train=ids, validation=ids[:400], fingerprint="random")


def summary(name: str, rows: list[Record], trial: Trial) -> Record:
    """Summarises the metrics of a run for its record."""
    steps = [row for row in rows if "loss_metrics/global_avg_loss" in row]
    key = "validation_metrics/loss"
    evaluations = {row["step"]: float(row[key]) for row in rows if key in row}
    timed = row_of("one", name, steps)
    return {
        "val": evaluations[trial.steps],
        "evaluations": evaluations,
        "loss": rounded([float(row["loss_metrics/global_avg_loss"]) for row in steps]),
        "norm": rounded([float(row["grad_norm"]) for row in steps]),
        "tokens_per_s": round(timed.tokens_per_second),
        "mfu": round(timed.mfu, 1),
        "peak_gib": round(timed.active_gib, 2),
    }


def run_job(args: argparse.Namespace, trial: Trial) -> None:
    """Trains one run in this process, and writes its record."""
    start = time.perf_counter()
    prepare("cpu" if args.tiny else "cuda")  # before torchtitan's imports
    from torchtitan.tools.logging import init_logger

    init_logger()
    (model,) = args.models.split(",")
    spec, tokens = parse_entry(args.entry, args.seed), tokens_of(args)
    if spec.then:
        sys.exit(f"--recipes: expected entries without then=, got {args.entry!r}")
    name, sizes = sizes_of(model, 512 if args.tiny else VOCABULARY, args.tiny)
    register(name, trial, tokens, spec.seed, sizes)
    rows = train(args.out / model, options_of(name, spec, trial, args.tiny))
    record = {
        "name": spec.name,
        "recipe": spec.recipe,
        "keep": spec.keep,
        "seed": spec.seed,
        "trial": asdict(trial),
        "tokens": tokens.fingerprint,
        "torch": torch.__version__,
        "device": timing.device_name(torch.device(trial.device)),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - start),
        **summary(spec.name, rows, trial),
    }
    write_record(args.out / model / Plan(spec, spec.name).file_name, record)


# ---- All runs ------------------------------------------------------------------------------------
def folders_of(args: argparse.Namespace, model: str) -> list[Path]:
    """Returns where records are looked for; a tiny run has those of --out alone."""
    own = args.out / model
    return [own] if args.tiny else [RESULTS / f"torchtitan_{model}", own]


def run_entry(args: argparse.Namespace, model: str, entry: str, seed: int) -> bool:
    """Trains a run in a process of its own; tells whether it left a record."""
    name = Plan.parse(entry, seed).file_name
    log = args.out / model / name.replace(".jsonl.xz", ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    own = ["--models", model, "--entry", entry, "--seed", str(seed)]
    start = time.perf_counter()
    with log.open("w") as file:
        command = [sys.executable, __file__, *sys.argv[1:], *own]
        environment = {**os.environ, **ALONE}
        code = subprocess.run(command, stdout=file, stderr=file, env=environment).returncode
    seconds = time.perf_counter() - start
    print(f"{model}, {entry}, seed {seed}: exit code {code}, {seconds:.0f} s", flush=True)
    if code:
        print("\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]), flush=True)
    return code == 0


def run_missing(args: argparse.Namespace, runs: list[tuple[str, str, int]]) -> bool:
    """Trains the runs without a record, while another one ends within --limit seconds.

    Returns:
        Whether all that were started left a record.
    """
    begin, seconds, are_done = time.perf_counter(), 0.0, True
    for model, entry, seed in runs:
        name = Plan.parse(entry, seed).file_name
        if any((folder / name).exists() for folder in folders_of(args, model)):
            continue
        start = time.perf_counter()
        if start - begin + seconds > args.limit:
            print(f"{model}, {entry}, seed {seed}: left to another command")
            continue
        are_done = run_entry(args, model, entry, seed) and are_done
        seconds = max(seconds, time.perf_counter() - start)
    return are_done


def print_tables(records: list[Record]) -> None:
    for key in ("val", "loss"):
        losses = losses_of(records, key)
        print(f"{key}; bf16 over seeds: {noise(losses.get(BF16, {}))}\n{table(losses)}\n")
    print("| run | GPU | tokens/s | MFU | peak GiB | seconds |\n|---|---|---|---|---|---|")
    for record in records:
        print(
            f"| `{record['name']}`, seed {record['seed']} | {record['device']} | "
            f"{record['tokens_per_s']:,} | {record['mfu']}% | {record['peak_gib']} | "
            f"{record['seconds']} |"
        )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="FOLDER/text of parity_data.py")
    parser.add_argument("--models", default=",".join(MODELS), help="%(default)s")
    parser.add_argument("--recipes", help="of all models; default: those of each model's table")
    parser.add_argument("--seeds", default=SEEDS, help="of weights and order (%(default)s)")
    parser.add_argument("--batch", type=int, help="windows of a step; default: the model's")
    parser.add_argument("--steps", type=int, help="default: the trial's")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of this command")
    parser.add_argument("--out", type=Path, default=timing.ROOT / "build" / "torchtitan_loss")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU, random tokens")
    parser.add_argument("--entry", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def trial_of(args: argparse.Namespace, model: str) -> Trial:
    trial = replace(MODELS[model][0], **(TINY if args.tiny else {}))
    given = {"batch": args.batch, "steps": args.steps}
    return replace(trial, **{key: value for key, value in given.items() if value is not None})


def main() -> int:
    args = parsed()
    if args.entry:
        run_job(args, trial_of(args, args.models))
        return 0
    models, seeds = args.models.split(","), [int(seed) for seed in args.seeds.split(",")]
    runs = [
        (model, entry, seed)
        for model in models
        for seed in seeds
        for entry in (args.recipes or MODELS[model][1]).split(",")
    ]
    are_done = run_missing(args, runs) if args.data or args.tiny else True
    for model in models:
        if records := records_in(folders_of(args, model)):
            print(f"\n{model}: {json.dumps(records[0]['trial'])}\n")
            print_tables(records)
    return 0 if are_done else 1


if __name__ == "__main__":
    sys.exit(main())
