"""Valid calls for the op fuzzer: the numerics lab."""

from __future__ import annotations

from random import Random
from typing import Any

import minifloat as mf

from tests.support.fuzz_calls import BASES, Call, call, matrix
from tests.support.fuzz_values import Arena

GRIDS = ("e2m1", "e4m3", "e5m2", "e8m0")
BLOCKS = ((1, 16), (16, 16), (1, -1), (-1, -1))


def _halves(blocks: Any) -> Any:
    return mf.lab.round_to(blocks * 2, "e4m3") / 2


@call("mf.lab.round_to")
def _round_to(rng: Random, arena: Arena) -> Call:
    args = {"x": matrix(rng, arena, True), "grid": rng.choice(GRIDS)}
    return Call(mf.lab.round_to, {**args, "rounding": rng.choice(("nearest", "up", "down"))})


@call("mf.lab.fake_quantize")
def _fake_quantize(rng: Random, arena: Arena) -> Call:
    args = {"x": matrix(rng, arena, True), "rule": rng.choice(BASES) + rng.choice(("", "+sr"))}
    rest = {"columnwise": rng.random() < 0.5, "seed": 1, "stream": 2}
    return Call(mf.lab.fake_quantize, {**args, **rest})


@call("mf.lab.Rule")
def _rule(rng: Random, arena: Arena) -> Call:
    def run(x: Any, block: Any, name: Any) -> Any:
        return mf.lab.fake_quantize(x, mf.lab.Rule(_halves, block, name))

    return Call(run, {"x": matrix(rng, arena, True), "block": rng.choice(BLOCKS), "name": "half"})


@call("mf.lab.errors")
@call("mf.lab.Errors")
def _errors(rng: Random, arena: Arena) -> Call:
    def run(x: Any, rules: Any, columnwise: Any, seed: Any, stream: Any) -> str:
        found = mf.lab.errors(x, rules, columnwise=columnwise, seed=seed, stream=stream)
        return found.table()

    x = matrix(rng, arena, True)
    while not x.numel():
        x = matrix(rng, arena, True)
    args = {"x": x, "rules": rng.sample(BASES, 2), "columnwise": rng.random() < 0.5}
    return Call(run, {**args, "seed": 1, "stream": 2})
