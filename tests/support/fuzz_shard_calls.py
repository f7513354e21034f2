"""More valid calls for the op fuzzer: the native casts of shards, and the batches of FSDP2."""

from __future__ import annotations

from random import Random
from typing import Any

import minifloat as mf
import torch
import torch.distributed as dist

from tests.support.fuzz_calls import FLOATS, Call, call, op_call
from tests.support.fuzz_values import Arena, values

PLANS = [
    ("one", "e4m3/tensor", "e4m3/tensor"),
    ("one", "nvfp4/16x16", "nvfp4/16x16"),
    ("one", "e4m3/tensor+delayed", "e4m3/tensor+delayed"),
    ("both", "mxfp4", "mxfp4+rht"),
    ("both", "nvfp4", "nvfp4+rht"),
    ("split", "mxfp4", "mxfp4+rht"),
    ("split", "nvfp4", "nvfp4"),
    ("split", "mxfp8", "mxfp8"),
    ("split", "e4m3/row", "e4m3/row"),
    ("split", "e4m3/row+rht", "e4m3/row+rht"),
]
SENT = ["e4m3/1x128", "mxfp8", "mxfp8/e5m2", "mxfp4"]  # specs of messages
WORLDS = ((1, 0), (2, 0), (2, 1))


def shard_cast(spec: Any, columnwise: Any, rows: Any, cols: Any) -> Any:
    return torch.classes.minifloat.ShardCast(spec, columnwise, rows, cols, True)


@call("ShardCast.fits")
@call("ShardCast.chunk_bytes")
@call("ShardCast.has_common_scale")
@call("ShardCast.new_operand")
def _shard_cast(rng: Random, arena: Arena) -> Call:
    def run(spec: Any, columnwise: Any, rows: Any, cols: Any, world: Any, like: Any) -> None:
        cast = shard_cast(spec, columnwise, rows, cols)
        cast.fits(world)
        cast.chunk_bytes(world)
        cast.has_common_scale()
        if rows * cols >= 1 << 20:
            raise ValueError("not called: its operand would take too much memory")
        cast.new_operand(like)

    _, _, spec = rng.choice(PLANS)
    args = {"spec": spec, "columnwise": rng.random() < 0.5, "rows": 32, "cols": 48, "world": 2}
    return Call(run, {**args, "like": arena.place(torch.zeros(2))})


class Weights:
    """Valid arguments of a batch of one or two weights (rows, cols) on one rank."""

    def __init__(self, rng: Random, arena: Arena) -> None:
        self.plans = rng.choices(PLANS, k=rng.choice((1, 2)))
        self.rows, self.cols = 64, rng.choice((16, 48))
        self.world, self.rank = rng.choice(WORLDS)
        self.selection = rng.choice((0, 1))
        held = self.rows // self.world
        kinds = (torch.float32, torch.bfloat16)
        self.shards = [
            arena.place(values(rng, (held, self.cols), rng.choice(kinds))) for _ in self.plans
        ]
        self.histories = [arena.place(torch.ones(6, 5)) for _ in self.plans]
        self.inputs: list[Any] = []

    def batch(self, plans: Any, rows: Any, cols: Any, world: Any, rank: Any) -> Any:
        return torch.classes.minifloat.GatherBatch(
            [shard_cast(row, False, rows, cols) for _, row, _ in plans],
            [shard_cast(col, True, rows, cols) for _, _, col in plans],
            [mode for mode, _, _ in plans],
            world,
            rank,
        )

    def args(self) -> dict[str, Any]:
        return {
            "plans": self.plans,
            "rows": self.rows,
            "cols": self.cols,
            "world": self.world,
            "rank": self.rank,
            "shards": self.shards,
            "histories": self.histories,
            "selection": self.selection,
        }

    def cast(self, **args: Any) -> tuple[Any, list[Any]]:
        """Measures and casts: what every valid call does."""
        batch = self.batch(*(args[name] for name in ("plans", "rows", "cols", "world", "rank")))
        batch.exchanged(args["selection"])
        batch.hold_shards(args["shards"], args["histories"])
        exchange = torch.classes.minifloat.AmaxExchange([batch])
        amaxes = exchange.measure(args["selection"])
        exchange.accept(amaxes if args.get("exchanged") is None else args["exchanged"])
        return batch, batch.cast(args["selection"], True)


@call("GatherBatch.exchanged")
@call("GatherBatch.hold_shards")
@call("GatherBatch.cast")
@call("AmaxExchange.measure")
@call("AmaxExchange.accept")
def _cast(rng: Random, arena: Arena) -> Call:
    weights = Weights(rng, arena)
    return Call(weights.cast, {**weights.args(), "exchanged": None})


def _target(rng: Random, arena: Arena, weights: Weights, plan: Any) -> list[torch.Tensor]:
    """Makes the six tensors of one whole weight."""
    _, row, col = plan
    found: list[torch.Tensor] = []
    for spec, columnwise in ((row, False), (col, True)):
        cast = shard_cast(spec, columnwise, weights.rows, weights.cols)
        found += [arena.place(torch.zeros_like(t)) for t in cast.new_operand(torch.empty(0))]
    return found


@call("GatherBatch.count_writes")
@call("GatherBatch.is_written")
def _count_writes(rng: Random, arena: Arena) -> Call:
    weights = Weights(rng, arena)
    batch, _ = weights.cast(**weights.args())

    def run(tensors: Any) -> None:
        batch.count_writes(tensors)
        batch.is_written()

    return Call(run, {"tensors": weights.shards}, reads_memory=False)


@call("GatherBatch.hold_targets")
@call("GatherBatch.hold_outputs")
@call("GatherBatch.fill")
def _fill(rng: Random, arena: Arena) -> Call:
    weights = Weights(rng, arena)
    _, inputs = weights.cast(**weights.args())
    outputs = [arena.place(t.repeat(weights.world)) for each in inputs for t in each]
    targets = [t for plan in weights.plans for t in _target(rng, arena, weights, plan)]

    def run(outputs: Any, targets: Any, alone: Any, keeps_row: Any, **args: Any) -> None:
        batch, _ = weights.cast(**args)
        batch.hold_targets(targets)
        # One weight is filled alone: the others lose no memory, which is the arena's.
        for weight, inputs in enumerate(batch.cast(args["selection"], True)):
            of_weight, outputs = outputs[: len(inputs)], outputs[len(inputs) :]
            batch.hold_outputs(of_weight)
            batch.fill(of_weight, args["selection"], weight, alone, keeps_row)

    args = {"outputs": outputs, "targets": targets}
    args |= {"alone": rng.random() < 0.5, "keeps_row": rng.random() < 0.5}
    # Directions that a gather does not bring lose their memory.
    return Call(run, {**args, **weights.args()}, {"targets"}, is_of_models=True)


# ---- gradients in codes --------------------------------------------------------------------------


@call("message_bytes")
def _message_bytes(rng: Random, arena: Arena) -> Call:
    spec = rng.choice((*SENT, "bf16", "mxfp4+sr"))
    return op_call("message_bytes", spec=spec, cols=rng.choice((0, 1, 300, 2**40)))


@call("quantize_messages")
def _quantize_messages(rng: Random, arena: Arena) -> Call:
    shape = rng.choice((0, 1, 3)), rng.choice((0, 1, 130, 512))
    x = arena.place(values(rng, shape, rng.choice(FLOATS)))
    args = {"x": x, "spec": rng.choice(SENT) + rng.choice(("", "+sr")), "stream": rng.randrange(9)}
    return op_call("quantize_messages", rng=arena.place(torch.tensor([1, 2])), **args)


@call("sum_messages")
def _sum_messages(rng: Random, arena: Arena) -> Call:
    spec, cols, ranks = rng.choice((*SENT, "bf16")), rng.choice((1, 130, 512)), rng.choice((1, 3))
    size = ranks, torch.ops.minifloat.message_bytes(spec, cols)
    messages = arena.place(torch.randint(0, 256, size, dtype=torch.uint8))
    out = arena.place(torch.zeros(cols, dtype=rng.choice(FLOATS)))
    return op_call("sum_messages", messages=messages, spec=spec, out=out)


@call("mf.distributed.quantize_gradients_")
def _quantize_gradients(rng: Random, arena: Arena) -> Call:
    """Shards a model over a world of one rank, which reduces nothing."""

    def run(spec: Any, seed: Any, x: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model = fully_shard(torch.nn.Linear(32, 16))
            mf.distributed.quantize_gradients_(model, spec, seed=seed)
            model(x).sum().backward()
            mf.load_training_state(model, mf.training_state(model))
        finally:
            mf.distributed.destroy_process_group()

    args = {"spec": rng.choice(SENT) + rng.choice(("", "+sr")), "seed": 0, "x": torch.randn(4, 32)}
    return Call(run, args, is_of_models=True)
