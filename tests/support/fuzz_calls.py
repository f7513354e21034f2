"""Valid calls for the op fuzzer: one of every op, of every native class, of every public function.

A new op needs a function here, decorated with @call("name"), that returns a valid Call of it; a
public name needs one of "mf.name" (public_names.py). test_fuzz_ops.py compares the names with what
is registered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import minifloat as mf
import torch
from minifloat.spec import Spec
from torch import Tensor

from tests.support.fuzz_values import Arena, values
from tests.support.specs import BASES, SPECS, WEIGHT_BASES, flagged, has_bf16_values

ops = torch.ops.minifloat
FLOATS = (torch.float32, torch.bfloat16)


@dataclass
class Call:
    run: Callable[..., Any]
    args: dict[str, Any]
    writes: set[str] = field(default_factory=set)  # arguments whose tensors it may write to
    # Of whole models: every exception will do, and memory is the model's own.
    is_of_models: bool = False
    reads_memory: bool = True  # False: of the tensors it reads the counts of writes alone


CALLS: dict[str, Callable[[Random, Arena], Call]] = {}


def call(name: str) -> Callable[[Any], Any]:
    def register(make: Any) -> Any:
        CALLS[name] = make
        return make

    return register


def op_call(name: str, /, **args: Any) -> Call:
    op = getattr(ops, name).default
    written = {a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write}
    return Call(op, args, written)


# ---- valid arguments -----------------------------------------------------------------------------


def matrix(rng: Random, arena: Arena, batched: bool = False) -> Tensor:
    shape = [rng.choice((1, 4, 17, 32, 48)), rng.choice((16, 32, 64, 100, 128))]
    if batched and rng.random() < 0.2:
        shape = [2, *shape]
    return arena.place(values(rng, shape, rng.choice(FLOATS)))


def some_spec(rng: Random) -> str:
    spec = rng.choice(SPECS)
    return flagged(spec, rng.choice(("", "", "+sr", "+rht", "+rht32", "+sr+rht")))


def in_arena(arena: Arena, q: mf.tensor.Quantized) -> mf.tensor.Quantized:
    codes, scale, amax = (arena.place(t) for t in (q.codes, q.scale, q.amax))
    return mf.tensor.Quantized(codes, scale, amax, q.spec, q.shape, q.columnwise)


def quantized(rng: Random, arena: Arena, spec: str, shape: Any = None) -> mf.tensor.Quantized:
    x = matrix(rng, arena) if shape is None else values(rng, shape, torch.float32)
    amax = torch.ones(()) if "delayed" in spec else None
    return in_arena(arena, mf.tensor.quantize(x, spec, amax=amax))


def weight(rng: Random, arena: Arena, shape: Any = None) -> mf.QuantizedTensor:
    """Makes a quantized weight in guarded memory, of one or two directions."""
    shape = shape or (rng.choice((16, 32, 48)), rng.choice((16, 32, 64)))
    x = values(rng, shape, rng.choice(FLOATS)).nan_to_num(0.5)
    row = rng.choice(WEIGHT_BASES)
    col = rng.choice((None, row, rng.choice(WEIGHT_BASES)))
    whole = mf.QuantizedTensor.from_tensor(x, row, col)
    parts = [None if p is None else in_arena(arena, p) for p in (whole.rowwise, whole.columnwise)]
    return mf.QuantizedTensor(*parts, dtype=x.dtype)


def product_sides(rng: Random, arena: Arena) -> tuple[Any, Any]:
    spec = rng.choice(SPECS)
    k, m, n = rng.choice((16, 32, 100, 128)), rng.choice((1, 16, 33)), rng.choice((1, 16, 33))
    if rng.random() < 0.2:
        tensors = [arena.place(values(rng, (r, k), rng.choice(FLOATS))) for r in (m, n)]
        return tensors[0], tensors[1]
    return quantized(rng, arena, spec, (m, k)), quantized(rng, arena, spec, (n, k))


# ---- values --------------------------------------------------------------------------------------


@call("amax")
def _amax(rng: Random, arena: Arena) -> Call:
    spec = rng.choice(("e4m3/tensor", "e4m3/row", "nvfp4", "nvfp4+rht", "nvfp4+eden"))
    args = {"x": matrix(rng, arena, True), "spec": spec, "columnwise": rng.random() < 0.5}
    args |= {"rng": arena.place(torch.tensor([1, 2])), "stream": rng.randrange(100)}
    return op_call("amax", **args)


@call("quantize")
def _quantize(rng: Random, arena: Arena) -> Call:
    x, row, col = matrix(rng, arena, True), some_spec(rng), rng.choice(("", some_spec(rng)))
    args: dict[str, Any] = {"x": x, "row": row, "col": col, "origin": [0, 0]}
    for side, spec, length in (("row", row, x.shape[-2]), ("col", col, x.shape[-1])):
        shape = [*x.shape[:-2], length] if "row" in spec else x.shape[:-2]
        of = Spec.parse(spec or "bf16")
        given = bool(of.amax_of) and (rng.random() < 0.3 or of.is_delayed)
        args[f"amax_{side}"] = arena.place(torch.ones(shape)) if given else None
        args[f"stream_{side}"] = rng.randrange(100)
        args[f"decoded_{side}"] = has_bf16_values(spec) and rng.random() < 0.3
        args[f"fp8_{side}"] = of.code_bits == 4 and rng.random() < 0.3
        args[f"swizzled_{side}"] = of.rule in ("mx", "nvfp4") and rng.random() < 0.3
    args["rng"] = arena.place(torch.tensor([1, 2, 3][: rng.choice((2, 3))]))
    args["amaxes_of_columns"] = (
        "/row" in row and "rht" not in row and col == "" and rng.random() < 0.5
    )
    if rng.random() < 0.3:
        args["origin"] = [128 * rng.randrange(5), 128 * rng.randrange(5)]
    return op_call("quantize", **args)


@call("quantize_delayed")
def _quantize_delayed(rng: Random, arena: Arena) -> Call:
    x = matrix(rng, arena)
    row, col = (rng.choice(("e4m3/tensor+delayed", "e5m2/tensor+delayed+rht", some_spec(rng))),) * 2
    args: dict[str, Any] = {"x": x, "row": row, "col": rng.choice(("", col, "mxfp8"))}
    args["amax_history"] = arena.place(torch.rand(6, rng.choice((2, 17))))
    args["history_row"], args["history_col"] = rng.randrange(6), rng.randrange(6)
    args["rng"] = arena.place(torch.tensor([1, 2]))
    for side in ("row", "col"):
        args[f"stream_{side}"] = rng.randrange(100)
        args[f"decoded_{side}"] = rng.random() < 0.3
    return op_call("quantize_delayed", **args)


@call("mf.tensor.quantize")
def _public_quantize(rng: Random, arena: Arena) -> Call:
    args = {"x": matrix(rng, arena, True), "spec": rng.choice(BASES) + rng.choice(("", "+sr"))}
    origin = (128 * rng.randrange(5), 128 * rng.randrange(5))
    rest = {"columnwise": rng.random() < 0.5, "amax": None, "seed": 1, "stream": 2}
    return Call(mf.tensor.quantize, {**args, **rest, "origin": origin})


def _codes(rng: Random, arena: Arena, specs: list[str]) -> dict[str, Any]:
    q = quantized(rng, arena, rng.choice(specs))
    parts = {"codes": q.codes, "scale": q.scale, "amax": q.amax}
    return {**parts, "spec": q.spec, "cols": q.shape[-1]}


@call("dequantize")
def _dequantize(rng: Random, arena: Arena) -> Call:
    return op_call("dequantize", **_codes(rng, arena, SPECS), dtype=rng.choice(FLOATS))


@call("decode")
def _decode(rng: Random, arena: Arena) -> Call:
    args = _codes(rng, arena, SPECS)
    del args["amax"]
    return op_call("decode", **args)


@call("fp4_as_fp8")
def _fp4_as_fp8(rng: Random, arena: Arena) -> Call:
    specs = ["mxfp4", "nvfp4+pow2", "nvfp4/16x16+pow2"]
    return op_call("fp4_as_fp8", **_codes(rng, arena, specs))


@call("block_scaled_operand")
def _block_scaled(rng: Random, arena: Arena) -> Call:
    specs = ["mxfp8", "mxfp8/32x32", "mxfp4", "nvfp4", "nvfp4/16x16"]
    return op_call("block_scaled_operand", **_codes(rng, arena, specs))


@call("mf.tensor.dequantize")
@call("mf.tensor.Quantized")
def _public_dequantize(rng: Random, arena: Arena) -> Call:
    q = quantized(rng, arena, rng.choice(SPECS))
    return Call(mf.tensor.dequantize, {"q": q, "dtype": rng.choice(FLOATS)})


# ---- transforms ----------------------------------------------------------------------------------


@call("hadamard")
def _hadamard(rng: Random, arena: Arena) -> Call:
    args = {"x": matrix(rng, arena, True), "points": rng.choice((16, 32, 64, 128))}
    return op_call("hadamard", **args, columnwise=rng.random() < 0.5, signs=rng.randrange(65536))


@call("statistic_names")
def _statistic_names(rng: Random, arena: Arena) -> Call:
    return op_call("statistic_names")


@call("operand_statistics")
def _operand_statistics(rng: Random, arena: Arena) -> Call:
    x, spec = [matrix(rng, arena)] * rng.choice((1, 1, 3)), some_spec(rng)
    args: dict[str, Any] = {"x": x, "spec": spec, "columnwise": rng.random() < 0.5}
    if Spec.parse(spec).amax_of == "tensor":
        args["amax"] = [arena.place(torch.ones(())) for _ in x]
    args["rng"] = arena.place(torch.tensor([1, 2, 3]))
    args["batch_index"] = rng.choice((0, 0, 3, -1, 2**40))
    return op_call("operand_statistics", **args, stream=rng.randrange(100))


@call("result_error")
def _result_error(rng: Random, arena: Arena) -> Call:
    shape = rng.choice((1, 17, 32)), rng.choice((1, 16, 33))
    names = ("results", "references", "gradients")
    count, dtypes = rng.choice((1, 1, 3)), {n: rng.choice(FLOATS) for n in names}
    args = {n: [arena.place(values(rng, shape, dtypes[n])) for _ in range(count)] for n in names}
    return op_call("result_error", **args)


def _scales(rng: Random, arena: Arena) -> dict[str, Any]:
    rows, cols = rng.choice((1, 100, 128, 130)), rng.choice((1, 4, 5, 8))
    groups = rng.choice(("", "m", "k"))
    length = rows if groups == "m" else cols
    ends = [*sorted(rng.randrange(length + 1) for _ in range(2)), length]
    offs = arena.place(torch.tensor(ends, dtype=torch.int32)) if groups else None
    scale = arena.place(torch.randint(0, 256, (rows, cols), dtype=torch.uint8))
    return {"scale": scale, "offs": offs, "groups": groups}


@call("swizzle_scales")
def _swizzle(rng: Random, arena: Arena) -> Call:
    return op_call("swizzle_scales", **_scales(rng, arena))


@call("unswizzle_scales")
def _unswizzle(rng: Random, arena: Arena) -> Call:
    given = _scales(rng, arena)
    scale = given.pop("scale")
    swizzled = arena.place(ops.swizzle_scales(scale, **given))
    rows, cols = scale.shape
    return op_call("unswizzle_scales", swizzled=swizzled, rows=rows, cols=cols, **given)


@call("transpose_codes")
def _transpose(rng: Random, arena: Arena) -> Call:
    cols = rng.choice((1, 15, 16, 64))
    shape = (rng.choice((1, 7, 16)), (cols + 1) // 2)
    codes = arena.place(torch.randint(0, 256, shape, dtype=torch.uint8))
    return op_call("transpose_codes", codes=codes, cols=cols)


# ---- products ------------------------------------------------------------------------------------


@call("scaled_mm")
def _scaled_mm(rng: Random, arena: Arena) -> Call:
    args, specs = {}, []
    for name, side in zip("ab", product_sides(rng, arena)):
        is_plain = isinstance(side, Tensor)
        none = arena.place(torch.empty(0))
        args[name] = side if is_plain else side.codes
        args[f"{name}_scale"] = none if is_plain else side.scale
        args[f"{name}_amax"] = none if is_plain else side.amax
        specs.append("bf16" if is_plain else side.spec)
        args["k"] = side.shape[-1]
    length = args["b"].shape[0]
    bias = arena.place(torch.randn(length)) if rng.random() < 0.3 else None
    product = "*".join(specs)
    return op_call("scaled_mm", **args, product=product, bias=bias, out_dtype=rng.choice(FLOATS))


@call("add_scaled_mm")
def _add_scaled_mm(rng: Random, arena: Arena) -> Call:
    args = dict(_scaled_mm(rng, arena).args)
    for name in ("bias", "out_dtype"):
        del args[name]
    shape = (args["a"].shape[0], args["b"].shape[0])
    args["sum"] = arena.place(torch.randn(shape))
    return op_call("add_scaled_mm", **args)


@call("mf.tensor.scaled_mm")
def _public_scaled_mm(rng: Random, arena: Arena) -> Call:
    a, b = product_sides(rng, arena)
    args = {"a": a, "b": b, "fast": False, "bias": None, "out_dtype": rng.choice(FLOATS)}
    return Call(mf.tensor.scaled_mm, args)


def with_backward(layer: Any) -> Any:
    """Runs the layer, then its gradients: backward reads the saved tensors of forward."""

    def run(**args: Any) -> Any:
        outputs = layer(**args)
        listed = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        for y in listed:
            if isinstance(y, Tensor) and y.requires_grad and y.device.type == "cpu":
                y.backward(torch.ones_like(y), retain_graph=True)
        return outputs

    return run


def _public(function: Callable[..., Any]) -> Callable[[Random, Arena], Call]:
    """Returns the call of the op that has a public function's name, with its arguments."""
    name = function.__name__
    taken = inspect.signature(function).parameters

    def make(rng: Random, arena: Arena) -> Call:
        one = CALLS[name](rng, arena)
        args = {key: value for key, value in one.args.items() if key in taken}
        run = with_backward(function) if "linear" in name else function
        return Call(run, args, one.writes)

    return make


CALLS["mf.linear"] = _public(mf.linear)
CALLS["mf.functional.linear_group"] = _public(mf.functional.linear_group)
for _name in ("amax", "hadamard", "swizzle_scales", "unswizzle_scales", "transpose_codes"):
    CALLS[f"mf.tensor.{_name}"] = _public(getattr(mf.tensor, _name))


@call("Fingerprint.matches")
def _fingerprint_matches(rng: Random, arena: Arena) -> Call:
    def run(t: Tensor, other: Tensor) -> None:
        torch.classes.minifloat.Fingerprint(t).matches(other)

    return Call(run, {"t": matrix(rng, arena), "other": matrix(rng, arena)})


@call("Fingerprint.value")
def _fingerprint_value(rng: Random, arena: Arena) -> Call:
    def run(t: Tensor) -> None:
        torch.classes.minifloat.Fingerprint(t).value()

    return Call(run, {"t": matrix(rng, arena)})
