"""What a step's time and bytes are computed from: models, machines, layouts, rates, bits.

    blocks_of                 a model -> what its blocks have, and do for a token
    rates_of                  a recipe and a machine -> operations a second, as measured
    gathered_bits, row_bytes  a recipe -> what is sent, from the library

_scale_model.py computes steps from them.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from math import ceil

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
from minifloat.distributed.fsdp.gather import plan_gather
from minifloat.moe.ranks.exchange import ROW_METADATA
from minifloat.moe.ranks.operand_cast import X, operand_spec
from minifloat.spec import Spec

MEASURED = timing.ROOT / "research" / "measured"
FOR_USERS = "../../docs/speed.md"  # for users, from MEASURED
FLASH = 2.5  # attention's backward over its forward: five products for two


# ---- Models, machines, layouts -------------------------------------------------------------------
@dataclass(frozen=True)
class Model:
    """A transformer. Its shared experts are as wide as a routed one."""

    name: str
    dim: int
    layers: int
    heads: int
    hidden: int  # of a feed-forward without experts
    vocabulary: int
    attention: int  # parameters of an attention's linear layers
    head_dim: int = 128  # the mean of q's and v's
    matrices: int = 3  # of a feed-forward: 3 with a gate
    dense_layers: int = -1  # blocks without experts; -1: all
    experts: int = 0
    top_k: int = 0
    expert_hidden: int = 0
    shared: int = 0


def llama(name: str, dim: int, layers: int, hidden: int, vocabulary: int = 128_256) -> Model:
    """Returns a Llama 3: heads of 128, eight key/value heads."""
    return Model(name, dim, layers, dim // 128, hidden, vocabulary, dim * (2 * dim + 2 * 1024))


MLA = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
MODELS = {
    model.name: model
    for model in (
        llama("llama3_8b", 4096, 32, 14_336),
        llama("llama3_70b", 8192, 80, 28_672),
        llama("llama3_405b", 16_384, 126, 53_248),
        Model("gpt3_175b", 12_288, 96, 96, 49_152, 51_200, 4 * 12_288**2, matrices=2),
        Model("deepseek_v3", 7168, 61, 128, 18_432, 129_280, MLA, 160, 3, 3, 256, 8, 2048, 1),
        Model("llama4_scout", 5120, 48, 40, 0, 202_048, 5120 * (2 * 5120 + 2048), dense_layers=0,
              experts=16, top_k=1, expert_hidden=8192, shared=1),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """GPUs and links. A link's speed is what a collective reaches, of a GPU and one direction."""

    name: str
    bf16: float  # dense peaks, TFLOP/s
    fp8: float
    fp4: float
    copy: float  # TB/s of a device copy, read and written
    memory: int  # GB
    nvlink: float = 329.0  # GB/s
    node: int = 8  # GPUs that NVLink joins
    nic: float = 40.0  # GB/s
    capability: tuple[int, int] = (9, 0)
    nvlink_hop: float = 3.4e-6  # s, a step of a ring: NCCL's own model, protocol Simple
    net_hop: float = 14e-6
    share: float = 1.0  # of the H200's rates, or of its shares of the peaks


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("H200", 989, 1979, 0, 4.2, 141),
        Machine("H100", 989, 1979, 0, 3.0, 80),
        Machine("H100_500W", 989, 1979, 0, 2.1, 96, share=0.73),
        Machine("B200", 2250, 4500, 9000, 7.0, 180, 658, capability=(10, 0)),
        Machine("GB200", 2500, 5000, 10_000, 7.0, 186, 658, node=72, capability=(10, 0)),
        Machine("GB300", 2500, 5000, 15_000, 7.0, 279, 658, 72, nic=80, capability=(10, 3)),
    )
}


@dataclass(frozen=True)
class Layout:
    """How a step is divided: gpus / (tp * pp * cp) replicas, each with micro-batches of its own."""

    gpus: int
    tokens: int = 8192  # of a micro-batch of a replica
    seq: int = 8192
    micro_batches: int = 1
    tp: int = 1
    pp: int = 1
    vp: int = 1  # stages a GPU
    cp: int = 1
    ep: int = 1
    shard: int = 0  # ranks that divide a weight; the others hold copies (HSDP). 0: all divide it
    zero: int = 3  # 3: FSDP2 and ZeRO-3; 1: whole weights, one gather and one reduction a step
    gradient: float = 2.0  # bytes an element of the reduce-scatter
    parameter: int = 4  # bytes of a parameter, of its gradient, and of each of AdamW's two states
    recomputed: float = 0.0  # share of a block's forward that backward runs again
    overlaps_tp: bool = False  # a product in tp parts, each sent beside the next one
    gathers: str = ""  # the recipe by which weights are gathered; "": the step's
    sends_codes: bool = True  # rows of experts travel as codes

    @property
    def ranks(self) -> int:
        """Ranks that divide the weights of one stage, or hold copies."""
        return self.gpus // (self.tp * self.pp)


# ---- Measured rates ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rates:
    products: float  # operations a second
    attention: float
    other: float  # seconds an element that is cast: all that is neither product nor attention
    experts: float  # operations a second of the routed experts' layer, whole


def read_rows(page: str, first: str) -> list[list[str]]:
    """Reads the cells of the first table of a page whose header begins so.

    page: its path from research/measured/.
    """
    text = (MEASURED / page).read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n| {first}")
    if not found:
        sys.exit(f"scale.py: expected a table that begins with {first!r} in {page}, found none")
    lines = takewhile(lambda line: line.startswith("|"), rest.replace("`", "").splitlines()[2:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def number(cell: str, place: int = 0) -> float:
    """Reads one of the numbers of a cell: "134.5; 133.5"."""
    return float(re.findall(r"\d+(?:\.\d+)?", cell.replace(",", ""))[place])


@cache
def measured_rates() -> dict[str, Rates]:
    """Reads the H200's rates: those of a step, on two pages, and of a mixture's layer.

    The step is four blocks of Llama3-8B, 16384 tokens, docs/speed.md. The profile's parts,
    research/measured/step.md, are scaled until they fill the median step without a profiler. Of
    several rows of a recipe the first counts. The layer is that of 8 experts of 7168 x 2048,
    research/measured/experts.md; a recipe that it lacks has fp8_rowwise's.
    """
    steps: dict[str, float] = {}
    for cells in read_rows(FOR_USERS, "recipe | options | step"):
        name = cells[0].replace(" (exact products)", "")
        steps.setdefault(name, number(cells[2]))
        steps.setdefault("bf16", number(cells[3]))
    of_bf16, *layers = read_rows("experts.md", "recipe, H200 | D 7168, I 2048, 8 experts, k 2 ")
    mixture = 6 * 32_768 * 3 * 7168 * 2048 / (number(of_bf16[1]) / 1e3)
    speeds = {cells[0].split(",")[0]: number(cells[1]) for cells in layers} | {"bf16": 1.0}
    block, tokens, blocks = blocks_of(llama("", 4096, 4, 14_336), 8192)[0], 16_384, 4
    elements = blocks * (tokens * block.casts + block.parameters)
    rates: dict[str, Rates] = {}
    for name, _, *cells in read_rows("step.md", "recipe | options | products"):
        if name in rates or name not in steps:
            continue
        parts = [0.0 if cell == "-" else number(cell) for cell in cells]
        seconds = [1e-3 * part * steps[name] / sum(parts) for part in parts]
        products, attention, casts, _, rest = seconds
        rates[name] = Rates(
            products=6 * tokens * blocks * block.parameters / products,
            attention=(1 + FLASH) * tokens * blocks * block.attention / attention,
            other=(casts + rest) / elements,
            experts=mixture * speeds.get(name, speeds["fp8_rowwise"]),
        )
    return rates


def rates_of(recipe: str, machine: Machine) -> Rates:
    """Returns a recipe's rates on a machine: the H200's, or as much of Blackwell's peaks.

    recipe: a preset, a peer of a step in docs/speed.md, or "*.experts: preset" with bf16 else.

    Raises:
        ValueError: no step was measured under the recipe.
    """
    if recipe.startswith("*.experts: "):
        of_experts = rates_of(recipe.removeprefix("*.experts: "), machine)
        return replace(rates_of("bf16", machine), experts=of_experts.experts)
    measured, h200 = measured_rates(), MACHINES["H200"]
    if recipe not in measured:
        raise ValueError(f"expected a recipe of {', '.join(measured)}, got {recipe!r}")
    found, base, fp8 = measured[recipe], measured["bf16"], measured["fp8_tensorwise"]
    if machine.capability > (9, 0):
        of_bf16 = machine.bf16 / h200.bf16
        peaks = [machine.fp8] * 3  # of a peer
        if recipe in mf.presets():
            peaks = [peak_of(engine, machine) for engine in mf.engines(recipe, machine.capability)]
        rates = [fp8.products * p / h200.fp8 if p else base.products * of_bf16 for p in peaks]
        experts = measured["fp8_rowwise"] if all(peaks) else base
        found = replace(found, products=3 / sum(1 / rate for rate in rates),
                        attention=found.attention * of_bf16,
                        experts=experts.experts * of_bf16)  # fmt: skip
    return Rates(
        products=found.products * machine.share,
        attention=found.attention * machine.share,
        other=found.other * h200.copy / machine.copy / machine.share,
        experts=found.experts * machine.share,
    )


def peak_of(engine: mf.engine_choice.Engine, machine: Machine) -> float:
    """Returns the peak of the tensor cores that multiply codes; 0: the product is exact."""
    if engine.name == "exact":
        return 0
    is_fp4 = Spec.parse(engine.specs.split("*")[0]).code_bits == 4
    return machine.fp4 if is_fp4 and engine.name == "block_scaled" else machine.fp8


# ---- Bits that are sent --------------------------------------------------------------------------
GATHERS_OF_PEERS = {
    "torchao tensorwise": "fp8_tensorwise",
    "Transformer Engine, current": "fp8_tensorwise",
}


@cache
def gathered_bits(recipe: str) -> tuple[float, float, float]:
    """Returns the bits a weight of the gathers before forward and backward, and of one for both.

    recipe: as of rates_of.
    """
    name = GATHERS_OF_PEERS.get(recipe, recipe)
    plan = plan_gather(mf.Recipe(name))[0] if name in mf.presets() else None
    if plan is None:
        return 16, 16, 16
    row, col = Spec.parse(plan.row).bits, Spec.parse(plan.col).bits
    both = row + col
    return {"one": (row, row, row), "split": (row, col, both), "both": (both,) * 3}[plan.mode]


@cache
def row_bytes(recipe: str, name: str, dim: int) -> int:
    """Returns the bytes of a row of x (X) or of g (G) that mf.expert_parallel sends as codes."""
    spec = operand_spec(name, recipe if recipe in mf.presets() else "bf16")
    own = dim * spec.bits / 8 + 4 * (spec.amax_of == "row")
    if name == X:
        own += sum(dtype.itemsize * count for dtype, count in ROW_METADATA)
    return 16 * ceil(own / 16)


# ---- Blocks --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Block:
    """What a block has, and what it does for a token in forward."""

    count: int
    parameters: int  # outside routed experts
    products: int  # multiply-adds outside routed experts
    casts: int  # elements: inputs and gradients of linear layers
    attention: float = 0  # operations of a causal attention's products
    routed: int = 0  # parameters of routed experts
    chosen: int = 0  # those of a token
    is_root: bool = False  # embedding and head, which stay in bf16


def blocks_of(model: Model, seq: int) -> list[Block]:
    """Returns the kinds of blocks: dense ones, those with experts, the root."""
    dim, width = model.dim, model.heads * model.head_dim
    kv = max(model.attention // dim - 2 * width, 0)  # of k and v together
    outside = 2 * dim + width + width + kv + dim  # x of both halves, o's; gradients of q, k, v, o
    dense = model.layers if model.dense_layers < 0 else model.dense_layers
    kinds = [(dense, model.hidden, 0)]
    kinds += [(model.layers - dense, model.shared * model.expert_hidden, model.experts)]
    found = []
    for count, hidden, experts in kinds:
        own = model.attention + model.matrices * dim * hidden
        expert = model.matrices * dim * model.expert_hidden
        routed = (experts * expert, model.top_k * expert if experts else 0)
        casts = outside + model.matrices * hidden + dim
        found += [Block(count, own, own, casts, 2 * seq * width, *routed)] if count else []
    head = model.vocabulary * dim
    return [*found, Block(1, 2 * head, head, 2 * model.vocabulary, is_root=True)]
