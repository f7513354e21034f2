"""FSDP2 moves each direction of a weight's codes for what reads it, and backward may read both.

The backward of a checkpointed block reads both: on demand at the first time, then with each gather.
"""

from datetime import timedelta

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from tests.distributed.fsdp.test_fsdp import Counted
from tests.support.pairs import pairs
from tests.support.sharded_models import assert_equal, whole
from tests.support.worlds import last_words, run_world

N, K = 512, 1024
WIDTH, INNER = 64, 128  # multiples of the ranks and of transforms
PRESETS = [name for name in mf.presets() if name != "bf16"]


# ---- models --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Checkpointed(nn.Module):
    """Runs its module's forward again in backward."""

    def __init__(self, module, use_reentrant):
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


class Experts(nn.Module):
    """Experts without a linear layer beside them."""

    def __init__(self):
        super().__init__()
        self.moe = mf.MoE(WIDTH, 32, 5, 2)

    def forward(self, x):
        return x + self.moe(x)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, WIDTH, generator=generator).requires_grad_()


WRAPPERS = {
    "kept": lambda module: module,
    "not reentrant": lambda module: Checkpointed(module, False),
    "reentrant": lambda module: Checkpointed(module, True),
    "torchtitan's": checkpoint_wrapper,  # which Lightning's and accelerate's is, too
}


def fully_sharded(model, **options):
    for module in (*model, model):
        fully_shard(module, **options)
    return model


def built(recipe, wrap=WRAPPERS["kept"], kind=Block):
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind())
    mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0)
    return nn.Sequential(*(wrap(module) for module in model))


# ---- bits ----------------------------------------------------------------------------------------

# Bits a weight before forward and before backward; and of rowwise codes that backward reads again.
BITS = {
    "nvfp4_pow2": ([4.5, 4.5], 4.5),
    "mxfp4": ([4.25, 4.25], 4.25),
    "fp8_rowwise": ([8.0, 8.0], 8.0),
    "nvfp4": ([4.03, 4.03], None),  # one 2D-block format, which transposes
    "mxfp8_nvfp4": ([12.3, 12.3], None),  # codes of two sizes, so that each gather moves both
}


def check_bits(rank):
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted, world = Counted(monkeypatch), dist.get_world_size()

        def sent():
            return [8 * size * world / (N * K) for size in counted.take("all_gather")]

        def require(want, where):
            got = sent()
            assert len(got) == len(want), (*where, got, want)
            for bits, most in zip(got, want):
                assert most - 0.1 < bits <= most + 0.02, (*where, got, want)

        for recipe, ((forward, backward), again) in BITS.items():
            for name, wrap in WRAPPERS.items():
                model = nn.Sequential(nn.Sequential(nn.Linear(K, N, bias=False)))
                mf.quantize_(model, recipe, keep="nothing")
                model[0] = wrap(model[0])
                fully_sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
                x = torch.randn(16, K, dtype=torch.bfloat16, requires_grad=True)
                model(x)  # the ranks agree on the dtype
                model[0].reshard()
                counted.calls.clear()
                extra = [] if again is None or name == "kept" else [again]
                for step in range(3):
                    where = (recipe, name, step)
                    with torch.no_grad():
                        model(x)
                    require([forward], (*where, "evaluation"))
                    y = model(x)
                    require([forward], (*where, "forward"))
                    y.sum().backward()
                    in_order = [backward, *extra] if step == 0 else [*extra, backward]
                    require(in_order, (*where, "backward"))


def test_bits_of_each_direction():
    run_world(2, check_bits)


# ---- results -------------------------------------------------------------------------------------

TWO_FORMATS = ("nvfp4_pow2", "mxfp4", "fp8_rowwise")  # one a direction: no transpose of the other


def run_steps(model, call, steps=3):
    """Returns the loss of each step and of an evaluation after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        call(model, step)
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
        model.eval()
        with torch.no_grad():
            losses.append(model(batch(90 + step)).square().mean().item())
        model.train()
    return losses


def once(model, step):
    model(batch(step)).square().mean().backward()


def twice(model, step):
    model(model(batch(step))).square().mean().backward()


def without_sync(model, step):
    is_sharded = hasattr(model, "set_requires_gradient_sync")
    for i in range(2):
        if is_sharded:
            model.set_requires_gradient_sync(i == 1)
            model.set_reshard_after_backward(i == 1)
        model(batch(2 * step + i)).square().mean().backward()


def changing(model, step):
    """Keeps gathered weights from forward in the second step, from backward in the third."""
    if hasattr(model, "set_reshard_after_forward"):
        for module in model:
            module.set_reshard_after_forward(step != 1)
            module.set_reshard_after_backward(step != 2)
    once(model, step)
    once(model, 10 + step)
    if hasattr(model, "reshard"):
        for module in model:
            module.reshard()


def check_results(rank):
    calls = [(call, {}) for call in (once, twice, without_sync, changing)]
    calls.append((once, {"reshard_after_forward": False}))
    for recipe, kind, name, (call, options) in pairs(
        TWO_FORMATS, (Block, Experts), WRAPPERS, calls
    ):
        where = (recipe, kind, name, call.__name__, options)
        alone = built(recipe, kind=kind)
        model = fully_sharded(built(recipe, WRAPPERS[name], kind), **options)
        assert run_steps(model, call) == run_steps(alone, call), where
        got = {clean(key): value for key, value in whole(model).items()}
        assert_equal(got, whole(alone), where)


def clean(key):
    return key.replace("_checkpoint_wrapped_module.", "").replace("module.", "")


def test_results_are_those_of_one_process():
    run_world(2, check_results)


# ---- compiled code -------------------------------------------------------------------------------


def compile_blocks(model):
    for module in model:
        module.compile(backend="aot_eager")
    return model


def compile_whole(model):
    return torch.compile(model, backend="aot_eager")


def check_compiled(rank):
    ways = compile_blocks, compile_whole
    for case in pairs(("mxfp4", "fp8_rowwise"), (Block, Experts), WRAPPERS, ways):
        recipe, kind, name, way = case
        torch._dynamo.reset()
        results = []
        for compiled in (lambda model: model, way):
            model = fully_sharded(built(recipe, WRAPPERS[name], kind))
            run = compiled(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                y = run(batch(step))
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                mf.step(model)
            results.append(whole(model) | {"y": y.detach()})
        assert_equal(*results, case)


def test_compiled_checkpoints():
    run_world(2, check_compiled)


# ---- CPUOffloadPolicy ----------------------------------------------------------------------------


def check_offload(rank):
    for recipe, kind, name in pairs(PRESETS, (Block, Experts), ("kept", "not reentrant")):
        alone = built(recipe, kind=kind)
        policy = CPUOffloadPolicy(pin_memory=False)
        model = fully_sharded(built(recipe, WRAPPERS[name], kind), offload_policy=policy)
        assert run_steps(model, once, 2) == run_steps(alone, once, 2), (recipe, kind, name)


def test_every_preset_offloaded_to_the_cpu():
    run_world(2, check_offload)


# ---- a rank that recomputes alone ----------------------------------------------------------------


def recompute_alone(rank):
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4), dist.group.WORLD)
    wrap = WRAPPERS["not reentrant" if rank == 0 else "kept"]
    model = built("mxfp4", wrap)
    fully_sharded(model)
    once(model, 0)


def test_a_rank_that_recomputes_alone_raises_an_error():
    words = last_words(2, recompute_alone, seconds=4)
    assert "expected all 2 ranks to run the forward of" in words[0]
    assert "but ranks [1] have not arrived" in words[0]
