"""The modules that `import minifloat` loads, and the hooks that they set."""

import subprocess
import sys

LOADED = """
import sys
import torch
before = set(sys.modules)
import minifloat as mf
layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
mf.quantize_(layer, "nvfp4", verbose=False)
layer(torch.randn(16, 64)).sum().backward()
mf.step(layer)
print(*(set(sys.modules) - before), sep="\\n")
"""


def test_one_process_loads_nothing_of_torch_distributed_or_the_compiler():
    found = subprocess.run(
        [sys.executable, "-c", LOADED], check=True, capture_output=True, text=True
    ).stdout.split("\n")
    assert "minifloat.distributed.fsdp.gather" in found
    of_torch = [name for name in found if name.startswith(("torch.distributed", "torch._dynamo"))]
    assert of_torch == []
    assert "minifloat.distributed.tensor_parallel.dtensor" not in found


def test_every_hook_is_assigned():
    from minifloat.nn.hooks import expert_hooks, hooks

    assert vars(hooks).keys() == type(hooks).__annotations__.keys()
    assert vars(expert_hooks).keys() == type(expert_hooks).__annotations__.keys()
