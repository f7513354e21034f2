"""More valid calls for the op fuzzer: tables of groups, and ops with groups."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import minifloat as mf
import torch
import torch.distributed as dist
from minifloat.spec import Spec
from torch import Tensor

from tests.support.fuzz_calls import Call, call, op_call, ops, with_backward
from tests.support.fuzz_values import Arena, values
from tests.support.specs import SPECS, flagged, has_bf16_values

FLOATS = (torch.float32, torch.bfloat16)
FLAGS = ("", "+sr", "+rht", "+rht64", "+sr+rht128")
SPECS_1D = [spec for spec in SPECS if Spec.parse(spec).block[0] <= 1]
FP4_SPECS = ("mxfp4", "nvfp4+pow2")


def _ends(rng: Random, arena: Arena, rows: int) -> Tensor:
    ends = [rng.randrange(-2, rows + 3) for _ in range(rng.choice((0, 1, 2, 5)))]
    return arena.place(torch.tensor(sorted(ends), dtype=torch.int32))


def _values(rng: Random, arena: Arena) -> dict[str, Any]:
    """Draws values, and the table of their groups."""
    shape = [rng.choice((0, 1, 17, 48, 130)), rng.choice((1, 16, 33, 64, 130))]
    x = arena.place(values(rng, shape, rng.choice(FLOATS)))
    table = ops.group_table(_ends(rng, arena, shape[0]), shape[0])
    return {"x": x, "groups": arena.place(table)}


def _unit(rng: Random, *least: int) -> int:
    return rng.choice([0, *(unit for unit in (16, 32, 64, 128) if unit >= max(least))])


@call("group_table")
@call("mf.tensor.group_table")
def _group_table(rng: Random, arena: Arena) -> Call:
    rows = rng.choice((0, 1, 40, 1 << 20))
    return op_call("group_table", offs=_ends(rng, arena, rows), rows=rows, op="grouped_mlp")


@call("check_groups")
@call("mf.tensor.check_groups")
def _check_groups(rng: Random, arena: Arena) -> Call:
    def run(enabled: Any) -> None:
        function = rng.choice((ops.check_groups, mf.tensor.check_groups))
        function(function(enabled))

    return Call(run, {"enabled": rng.random() < 0.5})


@call("amax of groups")
def _amax(rng: Random, arena: Arena) -> Call:
    spec = rng.choice(("e4m3/tensor", "e4m3/row", "nvfp4", "nvfp4+rht"))
    return op_call("amax", **_values(rng, arena), spec=spec, columnwise=rng.random() < 0.5)


@call("quantize of groups")
def _quantize(rng: Random, arena: Arena) -> Call:
    args = _values(rng, arena)
    rows, count = args["x"].shape[0], args["groups"].shape[1] - 1
    row, col = (flagged(rng.choice(SPECS_1D), rng.choice(FLAGS)) for _ in range(2))
    row, col = rng.choice(((row, col), (row, ""), ("", col)))
    for side, spec, length in (("row", row, (rows,)), ("col", col, (count, args["x"].shape[1]))):
        shape = length if "/row" in spec else (count,)
        of = Spec.parse(spec or "bf16")
        passed = bool(of.amax_of) and (rng.random() < 0.3 or of.is_delayed)
        args[f"amax_{side}"] = arena.place(torch.ones(shape)) if passed else None
        args[f"stream_{side}"] = rng.randrange(100)
        args[f"decoded_{side}"] = has_bf16_values(spec) and rng.random() < 0.3
    args["group_unit"] = rng.choice((0, 16, 32, 64, 128))
    ids = torch.randint(0, 1 << 20, (rows,), dtype=torch.int32)
    args["row_ids"] = arena.place(ids) if rng.random() < 0.5 else None
    args["first_expert"] = rng.choice((0, 3, 100))
    args["rng"] = arena.place(torch.tensor([1, 2]))
    args["amaxes_of_columns"] = (
        "/row" in row and "rht" not in row and col == "" and rng.random() < 0.5
    )
    return op_call("quantize", **args, row=row, col=col)


@call("mf.tensor.quantize of groups")
def _public_quantize(rng: Random, arena: Arena) -> Call:
    args = {**_values(rng, arena), "spec": flagged(rng.choice(SPECS_1D), rng.choice(FLAGS))}
    if "delayed" in args["spec"]:
        args["amax"] = arena.place(torch.ones(args["groups"].shape[1] - 1))
    units = {"columnwise": rng.random() < 0.5, "group_unit": rng.choice((0, 16, 32, 64, 128))}
    return Call(
        mf.tensor.quantize, {**args, **units, "first_expert": rng.randrange(4), "row_ids": None}
    )


def _quantized(rng: Random, arena: Arena, specs: Any) -> mf.tensor.Quantized:
    args = _values(rng, arena)
    x, table = args["x"].nan_to_num(0.5), args["groups"]
    spec, columnwise = rng.choice(specs), rng.random() < 0.5
    amax = torch.ones(table.shape[1] - 1) if "delayed" in spec else None
    q = mf.tensor.quantize(x, spec, columnwise=columnwise, groups=table, amax=amax)
    placed = {name: arena.place(getattr(q, name)) for name in ("codes", "scale", "amax")}
    return dataclasses.replace(q, **placed)


def _codes(q: mf.tensor.Quantized) -> dict[str, Any]:
    groups = {"groups": q.groups, "group_unit": q.group_unit}
    return {"codes": q.codes, "scale": q.scale, "spec": q.spec, "cols": q.shape[-1], **groups}


@call("dequantize of groups")
def _dequantize(rng: Random, arena: Arena) -> Call:
    q = _quantized(rng, arena, SPECS_1D)
    return op_call("dequantize", **_codes(q), amax=q.amax, dtype=rng.choice(FLOATS))


@call("decode of groups")
def _decode(rng: Random, arena: Arena) -> Call:
    return op_call("decode", **_codes(_quantized(rng, arena, SPECS_1D)))


@call("fp4_as_fp8 of groups")
def _fp4_as_fp8(rng: Random, arena: Arena) -> Call:
    q = _quantized(rng, arena, FP4_SPECS)
    return op_call("fp4_as_fp8", **_codes(q), amax=q.amax)


@call("mf.tensor.dequantize of groups")
def _public_dequantize(rng: Random, arena: Arena) -> Call:
    q = _quantized(rng, arena, SPECS_1D)
    return Call(mf.tensor.dequantize, {"q": q, "dtype": rng.choice(FLOATS)})


@call("hadamard of groups")
def _hadamard(rng: Random, arena: Arena) -> Call:
    points = rng.choice((16, 32, 64, 128))
    args = {**_values(rng, arena), "points": points, "columnwise": rng.random() < 0.5}
    return op_call("hadamard", **args, signs=1, group_unit=_unit(rng, points))


# ---- products ------------------------------------------------------------------------------------


def _sides(rng: Random, arena: Arena, specs: tuple[str, ...]) -> dict[str, Any]:
    """Draws operands along rows, of a matrix a group, or along the contraction dimension."""
    rows, k = rng.choice((1, 17, 48)), rng.choice((16, 33, 64))
    table = ops.group_table(_ends(rng, arena, rows), rows)
    spec, along_rows = rng.choice(specs), rng.random() < 0.5
    shapes = ((rows, k), (table.shape[1] - 1, 24, k)) if along_rows else ((rows, k), (rows, 24))
    args: dict[str, Any] = {}
    unit = 0
    for name, shape in zip("ab", shapes):
        x = torch.randn(shape)
        parts = [x if along_rows else x.t().contiguous(), torch.empty(0), torch.empty(0)]
        if spec != "bf16":
            groups = {} if len(shape) == 3 else {"groups": table}
            q = mf.tensor.quantize(x, spec, columnwise=not along_rows, **groups)
            parts, unit = [q.codes, q.scale, q.amax], max(unit, q.group_unit)
        names = (name, f"{name}_scale", f"{name}_amax")
        args |= {key: arena.place(t) for key, t in zip(names, parts)}
    unit = unit if spec != "bf16" or along_rows else 16
    args |= {"k": k if along_rows else rows, "product": f"{spec}*{spec}", "group_unit": unit}
    return {**args, "groups": arena.place(table)}


@call("scaled_mm of groups")
def _scaled_mm(rng: Random, arena: Arena) -> Call:
    args = _sides(rng, arena, ("mxfp8", "e4m3/row", "nvfp4", "bf16"))
    args |= {"bias": None, "out_dtype": rng.choice(FLOATS), "zero_tail": rng.random() < 0.5}
    return op_call("scaled_mm", **args)


@call("block_scaled_grouped_operands")
def _block_scaled_grouped(rng: Random, arena: Arena) -> Call:
    args = _sides(rng, arena, ("mxfp8", "mxfp4", "nvfp4"))
    return op_call("block_scaled_grouped_operands", **args)


@call("scaled_grouped_mm")
@call("mf.functional.scaled_grouped_mm")
def _scaled_grouped_mm(rng: Random, arena: Arena) -> Call:
    rows, k, n, count = (rng.choice(sizes) for sizes in ((1, 17, 48), (16, 64), (16, 24), (1, 3)))
    offs = sorted(rng.randrange(-2, rows + 3) for _ in range(count))
    dtype = rng.choice(FLOATS)
    args: dict[str, Any] = {"recipe": rng.choice([*mf.presets(), "fp8_delayed", "nvfp4"])}
    args["A"] = arena.place(values(rng, (rows, k), dtype)).requires_grad_(rng.random() < 0.5)
    args["B"] = arena.place(values(rng, (count, k, n), dtype)).requires_grad_(rng.random() < 0.5)
    args["offs"] = arena.place(torch.tensor(offs, dtype=torch.int32))
    args["bias"] = arena.place(torch.randn(count, n)) if rng.random() < 0.3 else None
    args["rng"] = arena.place(torch.tensor([1, 2, 3]))
    args["amax_history"] = arena.place(torch.zeros(6, count, 3))
    args["row_ids"] = arena.place(torch.arange(rows).int()) if rng.random() < 0.5 else None
    args |= {"first_expert": rng.randrange(3), "tail": rng.choice(("zero", "undefined"))}
    args["out_dtype"] = rng.choice(FLOATS)
    one = op_call("scaled_grouped_mm", **args)
    run = rng.choice((one.run, mf.functional.scaled_grouped_mm))
    if run is one.run:
        args["recompute"] = rng.choice(("", "weight"))
    return Call(with_backward(run), args, one.writes)


@call("scaled_grouped_mm_sharded")
def _scaled_grouped_mm_sharded(rng: Random, arena: Arena) -> Call:
    """Of one rank: a call of more needs the others."""
    rows, count = rng.choice((1, 17, 48)), rng.choice((1, 3))
    offs = sorted(rng.randrange(-2, rows + 3) for _ in range(count))
    dtype = rng.choice(FLOATS)
    args: dict[str, Any] = {"recipe": rng.choice([*mf.presets(), "fp8_delayed", "nvfp4"])}
    args["A"] = arena.place(values(rng, (rows, 128), dtype))
    args["B"] = arena.place(values(rng, (count, 128, 256), dtype))
    args["offs"] = arena.place(torch.tensor(offs, dtype=torch.int32))
    args |= {"group": "", "rank": 0, "ranks": 1, "weight_dim": rng.choice((0, 1))}
    args["weight_parts"] = 1 if args["weight_dim"] else rng.choice((1, 2))
    args["rng"] = arena.place(torch.tensor([1, 2, 3]))
    args["amax_history"] = arena.place(torch.zeros(6, count, 3))
    args["row_ids"] = arena.place(torch.arange(rows).int()) if rng.random() < 0.5 else None
    args["recompute"] = rng.choice(("", "weight"))
    one = op_call("scaled_grouped_mm_sharded", **args)
    return Call(with_backward(one.run), args, one.writes)


@call("scaled_grouped_mm_backward")
def _scaled_grouped_mm_backward(rng: Random, arena: Arena) -> Call:
    rows, k, n, count = (rng.choice(sizes) for sizes in ((1, 17, 48), (16, 64), (16, 24), (1, 3)))
    offs = sorted(rng.randrange(-2, rows + 3) for _ in range(count))
    dtype = rng.choice(FLOATS)
    args: dict[str, Any] = {"recipe": rng.choice([*mf.presets(), "fp8_delayed", "nvfp4"])}
    args["grad"] = arena.place(values(rng, (rows, n), dtype))
    args["A"] = arena.place(values(rng, (rows, k), dtype))
    args["B"] = arena.place(values(rng, (count, k, n), dtype))
    args["offs"] = arena.place(torch.tensor(offs, dtype=torch.int32))
    args["needed"] = [rng.random() < 0.7, rng.random() < 0.7, False]
    args["rng"] = arena.place(torch.tensor([1, 2, 3]))
    args["amax_history"] = arena.place(torch.zeros(6, count, 3))
    args["row_ids"] = arena.place(torch.arange(rows).int()) if rng.random() < 0.5 else None
    args |= {"first_expert": rng.randrange(3), "tail": rng.choice(("zero", "undefined"))}
    if rng.random() < 0.3:
        args["recipe"] = "mxfp8"
        args["grad_rows_from"] = arena.place(torch.randint(0, rows, (rows,)).int())
    return op_call("scaled_grouped_mm_backward", **args)


@call("mf.MoE")
@call("mf.grouped_mlp")
def _experts(rng: Random, arena: Arena) -> Call:
    def run(hidden: Any, top_k: Any, recipe: Any, name: Any, seed: Any, x: Any) -> None:
        layer = mf.MoE(32, hidden, 3, top_k, recipe=recipe, name=name, seed=seed)
        layer(x)
        indices, weights = layer.router(x)
        w13 = [layer.experts.w1, layer.experts.w3]
        state = torch.tensor([1, 2])
        histories = [torch.ones(6, 3, 3) for _ in range(3)]
        mf.grouped_mlp(
            x, w13, layer.experts.w2, indices, weights, recipe, rng=state, amax_history=histories
        )

    recipes = [name for name in mf.presets() if not mf.Recipe(name).is_delayed]
    args = {"hidden": 16, "top_k": 2, "recipe": rng.choice(recipes), "name": "a", "seed": 0}
    return Call(run, {**args, "x": torch.randn(4, 32)}, is_of_models=True)


@call("mf.distributed.destroy_process_group")
@call("mf.expert_parallel")
@call("mf.moe.average_expert_gradients")
@call("mf.moe.balance_loss")
def _expert_parallel(rng: Random, arena: Arena) -> Call:
    """Cuts a layer over a world of one rank."""

    def run(dispatch: Any, capacity: Any, dispatcher: Any, recipe: Any, x: Any) -> None:
        layer = mf.MoE(32, 16, 3, 2, recipe=recipe, balance="loss", balance_loss=0.01)
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            options = {"dispatch": dispatch, "capacity": capacity, "dispatcher": dispatcher}
            mf.expert_parallel(layer, dist.group.WORLD, **options)
            y = layer(x)
            (y.float().sum() + mf.moe.balance_loss(layer)).backward()
            mf.moe.average_expert_gradients(layer)
            mf.step(layer)
        finally:
            mf.distributed.destroy_process_group()

    args = {
        "dispatch": rng.choice(("compute_dtype", "codes")),
        "capacity": rng.choice((None, 3, "all")),
        "dispatcher": None,
    }
    args |= {"recipe": rng.choice(mf.presets()), "x": torch.randn(4, 32)}
    return Call(run, args, is_of_models=True)
