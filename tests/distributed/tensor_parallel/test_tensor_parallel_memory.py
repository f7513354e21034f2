"""recompute="weight" of tensor-parallel layers: the bits and the messages without it,
and fewer saved bytes. Both multiply the same shards: repetitions (exact_sums.py)."""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.distributed.tensor_parallel.linear import linear
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.compiled import compiled
from tests.support.parallel_models import check_models
from tests.support.same_bits import require_same_results
from tests.support.saved_bytes import saved_bytes, storage_of
from tests.support.whole_layers import Case, values
from tests.support.worlds import run_world

RANKS = 2
RECIPES = [
    *mf.presets(),
    "fprop=nvfp4+sr+rht*nvfp4+rht dgrad=e4m3/row+sr*mxfp8+sr wgrad=e4m3/row+exact*mxfp4",
    "fprop=bf16*bf16 dgrad=e4m3/row*e4m3/row wgrad=bf16*bf16",
    "fprop=e4m3/tensor*e4m3/tensor dgrad=e4m3/row*e4m3/row wgrad=bf16*bf16",
]
PLACES = ((0, Replicate()), (0, Shard(1)), (1, Shard(2)), (None, Replicate()))  # of W, and of x
WIDTH, INNER, TOKENS = 128, 256, 64
FP8 = "fp8_rowwise"


class Messages(TorchDispatchMode):
    """Counts the collectives."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "_c10d_functional" and "wait" not in str(func)
        return func(*args, **(kwargs or {}))


def inputs_of(case, mesh, dim, x_placement):
    """Returns x, W, bias and the gradient of y over the mesh."""
    w_placement = Replicate() if dim is None else Shard(dim)
    b_placement = Shard(0) if dim == 0 else Replicate()
    g_placement = Shard(2) if dim == 0 else Replicate()
    placements = (x_placement, w_placement, b_placement)
    tensors = (case.x, case.w, case.b)
    leaves = [
        distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
        for t, p in zip(tensors, placements)
    ]
    return (*leaves, distribute_tensor(case.g, mesh, [g_placement]))


def results(case, mesh, dim, x_placement, recompute, wrap=lambda run: run):
    """Returns local y, dx, dW, db, the history, and the number of messages."""
    state = case.state()
    x, w, b, g = inputs_of(case, mesh, dim, x_placement)

    def run(x, w, b, rng, amax_history):
        return linear(x, w, b, case.recipe, rng=rng, amax_history=amax_history, recompute=recompute)

    with Messages() as messages:
        y = wrap(run)(x, w, b, state["rng"], state["amax_history"])
        assert dim != 1 or y.placements == (Partial(),)
        found = torch.autograd.grad(y, (x, w, b), g)
    tensors = [t.to_local() for t in (y.detach(), *found)]
    return [*tensors, state["amax_history"]], messages.count


def check_layers(rank, recipes, is_compiled):
    mesh = init_device_mesh("cpu", (RANKS,))
    for recipe in recipes:
        case = Case(recipe)
        for dim, x_placement in PLACES:
            torch._dynamo.reset()
            where, place = (recipe, dim, x_placement), (mesh, dim, x_placement)
            want, count = results(case, *place, "")
            wrap = compiled if is_compiled else (lambda run: run)
            got, count_again = results(case, *place, "weight", wrap)
            require_same_results(got, want, where)
            assert is_compiled or count_again == count, where


@pytest.mark.parametrize("recipes", [RECIPES[0::2], RECIPES[1::2]])
def test_bits_and_messages_of_a_layer(recipes):
    run_world(RANKS, check_layers, recipes, False)


def test_bits_of_a_compiled_layer():
    recipes = ["fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "nvfp4", "mxfp8"]
    run_world(RANKS, check_layers, recipes, True)


# ---- modules -------------------------------------------------------------------------------------


def built(recipe, recompute, mesh):
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(values(i, *parameter.shape))
    mf.quantize_(model, recipe, recompute=recompute, data_parallel_rank=0)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def parallel_pair(recipe, mesh):
    return [built(recipe, recompute, mesh) for recompute in (None, "weight")]


def tokens(seed=9):
    return values(seed, TOKENS, WIDTH).requires_grad_()


def train(model, run):
    """Runs two steps of two micro-batches: the codes of a weight are cached in the second."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(2):
        for i in range(2):
            x = tokens(10 * step + i)
            y = run(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        found += [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
    return found


def check_modules(rank, recipes):
    mesh = init_device_mesh("cpu", (RANKS,))
    runs = {
        "eager": lambda model: model,
        "checkpoint": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
        "compiled": compiled,
    }
    for recipe in recipes:
        for name, wrap in runs.items():
            torch._dynamo.reset()
            found = [train(model, wrap(model)) for model in parallel_pair(recipe, mesh)]
            require_same_results(found[1], found[0], (recipe, name))


@pytest.mark.slow
def test_bits_of_modules():
    run_world(RANKS, check_modules, ["fp8_tensorwise", "nvfp4", "fp8_delayed"])


def check_saved_bytes(rank):
    """Both layers save parameters instead of codes, which each rank counts of its shards."""
    mesh = init_device_mesh("cpu", (RANKS,))
    codes = 2 * WIDTH * INNER // RANKS
    for wrap in (lambda model: model, compiled):
        found = []
        for model in parallel_pair(FP8, mesh):
            x, run = tokens(), wrap(model)
            known = [x, *model.parameters()]
            found.append(saved_bytes(lambda run=run, x=x: run(x), known))
        assert codes <= found[0] - found[1] <= codes + 16 * (WIDTH + INNER), found


def test_saved_bytes():
    run_world(RANKS, check_saved_bytes)


def check_changed_weight(rank):
    mesh = init_device_mesh("cpu", (RANKS,))
    model = built("mxfp8", "weight", mesh)
    for layer in (model[0], model[2]):
        y = model(tokens())
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        dist.barrier()


def test_a_weight_that_changed_before_backward_raises():
    run_world(RANKS, check_changed_weight)


def check_codes(rank):
    """A weight whose codes are cached is not cast again, nor saved."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = built(FP8, "weight", mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        for _ in range(2):
            model(tokens()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
    x = tokens()
    shards = {storage_of(layer.weight).data_ptr() for layer in (model[0], model[2])}
    seen = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (seen.add(storage_of(t).data_ptr()), t)[1], lambda t: t
    ):
        y = model(x)
    assert not shards & seen
    y.sum().backward()


def test_cached_codes_are_read():
    run_world(RANKS, check_codes)


def check_with_fsdp(rank):
    """FSDP2 frees the shards that a forward has saved, and gathers them again before backward."""
    check_models(rank, ["fp8_rowwise", "mxfp8_2d"], 2, recompute="weight")


def test_shards_that_fsdp_gathers():
    run_world(4, check_with_fsdp)
