"""What brings values of tensors to the host: on a GPU each waits for it."""

from torch.overrides import TorchFunctionMode

NAMES = ("tolist", "item", "cpu", "numpy", "nonzero", "masked_select", "unique")
NAMES += ("__bool__", "__int__", "__index__", "__float__", "__contains__")


class HostReads(TorchFunctionMode):
    """Lists the names of such calls."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ in NAMES:
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))
