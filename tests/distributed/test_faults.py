"""Faults of one rank as others see them: it dies, hangs, differs, or has a NaN."""

import os
import signal
import time

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard

from tests.support.sharded_models import assert_equal, batch, built, sharded, train, whole
from tests.support.worlds import LOST, device_of, last_words, require_lost, run_world

TIMEOUT = 5  # of the process group, in seconds


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


# ---- a rank dies ---------------------------------------------------------------------------------


def lose_a_rank_in_a_step(rank):
    """Ends rank 1 in its backward pass, while others gather and reduce gradients."""
    model = sharded(built("nvfp4"))
    train(model, 1)
    if rank == 1:
        model.blocks[0].register_full_backward_pre_hook(die)
    train(model, 2)


def lose_a_rank_in_an_all_gather(rank):
    """Ends rank 1 before a collective that others are waiting in."""
    model = sharded(built("mxfp8"))
    train(model, 1)
    if rank == 1:
        time.sleep(0.5)
        die()
    model(batch(1))


def lose_a_rank_before_its_first_gather(rank):
    model = sharded(built("nvfp4"))
    dist.barrier()  # all are connected
    if rank == 1:
        time.sleep(0.5)
        die()
    model(batch(1))


def lose_a_rank_before_a_partial_cast(rank):
    master = torch.ones(32 * 48)
    weight = mf.QuantizedTensor.from_tensor(master.view(32, 48), "nvfp4/16x16")
    shards = [(begin, begin + 512) for begin in (0, 512, 1024)]
    begin, end = shards[rank]
    for step in range(2):
        if rank == 1 and step == 1:
            die()
        mf.distributed.quantize_master_weights(
            [weight], [master[begin:end]], [begin], dist.group.WORLD
        )


def hang_in_a_step(rank):
    """Leaves a live rank out of a collective."""
    model = sharded(built("nvfp4"))
    train(model, 1)
    if rank == 1:
        time.sleep(TIMEOUT + 2)
        die()
    train(model, 1)


LOSSES = {
    "in a step": (3, lose_a_rank_in_a_step, "_fsdp_collectives.py"),
    "in an all-gather": (2, lose_a_rank_in_an_all_gather, "all_gather"),
    "before its first gather": (
        2,
        lose_a_rank_before_its_first_gather,
        "ranks [1] have not arrived",
    ),
    "before a partial cast": (3, lose_a_rank_before_a_partial_cast, "ranks [1] have not arrived"),
    "by hanging": (2, hang_in_a_step, "all_gather"),
}


@pytest.mark.parametrize("moment", LOSSES)
def test_others_end_when_a_rank_is_lost(moment):
    """Checks that ranks end within the timeout, with the collective in their tracebacks."""
    world, lose_a_rank, word = LOSSES[moment]
    require_lost(world, lose_a_rank, seconds=TIMEOUT, word=word)


# ---- the checkpoint before it --------------------------------------------------------------------


def state_of(model):
    return {"model": model.state_dict(), "minifloat": mf.training_state(model)}


def lose_a_rank_in_a_checkpoint(rank, folder, kind="cpu"):
    """Ends rank 1 in the second checkpoint, when it writes its file."""
    model = sharded(built("nvfp4").to(device_of(rank, kind)))
    train(model, 2)
    dcp.save(state_of(model), checkpoint_id=f"{folder}/first")
    train(model, 1)
    writer = FileSystemWriter(f"{folder}/second")
    if rank == 1:
        writer.write_data = die
    dcp.save(state_of(model), storage_writer=writer)


def loaded(folder, model, **options):
    state = state_of(model)
    dcp.load(state, checkpoint_id=f"{folder}/first", **options)
    model.load_state_dict(state["model"])
    mf.load_training_state(model, state["minifloat"])
    return model


def check_goes_on(rank, folder, kind="cpu"):
    device = device_of(rank, kind)
    alone = loaded(folder, built("nvfp4", seed=1).to(device), no_dist=True)
    model = loaded(folder, sharded(built("nvfp4", seed=2).to(device)))
    assert train(model) == train(alone)
    assert_equal(whole(model), whole(alone))


def test_a_rank_that_dies_in_a_checkpoint_leaves_the_one_before(tmp_path):
    """Checks a resume: three ranks save, two go on as one process does."""
    require_lost(3, lose_a_rank_in_a_checkpoint, str(tmp_path), seconds=TIMEOUT, word="dcp.save")
    assert not (
        tmp_path / "second" / ".metadata"
    ).exists()  # the file that a complete checkpoint has
    run_world(2, check_goes_on, str(tmp_path))


# ---- ranks that differ ---------------------------------------------------------------------------


def convert_on_some(rank, is_all):
    """Converts nothing on rank 1, or not the second of two layers that are gathered together."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    names = [name for name in "01" if rank == 0 or (name == "0" and not is_all)]
    if names:
        mf.quantize_(model, "; ".join(f"{name}: nvfp4" for name in names))
    fully_shard(model)
    model(torch.randn(4, 32))


@pytest.mark.parametrize("is_all", [True, False])
def test_a_layer_converted_on_some_ranks_is_named(is_all):
    first, second = last_words(2, convert_on_some, is_all, seconds=TIMEOUT)
    name = "0" if is_all else "1"
    assert f"expected all 2 ranks to gather {name}: nvfp4, weight" in first, first
    assert "ranks [1] have not arrived" in first
    assert any(lost in second for lost in LOST), second


# ---- what is not finite --------------------------------------------------------------------------


def check_a_bad_gradient_reaches_all(rank):
    """Overflows one rank's loss; every rank then has NaN in norm, weights and next loss."""
    for recipe in ("nvfp4", "mxfp8", "fp8_tensorwise", "fp8_delayed", "fp8_rowwise"):
        for use_step in (False, True):
            model = sharded(built(recipe))
            train(model, 1, use_step=use_step)
            optimizer = torch.optim.AdamW(model.parameters())
            loss = model(batch(1, rank)).square().mean()
            (loss * (float("inf") if rank == 1 else 1.0)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            assert not norm.isfinite(), recipe
            optimizer.step()
            if use_step:
                mf.step(model)
            assert model(batch(2)).isnan().all(), recipe


def test_a_bad_gradient_of_one_rank_reaches_all():
    run_world(2, check_a_bad_gradient_reaches_all)
