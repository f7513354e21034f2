"""`minifloat train --expert-parallel`: one process's losses and gradients, resumed anywhere."""

import copy
import os
import shutil
import signal
import time
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path

import minifloat as mf
import pytest
import torch
from minifloat.moe.layer import divided_experts
from minifloat.nn.grouped_product import product_of
from minifloat.tensor.quantized_tensor import HANDLERS, OTHERS
from minifloat.train.checks import TrainError
from minifloat.train.config import TrainConfig, parse_model
from minifloat.train.job.checkpoint import checkpoints_in, read_records, step_of
from minifloat.train.job.processes import (
    World,
    clip_gradients,
    dropped_rows,
    forget_dropped,
    whole,
)
from minifloat.train.job.run import make_optimizer
from minifloat.train.model.llama import build_model, cross_entropy
from minifloat.train.model.measure import load_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from tests.support import train_command
from tests.support.tiny_job import without_timings
from tests.support.tiny_text import write_text
from tests.support.worlds import run_world

MODEL = "moe:64,3,2,1,32,4,2,1"
UNEVEN = "moe:64,3,2,1,32,6,2,1"  # three experts a rank of two, which two groups do not divide
LAYERS = ["layers.1.moe", "layers.2.moe"]
BATCH, SEQ = 4, 32

start = partial(train_command.start, model=MODEL, seq=SEQ, batch=BATCH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    write_text(folder)
    return folder


def train(*args):
    """Runs the command; returns its output and errors after a normal end."""
    process = start(*args)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return said, errors


def records_of(out):
    return read_records(out / "metrics.jsonl")


# ---- losses --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_losses_are_those_of_one_process(folder, tmp_path):
    """Compares losses, as test_train_world.py does, whose tolerances hold for bf16 and at first.

    Under nvfp4 linear layers scale x by the amax of one rank's tokens, and random bits of ranks
    differ, so later losses agree to a few of its roundings. The operands of experts equal one
    process's: with nvfp4 in experts alone the first loss is as near as in bf16."""
    recipes = ("--recipes", "bf16,nvfp4", "--recipe", "experts=*: bf16; *.moe.experts: nvfp4")
    train(folder, tmp_path / "1", 1, *recipes, "--steps=6")
    said, _ = train(folder, tmp_path / "2", 2, *recipes, "--steps=6", "--expert-parallel=2")
    assert said.count("idle beside bf16") == 1, said
    report = (tmp_path / "2" / "report.md").read_text()
    assert "2 processes under FSDP2, experts divided over groups of 2" in report
    alone, divided = (records_of(tmp_path / n) for n in ("1", "2"))
    assert len(alone) == len(divided) == 3 * (6 + 6 + 2)
    loads = {}
    for a, b in zip(alone, divided):
        assert (a["run"], a["kind"], a["step"]) == (b["run"], b["kind"], b["step"])
        if a["kind"] == "experts":
            for record in (a, b):
                assert [sum(record["tokens"][name]) for name in LAYERS] == [2 * BATCH * SEQ] * 2
            assert loads[b["run"], b["step"]] == load_of(b["tokens"])
            continue
        if a["kind"] == "train":
            loads[b["run"], b["step"]] = b["expert_load"]
            assert b["dropped_rows"] == 0
        name = "val_loss" if a["kind"] == "eval" else "loss"
        later = 2.0**-8 if a["run"] == "bf16" else 2.0**-6
        first = 2.0**-9 if a["run"] == "nvfp4" else 2.0**-12
        tolerance = first if a["step"] == 1 else later
        assert abs(a[name] - b[name]) <= tolerance * a[name], (a, b)


# ---- gradients -----------------------------------------------------------------------------------


def batch_of(sizes):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(sizes.vocab, (2, BATCH, SEQ), generator=generator)


def check_gradients(rank, ranks, model):
    """Compares every gradient, the clipped ones too, and a step of AdamW, in fp32."""
    world, sizes = World(rank, torch.distributed.get_world_size()), parse_model(model, 300)
    alone, model = (build_model(sizes, SEQ, 1, "cpu") for _ in range(2))
    world.shard(model, ranks)
    assert len(divided_experts(model)) == 2
    inputs, targets = batch_of(sizes)
    cross_entropy(alone(inputs), targets).backward()
    inputs, targets = world.share((inputs, targets))
    cross_entropy(model(inputs), targets).backward()
    mf.average_expert_gradients(model)

    def require_equal_gradients():
        expected = dict(alone.named_parameters())
        for name, parameter in model.named_parameters():
            assert parameter.shape == expected[name].shape
            found, wanted = whole(parameter.grad), expected[name].grad
            assert (found - wanted).norm() <= 1e-4 * wanted.norm(), name

    require_equal_gradients()
    parameters = list(model.parameters())
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    assert norm > 0.2  # so that it clips
    assert whole(clip_gradients(parameters, 0.1)).item() == pytest.approx(norm.item(), rel=1e-4)
    require_equal_gradients()
    for each in (alone, model):
        torch.optim.SGD(each.parameters(), lr=0.5).step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(whole(value), alone.state_dict()[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("world", "ranks", "model"), [(2, 2, MODEL), (4, 2, MODEL), (4, 4, MODEL), (4, 2, UNEVEN)]
)
def test_gradients_are_those_of_one_process(world, ranks, model):
    run_world(world, check_gradients, ranks, model)


def check_codes(rank):
    """Compares two groups, between which FSDP2 gathers weights as codes, with one process.

    Forward reads the same bytes, and no pass decodes them. In wgrad the blocks of a group have
    other rows than one process's, so gradients agree to a few roundings of 8 bits."""
    run_on_values, decoded = HANDLERS[OTHERS], []
    HANDLERS[OTHERS] = lambda f, *args, **kwargs: (
        decoded.append(f) or run_on_values(f, *args, **kwargs)
    )
    world, sizes = World(rank, 4), parse_model(MODEL, 300)
    alone, model = (build_model(sizes, SEQ, 1, "cpu") for _ in range(2))
    for each in (alone, model):
        mf.quantize_(each, "*: bf16; *.moe.experts: mxfp8", verbose=False)
    world.shard(model, 2)
    expected = cross_entropy(*(lambda x, y: (alone(x), y))(*batch_of(sizes)))
    inputs, targets = world.share(batch_of(sizes))
    loss = cross_entropy(model(inputs), targets)
    assert world.mean(loss) == pytest.approx(expected.item(), rel=1e-5)
    for module in divided_experts(model):
        assert all(product_of(module, n).weight_gather.is_quantized for n in module.weight_names)
    for each in (expected, loss):
        each.backward()
    assert decoded == []
    mf.average_expert_gradients(model)
    wanted = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        error = (whole(parameter.grad) - wanted[name].grad).norm()
        assert error <= 0.05 * wanted[name].grad.norm(), name


def test_groups_gather_codes():
    run_world(4, check_codes)


def check_state(rank, ranks, model):
    """Takes the whole state, spoils this rank's part, and sets it again."""
    world, sizes = World(rank, torch.distributed.get_world_size()), parse_model(model, 300)
    model = world.shard(build_model(sizes, SEQ, 1, "cpu"), ranks)
    optimizer, options = (
        make_optimizer(model, TrainConfig()),
        StateDictOptions(full_state_dict=True),
    )

    def local_values():
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [getattr(t, "_local_tensor", t) for t in (*model.parameters(), *moments)]

    inputs, targets = world.share(batch_of(sizes))
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [value.clone() for value in local_values()]
    saved, moments = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    alone = build_model(sizes, SEQ, 1, "cpu")
    assert list(saved) == list(alone.state_dict())
    assert all(saved[name].shape == value.shape for name, value in alone.state_dict().items())
    with torch.no_grad():
        for value in local_values():
            value.zero_()
    states = {"model_state_dict": saved, "optim_state_dict": moments}
    set_state_dict(model, optimizer, **states, options=options)
    assert all(map(torch.equal, local_values(), before))


@pytest.mark.parametrize(
    ("world", "ranks", "model"), [(2, 2, MODEL), (4, 2, MODEL), (4, 2, UNEVEN)]
)
def test_the_whole_state_can_be_set_again(world, ranks, model):
    run_world(world, check_state, ranks, model)


def check_dropped_rows(rank):
    """Each rank sends one row of a layer to each of two ranks, and drops the others."""
    world, sizes = World(rank, 2), parse_model(MODEL, 300)
    assert dropped_rows(build_model(sizes, SEQ, 1, "cpu")) == 0
    model = world.shard(build_model(sizes, SEQ, 1, "cpu"), 2, 1)
    inputs = world.share(tuple(batch_of(sizes)))[0]
    model(inputs)
    forget_dropped(model)
    model(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mf.step(model)
    assert dropped_rows(model) == len(LAYERS) * (BATCH // 2 * SEQ * 2 - 2)
    assert world.total(dropped_rows(model)) == len(LAYERS) * (BATCH * SEQ * 2 - 4)
    assert world.total(rank) == 1


def test_dropped_rows_are_those_of_all_ranks():
    run_world(2, check_dropped_rows)


@pytest.mark.slow
def test_a_capacity_drops_rows_which_records_have(folder, tmp_path):
    """Checks that a capacity for all rows drops none, and what a small one drops."""
    how = "--recipes=bf16", "--steps=2", "--expert-parallel=2"
    found = {}
    for capacity in ("all", "8"):
        option = f"--expert-capacity={capacity}"
        _, errors = train(folder, tmp_path / capacity, 2, *how, option)
        assert "UserWarning" not in errors
        records = records_of(tmp_path / capacity)
        found[capacity] = [r for r in records if r["kind"] == "train"]
    assert found["all"][0]["loss"] != found["8"][0]["loss"]
    # Of one layer, eight rows from each of two ranks to each of two.
    dropped = len(LAYERS) * (BATCH * SEQ * 2 - 4 * 8)
    assert [r["dropped_rows"] for r in found["8"]] == [dropped] * 2
    assert [r["dropped_rows"] for r in found["all"]] == [0] * 2
    report = (tmp_path / "8" / "report.md").read_text()
    assert "divided over groups of 2 with capacity 8" in report
    assert f"{2 * dropped}" in report
    _, errors = train(folder, tmp_path / "8", 1, "--resume", "--expert-parallel=1")
    assert "divided over groups of 2 with capacity 8, goes on with 1 processes" in errors


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_job_resumes_with_the_same_losses_or_on_one_process(folder, tmp_path):
    """Kills a job, and resumes it on its ranks, and on one process with whole experts.

    Linear layers have random bits, and experts amax histories, which checkpoints have whole."""
    recipe = ("--recipe", "both=*: nvfp4; *.experts: fp8_delayed", "--steps=12")
    divided = ("--expert-parallel", "2")
    train(folder, tmp_path / "whole", 2, *recipe, *divided)
    process = start(folder, tmp_path / "parts", 2, *recipe, *divided)
    checkpoints = tmp_path / "parts" / "runs" / "both" / "checkpoints"
    while not checkpoints_in(checkpoints) and process.poll() is None:
        time.sleep(0.01)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(ranks) == 2
    for pid in (process.pid, *map(int, ranks)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    step = step_of(checkpoints_in(checkpoints)[0])
    assert step in (4, 8), "killed too late"
    shutil.copytree(tmp_path / "parts", tmp_path / "alone")

    train(folder, tmp_path / "parts", 2, *recipe, "--resume")  # job.json has the 2
    expected, found = (without_timings(records_of(tmp_path / name)) for name in ("whole", "parts"))
    assert found == expected
    same = torch.load(tmp_path / "whole" / "runs" / "both" / "weights.pt")["model"]
    weights = torch.load(tmp_path / "parts" / "runs" / "both" / "weights.pt")["model"]
    assert list(weights) == list(same)
    assert all(torch.equal(weights[name], same[name]) for name in same)

    _, errors = train(folder, tmp_path / "alone", 1, *recipe, "--resume", "--expert-parallel", "1")
    assert (
        "saved on 2 processes, experts divided over groups of 2, goes on with 1 processes" in errors
    )
    weights = torch.load(tmp_path / "alone" / "runs" / "both" / "weights.pt")["model"]
    assert {name: w.shape for name, w in weights.items()} == {
        name: w.shape for name, w in same.items()
    }
    found = without_timings(records_of(tmp_path / "alone"))
    for a, b in zip(expected, found, strict=True):
        assert a["step"] > step or a == b
        for name in {"loss", "val_loss"} & a.keys():
            assert b[name] == pytest.approx(a[name], rel=2.0**-6), (a, b)


# ---- bad sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "processes", "ranks", "message"),
    [
        (MODEL, 3, 2, "expected a divisor of the job's processes, got 2 of 3"),
        (MODEL, 1, 2, "expected a divisor of the job's processes, got 2 of 1"),
        ("moe:64,3,2,1,32,5,2,1", 2, 2, "expected a divisor of the 5 experts, got 2"),
        (
            "moe:62,3,31,31,32,6,2,1",
            8,
            2,
            "expected the 4 groups of processes to divide .*, got 2",
        ),
        ("64,3,2,1,32", 2, 2, "expected 1 for a model without experts, got 2"),
        (MODEL, 2, 0, "expected at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(model, processes, ranks, message):
    with pytest.raises(TrainError, match=f"^--expert-parallel.*: {message}$"):
        TrainConfig(model=parse_model(model, 300), processes=processes, expert_parallel=ranks)


@pytest.mark.parametrize(
    ("capacity", "ranks", "message"),
    [
        (0, 2, "expected a number of rows from 1 to 1000000000, 'all' or none, got 0"),
        ("some", 2, "expected a number of rows .*, got 'some'"),
        (8, 1, "expected --expert-parallel of at least 2, .*, got 1"),
    ],
)
def test_capacities_that_mean_nothing_are_refused(capacity, ranks, message):
    model = parse_model(MODEL, 300)
    with pytest.raises(TrainError, match=f"^--expert-capacity.*: {message}$"):
        TrainConfig(model=model, processes=2, expert_parallel=ranks, expert_capacity=capacity)


def test_a_saved_job_may_divide_its_experts_anew():
    values = asdict(TrainConfig(model=parse_model(MODEL, 300))) | {"data": []}
    assert "expert_parallel" not in TrainConfig.from_json("job.json", values).identity()
    with pytest.raises(TrainError, match=r"^job.json: .*expected an integer, got 'two'"):
        TrainConfig.from_json("job.json", values | {"expert_parallel": "two"})
