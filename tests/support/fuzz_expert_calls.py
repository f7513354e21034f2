"""More valid calls for the op fuzzer: what lies between the products of experts."""

from __future__ import annotations

from random import Random
from typing import Any

import minifloat as mf
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.fuzz_calls import FLOATS, Call, call, op_call, ops, with_backward
from tests.support.fuzz_values import Arena, values

DTYPES = (torch.uint8, torch.float32, torch.bfloat16, torch.int64)


def _swiglu(rng: Random, arena: Arena) -> dict[str, Any]:
    rows, width = rng.choice((0, 1, 3, 17)), rng.choice((0, 1, 8, 40, 261))
    dtype, is_fused = rng.choice(FLOATS), rng.random() < 0.5
    shape = (rows, 2 * width if is_fused else width)
    args: dict[str, Any] = {"product": arena.place(values(rng, shape, dtype)), "other": None}
    if not is_fused:
        args["other"] = arena.place(values(rng, shape, dtype))
    args["weights"] = arena.place(torch.rand(rows))
    args |= {"limit": rng.choice((None, 1.0)), "alpha": rng.choice((1.702, 1.0))}
    args["interleaved"] = is_fused and rng.random() < 0.5
    args["pairs"] = arena.place(torch.randperm(rows).int()) if rng.random() < 0.5 else None
    ends = torch.tensor([rows // 2, rows - rows // 4], dtype=torch.int32)
    has_groups = rng.random() < 0.5
    args["groups"] = arena.place(ops.group_table(ends, rows)) if has_groups else None
    return args


@call("swiglu")
def _forward(rng: Random, arena: Arena) -> Call:
    return op_call("swiglu", **_swiglu(rng, arena))


@call("swiglu_backward")
def _backward(rng: Random, arena: Arena) -> Call:
    args = _swiglu(rng, arena)
    product, other = args["product"], args["other"]
    width = product.shape[1] // (2 if other is None else 1)
    dh = arena.place(values(rng, (product.shape[0], width), product.dtype))
    args["amaxes"] = args["groups"] is not None and rng.random() < 0.5
    return op_call("swiglu_backward", dh=dh, **args)


@call("quantize_swiglu")
def _cast(rng: Random, arena: Arena) -> Call:
    args = _swiglu(rng, arena)
    specs = ("", "mxfp8", "e4m3/row", "e4m3/tensor", "e4m3/1x128", "nvfp4", "mxfp4+sr+rht")
    args["row"], args["col"] = rng.choice(specs[1:]), rng.choice(specs)
    args["rng"] = arena.place(torch.tensor([rng.randrange(2**40), 1]))
    if args["groups"] is not None and rng.random() < 0.5:
        args["row_ids"] = arena.place(torch.randperm(args["product"].shape[0]).int())
    args["amaxes_of_columns"] = (args["row"], args["col"]) == ("e4m3/row", "")
    return op_call("quantize_swiglu", **args)


@call("swiglu_operands")
def _operands(rng: Random, arena: Arena) -> Call:
    args = _swiglu(rng, arena)
    args["recipe"] = rng.choice(("mxfp8", "fp8_rowwise", "fp8_blockwise", "mxfp4", "nvfp4", "bf16"))
    args |= {"rowwise": rng.random() < 0.7, "columnwise": rng.random() < 0.7}
    args["rng"] = arena.place(torch.tensor([rng.randrange(2**40), 1]))
    return op_call("swiglu_operands", **args)


def _numbers(rng: Random, arena: Arena, shape: tuple[int, ...], end: int, least: int = 0) -> Tensor:
    return arena.place(torch.randint(least, end, shape, dtype=torch.int32))


@call("take_rows")
def _take_rows(rng: Random, arena: Arena) -> Call:
    tokens, slots = rng.choice((1, 5, 40)), rng.choice((1, 2, 8))
    shape = (tokens, *rng.choice(((), (1,), (3,), (64,), (4, 8))))
    x = arena.place(torch.randint(0, 9, shape).to(rng.choice(DTYPES)))
    index, places = _numbers(rng, arena, (rng.choice((0, 1, 33)),), tokens * slots), None
    if rng.random() < 0.5:
        order = torch.randperm(tokens * slots)
        index = arena.place(order.int())
        places = arena.place(order.argsort().view(tokens, slots).int())
    return op_call("take_rows", x=x, index=index, slots=slots, places=places)


@call("pack_rows")
def _pack_rows(rng: Random, arena: Arena) -> Call:
    tokens, rows = rng.choice((1, 5, 40)), rng.choice((0, 1, 33))
    fields, slots = [], []
    for _ in range(rng.choice((1, 2, 6))):
        slots.append(rng.choice((0, 1, 3)))
        columns = rng.choice(((), (1,), (3,), (64,)))
        field = torch.randint(0, 9, (rows if slots[-1] == 0 else tokens, *columns))
        fields.append(arena.place(field.to(rng.choice(DTYPES))))
    index = _numbers(rng, arena, (rows,), tokens)
    rows_from = _numbers(rng, arena, (rng.choice((0, 7)),), rows, least=-1)
    return op_call(
        "pack_rows",
        fields=fields,
        index=index,
        slots=slots,
        rows_from=rows_from if rng.random() < 0.5 else None,
    )


@call("row_layout")
def _row_layout(rng: Random, arena: Arena) -> Call:
    return op_call("row_layout", field_bytes=[rng.randrange(99) for _ in range(rng.randrange(7))])


@call("add_slots")
def _add_slots(rng: Random, arena: Arena) -> Call:
    rows, tokens, slots, cols = (rng.choice(n) for n in ((1, 9), (0, 1, 7), (0, 1, 5), (0, 1, 72)))
    x = arena.place(values(rng, (rows, cols), rng.choice(FLOATS)))
    base = arena.place(torch.randn(tokens, cols)) if rng.random() < 0.5 else None
    return op_call(
        "add_slots",
        rows=x,
        places=_numbers(rng, arena, (tokens, slots), rows, least=-1),
        base=base,
        pairs=arena.place(torch.arange(rows).int()) if rng.random() < 0.5 else None,
    )


@call("grouped_mlp")
def _mlp(rng: Random, arena: Arena) -> Call:
    tokens, slots, count = rng.choice((1, 9, 33)), rng.choice((1, 2)), rng.choice((2, 3))
    rows, dtype, fused = tokens * slots, rng.choice(FLOATS), rng.random() < 0.5
    pairs = torch.randperm(rows)
    offs = sorted(rng.randrange(rows + 1) for _ in range(count))
    shapes = [(count, 32, 64 if fused else 32)] * (1 if fused else 2) + [(count, 32, 32)]
    n = len(shapes)
    order = [pairs, pairs.argsort().view(tokens, slots), torch.tensor(offs), pairs]
    args: dict[str, Any] = {"x": arena.place(values(rng, (tokens, 32), dtype))}
    args["weights"] = arena.place(torch.rand(tokens, slots))
    args["order"] = [arena.place(t.int()) for t in order]
    args["matrices"] = [arena.place(values(rng, shape, dtype)) for shape in shapes]
    for t in (args["x"], args["weights"], *args["matrices"]):
        t.requires_grad_(rng.random() < 0.5)
    biases = [arena.place(torch.randn(count, shape[2])) for shape in shapes[:-1]]
    args["biases"] = biases if rng.random() < 0.3 else [None] * (n - 1)
    args["recipes"] = [rng.choice(mf.presets())] * n
    args["sums"] = rng.random() < 0.7
    args["base"] = arena.place(torch.randn(tokens, 32)) if args["sums"] else None
    args |= {"limit": rng.choice((None, 1.0)), "alpha": 1.702, "interleaved": False}
    args["rng"] = [arena.place(torch.tensor([1, 2, 3]))] * n
    args["first_expert"] = rng.randrange(3)
    args["amax_history"] = [arena.place(torch.zeros(6, count, 3)) for _ in range(n)]
    args |= {"streams": [3] * n, "recompute": [rng.choice(("", "weight"))] * n}
    recipe, args["weight_operands"] = args["recipes"][0], None
    if recipe in ("mxfp8", "fp8_rowwise", "fp8_tensorwise") and rng.random() < 0.5:
        codes = [ops.layer_operands(b.detach().mT, recipe, "w") for b in args["matrices"]]
        args["weight_operands"] = [arena.place(t) for of_one in codes for t in of_one]
    one = op_call("grouped_mlp", **args)
    return Call(with_backward(one.run), args, one.writes)


@call("GradientCodes.set")
def _gradient_codes(rng: Random, arena: Arena) -> Call:
    """Sets codes. Their sizes are checked by the op that takes them in backward."""

    def run(tensors: Any) -> None:
        torch.classes.minifloat.GradientCodes().set(tensors)

    codes = arena.place(torch.zeros(5, 32, dtype=torch.uint8))
    return Call(
        run, {"tensors": [codes, arena.place(torch.ones(5, 1)), arena.place(torch.ones(5))]}
    )


@call("mf.grouped_mlp of ranks")
def _mlp_of_ranks(rng: Random, arena: Arena) -> Call:
    """Sends the rows of experts over a world of one rank.

    Tensors are not drawn: torch's own ops read rows before they are sent, without a check that a
    tensor lies inside its memory.
    """

    def run(dispatch: Any, capacity: Any, recipe: Any, first_expert: Any, limit: Any) -> None:
        indices = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
        given = torch.randn(4, 32), torch.randn(3, 64, 32), torch.randn(3, 32, 32), indices
        state = {"rng": torch.tensor([1, 2]), "amax_history": [torch.ones(6, 3, 3)] * 2}
        options = {"dispatch": dispatch, "capacity": capacity, "first_expert": first_expert}
        options |= {"dropped": torch.zeros(1, dtype=torch.int64), "limit": limit}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            group = dist.group.WORLD
            mf.grouped_mlp(*given, torch.rand(4, 2), recipe, group=group, **state, **options)
        finally:
            dist.destroy_process_group()

    args = {
        "dispatch": rng.choice(("compute_dtype", "codes")),
        "capacity": rng.choice((None, 3, "all")),
    }
    args |= {"recipe": rng.choice(mf.presets()), "first_expert": 0, "limit": rng.choice((None, 7))}
    return Call(run, args, is_of_models=True)
