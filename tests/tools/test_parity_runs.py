"""The records of the parity trial: a run is trained once, and a table has one trial."""

import contextlib
import importlib
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import minifloat as mf
import numpy
import pytest
import torch

from tests.support.llama import ModelConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def parity(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_parity")


def test_a_run_with_a_record_is_not_trained_again(parity, tmp_path):
    plan = parity.Plan.parse("nvfp4", 2)
    record = {"name": "nvfp4", "seed": 2, "trial": {"steps": 1}, "tokens": "a"}
    parity.write_record(tmp_path / plan.file_name, record)
    parity.train_runs([plan], parity.Trial(), tmp_path / "no data", [tmp_path], limit=1)
    assert parity.records_in([tmp_path]) == [record]
    parity.write_record(tmp_path / "bf16_seed_2.jsonl.xz", record | {"tokens": "b"})
    with pytest.raises(SystemExit, match="expected the tokens of"):
        parity.records_in([tmp_path])


def test_records_in_the_repository_are_of_one_trial(parity):
    tables, records = (
        importlib.import_module("_parity_records"),
        parity.records_in([parity.RESULTS]),
    )
    assert records[0]["trial"] == parity.TRIALS[parity.DENSE].said
    bf16 = tables.losses_of(records, "val")["bf16"]
    assert len(bf16) == 3
    for record in records:
        steps = record["trial"]["steps"]
        assert len(record["loss"]) == len(record["norm"]) == steps
        assert record["val"] == record["evaluations"][str(steps)]


@pytest.mark.parametrize(
    ("entry", "name", "file"),
    [
        (
            "nvfp4 keep=nvfp4_paper then=bf16",
            "nvfp4 keep=nvfp4_paper then=bf16",
            "nvfp4_keep_nvfp4_paper_then_bf16",
        ),
        ("bf16 wire=mxfp8 then=nvfp4", "bf16 wire=mxfp8 then=nvfp4", "bf16_wire_mxfp8_then_nvfp4"),
        ("torchao_rowwise then=bf16", "torchao_rowwise then=bf16", "torchao_rowwise_then_bf16"),
        ("a=mxfp8 wire=mxfp8 then=bf16 last=5%", "a", "a"),
    ],
)
def test_an_entry_names_its_record(parity, entry, name, file):
    plan = parity.Plan.parse(entry, 1)
    assert (plan.name, plan.file_name) == (name, f"{file}_seed_1.jsonl.xz")


def run_module():
    return importlib.import_module("_parity_run")


def stopped(train_to, stop, run, last, deadline=math.inf):
    """Trains to step `last` as if the deadline came after step `stop`."""
    if stop >= last:
        return train_to(run, last, deadline)
    train_to(run, stop)
    return train_to(run, last, -math.inf)


def run_of(name, seed, losses, tokens_per_s, device="a"):
    steps = len(losses)
    trial = {"steps": steps, "batch": 1, "seq": 100}
    return {"name": name, "seed": seed, "trial": trial, "tokens_per_s": tokens_per_s,
            "loss": losses, "device": device}  # fmt: skip


def test_the_slower_of_two_runs_is_cut_where_the_faster_one_ends(parity):
    records = importlib.import_module("_parity_records")
    falling = [10.0 - step / 100 for step in range(400)]  # means of 100: 10.505 - end / 100
    bf16 = run_of("bf16", 1, falling, 100)
    faster, slower = run_of("faster", 1, falling, 200), run_of("slower", 1, falling, 50)
    assert records.training_seconds(faster) == 200
    middle, end = 10.505 - 2, 10.505 - 4
    assert records.gap_at_equal_time(faster, bf16) == pytest.approx(100 * (end / middle - 1))
    assert records.gap_at_equal_time(slower, bf16) == pytest.approx(100 * (middle / end - 1))
    other = run_of("elsewhere", 1, falling, 400, device="b")
    rows = records.speed_table([bf16, slower, faster, other]).splitlines()[2:]
    assert [row.split()[1] for row in rows] == ["`faster`", "`bf16`", "`slower`"]
    assert rows[0].split("|")[3:5] == [" 200 ", " 0.50 "]


def test_an_end_is_judged_by_the_change_of_the_gap_to_bf16(parity):
    records = importlib.import_module("_parity_records")
    flat, base = [4.0] * 1000, run_of("bf16", 1, [2.0] * 1000, 100)
    plain = run_of(records.NVFP4, 1, [2.2] * 900 + [2.1] * 100, 100)
    ended = run_of("ended", 1, flat[:900] + [3.0] * 100, 100) | {"then": "bf16", "percent": 10}
    alone = ended | {"name": "alone", "seed": 2}
    rows = records.end_table([base, plain, ended, alone]).splitlines()[2:]
    assert rows == ["| `ended`, seed 1 | 10% | +100.00% | +50.00% | -50.00% | -5.00% |"]
    rows = records.end_table([base, ended]).splitlines()[2:]
    assert rows == ["| `ended`, seed 1 | 10% | +100.00% | +50.00% | -50.00% | - |"]


def test_tables_and_curves_have_a_line_for_each_recipe(parity, tmp_path, capsys):
    records = importlib.import_module("_parity_records")
    found = parity.records_in([parity.RESULTS])
    records.print_tables(found)
    printed = capsys.readouterr().out
    names = {record["name"] for record in found}
    assert len(names) >= 8
    for name in names:
        assert printed.count(f"\n| `{name}` |") >= 3
    records.draw_curves(found, "bf16", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_maps_of_the_trial_are_entries_with_the_same_share(parity, tmp_path, monkeypatch):
    inspecting = importlib.import_module("gpu_inspect")
    sizes = {"seq": 16, "batch": 2, "steps": 3, "warmup": 1, "device": "cpu"}
    trial = parity.Trial("32,4,2,2,64", **sizes)
    ids = numpy.random.default_rng(0).integers(0, run_module().VOCABULARY, 300)
    text = parity.Text(parity.Windows(ids, trial), parity.Windows(ids, trial))
    monkeypatch.setattr(run_module(), "compile_layers", lambda _: None)
    found = inspecting.inspect_trial(trial, text, steps=1)
    operations = {row.module: row.operations for row in found.rows}
    lines = inspecting.write_results(found, 0.8, tmp_path).splitlines()
    assert (tmp_path / "maps.txt").read_text().splitlines() == lines
    kept = {}
    for line in lines:
        plan = parity.Plan.parse(line, 1)
        config = ModelConfig.parse(trial.model, run_module().VOCABULARY)
        model = run_module().LossLlama(config, trial.seq)
        report = mf.quantize_(model, plan.recipe, keep=plan.spec.keep)
        left = {name for name, _ in report.skipped} & operations.keys() - {"output"}
        kept[plan.name] = sum(operations[name] for name in left)
        assert left
    total = sum(operations.values()) - operations["output"]
    assert list(kept) == ["nvfp4_by_inspector", "nvfp4_by_position"]
    for share in kept.values():
        assert 0.1 < share / total <= 0.2
    assert "layers.3" in lines[1]
    assert "layers.0" not in lines[1]


@pytest.fixture
def small(parity, tmp_path, monkeypatch):
    """Trains runs of a few steps on a CPU, not compiled; returns their records by name.

    stops: the steps before which a command ends, and the next goes on.
    """
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    ids = numpy.random.default_rng(0).integers(0, run_module().VOCABULARY, 1400)
    tokens = SimpleNamespace(train=ids, validation=ids[:100], fingerprint="of these")
    monkeypatch.setattr(parity, "load_tokens", lambda _: tokens)
    train_to = parity.Run.train_to

    def train(steps, *entries, model="32,1,2,2,64", stops=(), bf16_steps=0):
        sizes = {"seq": 16, "batch": 4, "warmup": 1, "eval_every": 4, "bf16_steps": bf16_steps}
        trial = parity.Trial(model, steps=steps, device="cpu", **sizes)
        plans = [parity.Plan.parse(entry, 9) for entry in entries]
        out = tmp_path / f"{len(stops)}, {bf16_steps}"
        for stop in (*stops, math.inf):
            monkeypatch.setattr(
                parity.Run, "train_to", lambda *run_to, at=stop: stopped(train_to, at, *run_to)
            )
            parity.train_runs(plans, trial, tmp_path, [out], limit=math.inf)
            states = [path for path in out.glob("*.pt") if not path.name.startswith("steps_")]
            assert bool(states) == (stop != math.inf)
        return {record["name"]: record for record in parity.records_in([out])}

    return train


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["mxfp8", "torchao_rowwise"])
def test_a_small_run_leaves_its_record(parity, small, monkeypatch, entry):
    """Two compiled steps on a CPU, where torchao's conversion is tried without its GEMMs."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    converted = []
    monkeypatch.setattr(run_module(), "convert_by_peer", lambda _, name, __: converted.append(name))
    (record,) = small(2, entry).values()
    assert (record["name"], record["recipe"], record["seed"]) == (entry, entry, 9)
    assert len(record["loss"]) == 2
    assert converted == [entry] * entry.startswith("torchao_")


class Linear(torch.nn.Linear):
    """What this trial asks of Transformer Engine's: 2 y, so that its products are told apart."""

    def __init__(self, k: int, n: int, bias: bool, device: torch.device, params_dtype: torch.dtype):
        super().__init__(k, n, bias=bias, device=device, dtype=params_dtype)

    def forward(self, x):
        return 2 * super().forward(x)


def test_transformer_engine_multiplies_in_all_layers_but_the_head(parity, monkeypatch):
    """With a stand-in for its layers, which need a GPU: names, parameters and values."""
    entered = []

    def autocast(enabled: bool, recipe: str):
        entered.append((enabled, recipe))
        return contextlib.nullcontext()

    te = ModuleType("transformer_engine.pytorch")
    te.Linear, te.autocast = Linear, autocast
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, te.__name__, te)
    peers = importlib.import_module("_peers")
    monkeypatch.setattr(peers, "transformer_engine_recipes", lambda: {"te blocks": "of blocks"})
    model = run_module().LossLlama(ModelConfig.parse("128,2,2,2,256", 300), 16)
    names, weights = [*model.state_dict()], [*model.parameters()]
    x = torch.randn(1, 16, 128)
    layers = [model.layers[0].attention.wq, model.output]
    before = [layer(x) for layer in layers]
    peers.convert_by_peer(model, "te_blocks", model.is_quantized)
    assert [*model.state_dict()] == names
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))
    assert torch.equal(layers[0](x), 2 * before[0])
    assert torch.equal(layers[1](x), before[1])
    assert entered == [(True, "of blocks")]
    model(torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long)).backward()
    assert len(entered) == 1 + 14
    assert all(weight.grad is not None for weight in weights)


@pytest.mark.slow
def test_another_recipe_takes_over_for_the_last_steps(small):
    """Under the same recipe it is the run without a change; the first steps are those of both."""
    found = small(20, "mxfp8", "mxfp8 then=mxfp8", "mxfp8 then=bf16")
    whole, same, other = (found[f"mxfp8{then}"] for then in ("", " then=mxfp8", " then=bf16"))
    assert same["loss"] == whole["loss"]
    assert same["val"] == whole["val"]
    assert other["loss"][:17] == whole["loss"][:17]
    assert other["loss"][17:] != whole["loss"][17:]
    assert (other["recipe"], other["then"]) == ("mxfp8", "bf16")
    assert list(other["evaluations"]) == ["4", "8", "12", "16", "20"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "stops"), [("fp8_delayed", [3]), ("nvfp4 then=mxfp8", [3, 11, 18])]
)
def test_a_run_goes_on_from_its_state_to_the_same_bits(small, entry, stops):
    whole, parts = (small(20, entry, stops=given)[entry] for given in ((), stops))
    timed = ("seconds", "tokens_per_s", "peak_gib")
    assert {k: v for k, v in whole.items() if k not in timed} == {
        k: v for k, v in parts.items() if k not in timed
    }


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[], [5, 14], [17]])
def test_first_steps_in_bf16_are_those_of_all_recipes(small, stops):
    """A command that goes on reads them, and the run in bf16 is the one without a change."""
    entries = "fp8_tensorwise", "bf16", "nvfp4 keep=nothing", "bf16 wire=bf16"
    found = small(20, *entries, stops=stops, bf16_steps=8)
    whole = small(20, "bf16")["bf16"]
    assert found["bf16"]["loss"] == whole["loss"]
    assert found["bf16"]["val"] == whole["val"]
    for name in set(found) - {"bf16"}:
        assert found[name]["loss"][:8] == whole["loss"][:8]
        assert found[name]["loss"][8:] != whole["loss"][8:]
    assert found["fp8_tensorwise"]["recipe"] == "fp8_tensorwise"
    assert list(found["bf16"]["evaluations"]) == ["4", "8", "12", "16", "20"]


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[], [5, 14, 16], [8, 12, 16]])
def test_last_parts_after_first_steps_in_bf16(small, stops):
    """Runs share the steps before each of their parts."""
    first = "nvfp4 keep=nothing"  # with a random state
    entries = first, f"{first} then=bf16 last=40%", f"{first} then=mxfp8 last=20%", "bf16"
    found = small(20, *entries, stops=stops, bf16_steps=8)
    plain, long, short, bf16 = (found[name] for name in entries)
    assert plain["loss"][:8] == bf16["loss"][:8]
    assert plain["loss"][8:] != bf16["loss"][8:]
    for run, end in ((long, 12), (short, 16)):
        assert run["loss"][:end] == plain["loss"][:end]
        assert run["loss"][end:] != plain["loss"][end:]
    assert long["loss"][12:] != bf16["loss"][12:]
    assert (short["then"], short["percent"]) == ("mxfp8", 20)


@pytest.mark.slow
def test_a_run_goes_on_from_the_steps_before_its_last_parts(parity, small, monkeypatch):
    trained, train_step = [], parity.Run.train_step

    def counted(run, step, rows_B):
        trained.append(step)
        return train_step(run, step, rows_B)

    monkeypatch.setattr(parity.Run, "train_step", counted)
    first = "nvfp4 keep=nothing"
    found = small(20, f"{first} then=bf16 last=40%", first, bf16_steps=8)
    assert trained == [*range(1, 21), *range(13, 21)]
    (whole,) = small(20, first, stops=(17,), bf16_steps=8).values()
    assert found[first]["loss"] == whole["loss"]


@pytest.mark.slow
def test_a_command_takes_what_another_has_trained(parity, small, monkeypatch):
    """It begins while the other trains the same first steps, which have other bits there."""
    (want,) = small(20, "mxfp8", bf16_steps=8).values()
    keep, states = parity.Trainer.keep_shared, []

    def keep_late(trainer, key, part, run):
        keep(trainer, key, part, run)
        if not states:  # as if this command's own bits were others
            states.append(trainer.shared_path(key, part, part.end))
            with torch.no_grad():
                run.model.output.weight.add_(1)
        return keep(trainer, key, part, run)

    monkeypatch.setattr(parity.Trainer, "keep_shared", keep_late)
    (found,) = small(20, "mxfp8", stops=(17,), bf16_steps=8).values()
    assert states[0].exists()
    assert found["loss"] == want["loss"]


def test_first_steps_are_compared(parity, tmp_path):
    trial = {"steps": 3, "bf16_steps": 2}
    for name, losses in (("bf16", [3.0, 2.0, 1.0]), ("mxfp8", [3.0, 2.0, 0.0])):
        record = {"name": name, "seed": 1, "trial": trial, "tokens": "a", "loss": losses}
        parity.write_record(tmp_path / f"{name}_seed_1.jsonl.xz", record)
    assert len(parity.records_in([tmp_path])) == 2
    parity.write_record(tmp_path / "nvfp4_seed_1.jsonl.xz", record | {"loss": [3.0, 1.0, 0.0]})
    with pytest.raises(SystemExit, match="expected the first 2 losses of bf16, got others"):
        parity.records_in([tmp_path])
    with pytest.raises(SystemExit, match="expected a last part of less than 70% of the steps"):
        parity.Plan.parse("nvfp4 then=bf16  last=70% ", 1).parts(parity.Trial(bf16_steps=1000))
    with pytest.raises(SystemExit, match="steps: expected more than 1000, got 500"):
        parity.Plan.parse("nvfp4", 1).parts(parity.Trial(steps=500, bf16_steps=1000))


def test_a_text_that_is_too_short_is_read_again_in_another_order(parity):
    sizes = {"seq": 16, "batch": 2, "device": "cpu"}
    windows = parity.Windows(numpy.zeros(16 * 5 + 1), parity.Trial(**sizes))
    found = torch.stack(windows.batches_of(seed=3, steps=5))
    assert torch.equal(found[:2].flatten(), next(windows.orders(seed=3))[:4])
    assert not torch.equal(found[2:4], found[:2])
    for epoch in (found[:2], found[2:4]):  # four of the five windows, each once
        assert len(epoch.unique()) == 4
    with pytest.raises(SystemExit, match="expected 2 windows of text, got 1"):
        parity.Windows(numpy.zeros(17), parity.Trial(**sizes)).batches_of(3, 1)


@pytest.mark.slow
def test_experts_are_balanced_under_bf16_too(parity, small, monkeypatch):
    models, record = [], parity.Run.record
    monkeypatch.setattr(parity.Run, "record", lambda run: models.append(run.model) or record(run))
    (found,) = small(6, "bf16", model="32,2,2,2,64,32,4,2,1").values()
    assert len(found["loss"]) == 6
    assert models[0].layers[0].moe is None
    assert models[0].layers[1].moe.router.expert_bias.any()


def test_gradients_pass_through_the_wire_as_four_ranks_send_them(parity):
    """Each rank's gradients have few enough bits that no format of the wire rounds them."""
    wires = importlib.import_module("_parity_wire")
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 9, bias=False))
    for spec in ("bf16", "e4m3/1x128+sr", "mxfp8"):
        wire = wires.Wire(model, [model[0]], spec, seed=3)
        assert [len(parameters) for parameters in wire.modules] == [2, 1]
        generator, sums = torch.Generator().manual_seed(0), [0.0, 0.0, 0.0]
        for _ in range(wires.RANKS):
            for i, p in enumerate(model.parameters()):
                p.grad = torch.randint(-8, 9, p.shape, generator=generator).float()
                sums[i] = sums[i] + p.grad
            wire.send(step=1)
            assert all(p.grad is None for p in model.parameters())
        wire.receive()
        for p, total in zip(model.parameters(), sums, strict=True):
            assert torch.equal(p.grad, total / wires.RANKS), spec


@pytest.mark.slow
def test_a_small_run_sends_its_gradients(small):
    found = small(2, "bf16", "bf16 wire=bf16", "bf16 wire=e4m3/1x128+sr")
    exact, coded = (found[f"bf16 wire={spec}"] for spec in ("bf16", "e4m3/1x128+sr"))
    assert (coded["wire"], coded["recipe"]) == ("e4m3/1x128+sr", "bf16")
    assert coded["loss"][0] == exact["loss"][0] == pytest.approx(found["bf16"]["loss"][0], rel=1e-4)
    assert coded["norm"] != exact["norm"]
    assert coded["norm"][0] == pytest.approx(exact["norm"][0], rel=0.01)
