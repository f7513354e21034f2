"""The GPU's casts and transforms against a device copy of the same run: one table, and JSON.

    python benchmarks/gpu_casts.py [--quick] [--out build/gpu_casts.json]

TB/s counts the minimum bytes: the input once (twice where the cast needs an amax that is not
passed), each output once. The ceiling is the fastest copy of the input's size or a smaller one,
which reads and writes it: copies of 512 MiB are slower than those of 256. Each is measured before
and after the rows of a shape. Bars hold at the first shape. The casts of x, W and g of every preset
are among the rows. torchao's casts under torch.compile are shown where it can be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
from minifloat._native import ops
from minifloat.spec import Spec
from torch import Tensor

SHAPES = [(16384, 8192), (4096, 14336), (8192, 1024)]
RNG = (17, 3)

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A row of the table: `run` on the inputs that `prepare` makes of x (rows, cols) bf16."""

    name: str
    run: Callable[..., Any]
    prepare: Callable[[Tensor], Inputs] = lambda x: (x,)
    bar: float | None = None  # least fraction of the ceiling
    goal: float | None = None
    reads: int = 1  # of the first input


@dataclass
class Row:
    name: str
    shape: str
    us: float
    tb_s: float
    of_ceiling: float
    bar: float | None
    goal: float | None


def needs_tensor_amax(spec: str) -> bool:
    return Spec.parse(spec).amax_of == "tensor"


def cast(
    row: str,
    col: str,
    bar: float | None = None,
    goal: float | None = None,
    *,
    reads: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    decoded: bool = False,
) -> Case:
    """Returns a case of quantize, with the tensor's amax passed where the spec has one."""
    sides = {"row": row, "col": col}
    given = [side for side, spec in sides.items() if spec and needs_tensor_amax(spec)]
    stochastic = any(spec and Spec.parse(spec).is_stochastic for spec in (row, col))
    flags = {f"decoded_{side}": decoded and bool(spec) for side, spec in sides.items()}

    def prepare(x: Tensor) -> Inputs:
        x = x.to(dtype)
        rng = [torch.tensor(RNG, device=x.device)] if stochastic else []
        state = rng[0] if rng else None
        amaxes = [ops.amax(x, sides[side], side == "col", rng=state) for side in given]
        if row == col and Spec.parse(row).transform == 0:  # one tensor's amax
            amaxes = amaxes[:1] * len(given)
        return (x, *amaxes, *rng)

    def run(x: Tensor, *rest: Tensor) -> Any:
        amaxes = {f"amax_{side}": amax for side, amax in zip(given, rest)}
        rng = rest[-1] if stochastic else None
        return ops.quantize(x, row, col, rng=rng, **amaxes, **flags)

    extras = (", fp32 in" if dtype == torch.float32 else "") + (", decoded too" if decoded else "")
    return Case(cast_name(row, col) + extras, run, prepare, bar, goal, reads)


def cast_name(row: str, col: str) -> str:
    if row == col:
        return f"{row}: both"
    return " + ".join([f"{row}: rowwise"] * bool(row) + [f"{col}: columnwise"] * bool(col))


def each_way(spec: str, one: float | None, both: float | None) -> list[Case]:
    return [cast(spec, "", one), cast("", spec, one), cast(spec, spec, both)]


def as_fp8(row: str, col: str, forms: str, *, in_two: bool) -> Case:
    """Returns a case of FP4 written as FP8: the directions in `forms`, of "row" and "col".

    in_two: fp4_as_fp8 converts codes that the cast wrote as FP4. Both find the tensor's amax."""
    stochastic = "+sr" in row or "+sr" in col
    flags = {f"fp8_{side}": side in forms and not in_two for side in ("row", "col")}

    def prepare(x: Tensor) -> Inputs:
        return (x, *([torch.tensor(RNG, device=x.device)] if stochastic else []))

    def run(x: Tensor, *rng: Tensor) -> Any:
        out = list(ops.quantize(x, row, col, rng=rng[0] if rng else None, **flags))
        for side, first, spec, cols in (("row", 0, row, x.shape[1]), ("col", 4, col, x.shape[0])):
            if in_two and side in forms:
                out[first : first + 2] = ops.fp4_as_fp8(*out[first : first + 3], spec, cols)
        return tuple(out)

    how = "cast, then converted" if in_two else "cast"
    return Case(f"{cast_name(row, col)}; {forms} as FP8, {how}", run, prepare, reads=2)


def operands_as_fp8() -> list[Case]:
    """Lists x and g under nvfp4_pow2, where FP8 products read FP4."""
    pow2 = "nvfp4+pow2"
    operands = [
        (pow2, f"{pow2}+rht", "row"),
        (f"{pow2}+sr", f"{pow2}+sr+rht", "row col"),
        (pow2, "", "row"),
    ]
    return [as_fp8(*operand, in_two=in_two) for operand in operands for in_two in (True, False)]


def amax(spec: str, columnwise: bool, bar: float) -> Case:
    side = "columnwise" if columnwise else "rowwise"
    drawn = Spec.parse(spec).draws_signs

    def prepare(x: Tensor) -> Inputs:
        return (x, torch.tensor(RNG, device=x.device)) if drawn else (x,)

    def run(x: Tensor, *rng: Tensor) -> Tensor:
        return ops.amax(x, spec, columnwise, rng=rng[0] if rng else None)

    return Case(f"amax {spec}: {side}", run, prepare, bar)


def hadamard(points: int, columnwise: bool, bar: float) -> Case:
    side = "columnwise" if columnwise else "rowwise"
    name = f"RHT of {points}: {side}"
    return Case(name, lambda x: ops.hadamard(x, points, columnwise), bar=bar)


def quantized(spec: str) -> Callable[[Tensor], Inputs]:
    return lambda x: tuple(ops.quantize(x, spec, "")[:3])


def decoding(spec: str, op: str, bar: float) -> Case:
    width = 2 if spec.startswith(("nvfp4", "mxfp4")) else 1

    def dequantize(codes: Tensor, scale: Tensor, used: Tensor) -> Tensor:
        cols = width * codes.shape[-1]
        return ops.dequantize(codes, scale, used, spec, cols, dtype=torch.bfloat16)

    def decode(codes: Tensor, scale: Tensor, used: Tensor) -> Tensor:
        return ops.decode(codes, scale, spec, width * codes.shape[-1])

    run = dequantize if op == "dequantize" else decode
    return Case(f"{op} {spec} to bf16", run, quantized(spec), bar)


def all_cases() -> list[Case]:
    table = [amax("e4m3/tensor", False, 0.95)]
    table += [amax("e4m3/row", side, 0.95) for side in (False, True)]
    table += [amax("nvfp4+rht", side, 0.90) for side in (False, True)]
    table += [amax("nvfp4+eden", side, 0.80) for side in (False, True)]
    table += each_way("e4m3/tensor", 0.95, 0.90) + each_way("e5m2/tensor", 0.95, 0.90)
    table += [cast("e4m3/row", "", 0.92), cast("e4m3/row", "e4m3/row", 0.88, reads=2)]
    table += each_way("e4m3/1x128", None, 0.88) + each_way("e4m3/128x128", None, 0.90)
    for spec in ("mxfp8", "mxfp8/32x32", "mxfp4"):
        table += each_way(spec, 0.95, 0.88)
    table += [cast("nvfp4", "", 0.95), cast("nvfp4+sr", "", 0.90)]
    table += [cast("nvfp4+4over6", "", 0.60)]
    table += each_way("nvfp4+eden", 0.60, None)
    table += [cast("nvfp4/16x16", "nvfp4/16x16", 0.88)]
    table += [cast("nvfp4/16x16+4over6", "nvfp4/16x16+4over6", 0.60)]
    table += [hadamard(n, s, 0.92 if n == 16 else 0.85) for n in (16, 32, 64, 128) for s in (0, 1)]
    table += [cast("", "nvfp4+rht", 0.78, 0.85), cast("", "nvfp4+sr+rht", 0.72, 0.80)]
    table += [cast("nvfp4", "nvfp4+rht", 0.68, 0.75), cast("nvfp4+sr", "nvfp4+sr+rht", 0.54, 0.62)]
    table += [decoding(spec, "dequantize", 0.90) for spec in ("nvfp4", "mxfp8", "e4m3/tensor")]
    table += [decoding("nvfp4", "decode", 0.90)]
    table += [
        Case(
            "nibble transpose",
            lambda codes: ops.transpose_codes(codes, 2 * codes.shape[-1]),
            lambda x: quantized("nvfp4/16x16")(x)[:1],
            0.85,
        ),
        Case("scale swizzle", ops.swizzle_scales, lambda x: quantized("nvfp4")(x)[1:2], 0.80),
    ]
    table += operands_as_fp8()
    table += [cast(spec, "", decoded=True) for spec in ("nvfp4", "mxfp8")]
    table += [cast(spec, spec, 0.85, dtype=torch.float32) for spec in ("mxfp8", "nvfp4")]
    names = {case.name for case in table}
    return table + [case for case in preset_cases() if case.name not in names]


def preset_cases() -> list[Case]:
    """Returns the casts of x, W and g of every preset, each once."""
    found: dict[str, Case] = {}
    for name in mf.presets():
        r = mf.Recipe(name)
        for pair in ((r.fprop.a, r.wgrad.b), (r.fprop.b, r.dgrad.b), (r.dgrad.a, r.wgrad.a)):
            row, col = (
                "" if Spec.parse(spec).is_bf16 else spec.replace("+delayed", "") for spec in pair
            )
            parsed = [Spec.parse(spec) for spec in (row, col) if spec]
            if not parsed:
                continue
            is_harder = any(spec.is_stochastic or spec.transform for spec in parsed)
            of_columns = col and Spec.parse(col).amax_of == "row"
            case = cast(row, col, 0.70 if is_harder else 0.80, reads=2 if of_columns else 1)
            found.setdefault(case.name, case)
    return list(found.values())


def peer_cases() -> list[Case]:
    """Returns torchao's compiled casts of the same formats; none where it cannot be imported."""
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
    except ImportError as error:
        print(f"torchao: not compared ({error})")
        return []
    timing.compile_each_shape()
    mx = torch.compile(lambda x: to_mx(x, torch.float8_e4m3fn, 32))
    nv = torch.compile(lambda x, scale: nvfp4_quantize(x, 16, scale))
    with_scale: Callable[[Tensor], Inputs] = lambda x: (x, torch.ones((), device=x.device))  # noqa: E731
    return [
        Case("torchao to_mx e4m3, compiled", mx),
        Case("torchao nvfp4_quantize, compiled", nv, with_scale),
    ]


class Bench:
    """The rows of one shape, against copies of the same sizes."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, repeats: int) -> None:
        self.shape, self.device, self.repeats = shape, device, repeats
        self.copies: dict[int, list[float]] = {}  # bytes -> ms

    def copy(self, nbytes: int) -> float:
        return min(self.copies[nbytes])

    def ceiling(self, nbytes: int) -> float:
        """Returns TB/s, read and written."""
        return max(2 * n / self.copy(n) / 1e9 for n in self.copies if n <= nbytes)

    def measure_copy(self, nbytes: int) -> None:
        ms = timing.copy_ms(nbytes, self.device, self.repeats)
        self.copies.setdefault(nbytes, []).append(ms)

    def measure(self, case: Case) -> tuple[Case, float, int, int]:
        """Measures a case: ms, the minimum bytes, the bytes of the ceiling's copy."""
        x = torch.randn(self.shape, device=self.device, dtype=torch.bfloat16)
        first = case.prepare(x)
        size = first[0].nbytes
        inputs = [first]
        for _ in range(timing.copies_of(size, self.device) - 1):
            clones = {id(t): t.clone() for t in first}  # one tensor stays one tensor
            inputs.append(tuple(clones[id(t)] for t in first))
        if size not in self.copies:
            self.measure_copy(size)
        outputs = case.run(*first)
        least = (case.reads - 1) * size + timing.nbytes(first) + timing.nbytes(outputs)
        calls = [lambda i=i: case.run(*i) for i in inputs]
        return case, timing.kernel_ms(calls, self.device, self.repeats), least, size

    def table(self, cases: list[Case]) -> list[Row]:
        measured = []
        for case in cases:
            try:
                measured.append(self.measure(case))
            except (RuntimeError, ValueError) as error:
                print(f"{case.name}: FAILED, {str(error).splitlines()[0]}")
        for size in list(self.copies):
            self.measure_copy(size)
        rows = []
        for case, ms, least, size in measured:
            speed, ceiling = least / ms / 1e9, self.ceiling(size)
            text = "x".join(map(str, self.shape))
            rows.append(Row(case.name, text, 1e3 * ms, speed, speed / ceiling, case.bar, case.goal))
        return rows


def print_rows(bench: Bench, rows: list[Row], with_bars: bool) -> bool:
    """Prints the rows; returns False where a bar is missed."""
    copies = ", ".join(
        f"{size / 2**20:.0f} MiB {2 * size / bench.copy(size) / 1e9:.2f}"
        for size in sorted(bench.copies, reverse=True)
    )
    print(f"\n{'x'.join(map(str, bench.shape))}; copies, TB/s: {copies}")
    print(f"{'kernel':48} {'us':>9} {'TB/s':>6} {'ceiling':>8} {'bar':>6} {'goal':>6}")
    met = True
    for r in rows:
        bar = r.bar if with_bars else None
        missed = bar is not None and r.of_ceiling < bar
        met = met and not missed
        print(
            f"{r.name:48} {r.us:9.1f} {r.tb_s:6.2f} {timing.percent(r.of_ceiling):>8} "
            f"{timing.percent(bar):>6} {timing.percent(r.goal if with_bars else None):>6}"
            f"{'  MISSED' if missed else ''}"
        )
    return met


def fused_is_faster(rows: list[Row]) -> bool:
    """Compares one kernel for the gradient's two directions with two kernels."""
    us = {r.name: r.us for r in rows}
    row, col = "nvfp4+sr", "nvfp4+sr+rht"
    names = [cast_name(row, col), cast_name(row, ""), cast_name("", col)]
    if not all(name in us for name in names):
        return False
    both, *alone = (us[name] for name in names)
    print(f"gradient, both at once: {both:.1f} us; one after another: {sum(alone):.1f} us")
    return both < sum(alone)


def main() -> int:
    args = timing.arguments(__doc__, "gpu_casts.json").parse_args()
    device = timing.require_device(args.device)
    torch.manual_seed(0)
    table = args.shapes or (SHAPES[:1] if args.quick else SHAPES)
    repeats = 10 if args.quick else 30
    cases = all_cases() + ([] if args.quick or device.type != "cuda" else peer_cases())
    print(f"{timing.device_name(device)}, torch {torch.__version__}")
    rows: list[Row] = []
    met = True
    for i, shape in enumerate(table):
        bench = Bench(shape, device, repeats)
        here = bench.table(cases)
        met = print_rows(bench, here, with_bars=i == 0) and met
        if i == 0:
            met = fused_is_faster(here) and len(here) == len(cases) and met
        rows += here
    timing.write_json(args.out, device, rows=[asdict(r) for r in rows])
    print(f"{args.out}; every bar {'met' if met else 'NOT met'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
