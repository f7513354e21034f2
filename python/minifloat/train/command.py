"""The command line of `minifloat train`.

Options without a value are absent instead of defaulted: a resumed job takes them from its folder,
and refuses other values.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from .._native import ops
from . import interrupt
from .checks import Number, TrainError, require, say
from .config import ALL_ROWS, POSITIVE, SIZE, THREADS, TrainConfig, parse_model
from .data import cache_folder
from .job.processes import joined, output_folder, processes
from .recipes import RunSpec, parse_recipes

DESCRIPTION = """\
Trains a small Llama, dense or with mixtures of experts, on real text once a recipe, from the same
initial weights on the same batches, and writes curves, checkpoints and a table of the gaps to bf16.

recipes:
  [NAME=]TEXT[ keep=POLICY][@SEED]
                          TEXT is a preset, a recipe written out, or a map of module names
  mxfp8                   every linear and expert except the head
  nvfp4 keep=nvfp4_paper  every one except the head and the last blocks, as published
  mxfp8 keep=nothing      every one
  mixed=*: nvfp4; layers.0.*: mxfp8
  bf16@2                  another seed: shows the noise of the comparison

on several processes, the model sharded by FSDP2, weights gathered in the recipe's codes:
  torchrun --nproc-per-node 4 -m minifloat train ...
  torchrun --nproc-per-node 4 -m minifloat train --model moe:... --expert-parallel 2 ...
"""

PACKAGES = ("tokenizers", "tqdm", "matplotlib", "tensorboard")  # of `pip install '.[train]'`


def number_type(number: Number, *also: str) -> Callable[[str], int | float | str]:
    """Returns a function that parses an option that is a number, or one of the texts `also`."""
    name = "an integer" if number.kind is int else "a number"

    def parse(text: str) -> int | float | str:
        value = number.read(text)
        if isinstance(value, str) and value not in also:
            expected = " or ".join((name, *map(repr, also)))
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `train` to the program's subcommands."""
    defaults = TrainConfig()
    parser = subparsers.add_parser(
        "train",
        help="train a small Llama in several recipes, side by side",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add(
        "--recipes",
        action="append",
        metavar="A,B,...",
        default=[],
        help="recipes, comma-separated (default: bf16, nvfp4 keep=nvfp4_paper and a second "
        "bf16 seed)",
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
        help="files or folders of text (default: the source of Python's standard library)",
    )
    add(
        "--model",
        metavar="SIZES",
        help="DIM,LAYERS,HEADS,KV_HEADS,FFN of a Llama, or "
        "moe:DIM,LAYERS,HEADS,KV_HEADS,HIDDEN,EXPERTS,TOP_K,SHARED of one with mixtures of experts "
        f"(default: {defaults.model})",
    )
    add(
        "--vocab",
        type=number_type(SIZE),
        help=f"entries of the tokenizer (default: {defaults.model.vocab})",
    )
    add("--out", type=Path, default=Path("runs/train"), help="folder of results (%(default)s)")
    add("--resume", action="store_true", default=False, help="go on with the job in --out")
    add("--cache", default="", help="folder of tokenized text (default: $XDG_CACHE_HOME/minifloat)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    for each in fields(TrainConfig):
        if text := each.metadata.get("help"):
            shown = "all cores" if each.name == "threads" else f"{each.default:g}"
            kind = number_type(each.metadata["check"])
            add(TrainConfig.where(each.name), type=kind, help=f"{text} (default: {shown})")
    add(
        "--expert-capacity",
        type=number_type(POSITIVE, ALL_ROWS),
        metavar="N|all",
        help="most rows that one process sends to another in a layer; those past it are dropped. "
        "all: room for every row (default: exact sizes)",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile each layer of the model by torch.compile (default: no)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainError(
            f"expected the packages {', '.join(PACKAGES)}, got none of {', '.join(missing)}; "
            "install them with `pip install '.[train]'` in the clone of minifloat"
        )
    with interrupt.handled(by=interrupt.end):
        from .job import checkpoint, train  # which imports the packages

    options = vars(arguments)
    out: Path = arguments.out
    if out.exists() and not out.is_dir():
        raise TrainError(f"--out: expected a folder, got the file {out}")
    before = checkpoint.read_job(out) if arguments.resume else None
    if arguments.resume and not before:
        say(f"nothing to resume in {out}: starting from the first step")
    base = before.config if before else machine_defaults(TrainConfig(), options)
    config = asked_config(options, base)
    runs = asked_runs(options, config, before.runs if before else ())
    if before:
        runs = checkpoint.require_same_job(out, before, config, runs)
    cache = cache_folder(arguments.cache)
    with joined(config.device, config.batch) as world, output_folder(world, out) as folder:
        world.wait()  # until all ranks have read the folder
        places = [f"{each.processes} processes{each.layout}" for each in (base, config)]
        if before and places[0] != places[1]:
            say(
                f"saved on {places[0]}, goes on with {places[1]}: "
                "on the same batches, with sums in another order"
            )
        return train.train(config, runs, folder, cache, saved=before, world=world)


def machine_defaults(config: TrainConfig, options: dict[str, Any]) -> TrainConfig:
    """Sets the fields that depend on the machine: the device, and the threads of a CPU."""
    has_cuda = torch.cuda.is_available() and ops.has_cuda()
    device = options.get("device", "cuda" if has_cuda else "cpu")
    threads = torch.get_num_threads() if device == "cpu" else 0
    return replace(config, device=device, threads=threads)


def asked_config(options: dict[str, Any], base: TrainConfig) -> TrainConfig:
    """Returns `base` with the options of the command line."""
    changes = {f.name: options[f.name] for f in fields(base) if f.name in options}
    changes["processes"] = processes()
    if "data" in changes:
        paths = map(os.path.expanduser, changes["data"])  # an unknown user raises no error
        changes["data"] = tuple(map(os.path.realpath, paths))
    vocab = options.get("vocab", base.model.vocab)
    if "model" in changes:
        changes["model"] = parse_model(changes["model"], vocab)
    else:
        changes["model"] = replace(base.model, vocab=vocab)
    if changes.get("expert_parallel", base.expert_parallel) == 1:
        changes.setdefault("expert_capacity", None)
    config = replace(base, **changes)
    if config.device == "cpu":
        require("--threads", THREADS, config.threads)
    elif not torch.cuda.is_available():
        raise TrainError("--device cuda: expected a CUDA device, torch sees none")
    elif not ops.has_cuda():
        raise TrainError(
            "--device cuda: this build of minifloat has no CUDA backend; build it where nvcc is "
            "found, or take --device cpu"
        )
    return config


def asked_runs(
    options: dict[str, Any], config: TrainConfig, saved: Sequence[RunSpec]
) -> tuple[RunSpec, ...]:
    """Returns the runs of --recipes and --recipe, else the resumed job's, else the defaults."""
    lists, entries = options["recipes"], options["recipe"]
    if not lists and not entries:
        if saved:
            return tuple(saved)
        lists = [f"bf16,nvfp4 keep=nvfp4_paper,bf16@{(config.seed + 1) % 2**63}"]
    return parse_recipes(lists, entries, config.seed)
