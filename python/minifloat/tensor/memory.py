"""Memory of a QuantizedTensor: that of its codes, scales and amaxes. It has none of values.

torch's methods that are no ops read the memory of a tensor's values. Those of this class do to the
inner tensors what they are to do, or raise a TypeError; torch's own end the process or read address
0. Code in C++ that asks for the address, as other libraries' kernels do, gets a RuntimeError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from .directions import TENSORS

if TYPE_CHECKING:
    from typing_extensions import Self

    from .quantized import Quantized

NO_ADDRESS = (
    "QuantizedTensor: address of memory: expected memory of values, got a weight of codes, which "
    "has none; call dequantize() for the values; give an optimizer that reads addresses, as "
    "Transformer Engine's FusedAdam does, masters (mf.distributed.quantize_master_weights), or "
    "take one of torch.optim or torchao"
)


class MemoryOfCodes:
    """A part of the class QuantizedTensor: torch's methods that read or move memory."""

    directions: list[Quantized]

    def inner_tensors(self) -> list[Tensor]:
        """Lists codes, scale and amax of each direction; some are empty."""
        return [getattr(part, name) for part in self.directions for name in TENSORS]

    def data_ptr(self) -> int:
        """Returns 0, by which torch's DCP and deepcopy tell a wrapper. C++ gets NO_ADDRESS."""
        return 0

    def share_memory_(self) -> Self:
        """Moves codes, scales and amaxes to shared memory, which other processes then write to."""
        for inner in self.inner_tensors():
            inner.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Tells whether codes, scales and amaxes are in shared memory."""
        return all(inner.is_shared() for inner in self.inner_tensors())

    def storage(self) -> NoReturn:
        """Refuses: safetensors, which asks for it, would need the values' memory.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "QuantizedTensor: a weight of codes has no memory of values, which safetensors "
            "(save_pretrained, save_file) writes; call mf.restore_(model) first, or keep the codes "
            "with torch.save(model.state_dict())"
        )

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuses, as refuse_memory does."""
        refuse_memory("numpy()")

    def __dlpack__(self, **options: object) -> NoReturn:
        """Refuses, as refuse_memory does."""
        refuse_memory("DLPack")


def has_memory(tensor: Tensor) -> bool:
    """Tells whether a tensor has memory, or no elements: FSDP2 frees that of resharded weights."""
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def refuse_memory(reader: str) -> NoReturn:
    """Raises TypeError for a reader of the values' memory.

    accelerate's disk_offload calls numpy(), and before that view(torch.int16) for bfloat16.
    """
    raise TypeError(
        f"QuantizedTensor: {reader}: expected memory of values, got a weight of codes, which has "
        "none; call dequantize() for the values; to offload codes to disk with accelerate, pass "
        "cpu_offload the state_dict of torch.load(path, mmap=True)"
    )
