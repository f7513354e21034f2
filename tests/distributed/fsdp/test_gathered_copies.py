"""FSDP2 with weights gathered as codes: copies never read memory that FSDP2 has freed."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from minifloat.distributed.fsdp.weight_tensors import GatheredWeight
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from tests.distributed.fsdp import test_fsdp_experts as experts
from tests.support import sharded_models as layers
from tests.support.sharded_models import assert_equal, whole
from tests.support.worlds import device_of, run_world

RECIPES = ["fp8_tensorwise", "fp8_delayed", "fp8_blockwise", "mxfp8", "nvfp4"]


# ---- saved tensors -------------------------------------------------------------------------------


def require_same_training(sharded, train, what):
    """Trains two models, the second with hooks that copy each saved tensor, as offloads do."""
    results = []
    for hooks in (nullcontext(), saved_tensors_hooks(torch.clone, lambda t: t)):
        model = sharded()
        with hooks:
            losses = train(model)
        results.append((losses, whole(model)))
    (want, weights), (got, weights_of_copies) = results
    assert got == want, what
    assert_equal(weights_of_copies, weights, what)


def check_saved_copies(rank, device_type="cpu"):
    device = device_of(rank, device_type)
    for recipe in RECIPES:
        for recomputes, reshards in ((False, True), (True, True), (False, False)):

            def sharded(recipe=recipe, recomputes=recomputes, reshards=reshards):
                model = layers.built(recipe, is_recomputed=recomputes).to(device)
                return layers.sharded(model, reshard_after_forward=reshards)

            require_same_training(sharded, layers.train, (recipe, recomputes, reshards))


def test_saved_tensors_are_copied_between_the_passes():
    run_world(2, check_saved_copies)


def check_saved_copies_of_experts(rank):
    for recipe in RECIPES:
        require_same_training(
            lambda recipe=recipe: experts.sharded(experts.built(recipe, 4)[0]),
            experts.train,
            recipe,
        )


def test_saved_tensors_of_experts_are_copied_between_the_passes():
    run_world(2, check_saved_copies_of_experts)


# ---- copies --------------------------------------------------------------------------------------


def saved(weight):
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


CUT = 32  # a multiple of the blocks of mxfp8
COPIES = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "torch.tensor": torch.tensor,
    "saved": saved,
    "to bfloat16": lambda w: w.to(torch.bfloat16),
    "bfloat16": lambda w: w.bfloat16(),
    "to copy": lambda w: w.to(torch.float32, copy=True),
    "type": lambda w: w.type(torch.bfloat16),
    "split": lambda w: torch.cat(w.split(CUT)),
    "slice": lambda w: torch.cat([w[:CUT], w[CUT:]]),
}
WRITES = {
    "mul_": lambda w: w.mul_(2),
    "copy_": lambda w: w.copy_(torch.zeros(w.shape)),
    "zero_": lambda w: w.zero_(),
    "an element": lambda w: w.__setitem__(0, 1.0),
    "data": lambda w: setattr(w, "data", torch.zeros(w.shape)),
    "update_usage": lambda w: w.update_usage(columnwise=False),
    "a slice": lambda w: w[:CUT].zero_(),
}


def check_copies(rank):
    for recipe in RECIPES:
        model = layers.sharded(layers.built(recipe))
        layers.train(model, 1)
        module = model.blocks[0]
        module.unshard()
        weight = module.up.weight.detach()
        assert type(weight) is GatheredWeight
        want = weight.dequantize()
        is_cut = recipe != "fp8_blockwise"  # whose blocks have more rows
        for name, copied in COPIES.items():
            if name in ("split", "slice") and not is_cut:
                continue
            found = copied(weight)
            assert not isinstance(found, GatheredWeight), (recipe, name)
            assert torch.equal(found, want.to(found.dtype)), (recipe, name)
            found.zero_()
            assert torch.equal(weight.dequantize(), want), (recipe, name)
        for name, write in WRITES.items():
            if name == "a slice" and not is_cut:
                continue
            with pytest.raises(ValueError, match="a write to"):
                write(weight)
            assert torch.equal(weight.dequantize(), want), (recipe, name)
        assert weight.to(torch.float32) is weight
        cast = module.up.weight.to(torch.bfloat16)
        cast.float().sum().backward()
        gradient = module.up.weight.grad
        assert torch.equal(gradient, torch.ones(weight.shape))
        module.up.weight.grad = None
        module.reshard()
        assert isinstance(module.up.weight, DTensor)
        for empty in (torch.empty_like(weight), weight.new_empty(weight.shape)):  # read no codes
            assert (type(empty), empty.shape, empty.dtype) == (Tensor, want.shape, want.dtype)
        layers.train(model, 1)


def test_copies_have_values_and_writes_are_refused():
    run_world(2, check_copies)
