"""A GPU against the CPU: what may go wrong on one that kernels and products never ran on.

casts       every spec of a preset, odd shapes, both directions: the CPU's bytes
layouts     codes and swizzled scales of block-scaled products: the CPU's bytes
linear      each product's engine against the exact product of the same codes on the CPU
experts     the same with groups of rows, some of them empty
steps       a training step of nn.Linear against the CPU's
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._native import ops
from ..engine_choice import CPU, Engine, engines
from ..functional import linear, scaled_grouped_mm
from ..nn.convert.quantize import quantize_
from ..nn.state.model_state import step
from ..private_torch import tree_leaves
from ..recipe import Recipe, presets
from ..spec import Spec
from ..tensor.quantized import quantize

# Whole tiles, which preset kernels take, and others; every second has special values.
CAST_SHAPES = [(128, 256), (17, 130), (131, 257), (2, 40, 70)]
CAST_SHAPES += [(256, 384), (128, 128), (1, 1), (45, 33)]
SPECIAL = [float("inf"), float("nan"), -0.0, 1e-40, 3.39e38]
LAYER_SIZES = [(256, 384, 128), (160, 96, 544), (33, 96, 32), (45, 70, 37)]  # M, K, N
ENDS, EXPERT_SIZES = [0, 7, 140, 156, 157, 407, 407], [(416, 256, 192), (420, 72, 40)]
Sizes = tuple[int, int, int]
# Tensor cores of FP8 cut 32 products at 2^-13 of the largest; over these sizes that stays under
# 2^-7 of the result. Others round to bf16 a few times. A wrong scale, row or factor errs by far
# more.
LIMIT = 2.0**-7
PRODUCTS = ("fprop", "dgrad", "wgrad")


class Case(NamedTuple):
    """A call on a device, whose results must be the CPU's."""

    call: str
    run: Callable[[torch.device], Any]
    limit: float = 0  # of the relative error in the Frobenius norm; 0: the same bytes


def run_checks(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yields each check of a GPU (or of the CPU, against itself) and its error; "": it passed.

    After an error that ends CUDA in this process no more checks follow.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else CPU
    for check, cases in all_checks(capability):
        error, call = "", "no call yet"
        try:
            for case in cases:
                call = case.call
                require_same(case, *(case.run(place) for place in (device, torch.device("cpu"))))
        except Exception as raised:
            where = "compute capability {}.{}".format(*capability)
            error = f"{call}, {where}: {type(raised).__name__}: {raised}"
        yield check, error
        try:
            torch.ones(1, device=device).item()
        except RuntimeError as dead:
            yield "the checks after that", f"not run: the device answers no more: {dead}"
            return


def all_checks(capability: tuple[int, int]) -> Iterator[tuple[str, Iterable[Case]]]:
    """Yields each check and its cases, for the engines of a GPU of this compute capability."""
    for preset in presets()[1:]:  # bf16 casts nothing
        yield f"casts of {preset}", casts(preset)
    for spec in ("mxfp8", "mxfp8/32x32", "mxfp4", "nvfp4", "nvfp4/16x16"):
        yield f"layouts of {spec}", layouts(spec)
    for experts in (False, True):
        found = [e for preset in presets() for e in engines(preset, capability, experts=experts)]
        for e in dict.fromkeys(found):
            name = f"{'experts' if experts else 'linear'}: {e.product} {e.specs}, {e.name}"
            yield name, products(e, 10 * capability[0] + capability[1], experts)
    for preset in presets()[1:]:
        call = f"nn.Linear and SGD, M, K, N = {LAYER_SIZES[0]}"
        yield f"a step of {preset}", [Case(call, partial(train, preset), LIMIT)]


def require_same(case: Case, got: Any, want: Any) -> None:
    for i, pair in enumerate(zip(tree_leaves(got), tree_leaves(want), strict=True)):
        a, b = map(torch.as_tensor, pair)  # integers of a layout, too
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(f"result {i}: expected {b.dtype} {b.shape}, got {a.dtype} {a.shape}")
        if case.limit:
            a, b = a.detach().double().cpu(), b.detach().double()
            error = float((a - b).norm() / b.norm())
            if not error <= case.limit:  # so does NaN
                text = f"expected a relative error of at most {case.limit:.2g}, got {error:.3g}"
                raise ValueError(f"result {i}: {text}")
            continue
        if a.dtype == torch.float32:  # processors have different NaNs
            a, b = (torch.where(t.isnan(), torch.nan, t) for t in (a, b))
        elif a.element_size() == 1:  # torch copies no FP4 tensor of other strides
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        a, b = (t.cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b))
        wrong = (a != b).nonzero().flatten().tolist()
        if wrong:
            first = f"0x{int(b[wrong[0]]):02X}, got 0x{int(a[wrong[0]]):02X}"
            text = f"{len(wrong)} of {len(b)} bytes differ, the first at {wrong[0]}"
            raise ValueError(f"result {i}: {text}: expected {first}")


def draw(*shape: int) -> Tensor:
    """Draws normal data in rows of magnitudes from 2^-4 to 2^4."""
    random = torch.Generator().manual_seed(sum(shape))
    size = torch.randint(-4, 5, (*shape[:-1], 1), generator=random)
    return torch.randn(shape, generator=random) * torch.exp2(size)


def call_op(op: Any, given: dict[str, Any], device: torch.device) -> Any:
    return op(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()})


# ---- Casts and layouts ---------------------------------------------------------------------------


def casts(preset: str) -> Iterator[Case]:
    """Yields casts of x, W and g as the preset has them, and with `+sr` and `+rht` added."""
    r = Recipe(preset)
    pairs = [(r.fprop.a, r.wgrad.b), (r.fprop.b, r.dgrad.b), (r.dgrad.a, r.wgrad.a)]
    inputs = list(itertools.product(CAST_SHAPES, (torch.bfloat16, torch.float32)))
    for pair, sr, rht in itertools.product(pairs, ("", "+sr"), ("", "+rht")):
        row, col = (flagged(spec, sr, rht) for spec in pair)
        for i, (shape, dtype) in enumerate(inputs):
            sides = [(row, col), (row, ""), ("", col)][i % 3]
            if not any(sides):
                continue
            x = draw(*shape).to(dtype)
            if i // 2 % 2:
                x.view(-1)[:: x.numel() // 5][:5] = torch.tensor(SPECIAL).to(dtype)
            given: dict[str, Any] = {"x": x, "row": sides[0], "col": sides[1]}
            given |= {"rng": torch.tensor([3, 7]), "stream_row": 5, "stream_col": -5}
            for side, spec in zip(("row", "col"), sides):
                if spec and Spec.parse(spec).is_delayed:
                    given[f"amax_{side}"] = torch.full(shape[:-2], 3.0)
            call = f"quantize of {dtype} {shape} to {sides}"
            yield Case(call, partial(call_op, ops.quantize, given))


def flagged(spec: str, sr: str, rht: str) -> str:
    """Returns the spec with flags that it lacks; "" for bf16."""
    of = Spec.parse(spec)
    if of.is_bf16:
        return ""
    return spec + ("" if of.is_stochastic else sr) + ("" if of.transform else rht)


def layouts(spec: str) -> Iterator[Case]:
    """Yields the arguments of torch's block-scaled products, of a matrix and of groups."""
    for rows, k in ((33, 96), (130, 544), (160, 256)):
        q = quantize(draw(rows, k), spec)
        given = {"codes": q.codes, "scale": q.scale, "amax": q.amax, "spec": spec, "cols": k}
        call = f"block_scaled_operand of {rows} x {k}"
        yield Case(call, partial(call_op, ops.block_scaled_operand, given))
    table = ops.group_table(torch.tensor([0, 1, 130, 130, 150], dtype=torch.int32), 160)
    for unit in (0, 32) if Spec.parse(spec).block[0] == 1 else ():
        a = quantize(draw(160, 96), spec, columnwise=unit > 0, groups=table, group_unit=unit)
        b = a if unit else quantize(draw(5, 48, 96), spec)
        given = {"a": a.codes, "a_scale": a.scale, "a_amax": a.amax, "product": f"{spec}*{spec}"}
        given |= {"b": b.codes, "b_scale": b.scale, "b_amax": b.amax, "groups": table}
        given |= {"k": 160 if unit else 96, "group_unit": unit}
        call = f"block_scaled_grouped_operands with unit {unit}"
        yield Case(call, partial(call_op, ops.block_scaled_grouped_operands, given))


# ---- Products and steps --------------------------------------------------------------------------


def products(e: Engine, capability: int, experts: bool) -> Iterator[Case]:
    """Yields a product in sizes that its engine takes, and in others, which the next ones take."""
    dtypes = (torch.bfloat16,) if experts else (torch.bfloat16, torch.float32)
    biases = (False, True) if e.product == "fprop" else (False,)
    all_sizes = EXPERT_SIZES if experts else LAYER_SIZES
    for sizes, dtype, bias in itertools.product(all_sizes, dtypes, biases):
        m, k, n = sizes
        mnk = {"fprop": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[e.product]
        groups = ("k" if e.product == "wgrad" else "m") if experts else ""
        asked = dict(zip("mnk", mnk), out_dtype=dtype, bias=bias, groups=groups)
        name = ops.engine_of(e.specs, capability, **asked)
        run = partial(compute_product, e, sizes, dtype, bias, experts)
        yield Case(f"{name} of {asked}", run, LIMIT)


def compute_product(
    e: Engine, sizes: Sizes, dtype: torch.dtype, bias: bool, experts: bool, device: torch.device
) -> Tensor:
    """Computes one product of a layer whose other two are in bf16."""
    m, k, n = sizes
    each = (len(ENDS),) if experts else ()
    shapes = ((m, k), (*each, n, k), (*each, n), (m, n))
    x, w, b, g = (draw(*shape).to(device, dtype) for shape in shapes)
    recipe = " ".join(f"{p}={e.specs if p == e.product else 'bf16*bf16'}" for p in PRODUCTS)
    how: dict[str, Any] = {"rng": torch.tensor([17, 3, 1], device=device), "recipe": recipe}
    how["amax_history"] = torch.full((6, *each, 4), 40.0, device=device)
    how["bias"] = b if bias else None
    x, w = x.requires_grad_(), w.requires_grad_()
    if experts:
        offs = torch.tensor(ENDS, dtype=torch.int32, device=device)
        y = scaled_grouped_mm(x, w.transpose(1, 2), offs, **how)
    else:
        y = linear(x, w, **how)
    return dict(zip(PRODUCTS, (y, *torch.autograd.grad(y, (x, w), g))))[e.product]


def train(preset: str, device: torch.device) -> list[Tensor]:
    """Returns the output of a layer and, after a step, its weight. The gradient is given."""
    m, k, n = LAYER_SIZES[0]
    layer = nn.Linear(k, n, bias=False)
    layer.weight.data.copy_(draw(n, k))
    quantize_(layer, preset)
    layer.to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    y = layer(draw(m, k).to(device, torch.bfloat16))
    y.backward(draw(m, n).to(device, torch.bfloat16))
    optimizer.step()
    step(layer)
    return [y, layer.weight]
