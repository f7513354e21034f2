"""The modules that `import minifloat` loads, and the module names in older checkpoints."""

import importlib
import io
import pickle
import subprocess
import sys

import minifloat as mf
import pytest
import torch
from minifloat import old_names

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
    assert "minifloat.distributed.fsdp.plan" in found
    of_torch = [name for name in found if name.startswith(("torch.distributed", "torch._dynamo"))]
    assert of_torch == []
    assert "minifloat.distributed.tensor_parallel.dtensor" not in found


@pytest.mark.parametrize("old", sorted(old_names.MODULES))
def test_a_pickle_finds_the_module_by_its_former_name(old):
    module = old_names.MODULES[old]
    assert importlib.import_module(f"minifloat.{old}") is module
    named = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
    assert named
    for value in named:
        if hasattr(value, "__qualname__"):
            pickled = f"cminifloat.{old}\n{value.__qualname__}\n.".encode()
            assert pickle.loads(pickled) is value


def test_quantized_weights_load_under_the_former_names():
    weight = mf.QuantizedTensor.from_tensor(torch.randn(32, 32), "mxfp8", "nvfp4")
    file = io.BytesIO()
    torch.save(weight, file, _use_new_zipfile_serialization=False)
    assert b"minifloat.tensor.quantized_tensor" in file.getvalue()
    former = file.getvalue().replace(b"minifloat.tensor.quantized_tensor\n", b"minifloat.tensor\n")
    former = former.replace(b"minifloat.tensor.quantized\n", b"minifloat.quantized\n")
    for weights_only in (True, False):
        loaded = torch.load(io.BytesIO(former), weights_only=weights_only)
        assert loaded.specs == weight.specs
        assert torch.equal(loaded.rowwise.codes, weight.rowwise.codes)
        assert torch.equal(loaded.columnwise.codes, weight.columnwise.codes)


def test_hooks_are_registered_once():
    from minifloat.nn import distributed_hooks

    with pytest.raises(RuntimeError, match="expected one registration"):
        distributed_hooks.register(distributed_hooks.hooks())
