"""Codes in shared memory and in other processes, and torch's methods that read or copy memory."""

import copy
import io
import multiprocessing
import subprocess
import sys
import tempfile

import minifloat as mf
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing  # so that processes receive tensors as shared memory
from torch import nn
from torch.distributed.checkpoint import staging

from tests.support.same_bits import require_same_bytes
from tests.support.worlds import run_world

RECIPES = ("fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4", "mxfp4")


def build(recipe, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    options = {"keep": "nothing", "data_parallel_rank": 0}
    mf.quantize_(model, recipe, primary=True, **options)
    return model


def batch():
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(1))


def inner_tensors(model):
    return [t for i in (0, 2) for t in model[i].weight.inner_tensors()]


# ---- every method of torch.Tensor that takes no arguments ----------------------------------------

# Prints each name before its call, so that a crash is seen, and what differs from a tensor of the
# same values: another value, or an error that only codes raise and that does not say so. 32 columns
# and rows, because some methods take square matrices. Codes of mxfp8 round to themselves.
CALLS = r"""
import sys, warnings
import minifloat as mf
import torch

warnings.simplefilter("ignore")
SPECS = "mxfp8", "mxfp8"
OF_TORCH = "is not supported for tensor subclasses"
SKIPPED = {
    "data_ptr", "untyped_storage", "_typed_storage",  # name memory, and codes have none of values
    "__subclasshook__", "__init_subclass__", "__new__", "__init__", "__del__", "__dir__",
    "__sizeof__", "__hash__", "__repr__", "__str__", "__format__", "__tensor_flatten__",
    "__torch_dispatch__", "__reduce__", "__getstate__", "__weakref__", "__class__", "__dict__",
    "__annotations__", "__doc__", "__module__",
}

def codes():
    torch.manual_seed(0)
    return mf.QuantizedTensor.from_tensor(torch.randn(32, 32), *SPECS)

def result(tensor, name):
    torch.manual_seed(1)
    try:
        found = getattr(tensor, name)
        return found() if callable(found) else found
    except Exception as error:
        return error

def differs(got, want):
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        if isinstance(got, mf.QuantizedTensor):
            got, want = got.dequantize(), mf.QuantizedTensor.from_tensor(want, *SPECS).dequantize()
        if got.shape != want.shape or got.dtype != want.dtype or got.layout != want.layout:
            return True
        if "torch.complex32" in str(got.dtype) or got.layout != torch.strided:
            got, want = (t.to_dense().to(torch.complex64) for t in (got, want))
        return not torch.equal(got.nan_to_num(), want.nan_to_num())
    if isinstance(want, (tuple, list)) and not isinstance(want, torch.Size):
        return len(got) != len(want) or any(map(differs, got, want))
    return type(got) is not type(want) or repr(got) != repr(want)

bad, calls = [], 0
for name in dir(torch.Tensor):
    if name in SKIPPED or (name.startswith("_") and not name.startswith("__")):
        continue
    want = result(codes().dequantize(), name)
    if isinstance(want, TypeError) and "argument" in str(want):
        continue
    print(name, flush=True)
    calls += 1
    w = codes()
    got = result(w, name)
    if isinstance(got, Exception):
        if isinstance(want, Exception) and type(got) is type(want):
            continue
        if not (str(got).startswith("QuantizedTensor: ") or OF_TORCH in str(got)):
            bad.append((name, repr(got), repr(want)[:200]))
    elif name in ("__iter__", "__reversed__", "__deepcopy__"):
        if differs([*got], [*want]):
            bad.append((name, "other values"))
    elif isinstance(want, Exception) or differs(got, want):
        bad.append((name, repr(got)[:200], repr(want)[:200]))
assert calls > 350, calls
assert not bad, bad
print("all called")
"""


def test_methods_without_arguments():
    ran = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True)
    assert ran.stdout.endswith("all called\n"), (ran.returncode, ran.stdout[-80:], ran.stderr)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda w: w.numpy(), "numpy"),
        (np.asarray, "numpy"),
        (torch.from_dlpack, "DLPack"),
        (lambda w: w.view(torch.int32), r"view\(torch.int32\)"),
        (lambda w: w.storage(), "safetensors"),
    ],
)
def test_values_have_no_memory(read, message):
    weight = build("mxfp8")[0].weight.detach()
    with pytest.raises(TypeError, match=f"QuantizedTensor: .*{message}.*; call"):
        read(weight)
    assert torch.equal(weight.view(weight.dtype).dequantize(), weight.dequantize())


def test_cpp_gets_no_address_of_values():
    """torch.Tensor.data_ptr calls what C++ calls. Python gets 0, which torch's DCP asks for."""
    weight = build("mxfp8")[0].weight
    moved = build("mxfp8")[0].weight
    moved.data = torch.ones(moved.shape)
    alone = weight.detach()
    for w in (weight, weight.data, moved, nn.Parameter(alone), copy.deepcopy(weight), alone.cpu()):
        with pytest.raises(RuntimeError, match=r"^QuantizedTensor: address of memory: .*;"):
            torch.Tensor.data_ptr(w)
        assert w.data_ptr() == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.t_(),
        lambda w: w.resize_(4, 4),
        lambda w: w.set_(torch.ones(4)),
        lambda w: w.unsqueeze_(0),
    ],
)
def test_an_op_in_place_keeps_the_shape(write):
    weight = build("mxfp8")[0].weight.detach()
    before = weight.dequantize()
    with pytest.raises(ValueError, match=r"keeps the shape \(64, 32\) of codes, got values \("):
        write(weight)
    assert torch.equal(weight.dequantize(), before)


# ---- shared memory -------------------------------------------------------------------------------


def use_and_zero(model, x, reply):
    """Sends what a model returns, then writes zeros to its weights."""
    torch.set_num_threads(1)
    y = model(x).detach().numpy()
    for i in (0, 2):
        model[i].weight.data.zero_()
    reply.put(y.tolist())


def assert_a_process_shares(model, method):
    x = batch()
    want = model(x).tolist()
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["minifloat"])
    reply = context.SimpleQueue()
    process = context.Process(target=use_and_zero, args=(model, x, reply), daemon=True)
    process.start()
    got = reply.get()
    process.join()
    assert process.exitcode == 0
    assert got == want
    assert not any(model[i].weight.dequantize().any() for i in (0, 2))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_of_codes_in_shared_memory(recipe):
    model = build(recipe)
    want = model(batch())
    weight = model[0].weight
    assert not weight.is_shared()
    assert model.share_memory() is model
    assert model[0].weight is weight
    assert weight.is_shared()
    assert all(t.is_shared() for t in inner_tensors(model))
    assert torch.equal(model(batch()), want)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = build(recipe, seed=1)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(batch()), want)
    assert_a_process_shares(model, "fork")


def test_a_model_of_codes_sent_to_a_process():
    """Pickling between processes moves tensors to shared memory; those of codes too."""
    model = build("nvfp4")
    assert_a_process_shares(model, "forkserver")
    assert model[0].weight.is_shared()


def test_pinned_codes_need_an_accelerator():
    weight = build("mxfp8")[0].weight.detach()
    assert not weight.is_pinned()
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pinned = weight.pin_memory()
    assert type(pinned) is mf.QuantizedTensor
    assert pinned.is_pinned()
    assert torch.equal(pinned.dequantize(), weight.dequantize())


# ---- copies that checkpoints stage ---------------------------------------------------------------


def save_asynchronously(rank, recipes):
    for recipe in recipes:
        model, other = build(recipe), build(recipe, seed=1)
        with tempfile.TemporaryDirectory() as folder:
            shares = staging.DefaultStager(staging.StagingOptions(False, True, False, False))
            for stager in (None, shares):
                state = {"model": model.state_dict()}
                dcp.async_save(
                    state, checkpoint_id=f"{folder}/{stager is None}", async_stager=stager
                ).result()
                state = {"model": other.state_dict()}
                dcp.load(state, checkpoint_id=f"{folder}/{stager is None}")
                other.load_state_dict(state["model"])
                pairs = zip(inner_tensors(other), inner_tensors(model), strict=True)
                for got, want in pairs:
                    require_same_bytes(got, want, recipe)


def test_an_asynchronous_checkpoint_has_the_codes():
    run_world(1, save_asynchronously, RECIPES)


def trained_once(model, forward):
    """Returns the output of a forward and the gradient that one backward gives the last weight."""
    y = forward(batch())
    y.square().mean().backward()
    return y, model[2].weight.grad


def wrap_in_ddp(rank):
    for recipe in RECIPES:
        model, alone = build(recipe), build(recipe)
        for each in (model, alone):
            each[0].weight.requires_grad_(False)
        ddp = nn.parallel.DistributedDataParallel(model, init_sync=False)
        got, want = trained_once(model, ddp), trained_once(alone, alone)
        got, want = [*got, *inner_tensors(model)], [*want, *inner_tensors(alone)]
        for a, b in zip(got, want, strict=True):
            require_same_bytes(a, b, recipe)


def test_ddp_without_a_sync_keeps_the_codes():
    run_world(2, wrap_in_ddp)


def test_new_empty_of_the_same_shape_is_memory_for_codes():
    weight = build("mxfp8")[0].weight.detach()
    like = weight.new_empty(weight.shape)
    assert (type(like), like.specs, like.dtype) == (mf.QuantizedTensor, weight.specs, weight.dtype)
    for other in (weight.new_empty(2, 2), weight.new_empty(weight.shape, dtype=torch.int32)):
        assert type(other) is torch.Tensor
