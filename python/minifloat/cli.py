"""The command `minifloat`: its option --cmake-prefix, and its subcommands."""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minifloat._native import ops
from minifloat.doctor import pays
from minifloat.doctor.predict import Job
from minifloat.serving.schemes import FORMATS

# Of doctor --model: the default of --recipes, and the options that need it.
RECIPES = ("fp8_tensorwise", "fp8_rowwise", "mxfp4", "nvfp4_pow2", "mxfp8", "nvfp4")
OF_MODEL = ("tokens", "seq", "gpus", "link", "compile", "recipes")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `minifloat ARGV`.

    Returns:
        The exit code. 1: an expected failure, 2: wrong usage, 130: interrupted, 141: nobody reads
        the output.
    """
    try:
        try:
            code = run_command(argv)
        except SystemExit:  # after --help
            print(end="", flush=True)
            raise
        print(end="", flush=True)
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes there
        return 141
    except KeyboardInterrupt:
        print("minifloat: interrupted", file=sys.stderr)
        return 130


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
    """Parses ARGV and runs its command."""
    for stream in (sys.stdout, sys.stderr):  # ×, or a name, must not end it
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    text = "Training in 8- and 4-bit floating point."
    parser = argparse.ArgumentParser(prog="minifloat", description=text)
    text = "print what CMAKE_PREFIX_PATH needs for find_package(minifloat)"
    parser.add_argument("--cmake-prefix", action=PrintCmakePrefix, nargs=0, help=text)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_doctor(subparsers)
    add_export(subparsers)
    arguments = parser.parse_args(argv)
    return run_doctor(arguments) if arguments.command == "doctor" else run_export(arguments)


# ---- The subcommand doctor -----------------------------------------------------------------------


def add_doctor(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `doctor` to the program's subcommands."""
    text = "describe this machine, what multiplies on it and how fast, and what is missing"
    parser = subparsers.add_parser("doctor", help=text, description=text)
    text = "compare the GPU's casts, products and training steps with the CPU's, in a minute"
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--gpu", action="store_true", help=text)
    text = (
        "predict a training step by recipe: of a config.json of Hugging Face, of a folder with "
        "one, or of hidden=4096,intermediate=14336,layers=32,heads=32,kv_heads=8,vocab=128256"
    )
    either.add_argument("--model", metavar="CONFIG", help=text)
    text = "print the description or the prediction as JSON; not the checks of --gpu"
    parser.add_argument("--json", action="store_true", help=text)
    of_model = parser.add_argument_group("with --model")
    text = f"tokens of a step on each GPU (default: {pays.TOKENS})"
    of_model.add_argument("--tokens", type=positive, metavar="N", help=text)
    text = f"tokens of a sequence (default: {pays.SEQUENCE}, or --tokens where that is less)"
    of_model.add_argument("--seq", type=positive, metavar="N", help=text)
    text = f"GPUs that FSDP2 shards the model over (default: {Job.gpus})"
    of_model.add_argument("--gpus", type=positive, metavar="N", help=text)
    text = f"GB/s at which each of several GPUs gathers (default: {Job.link:g} is assumed)"
    of_model.add_argument("--link", type=positive_number, metavar="RATE", help=text)
    text = "blocks are compiled; the measurement compiles small ones"
    of_model.add_argument("--compile", action="store_true", default=None, help=text)
    text = f"presets (default: {' '.join(RECIPES)})"
    of_model.add_argument("--recipes", nargs="+", metavar="RECIPE", help=text)


def positive(text: str) -> int:
    """Reads a positive integer of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def positive_number(text: str) -> float:
    """Reads a positive number of an option."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return number


def fail_doctor(error: str, code: int = 1) -> int:
    """Prints an error, and returns the exit code."""
    print(f"minifloat doctor: error: {error}", file=sys.stderr)
    return code


def run_prediction(model: str, given: dict[str, Any], as_json: bool) -> int:
    """Runs `doctor --model`; returns the exit code, 1 where the model cannot be read."""
    recipes, is_compiled = given.pop("recipes", RECIPES), given.pop("compile", False)
    try:
        about = pays.predict_model(model, recipes, is_compiled=is_compiled, **given)
    except (OSError, ValueError) as error:
        return fail_doctor(str(error))
    print(json.dumps(about, indent=1) if as_json else "\n".join(pays.as_text(about)))
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code, 1 where a check fails."""
    options = {name: getattr(arguments, name) for name in OF_MODEL}
    given = {name: value for name, value in options.items() if value is not None}
    if arguments.model is not None:
        return run_prediction(arguments.model, given, arguments.json)
    if given:
        unread = ", ".join(f"--{name}" for name in given)
        return fail_doctor(f"{unread}: expected --model CONFIG beside, got none", 2)
    if arguments.gpu and arguments.json:
        return fail_doctor("--gpu: expected no --json beside, as the checks print text alone", 2)
    from minifloat.doctor import gpu_checks, report

    if not arguments.gpu:
        about = report.report()
        print(json.dumps(about, indent=1) if arguments.json else "\n".join(report.as_text(about)))
        return 0
    missing = ""
    if not torch.cuda.is_available():
        missing = "expected a CUDA device, torch sees none"
    elif not ops.has_cuda():
        missing = "expected a build with the CUDA backend, got one for the CPU alone"
    if missing:
        return fail_doctor(f"--gpu: {missing}")
    failed = 0
    for index in range(torch.cuda.device_count()):
        print(f"GPU {index}, {torch.cuda.get_device_name(index)}", flush=True)
        for check, error in gpu_checks.run_checks(torch.device("cuda", index)):
            print(f"FAILED  {check}: {error}" if error else f"ok      {check}", flush=True)
            failed += bool(error)
    return min(failed, 1)


# ---- The subcommand export -----------------------------------------------------------------------


def add_export(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `export` to the program's subcommands."""
    text = "quantize a model of Hugging Face, and write it as servers read it"
    parser = subparsers.add_parser("export", help=text, description=text)
    parser.add_argument("model", metavar="MODEL", help="a folder with plain weights")
    parser.add_argument("out", metavar="OUT", help="the folder to write, absent or empty")
    text = "a preset, a recipe or a map of recipes, as mf.quantize_ takes it"
    parser.add_argument("--recipe", required=True, metavar="RECIPE", help=text)
    text = "compressed-tensors (default), or modelopt"
    formats: dict[str, Any] = {"choices": FORMATS, "default": FORMATS[0]}
    parser.add_argument("--format", metavar="FORMAT", help=text, **formats)
    text = "servers leave activations in high precision, which NVFP4 else needs batches for"
    parser.add_argument("--weight-only", action="store_true", help=text)
    text = "servers: q, k and v, and gate and up, have one scale of NVFP4 or of an FP8 tensor"
    parser.add_argument("--share-amax", choices=["servers"], metavar="WHOSE", help=text)


def run_export(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code, 1 where the model cannot be written."""
    try:
        from minifloat.serving.folders import quantize_folder

        report = quantize_folder(
            arguments.model,
            arguments.out,
            arguments.recipe,
            arguments.format,
            arguments.weight_only,
            arguments.share_amax,
        )
    except (ImportError, OSError, ValueError) as error:
        print(f"minifloat export: error: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
