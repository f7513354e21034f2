"""Comparisons by bits: of tensors, of quantized values and weights, of several tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import minifloat as mf
import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def bits(t: Tensor) -> Tensor:
    """Returns the elements as integers, on the CPU."""
    t = t.detach().cpu().contiguous()
    return t.view(INTEGERS[t.element_size()])


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors to the CPU, those of a device at once: each copy waits for the device."""
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    copied = {}
    for device in {t.device for t in flat}:
        there = [t for t in flat if t.device == device]
        copied[device] = iter(torch.cat(there).cpu().split([t.numel() for t in there]))
    # A copy of each part begins where its dtype may.
    parts = [next(copied[t.device]).clone() for t in flat]
    return [part.view(t.dtype).view(t.shape) for part, t in zip(parts, tensors)]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Tells whether shapes and bytes are equal."""
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


# ---- Tensors -------------------------------------------------------------------------------------


def require_same(got: Tensor, want: Tensor, what: Any = "tensor") -> None:
    """Compares bit for bit. fp32 NaNs are equal, since processors have different NaN bits."""
    require_form(got, want, what)
    got, want = got.detach().cpu(), want.detach().cpu()
    wrong = bits(got) != bits(want)
    if got.dtype == torch.float32:
        wrong &= ~(got.isnan() & want.isnan())
    require_none(wrong, got, want, what)


def require_same_bytes(got: Tensor, want: Tensor, what: Any = "tensor") -> None:
    """Compares every bit, those of NaN too."""
    require_form(got, want, what)
    require_none(bits(got) != bits(want), got, want, what)


def require_same_numbers(got: Tensor, want: Tensor, what: Any = "tensor") -> None:
    """Compares bit for bit. A NaN is an error."""
    require_same_bytes(got, want, what)
    assert not got.isnan().any(), f"{what}: NaN"


def require_form(got: Tensor, want: Tensor, what: Any) -> None:
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} for {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype} for {want.dtype}"


def require_none(wrong: Tensor, got: Tensor, want: Tensor, what: Any) -> None:
    if not wrong.any():
        return
    first = tuple(wrong.nonzero()[0].tolist())
    digits = 2 * got.element_size()
    mask = (1 << (4 * digits)) - 1
    a, b = (int(bits(t)[first]) & mask for t in (got, want))
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, first at {first}: "
        f"{a:#0{digits + 2}x} ({got[first].item()}) for {b:#0{digits + 2}x} ({want[first].item()})"
    )


# ---- Several tensors -----------------------------------------------------------------------------

Named = Mapping[str, Tensor | None] | Sequence[Tensor | None]


def require_all_same(
    got: Named,
    want: Named,
    what: Any = "outputs",
    compare: Callable[[Tensor, Tensor, Any], None] = require_same,
) -> None:
    """Compares named tensors, or tensors in order. None equals None alone."""
    if not isinstance(got, Mapping) or not isinstance(want, Mapping):
        got, want = ({str(i): t for i, t in enumerate(each)} for each in (got, want))
    assert got.keys() == want.keys(), f"{what}: {sorted(got)} for {sorted(want)}"
    there = {name: t for name, t in got.items() if type(t) is Tensor and t.is_cuda}
    got = {**got, **dict(zip(there, on_cpu([*there.values()])))}
    for name, a in got.items():
        b = want[name]
        assert (a is None) == (b is None), f"{what}, {name}: {a} for {b}"
        if a is not None and b is not None:
            compare(a, b, f"{what}, {name}")


def require_same_results(got: Named, want: Named, what: Any = "results") -> None:
    """Compares the results of two models. A NaN is an error."""
    require_all_same(got, want, what, require_same_numbers)


# ---- Quantized values ----------------------------------------------------------------------------


def require_same_parts(
    got: mf.tensor.Quantized, want: mf.tensor.Quantized, what: Any = "operand"
) -> None:
    """Compares every bit of codes, scales and amaxes."""
    assert got.spec == want.spec, f"{what}: {got.spec} for {want.spec}"
    for name in ("codes", "scale", "amax"):
        where = f"{what}, {got.spec}, {name}"
        require_same_bytes(getattr(got, name), getattr(want, name), where)


def require_same_weight(
    got: mf.QuantizedTensor, want: mf.QuantizedTensor, what: Any = "weight"
) -> None:
    """Compares every bit of both directions of a weight."""
    assert type(got) is type(want) is mf.QuantizedTensor, what
    assert got.shape == want.shape, f"{what}: {got.shape} for {want.shape}"
    assert got.specs == want.specs, f"{what}: {got.specs} for {want.specs}"
    for side in ("rowwise", "columnwise"):
        a, b = getattr(got, side), getattr(want, side)
        assert (a is None) == (b is None), f"{what}, {side}: {a} for {b}"
        if a is not None:
            require_same_parts(a, b, f"{what}, {side}")
