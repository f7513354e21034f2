"""Arguments for the op fuzzer: tensors in guarded memory, and hostile variations of any argument.

    | canary | tensor | canary |     one storage; the bytes around a tensor show writes outside it

Half of the tensors have no canaries, so that AddressSanitizer sees reads past their ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any

import minifloat as mf
import torch
from torch import Tensor

from tests.support.specs import SPECS

CANARY, GUARD = 0xA5, 64  # the guard in bytes: a multiple of every element
MOST = 1 << 14  # elements of a tensor that has its memory

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]
TEXTS = [
    "",
    " ",
    "\0",
    "mxfp8\0",
    "a\0b: mxfp8",
    "\ud800",
    "mxfp8: \udfff",
    "ü",
    "ü*: mxfp8",
    "*?*?*?: nvfp4",
    "é" * 1000,
    "x" * 100_000,
    "+" * 1000,
    "*: mxfp8; " * 500,
    "nvfp4+sr+sr",
    "mxfp8/",
    "bf16",
    "fprop.w",
    "bf16*bf16",
    "mxfp8*nvfp4",
    "nvfp4",
    "fp8_delayed",
    "fprop=mxfp8*mxfp8 dgrad=",
    "x",
    "w",
    "m",
    "k",
    "0",
]
INTS = [-(2**63), -(2**31), -17, -1, 0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129]
INTS += [1000, 2**31 - 1, 2**31, 2**32, 2**36, 2**40, 2**62, 2**63 - 1]
LENGTHS = [0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 64, 127, 128, 129]
HUGE = [2**20, 2**31, 2**32 + 1, 2**40, 2**62]


class Arena:
    """The memory of one call's tensors, and its content before the call."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.blocks: list[Tensor] = []
        self.before: list[Tensor] = []
        self.loose: list[Tensor] = []  # tensors that may stand where no tensor belongs

    def place(self, t: Tensor) -> Tensor:
        """Copies a tensor to new contiguous memory, mostly with canaries around."""
        t = t.detach().contiguous()
        guard = self.rng.choice((0, GUARD))
        bytes_ = t.numel() * t.element_size()
        block = torch.full((bytes_ + 2 * guard,), CANARY, dtype=torch.uint8)
        inside = block[guard : guard + bytes_]
        if bytes_ > 0:
            inside.copy_(t.reshape(-1).view(torch.uint8))
        self.blocks.append(block)
        return inside.view(t.dtype).view(t.shape)

    def remember(self) -> None:
        self.before = [block.clone() for block in self.blocks if self.is_held(block)]
        self.blocks = [block for block in self.blocks if self.is_held(block)]

    @staticmethod
    def is_held(block: Tensor) -> bool:
        return block.untyped_storage().nbytes() >= block.numel()

    def changed(self, writable: list[Tensor]) -> list[str]:
        """Lists changed memory outside `writable`, block by block."""
        found = []
        for block, before in zip(self.blocks, self.before):
            if not self.is_held(block):
                found.append("a storage was freed")
                continue
            allowed = torch.zeros(block.numel(), dtype=torch.bool)
            for t in writable:
                _mark(allowed, block, t)
            places = ((block != before) & ~allowed).nonzero().flatten().tolist()
            if places:
                found.append(f"{len(places)} bytes of {block.numel()}, the first {places[0]}")
        return found


def is_dense(t: Tensor) -> bool:
    """Tells whether a tensor has strides and a storage of its elements."""
    return t.layout == torch.strided and not (t.is_nested or t.is_quantized or t._is_zerotensor())


def is_inside_memory(t: Tensor) -> bool:
    """Tells whether every element lies in the tensor's storage."""
    if t.device.type == "meta" or not is_dense(t) or t.numel() == 0:
        return True
    last = t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride()))
    return (last + 1) * t.element_size() <= t.untyped_storage().nbytes()


def _mark(allowed: Tensor, block: Tensor, t: Tensor) -> None:
    """Sets the bytes of `block` that elements of t occupy."""
    if t.device.type != "cpu" or not is_dense(t) or t.numel() == 0:
        return
    if block.numel() == 0 or t.untyped_storage().data_ptr() != block.untyped_storage().data_ptr():
        return
    elements = torch.zeros(block.numel() // t.element_size() + 1, dtype=torch.bool)
    size = [1 if step == 0 else n for n, step in zip(t.shape, t.stride())]
    elements.as_strided(size, t.stride(), t.storage_offset()).fill_(True)
    allowed |= elements.repeat_interleave(t.element_size())[: allowed.numel()]


# ---- tensors -------------------------------------------------------------------------------------


def values(rng: Random, shape: Any, dtype: torch.dtype) -> Tensor:
    """Draws values of any dtype; for floats also NaN, Inf, the smallest and the largest."""
    shape = tuple(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    if dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        t = torch.randn(shape, dtype=torch.float32)
        if rng.random() < 0.2 and t.numel() > 0:
            special = (float("nan"), float("inf"), -float("inf"), 1e-45, 3e38, 0.0, -0.0)
            t.view(-1)[rng.randrange(t.numel())] = rng.choice(special)
        return t.to(dtype)
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8).view(dtype).view(shape)


def _resized(rng: Random, arena: Arena, t: Tensor) -> Tensor:
    shape = list(t.shape) or [1]
    i = rng.randrange(len(shape))
    n = shape[i]
    shape[i] = max(0, rng.choice((*LENGTHS, n - 1, n + 1, 2 * n, n + 16)))
    if torch.Size(shape).numel() > MOST:
        shape[i] = 1
    return arena.place(values(rng, shape, t.dtype))


def _reranked(rng: Random, arena: Arena, t: Tensor) -> Tensor:
    if rng.random() < 0.5 or t.dim() == 0:
        return t.unsqueeze(rng.randrange(t.dim() + 1))
    dim = rng.randrange(t.dim())
    return t.select(dim, 0) if t.shape[dim] > 0 else t.flatten()


def _expanded(rng: Random, arena: Arena, t: Tensor) -> Tensor:
    """Returns a tensor of the same shape, with stride 0 in some dimensions."""
    cut = t
    for dim in range(t.dim()):
        if t.shape[dim] > 1 and rng.random() < 0.7:
            cut = cut.narrow(dim, 0, 1)
    return cut.expand(t.shape)


def _huge(rng: Random, arena: Arena, t: Tensor) -> Tensor:
    if t.dim() == 0 or t.numel() == 0:
        return t.new_empty((0, rng.choice(HUGE))) if rng.random() < 0.5 else t
    dim = rng.randrange(t.dim())
    shape = [rng.choice(HUGE) if i == dim else n for i, n in enumerate(t.shape)]
    return t.narrow(dim, 0, 1).expand(shape)


def _stepped(rng: Random, arena: Arena, t: Tensor) -> Tensor:
    """Returns a tensor of the same shape, every second element of its memory."""
    if t.dim() == 0:
        return t
    dim = rng.randrange(t.dim())
    shape = [2 * n if i == dim else n for i, n in enumerate(t.shape)]
    wide = arena.place(values(rng, shape, t.dtype))
    return wide[tuple(slice(None, None, 2) if i == dim else slice(None) for i in range(t.dim()))]


def _transposed(rng: Random, arena: Arena, t: Tensor) -> Tensor:
    if t.dim() < 2:
        return t
    first, second = rng.sample(range(t.dim()), 2)
    if rng.random() < 0.5:
        return t.transpose(first, second)
    return arena.place(t.transpose(first, second).contiguous()).transpose(first, second)


def _overlapping(rng: Random, arena: Arena, t: Tensor) -> Tensor:
    strides = [max(0, step - rng.choice((1, 2, step))) for step in t.stride()]
    return t.as_strided(t.shape, strides, t.storage_offset())


def _shifted(rng: Random, arena: Arena, t: Tensor) -> Tensor:
    """Returns a tensor of the same shape at an odd offset of longer memory."""
    count, offset = t.numel(), rng.choice((1, 3, 7, 16))
    return arena.place(values(rng, (count + offset,), t.dtype))[offset:].view(t.shape)


def _freed(rng: Random, arena: Arena, t: Tensor) -> Tensor:
    if not is_inside_memory(t) or t.is_neg():  # freed by an earlier change; torch would negate it
        return t
    own = t.detach().clone()
    storage = own.untyped_storage()
    storage.resize_(rng.choice((0, storage.nbytes() // 2)))
    return own


def _retyped(rng: Random, arena: Arena, t: Tensor) -> Tensor:
    return arena.place(values(rng, t.shape, rng.choice(DTYPES)))


def _revalued(rng: Random, arena: Arena, t: Tensor) -> Tensor:
    if t.dtype in (torch.int32, torch.int64):
        top = 2**31 if t.dtype == torch.int32 else 2**63
        fits = [n for n in INTS if -top <= n < top]
        numbers = [rng.choice(fits) for _ in range(t.numel())]
        return arena.place(torch.tensor(numbers, dtype=t.dtype).view(t.shape))
    if t.is_floating_point() and t.element_size() > 1:
        special = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e-45, 3e38)
        return arena.place(torch.full(t.shape, rng.choice(special)).to(t.dtype))
    return arena.place(values(rng, t.shape, t.dtype))


def _exotic(rng: Random, arena: Arena, t: Tensor) -> Any:
    """Makes a tensor of a layout or subclass without memory of its elements."""
    kind = rng.randrange(7)
    if kind in (0, 3):  # reads no values
        return t.to("meta") if kind == 0 else torch._efficientzerotensor(t.shape, dtype=t.dtype)
    if not is_inside_memory(t):  # freed by an earlier change: torch itself would read it
        return t
    if kind == 1 and t.dim() == 2 and t.dtype == torch.float32:
        return t.to_sparse() if rng.random() < 0.5 else t.to_sparse_csr()
    if kind == 2 and t.is_floating_point() and t.element_size() > 1:
        return torch._neg_view(t)  # torch negates the values before an op sees them
    if kind == 4 and t.dtype == torch.float32:
        return torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)
    if kind == 5 and t.dim() == 2 and t.dtype in (torch.float32, torch.bfloat16):
        return mf.QuantizedTensor.from_tensor(t, rng.choice(("mxfp8", "nvfp4/16x16", "e4m3/row")))
    if kind == 6 and t.dtype == torch.float32 and t.dim() > 0:
        return torch.nested.nested_tensor([t, t])
    return t.to("meta")


def _with_gradient(rng: Random, arena: Arena, t: Tensor) -> Tensor:
    floats = t.is_floating_point() and t.element_size() > 1
    return t.detach().requires_grad_() if floats else t


CHANGES: list[Callable[[Random, Arena, Tensor], Any]] = [
    *(_resized, _resized, _resized, _reranked, _expanded, _huge, _stepped, _transposed),
    *(_overlapping, _shifted, _freed, _retyped, _retyped, _revalued, _exotic, _with_gradient),
]


# ---- any argument --------------------------------------------------------------------------------


def any_value(rng: Random, arena: Arena) -> Any:
    """Draws a value of any type."""
    kind = rng.randrange(8)
    if kind == 0:
        return None
    if kind == 1:
        return rng.choice(INTS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return rng.choice((1.9, float("nan"), float("inf"), True, False))
    if kind == 4:
        return [any_value(rng, arena) for _ in range(rng.randrange(3))]
    if kind == 5:
        return rng.choice(DTYPES)
    shape = [rng.choice(LENGTHS) for _ in range(rng.randrange(4))]
    if torch.Size(shape).numel() > MOST:
        shape = shape[:1]
    arena.loose.append(arena.place(values(rng, shape, rng.choice(DTYPES))))
    return arena.loose[-1]


def hostile(rng: Random, arena: Arena, value: Any) -> Any:
    """Draws a value to replace this one, mostly of its type."""
    # torch prints the value of an argument of the wrong type, freed memory included.
    if rng.random() < 0.1 or any(value is t for t in arena.loose):
        return any_value(rng, arena)
    if isinstance(value, Tensor) and not value.is_nested and value.numel() > MOST:
        return any_value(rng, arena)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((*INTS, value - 1, value + 1, 2 * value))
    if isinstance(value, str):
        return rng.choice((*TEXTS, *SPECS, value + "+sr", value + "+rht", value + "\0"))
    if isinstance(value, torch.dtype):
        return rng.choice(DTYPES)
    if isinstance(value, (list, tuple)):
        return type(value)(_hostile_list(rng, list(value)))
    if type(value) in (Tensor, torch.nn.Parameter):
        try:
            changed = rng.choice(CHANGES)(rng, arena, value)
        except (RuntimeError, ValueError):  # of an earlier change's tensor
            return any_value(rng, arena)
        return torch.nn.Parameter(changed, False) if rng.random() < 0.02 else changed
    return any_value(rng, arena)


def _hostile_list(rng: Random, items: list[Any]) -> list[Any]:
    kind = rng.randrange(5)
    if kind == 0 or not items:
        return []
    if kind == 1:
        return items[:-1]
    if kind == 2:
        return [*items, items[-1]]
    if kind == 3:
        return items * rng.choice((2, 300))
    return items[::-1]


def mutate(rng: Random, arena: Arena, value: Any) -> Any:
    """Returns the value with one element made hostile."""
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    if isinstance(value, dict) and value:
        name = rng.choice(sorted(value))
        return {**value, name: mutate(rng, arena, value[name])}
    if is_list and rng.random() < 0.7:
        i = rng.randrange(len(value))
        changed = [mutate(rng, arena, v) if k == i else v for k, v in enumerate(value)]
        return type(value)(changed)
    if isinstance(value, mf.tensor.Quantized) and rng.random() < 0.9:
        name = rng.choice([field.name for field in dataclasses.fields(value)])
        return dataclasses.replace(value, **{name: mutate(rng, arena, getattr(value, name))})
    if isinstance(value, mf.QuantizedTensor) and rng.random() < 0.9:
        return _spoil(rng, arena, value)
    return hostile(rng, arena, value)


def _spoil(rng: Random, arena: Arena, weight: mf.QuantizedTensor) -> mf.QuantizedTensor:
    """Makes one tensor of the weight hostile, after the constructor's checks."""
    side = rng.choice([s for s in ("rowwise", "columnwise") if getattr(weight, s) is not None])
    part, name = getattr(weight, side), rng.choice(("codes", "scale", "amax"))
    changed = hostile(rng, arena, getattr(part, name))
    if type(changed) is Tensor and is_inside_memory(changed):  # torch itself copies without a check
        setattr(weight, side, dataclasses.replace(part, **{name: changed}))
    return weight
