"""`minifloat train` of a model with mixtures of experts."""

import json
from dataclasses import asdict

import pytest
import torch
from minifloat.train.checks import TrainError
from minifloat.train.config import RunSpec, TrainConfig, parse_model
from minifloat.train.job import run as training
from minifloat.train.job.checkpoint import Metrics, read_records
from minifloat.train.model import measure
from minifloat.train.model.llama import Llama, build_model
from minifloat.train.model.measure import (
    SpeedOfLight,
    active_experts,
    load_of,
    loss_in_product_dtype,
    product_dtype,
    read_tokens,
    saved_bytes_per_token,
)
from minifloat.train.report import (
    draw_losses,
    markdown_report,
    markdown_table,
    table_rows,
)

from tests.support.tiny_job import STEPS, digest, run, run_and_kill

MODEL = "moe:32,3,2,1,32,4,2,1"
SIZES = parse_model(MODEL, vocab=300)
LAYERS = ["layers.1.moe", "layers.2.moe"]

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


@pytest.fixture(scope="module")
def tiny_mixture(tiny):
    """Returns the options of a job that trains a mixture of experts in a second."""
    return [*tiny, "--model", MODEL]


# ---- The model -----------------------------------------------------------------------------------


def test_the_first_layer_is_dense_and_the_others_have_experts():
    model = build_model(SIZES, seq=16, seed=1, device="cpu")
    names = set(model.state_dict())
    assert {"layers.0.feed_forward.w1.weight", "layers.1.moe.experts.w13"} <= names
    assert not any(name.startswith(("layers.0.moe", "layers.1.feed_forward")) for name in names)
    assert model.layers[0].feed_forward.w1.weight.shape == (32 * (2 + 1), 32)
    moe = model.layers[2].moe
    assert moe.experts.w2.shape == (4, 32, 32)
    assert moe.shared_experts.w1.weight.shape == (32, 32)
    assert (moe.router.score, moe.router.route_norm, moe.router.balance) == (
        "sigmoid",
        True,
        "bias",
    )
    assert str(SIZES) == MODEL


@pytest.mark.parametrize("text", [MODEL, "moe:48,2,4,2,40,7,3,0", "moe:32,4,2,2,8,1,1,2"])
def test_a_model_counts_all_and_active_parameters(text):
    sizes = parse_model(text, 300)
    with torch.device("meta"):
        model = Llama(sizes, 8)
    experts = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    active = sizes.parameters - experts + experts * sizes.top_k // sizes.experts
    assert sizes.active_parameters == active


def test_initial_weights_are_a_function_of_the_seed():
    first, same, other = (build_model(SIZES, 8, seed, "cpu").state_dict() for seed in (1, 1, 2))
    for name, value in first.items():
        assert value.equal(same[name])
        assert value.equal(other[name]) == name.endswith(("norm.weight", "expert_bias"))
    deviations = {
        name: first[f"layers.1.moe.{name}"].std() for name in ("experts.w13", "experts.w2")
    }
    assert deviations["experts.w13"] == pytest.approx(0.02, rel=0.1)
    assert deviations["experts.w2"] == pytest.approx(0.02 / 6**0.5, rel=0.1)  # into the residual


def test_the_speed_of_light_counts_the_experts_that_a_token_goes_to():
    light = SpeedOfLight(TrainConfig(model=SIZES, seq=16, batch=2))
    norms = 32 * (2 * 3 + 1)
    weights = SIZES.active_parameters - norms - 32 * 300  # the embedding is no product
    attention = 3 * 2 * 16 * 32 // 2  # a token: 3 layers, 2 products, S D operations, causal half
    assert light.flops == 3 * 2 * 32 * (weights + attention)
    assert light.shapes[(2 * 32, 64, 32)] == 2  # w13 of both layers, two rows a token


def test_saved_bytes_of_experts_that_no_recipe_converts():
    """Counts, a token, gate and up of two slots, what shared layers save, and little beside."""
    model = build_model(SIZES, seq=16, seed=1, device="cpu")
    dense = build_model(parse_model("32,3,2,1,96", 300), seq=16, seed=1, device="cpu")
    config = TrainConfig(model=SIZES, seq=16, batch=2)
    saved = saved_bytes_per_token(model, config, loss_of(model)).linears
    without = saved_bytes_per_token(dense, config, loss_of(dense)).linears
    size = product_dtype("cpu").itemsize
    x, h, gate_and_up = size * 32, size * 32, 2 * size * 32
    mixture = (saved - without) / 2 + x + size * 96  # a dense layer saves x and h of width 96
    assert 2 * gate_and_up < mixture <= x + h + 2 * (gate_and_up + size * 16)


def loss_of(model):
    return loss_in_product_dtype(model, "cpu")


# ---- The job -------------------------------------------------------------------------------------


def test_a_job_in_bf16_and_nvfp4(tiny_mixture, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "LAST", 5)
    assert run(tiny_mixture, tmp_path / "out", "--recipes", "bf16,nvfp4 keep=nvfp4_paper") == 0
    shown = capsys.readouterr()
    assert "load" in shown.err
    assert "dropped 0, " in shown.err
    assert "linear layers and weights of experts under 'nvfp4', " in shown.err
    records = read_records(tmp_path / "out" / "metrics.jsonl")
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    for row in rows:
        ours = [r for r in records if r["run"] == row["run"]]
        train = [r for r in ours if r["kind"] == "train"]
        tokens = [r for r in ours if r["kind"] == "experts"]
        assert [r["step"] for r in tokens] == list(range(STEPS - 4, STEPS + 1))
        assert all(list(r["tokens"]) == LAYERS for r in tokens)
        assert all(sum(counts) == 2 * 2 * 32 for r in tokens for counts in r["tokens"].values())
        assert [r["expert_load"] for r in train[-5:]] == [load_of(r["tokens"]) for r in tokens]
        assert {r["dropped_rows"] for r in train} == {0}
        assert row["active_experts"] == len(active_experts(tokens))
        assert row["dropped_rows"] == 0
        assert 1 <= row["expert_load"] <= 2  # of 4 experts, 2 a token
        losses = [r["val_loss"] for r in ours if r["kind"] == "eval"]
        assert losses[-1] < losses[0] - 0.5
    assert [row["converted"] for row in rows] == [
        0,
        7 + 4 + 3 + 2,
    ]  # layers 0 and 1: linears, experts
    assert rows[1]["saved_bytes_per_token_linears"] < rows[0]["saved_bytes_per_token_linears"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "the others with 4 experts of hidden width 32, 2 a token and 1 shared" in report
    assert "of 8 in 2 layers" in report
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_a_killed_job_resumes_with_the_same_bytes(tiny_mixture, tmp_path, recipe):
    """Resumes from a checkpoint, which has the balance bias; weights.pt has it at the end."""
    assert run(tiny_mixture, tmp_path / "whole", "--recipes", recipe) == 0
    run_and_kill(tiny_mixture, tmp_path / "out", 8, "--recipes", recipe)
    assert run(tiny_mixture, tmp_path / "out", "--resume") == 0
    assert digest(tmp_path / "out", recipe) == digest(tmp_path / "whole", recipe)
    weights = torch.load(tmp_path / "out" / "runs" / recipe / "weights.pt")["model"]
    bias = weights["layers.1.moe.router.expert_bias"]
    assert bias.abs().max() > 2e-3  # moved in more steps than two, by 1e-3 each


def test_resuming_with_another_number_of_experts_is_refused(tiny_mixture, tmp_path, capsys):
    assert run(tiny_mixture, tmp_path / "out", "--recipes", "bf16") == 0
    changed = [*tiny_mixture[:-1], "moe:32,3,2,1,32,5,2,1"]
    assert run(changed, tmp_path / "out", "--resume") == 1
    assert "model.experts: 4 there, 5 asked for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": "two"}, "top_k: expected an integer, got 'two'"),
        ({"top_k": 9}, "expected top_k of at most 4 experts, got 9"),
    ],
)
def test_a_damaged_description_of_the_model_is_named(change, message):
    values = json.loads(json.dumps(asdict(TrainConfig(model=SIZES))))
    assert TrainConfig.from_json("job.json", values).model == SIZES
    with pytest.raises(TrainError, match=f"^job.json: .*{message}"):
        TrainConfig.from_json("job.json", values | {"model": values["model"] | change})


def test_a_damaged_record_of_tokens_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record = {"run": "a", "kind": "experts", "step": 1, "tokens": {"layers.1.moe": [3, -1]}}
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(TrainError, match="line 1: tokens: expected lists of counts by layer, got"):
        read_records(path)


# ---- The figures ---------------------------------------------------------------------------------


def test_load_is_that_of_the_worst_layer():
    assert load_of({"a": [4, 4, 4, 4], "b": [10, 2, 2, 2]}) == pytest.approx(10 / 4)
    assert load_of({"a": [0, 0]}) == 1


def test_tokens_are_those_of_the_last_step():
    model = build_model(SIZES, seq=16, seed=1, device="cpu")
    ids = torch.zeros(1, 16, dtype=torch.int64)
    loop_of = loss_of(model)
    loop_of(ids, ids).backward()
    training.finish_step(model)
    tokens = read_tokens(model)
    assert list(tokens) == LAYERS
    assert [sum(counts) for counts in tokens.values()] == [32, 32]
    assert read_tokens(build_model(parse_model("32,2,2,1,64", 300), 16, 1, "cpu")) == {}


def test_experts_that_a_recipe_lost_are_listed(tmp_path):
    runs = [RunSpec("bf16", "bf16", 1), RunSpec("nvfp4", "*: nvfp4", 1)]
    timings = {"step_ms": 5.0, "tokens_per_s": 9.0, "speed_of_light": 0.5}
    for name, counts in (("bf16", [0, 1, 7]), ("nvfp4", [1, 0, 7])):
        metrics = Metrics(tmp_path, name, name, 0)
        for step in (1, 2):
            balance = {"expert_load": 2.625, "dropped_rows": 3.0}
            metrics.write("train", step, {"loss": 1.0 / step, **balance, **timings})
            tokens = {"layers.1.moe": counts if step == 2 else [0, 0, 8]}
            metrics.write("experts", step, {"tokens": tokens})
        metrics.write("eval", 2, {"val_loss": 1.0})
        metrics.close()
    records = read_records(metrics.path)
    rows = table_rows(runs, records, {}, runs[0])
    assert [row["active_experts"] for row in rows] == [2, 2]
    assert [row["idle_experts"] for row in rows] == [[], [("layers.1.moe", 1)]]
    assert [row["dropped_rows"] for row in rows] == [6, 6]
    table = markdown_table(rows, last_step=2)
    assert "| idle beside bf16 |" in table
    assert len({len(line) for line in table.splitlines()}) == 1
    facts = dict.fromkeys(("validation_tokens", "memory_note", "layers"), "") | {
        "setting": [], "steps": 2, "step_flops": 1.0, "skipped_files": []
    }  # fmt: skip
    report = markdown_report(facts | {"baseline": "bf16", "mixtures": 1, "experts": 3}, rows)
    assert "active under `bf16` (nvfp4: layers.1.moe expert 1)." in report
    draw_losses(tmp_path / "loss.png", runs, records, runs[0], "a title " * 30)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
