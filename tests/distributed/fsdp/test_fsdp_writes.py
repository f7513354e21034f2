"""FSDP2 with weights gathered as codes: writes to weights after mf.step has exchanged amaxes.

A gather after a write uses the amaxes of the new values. Each write enlarges the weights, so that
former amaxes would saturate their codes.
"""

import minifloat as mf
import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from minifloat.distributed.fsdp.weight_tensors import ShardedWeight
from torch import nn

from tests.distributed.fsdp.test_fsdp import Counted
from tests.support import worlds
from tests.support.sharded_models import (
    WIDTH,
    Model,
    assert_equal,
    batch,
    built,
    sharded,
    train,
    whole,
)
from tests.support.worlds import last_words, run_world

RECIPES = ("fp8_tensorwise", "nvfp4", "fp8_rowwise")
FACTOR = 3.0


# ---- writes --------------------------------------------------------------------------------------


def parameters(model):
    return [p for p in model.parameters() if p.dim() == 2]


def write_each(model):
    for p in parameters(model):
        p.mul_(FACTOR)


def write_together(model):
    torch._foreach_mul_(parameters(model), FACTOR)


def write_locally(model):
    for p in parameters(model):
        if p.to_local().numel() > 0:
            p.to_local().copy_(FACTOR * p.to_local())


def write_in_inference(model):
    with torch.inference_mode():
        write_each(model)


def initialize(model):
    torch.manual_seed(0)
    for p in parameters(model):
        nn.init.normal_(p, std=FACTOR)


def write_to_state_dict(model):
    for t in model.state_dict().values():
        t.to_local().mul_(FACTOR)


def loaded(model):
    return {name: FACTOR * t for name, t in model.state_dict().items()}


def load(model):
    model.load_state_dict(loaded(model))


def assign(model):
    model.load_state_dict(loaded(model), assign=True)


def load_checkpoint(model, folder):
    """Loads into the tensors of a state dict, which are the model's."""
    dcp.save({"model": loaded(model)}, checkpoint_id=folder)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)


def scale(tensors):
    for t in tensors:
        t.mul_(FACTOR)


def write_compiled(model):
    torch.compile(scale, backend="aot_eager", fullgraph=True)(parameters(model))


def write_locally_compiled(model):
    local = [p.to_local() for p in parameters(model) if p.to_local().numel() > 0]
    if local:
        torch.compile(scale, backend="aot_eager", fullgraph=True)(local)


def write_to_views(model):
    for p in parameters(model):
        p.to_local().view(-1).mul_(FACTOR)


WRITES = (
    write_each,
    write_together,
    write_locally,
    write_to_views,
    write_in_inference,
    initialize,
    write_to_state_dict,
    load,
    assign,
    write_compiled,
    write_locally_compiled,
)


def require_current(model, what):
    """Checks that a gather has the codes of the present weights, as one process would."""
    alone = type(model)()
    alone.load_state_dict(whole(model))
    recipe = model.blocks[0].up.recipe
    mf.quantize_(alone, recipe, keep="nothing", data_parallel_rank=0)
    assert torch.equal(model(batch(5)), alone(batch(5))), what
    model.reshard()  # the root keeps its weights whole after forward


def check_writes(rank, folder):
    for recipe in RECIPES:
        model = sharded(built(recipe))
        train(model, 1, use_step=True)
        for write in (*WRITES, lambda m, to=f"{folder}/{recipe}": load_checkpoint(m, to)):
            mf.step(model)
            with torch.no_grad():
                write(model)
            require_current(model, (recipe, write))
            torch._dynamo.reset()


def test_a_write_is_seen(tmp_path):
    run_world(2, check_writes, str(tmp_path))


def check_values_that_return(rank):
    """Evaluates smaller weights, between writes that torch does not count."""
    for recipe in RECIPES:
        model = sharded(built(recipe))
        train(model, 1, use_step=True)
        shards = [p._local_tensor.shard.data for p in parameters(model)]
        model.eval()
        for shard in shards:
            shard.mul_(1 / 64)
        with torch.no_grad():
            model(batch(5))
        model.reshard()
        for shard in shards:
            shard.mul_(64)
        model.train()
        require_current(model, recipe)


def test_values_that_return_after_an_evaluation():
    run_world(2, check_values_that_return)


def results_of_scales(model):
    """Evaluates between the writes of other amaxes: at mf.step, and in a loaded state."""
    found = []

    def evaluate():
        model.eval()
        with torch.no_grad():
            found.append(model(batch(1)))
        model.train()

    saved = mf.training_state(model)
    model(batch(0)).square().mean().backward()
    evaluate()
    mf.step(model)
    evaluate()
    mf.load_training_state(model, saved)
    evaluate()
    return found


def check_scales_after_an_evaluation(rank):
    """FSDP2 gathers nothing again for the root, and for blocks without reshard_after_forward."""
    want = results_of_scales(built("fp8_delayed"))
    assert not torch.equal(want[0], want[1])
    for options in ({}, {"reshard_after_forward": False}):
        got = results_of_scales(sharded(built("fp8_delayed"), **options))
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), (options, i)


def test_scales_that_change_after_an_evaluation():
    run_world(2, check_scales_after_an_evaluation)


def check_first_writes(rank, folder):
    """Checks the first write to a model, of whose weights no other tensor was made before."""
    for write in (*WRITES, lambda m: load_checkpoint(m, folder)):
        ShardedWeight.is_traced = False
        model, like = sharded(built("fp8_tensorwise")), sharded(built("fp8_tensorwise"))
        for m in (model, like):
            train(m, 1, use_step=True)
            with torch.no_grad():
                write(m)
        mf.step(like)
        assert torch.equal(model(batch(5)), like(batch(5))), write
        torch._dynamo.reset()


def check_kept_views(rank):
    """Checks writes to tensors that were made before mf.step."""
    for make in (lambda p: p.to_local().view(-1), lambda p: p.detach().to_local()):
        model, like = sharded(built("nvfp4")), sharded(built("nvfp4"))
        views = [[make(p) for p in parameters(m)] for m in (model, like)]
        for m, of_model in zip((model, like), views):
            train(m, 2, use_step=True)
            with torch.no_grad():
                scale(of_model)
        mf.step(like)
        assert torch.equal(model(batch(5)), like(batch(5)))


def check_code_compiled_before(rank):
    """Checks writes by code that was compiled for other weights, whose sizes are the same."""
    compiled = torch.compile(scale, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        model, like = sharded(built("fp8_tensorwise")), sharded(built("fp8_tensorwise"))
        for m in (model, like):
            train(m, 1, use_step=True)
            with torch.no_grad():
                compiled(parameters(m))
        mf.step(like)
        assert torch.equal(model(batch(5)), like(batch(5)))


def test_a_first_write_is_seen(tmp_path):
    run_world(2, check_first_writes, str(tmp_path))
    run_world(2, check_kept_views)
    run_world(2, check_code_compiled_before)


class ShortHead(Model):
    """A model whose last weight has fewer rows than a world of four has ranks."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)


def check_short(rank, folder):
    """Checks weights that some ranks have no rows of: those ranks see no local write."""
    for recipe in RECIPES:
        torch.manual_seed(0)
        model = ShortHead()
        mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0)
        sharded(model)
        train(model, 1, use_step=True)
        for write in (write_locally, lambda m, to=f"{folder}/{recipe}": load_checkpoint(m, to)):
            mf.step(model)
            with torch.no_grad():
                write(model)
            require_current(model, (recipe, write))


def test_ranks_without_rows(tmp_path):
    run_world(4, check_short, str(tmp_path))


# ---- steps that are compiled ---------------------------------------------------------------------


def trained(model, backend):
    """Trains with mf.step after the first step alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    step = optimizer.step
    if backend is not None:
        step = torch.compile(optimizer.step, backend=backend)
    losses = []
    for i in range(5):
        loss = model(batch(i)).square().mean()
        loss.backward()
        (optimizer.step if i == 0 else step)()
        optimizer.zero_grad()
        if i == 0:
            mf.step(model)
        losses.append(loss.item())
    return losses


def check_compiled_steps(rank, backend, recipes):
    with torch._inductor.config.patch(compile_threads=1):
        for recipe in recipes:
            torch._dynamo.reset()
            alone, model = built(recipe), sharded(built(recipe))
            assert trained(model, backend) == trained(alone, None), recipe
            assert_equal(whole(model), whole(alone), recipe)


def test_compiled_steps():
    run_world(2, check_compiled_steps, "aot_eager", RECIPES)


@pytest.mark.slow
def test_steps_of_inductor(monkeypatch):
    monkeypatch.setattr(worlds, "SECONDS", 600)  # the compiler's
    run_world(2, check_compiled_steps, "inductor", RECIPES[:1])


# ---- what is exchanged ---------------------------------------------------------------------------


def check_exchanges(rank):
    """Checks that a write costs an exchange in each later gather, until the next mf.step."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(monkeypatch)
        for recipe in RECIPES:
            model = sharded(built(recipe))
            train(model, 1, use_step=True)
            other = nn.Linear(4, 4)  # its optimizer writes to no weight of the model
            for takes_step in (True, False, True):
                if takes_step:
                    mf.step(model)
                    torch.optim.SGD(other.parameters()).step()
                else:
                    with torch.no_grad():
                        model.blocks[0].up.weight.mul_(1.0)
                counted.calls.clear()
                for _ in range(2):
                    model(batch(1)).sum().backward()
                    reduced = len(counted.take("all_reduce"))
                    assert (reduced == 0) == takes_step, (recipe, takes_step)


def test_exchanges():
    run_world(2, check_exchanges)


# ---- one rank writes alone -----------------------------------------------------------------------


def written_by_rank_one(rank):
    """Trains a step, after which rank 1 alone writes to its shard of a weight."""
    model = sharded(built("fp8_tensorwise"))
    train(model, 1, use_step=True)
    if rank == 1:
        with torch.no_grad():
            model.blocks[0].up.weight.to_local().mul_(FACTOR)
    return model


def write_alone(rank):
    written_by_rank_one(rank)(batch(1))


def check_all_call_step(rank):
    """Checks that mf.step on all ranks takes over what one rank has written."""
    model = written_by_rank_one(rank)
    mf.step(model)
    require_current(model, "mf.step")
    dist.barrier()


def test_a_rank_that_writes_alone():
    other, writer = last_words(2, write_alone, seconds=8)
    assert "ValueError: fully_shard: expected all 2 ranks to have written to blocks.0.up" in writer
    assert "ranks [0] have not arrived" in writer
    assert other is not None
    run_world(2, check_all_call_step)
