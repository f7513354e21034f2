"""The golden files, and their comparison with what the library computes now.

A file has a line a case, sorted by name:

    name  digest  [result=sum …]        two spaces between, one between sums
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from tests.golden import casts, layers, sent, wires

FOLDER = Path(__file__).parent
RENEW = "python -m tests.golden.renew"
FAMILIES: dict[str, Callable[[torch.device], Iterable[casts.Case]]] = {
    "casts": casts.cases,
    "layers": layers.cases,
    "wires": wires.cases,
    "sent": sent.cases,
}
# Families that run on a CPU only, each with the reason.
CPU_ONLY = {
    "sent": "the bytes go through gloo; tests/gpu/test_worlds.py tests NCCL's ranks",
}
# Cases whose results differ on a GPU by docs/numerics.md, each with the section.
CPU_ONLY_CASES = {
    r"linear (fp8_|e4m3/|w4a8)\S* 128x128x64 .*": "9: sums of 128 exceed Hopper's FP8 accumulators",
    r"linear (mxfp4\S*|w4a8) outliers": "9, FP4 by FP8: blocks 2^14 below a row's are rounded",
    r"linear e1m2/1x32\S* outliers": "9, FP4 by FP8: blocks 2^15 below a row's are rounded",
    r"scaled_grouped_mm bf16": "10: the bias is added to a rounded result",
    r"moe fp8_(row|block)wise shared": "9: such sums too, of which a cast's code is another",
}
# Another order of a sum, and on some CPUs a second rounding to bf16, change an element by 2^-9 at
# most and a result's sum (inputs.weighted_sum) by about 0.001; by 0.006 after the three products of
# experts, on a CPU with AVX2 alone. A GPU may round up to four times (docs/numerics.md, section
# 10). A name has up to six results. Another code, scale or stream changes elements by percents, and
# sums by 0.05 or more.
TOLERANCES = {"cpu": 0.01, "cuda": 0.02}
SHOWN = 8

Lines = dict[str, str]  # a case's name: the rest of its line


def path_of(family: str) -> Path:
    return FOLDER / f"{family}.txt"


def read(family: str) -> Lines:
    lines = path_of(family).read_text().splitlines()
    return dict(line.split("  ", 1) for line in lines)  # type: ignore[misc]


def write(family: str, lines: Mapping[str, str]) -> None:
    path_of(family).write_text("".join(f"{name}  {lines[name]}\n" for name in sorted(lines)))


def compute(family: str, device: torch.device) -> Lines:
    """Runs all cases of a family on a device."""
    found: Lines = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of delayed scaling without a history
        for name, text in FAMILIES[family](device):
            assert name not in found, f"two golden cases are called {name!r}"
            found[name] = text
    return found


def is_cpu_only(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in CPU_ONLY_CASES)


def is_same(got: str, want: str, tolerance: float) -> bool:
    """Tells whether digests are equal, and sums within the tolerance."""
    (got_digest, *got_sums), (want_digest, *want_sums) = got.split(), want.split()
    if got_digest != want_digest or len(got_sums) != len(want_sums):
        return False
    for a, b in zip(got_sums, want_sums):
        (name, value), (other, wanted) = a.split("="), b.split("=")
        if name != other or not abs(float(value) - float(wanted)) <= tolerance:
            return False
    return True


def differences(family: str, device: torch.device, got: Lines, want: Lines) -> Iterator[str]:
    """Yields a sentence for each case that differs from the golden file."""
    for name in sorted(got.keys() | want.keys()):
        if device.type != "cpu" and is_cpu_only(name):
            continue
        if name not in want:
            yield f"{name}: not in {family}.txt"
        elif name not in got:
            yield f"{name}: in {family}.txt, and no case has this name"
        elif not is_same(got[name], want[name], TOLERANCES[device.type]):
            yield f"{name}: got {got[name]}, expected {want[name]}"


def require_golden(family: str, device: torch.device) -> None:
    """Fails where a case differs, and says which ones."""
    got, want = compute(family, device), read(family)
    found = list(differences(family, device, got, want))
    if not found:
        return
    names = [text.partition(":")[0] for text in found]
    words = sorted({f"{name.split()[0]} x {_count(names, name)}" for name in names})
    raise AssertionError(
        "\n  ".join(
            (
                f"{len(found)} of {len(want)} golden cases of {family}.txt differ on {device.type} "
                f"({', '.join(words)}). The first:",
                *found[:SHOWN],
                f"Where the change of bytes is meant: {RENEW}, and say why in the commit.",
            )
        )
    )


def _count(names: list[str], like: str) -> int:
    return sum(name.split()[0] == like.split()[0] for name in names)
