"""The time and the bytes of a training step on 8 to 16,384 GPUs, computed, and what limits it.

    python benchmarks/scale.py                      # the tables: the check, speeds, tokens, bytes
    python benchmarks/scale.py --page research/scale.md --images research/images    # into the page
    python benchmarks/scale.py --model llama3_405b --machine H200 --gpus 512,4096 \\
        --recipes bf16,fp8_tensorwise --layout tp=8,gradient=1.04 --links nic=45,nvlink=300

The last form is for a step of your own: fields of Layout, and of Machine's links, by name. Nothing
runs on a GPU. _scale_model.py has the equations, _scale_inputs.py what they start from, and
_scale_rows.py the measured and published steps.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from _scale_inputs import MACHINES, MODELS, Layout, Machine, Model  # first
from _scale_model import FEW, Step, step_of
from _scale_rows import Check, measured_here, published

GPUS = [2**power for power in range(3, 15)]
SHOWN_GPUS = [256, 1024, 4096, 16_384]
DRAWN = ["llama3_70b", "llama3_405b", "deepseek_v3"]
RECIPES = {
    "H200": ["bf16", "fp8_tensorwise", "fp8_rowwise", "mxfp4", "nvfp4_pow2"],
    "B200": ["bf16", "fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4"],
}
SHOWN_RECIPES = {"H200": ["bf16", "fp8_tensorwise", "mxfp4"], "B200": ["bf16", "mxfp8", "nvfp4"]}
COLORS = {"bf16": "#555555", "fp8_tensorwise": "#1f77b4", "fp8_rowwise": "#17a2b8"}
COLORS |= {"mxfp4": "#d62728", "mxfp8": "#2ca02c", "nvfp4": "#d62728", "nvfp4_pow2": "#ff7f0e"}
FREE = 0.7  # of a GPU's memory that weights, gradients and optimizer may fill
CODES = 1.04  # bytes an element of gradients that are reduced as 8-bit codes: 0.52 of bf16's


# ---- The steps of the page -----------------------------------------------------------------------
PIPELINES: dict[str, dict[str, Any]] = {
    "llama3_70b": {"tp": 8, "pp": 4, "vp": 5},
    "llama3_405b": {"tp": 8, "pp": 16, "vp": 8},
    "deepseek_v3": {"ep": 64, "pp": 16, "vp": 2},
}
BATCH = {"llama3_70b": 2**24, "llama3_405b": 2**24, "deepseek_v3": 2**26}  # tokens, of PIPELINE
FSDP2, GRADIENTS, HSDP, PIPELINE = "FSDP2", "8-bit gradients", "HSDP", "ZeRO-1, pipeline"


def layout_of(name: str, model: Model, machine: Machine, gpus: int) -> Layout | None:
    """Returns a layout of the tables and figures; None: it is none for so many GPUs."""
    whole = Layout(gpus, recomputed=1.0, ep=64 if model.experts else 1)
    if name == PIPELINE:
        split = PIPELINES[model.name]
        replicas = gpus // (split.get("tp", 1) * split["pp"])
        if replicas < split.get("ep", 1):
            return None
        rounds = BATCH[model.name] // (replicas * 8192)
        return Layout(gpus, micro_batches=rounds, zero=1, overlaps_tp=True, **split)
    if name == HSDP:
        few = (replace(whole, gpus=n) for n in GPUS if whole.ep <= n < gpus)
        shard = next((one.gpus for one in few if fits(model, "bf16", machine, one)), None)
        return None if shard is None else replace(whole, shard=shard)
    if gpus < whole.ep:
        return None
    return whole if name == FSDP2 else replace(whole, gradient=CODES)


def fits(model: Model, recipe: str, machine: Machine, layout: Layout) -> bool:
    """Returns whether weights, gradients and optimizer leave memory for activations."""
    return step_of(model, recipe, machine, layout).state < FREE * machine.memory * 1e9


def steps_of(model: Model, recipe: str, machine: Machine, name: str) -> dict[int, Step]:
    """Returns the steps of a layout, by the numbers of GPUs on which it fits."""
    layouts = {gpus: layout_of(name, model, machine, gpus) for gpus in GPUS}
    return {
        gpus: step_of(model, recipe, machine, layout)
        for gpus, layout in layouts.items()
        if layout is not None and fits(model, recipe, machine, layout)
    }


def fewest_tokens(model: Model, recipe: str, machine: Machine, layout: Layout) -> int | None:
    """Returns the fewest tokens a GPU at which weights' collectives take under FEW of a step."""
    for tokens in range(256, 2**16 + 1, 256):
        parts = step_of(model, recipe, machine, replace(layout, tokens=tokens)).parts
        shown = parts["gather"] + parts["reduce_scatter"] + parts["latency"]
        if shown < FEW * sum(parts.values()):
            return tokens
    return None


# ---- Tables --------------------------------------------------------------------------------------
def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def amount(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 10 else f"{value:.2f}"


def check_table(checks: list[Check]) -> str:
    rows = []
    for check in checks:
        cells = [check.system, check.quantity, check.unit, amount(check.predicted)]
        rows.append([*cells, amount(check.measured), f"{round(100 * check.error):+d}%", check.note])
    return table(["step", "of", "unit", "computed", "measured", "error", "note"], rows)


def errors_of(checks: list[Check]) -> str:
    """Summarizes the errors of the predicted rows, those of assumed layouts apart."""
    lines = []
    for is_assumed, what in ((False, "predicted"), (True, "predicted, of layouts partly assumed")):
        rows = [c for c in checks if not c.is_fitted and c.is_assumed == is_assumed]
        errors = sorted(abs(check.error) for check in rows)
        if errors:
            within = sum(error <= 0.1 for error in errors)
            middle, largest = 100 * errors[len(errors) // 2], 100 * errors[-1]
            lines.append(
                f"- {len(errors)} rows {what}: median error {middle:.0f}%, {within} within 10%, "
                f"largest {largest:.0f}%\n"
            )
    return "".join(lines)


def speed_table(machine: Machine) -> str:
    rows = []
    for model in (MODELS[name] for name in DRAWN):
        for name in (FSDP2, HSDP, PIPELINE):
            base = steps_of(model, "bf16", machine, name)
            for recipe in SHOWN_RECIPES[machine.name]:
                found = steps_of(model, recipe, machine, name)
                cells = [speed_cell(found.get(gpus), base.get(gpus)) for gpus in SHOWN_GPUS]
                largest = layout_of(name, model, machine, GPUS[-1])
                shards = f" of {largest.shard}" if largest and largest.shard else ""
                rows.append([model.name, name + shards, f"`{recipe}`", *cells])
    return table(["model", "layout", "recipe", *(f"{gpus:,}" for gpus in SHOWN_GPUS)], rows)


def tokens_table() -> str:
    """Returns the fewest tokens a GPU with gradients in bf16, and as codes, over 64 and 1,024."""
    rows = []
    for machine, recipes in ((MACHINES[name], recipes) for name, recipes in RECIPES.items()):
        for model in (MODELS[name] for name in DRAWN):
            for gpus in (64, 1024):
                layouts = [layout_of(name, model, machine, gpus) for name in (FSDP2, GRADIENTS)]
                cells = []
                for recipe in recipes:
                    found = [fewest_tokens(model, recipe, machine, one) for one in layouts if one]
                    cells.append(", ".join("-" if n is None else f"{n:,}" for n in found))
                rows.append([machine.name, model.name, f"{gpus:,}", *cells])
    both = [f"`{a}`" if a == b else f"`{a}`; `{b}`" for a, b in zip(*RECIPES.values(), strict=True)]
    return table(["GPU", "model", "ranks", *both], rows)


def speed_cell(step: Step | None, base: Step | None) -> str:
    if step is None:
        return "-"
    ratio = "" if base is None else f", {step.speed / base.speed:.2f}"
    return f"{amount(step.speed)}{ratio}, {step.limit}"


def bytes_table() -> str:
    """Returns the GB that a GPU of 1,024 sends in a step of one micro-batch of 8192 tokens."""
    rows, machine = [], MACHINES["B200"]
    for model in (MODELS[name] for name in DRAWN):
        ep = 64 if model.experts else 1
        for recipe in ("bf16", "fp8_tensorwise", "fp8_rowwise", "mxfp4", "mxfp8", "nvfp4"):
            whole = Layout(1024, ep=ep)
            fsdp = step_of(model, recipe, machine, whole).sent
            codes = step_of(model, recipe, machine, replace(whole, gradient=CODES)).sent
            once = step_of(model, recipe, machine, replace(whole, zero=1)).sent
            found = [
                fsdp["gather"],
                once["gather"],
                fsdp["reduce_scatter"],
                codes["reduce_scatter"],
            ]
            found += [fsdp.get("all_to_all", 0)]
            cells = [amount(sent / 1e9) if sent else "-" for sent in found]
            rows.append([model.name, f"`{recipe}`", *cells])
    header = ["gathers, FSDP2 and ZeRO-3", "gather, ZeRO-1", "gradients, bf16", "as 8-bit codes"]
    return table(["model", "recipe", *header, "experts' rows"], rows)


def own_table(model: Model, machine: Machine, recipes: list[str], layouts: list[Layout]) -> str:
    """Returns all parts of the steps that a user asks for, in ms."""
    header = ["GPUs", "recipe", "step", *(f.name.replace("_", " ") for f in fields(Step)[:8])]
    header += ["GB sent", "state, GB", "tokens/s a GPU", "speed, bf16 = 1", "limit"]
    rows = []
    for layout in layouts:
        base = step_of(model, "bf16", machine, layout)
        for recipe in recipes:
            step = step_of(model, recipe, machine, layout)
            cells = [f"{layout.gpus:,}", recipe, amount(1e3 * step.seconds)]
            cells += [f"{1e3 * part:.1f}" for part in step.parts.values()]
            cells += [amount(sum(step.sent.values()) / 1e9), amount(step.state / 1e9)]
            rows.append([*cells, amount(step.speed), f"{step.speed / base.speed:.2f}", step.limit])
    return table(header, rows)


def tables() -> dict[str, str]:
    """Returns the tables of the page, by the names of their places."""
    here, others = list(measured_here()), list(published())
    found = {"here": check_table(here) + "\n" + errors_of(here)}
    found["published"] = check_table(others) + "\n" + errors_of(others)
    found |= {name: speed_table(MACHINES[name]) for name in RECIPES}
    return found | {"tokens": tokens_table(), "bytes": bytes_table()}


def replace_in(page: Path, contents: dict[str, str]) -> None:
    """Puts each table between its two comments in the page."""
    text = page.read_text(encoding="utf-8")
    for name, content in contents.items():
        begin, end = f"<!-- scale.py: {name} -->\n", f"<!-- /scale.py: {name} -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            sys.exit(f"scale.py: expected {begin.strip()} and {end} in {page}")
        text = before + begin + content + end + after
    page.write_text(text, encoding="utf-8")


# ---- Figures -------------------------------------------------------------------------------------
def label_gpus(panel: Any) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(GPUS[1::2], labels=[f"{gpus:,}" for gpus in GPUS[1::2]], minor=False)


def draw_speeds(path: Path, plt: Any) -> None:
    """Draws tokens a second and GPU: solid FSDP2, dashed HSDP, dotted with 8-bit gradients."""
    figure, rows = plt.subplots(3, 2, figsize=(10, 11), sharex=True, layout="constrained")
    for axes, name in zip(rows, DRAWN, strict=True):
        for panel, (machine, recipes) in zip(axes, RECIPES.items(), strict=True):
            for recipe in recipes:
                for layout, style in (("FSDP2", "-"), ("HSDP", "--"), ("8-bit gradients", ":")):
                    found = steps_of(MODELS[name], recipe, MACHINES[machine], layout)
                    panel.plot(list(found), [step.speed for step in found.values()], style,
                               color=COLORS[recipe], linewidth=1.3,
                               label=recipe if style == "-" else None)  # fmt: skip
            label_gpus(panel)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
            panel.set_title(f"{name}, {machine}", fontsize=10)
            panel.legend(fontsize=7.5, loc="lower left")
        axes[0].set_ylabel("tokens/s a GPU, 8192 tokens a GPU")
    for panel in rows[-1]:
        panel.set_xlabel("GPUs. Solid: FSDP2; dashed: HSDP; dotted: 8-bit gradients")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_parts(path: Path, plt: Any) -> None:
    """Draws the share of each part in a step of FSDP2 on B200s."""
    figure, rows = plt.subplots(3, 2, figsize=(10, 10), sharex=True, layout="constrained")
    for axes, name in zip(rows, DRAWN, strict=True):
        for panel, recipe in zip(axes, ("bf16", "nvfp4"), strict=True):
            found = steps_of(MODELS[name], recipe, MACHINES["B200"], "FSDP2")
            kinds = [kind for kind in next(iter(found.values())).parts if kind != "bubble"]
            shares = [
                [step.parts[kind] / step.seconds for step in found.values()] for kind in kinds
            ]
            names = [kind.replace("_", " ") for kind in kinds]
            panel.stackplot(list(found), shares, labels=names, alpha=0.85)
            label_gpus(panel)
            panel.set_ylim(0, 1)
            panel.set_title(f"{name}, {recipe}", fontsize=10)
        axes[0].set_ylabel("share of a step")
    rows[0][0].legend(fontsize=8, loc="lower left")
    for panel in rows[-1]:
        panel.set_xlabel("B200s, FSDP2, 8192 tokens each")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw(folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    draw_speeds(folder / "scale_speed.png", plt)
    draw_parts(folder / "scale_parts.png", plt)


# ---- The command line ----------------------------------------------------------------------------
def with_fields(base: Any, text: str, option: str) -> Any:
    """Returns a dataclass with fields of "name=value,…"; names and values are checked."""
    kinds = {f.name: type(getattr(base, f.name)) for f in fields(base)}
    changed = {}
    for one in filter(None, text.split(",")):
        name, _, value = one.partition("=")
        if kinds.get(name) not in (int, float, bool, str):
            sys.exit(f"{option}: expected a name of {', '.join(kinds)}, got {name!r}")
        kind = kinds[name]
        changed[name] = (
            value == "True" if kind is bool else (float if kind is float else kind)(value)
        )
    return replace(base, **changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", type=Path, help="renew the tables in this page")
    parser.add_argument("--images", type=Path, help="draw the figures into this folder")
    parser.add_argument("--model", choices=MODELS, help="print steps of your own instead")
    parser.add_argument("--machine", choices=MACHINES, default="H200")
    parser.add_argument("--gpus", default="8,64,512,4096")
    parser.add_argument("--recipes", default="bf16,fp8_tensorwise,mxfp8,nvfp4")
    parser.add_argument("--layout", default="", help="fields of Layout: tokens=16384,tp=8,shard=64")
    parser.add_argument(
        "--links", default="", help="fields of Machine: nic=45,net_hop=5e-6,node=72"
    )
    args = parser.parse_args()
    if args.model:
        machine = with_fields(MACHINES[args.machine], args.links, "--links")
        gpus = [int(count) for count in args.gpus.split(",")]
        layouts = [with_fields(Layout(count), args.layout, "--layout") for count in gpus]
        try:
            print(own_table(MODELS[args.model], machine, args.recipes.split(","), layouts))
        except ValueError as error:
            parser.error(str(error))
        return 0
    if args.images:
        draw(args.images)
    if args.page:
        replace_in(args.page, tables())
    if not args.page and not args.images:
        for name, content in tables().items():
            print(f"\n{name}\n\n{content}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
