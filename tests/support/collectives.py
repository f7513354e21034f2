"""What ranks send within a statement, and the ops that are called."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """A record of the bytes that a rank gives to each all-gather."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


class Begun(TorchDispatchMode):
    """A record of the order in which ops are called, those of the given names or all.

    Collectives begin by an op of theirs, and end by `wait_tensor`.
    """

    def __init__(self, *wanted):
        super().__init__()
        self.wanted, self.names = wanted, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.rpartition("::")[2]
        if not self.wanted or name in self.wanted:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def rows_sent():
    """Yields a list of the rows, and the bytes of one, that a rank gives to each all-to-all."""
    sent, real = [], dist.all_to_all_single

    def counted(out, given, *args, **kwargs):
        if given.dtype == torch.uint8:
            sent.append(tuple(given.shape))
        return real(out, given, *args, **kwargs)

    with patch.object(dist, "all_to_all_single", counted):
        yield sent
