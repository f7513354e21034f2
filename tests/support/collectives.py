"""What ranks send within a statement, and the ops that are called."""

import torch
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
