"""The tables of docs/speed.md, docs/lora.md and research/measured that research/results has."""

from __future__ import annotations

import figures
import pictures
from cells import PEERS, label, label_of, number, pivot, sizes, table
from figures import BF16, Row, mf

STEP_RUNS = (*figures.STEPS, "gpu_blocks_fuse")


def options_of(run: str, name: str) -> str:
    """Returns the options of a row of a step's run."""
    if name in PEERS:
        return "eager" if name.startswith("te ") else ""
    return "" if name == BF16 else run.removeprefix("gpu_blocks_").replace("_", ", ")


def step() -> str:
    head = ["recipe", "options", "step, ms", "bf16's step, ms", "speed, bf16 = 1", "peak, GiB"]
    body = []
    for run in STEP_RUNS:
        base, *rows = figures.steps_in(run)
        for row in rows:
            name = row["name"]
            is_exact = name in mf.presets() and not figures.is_native(name, figures.HOPPER)
            shown = label(name) + " (exact products)" * is_exact
            times = (number(ms, 1) for ms in (row["ms"], base["ms"]))
            rest = (number(row[field]) for field in ("speed", "peak_gib"))
            body.append([shown, options_of(run, name), *times, *rest])
    return table(head, body)


def step_parts() -> str:
    body, seen = [], set()
    for run in STEP_RUNS:
        for row in figures.steps_in(run):
            key = row["name"], options_of(run, row["name"])
            if row["kinds"] and key not in seen:
                seen.add(key)
                parts = (number(row["kinds"].get(kind), 1) for kind in pictures.KINDS)
                body.append([label(key[0]), key[1], *parts])
    return table(["recipe", "options", *pictures.KINDS], body)


def layers() -> str:
    rows = [row for run in ("gpu_linear", "gpu_linear_fp4") for row in figures.rows_of(run)]
    return pivot(rows, "recipe", label_of, lambda row: sizes(row["shape"].partition("x")[2]))


def layers_of_w4a8() -> str:
    def cell(row: Row) -> str:
        return f"{row['ms']:.2f} ms" if figures.name_of(row) == BF16 else number(row["speed"])

    rows = figures.rows_of("gpu_linear_w4a8")
    return pivot(rows, "recipe", label_of, lambda row: sizes(row["shape"].partition("x")[2]), cell)


def small_layers() -> str:
    runs = ("gpu_linear_small", "gpu_linear_small_nvfp4_pow2")
    rows = [row for run in runs for row in figures.rows_of(run)]
    return pivot(rows, "K x N", lambda row: sizes(row["shape"].partition("x")[2]), label_of)


def few_tokens() -> str:
    rows = [row for m in (4096, 8192) for row in figures.rows_of(f"gpu_linear_{m}_tokens")]
    return pivot(rows, "M x K x N", lambda row: sizes(row["shape"]), label_of)


def weight_codes() -> str:
    rows = figures.rows_of("gpu_weight_codes")
    return pivot(
        rows,
        "K x N, tokens",
        lambda row: f"{row['k']} x {row['n']}, {row['tokens']}",
        lambda row: f"{label_of(row)}: cast, kept",
        lambda row: f"{row['speed']:.2f}, {row['cached_speed']:.2f}",
    )


def fsdp() -> str:
    head, at = ["recipe"], {name: [label(name)] for name in by_recipe("gpu_fsdp")}
    for seq in (2048, 8192):
        head += [f"{seq}: ms", "speed, bf16 = 1", "peak, GiB"]
        for row in figures.rows_of("gpu_fsdp", seq=seq):
            texts = (number(row[f], d) for f, d in (("ms", 1), ("speed", 2), ("peak_gib", 1)))
            at[row["recipe"]] += texts
    return table(head, list(at.values()))


def by_host() -> str:
    """Formats steps under FSDP2: ms (speed), and without a graph the ms of host and device."""
    runs = (pictures.ALONE, pictures.GRAPHED)
    rows = [row | {"is_graphed": run != runs[0]} for run in runs for row in figures.rows_of(run)]

    def across(row: Row) -> str:
        return label_of(row) + " as a graph" * row["is_graphed"]

    def cell(row: Row) -> str:
        speed = "" if figures.name_of(row) == BF16 else f" ({number(row['speed'])})"
        parts = ("host_ms", "device_ms")[: 0 if row["is_graphed"] else 2]
        return ", ".join([f"{row['ms']:.1f}{speed}", *(number(row[part], 1) for part in parts)])

    return pivot(rows, "tokens", lambda row: str(row["seq"]), across, cell)


# By the entry of gpu_lora.py: the codes of W, and the recipe of x and the gradients.
LORA = {
    "bf16": ("bf16", "bf16"),
    "nvfp4": ("NVFP4", "bf16"),
    "mxfp4": ("MXFP4", "bf16"),
    "nf4": ("bitsandbytes' NF4", "bf16"),
    "fp8": ("FP8, a scale a row", "bf16"),
    "fp8:rowwise": ("FP8, a scale a row", "`fp8_rowwise`"),
    "nvfp4:nvfp4": ("NVFP4", "`nvfp4`"),
}


def lora() -> str:
    rows = figures.read_run("gpu_lora")["rows"]
    head = ["codes of W", "x and gradients", "model, GiB", "peak, GiB", "ms a step"]
    body = []
    for entry, names in LORA.items():
        row = rows[entry]
        memory = [number(row[key] / 2**30) for key in ("base", "peak")]
        times = [number(1000 * row["step"], 0), number(rows[BF16]["step"] / row["step"])]
        body.append([*names, *memory, *times])
    return table([*head, "of bf16's speed"], body)


def by_recipe(run: str) -> list[str]:
    return list(dict.fromkeys(map(figures.name_of, figures.rows_of(run))))


def experts() -> str:
    """Formats bf16's times and the recipes' speeds, of even groups and of a router's."""
    merged: dict[tuple[str, str], Row] = {}
    for row in figures.rows_of("gpu_grouped", "layers"):
        key = figures.name_of(row), ", ".join(map(str, row["shape"]))
        kept = merged.setdefault(key, {"recipe": key[0], "shape": key[1], "cells": []})
        kept["cells"].append(number(row["ms" if key[0] == BF16 else "speed"]))

    def cell(row: Row) -> str:
        is_time = row["recipe"] == BF16
        return (", " if is_time else "; ").join(row["cells"]) + " ms" * is_time

    return pivot(list(merged.values()), "recipe", label_of, lambda row: row["shape"], cell)


def expert_layers() -> str:
    def across(row: Row) -> str:
        d, i, e, k = row["shape"]
        return f"D {d}, I {i}, {e} experts, k {k}"

    def cell(row: Row) -> str:
        is_time = figures.name_of(row) == BF16
        first = f"{row['ms']:.2f} ms" if is_time else number(row["speed"])
        return f"{first}; {row['peak_gib']:.2f}"

    return pivot(figures.rows_of("gpu_moe"), "recipe", label_of, across, cell)
