"""Writes through `.data` by PEFT and by averages of weights: no result comes from older codes.

Each test also runs with the decisions that CUDA takes, where a weight has no fingerprint.
"""

import copy

import minifloat as mf
import pytest
import pytorch_lightning as pl
import torch
from minifloat.nn.cache import operand_cache
from peft import IA3Config, LoraConfig, get_peft_model
from pytorch_lightning.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.reuse_counts import without_reuse
from tests.support.same_bits import require_same_numbers


@pytest.fixture(params=["fingerprints", "no fingerprints"], autouse=True)
def fingerprints(request, monkeypatch):
    if request.param == "no fingerprints":
        monkeypatch.setattr(operand_cache, "COMPARES_BYTES", False)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def batch(seed=1):
    return torch.randn(24, 64, generator=torch.Generator().manual_seed(seed))


def is_current(model, x):
    """Compares with a model that caches nothing, in two forwards: the second may read a cache."""
    for _ in range(2):
        require_same_numbers(model(x), without_reuse(model)(x))


# ---- PEFT ----------------------------------------------------------------------------------------


def with_adapters(primary):
    model = network()
    mf.quantize_(model, "mxfp8_2d", primary=primary)
    return get_peft_model(model, LoraConfig(target_modules=["0", "2"], init_lora_weights=False))


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_merged_adapters_are_in_the_codes(primary, trains):
    model, x = with_adapters(primary), batch()
    if trains:
        for i in range(3):  # micro-batches of one step, which cache the weights' codes
            model(batch(i)).sum().backward()
    else:
        model.eval()
    with torch.no_grad():
        for _ in range(3):
            apart = model(x)
        model.merge_adapter()
        merged = model(x)
        is_current(model, x)
        model.unmerge_adapter()
        if not primary:
            assert (model(x) - apart).abs().max() < 1e-5
        unloaded = model.merge_and_unload()
        require_same_numbers(unloaded(x), merged)
        is_current(unloaded, x)
        mf.step(unloaded)
        require_same_numbers(unloaded(x), merged)
    assert (merged - apart).abs().max() < 0.2 * apart.abs().max()
    assert not torch.equal(merged, apart)


ADAPTERS = {
    "LoRA": lambda: LoraConfig(target_modules=["0", "2"], init_lora_weights=False),
    "rsLoRA": lambda: LoraConfig(
        target_modules=["0", "2"], init_lora_weights=False, use_rslora=True
    ),
    "DoRA": lambda: LoraConfig(target_modules=["0", "2"], init_lora_weights=False, use_dora=True),
    "PiSSA": lambda: LoraConfig(target_modules=["0", "2"], init_lora_weights="pissa"),
    "OLoRA": lambda: LoraConfig(target_modules=["0", "2"], init_lora_weights="olora"),
    "IA3": lambda: IA3Config(
        target_modules=["0", "2"], feedforward_modules=[], init_ia3_weights=False
    ),
}


def rounded(weight, like):
    """Returns the values of a high-precision weight in the specs of `like`."""
    return mf.QuantizedTensor.from_tensor(weight, *like.specs).dequantize()


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_primary_base_is_written_as_a_high_precision_one_and_rounded_once(kind, safe):
    base = network()
    mf.quantize_(base, "mxfp8_2d", primary=True)
    twin = copy.deepcopy(base)
    mf.restore_(twin)  # the values of the codes
    values = base[0].weight.dequantize()
    adapted = []
    for model in (base, twin):
        torch.manual_seed(1)
        adapted.append(get_peft_model(model, ADAPTERS[kind]()))
    for i in (0, 2):
        weight, other = base[i].base_layer.weight, twin[i].base_layer.weight
        require_same_numbers(weight.dequantize(), rounded(other, weight), "set up")
        other.data = weight.dequantize()
    is_written = not torch.equal(base[0].base_layer.weight.dequantize(), values)
    assert is_written == (kind in ("PiSSA", "OLoRA"))
    with torch.no_grad():
        merged, wanted = (model.merge_and_unload(safe_merge=safe) for model in adapted)
    for i in (0, 2):
        weight = merged[i].weight
        assert isinstance(weight, mf.QuantizedTensor)
        require_same_numbers(weight.dequantize(), rounded(wanted[i].weight, weight), kind)
    is_current(merged, batch())


# ---- averages of weights -------------------------------------------------------------------------


def swap_as_diffusers(model, average):
    """Writes as EMAModel.store and EMAModel.copy_to do; returns the undoing, as restore does."""
    stored = [p.detach().clone() for p in model.parameters()]
    for p, new in zip(model.parameters(), average):
        p.data.copy_(new.data)

    def restore():
        for p, old in zip(model.parameters(), stored):
            p.data.copy_(old.data)

    return restore


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_an_average_that_is_swapped_in_and_out(mode):
    model = network()
    mf.quantize_(model, "mxfp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = [p.detach().clone() for p in model.parameters()]
    x = batch()
    for i in range(3):
        for j in range(2):
            model(batch(10 * i + j)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.5)
        model.train(mode == "train")
        with torch.no_grad():
            trained = [model(x) for _ in range(2)][-1]
            restore = swap_as_diffusers(model, average)
            averaged = model(x)
            is_current(model, x)
            restore()
            require_same_numbers(model(x), trained)
            is_current(model, x)
        assert not torch.equal(averaged, trained)
        model.train()


class Averaged(pl.LightningModule):
    """A module that checks, in each validation, that its layers read the weights of then."""

    def __init__(self):
        super().__init__()
        self.net = network()
        self.weights = []

    def training_step(self, x, index):
        return self.net(x[0]).square().mean()

    def validation_step(self, x, index):
        is_current(self.net, x[0])
        self.weights.append(copy.deepcopy(self.net[0].weight.detach()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_lightnings_average(tmp_path):
    module = Averaged()
    mf.quantize_(module, "mxfp8")
    data = DataLoader(TensorDataset(torch.randn(32, 64)), batch_size=8)
    pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=3,
        callbacks=[EMAWeightAveraging(decay=0.5)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    ).fit(module, data, data)
    assert len(module.weights) == 12
    assert not torch.equal(module.weights[0], module.weights[-1])
