"""What the server of ranks imports (worlds.py): each rank is forked from it, and has it at once.

All of it stays. So the garbage collector no longer reads it: each collection in a rank, as the end
of a process group's, would take 0.15 s and copy the memory that ranks share.
"""

import gc
from unittest.mock import patch

import minifloat  # noqa: F401
import pytest  # noqa: F401  (the main module of `python -m pytest`, which ranks import)
import torch

# CUDA that a process has asked for devices is of no use in those that are forked from it.
with patch.object(torch.cuda, "is_available", return_value=False):
    import torch._dynamo.repro.after_aot  # what the first compiled call would import
    import torch._dynamo.testing
    import torch._inductor.lowering
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

gc.collect()
gc.freeze()
