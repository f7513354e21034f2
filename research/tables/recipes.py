"""The tables by which to choose a recipe, and the matrix of what runs where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import figures
from cells import label, number, table
from figures import BF16, Row, mf


# ---- Recipes -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Choice:
    """A row of the table of recipes: names in mf.presets, in the runs of a step, in records.

    Where `step` ran without what the label says, the row is not timed.
    """

    label: str
    recipe: str = ""
    step: str = ""
    record: str = ""
    is_timed: bool = True


KEPT = "nvfp4 keep=nvfp4_paper"
THEN = f"{KEPT} then=mxfp8"
NAMES = ("fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp4", "nvfp4_pow2")
HYBRIDS = ("mxfp8", "mxfp8_nvfp4", "nvfp4")
CHOICES = (
    *(Choice(label(name), name, name, name) for name in (BF16, *NAMES, *HYBRIDS)),
    *(Choice(label(name), "nvfp4", "nvfp4", name, is_timed=False) for name in (KEPT, THEN)),
    *(Choice(label(n), n, record=n, is_timed=False) for n in ("w4a8", "w4a8_1x16")),
    Choice("torchao tensorwise", step="torchao tensorwise"),
    Choice("torchao rowwise", step="torchao rowwise", record="torchao_rowwise"),
    *(Choice(label(peer), step=peer) for peer in ("te delayed", "te current", "te blocks")),
)
NOT_MEASURED = "-"
README = (BF16, "torchao_tensorwise", "fp8_tensorwise", "fp8_rowwise", THEN)


def of_step(choice: Choice, field: str) -> str:
    """Returns a figure of a step."""
    return number(figures.step_of(choice.step).get(field) if choice.is_timed else None)


def loss_of(record: str) -> str:
    gap = figures.gaps().get(record)
    return "-" if gap is None else str(gap)


def recipes() -> str:
    """Formats README's rows: a whole Llama3-8B, and the loss of a small one."""
    head = ["recipe", "tokens/s", "speed", "peak, GiB", "loss beside bf16's"]
    speeds, body = figures.speeds_of_llama8b(), []
    for name in README:
        cells = [NOT_MEASURED] * 3
        if run := figures.runs_of_llama8b().get(name):
            cells = [
                f"{run['tokens_per_s']:,.0f}",
                number(speeds[name]),
                number(run["peak_gib"], 1),
            ]
        gap = "base" if name == BF16 else figures.gaps().get(name, NOT_MEASURED)
        shown = name.replace("_", " ") if name.startswith("torchao") else label(name)
        body.append([shown, *cells, str(gap)])
    return table(head, body)


def native_on(recipe: str) -> str:
    """Names the compute capabilities that have GEMMs of a recipe's codes."""
    native = [gpu for gpu in figures.GPUS if figures.is_native(recipe, gpu)]
    texts = [f"{major}.{minor}" for major, minor in native]
    if not native:
        return "-"
    is_onward = tuple(native) == figures.GPUS[figures.GPUS.index(native[0]) :]
    return f"{texts[0]}+" if is_onward else ", ".join(texts)


def choice() -> str:
    head = [
        "recipe",
        "its codes multiply on",
        "speed: a Llama of dim 1024",
        "four Llama3-8B blocks",
        "a whole Llama3-8B",
        "peak of the four blocks, GiB",
        "loss beside bf16's",
    ]
    small, large = figures.speeds_of_records(), figures.speeds_of_llama8b()
    body = []
    for c in CHOICES:
        record = c.record or c.step
        in_large = {KEPT: ""}.get(record, record.replace(" ", "_"))  # every layer but the head
        body.append(
            [
                c.label,
                "" if c.step == BF16 or not c.recipe else native_on(c.recipe),
                number(small.get(record)),
                of_step(c, "speed"),
                number(large.get(in_large)),
                of_step(c, "peak_gib"),
                loss_of(c.record),
            ]
        )
    return table(head, body)


@dataclass(frozen=True)
class Wish:
    """A purpose, and the recipe for it. Without one any recipe will do."""

    purpose: str
    recipe: str = ""
    record: str = ""  # the record of its loss, where that is not the recipe's own


# GPUs, their capabilities, purposes.
WISHES: tuple[tuple[str, tuple[tuple[int, int], ...], tuple[Wish, ...]], ...] = (
    (
        "H100, H200",
        (figures.HOPPER,),
        (
            Wish("Speed at bf16's loss", "fp8_tensorwise"),
            Wish("More speed, by scales of earlier steps", "fp8_delayed"),
            Wish("A scale a token and feature: outliers", "fp8_rowwise"),
            Wish("Least memory", "mxfp4"),
            Wish("Blackwell's MXFP8, for its numerics", "mxfp8"),
            Wish("NVIDIA's NVFP4, with its least loss", "nvfp4", f"{KEPT} then=bf16"),
        ),
    ),
    (
        "B200, B300, RTX 50: never run on one",
        ((10, 0), (10, 3), (12, 0)),
        (Wish("Speed at bf16's loss", "mxfp8"), Wish("FP4", "nvfp4", THEN)),
    ),
    (
        "RTX 40, L4, L40: never run on one",
        ((8, 9),),
        (Wish("Speed at bf16's loss", "fp8_tensorwise"),),
    ),
    (
        "A100, RTX 30, CPU",
        ((8, 0), (8, 6), figures.CPU),
        (Wish("To see what a recipe costs in loss"),),
    ),
)


def words_of(wish: Wish, capabilities: tuple[tuple[int, int], ...]) -> str:
    """Returns what was measured of a recipe on Hopper, and on other GPUs its loss alone."""
    if not wish.recipe:
        return "emulated, so no faster than bf16"
    loss = f"loss {figures.gaps()[wish.record or wish.recipe]}"
    if figures.HOPPER in capabilities and wish.record:  # other layers than a step was timed with
        return f"not timed; {loss}"
    if figures.HOPPER in capabilities:
        row = figures.step_of(wish.recipe)
        return f"speed {row['speed']:.2f}, {row['peak_gib']:.1f} GiB, {loss}"
    if not all(figures.is_native(wish.recipe, capability) for capability in capabilities):
        raise ValueError(f"{wish.recipe}: expected a recipe that is native on {capabilities}")
    return f"{loss}; speed unknown"


def wishes() -> str:
    """Formats GPUs, purposes and recipes: a row each."""
    body = []
    for gpus, capabilities, wanted in WISHES:
        for wish in wanted:
            name = wish.record or wish.recipe
            shown = f"`{name}`" if name else "any recipe"
            body.append([gpus, wish.purpose, shown, words_of(wish, capabilities)])
    return table(["your GPU", "what for", "take", "what is known"], body)


# ---- When it does not pay ------------------------------------------------------------------------
COLUMNS = ("fp8_tensorwise", "fp8_rowwise", "mxfp4", "nvfp4_pow2", "mxfp8", "nvfp4")
SMALL, LARGE = "16384x1024x1024", "16384x4096x14336"
EXPERTS_128, EXPERTS_2 = [131072, 1536, 2048, 128], [32768, 8192, 5120, 2]
LAYER_128 = [2048, 768, 128, 8]  # D, I, experts, k
WIDE = {"k": 4096, "n": 4096, "tokens": 256}


def linear_rows(shape: str) -> list[Row]:
    """Returns the rows of a shape, M x K x N, of the runs of gpu_linear.py.

    That of w4a8 is another day's: docs/speed.md has it in a table of its own.
    """
    runs = sorted((figures.RESEARCH / "results").glob("gpu_linear*.json"))
    stems = [run.stem for run in runs if run.stem != "gpu_linear_w4a8"]
    return [row for stem in stems for row in figures.rows_of(stem, shape=shape)]


def below_one(speed: float) -> str:
    """Formats a speed, in bold where bf16 is faster."""
    text = number(speed)
    return f"**{text}**" if float(text) < 1 else text


def speed_cases() -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the cases of the page, with a speed by recipe."""
    layer, of = "speed.md#a-layer", figures.by_name
    for shape in (SMALL, "16384x2048x2048", "4096x4096x4096"):
        m, k, n = shape.split("x")
        yield f"[a layer]({layer}) of {k} x {n}, {m} tokens", of(linear_rows(shape))
    m, k, n = LARGE.split("x")
    yield f"[a layer]({layer}) of {k} x {n}, {m} tokens", of(linear_rows(LARGE))
    of_records = dict(figures.speeds_of_records())
    of_records["nvfp4"] = of_records[KEPT]
    yield "[a Llama](loss.md) of dim 1024, compiled", of_records
    fsdp = "[FSDP2 on four GPUs](speed.md#several-gpus)"
    for tokens in (2048, 8192):
        rows = figures.rows_of("gpu_fsdp", seq=tokens)
        yield f"{fsdp}, {tokens} tokens each", of(rows)
    grouped = "speed.md#experts"
    for sizes in (EXPERTS_128, EXPERTS_2):
        rows = figures.rows_of("gpu_grouped", "layers", shape=sizes, groups="even")
        each = f"of {sizes[1]} x {sizes[2]}, {sizes[0] // sizes[3]} rows each"
        yield f"[GEMMs of {sizes[3]} experts]({grouped}) {each}", of(rows)
    rows = figures.rows_of("gpu_moe", shape=LAYER_128)
    experts = "[a layer](speed.md#experts)"
    yield f"{experts} of {LAYER_128[2]} experts of hidden width {LAYER_128[1]}", of(rows)
    rows = figures.rows_of("gpu_weight_codes", **WIDE)
    yield f"[generation]({layer}), {WIDE['tokens']} tokens a forward", of(rows)
    yield "the same with the weight's codes kept", of(rows, "cached_speed")


def speeds() -> str:
    body = [
        [case, *(below_one(found[c]) if c in found else "-" for c in COLUMNS)]
        for case, found in speed_cases()
    ]
    return table(["case", *(f"`{c}`" for c in COLUMNS)], body)


def peaks() -> str:
    """Formats peak memory over bf16's, in bold where it is more."""
    rows = [row for run in reversed(figures.STEPS) for row in figures.steps_in(run)]
    step = figures.by_name(rows, "peak_gib")  # of a recipe's rows the last one counts
    layer = figures.by_name(figures.rows_of("gpu_moe", shape=LAYER_128), "peak_gib")
    fsdp = figures.by_name(figures.rows_of("gpu_fsdp", seq=8192), "peak_gib")
    cases = {
        "[a step](speed.md#a-training-step) of four Llama3-8B blocks, with `fuse=True` and "
        '`recompute="weight"`; `mxfp8` and `nvfp4` with the latter alone': step,
        "[FSDP2 on four GPUs](speed.md#several-gpus), 8192 tokens each": fsdp,
        f"[a layer](speed.md#experts) of {LAYER_128[2]} experts": layer,
    }
    body = []
    for case, at in cases.items():
        ratios = {name: number(peak / at[BF16]) for name, peak in at.items()}
        bold = {name: f"**{text}**" for name, text in ratios.items() if float(text) > 1}
        body.append([case, *((ratios | bold).get(c, "-") for c in COLUMNS)])
    return table(["case", *(f"`{c}`" for c in COLUMNS)], body)


def predictions() -> str:
    """Formats the steps that `minifloat doctor --model` predicted, beside measured ones."""
    head = ["blocks", "tokens", "how", "recipe", "predicted, ms", "limit", "measured, ms", "error"]
    body = []
    for row in figures.rows_of("gpu_predict"):
        case = [row["blocks"], str(row["tokens"]), row["how"], label(row["recipe"])]
        times = [number(row["ms"], 1), row["limit"], number(row["measured"], 1)]
        speeds = map(number, row["speed"] or (None, None))
        body.append([*case, *times, f"{row['error']:+.0%}", *speeds])
    return table([*head, "speed, predicted", "measured"], body)


# ---- What runs where -----------------------------------------------------------------------------
BY_PTX = "no; its PTX ran on an H100"
COMPILED = "no; compiled only"
MACHINES = (
    ("A100 (8.0, sm_80), GeForce RTX 30 (3090 …; 8.6, sm_86)", ((8, 0), (8, 6)), BY_PTX),
    ("GeForce RTX 40 (4090 …), L4, L40 (8.9, sm_89)", ((8, 9),), BY_PTX),
    ("H100, H200 (9.0, sm_90)", ((9, 0),), "yes"),
    ("B200 (10.0, sm_100), B300 (10.3, sm_103)", ((10, 0), (10, 3)), COMPILED),
    (
        "GeForce RTX 50 (5090 …), RTX PRO (12.0, sm_120), DGX Spark (12.1, sm_121)",
        ((12, 0), (12, 1)),
        COMPILED,
    ),
    ("a CPU", (figures.CPU,), "yes"),
)


def native_word(recipe: str, capabilities: tuple[tuple[int, int], ...]) -> str:
    found = {figures.is_native(recipe, capability) for capability in capabilities}
    if len(found) != 1:
        raise ValueError(f"{recipe}: expected the same on each of {capabilities}; part the row")
    return "native" if found.pop() else "emulated"


def engines() -> str:
    """Formats a row a machine; recipes that have the same words share a column."""
    words: dict[tuple[str, ...], list[str]] = {}
    for recipe in mf.presets()[1:]:
        column = tuple(native_word(recipe, capabilities) for _, capabilities, _ in MACHINES)
        words.setdefault(column, []).append(f"`{recipe}`")
    head = ["GPU", *(", ".join(names) for names in words.values()), "run"]
    rows = zip(*words, strict=True)
    return table(head, [[m[0], *row, m[2]] for m, row in zip(MACHINES, rows, strict=True)])


def presets() -> str:
    found = [(name, mf.Recipe(name)) for name in mf.presets()]
    head = ["preset", "fprop x · W", "dgrad g · W", "wgrad g · x"]
    return table(
        head, [[f"`{n}`", *(f"`{p}`" for p in (r.fprop, r.dgrad, r.wgrad))] for n, r in found]
    )
