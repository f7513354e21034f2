"""accelerate's offload of layers under a recipe, whose weights are values or codes."""

import accelerate
import minifloat as mf
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from torch import nn

from tests.support.same_bits import require_same

CPU = torch.device("cpu")
RECIPES = ("fp8_tensorwise", "mxfp8", "nvfp4", "mxfp4")
DEVICES = {"0": "cpu", "1": "cpu", "2": "disk"}


def build(recipe, primary, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)).to(dtype)
    mf.quantize_(model, recipe, primary=primary, keep="nothing")
    return model.eval()


def batch(dtype=torch.float32):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


def offload_from_file(model, folder):
    """Leaves the codes on disk: torch.load maps the file into memory."""
    torch.save(model.state_dict(), folder / "codes.pt")
    state = torch.load(folder / "codes.pt", mmap=True)
    return accelerate.cpu_offload(model, execution_device=CPU, state_dict=state)


OFFLOADS = {
    "cpu_offload": lambda m, _: accelerate.cpu_offload(m, execution_device=CPU),
    "cpu_offload of a file": offload_from_file,
    "dispatch_model": lambda m, _: accelerate.dispatch_model(
        m, {"0": "cpu", "1": "cpu", "2": "cpu"}, main_device="cpu", force_hooks=True
    ),
}
TO_DISK = {
    "disk_offload": lambda m, d: accelerate.disk_offload(m, d / "all", execution_device=CPU),
    "dispatch_model": lambda m, d: accelerate.dispatch_model(
        m, DEVICES, main_device="cpu", offload_dir=d / "last"
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("primary", [False, True])
def test_offloaded_layers_give_the_same_bits(recipe, dtype, primary, tmp_path):
    want = build(recipe, primary, dtype)(batch(dtype))
    offloads = OFFLOADS if primary else OFFLOADS | TO_DISK
    for name, offload in offloads.items():
        model = build(recipe, primary, dtype)
        seen = []
        model[0].register_forward_hook(lambda layer, x, y, seen=seen: seen.append(layer.weight))
        offload(model, tmp_path)
        with torch.no_grad():
            for _ in range(2):
                require_same(model(batch(dtype)), want, name)
        assert all(isinstance(w, mf.QuantizedTensor) == primary for w in (*seen, model[0].weight))
        remove_hook_from_submodules(model)
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())
        require_same(model(batch(dtype)), want, f"{name}, hooks removed")


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_that_are_written_between_forwards(recipe):
    model, other = build(recipe, True), build(recipe, True, seed=1)
    state = model.state_dict()
    accelerate.cpu_offload(model, execution_device=CPU, state_dict=state)
    with torch.no_grad():
        model(batch())
        for name, value in other.state_dict().items():
            state[name].copy_(value)
        require_same(model(batch()), other(batch()), "after the write")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", TO_DISK.values(), ids=TO_DISK)
def test_codes_are_not_written_to_disk_as_values(offload, dtype, tmp_path):
    model = build("nvfp4", True, dtype)
    with pytest.raises(TypeError, match=r"weight of codes, which has none; .*mmap=True"):
        offload(model, tmp_path)
    assert not list(tmp_path.glob("*/*weight.dat"))


def test_values_do_not_replace_codes():
    model, state = build("mxfp8", True), build("mxfp8", False).state_dict()
    accelerate.cpu_offload(model, execution_device=CPU, state_dict=state)
    with pytest.raises(TypeError, match=r"expected codes.*got values.*from_tensor"):
        model(batch())
