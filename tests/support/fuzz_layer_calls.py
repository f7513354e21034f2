"""Valid calls for the op fuzzer: linear layers, feed-forwards, and their operands."""

from __future__ import annotations

from random import Random
from typing import Any

import minifloat as mf
import torch
from torch import Tensor

from tests.support.fuzz_calls import FLOATS, Call, call, matrix, op_call, ops, weight, with_backward
from tests.support.fuzz_values import Arena, values
from tests.support.specs import SPECS

CODES = torch.classes.minifloat.WeightCodes(True)


def _layer_state(rng: Random, arena: Arena) -> dict[str, Any]:
    state = torch.zeros(6, 1 + rng.choice((1, 4)))
    return {
        "recipe": rng.choice([*mf.presets(), "fp8_delayed", "nvfp4"]),
        "rng": arena.place(torch.tensor([1, 2, 3])),
        "amax_history": arena.place(state),
    }


@call("linear")
def _linear(rng: Random, arena: Arena) -> Call:
    x = matrix(rng, arena, True).nan_to_num(0.0)
    shape = (rng.choice((1, 16, 48)), x.shape[-1])
    w = values(rng, shape, x.dtype)
    args: dict[str, Any] = {**_layer_state(rng, arena), "stream": 0}
    args["x"] = arena.place(x).requires_grad_(rng.random() < 0.5)
    args["weight"] = arena.place(w).requires_grad_(rng.random() < 0.5)
    if rng.random() < 0.1:
        args["weight"] = weight(rng, arena, shape)
    args["bias"] = arena.place(torch.randn(shape[0])) if rng.random() < 0.5 else None
    for name, of in (("x_operands", "x"), ("weight_operands", "w")):
        args[name] = None
        if args["recipe"] in ("mxfp8", "fp8_rowwise", "nvfp4_served") and rng.random() < 0.2:
            of_what = x if of == "x" else w
            given = ops.layer_operands(of_what, args["recipe"], of)
            args[name] = [arena.place(t) for t in given]
    if rng.random() < 0.2:
        args |= {"weight_cache": CODES.id(), "training": rng.random() < 0.5}
    args["recompute"] = rng.choice(("", "weight"))
    args["accumulate"] = rng.choice(("", "", "grad", "main_grad", "main_grad"))
    is_added = args["accumulate"] == "main_grad" or rng.random() < 0.05
    args["received"] = rng.choice(("", "empty", "zeros")) if is_added else ""
    args["main_grad"] = None
    if is_added:
        args["main_grad"] = arena.place(torch.zeros(shape))
    one = op_call("linear", **args)
    return Call(with_backward(one.run), args, one.writes)


@call("WeightCodes.operands")
def _cached_operands(rng: Random, arena: Arena) -> Call:
    def run(reads: int, **args: Any) -> None:
        cache = torch.classes.minifloat.WeightCodes(True)
        for _ in range(1 + reads % 3):
            cache.operands(*args.values())

    x, w = matrix(rng, arena), matrix(rng, arena)
    args: dict[str, Any] = {"weight": w, "matrix": w, "x": x.to(w.dtype)}
    args |= {"recipe": rng.choice(("mxfp8", "fp8_delayed")), "columnwise": rng.random() < 0.5}
    args |= {"training": rng.random() < 0.5, "saves_weight": rng.random() < 0.5}
    args |= {"amax_history": arena.place(torch.zeros(6, 5)), "main_grad": None, "fingerprint": None}
    return Call(run, {"reads": 2, **args}, {"amax_history"})


def _of_cache(name: str) -> Any:
    def make(rng: Random, arena: Arena) -> Call:
        return Call(lambda: getattr(torch.classes.minifloat.WeightCodes(True), name)(), {})

    return make


for _name in ("id", "forget", "start_over", "capture", "held"):
    call(f"WeightCodes.{_name}")(_of_cache(_name))


@call("count_step")
def _count_step(rng: Random, arena: Arena) -> Call:
    return op_call("count_step")


@call("linear_sharded")
def _linear_sharded(rng: Random, arena: Arena) -> Call:
    """Of one rank: a call of more needs the others."""
    state, dim = _layer_state(rng, arena), rng.choice((0, 1))
    x = values(rng, (2, 128, 128), rng.choice(FLOATS)).nan_to_num(0.0)
    args: dict[str, Any] = {**state, "stream": 0, "group": "", "rank": 0, "ranks": 1}
    is_cut = dim == 0 and ops.token_unit(state["recipe"]) > 0 and rng.random() < 0.5
    args |= {"weight_dim": dim, "token_dim": rng.choice((0, 1)) if is_cut else None}
    args["x"] = arena.place(x).requires_grad_(rng.random() < 0.5)
    w = values(rng, (128, 128), x.dtype)
    args["weight"] = arena.place(w).requires_grad_(rng.random() < 0.5)
    args["bias"] = arena.place(torch.randn(128)) if rng.random() < 0.5 else None
    args |= {"x_operands": None, "weight_operands": None, "gathered": None}
    args["recompute"] = rng.choice(("", "weight"))
    if rng.random() < 0.3:
        args["gathered"] = torch.classes.minifloat.GatheredInput(rng.choice((1, 2)))
    one = op_call("linear_sharded", **args)
    return Call(with_backward(one.run), args, one.writes)


@call("shard_multiple")
def _shard_multiple(rng: Random, arena: Arena) -> Call:
    spec, columnwise = rng.choice(SPECS), rng.random() < 0.5
    return op_call("shard_multiple", spec=spec, columnwise=columnwise, dim=rng.randrange(2))


@call("token_unit")
def _token_unit(rng: Random, arena: Arena) -> Call:
    return op_call("token_unit", recipe=rng.choice(mf.presets()))


@call("operand_names")
def _operand_names(rng: Random, arena: Arena) -> Call:
    return op_call("operand_names")


@call("linear_group")
def _linear_group(rng: Random, arena: Arena) -> Call:
    x = matrix(rng, arena, True)
    count = rng.choice((1, 2, 3))
    weights = [values(rng, (rng.choice((1, 16, 48)), x.shape[-1]), x.dtype) for _ in range(count)]
    state = _layer_state(rng, arena).items()
    args = {k: [v] * count if isinstance(v, Tensor) else v for k, v in state}
    args["x"] = arena.place(x).requires_grad_(rng.random() < 0.5)
    args["weights"] = [arena.place(w).requires_grad_(rng.random() < 0.5) for w in weights]
    args["biases"] = [rng.choice((None, arena.place(torch.ones(w.shape[0])))) for w in weights]
    one = op_call("linear_group", **args)
    return Call(with_backward(one.run), args, one.writes)


@call("mlp")
def _mlp(rng: Random, arena: Arena) -> Call:
    x = matrix(rng, arena, True).nan_to_num(0.0)
    hidden, count = rng.choice((1, 16, 48)), rng.choice((2, 3))
    shapes = [(hidden, x.shape[-1])] * (count - 1) + [(rng.choice((1, 32)), hidden)]
    state = _layer_state(rng, arena).items()
    args = {k: [v] * count if isinstance(v, Tensor) else v for k, v in state}
    args["x"] = arena.place(x).requires_grad_(rng.random() < 0.5)
    weights = [arena.place(values(rng, shape, x.dtype)) for shape in shapes]
    args["weights"] = [w.requires_grad_(rng.random() < 0.5) for w in weights]
    args["biases"] = [rng.choice((None, arena.place(torch.ones(n)))) for n, _ in shapes]
    args |= {"streams": None, "x_operands": None, "weight_operands": None}
    args["activation"] = rng.choice(("silu", "gelu", "gelu_tanh"))
    args["recompute"] = rng.choice(("", "weight"))
    args["accumulate"] = rng.choice(("", "", "grad", "main_grad"))
    args["received"], args["main_grads"] = "", None
    if args["accumulate"] == "main_grad":
        args["received"] = rng.choice(("", "empty", "zeros"))
        args["main_grads"] = [arena.place(torch.zeros(w.shape)) for w in args["weights"]]
    one = op_call("mlp", **args)
    return Call(with_backward(one.run), args, one.writes)


@call("layer_operands")
def _layer_operands(rng: Random, arena: Arena) -> Call:
    state = _layer_state(rng, arena)
    state["recipe"] = rng.choice(("mxfp8", "fp8_delayed", "fp8_rowwise", "mxfp8_2d"))
    del state["rng"]
    both = {"rowwise": rng.random() < 0.8, "columnwise": rng.random() < 0.8}
    where = {"group": "", "rank": 0, "ranks": 1, "weight_dim": rng.choice((0, 1))}
    of, x = rng.choice("xw"), matrix(rng, arena)
    return op_call("layer_operands", x=x, of=of, token_dim=None, **where, **both, **state)
