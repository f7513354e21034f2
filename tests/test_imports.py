"""The modules that `import minifloat` loads, and the functions that they register."""

import subprocess
import sys

LOADED = """
import sys
import torch
before = set(sys.modules)
import minifloat as mf
layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
mf.quantize_(layer, "nvfp4")
layer(torch.randn(16, 64)).sum().backward()
mf.step(layer)
print(*(set(sys.modules) - before), sep="\\n")
"""


def test_one_process_loads_nothing_of_torch_distributed_the_compiler_or_megatron():
    found = subprocess.run(
        [sys.executable, "-c", LOADED], check=True, capture_output=True, text=True
    ).stdout.split("\n")
    assert "minifloat.distributed.fsdp.gather" in found
    others = ("torch.distributed", "torch._dynamo", "megatron")
    assert [name for name in found if name.startswith(others)] == []
    assert "minifloat.distributed.tensor_parallel.dtensor" not in found
    assert [name for name in found if "megatron" in name] == []


def test_every_function_is_registered():
    from minifloat.nn.registry import distributed_functions, expert_functions

    assert vars(distributed_functions).keys() == type(distributed_functions).__annotations__.keys()
    assert vars(expert_functions).keys() == type(expert_functions).__annotations__.keys()
