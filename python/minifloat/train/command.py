"""The command line of `minifloat train`.

Options that are not given are absent, not defaulted: a resumed job takes them from the folder that
it resumes, and refuses those that are given and differ.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Trains a small Llama on real text once a recipe, from the same initial weights on the same batches,
and writes curves, checkpoints and a table of the gaps to bf16.

recipes:
  [NAME=]TEXT[@SEED]      TEXT is a preset, a recipe written out, or a map of module names
  nvfp4                   every linear but the head and the last block, as published
  mxfp8                   every linear but the head
  nvfp4_all=*: nvfp4; output: bf16
  bf16@2                  the same from another seed: shows the noise of the comparison

on several processes, the model sharded by FSDP2, weights travelling in the recipe's codes:
  torchrun --nproc-per-node 4 -m minifloat train ...
"""

OPTIONS: tuple[tuple[str, Any, str], ...] = (  # TrainConfig's fields that are plain numbers
    ("--steps", int, "optimizer steps a recipe"),
    ("--seq", int, "tokens a sequence"),
    ("--batch", int, "sequences a step"),
    ("--lr", float, "peak learning rate"),
    ("--warmup", int, "steps of linear warmup"),
    ("--weight-decay", float, "AdamW's decay of matrices"),
    ("--clip", float, "largest norm of the gradient"),
    ("--seed", int, "of the initial weights and the batches"),
    ("--eval-every", int, "steps between evaluations"),
    ("--eval-batches", int, "batches of validation text"),
    ("--checkpoint-every", int, "steps between checkpoints"),
    ("--data-mb", float, "most megabytes of text to read"),
    ("--threads", int, "CPU threads; part of the result's bytes"),
)


def add_parser(subparsers: Any) -> None:
    """Adds `train` to the program's subcommands."""
    from .config import TrainConfig

    absent = argparse.SUPPRESS
    parser = subparsers.add_parser(
        "train",
        help="train a small Llama in several recipes, side by side",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--recipes",
        action="append",
        metavar="A,B,...",
        default=[],
        help="recipes, comma-separated (default: bf16,nvfp4 and a second bf16 seed)",
    )
    add(
        "--recipe",
        action="append",
        metavar="NAME=TEXT",
        default=[],
        help="one more recipe, taken whole; may be repeated",
    )
    add(
        "--data",
        nargs="+",
        metavar="PATH",
        default=absent,
        help="files or folders of text (default: the source of Python's standard library)",
    )
    add(
        "--model",
        metavar="DIM,LAYERS,HEADS,KV_HEADS,FFN",
        default=absent,
        help=f"sizes (default: {TrainConfig().model})",
    )
    add(
        "--vocab",
        type=int,
        default=absent,
        help=f"entries of the tokenizer (default: {TrainConfig().model.vocab})",
    )
    add("--out", type=Path, default=Path("runs/train"), help="folder of results (%(default)s)")
    add("--resume", action="store_true", help="go on with the job in --out")
    add("--cache", help="folder of tokenized text (default: $XDG_CACHE_HOME/minifloat)")
    add(
        "--device", choices=("cpu", "cuda"), default=absent, help="default: cuda where there is one"
    )
    for flag, kind, text in OPTIONS:
        default = getattr(TrainConfig(), flag[2:].replace("-", "_"))
        shown = "all cores" if flag == "--threads" else f"{default:g}"
        add(flag, type=kind, default=absent, help=f"{text} (default: {shown})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code."""
    from . import job
    from .config import TrainConfig
    from .tokens import cache_folder
    from .world import joined, voice

    given = vars(arguments)
    out: Path = arguments.out
    if out.exists() and not out.is_dir():
        raise job.TrainError(f"--out: expected a folder, got the file {out}")
    saved = job.load_job(out) if arguments.resume else None
    if arguments.resume and not saved:
        job.say(f"nothing to resume in {out}: starting from the first step")
    config = asked_config(given, saved[0] if saved else machine_defaults(TrainConfig(), given))
    runs = asked_runs(given, config, saved[1] if saved else ())
    if saved:
        runs = job.require_same_job(out, saved, config, runs)
    cache = cache_folder(arguments.cache)
    with joined(config.device, config.batch) as world, voice(world, out) as own:
        world.wait()  # until all have read what the folder holds
        if saved and saved[0].processes != config.processes:
            job.say(
                f"saved on {saved[0].processes} processes, goes on with {config.processes}: on the "
                "same batches, with sums over ranks in another order"
            )
        return job.train(config, runs, own, cache, resume=arguments.resume, world=world, there=out)


def machine_defaults(config: Any, given: dict[str, Any]) -> Any:
    """The fields that depend on where the job starts: the device, and the threads of a CPU."""
    import torch

    from minifloat._native import ops

    has_cuda = torch.cuda.is_available() and ops.has_cuda()
    device = given.get("device", "cuda" if has_cuda else "cpu")
    threads = torch.get_num_threads() if device == "cpu" else 0
    return dataclasses.replace(config, device=device, threads=threads)


def asked_config(given: dict[str, Any], base: Any) -> Any:
    """`base` with the options that were given."""
    from .config import ModelConfig, TrainError
    from .world import processes

    fields = {f.name for f in dataclasses.fields(base)} - {"model", "data"}
    changes = {name: value for name, value in given.items() if name in fields}
    changes["processes"] = processes()
    if "data" in given:
        changes["data"] = tuple(str(Path(path).expanduser().resolve()) for path in given["data"])
    vocab = given.get("vocab", base.model.vocab)
    if "model" in given:
        changes["model"] = ModelConfig.parse(given["model"], vocab)
    else:
        changes["model"] = dataclasses.replace(base.model, vocab=vocab)
    config = dataclasses.replace(base, **changes)
    if config.device == "cuda":
        import torch

        from minifloat._native import ops

        if not torch.cuda.is_available():
            raise TrainError("--device cuda: expected a CUDA device, torch sees none")
        if not ops.has_cuda():
            raise TrainError(
                "--device cuda: this build of minifloat has no CUDA backend; build it where nvcc "
                "is found, or take --device cpu"
            )
    return config


def asked_runs(given: dict[str, Any], config: Any, saved: tuple[Any, ...]) -> tuple[Any, ...]:
    """The runs of --recipes and --recipe, else the resumed job's, else the default ones."""
    from .recipes import parse_recipes

    lists, entries = given["recipes"], given["recipe"]
    if not lists and not entries:
        if saved:
            return saved
        lists = [f"bf16,nvfp4,bf16@{config.seed + 1}"]
    return parse_recipes(lists, entries, config.model.layers, config.seed)
