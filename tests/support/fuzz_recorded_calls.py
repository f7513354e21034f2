"""Valid calls for the op fuzzer: what torch.compile records of a layer, and steps in a graph."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import minifloat as mf
import torch
from minifloat.spec import Spec

from tests.support.fuzz_calls import Call, call, op_call, ops
from tests.support.fuzz_values import Arena, values

RECIPES = ["fp8_tensorwise", "fp8_rowwise", "mxfp8", "mxfp4", "nvfp4", "nvfp4_pow2"]
ROWS, WIDTH, FEATURES = 48, 64, 32


def _layer(rng: Random, arena: Arena, delayed: bool) -> dict[str, Any]:
    """Draws a recipe and its state, and casts x and W as layers do."""
    recipe = mf.Recipe("fp8_delayed" if delayed else rng.choice(RECIPES))
    dtype = rng.choice((torch.float32, torch.bfloat16))
    x, w = (values(rng, (n, WIDTH), dtype).nan_to_num(0.0) for n in (ROWS, FEATURES))
    state = torch.zeros(6, 1 + rng.choice((1, 4)))
    given = {
        "recipe": recipe.text,
        "rng": arena.place(torch.tensor([1, 2, 3])),
        "amax_history": arena.place(state) if delayed else None,
        "stream": rng.randrange(100),
    }
    specs = [recipe.fprop.a, recipe.wgrad.b, recipe.dgrad.b]
    row, of_x, of_w = (spec.removesuffix("+delayed") for spec in specs)
    draws = {"rng": given["rng"]}
    casts = [ops.quantize(x, row, "", **draws)[:4], ops.quantize(x, "", of_x, **draws)[4:7]]
    casts.append(ops.quantize(w, "", of_w, **draws)[4:7])
    places = [[arena.place(t) for t in tensors] for tensors in casts]
    return {"given": given, "dtype": dtype, "x": places[0], "saved": places[1] + places[2], "w": w}


def _forward(rng: Random, arena: Arena, delayed: bool = False) -> Call:
    layer = _layer(rng, arena, delayed)
    names = ("x_codes", "x_scale", "x_amax", "x_decoded")
    args: dict[str, Any] = dict(zip(names, layer["x"]))
    args |= {"weight": arena.place(layer["w"]), "dtype": layer["dtype"]}
    args["bias"] = arena.place(torch.randn(FEATURES)) if rng.random() < 0.5 else None
    args |= {"needs_dx": rng.random() < 0.8, "recompute": rng.choice(("", "weight"))}
    may_swizzle = layer["given"]["recipe"][:2] in ("mx", "nv")
    args["swizzled"] = may_swizzle and rng.random() < 0.3
    suffix = "_delayed" if delayed else ""
    return op_call(f"linear_forward{suffix}", **args, **layer["given"])


def _backward(rng: Random, arena: Arena, delayed: bool = False) -> Call:
    layer, dtype = _layer(rng, arena, delayed), torch.bfloat16
    saved = layer["saved"]
    if rng.random() < 0.3:  # W is cast again
        saved = [*saved[:3], arena.place(layer["w"]), torch.empty(0), torch.empty(0)]
    args: dict[str, Any] = {"grad": arena.place(values(rng, (ROWS, FEATURES), dtype)), "k": WIDTH}
    args |= {"saved": saved, "needed": [rng.random() < 0.8 for _ in range(3)]}
    args |= {"x_dtype": layer["dtype"], "product_dtype": dtype, "weight_dtype": dtype}
    args["bias_dtype"] = torch.float32
    suffix = "_delayed" if delayed else ""
    return op_call(f"linear_backward{suffix}", **args, **layer["given"])


def _of_experts(rng: Random, arena: Arena, delayed: bool = False, backward: bool = False) -> Call:
    """The same ops with groups of rows."""
    recipe = mf.Recipe("fp8_delayed" if delayed else rng.choice(RECIPES))
    dtype, count = rng.choice((torch.float32, torch.bfloat16)), rng.choice((1, 3))
    ends = torch.tensor(sorted(rng.randrange(ROWS + 1) for _ in range(count))).int()
    table = ops.group_table(ends, ROWS)
    x, b = values(rng, (ROWS, WIDTH), dtype), values(rng, (count, WIDTH, FEATURES), dtype)
    args: dict[str, Any] = {
        "recipe": recipe.text,
        "rng": arena.place(torch.tensor([1, 2, 3])),
        "amax_history": arena.place(torch.zeros(6, count, 3)) if delayed else None,
        "stream": rng.randrange(100),
        "groups": arena.place(table),
        "row_ids": arena.place(torch.arange(ROWS).int()) if rng.random() < 0.5 else None,
        "first_expert": rng.randrange(3),
        "zero_tail": rng.random() < 0.5,
    }
    row, col = (spec.removesuffix("+delayed") for spec in (recipe.fprop.a, recipe.wgrad.b))
    suffix, draws = "_delayed" if delayed else "", {"rng": args["rng"], "groups": table}
    names = ("x_codes", "x_scale", "x_amax", "x_decoded")
    left = [arena.place(t) for t in ops.quantize(x.nan_to_num(0.0), row, "", **draws)[:4]]
    forward = args | dict(zip(names, left)) | {"weight": arena.place(b.nan_to_num(0.0))}
    forward["bias"] = arena.place(torch.ones(count, FEATURES)) if rng.random() < 0.5 else None
    forward |= {"dtype": dtype, "needs_dx": True, "recompute": rng.choice(("", "weight"))}
    forward |= {"out_dtype": rng.choice((None, torch.float32)), "swizzled": False}
    if not backward:
        return op_call(f"linear_forward{suffix}", **forward)
    of_w = [*getattr(ops, f"linear_forward{suffix}")(**forward)[1:]]
    if forward["recompute"]:
        of_w[0] = forward["weight"]
    draws["group_unit"] = max(Spec.parse(s).group_unit for s in (recipe.wgrad.a, recipe.wgrad.b))
    of_x = ops.quantize(x.nan_to_num(0.0), "", col, **draws)[4:7]
    args["saved"] = [arena.place(t) for t in (*of_x, *of_w)]
    args |= {"grad": arena.place(values(rng, (ROWS, FEATURES), dtype)), "k": WIDTH}
    args |= {"needed": [rng.random() < 0.8 for _ in range(3)], "x_dtype": dtype}
    args |= {"product_dtype": dtype, "weight_dtype": dtype, "bias_dtype": torch.float32}
    return op_call(f"linear_backward{suffix}", **args)


for _name in ("forward", "backward"):
    for _delayed in (False, True):
        _suffix = "_delayed" if _delayed else ""
        _make = partial(_of_experts, delayed=_delayed, backward=_name == "backward")
        call(f"linear_{_name}{_suffix} of experts")(_make)


for _name, _make in (("linear_forward", _forward), ("linear_backward", _backward)):
    call(_name)(_make)
    call(f"{_name}_delayed")(partial(_make, delayed=True))


def _mlp(rng: Random, arena: Arena, delayed: bool = False, backward: bool = False) -> Call:
    layer, count = _layer(rng, arena, delayed), rng.choice((2, 3))
    given, dtype = layer["given"], layer["dtype"]
    shapes = [(FEATURES, WIDTH)] * (count - 1) + [(WIDTH, FEATURES)]
    weights = [arena.place(values(rng, shape, dtype).nan_to_num(0.0)) for shape in shapes]
    state: dict[str, Any] = {
        "rng": [given["rng"]] * count,
        "amax_history": [arena.place(torch.zeros(6, 3)) for _ in weights] if delayed else [],
        "streams": [rng.randrange(100) for _ in weights],
    }
    args: dict[str, Any] = {"recipe": given["recipe"]} | state
    args["activation"] = rng.choice(("silu", "gelu", "gelu_tanh"))
    suffix = "_delayed" if delayed else ""
    run = getattr(ops, f"mlp_forward{suffix}")
    names = ("x_codes", "x_scale", "x_amax", "x_decoded")
    forward = args | dict(zip(names, layer["x"])) | {"weights": weights, "dtype": dtype}
    forward["biases"] = [rng.choice((None, arena.place(torch.ones(n)))) for n, _ in shapes]
    forward |= {"needed": [True] * 3, "recompute": rng.choice(("", "weight"))}
    forward["swizzled"] = [False, False]
    if not backward:
        forward["needed"] = [rng.random() < 0.8 for _ in range(3)]
        return op_call(f"mlp_forward{suffix}", **forward)
    saved = [*run(**forward)[1 : 3 * count + 6]]
    if forward["recompute"]:
        for i, w in enumerate(weights):
            saved[3 * (i if i + 1 < count else i + 1)] = w
    args["saved"] = layer["saved"][:3] + [arena.place(t) for t in saved]
    args |= {"grad": arena.place(values(rng, (ROWS, WIDTH), dtype)), "k": WIDTH}
    args["needs_dx"] = rng.random() < 0.8
    for name in ("needs_dw", "needs_db"):
        args[name] = [rng.random() < 0.7 for _ in range(3)]
    args |= {"x_dtype": dtype, "product_dtype": dtype, "weight_dtype": torch.bfloat16}
    args["bias_dtype"] = torch.float32
    return op_call(f"mlp_backward{suffix}", **args)


for _way in ("forward", "backward"):
    for _delayed in (False, True):
        _suffix = "_delayed" if _delayed else ""
        call(f"mlp_{_way}{_suffix}")(partial(_mlp, delayed=_delayed, backward=_way == "backward"))


@call("mf.checkpoint_policy")
def _policy(rng: Random, arena: Arena) -> Call:
    def run(op: Any) -> None:
        mf.checkpoint_policy(None, op)

    return Call(run, {"op": rng.choice((ops.scaled_mm.default, torch.ops.aten.add.Tensor))})


@call("mf.GraphedStep")
def _graphed_step(rng: Random, arena: Arena) -> Call:
    def run(warm_ups: Any, x: Any, rate: Any) -> None:
        layer = mf.Linear(32, 32, recipe="mxfp8")
        optimizer = torch.optim.SGD(layer.parameters(), lr=rate)

        def step(x: Any) -> Any:
            loss = layer(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mf.step(layer)
            return loss

        graphed = mf.GraphedStep(step, layer, optimizer, warm_ups=warm_ups)
        graphed(x)
        graphed(x)

    args = {"warm_ups": rng.choice((1, 3)), "x": torch.randn(4, 32), "rate": 0.1}
    return Call(run, args, is_of_models=True)


@call("mf.inspector.StepGuard")
def _step_guard(rng: Random, arena: Arena) -> Call:
    def run(x: Any, on_nonfinite: Any, rate: Any) -> None:
        layer = mf.Linear(32, 32, recipe="mxfp8")
        optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
        with mf.inspector.StepGuard(layer, optimizer, on_nonfinite=on_nonfinite) as guard:
            layer(x).float().square().mean().backward()
            guard.check()
            optimizer.step()

    args = {"x": torch.randn(4, 32), "on_nonfinite": rng.choice(("raise", "skip")), "rate": 0.1}
    return Call(run, args, is_of_models=True)
