"""Calls every op and public function with seeded hostile arguments, in a process of its own.

    PYTHONPATH=python python -m tests.support.fuzz_ops --seed 1 --first 137 --calls 1

repeats call 137 of seed 1 and prints its arguments. A call must return or raise an error that
describes the fault. It may write to its outputs only, and to nothing where it raises.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import resource
import sys
import warnings
from pathlib import Path
from random import Random
from typing import Any

import minifloat as mf
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support import (  # noqa: F401  register calls
    fuzz_activation_calls,
    fuzz_expert_calls,
    fuzz_group_calls,
    fuzz_lab_calls,
    fuzz_layer_calls,
    fuzz_recorded_calls,
    fuzz_serving_calls,
    fuzz_shard_calls,
    fuzz_weight_calls,
)
from tests.support.fuzz_calls import CALLS, Call
from tests.support.fuzz_values import Arena, any_value, is_dense, is_inside_memory, mutate

MEMORY = 2 << 30  # bytes above what the imports take
ERRORS = (ValueError, TypeError, RuntimeError)
# Texts of errors that no check raised.
UNCLEAR = (
    "INTERNAL ASSERT",
    "bad_alloc",
    "vector::",
    "basic_string",
    "_M_range",
    "std::",
    "Unknown error",
    "please report a bug",
)


def names() -> list[str]:
    return sorted(CALLS)


def drawn(seed: int, index: int) -> tuple[str, Call, Arena]:
    """Draws call `index`: one in 10 is valid; others have one to three hostile arguments."""
    rng = Random(f"{seed}/{index}")
    torch.manual_seed(hash((seed, index)) % 2**31)
    name = names()[index % len(names())]
    arena = Arena(rng)
    one = CALLS[name](rng, arena)
    changes = rng.choice((0, 1, 1, 1, 1, 1, 1, 2, 2, 3)) if one.args else 0
    for _ in range(changes):
        if rng.random() < 0.05:
            one.args[rng.choice(sorted(one.args))] = any_value(rng, arena)
        else:
            one.args = mutate(rng, arena, one.args)
    if rng.random() < 0.03:
        one.args = {key: _on_meta(value) for key, value in one.args.items()}
    one.args = {key: _printable(value) for key, value in one.args.items()}
    return name, one, arena


def _printable(value: Any) -> Any:
    """Leaves tensors without memory out of a list that no schema takes.

    torch prints such a list in its error, and reads the freed memory for it.
    """
    if not isinstance(value, (list, tuple)) or all(isinstance(v, Tensor) for v in value):
        return value
    return [v for v in value if not isinstance(v, Tensor) or is_inside_memory(v)]


def _on_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_on_meta(v) for v in value]
    return value.to("meta") if type(value) is Tensor and is_dense(value) else value


# ---- what a call did -----------------------------------------------------------------------------


def leaves(value: Any) -> list[Tensor]:
    """Lists the torch.Tensors of an argument."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, mf.QuantizedTensor):
            found += leaves([leaf.rowwise, leaf.columnwise])
            found += leaves(list(leaf.__dict__.get("columnwise_wire", ())))
        elif isinstance(leaf, mf.tensor.Quantized):
            found += leaves([leaf.codes, leaf.scale, leaf.amax, leaf.groups])
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def distinct(tensors: list[Tensor]) -> list[Tensor]:
    """Lists each tensor once: a hostile list may repeat tensors."""
    return list({id(t): t for t in tensors}.values())


def fault_of_error(one: Call, error: BaseException) -> str | None:
    if one.is_of_models and isinstance(error, Exception):
        return None
    text = str(error)
    if not isinstance(error, ERRORS) or not text.strip():
        return f"raised {type(error).__name__}: {text[:300]}"
    if any(part in text for part in UNCLEAR):
        return f"raised an unclear {type(error).__name__}: {text[:300]}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def fault_of_result(result: Any, given: list[Tensor]) -> str | None:
    """Returns the fault of results outside their memory, or made of several devices' tensors."""
    results = leaves(result)
    if not all(is_inside_memory(t) for t in results):
        return f"returned a tensor outside its memory: {describe(results)}"
    if not all(is_inside_memory(t) for t in given):
        return "took a tensor outside its memory"
    devices = {t.device.type for t in given if t.numel() > 0}
    if len(devices) > 1 and any(t.device.type == "cpu" and t.numel() > 0 for t in results):
        return f"took tensors on {sorted(devices)}"
    return None


def fault_of_call(one: Call, arena: Arena) -> str | None:
    """Returns the fault of the call; None: no fault."""
    given = distinct(leaves(list(one.args.values())))
    arena.remember()
    written = distinct(leaves([value for key, value in one.args.items() if key in one.writes]))
    try:
        result = one.run(**one.args)
        is_checked = one.reads_memory and not one.is_of_models
        fault = fault_of_result(result, given if is_checked else [])
    except BaseException as error:
        fault = fault_of_error(one, error)
        if not is_out_of_memory(error):  # which only the work itself meets
            written = []
    changes = arena.changed(written)
    if fault is None and changes and not one.is_of_models:
        fault = f"wrote where it must not: {'; '.join(changes)}"
    return fault


def describe(value: Any) -> str:
    """Formats a value for an error report: tensors by their layout, not their contents."""
    if isinstance(value, mf.QuantizedTensor):
        return f"QuantizedTensor({describe(value.rowwise)}, {describe(value.columnwise)})"
    if isinstance(value, Tensor):
        if value.is_nested:
            return f"Tensor({value.dtype}, nested)"
        text = f"Tensor({value.dtype}, {list(value.shape)}"
        if value.layout != torch.strided or value.is_quantized:
            return f"{text}, {value.layout})"
        if value.device.type == "meta" or value._is_zerotensor():
            return f"{text}, meta or zero)"
        stored = value.untyped_storage().nbytes()
        numbers = ""
        if 0 < value.numel() <= 8 and stored >= 8 * value.numel() and 0 not in value.stride():
            numbers = f", {value.tolist()}" if value.element_size() > 1 else ""
        return (
            f"{text}, strides {value.stride()}, offset {value.storage_offset()}, storage {stored}"
            f"{', requires_grad' if value.requires_grad else ''}{numbers})"
        )
    if isinstance(value, mf.tensor.Quantized):
        names = [field.name for field in dataclasses.fields(value)]
        return f"Quantized({', '.join(f'{n}={describe(getattr(value, n))}' for n in names)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}={describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        shown = [describe(v) for v in value[:8]]
        return "[" + ", ".join(shown) + (f", … {len(value)}]" if len(value) > 8 else "]")
    return repr(value) if len(repr(value)) < 120 else f"{repr(value)[:60]}… of {len(repr(value))}"


# ---- the process ---------------------------------------------------------------------------------


def bound_memory(megabytes: int) -> None:
    """Limits memory to that of imports and threads and more; 0: no limit, for AddressSanitizer."""
    if megabytes == 0:
        return
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))  # starts the threads
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--most-faults", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=MEMORY >> 20, help="0: no bound")
    # On a busy machine the largest call takes 20.
    parser.add_argument("--seconds", type=float, default=60, help="of one call")
    parser.add_argument("--state", help="a file that holds the number of the call in progress")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    bound_memory(options.megabytes)
    state = os.open(options.state, os.O_WRONLY | os.O_CREAT) if options.state else None
    faults = 0
    for index in range(options.first, options.first + options.calls):
        if state is not None:
            os.pwrite(state, f"{index:12}".encode(), 0)
        faulthandler.dump_traceback_later(options.seconds, exit=True)
        name, one, arena = drawn(options.seed, index)
        text = f"{name}({describe(one.args)})"
        if options.calls == 1:
            print(ascii(text), flush=True)
        fault = fault_of_call(one, arena)
        faulthandler.cancel_dump_traceback_later()
        if fault is not None:
            found = {"seed": options.seed, "index": index, "call": text, "fault": fault}
            print(json.dumps(found), flush=True)
            faults += 1
            if faults >= options.most_faults:
                break
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
