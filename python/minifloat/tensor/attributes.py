"""Attributes that other code sets on a weight, where the weight becomes codes or values again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

# What a weight's __dict__ holds of this library: the codes, and what distributed/zero caches.
STATE = {
    *("rowwise", "columnwise", "is_slice", "_is_param", "columnwise_flat_codes", "master_plan"),
    *("title", "master_casts", "agreement", "transposes"),
}


def attributes_of(weight: Tensor) -> dict[str, Any]:
    """Returns what other code has set on a weight, such as Megatron-Core's partition_dim."""
    return {name: value for name, value in vars(weight).items() if name not in STATE}


@contextmanager
def attributes_kept(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Gives parameters that the statement replaces, or swaps, the attributes of those before.

    torch's nn.Module._apply swaps a subclass's parameter for a new one without attributes.
    """
    before = {name: attributes_of(module.get_parameter(name)) for name in names}
    yield
    for name, attributes in before.items():
        now = vars(module.get_parameter(name))
        now.update({k: v for k, v in attributes.items() if k not in now})
