"""More valid calls for the op fuzzer: normalisations and their casts."""

from __future__ import annotations

from random import Random
from typing import Any

import minifloat as mf
import torch

from tests.support.fuzz_calls import FLOATS, Call, call, op_call
from tests.support.fuzz_values import Arena, values

SPECS = ("mxfp8", "e4m3/row", "e4m3/tensor", "e4m3/1x128", "e4m3/128x128", "nvfp4", "mxfp4+sr+rht")
RECIPES = ("mxfp8", "fp8_rowwise", "fp8_tensorwise", "fp8_blockwise", "mxfp4", "nvfp4", "bf16")


def _norm(rng: Random, arena: Arena) -> dict[str, Any]:
    cols = rng.choice((1, 8, 40, 128, 261))
    shape = (*rng.choice(((), (0,), (3,), (17,), (2, 5))), cols)
    dtype, kind = rng.choice(FLOATS), rng.choice(("rms", "rms_rounded", "layer"))
    args: dict[str, Any] = {"x": arena.place(values(rng, shape, dtype))}
    for name in ("weight", "bias"):
        given = rng.random() < 0.7 and (name == "weight" or kind == "layer")
        args[name] = arena.place(values(rng, (cols,), rng.choice(FLOATS))) if given else None
    return args | {"kind": kind, "eps": rng.choice((0.0, 1e-6, 1e-5))}


def _specs(rng: Random, arena: Arena) -> dict[str, Any]:
    args: dict[str, Any] = {"row": rng.choice(SPECS), "col": rng.choice(("", *SPECS))}
    args["rng"] = arena.place(torch.tensor([rng.randrange(2**40), 1]))
    if rng.random() < 0.3:
        args["origin"] = [128 * rng.randrange(5), 128 * rng.randrange(5)]
    return args | {"decoded_row": rng.random() < 0.3, "decoded_col": rng.random() < 0.3}


def _recipe(rng: Random, arena: Arena) -> dict[str, Any]:
    args: dict[str, Any] = {"recipe": rng.choice(RECIPES), "stream": rng.randrange(9)}
    args |= {"rowwise": rng.random() < 0.7, "columnwise": rng.random() < 0.7}
    return args | {"rng": arena.place(torch.tensor([rng.randrange(2**40), 1]))}


@call("norm")
def _values(rng: Random, arena: Arena) -> Call:
    return op_call("norm", **_norm(rng, arena))


@call("deferred_norm")
def _deferred(rng: Random, arena: Arena) -> Call:
    return op_call("deferred_norm", **_norm(rng, arena))


@call("quantize_norm")
def _cast(rng: Random, arena: Arena) -> Call:
    return op_call("quantize_norm", **_norm(rng, arena), **_specs(rng, arena))


@call("norm_operands")
def _operands(rng: Random, arena: Arena) -> Call:
    return op_call("norm_operands", **_norm(rng, arena), **_recipe(rng, arena))


@call("mf.rms_norm")
def _rms_norm(rng: Random, arena: Arena) -> Call:
    args = _norm(rng, arena)
    chosen = {name: args[name] for name in ("x", "weight", "eps")}
    return Call(mf.rms_norm, chosen | {"rounded": rng.random() < 0.5})


@call("mf.layer_norm")
def _layer_norm(rng: Random, arena: Arena) -> Call:
    args = _norm(rng, arena)
    return Call(mf.layer_norm, {name: args[name] for name in ("x", "weight", "bias", "eps")})
