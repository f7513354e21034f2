"""Several ranks over NCCL: gathered, sharded and parallel weights have the whole's bytes, two GPUs
train as one does, and a rank that is lost ends the others.

pytest tests/gpu/test_worlds.py                  a GPU each, or shared GPUs where there are fewer
pytest tests/gpu/test_worlds.py --device cpu     the same over gloo: tests the tests
"""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat._native import ops
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.distributed.fsdp import test_gradient_codes as gradients
from tests.distributed.fsdp.test_gathered_copies import check_saved_copies
from tests.distributed.tensor_parallel.test_tensor_parallel_primary import check_primary_layers
from tests.distributed.tensor_parallel.test_tensor_parallel_reuse import check_reuse
from tests.distributed.test_faults import LOST, check_goes_on, die, lose_a_rank_in_a_checkpoint
from tests.gpu.layer_cases import require_close
from tests.gpu.test_layers import tolerance
from tests.moe.test_expert_faults import lose_a_rank_in_forward
from tests.support.llama import ModelConfig, build_model, cross_entropy
from tests.support.parallel_layers import RESULTS, check_layers
from tests.support.parallel_models import EXACT, WIDTH, check_models
from tests.support.same_bits import require_same, require_same_parts, require_same_results
from tests.support.sharded_models import batch, built, sharded
from tests.support.whole_layers import BATCH, TOKENS, Case
from tests.support.worlds import KILLED, device_of, last_words, run_world

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RANKS = 2
GATHERED = ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"]
SHAPES = [(256, 192), (72, 80)]  # N, K: whole blocks, and shards that end inside one
MASTERS = ["e4m3/tensor", "e4m3/128x128", "mxfp8", "nvfp4/16x16"]
MASTERS += ["nvfp4+4over6", "nvfp4/16x16+4over6"]
PARALLEL = [*GATHERED, "fp8_delayed", "nvfp4_pow2", "mxfp8_nvfp4"]
PRIMARY = ["fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4"]
REUSED = ["fp8_tensorwise", "fp8_delayed", "mxfp8", "nvfp4"]
TIMEOUT = 20  # of the process group that loses a rank, in seconds
# Texts of errors about a lost peer. NCCL raises none: torch's watchdog ends the process.
LOST_OVER = {"cpu": LOST, "cuda": ("collective operation timeout", "NCCL error")}


def run_ranks(
    device: torch.device, fn: Callable[..., None], *args: Any, ranks: int = RANKS
) -> None:
    run_world(ranks, fn, *args, kind=device.type)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- FSDP2 ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """The sharded module: its layer's weight is whole inside the forward."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.layer = nn.Linear(k, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def check_weight(recipe: str, n: int, k: int, device: torch.device) -> None:
    """Checks the rowwise codes before forward and the columnwise ones before backward, twice."""
    weight = normal(n, n, k)
    model = nn.Sequential(Block(n, k), nn.Identity())
    with torch.no_grad():
        model[0].layer.weight.copy_(weight)
    model.to(device)
    mf.quantize_(model, recipe)
    layer = model[0].layer
    fully_shard(model[0])
    fully_shard(model)
    specs = layer.recipe.fprop.b, layer.recipe.dgrad.b
    seen: list[str] = []

    def check(columnwise: bool) -> None:
        whole = layer.weight
        if not isinstance(whole, mf.QuantizedTensor):
            seen.append("values")  # shards end inside a transform
            return
        got = whole.columnwise if columnwise else whole.rowwise
        want = mf.tensor.quantize(weight, specs[columnwise], columnwise=columnwise)
        require_same_parts(got, want, f"{recipe}, {n}x{k}, columnwise {columnwise}")
        seen.append("codes")

    layer.register_forward_hook(lambda *_: check(False))
    x = normal(1, 3, k).to(device).requires_grad_()
    for _ in range(2):
        y = model(x)
        y.register_hook(lambda g: check(True))
        y.sum().backward()
        mf.step(model)
    fits = "rht" not in specs[1] or n // dist.get_world_size() % 16 == 0
    assert seen == ["codes" if fits else "values"] * 4, (recipe, n, k, seen)


def check_gathered(rank: int, kind: str) -> None:
    for recipe in GATHERED:
        for shape in SHAPES:
            check_weight(recipe, *shape, device_of(rank, kind))


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_weights(device, ranks):
    run_ranks(device, check_gathered, device.type, ranks=ranks)


def test_saved_tensors_are_copied_between_the_passes(device):
    run_ranks(device, check_saved_copies, device.type)


class Late(nn.Module):
    """Holds the stream of the computation up, so that FSDP2's stream of casts runs ahead."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.cycles = cycles

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            torch.cuda._sleep(self.cycles)
        return x


def first_output(recipe: str, device: torch.device, cycles: int) -> Tensor:
    """Returns the output of a model at its first gather, which casts each weight alone."""
    blocks = [Block(256, 256) for _ in range(6)]
    with torch.no_grad():
        for i, block in enumerate(blocks):
            block.layer.weight.copy_(normal(i, 256, 256) * 4.0 ** (i - 6))  # scales that differ
    model = nn.Sequential(Late(cycles), *blocks, nn.Identity()).to(device)
    mf.quantize_(model, recipe)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model(normal(9, 16, 256).to(device)).detach()


def check_late_fills(rank: int, kind: str) -> None:
    device = device_of(rank, kind)
    for recipe in ("fp8_tensorwise", "nvfp4"):
        want = first_output(recipe, device, cycles=0)
        for _ in range(3):
            got = first_output(recipe, device, cycles=200_000_000)  # a tenth of a second
            require_same(got, want, f"{recipe}: output behind a busy stream")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_busy_stream_reads_the_scales_of_its_own_gather(device, ranks):
    run_ranks(device, check_late_fills, device.type, ranks=ranks)


# ---- Gradients in codes --------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_of_gradients_in_codes(device, ranks):
    """Compares the device's sums with the CPU's casts of the same gradients."""
    run_ranks(device, gradients.check_sums, device.type, ranks=ranks)


@pytest.mark.parametrize("name", ["bytes", "training", "not_finite", "options"])
def test_gradients_in_codes(device, name):
    run_ranks(device, getattr(gradients, f"check_{name}"), device.type)


def test_gradients_in_codes_of_two_replicas(device):
    run_ranks(device, gradients.check_hybrid, device.type, ranks=4)


def check_late_gradients(rank: int, kind: str) -> None:
    """Sums on a stream of their own, behind a kernel that writes the gradients late."""
    device, n = device_of(rank, kind), 5000
    model = fully_shard(nn.Linear(8, 8).to(device))
    mf.distributed.quantize_gradients_(model, "e4m3/1x128")
    ((_, _, group),) = gradients.sharded_modules(model)
    sums = []
    for cycles in (0, 200_000_000):  # a tenth of a second
        late, given, out = Late(cycles), normal(rank, RANKS * n).to(device), torch.empty(n)
        out = out.to(device)
        with torch.cuda.stream(torch.cuda.Stream()) if kind == "cuda" else nullcontext():
            doubled = late(given) * 2
            group._reduce_scatter_comm(out, doubled, dist.group.WORLD, dist.ReduceOp.SUM)
            sums.append(out * 1)
    if kind == "cuda":
        torch.cuda.synchronize()
    require_same(sums[1], sums[0], "sums behind a busy stream")


def test_a_busy_stream_sums_what_it_was_given(device):
    run_ranks(device, check_late_gradients, device.type)


# ---- Sharded masters -----------------------------------------------------------------------------


def check_masters(rank: int, kind: str, index: int | None = None) -> None:
    device, n, k = device_of(rank if index is None else index, kind), 130, 48
    cut = 1001  # odd, inside a block
    weights, masters, starts = [], [], []
    for i, spec in enumerate(MASTERS):
        zero = torch.zeros(n, k, device=device, dtype=torch.bfloat16)
        weights.append(mf.QuantizedTensor.from_tensor(zero, spec, spec))
        flat = normal(i, n * k).to(device)
        masters.append(flat[:cut] if rank == 0 else flat[cut:])
        starts.append(0 if rank == 0 else cut)
    fragments = None
    mf.distributed.quantize_master_weights(weights, masters, starts, dist.group.WORLD, fragments)
    for i, (spec, weight) in enumerate(zip(MASTERS, weights)):
        values = normal(i, n * k).view(n, k).bfloat16()
        want = mf.QuantizedTensor.from_tensor(values, spec, spec)
        require_same(weight.rowwise.scale, want.rowwise.scale, f"{spec}: scale")
        bits = 4 if "nvfp4" in spec else 8
        low, high = (0, cut) if rank == 0 else (cut + 1, n * k)
        begin, end = low * bits // 8 + (bits == 4), high * bits // 8 - (bits == 4)
        got, wanted = weight.rowwise.codes.view(-1), want.rowwise.codes.view(-1)
        require_same(got[begin:end], wanted[begin:end], f"{spec}: codes")


def test_sharded_masters(device):
    run_ranks(device, check_masters, device.type)


def test_sharded_masters_of_two_processes_on_one_gpu(device):
    """Reduces CUDA tensors over gloo."""
    run_world(RANKS, check_masters, device.type, 0)


# ---- ZeRO-3 --------------------------------------------------------------------------------------


def check_zero3(rank: int, kind: str) -> None:
    example = runpy.run_path(str(EXAMPLES / "train_zero3.py"))
    device = device_of(rank, kind)
    for recipe in example["RECIPES"]:
        losses, masters = example["train_zero3"](recipe, device)
        want, shards = example["train_fsdp"](recipe, device)
        assert losses == want, recipe
        require_same_results(masters, shards, recipe)


@pytest.mark.parametrize("ranks", [2, 4])
def test_zero3_trains_as_fsdp2_does(device, ranks):
    run_ranks(device, check_zero3, device.type, ranks=ranks)


# ---- Tensor parallel -----------------------------------------------------------------------------


def require_close_layers(
    got: list[Tensor], want: list[Tensor], case: Case, ranks: int, where: Any
) -> None:
    """Compares within the tolerance of 400-term sums, for sums of at most 1024 terms."""
    recipe, dtype = case.recipe, case.x.dtype
    limits = [tolerance(p, dtype) for p in (recipe.fprop, recipe.dgrad, recipe.wgrad)]
    for name, a, b, limit in zip(RESULTS, got, want, [*limits, 400 * 2.0**-24]):
        require_close(a, b, 3 * limit, f"{where} {name}")


def sums_are_exact(recipe: mf.Recipe, device: torch.device) -> bool:
    """Tells whether sums are exact: of small integers, except on FP8 or block-scaled engines."""
    if device.type == "cpu":
        return True
    major, minor = torch.cuda.get_device_capability(device)
    size = {"m": BATCH * TOKENS, "n": WIDTH, "k": WIDTH}
    engines = {
        ops.engine_of(str(product), 10 * major + minor, **size, out_dtype=torch.float32)
        for product in (recipe.fprop, recipe.dgrad, recipe.wgrad)
    }
    return engines == {"exact"}


def require_like_models(got: Tensor, want: Tensor, recipe: str, where: Any) -> None:
    """Compares for equality, or within the tolerance of two layers whose sums are cut."""
    if sums_are_exact(mf.Recipe(recipe), got.device):
        assert torch.equal(got, want), where
    else:
        require_close(got, want, 2 * 2.0**-7, str(where))


def test_tensor_parallel_layers(device):
    """Checks each rank's operands against one GPU's bytes: x whole, along K, or its tokens."""
    run_ranks(device, check_layers, PARALLEL, device.type, require_close_layers)


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 2), (4, 4), (4, 2)])
def test_parallel_models(device, ranks, tensor_parallel):
    """Checks tensor and sequence parallelism, also with gathered codes, and FSDP2 on four."""
    how = tensor_parallel, device.type, require_like_models
    run_ranks(device, check_models, EXACT, *how, ranks=ranks)


def test_primary_weights(device):
    run_ranks(device, check_primary_layers, PRIMARY, device.type, require_close_layers)


def test_unchanged_weights(device):
    run_ranks(device, check_reuse, REUSED, device.type)


# ---- Training ------------------------------------------------------------------------------------


def check_training(rank: int, kind: str) -> None:
    """Compares losses of a sharded Llama with those of one process.

    The first loss depends on no gradient. The product of half the rows may sum in another order, so
    bf16 logits differ by a rounding, 2^-9 of themselves, and the loss, log(300) at first, by less
    of itself. Before later losses each rank rounds its share of a gradient to bf16, 2^-8 of an
    element.
    """
    device, words = device_of(rank, kind), torch.arange(33) * 7
    for recipe in ("bf16", "mxfp8"):
        models = [build_model(ModelConfig(64, 2, 2, 1, 96, 300), 32, 1, kind) for _ in range(2)]
        if recipe != "bf16":
            for model in models:
                mf.quantize_(model, recipe)
        for module in (*models[1].layers, models[1]):
            fully_shard(module)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3) for model in models]
        for step in range(8):
            starts = torch.randint(300, (4, 1), generator=torch.Generator().manual_seed(step))
            ids, losses = ((starts + words) % 300).to(device), []
            parts = (ids, ids.chunk(RANKS)[rank])
            for model, optimizer, part in zip(models, optimizers, parts, strict=True):
                with torch.autocast(kind, torch.bfloat16):
                    logits = model(part[:, :-1])
                loss = cross_entropy(logits, part[:, 1:])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                mf.step(model)
                losses.append(loss.detach())
            alone, parallel = losses
            dist.all_reduce(parallel)
            limit = 2.0**-9 if step == 0 else 2.0**-8
            assert abs(parallel / RANKS - alone) <= limit * alone, (recipe, step, losses)


def test_training_is_one_process(device):
    run_ranks(device, check_training, device.type)


# ---- A lost rank ---------------------------------------------------------------------------------


def lose_a_rank(rank: int, kind: str) -> None:
    """Ends a rank in its second backward, while the other gathers and reduces gradients."""
    device = device_of(rank, kind)
    model = sharded(built("nvfp4").to(device))
    for is_last in (False, True):
        if is_last and rank == 1:
            model.blocks[0].register_full_backward_pre_hook(die)
        loss = model(batch(0).to(device)).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        assert norm.item() > 0  # waits for the device


def lose_a_rank_in_a_dispatch(rank: int, kind: str) -> None:
    lose_a_rank_in_forward(rank, "codes")


@pytest.mark.parametrize("lose", [lose_a_rank, lose_a_rank_in_a_dispatch])
def test_the_other_ends_when_a_rank_is_lost(device, lose):
    """Waits for the group's timeout, torch's dump after it, and the start of the ranks."""
    begin = time.monotonic()
    require_lost(device, last_words(RANKS, lose, device.type, seconds=TIMEOUT, kind=device.type))
    assert time.monotonic() - begin < 5 * TIMEOUT


def test_a_rank_lost_in_a_checkpoint_leaves_the_one_before(device, tmp_path):
    how = {"seconds": TIMEOUT, "kind": device.type}
    given = str(tmp_path), device.type
    require_lost(device, last_words(RANKS, lose_a_rank_in_a_checkpoint, *given, **how))
    assert not (tmp_path / "second" / ".metadata").exists()
    run_ranks(device, check_goes_on, *given)


def require_lost(device: torch.device, ends: list[str]) -> None:
    first, second = ends
    assert second == KILLED
    assert any(word in first for word in LOST_OVER[device.type]), first
