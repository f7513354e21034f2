"""The check before a module's computation is replaced: both run on one small seeded input.

    replica       the module's code and settings, with seeded parameters, on the CPU, without hooks
    difference    None where two computations return the same, else a clause that says how they part

Nothing of the module is called, written or moved, so parameters may be on any device, on meta,
fake, of any dtype, codes or shards. The replica's widths are small where the caller maps sizes to
others. Functions that build inputs and replicas are decorated by `isolated`.

Values are integers of at most 3 times a power of two. Sums of their products are exact in float32,
in every order, below 2^24 terms. So what is compared differs by roundings after such sums alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

# Of a row's largest result. A result is a product of seeded values, through an activation, times a
# routing weight, summed over slots and biases. torch's and this library's activations are within 8
# units in the last place. With the other steps that is below 16 roundings of 2^-24 on each side, of
# terms of which none exceeds the largest result of its row twice: 2 * 16 * 2 * 2^-24 = 2^-18.
BOUND = 2.0**-18


def seeded(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    """Returns integers from -3 to 3, times `scale`: float32, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-3, 4, shape, generator=generator, device="cpu", dtype=torch.int8)
    return values.float() * scale


def replica(
    module: nn.Module, sizes: Mapping[int, int] | None = None, dtype: torch.dtype = torch.float32
) -> Any:
    """Returns a module of the same code and settings whose parameters are seeded values on the CPU.

    Args:
        module: it is not changed. The replica shares no tensor with it: modules and tensors among
            its attributes, and within their lists, tuples and dicts, have replicas too. Objects of
            other classes are shared, and modules that contain `module`.
        sizes: size -> another one, for dimensions of parameters and for attributes that are ints.
        dtype: of floating parameters and buffers.
    """
    made: dict[int, Any] = {}
    map_size = (sizes or {}).get

    def tensor(value: Tensor, scale: float, is_parameter: bool) -> Any:
        if id(value) not in made:
            shape = tuple(map_size(size, size) for size in value.shape)
            if is_parameter or value.is_meta or isinstance(value, FakeTensor):
                new = seeded(shape, len(made), scale)
            else:
                new = value.detach().to("cpu", copy=True)
            new = new.to(dtype if value.is_floating_point() else value.dtype)
            made[id(value)] = nn.Parameter(new, requires_grad=False) if is_parameter else new
        return made[id(value)]

    def setting(value: object) -> object:
        if isinstance(value, Tensor):
            return tensor(value, 1.0, is_parameter=False)
        if isinstance(value, nn.Module):
            contains = value is not module and any(part is module for part in value.modules())
            return value if contains else build(value)
        if type(value) is tuple:
            return tuple(map(setting, value))
        if not isinstance(value, (dict, list, set)) or id(value) in made:
            return made.get(id(value), value)
        new = made[id(value)] = copy.copy(value)
        if not isinstance(new, set):
            for key in new if isinstance(new, dict) else range(len(new)):
                new[key] = setting(new[key])
        return new

    def build(source: nn.Module) -> Any:
        if id(source) in made:
            return made[id(source)]
        new = made[id(source)] = object.__new__(type(source))
        empty = nn.Module().__dict__  # its keys are torch's own state: tensors, children, hooks
        settings = {k: v for k, v in source.__dict__.items() if k not in empty}
        settings.pop("_compiled_call_impl", None)
        new.__dict__.update(empty, training=source.training)
        for key, value in settings.items():
            is_size = type(value) is int
            new.__dict__[key] = map_size(value, value) if is_size else setting(value)
        for name, p in source._parameters.items():
            new._parameters[name] = None if p is None else tensor(p, 2.0**-3, is_parameter=True)
        for name, b in source._buffers.items():
            new._buffers[name] = None if b is None else tensor(b, 1.0, is_parameter=False)
        for name, child in source._modules.items():
            new._modules[name] = None if child is None else build(child)
        return new

    return build(module)


@contextmanager
def isolated() -> Iterator[None]:
    """Runs code on the CPU as outside any context of the caller's, and keeps torch's random state.

    The default dtype is float32. oneDNN is off, which rounds float32 products where the caller has
    allowed that.
    """
    dtype = torch.get_default_dtype()
    with (
        torch.backends.mkldnn.flags(enabled=False),
        _disable_current_modes(),  # fake tensors, selective checkpointing
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        torch.default_generator.manual_seed(0)  # so that all ranks come to one result
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def difference(
    theirs: Callable[[], object], ours: Callable[[], Tensor], bound: float = BOUND
) -> str | None:
    """Runs a module's own computation and the one that would replace it, and compares them.

    Args:
        theirs, ours: both return a tensor, of the same replica and input.
        bound: of the difference, relative to the largest magnitude of its row; 0: equal bits.

    Returns:
        None where the results are the same; else a clause about the module's own computation.
    """
    with isolated():
        try:
            want = theirs()
        except Exception as error:  # whatever foreign code raises
            text = str(error).partition("\n")[0]
            return f"cannot run on a small input: {type(error).__name__}: {text}"
        if not isinstance(want, Tensor):
            return f"returns a {type(want).__name__}, not a tensor"
        try:
            got = ours()
        except (RuntimeError, TypeError, ValueError) as error:
            return f"takes what minifloat's does not: {str(error).partition(chr(10))[0]}"
        if want.shape != got.shape or want.dtype != got.dtype:
            return (
                f"returns {want.dtype} {tuple(want.shape)} where minifloat's returns {got.dtype} "
                f"{tuple(got.shape)}"
            )
        if bound == 0:
            return None if torch.equal(want, got) else "returns other bits than minifloat's"
        want, got = want.double(), got.double()
        largest = want.abs().amax(-1, keepdim=True)
        relative = ((want - got).abs() / largest.clamp(min=torch.finfo(torch.float32).tiny)).max()
        if relative <= bound:
            return None
    return f"differs from minifloat's by {float(relative):.2g} of the largest value"
