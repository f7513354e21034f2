"""The command line of `minifloat train`.

Options without a value are absent instead of defaulted: a resumed job takes them from its folder,
and refuses other values.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minifloat import interrupt

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


def number_type(number: Any, name: str) -> Callable[[str], int | float]:
    """Returns a function that parses an option that is a number, for argparse."""

    def parse(text: str) -> int | float:
        value = number.parse(text)
        if value is None:
            raise argparse.ArgumentTypeError(f"expected {name}, got {text!r}")
        return value

    return parse


def capacity_type(text: str) -> int | str:
    """Parses --expert-capacity, for argparse."""
    from .config import ALL_ROWS, ROWS

    rows = ROWS.parse(text)
    if text != ALL_ROWS and rows is None:
        raise argparse.ArgumentTypeError(f"expected a number of rows or {ALL_ROWS!r}, got {text!r}")
    return ALL_ROWS if rows is None else int(rows)


def add_parser(subparsers: Any) -> None:
    """Adds `train` to the program's subcommands."""
    from .config import NUMBERS, SIZE, TrainConfig, option_of

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
        default=absent,
        help="files or folders of text (default: the source of Python's standard library)",
    )
    add(
        "--model",
        metavar="SIZES",
        default=absent,
        help="DIM,LAYERS,HEADS,KV_HEADS,FFN of a Llama, or "
        "moe:DIM,LAYERS,HEADS,KV_HEADS,HIDDEN,EXPERTS,TOP_K,SHARED of one with mixtures of experts "
        f"(default: {TrainConfig().model})",
    )
    add(
        "--vocab",
        type=number_type(SIZE, "an integer"),
        default=absent,
        help=f"entries of the tokenizer (default: {TrainConfig().model.vocab})",
    )
    add("--out", type=Path, default=Path("runs/train"), help="folder of results (%(default)s)")
    add("--resume", action="store_true", help="go on with the job in --out")
    add("--cache", help="folder of tokenized text (default: $XDG_CACHE_HOME/minifloat)")
    add(
        "--device", choices=("cpu", "cuda"), default=absent, help="default: cuda where there is one"
    )
    for name, (number, text) in NUMBERS.items():
        kind = number_type(number, "an integer" if number.integer else "a number")
        shown = "all cores" if name == "threads" else f"{getattr(TrainConfig(), name):g}"
        add(option_of(name), type=kind, default=absent, help=f"{text} (default: {shown})")
    add(
        "--expert-capacity",
        type=capacity_type,
        metavar="N|all",
        default=absent,
        help="most rows that one process sends to another in a layer; those past it are dropped. "
        "all: room for every row (default: exact sizes)",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=absent,
        help="compile each layer of the model by torch.compile (default: no)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code."""
    require_packages()
    with interrupt.ends_the_process():
        from . import job, saved
    from .config import TrainConfig, TrainError
    from .tokens import cache_folder
    from .world import joined, output_folder

    options = vars(arguments)
    out: Path = arguments.out
    if out.exists() and not out.is_dir():
        raise TrainError(f"--out: expected a folder, got the file {out}")
    before = saved.read_job(out) if arguments.resume else None
    if arguments.resume and not before:
        saved.say(f"nothing to resume in {out}: starting from the first step")
    base = before.config if before else machine_defaults(TrainConfig(), options)
    config = asked_config(options, base)
    runs = asked_runs(options, config, before.runs if before else ())
    if before:
        runs = saved.require_same_job(out, before, config, runs)
    cache = cache_folder(arguments.cache)
    with joined(config.device, config.batch) as world, output_folder(world, out) as folder:
        world.wait()  # until all ranks have read the folder
        if before and places_of(before.config) != places_of(config):
            saved.say(
                f"saved on {places_of(before.config)}, goes on with {places_of(config)}: "
                "on the same batches, with sums in another order"
            )
        return job.train(config, runs, folder, cache, saved=before, world=world)


def places_of(config: Any) -> str:
    """Returns the processes, those that divide the experts, and --compile, for messages."""
    text = f"{config.processes} processes"
    if config.expert_parallel > 1:
        text += f", experts divided over {config.expert_parallel}"
    if config.expert_capacity is not None:
        text += f" with capacity {config.expert_capacity}"
    return text + (", compiled" if config.compile else "")


def require_packages() -> None:
    """Refuses to start without the packages that the trainer needs at its end."""
    from .fields import TrainError

    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainError(
            f"expected the packages {', '.join(PACKAGES)}, got none of {', '.join(missing)}; "
            "install them with `pip install '.[train]'` in the clone of minifloat"
        )


def machine_defaults(config: Any, options: dict[str, Any]) -> Any:
    """Sets the fields that depend on the machine: the device, and the threads of a CPU."""
    import torch

    from minifloat._native import ops

    has_cuda = torch.cuda.is_available() and ops.has_cuda()
    device = options.get("device", "cuda" if has_cuda else "cpu")
    threads = torch.get_num_threads() if device == "cpu" else 0
    return dataclasses.replace(config, device=device, threads=threads)


def asked_config(options: dict[str, Any], base: Any) -> Any:
    """Returns `base` with the options of the command line."""
    from .config import MOST_THREADS, TrainError
    from .fields import integers, require
    from .model_config import parse_model
    from .world import processes

    fields = {f.name for f in dataclasses.fields(base)} - {"model", "data"}
    changes = {name: value for name, value in options.items() if name in fields}
    changes["processes"] = processes()
    if "data" in options:
        paths = map(os.path.expanduser, options["data"])  # an unknown user raises no error
        changes["data"] = tuple(map(os.path.realpath, paths))
    vocab = options.get("vocab", base.model.vocab)
    if "model" in options:
        changes["model"] = parse_model(options["model"], vocab)
    else:
        changes["model"] = dataclasses.replace(base.model, vocab=vocab)
    if changes.get("expert_parallel", base.expert_parallel) == 1:
        changes.setdefault("expert_capacity", None)
    config = dataclasses.replace(base, **changes)
    if config.device == "cpu":
        require("--threads", integers(1, MOST_THREADS), config.threads)
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


def asked_runs(options: dict[str, Any], config: Any, saved: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the runs of --recipes and --recipe, else the resumed job's, else the defaults."""
    from .recipes import parse_recipes

    lists, entries = options["recipes"], options["recipe"]
    if not lists and not entries:
        if saved:
            return saved
        lists = [f"bf16,nvfp4 keep=nvfp4_paper,bf16@{(config.seed + 1) % 2**63}"]
    return parse_recipes(lists, entries, config.seed)
