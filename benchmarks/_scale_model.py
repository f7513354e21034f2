"""The time and the bytes of a training step: equations of model, recipe, machine and layout.

    ring, all_reduce, all_to_all  bytes and ranks -> seconds of transfer and of latency
    step_of                       a model, a recipe, a machine, a layout -> a Step

research/scale.md has the equations with their letters, and what they leave out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import ceil, log2

from _scale_inputs import (  # first: it makes minifloat importable
    FLASH,
    Block,
    Layout,
    Machine,
    Model,
    blocks_of,
    gathered_bits,
    rates_of,
    row_bytes,
)
from minifloat.moe.ranks.operand_cast import G, X

CONTENTION = 0.2  # of a hidden transfer's time at NVLink's speed: what it takes from compute
ADAMW = 7  # words an element: parameter, gradient and two states read, all but the gradient written
ADAMW_OF_COPY = 0.62  # 14 bytes of 872M bf16 elements in 4.7 ms, of 4.2 TB/s: measured/step.md
STATE = 4  # words an element of the same four
FEW = 0.05  # of a step: where links take less, compute is the limit


# ---- Links ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Message:
    sent: float = 0  # bytes of a GPU
    transfer: float = 0  # seconds
    latency: float = 0

    @property
    def seconds(self) -> float:
        return self.transfer + self.latency

    def __add__(self, other: Message) -> Message:
        sent, transfer = self.sent + other.sent, self.transfer + other.transfer
        return Message(sent, transfer, self.latency + other.latency)


def ring(whole: float, ranks: int, local: int, machine: Machine) -> Message:
    """Returns an all-gather, or a reduce-scatter, of `whole` bytes over `ranks`, `local` a node.

    The ranks of a node receive what other nodes have, each a part of it, while NVLink passes it on.
    """
    local = min(local, ranks)
    if ranks == 1 or whole == 0:
        return Message()
    sent, nodes = whole * (ranks - 1) / ranks, ceil(ranks / local)
    within = sent / (machine.nvlink * 1e9) if local > 1 else 0
    between = whole * (ranks - local) / ranks / (local * machine.nic * 1e9)
    latency = (nodes - 1) * machine.net_hop + (ranks - nodes) * machine.nvlink_hop
    return Message(sent, max(within, between), latency)


def all_reduce(part: float, copies: int, local: int, machine: Machine) -> Message:
    """Returns the sum of a shard over its copies (HSDP): two rings, or a tree's hops if fewer."""
    once = ring(part, copies, local, machine)
    latency = min(2 * once.latency, 2 * ceil(log2(copies)) * machine.net_hop)
    return Message(2 * once.sent, 2 * once.transfer, latency)


def all_to_all(rows: float, ranks: int, local: int, machine: Machine) -> Message:
    """Returns the exchange of `rows` bytes of a rank, an equal part for each rank."""
    local = min(local, ranks)
    if ranks == 1:
        return Message()
    within = rows * (local - 1) / ranks / (machine.nvlink * 1e9)
    between = rows * (ranks - local) / ranks / (machine.nic * 1e9)
    hop = machine.net_hop if ranks > local else machine.nvlink_hop
    return Message(rows * (ranks - 1) / ranks, max(within, between), hop)


# ---- The step ------------------------------------------------------------------------------------
@dataclass
class Step:
    """Seconds of a step, by part. Those of links are what compute does not hide."""

    compute: float = 0
    contention: float = 0  # what hidden transfers take from compute
    gather: float = 0
    reduce_scatter: float = 0
    all_to_all: float = 0
    tensor_parallel: float = 0
    latency: float = 0  # of these four
    bubble: float = 0  # of the pipeline
    sent: dict[str, float] = field(default_factory=dict)  # bytes of a GPU, by kind
    state: float = 0  # bytes of a GPU: weights, gradients, optimizer; no activations
    tokens: float = 0  # of a GPU

    @property
    def parts(self) -> dict[str, float]:
        return {each.name: getattr(self, each.name) for each in fields(self)[:8]}

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def speed(self) -> float:
        """Tokens a second and GPU."""
        return self.tokens / self.seconds

    @property
    def limit(self) -> str:
        """The largest of the parts that are neither compute nor contention, if they take FEW."""
        waits = dict(list(self.parts.items())[2:])
        if sum(waits.values()) < FEW * self.seconds:
            return "compute"
        return max(waits, key=waits.__getitem__).replace("_", "-")

    def add(self, machine: Machine, times: float, window: float = 0, **messages: Message) -> None:
        """Adds messages, by kind, that `window` seconds of compute hide, in proportion."""
        whole = sum(message.seconds for message in messages.values())
        shown = max(whole - window, 0) / whole if whole else 0
        for kind, message in messages.items():
            setattr(self, kind, getattr(self, kind) + times * shown * message.transfer)
            self.latency += times * shown * message.latency
            self.sent[kind] = self.sent.get(kind, 0) + times * message.sent
            hidden = (1 - shown) * message.sent / (machine.nvlink * 1e9)
            self.contention += times * CONTENTION * hidden


@dataclass(frozen=True)
class Run:
    model: Model
    recipe: str
    machine: Machine
    layout: Layout


def step_of(model: Model, recipe: str, machine: Machine, layout: Layout) -> Step:
    """Computes a step.

    Args:
        recipe: as of rates_of.

    Raises:
        ValueError: the layout does not divide the GPUs; or as of rates_of.
    """
    of = layout
    if of.gpus % (of.tp * of.pp * of.cp) or of.ranks % of.ep or of.ranks % (of.shard or 1):
        raise ValueError(f"expected sizes that divide the GPUs, got {of}")
    step = Step(tokens=of.tokens * of.micro_batches / (of.tp * of.pp * of.cp))
    for place, block in enumerate(blocks_of(model, of.seq)):
        add_block(step, block, Run(model, recipe, machine, of), is_first=place == 0)
    step.bubble = step.seconds * (of.pp - 1) / (of.vp * of.micro_batches)
    return step


def add_block(step: Step, block: Block, run: Run, is_first: bool) -> None:
    """Adds one GPU's part of all blocks of a kind."""
    recipe, machine, of = run.recipe, run.machine, run.layout
    rates = rates_of("bf16" if block.is_root else recipe, machine)
    bits = (16.0, 16.0, 16.0) if block.is_root else gathered_bits(of.gathers or recipe)
    recomputed = 0 if block.is_root else of.recomputed
    before_forward, before_backward, once = bits
    before_backward += recomputed * (once - before_backward)  # which reads fprop's direction too
    count, tokens = block.count / of.pp, of.tokens / of.cp / of.tp
    held = (block.parameters + block.routed / of.ep) / of.tp

    # Compute: a third of casts is forward's.
    casts = rates.other * (tokens * block.casts + held) / 3
    products = 2 * tokens * (block.products / rates.products + block.chosen / rates.experts)
    attention = tokens * block.attention / rates.attention
    forward = products + attention + casts
    backward = 2 * (products + casts) + FLASH * attention + recomputed * forward
    step.compute += of.micro_batches * count * (forward + backward)

    # The optimizer; and copies into and out of the buffers of FSDP2's collectives.
    shard = of.shard or of.ranks
    owned = (block.parameters / shard + block.routed / max(shard, of.ep)) / of.tp
    step.compute += count * owned * ADAMW * of.parameter / (ADAMW_OF_COPY * machine.copy * 1e12)
    if of.zero == 3 and of.ranks > 1:
        copied = 2 * (before_forward + before_backward) / 8 + 2 + of.gradient  # bytes an element
        step.compute += of.micro_batches * count * held * copied / (machine.copy * 1e12)
    step.state += count * owned * STATE * of.parameter
    kept = max(before_forward, before_backward) / 8
    step.state += 2 * held * kept if of.zero == 3 else count * held * (once / 8 + 2)

    add_tokens(step, block, run, count * of.micro_batches)

    # Weights: the block before hides a gather, in backward together with the reduction of the block
    # after. Nothing hides the first gather and the last reduction.
    if of.zero == 1:
        gather, again = weights_sent(block, once / 8, machine, of), Message()
    else:
        gather = weights_sent(block, before_forward / 8, machine, of)
        again = weights_sent(block, before_backward / 8, machine, of)
    reduction = weights_sent(block, of.gradient, machine, of, is_reduced=True)
    times, alone = (of.micro_batches, float(is_first)) if of.zero == 3 else (1, 0.0)
    step.add(machine, times * alone, gather=gather, reduce_scatter=reduction)
    step.add(machine, times * (count - alone), forward, gather=gather)
    step.add(machine, times * alone, backward, gather=again)
    step.add(machine, times * (count - alone), backward, gather=again, reduce_scatter=reduction)


def weights_sent(
    block: Block, bytes_each: float, machine: Machine, of: Layout, is_reduced: bool = False
) -> Message:
    """Returns the gather, or the reduction, of a block's weights on this GPU's ranks."""
    near, shard = max(machine.node // of.tp, 1), of.shard or of.ranks
    groups = [(float(block.parameters), of.ranks, shard, near)]
    groups += [
        (block.routed / of.ep, of.ranks // of.ep, max(shard // of.ep, 1), max(near // of.ep, 1))
    ]
    found = Message()
    for elements, ranks, divided, local in groups:
        bytes_ = elements * bytes_each / of.tp
        found += ring(bytes_, divided, local, machine)
        if is_reduced and ranks > divided:
            copies = ranks // divided
            found += all_reduce(bytes_ / divided, copies, max(local // divided, 1), machine)
    return found


def add_tokens(step: Step, block: Block, run: Run, times: float) -> None:
    """Adds what is sent of tokens, to the ranks of tp and of experts. Compute does not hide it."""
    model, machine, of = run.model, run.machine, run.layout
    tokens = of.tokens / of.cp
    if of.tp > 1 and not block.is_root:
        # Two gathers and two scatters in forward, as many in backward, and again the two gathers,
        # for weight gradients.
        passes = 4 * (2 + of.recomputed) + 2
        one = ring(2 * tokens * model.dim, of.tp, machine.node, machine)
        window = (1 - 1 / of.tp) * one.seconds if of.overlaps_tp else 0
        step.add(machine, times * passes, window, tensor_parallel=one)
    if block.routed:
        local, rows = max(machine.node // of.tp, 1), tokens / of.tp * model.top_k
        name = run.recipe.removeprefix("*.experts: ") if of.sends_codes else "bf16"
        x, g = (row_bytes(name, operand, model.dim) for operand in (X, G))
        values = row_bytes("bf16", G, model.dim)  # results, and gradients of tokens
        sent = (1 + of.recomputed) * (x + values) + g + values
        one = all_to_all(rows * sent, of.ep, local, machine)
        one = replace(one, latency=(4 + 2 * of.recomputed) * one.latency)
        step.add(machine, times, all_to_all=one)
