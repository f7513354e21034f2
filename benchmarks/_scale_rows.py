"""Steps that were measured, here and by others, beside what _scale_model.py computes of them.

Values of this project are read from research/measured/ and docs/speed.md; those of others stand
here with their source.
FITTED marks the rows that a parameter of the model was fitted on. All others are predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from _scale_inputs import (
    FOR_USERS,
    MACHINES,
    MODELS,
    Layout,
    Machine,
    Model,
    blocks_of,
    llama,
    number,
    rates_of,
    read_rows,
)
from _scale_model import Run, Step, add_tokens, step_of

FITTED = "fitted"
SPEED, MS, RATIO = "tokens/s a GPU", "ms", "times as fast"
TE, AO_TENSOR, AO_ROW = "Transformer Engine, current", "torchao tensorwise", "torchao rowwise"


@dataclass(frozen=True)
class Check:
    """A row of the check table."""

    system: str
    quantity: str
    unit: str
    measured: float
    predicted: float
    note: str = ""

    @property
    def is_fitted(self) -> bool:
        return self.note == FITTED

    @property
    def is_assumed(self) -> bool:
        """Whether a part of the layout was not published."""
        return "assumed" in self.note

    @property
    def error(self) -> float:
        """1: twice the measured value."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Case:
    """A model on a machine in a layout, under a recipe that each call names."""

    system: str
    model: Model
    machine: Machine
    layout: Layout

    def step(self, recipe: str, **changed: object) -> Step:
        layout = replace(self.layout, **changed)  # type: ignore[arg-type]
        return step_of(self.model, recipe, self.machine, layout)

    def ms(self, recipe: str, measured: float, note: str = "") -> Check:
        return Check(self.system, recipe, MS, measured, 1e3 * self.step(recipe).seconds, note)

    def speed(self, recipe: str, measured: float, note: str = "", **changed: object) -> Check:
        predicted = self.step(recipe, **changed).speed
        return Check(self.system, recipe, SPEED, measured, predicted, note)

    def ratio(self, recipe: str, base: str, measured: float, note: str = "") -> Check:
        predicted = self.step(recipe).speed / self.step(base).speed
        return Check(self.system, f"{recipe} over {base}", RATIO, measured, predicted, note)

    def scaling(self, recipe: str, few: int, measured: float, note: str = "") -> Check:
        """Compares the speed of this layout's GPUs with that of fewer; both have the same batch
        where micro-batches are several, else the same tokens a GPU.
        """
        times = self.layout.gpus // few if self.layout.micro_batches > 1 else 1
        of_few = self.step(recipe, gpus=few, micro_batches=times * self.layout.micro_batches)
        predicted = self.step(recipe).speed / of_few.speed
        what = f"{recipe}, {self.layout.gpus:,} over {few:,} GPUs"
        return Check(self.system, what, RATIO, measured, predicted, note)


# ---- Measured here -------------------------------------------------------------------------------
H200, H100 = MACHINES["H200"], MACHINES["H100"]
ALONE = replace(H200, nvlink=1e9)  # nothing is sent
EIGHT = llama("eight blocks", 4096, 8, 14_336, vocabulary=0)
SIX = llama("six blocks", 4096, 6, 14_336, vocabulary=16_384)
RECIPES = ["bf16", AO_TENSOR, "fp8_tensorwise", "fp8_rowwise", "mxfp4", "nvfp4_pow2"]


def measured_here() -> Iterator[Check]:
    """Yields the rows of research/measured/ and docs/speed.md.

    Times of blocks under FSDP2 are the device's, without the waits for the host, where the page has
    them; of a cell with two runs the first counts.
    """
    yield from of_one_step()
    yield from of_fsdp("one rank of four", ALONE, 4, 8192, "recipe | 8192: step", 2)
    yield from of_fsdp("one rank of four", ALONE, 4, 2048, "recipe | 2048: step", 3)
    two_h200, two_h100 = replace(H200, nvlink=255.0), replace(H100, nvlink=257.0)
    yield from of_fsdp("two H200s", two_h200, 2, 2048, "recipe | host", 2, "bf16")
    yield from of_fsdp(
        "four H200s, host too", H200, 4, 8192, "recipe | 2048: ms", 3, "bf16", FOR_USERS
    )
    yield from of_fsdp("two H100s", two_h100, 2, 2048, "recipe | 2048: host", 2)
    yield from of_fsdp("two H100s", two_h100, 2, 8192, "recipe | 2048: host", 5)
    yield from of_experts(two_h200)
    layouts = {"one GPU": Layout(1, 16_384, 4096)}
    layouts["FSDP2 over two"] = Layout(2, 16_384, 4096, gradient=4.0)
    system = ""
    for layout, recipe, _, _, tokens, *_ in read_rows("torchtitan.md", "layout | recipe"):
        system = layout or system
        if system in layouts and recipe in RECIPES:
            case = Case(f"torchtitan, 1.4B, {system}", SIX, two_h200, layouts[system])
            yield case.speed(recipe, number(tokens))


def of_one_step() -> Iterator[Check]:
    """Yields the steps that the rates were read from: of a recipe's rows the first counts."""
    layout = Layout(1, 16_384, parameter=2)
    case = Case("four blocks, 16384 tokens, one H200", replace(EIGHT, layers=4), H200, layout)
    times: dict[str, float] = {}
    for name, _, ms, of_bf16, *_ in read_rows(FOR_USERS, "recipe | options | step"):
        times.setdefault("bf16", number(of_bf16))
        times.setdefault(name, number(ms))
    for name in RECIPES:
        yield case.ms(name, times[name], FITTED)


def of_fsdp(
    system: str,
    machine: Machine,
    ranks: int,
    seq: int,
    header: str,
    column: int,
    fitted: str = "",
    page: str = "distributed.md",
) -> Iterator[Check]:
    """Yields the rows of a table of one of the pages of steps under FSDP2."""
    layout = Layout(ranks, seq, seq, gradient=4.0)
    case = Case(f"eight blocks, {seq} tokens, {system}", EIGHT, machine, layout)
    for name, *cells in read_rows(page, header):
        recipe = name.replace("torchao, ", "torchao ").split(",")[0]
        if recipe in RECIPES:
            yield case.ms(recipe, number(cells[column]), FITTED if recipe == fitted else "")


def of_experts(machine: Machine) -> Iterator[Check]:
    """Yields the rows of a mixture's layer over two GPUs, research/measured/experts.md."""
    model = Model(
        "layer", 7168, 1, 0, 0, 0, 0, dense_layers=0, experts=8, top_k=2, expert_hidden=2048
    )
    layout, block = Layout(2, 8192, ep=2), blocks_of(model, 8192)[0]
    for recipe, cell, *_ in read_rows("experts.md", "recipe | D 7168, I 2048, 8 experts, k 2: "):
        if recipe in (*RECIPES, "mxfp8", "nvfp4"):
            for place, kind in enumerate(("values", "codes")):
                step, is_codes = Step(), kind == "codes"
                run = Run(model, recipe, machine, replace(layout, sends_codes=is_codes))
                add_tokens(step, block, run, 1)
                seconds = step.seconds + 6 * 8192 * block.chosen / rates_of(recipe, machine).experts
                what = f"{recipe}, rows as {kind}"
                system = "a layer of 8 experts, two H200s"
                yield Check(system, what, MS, number(cell, place), 1e3 * seconds)


# ---- Published -----------------------------------------------------------------------------------
def published() -> Iterator[Check]:
    """Yields the steps of other systems, each with where its figures and its layout are from."""
    yield from torchtitan_of_2024()
    yield from torchtitan_of_2025()
    yield from mixtures()
    yield from megatron()


def torchtitan_of_2024() -> Iterator[Check]:
    """pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: all of the layout."""
    machine = MACHINES["H100_500W"]
    one = Case("Llama 3.1 8B, 8 H100s of 500 W, FSDP", MODELS["llama3_8b"], machine,
               Layout(8, 16_384, recomputed=0.5, gradient=4.0))  # fmt: skip
    yield one.speed("bf16", 6667, FITTED)
    yield one.speed(AO_TENSOR, 8532)
    many = replace(one, system="the same, 128 H100s", layout=replace(one.layout, gpus=128))
    yield many.speed("bf16", 6514)
    yield many.speed(AO_TENSOR, 8380)
    of_70b = Case("70B, 256 of them, FSDP 32, TP 8", MODELS["llama3_70b"], machine,
                  Layout(256, 16 * 8192, tp=8, recomputed=1.0, gradient=4.0))  # fmt: skip
    yield of_70b.speed(AO_TENSOR, 829)
    yield of_70b.speed(AO_TENSOR, 876, "AsyncTP", overlaps_tp=True)
    layout = Layout(
        512, 8192, micro_batches=32, tp=8, pp=8, recomputed=1.0, overlaps_tp=True, gradient=4.0
    )
    of_405b = Case("405B, 512 of them, FSDP 8, TP 8, PP 8", MODELS["llama3_405b"], machine, layout)
    yield of_405b.speed(AO_TENSOR, 100, "1F1B")
    yield of_405b.speed(AO_TENSOR, 128, "interleaved; stages a GPU assumed 2", vp=2)


def torchtitan_of_2025() -> Iterator[Check]:
    """pytorch.org, 2025: "Accelerating large scale training and convergence with PyTorch Float8
    rowwise on Crusoe 2K H200s", and "Accelerating 2K scale pre-training up to 1.28x with TorchAO,
    MXFP8 and TorchTitan on Crusoe B200 cluster".

    2,500 steps in 24 hours are 34.6 s a step: eight sequences of 8192 a replica of CP 2 make 950
    tokens/s a GPU, four or sixteen would make 470 or 1,900. Shards of 64 and 32 are assumed.
    """
    said = "8 sequences, shards of 64, recomputation assumed"
    layout = Layout(1600, 8 * 8192, cp=2, shard=64, recomputed=1.0)
    h200 = Case("Llama3-70B, 1,600 H200s, HSDP, CP 2", MODELS["llama3_70b"], H200, layout)
    yield h200.ratio(AO_ROW, "bf16", (31 + 19 / 60) / 24, said)
    for gpus, ratio in ((960, 1.43), (1920, 1.34)):
        case = replace(h200, system=f"the same, {gpus:,}", layout=replace(layout, gpus=gpus))
        yield case.ratio(AO_ROW, "bf16", ratio, said)
    yield case.scaling("bf16", 960, 0.96, said)
    layout = Layout(1504, 8 * 8192, cp=2, shard=32, recomputed=1.0, gathers="bf16")
    said = said.replace("64", "32")
    b200 = Case(
        "Llama3-70B, 1,504 B200s, HSDP, CP 2", MODELS["llama3_70b"], MACHINES["B200"], layout
    )
    yield b200.ratio("mxfp8", "bf16", 1.25, f"{said}; 1.22 to 1.28")
    yield b200.scaling("mxfp8", 32, 0.95, said)


def mixtures() -> Iterator[Check]:
    """pytorch.org, 2026: "MXFP8 training for MoEs: 1.3x training speedup vs BF16 for Llama4 Scout
    on GB200 cluster", and "Enabling up to 41% faster pre-training: MXFP8 and DeepEP for DeepSeek-V3
    on B200 with TorchTitan", whose layout of 671B is assumed.
    """
    layout = Layout(256, 8192, ep=16, recomputed=1.0, gathers="bf16", sends_codes=False)
    scout = Case(
        "Llama4 Scout, 256 GB200s, FSDP, EP 16", MODELS["llama4_scout"], MACHINES["GB200"], layout
    )
    yield scout.ratio("mxfp8", "bf16", 1.302, "NVLink of 72 GPUs assumed")
    layout = Layout(
        256,
        4096,
        4096,
        micro_batches=16,
        pp=8,
        ep=32,
        recomputed=1.0,
        gathers="bf16",
        sends_codes=False,
    )
    v3 = Case("DeepSeek-V3, 256 B200s, DeepEP", MODELS["deepseek_v3"], MACHINES["B200"], layout)
    said = "PP 8, EP 32, 16 sequences, recomputation assumed"
    yield v3.speed("bf16", 859, said)
    yield v3.ratio("*.experts: mxfp8", "bf16", 918 / 859, said)


def megatron() -> Iterator[Check]:
    """NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary*.md (26.06, 26.04.01; DeepSeek-V3
    25.11): all of the layout is there. NVIDIA/Megatron-LM, README.md: GPT-3, its layout assumed.
    Llama 3's paper, arXiv 2407.21783, table 4: stages assumed.
    """
    gb200, gb300 = MACHINES["GB200"], MACHINES["GB300"]
    layout = Layout(256, 4096, 4096, micro_batches=32, pp=2, vp=4, ep=32, zero=1, sends_codes=False)
    v3 = Case("DeepSeek-V3, 256 GB300s, PP 2, EP 32", MODELS["deepseek_v3"], gb300, layout)
    yield v3.speed("bf16", 3848)
    yield v3.speed("mxfp8", 4357)
    layout = Layout(256, 8192, micro_batches=384, tp=4, pp=16, vp=4, zero=1, overlaps_tp=True)
    of_405b = Case("Llama 3.1 405B, 256 GB200s, TP 4, PP 16", MODELS["llama3_405b"], gb200, layout)
    yield of_405b.speed(TE, 843)
    yield of_405b.speed("mxfp8", 783, vp=8)
    yield of_405b.speed("nvfp4", 1166, vp=8)
    fsdp = Case("Llama3-70B, 64 GB300s, FSDP", MODELS["llama3_70b"], gb300,
                Layout(64, 2 * 8192, micro_batches=2))  # fmt: skip
    yield fsdp.speed(TE, 5248)
    layout = Layout(64, 8192, micro_batches=16, pp=4, vp=5, zero=1)
    stages = replace(fsdp, system="the same, PP 4", layout=layout)
    yield stages.speed("mxfp8", 4864)
    yield stages.speed("nvfp4", 7296)
    layout = Layout(64, 8192, micro_batches=128, tp=4, pp=8, vp=5, zero=1, overlaps_tp=True)
    yield Case("Llama3-70B, 64 H100s, TP 4, PP 8", MODELS["llama3_70b"], H100, layout).speed(
        TE, 1664
    )
    layout = Layout(1024, 8192, micro_batches=192, tp=8, pp=8, cp=2, vp=8, zero=1, overlaps_tp=True)
    yield Case(
        "Llama 3.1 405B, 1,024 H100s, TP 8, PP 8, CP 2", MODELS["llama3_405b"], H100, layout
    ).speed(TE, 326)
    layout = Layout(4608, 2048, 2048, micro_batches=24, tp=8, pp=12, vp=8, zero=1, overlaps_tp=True)
    gpt3 = Case("GPT-3 175B, H100s, 1,152 sequences a step", MODELS["gpt3_175b"], H100, layout)
    yield gpt3.scaling("bf16", 96, 42 / 47, "TP 8, PP 12, 8 stages a GPU assumed")
    operations = 6 * 405e9 + 6 * 126 * 8192 * 16_384  # a token, as a causal attention has them
    for gpus, tflops in ((8192, 430), (16_384, 400)):
        layout = Layout(gpus, 8192, micro_batches=2**18 // gpus, tp=8, pp=16, vp=8, zero=1)
        case = Case(
            f"Llama 3 405B, {gpus:,} H100s, TP 8, PP 16", MODELS["llama3_405b"], H100, layout
        )
        yield case.speed(
            "bf16",
            round(tflops * 1e12 / operations, 1),
            f"from {tflops} TFLOP/s; 8 stages a GPU assumed",
        )
