"""The command `minifloat`, whose subcommands are `train`, `inspect` and `doctor`.

Options of `train` without a value are absent instead of defaulted: a resumed job takes them from
its folder, and refuses other values.
"""

import argparse
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from minifloat._native import ops
from minifloat.train import interrupt
from minifloat.train.checks import COUNT, Number, TrainError, require, say
from minifloat.train.config import (
    POSITIVE,
    ModelConfig,
    RunSpec,
    TrainConfig,
    parse_model,
    parse_recipes,
)
from minifloat.train.job.processes import joined, output_folder, processes

DESCRIPTION = """\
Trains a small Llama, dense or with mixtures of experts, on real text once a recipe, from the same
initial weights on the same batches, and writes curves, checkpoints and a table of the gaps to bf16.

recipes:
  [NAME=]TEXT[ keep=POLICY][ then=RECIPE][@SEED]
                          TEXT is a preset, a recipe written out, or a map of module names
  mxfp8                   every linear and expert except the head
  nvfp4 keep=nvfp4_paper  every one except the head and the last blocks, as published
  mxfp8 keep=nothing      every one
  nvfp4 then=mxfp8        the last 15% of the steps under mxfp8
  mixed=*: nvfp4; layers.0.*: mxfp8
  bf16@2                  another seed: shows the noise of the comparison

on several processes, the model sharded by FSDP2, weights gathered in the recipe's codes:
  torchrun --nproc-per-node 4 -m minifloat train ...
  torchrun --nproc-per-node 4 -m minifloat train --model moe:... --expert-parallel 2 ...
"""

SHARE = Number(float, 0, 1)
PACKAGES = ("tokenizers", "tqdm", "matplotlib", "tensorboard")  # the extra `train`


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `minifloat ARGV`.

    Returns:
        The exit code. 1: an expected failure, 2: wrong usage, 130: interrupted.
    """
    try:
        with interrupt.handled(by=signal.default_int_handler):  # which raises it
            return run_command(argv)
    except KeyboardInterrupt:
        print("minifloat: interrupted", file=sys.stderr)
        return interrupt.INTERRUPTED


class PrintCmakePrefix(argparse.Action):
    """Prints the folder of the installed package, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        prefix = Path(__file__).parent
        config = prefix / "lib/cmake/minifloat/minifloatConfig.cmake"
        if not config.exists():  # a source tree, whose package `cmake --install` makes
            parser.exit(
                1,
                f"minifloat: error: expected an installed package with {config}, found none; "
                "use `pip install .`, or `cmake --install build/default --prefix DIR`\n",
            )
        print(prefix)
        parser.exit()


def run_command(argv: Sequence[str] | None) -> int:
    """Parses ARGV and runs its command; an expected failure is one message and exit code 1."""
    for stream in (sys.stdout, sys.stderr):  # a file name, or ×, must not end a job
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    text = "Training in 8- and 4-bit floating point."
    parser = argparse.ArgumentParser(prog="minifloat", description=text)
    text = "print what CMAKE_PREFIX_PATH needs for find_package(minifloat)"
    parser.add_argument("--cmake-prefix", action=PrintCmakePrefix, nargs=0, help=text)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_train(subparsers)
    add_inspect(subparsers)
    add_doctor(subparsers)
    arguments = parser.parse_args(argv)
    try:
        commands = {"train": run_train, "inspect": run_inspect, "doctor": run_doctor}
        return commands[arguments.command](arguments)
    except (TrainError, OSError) as error:
        print(f"minifloat {arguments.command}: error: {error}", file=sys.stderr)
        return 1


# ---- The subcommand train ------------------------------------------------------------------------


def number_type(number: Number, *also: str) -> Callable[[str], int | float | str]:
    """Returns a function that parses an option that is a number, or one of the texts `also`."""

    def parse(text: str) -> int | float | str:
        value = number.read(text)
        if isinstance(value, str) and value not in also:
            expected = " or ".join((number.name, *map(repr, also)))
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


def add_train(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `train` to the program's subcommands."""
    parser = subparsers.add_parser(
        "train",
        help="train a small Llama in several recipes, side by side",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    text = "comma-separated (default: bf16, nvfp4 keep=nvfp4_paper and a second bf16 seed)"
    add("--recipes", action="append", metavar="A,B,...", default=[], help=text)
    text = "one more recipe, taken whole; may be repeated"
    add("--recipe", action="append", metavar="NAME=TEXT", default=[], help=text)
    text = "files or folders of text (default: the source of Python's standard library)"
    add("--data", nargs="+", metavar="PATH", help=text)
    text = "or moe:DIM,LAYERS,HEADS,KV_HEADS,HIDDEN,EXPERTS,TOP_K,SHARED: with mixtures of experts"
    text = f"{text} (default: {ModelConfig()})"
    add("--model", metavar="DIM,LAYERS,HEADS,KV_HEADS,FFN", help=text)
    add("--out", type=Path, default=Path("runs/train"), help="folder of results (%(default)s)")
    add("--resume", action="store_true", default=False, help="go on with the job in --out")
    add("--cache", default="", help="folder of tokenized text (default: $XDG_CACHE_HOME/minifloat)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    for config in (ModelConfig, TrainConfig):
        for each in fields(config):
            if text := each.metadata["help"]:
                shown = "all cores" if each.name == "threads" else f"{each.default:g}"
                kind = number_type(each.metadata["check"])
                add(config.where(each.name), type=kind, help=f"{text} (default: {shown})")
    text = (
        "most rows that one process sends to another in a layer; those past it are dropped. "
        "all: room for every row (default: exact sizes)"
    )
    add("--expert-capacity", type=number_type(COUNT, "all"), metavar="N|all", help=text)
    text = "compile each layer of the model by torch.compile (default: no)"
    add("--compile", action=argparse.BooleanOptionalAction, help=text)


def missing_packages() -> list[str]:
    """Lists the packages of `train` that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def require_packages() -> None:
    """Raises TrainError where a package of `train` is not installed."""
    if missing := missing_packages():
        raise TrainError(
            f"expected the packages {', '.join(PACKAGES)}, got none of {', '.join(missing)}; "
            f"install them with `pip install {' '.join(PACKAGES)}`"
        )


def run_train(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code."""
    require_packages()
    with interrupt.handled(by=interrupt.end):
        from minifloat.train.job import checkpoint, train  # which import the packages

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


def cache_folder(asked: str) -> Path:
    """Returns --cache, else $XDG_CACHE_HOME/minifloat, else ~/.cache/minifloat."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(asked or f"{base}/minifloat").expanduser()


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
    changes["model"] = parse_model(options.get("model", str(base.model)), vocab)
    if changes.get("expert_parallel", base.expert_parallel) == 1:
        changes.setdefault("expert_capacity", None)
    config = replace(base, **changes)
    if config.device == "cpu":
        require("--threads", Number(int, 1, 4096), config.threads)  # more end the process in torch
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


# ---- The subcommand inspect ----------------------------------------------------------------------


def add_inspect(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `inspect` to the program's subcommands."""
    text = "measure what recipes do to each operand of each layer, and choose recipes by it"
    parser = subparsers.add_parser("inspect", help=text, description=text)
    add = parser.add_argument
    text = "folder of a run of `minifloat train`, such as runs/train/runs/bf16 (default: a new one)"
    add("run", nargs="?", type=Path, metavar="RUN", help=text)
    text = "comma-separated (default: %(default)s)"
    add("--recipes", default="fp8_rowwise,mxfp8,nvfp4", metavar="A,B,...", help=text)
    text = "share of the operations that the recipe map gives to the last of RECIPES (%(default)s)"
    add("--share", type=number_type(SHARE), default=0.9, help=text)
    add("--rest", default="bf16", metavar="RECIPE", help="recipe of the others (%(default)s)")
    text = "sequences of the batch (default: %(default)s)"
    add("--sequences", type=number_type(POSITIVE), default=4, help=text)
    text = f"of a new model, as `minifloat train` takes it (default: {ModelConfig()})"
    add("--model", metavar="DIM,LAYERS,HEADS,KV_HEADS,FFN", help=text)
    text = "text of a new model, as `minifloat train` takes it"
    add("--data", nargs="+", metavar="PATH", help=text)
    add("--out", type=Path, default=Path("runs/inspect"), help="folder of results (%(default)s)")
    add("--cache", default="", help="folder of tokenized text (default: $XDG_CACHE_HOME/minifloat)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")


def run_inspect(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code."""
    require_packages()
    from minifloat.train import inspect_run

    require("--share", SHARE, arguments.share)
    require("--sequences", POSITIVE, arguments.sequences)
    given = {k: v for k, v in vars(arguments).items() if v is not None}
    if arguments.run is not None and (own := {"model", "data"} & given.keys()):
        raise TrainError(f"--{own.pop()}: expected none beside RUN, whose job has it")
    recipes = inspect_run.parse_recipes(arguments.recipes)
    rest = inspect_run.parse_recipes(arguments.rest)[0]
    if rest not in ("bf16", *recipes):
        raise TrainError(f"--rest: expected bf16 or one of {', '.join(recipes)}, got {rest}")
    config = asked_config(given, machine_defaults(TrainConfig(), given))
    cache = cache_folder(arguments.cache)
    result = inspect_run.inspect_job(config, arguments.run, recipes, arguments.sequences, cache)
    chosen = result.recipe_map(arguments.share, recipes[-1], rest)
    inspect_run.write_files(result, arguments.out, chosen.text)
    print(result.table())
    print(f"{arguments.out}/inspect.md, inspect.png, inspect.json, recipe_map.txt:\n{chosen}")
    return 0


# ---- The subcommand doctor -----------------------------------------------------------------------


def add_doctor(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `doctor` to the program's subcommands."""
    text = "describe this machine, what multiplies on it and how fast, and what is missing"
    parser = subparsers.add_parser("doctor", help=text, description=text)
    text = "compare the GPU's casts, products and training steps with the CPU's, in a minute"
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--gpu", action="store_true", help=text)
    either.add_argument("--json", action="store_true", help="print the description as JSON")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code, 1 where a check fails."""
    from minifloat.doctor import gpu_checks, report

    if not arguments.gpu:
        about = report.report(missing_packages())
        print(json.dumps(about, indent=1) if arguments.json else "\n".join(report.as_text(about)))
        return 0
    if not torch.cuda.is_available():
        raise TrainError("--gpu: expected a CUDA device, torch sees none")
    if not ops.has_cuda():
        raise TrainError("--gpu: expected a build with the CUDA backend, got one for the CPU alone")
    failed = 0
    for index in range(torch.cuda.device_count()):
        print(f"GPU {index}, {torch.cuda.get_device_name(index)}", flush=True)
        for check, error in gpu_checks.run_checks(torch.device("cuda", index)):
            print(f"FAILED  {check}: {error}" if error else f"ok      {check}", flush=True)
            failed += bool(error)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
