"""The time of a training step by recipe, from times that were measured on this machine.

step      the longest of device, host and link: the host launches while the device computes, and
          FSDP2 gathers the next block meanwhile
device    GEMMs + casts + attention + memory
memory    norms, residuals, rotations, gates, loss and AdamW, by their bytes at a copy's speed
host      the launches of a step, and those of a block times the blocks
link      what FSDP2 gathers before forward and before backward, and the gradients that it reduces
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..distributed.fsdp.gather import plan_experts, plan_gather
from ..recipe import Recipe
from .model_sizes import ModelSizes, Part

BF16 = "bf16"
BYTES = 2  # of parameters, gradients and states of AdamW
# Elements that are read or written a token and block, of hidden width D and feed-forward width F.
# Norms read and write D forward, and in backward x, the gradient, the residual's and the result;
# eager residuals and sums of gradients are kernels of their own. Gates: silu(a) * b and backward.
WIDTHS = {True: (16, 8), False: (24, 14)}  # compiled, eager
ROTATED = 4  # of q and k
LOSS = 8  # bytes an element of the logits: two reads forward, a read and a write in backward
UPDATED = 7  # AdamW reads the weight, gradient and states, and writes all but the gradient


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        model: the sizes.
        tokens: of a step on each GPU, in sequences of `seq`.
        gpus: that FSDP2 shards over.
        link: GB/s at which a GPU gathers.
        is_compiled: whether blocks are compiled; else eager.
    """

    model: ModelSizes
    tokens: int
    seq: int
    gpus: int = 1
    link: float = 200.0
    is_compiled: bool = False


@dataclass(frozen=True)
class PartTime:
    """Milliseconds of one part's forward and backward.

    Attributes:
        products: what is no cast, at `tokens` of the batch.
        casts: of x and g.
        weight_casts: of W, which do not grow with the tokens.
        tokens: of the batch that was measured.
    """

    products: float
    casts: float
    weight_casts: float
    tokens: int

    def at(self, tokens: int) -> tuple[float, float]:
        """Returns the ms of (GEMMs, casts) at other tokens."""
        scale = tokens / self.tokens
        return self.products * scale, self.casts * scale + self.weight_casts


@dataclass(frozen=True)
class HostTime:
    """Milliseconds in which the host launches a step: once a step, and for each block."""

    step: float
    block: float


@dataclass(frozen=True)
class Measured:
    """The times of one machine.

    Attributes:
        parts: of each recipe, bf16 among them, each converted part's; the head's stands in bf16.
        attention: ms of one sequence's attention in one block, forward and backward.
        host: of each recipe the launches; 0: the host is the device.
        copy: bytes a ms that a copy reads and writes.
    """

    parts: Mapping[str, Mapping[Part, PartTime]]
    attention: float
    host: Mapping[str, HostTime]
    copy: float


@dataclass(frozen=True)
class Row:
    """A recipe's predicted step. Times are in ms."""

    recipe: str
    ms: float
    speed: float  # bf16's time over this
    gemms: float
    casts: float
    attention: float
    memory: float
    host: float
    link: float
    limit: str

    @property
    def device(self) -> float:
        return self.gemms + self.casts + self.attention + self.memory


def predict(job: Job, measured: Measured) -> list[Row]:
    """Predicts the step of each measured recipe; bf16 is the first row."""
    rows: list[Row] = []
    for recipe in dict.fromkeys((BF16, *measured.parts)):
        gemms = casts = 0.0
        for part in job.model.parts():
            time = measured.parts[recipe if part.is_converted else BF16][part]
            products, quantized = time.at(job.tokens)
            gemms += part.count * products
            casts += part.count * quantized
        times = {
            "GEMMs": gemms,
            "casts": casts,
            "attention": job.model.layers * job.tokens / job.seq * measured.attention,
            "memory": moved_bytes(job) / measured.copy,
        }
        device = sum(times.values())
        launches = measured.host[recipe]
        host = launches.step + job.model.layers * launches.block
        link = linked_bytes(job, recipe) / (1e6 * job.link)
        ms = max(device, host, link)
        limit = max(times, key=lambda name: times[name])
        limit = "link" if ms > max(device, host) else "host" if ms > device else limit
        rows.append(
            Row(
                recipe=recipe,
                ms=ms,
                speed=(rows[0].ms if rows else ms) / ms,
                gemms=gemms,
                casts=casts,
                attention=times["attention"],
                memory=times["memory"],
                host=host,
                link=link,
                limit=limit,
            )
        )
    return rows


def moved_bytes(job: Job) -> float:
    """Counts what is read and written beside linear layers and attention."""
    model = job.model
    of_hidden, of_gate = WIDTHS[job.is_compiled]
    token = of_hidden * model.layers * model.hidden + of_gate * model.gated_widths()
    token += ROTATED * model.layers * (model.heads + model.kv_heads) * model.head_dim
    weights = model.other_weights + sum(part.count * part.weights for part in model.parts())
    states = UPDATED * BYTES * weights / job.gpus
    return job.tokens * (BYTES * token + LOSS * model.vocab) + states


def linked_bytes(job: Job, recipe: str) -> float:
    """Counts what a GPU receives in a step under FSDP2: W twice, and bf16 gradients once."""
    total = 3.0 * BYTES * job.model.other_weights
    for part in job.model.parts():
        gathered = gathered_bytes(recipe if part.is_converted else BF16, part.experts > 0)
        total += part.count * part.weights * (BYTES + gathered)
    return total * (job.gpus - 1) / job.gpus


def gathered_bytes(recipe: str, experts: bool) -> float:
    """Returns the bytes an element of W that FSDP2 gathers before forward and before backward."""
    plan, _ = (plan_experts if experts else plan_gather)(Recipe(recipe))
    return 2 * BYTES if plan is None else plan.bits_of_step / 8


def table(rows: list[Row], emulated: Mapping[str, str]) -> list[str]:
    """Formats rows.   emulated: of each recipe the products whose GEMMs do not read codes."""
    names = ("GEMMs", "casts", "attention", "memory", "host", "link")
    lines = [f"{'recipe':<20} {'ms':>9} {'speed':>6}" + "".join(f" {name:>9}" for name in names)]
    for row in rows:
        parts = (row.gemms, row.casts, row.attention, row.memory, row.host, row.link)
        cells = "".join(f" {ms:9.1f}" for ms in parts)
        lines.append(f"{row.recipe:<20} {row.ms:9.1f} {row.speed:6.2f}{cells}")
    lines.append("what limits:")
    for row in rows:
        lines.append(f"  {row.recipe:<21}{explain(row, emulated.get(row.recipe, ''))}")
    return lines


def explain(row: Row, emulated: str) -> str:
    """Says in a line what limits a recipe."""
    if row.limit in ("host", "link"):
        late = row.host if row.limit == "host" else row.link
        text = f"{row.limit}, {late:.1f} ms; the device computes for {row.device:.1f} ms of them"
    else:
        parts = {"GEMMs": row.gemms, "casts": row.casts}
        parts |= {"attention": row.attention, "memory": row.memory}
        text = f"{row.limit}, {parts[row.limit] / row.device:.0%} of the device's time"
    return f"{text}; emulated here: {emulated}" if emulated else text
