"""The tables by which to choose a recipe, and the matrix of what runs where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import figures
import pictures
from cells import label, number, table
from figures import BF16, Row, mf


# ---- Recipes -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Choice:
    """A row of the tables of recipes: names in mf.presets, in the runs of a step, in records.

    Where `step` ran without what the label says, the row is not timed.
    """

    label: str
    recipe: str = ""
    step: str = ""
    record: str = ""
    when: str = ""  # README's column; without it README has no row
    is_timed: bool = True


KEPT = "nvfp4 (keep nvfp4_paper)"
THEN = f"{KEPT} then=mxfp8"
POW2 = "docs/measured/loss.md#which-operand-pow2-harms-most"
CHOICES = (
    Choice("`bf16`", BF16, BF16),
    Choice(
        "`fp8_tensorwise`",
        "fp8_tensorwise",
        "fp8_tensorwise",
        "fp8_tensorwise",
        "first choice on H100 and H200",
    ),
    Choice(
        "`fp8_delayed`",
        "fp8_delayed",
        "fp8_delayed",
        "fp8_delayed",
        "the fastest: scales come from earlier steps",
    ),
    Choice(
        "`fp8_rowwise`",
        "fp8_rowwise",
        "fp8_rowwise",
        "fp8_rowwise",
        "a scale for each token and feature",
    ),
    Choice(
        "`fp8_blockwise`",
        "fp8_blockwise",
        "fp8_blockwise",
        "fp8_blockwise",
        "a scale for each 128 elements, as in DeepSeek-V3",
    ),
    Choice("`mxfp4`", "mxfp4", "mxfp4", "mxfp4", "the fastest FP4 recipe, and the least memory"),
    Choice(
        "`nvfp4_pow2`",
        "nvfp4_pow2",
        "nvfp4_pow2",
        "nvfp4_pow2",
        f"FP4 in blocks of 16; [its errors]({POW2}) beside `mxfp4`'s",
    ),
    Choice("`mxfp8`", "mxfp8", "mxfp8", "mxfp8", "Blackwell's MXFP8; emulated on Hopper"),
    Choice("`mxfp8_nvfp4`", "mxfp8_nvfp4", "mxfp8_nvfp4", "mxfp8_nvfp4"),
    Choice(
        "`nvfp4`",
        "nvfp4",
        "nvfp4",
        "nvfp4",
        "NVFP4 in all layers but the head; emulated on Hopper",
    ),
    Choice(
        "`nvfp4`, last block in bf16",
        "nvfp4",
        "nvfp4",
        KEPT,
        "NVIDIA's NVFP4 recipe; emulated on Hopper",
        is_timed=False,
    ),
    Choice(
        "the same, `then=mxfp8`",
        "nvfp4",
        "nvfp4",
        THEN,
        "the [last 15% of the steps](docs/parity.md#variants-of-nvfp4) in `mxfp8`: "
        f"{figures.gaps(KEPT)[THEN]} beside the row above, from the same seeds",
        is_timed=False,
    ),
    Choice("torchao tensorwise", step="torchao tensorwise"),
    Choice("torchao rowwise", step="torchao rowwise", record="torchao_rowwise"),
    *(Choice(label(peer), step=peer) for peer in ("te delayed", "te current", "te blocks")),
)


def of_step(choice: Choice, field: str) -> str:
    """Returns a figure of a step."""
    return number(figures.step_of(choice.step).get(field) if choice.is_timed else None)


def loss_of(choice: Choice) -> str:
    gap = figures.gaps().get(choice.record)
    return "-" if gap is None else str(gap)


def peak_of_bf16() -> str:
    return number(figures.step_of(BF16)["peak_gib"])


def recipes() -> str:
    head = ["recipe", "when", "a step's speed, bf16 = 1", f"peak, GiB (bf16: {peak_of_bf16()})"]
    body = [
        [c.label, c.when, of_step(c, "speed"), of_step(c, "peak_gib"), loss_of(c)]
        for c in CHOICES
        if c.when
    ]
    return table([*head, "loss beside bf16's"], body)


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
                loss_of(c),
            ]
        )
    return table(head, body)


def wishes() -> str:
    """Formats the picture's GPUs, purposes and recipes: a row each."""
    body = [
        [gpus, wish.purpose, f"`{name}`" if wish.recipe else name, words]
        for gpus, _, capabilities, wanted in pictures.MACHINES
        for wish in wanted
        for name, words in [(pictures.name_of(wish), pictures.words_of(wish, capabilities))]
    ]
    return table(["your GPU", "what for", "take", "what is known"], body)


# ---- When it does not pay ------------------------------------------------------------------------
COLUMNS = ("fp8_tensorwise", "fp8_rowwise", "mxfp4", "nvfp4_pow2", "mxfp8", "nvfp4")
SMALL, LARGE = "16384x1024x1024", "16384x4096x14336"
EXPERTS_128, EXPERTS_2 = [131072, 1536, 2048, 128], [32768, 8192, 5120, 2]
LAYER_128 = [2048, 768, 128, 8]  # D, I, experts, k
WIDE = {"k": 4096, "n": 4096, "tokens": 256}


def linear_rows(shape: str) -> list[Row]:
    """Returns the rows of a shape, M x K x N, of all runs of gpu_linear.py."""
    runs = sorted((figures.DOCS / "results").glob("gpu_linear*.json"))
    return [row for run in runs for row in figures.rows_of(run.stem, shape=shape)]


def below_one(speed: float) -> str:
    """Formats a speed, in bold where bf16 is faster."""
    text = number(speed)
    return f"**{text}**" if float(text) < 1 else text


def speed_cases() -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the cases of the page, with a speed by recipe."""
    layer, of = "measured/layers.md", figures.by_name
    small, large = f"{layer}#small-layers-and-fewer-tokens", f"{layer}#speed-of-a-layer-on-one-h200"
    for shape in (SMALL, "16384x2048x2048", "4096x4096x4096"):
        m, k, n = shape.split("x")
        yield f"[a layer]({small}) of {k} x {n}, {m} tokens", of(linear_rows(shape))
    m, k, n = LARGE.split("x")
    yield f"[a layer]({large}) of {k} x {n}, {m} tokens", of(linear_rows(LARGE))
    of_records = dict(figures.speeds_of_records())
    of_records["nvfp4"] = of_records[KEPT]
    yield "[a Llama](parity.md#loss-at-equal-time) of dim 1024, compiled", of_records
    fsdp = "[FSDP2 on four GPUs](measured/distributed.md#fsdp2-on-four-h200s-of-one-host)"
    for tokens in (2048, 8192):
        rows = figures.rows_of("gpu_fsdp", seq=tokens)
        yield f"{fsdp}, {tokens} tokens each", of(rows)
    grouped = "measured/experts.md#grouped-gemms-of-experts"
    for sizes in (EXPERTS_128, EXPERTS_2):
        rows = figures.rows_of("gpu_grouped", "layers", shape=sizes, groups="even")
        each = f"of {sizes[1]} x {sizes[2]}, {sizes[0] // sizes[3]} rows each"
        yield f"[GEMMs of {sizes[3]} experts]({grouped}) {each}", of(rows)
    rows = figures.rows_of("gpu_moe", shape=LAYER_128)
    experts = "[a layer](measured/experts.md#the-layer-of-experts)"
    yield f"{experts} of {LAYER_128[2]} experts of hidden width {LAYER_128[1]}", of(rows)
    rows = figures.rows_of("gpu_weight_codes", **WIDE)
    codes = f"({layer}#a-forward-that-quantizes-its-weight)"
    yield f"[generation]{codes}, {WIDE['tokens']} tokens a forward", of(rows)
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
        "[a step](measured/step.md) of four Llama3-8B blocks, with `fuse=True` and "
        '`memory="weights"`': step,
        "[FSDP2 on four GPUs](measured/distributed.md#fsdp2-on-four-h200s-of-one-host), 8192 "
        "tokens each": fsdp,
        f"[a layer](measured/experts.md#the-layer-of-experts) of {LAYER_128[2]} experts": layer,
    }
    body = []
    for case, at in cases.items():
        ratios = {name: number(peak / at[BF16]) for name, peak in at.items()}
        bold = {name: f"**{text}**" for name, text in ratios.items() if float(text) > 1}
        body.append([case, *((ratios | bold).get(c, "-") for c in COLUMNS)])
    return table(["case", *(f"`{c}`" for c in COLUMNS)], body)


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
