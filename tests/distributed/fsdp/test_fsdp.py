"""FSDP2 with weights gathered as codes: training, what is sent, checkpoints."""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.pairs import pairs
from tests.support.sharded_models import assert_equal, batch, built, sharded, train, whole
from tests.support.specs import BLOCKS_RECIPE, EDEN_RECIPE, UNIFORM_RECIPE
from tests.support.worlds import run_world

# ---- training equals one process -----------------------------------------------------------------

PRESETS = [
    "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp8_2d", "mxfp4",
    "nvfp4", "mxfp8_nvfp4", "nvfp4_mxfp8", EDEN_RECIPE, BLOCKS_RECIPE, UNIFORM_RECIPE,
]  # fmt: skip
CASES = pairs(
    PRESETS,
    [{}, {"by_block": False}],
    [{}, {"reshard_after_forward": False}],
    [{}, {"use_step": True}],
    [{}, {"micro_batches": 2}],
    [{}, {"is_recomputed": True}],
)


def check_training(rank, cases):
    """Compares with one process. World sizes are powers of two, so gradient means are exact."""
    for case in cases:
        recipe, by_block, reshard, use_step, micro_batches, is_recomputed = case
        if recipe == "fp8_delayed":
            use_step = {"use_step": True}
        alone, model = (built(recipe, **is_recomputed) for _ in range(2))
        losses = train(alone, **use_step, **micro_batches)
        sharded(model, **by_block, **reshard)
        assert train(model, **use_step, **micro_batches) == losses, case
        assert_equal(whole(model), whole(alone), case)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_equals_one_process(world):
    run_world(world, check_training, CASES if world == 2 else CASES[::3])


# ---- bytes of a gather ---------------------------------------------------------------------------


class Counted:
    """Collectives of torch.distributed by kind, with the bytes that a rank sends."""

    KINDS = (
        ("all_gather_into_tensor", "all_gather"),
        ("all_gather_single", "all_gather"),  # a newer name of torch for the function above
        ("all_reduce", "all_reduce"),
    )

    def __init__(self, monkeypatch):
        self.calls = []
        for name, kind in self.KINDS:
            if hasattr(dist, name):
                monkeypatch.setattr(dist, name, self.counting(kind, getattr(dist, name)))

    def counting(self, kind, collective):
        def call(*args, **kwargs):
            sent = kwargs.get("input_tensor", args[-1] if args else None)
            self.calls.append((kind, sent.nbytes))
            return collective(*args, **kwargs)

        return call

    def take(self, kind):
        found = [size for called, size in self.calls if called == kind]
        self.calls = []
        return found


def check_payload(rank):
    world, n, k = dist.get_world_size(), 512, 1024
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(monkeypatch)
        for recipe, gather, gathers in (
            ("fp8_tensorwise", "codes", [8.0, 8.0]),
            ("fp8_blockwise", "codes", [8.01, 8.01]),
            ("mxfp8", "codes", [8.25, 8.25]),
            ("fp8_rowwise", "codes", [8.0, 8.0]),
            ("mxfp4", "codes", [4.25, 4.25]),
            ("nvfp4", "codes", [4.04, 4.04]),
            ("mxfp8_nvfp4", "codes", [12.3, 12.3]),
            ("nvfp4", "compute_dtype", [16.0, 16.0]),
        ):
            block = nn.Sequential(nn.Linear(k, n, bias=False))
            report = mf.quantize_(block, recipe, gather=gather)
            assert ("compute dtype" in report.gather["0"]) == (gather == "compute_dtype")
            assert report.gather["0"] in str(report)
            model = nn.Sequential(block)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
            x = torch.randn(16, k, dtype=torch.bfloat16, requires_grad=True)
            model(x).sum().backward()  # the first one also agrees on what is sent
            counted.calls.clear()
            model(x).sum().backward()
            sent = [8 * size * world / (n * k) for size in counted.take("all_gather")]
            assert len(sent) == len(gathers), recipe
            for bits, most in zip(sent, gathers):
                assert most - 0.1 < bits <= most, (recipe, sent)


def check_one_reduction(rank):
    """Checks precompute_scales: one all-reduce for all weights, none in later gathers."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(monkeypatch)
        for recipe in ("fp8_tensorwise", "nvfp4", "fp8_blockwise", "fp8_rowwise"):
            model = sharded(built(recipe))
            optimizer = torch.optim.AdamW(model.parameters())
            model(batch(0)).sum().backward()
            optimizer.step()
            for precompute in (mf.distributed.precompute_scales, mf.step):
                counted.calls.clear()
                precompute(model)
                assert len(counted.take("all_reduce")) == 1, recipe
                model(batch(1)).sum().backward()
                assert counted.take("all_reduce") == [], recipe
            optimizer.step()
            model(batch(1)).sum().backward()
            assert len(counted.take("all_reduce")) > 1, recipe


def check_all_gathered(rank):
    check_payload(rank)
    check_one_reduction(rank)


def test_what_is_gathered():
    run_world(2, check_all_gathered)


# ---- checkpoints ---------------------------------------------------------------------------------

HYBRID = "fprop=nvfp4*nvfp4/16x16 dgrad=e4m3/row*e4m3/row wgrad=nvfp4+sr+rht*nvfp4+rht"
FORMATS = {name: name for name in mf.presets() if name != "bf16"} | {"hybrid": HYBRID}


def check_save(rank, recipe, folder):
    torch.manual_seed(rank)
    model = sharded(built(recipe, seed=1))
    train(model, 2)
    state = model.state_dict()
    for name, tensor in state.items():
        assert type(getattr(tensor, "_local_tensor", tensor)) is torch.Tensor, name
    dcp.save({"model": state}, checkpoint_id=f"{folder}/model")
    full = whole(model)
    if rank == 0:
        torch.save(full, f"{folder}/full.pt")


def check_load(rank, recipe, folder):
    """Checks that a loaded model has the saved weights and continues with the same steps."""
    model = sharded(built(recipe, seed=2))
    model(batch(0))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/model")
    model.load_state_dict(state["model"])
    want = torch.load(f"{folder}/full.pt")
    assert_equal(whole(model), want, recipe)
    alone = built(recipe, seed=3)
    alone.load_state_dict(want)
    model.eval(), alone.eval()
    with torch.no_grad():
        assert torch.equal(model(batch(7)), alone(batch(7))), recipe


def save_all(rank, folder):
    for name, recipe in FORMATS.items():
        check_save(rank, recipe, f"{folder}/{name}")


def load_all(rank, folder):
    for name, recipe in FORMATS.items():
        check_load(rank, recipe, f"{folder}/{name}")


@pytest.mark.parametrize(("before", "after"), [pytest.param(4, 2, marks=pytest.mark.slow), (2, 3)])
def test_checkpoints_reshard(before, after, tmp_path):
    for name in FORMATS:
        (tmp_path / name).mkdir()
    run_world(before, save_all, str(tmp_path))
    run_world(after, load_all, str(tmp_path))
    for name, recipe in FORMATS.items():  # to one process without FSDP
        model = built(recipe, seed=4)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=str(tmp_path / name / "model"), no_dist=True)
        model.load_state_dict(state["model"])
        assert_equal(model.state_dict(), torch.load(tmp_path / name / "full.pt"), recipe)
