"""Valid calls for the op fuzzer: an activation between dense layers, and its casts."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from tests.support.activation_casts import ACTIVATIONS
from tests.support.fuzz_calls import FLOATS, Call, call, op_call
from tests.support.fuzz_values import Arena, values

SPECS = ("mxfp8", "e4m3/row", "e5m2/tensor", "e4m3/1x128", "nvfp4", "mxfp4+sr+rht", "nvfp4+pow2")
AS_FP8 = ("mxfp4+sr+rht", "nvfp4+pow2")


def _inputs(rng: Random, arena: Arena, leading: tuple[int, ...]) -> dict[str, Any]:
    shape, dtype = (*leading, rng.choice((0, 1, 8, 40, 128, 261))), rng.choice(FLOATS)
    up = arena.place(values(rng, shape, dtype)) if rng.random() < 0.7 else None
    gate = arena.place(values(rng, shape, dtype))
    return {"gate": gate, "up": up, "activation": rng.choice(ACTIVATIONS)}


def _dh(rng: Random, arena: Arena, args: dict[str, Any]) -> torch.Tensor:
    return arena.place(values(rng, tuple(args["gate"].shape), args["gate"].dtype))


def _forms(rng: Random, args: dict[str, Any], sides: tuple[str, ...]) -> dict[str, bool]:
    """Draws which operands are written as FP8. sides: the names of their specs"""
    return {
        f"fp8_{side.removesuffix('_col')}": args[side] in AS_FP8 and rng.random() < 0.5
        for side in sides
    }


def _rng(rng: Random, arena: Arena) -> torch.Tensor:
    return arena.place(torch.tensor([rng.randrange(2**40), 1]))


@call("activation")
def _forward(rng: Random, arena: Arena) -> Call:
    return op_call("activation", **_inputs(rng, arena, rng.choice(((), (0,), (17,), (2, 3)))))


@call("activation_backward")
def _backward(rng: Random, arena: Arena) -> Call:
    args = _inputs(rng, arena, rng.choice(((), (0,), (17,), (2, 3))))
    return op_call("activation_backward", dh=_dh(rng, arena, args), **args)


@call("quantize_activation")
def _cast(rng: Random, arena: Arena) -> Call:
    args = _inputs(rng, arena, (rng.choice((0, 1, 17, 128)),))
    args |= {"row": rng.choice(SPECS), "col": rng.choice(("", *SPECS))}
    args |= _forms(rng, args, ("row", "col"))
    return op_call("quantize_activation", rng=_rng(rng, arena), **args)


@call("quantize_activation_backward")
def _cast_gradients(rng: Random, arena: Arena) -> Call:
    args = _inputs(rng, arena, (rng.choice((0, 1, 17, 128)),))
    args["dh"] = _dh(rng, arena, args)
    args |= {"row": rng.choice(SPECS), "col": rng.choice(("", *SPECS))}
    args["h_col"] = rng.choice(("", *SPECS))
    args |= _forms(rng, args, ("row", "col", "h_col"))
    states = {f"{matrix}_rng": _rng(rng, arena) for matrix in ("gate", "up", "h")}
    return op_call("quantize_activation_backward", **states, **args)


@call("activation_gradients_")
def _gradients(rng: Random, arena: Arena) -> Call:
    args = _inputs(rng, arena, (rng.choice((0, 1, 17, 128)),))
    args["dh"], args["h_col"] = _dh(rng, arena, args), rng.choice(("", *SPECS))
    return op_call("activation_gradients_", h_rng=_rng(rng, arena), **args)
