"""The table and the plot of `minifloat train`, also of a job that is not done."""

import json

import pytest
import torch
from minifloat import cli
from minifloat.train.config import RunSpec
from minifloat.train.job import run as training
from minifloat.train.job.checkpoint import Metrics, read_records
from minifloat.train.model.measure import MEASURE_EVERY, PeakMemory, SpeedOfLight
from minifloat.train.report import (
    baseline_of,
    describe_light,
    draw_losses,
    markdown_table,
    smooth,
    table_rows,
)

from tests.support.tiny_job import without_timings
from tests.support.tiny_text import write_text

BF16, NOISE = RunSpec("bf16", "bf16", 1), RunSpec("bf16 (seed 2)", "bf16", 2)
NVFP4 = RunSpec("nvfp4", "*: nvfp4", 1)


def records_of(run, losses, step_ms):
    """Makes records of three steps: two beside 40 ms of products alone, one beside 90 ms."""
    for step, loss in enumerate(losses, 1):
        light = (90 if step % 3 == 0 else 40) / step_ms
        timings = {"tokens_per_s": 1e6 / step_ms, "speed_of_light": light, "step_ms": step_ms}
        yield {"run": run, "kind": "train", "step": step, "loss": loss, **timings}
        if step % 2 == 0:
            yield {"run": run, "kind": "eval", "step": step, "val_loss": loss, "seconds": 1.0}


def rows_of(records, runs=(BF16, NOISE, NVFP4)):
    return table_rows(runs, records, {"nvfp4": {"peak": 2e6}}, baseline_of(runs, 1))


def test_gaps_are_taken_at_the_same_step():
    records = [
        *records_of("bf16", [8, 6, 5, 4, 3, 2], 100),
        *records_of("nvfp4", [8, 6.6, 5, 4.4], 150),  # not done
    ]
    rows = rows_of(records)
    assert rows[0]["gap_percent"] == 0
    assert rows[1]["validation_loss"] is None
    assert rows[2]["gap_percent"] == pytest.approx(10)
    assert rows[2]["speed"] == pytest.approx(1 / 1.5)
    table = markdown_table(rows, last_step=6)
    assert "4.4000 (step 4)" in table
    assert "+10.00%" in table
    assert "0.67" in table
    assert len({len(line) for line in table.splitlines()}) == 1


def test_the_speed_of_light_is_the_median_of_the_steps():
    rows = rows_of([*records_of("bf16", range(9, 0, -1), 100)])
    assert rows[0]["speed_of_light_percent"] == pytest.approx(40)
    assert rows[0]["light_ms"] == pytest.approx(40)
    assert rows[2]["speed_of_light_percent"] is rows[2]["light_ms"] is None
    assert describe_light(rows, 8e9) == ": 40 ms, 200 GFLOP/s, the median of the runs"
    assert describe_light(rows[2:], 8e9) == ""


STEP, PRODUCTS = 0.5, (0.25, 0.125, 0.05)  # seconds of a step, and of its products at each time


class Clock:
    """A clock that advances by half a step at each reading."""

    now = 0.0

    def perf_counter(self):
        self.now += STEP
        return self.now


@pytest.mark.usefixtures("torch_as_it_was")
def test_the_speed_of_light_is_measured_beside_the_steps(tmp_path, monkeypatch):
    """Measures for 100 s, outside the steps' time, while the load changes over the run."""
    clock, calls = Clock(), []

    def measured(self):
        clock.now += 100
        self.seconds = PRODUCTS[min(len(calls), 3) - 1]  # the first is the job's measurement
        calls.append(self.seconds)

    monkeypatch.setattr(SpeedOfLight, "measure", measured)
    monkeypatch.setattr(training, "time", clock)
    write_text(tmp_path / "text")
    out, steps = tmp_path / "out", 2 * MEASURE_EVERY + 4
    options = f"""train --data {tmp_path}/text --cache {tmp_path}/cache --out {out} --device cpu
        --model 32,2,2,1,64 --vocab 300 --seq 32 --batch 2 --recipes bf16 --steps {steps}"""
    assert cli.main(options.split()) == 0
    assert len(calls) == 4
    records = [r for r in read_records(out / "metrics.jsonl") if r["kind"] == "train"]
    assert {r["step_ms"] for r in records} == {1e3 * STEP}
    want = [PRODUCTS[step // MEASURE_EVERY] / STEP for step in range(steps)]
    assert [r["speed_of_light"] for r in records] == want
    (row,) = json.loads((out / "report.json").read_text())["rows"]
    assert row["speed_of_light_percent"] == pytest.approx(100 * PRODUCTS[1] / STEP)
    assert row["light_ms"] == pytest.approx(1e3 * PRODUCTS[1])
    assert "| 25% |" in " ".join((out / "report.md").read_text().split())
    assert "125 ms" in (out / "report.md").read_text()


def test_memory_of_the_measurement_is_left_out_of_the_peak():
    memory = PeakMemory("cpu")
    held = torch.ones(16, 2**20)
    del held
    with memory.left_out():
        held = torch.ones(64, 2**20)
        del held
    assert 48e6 < memory.bytes() < 192e6  # 64 MB were touched outside, 256 MB inside


def test_the_baseline_is_bf16_with_the_jobs_seed():
    assert baseline_of([NVFP4, NOISE, BF16], seed=1) is BF16
    assert baseline_of([NVFP4, NOISE], seed=1) is NOISE
    assert baseline_of([NVFP4], seed=1) is None


@pytest.mark.parametrize("runs", [(BF16, NOISE, NVFP4), (NVFP4,)])
def test_a_plot_is_drawn_of_whatever_there_is(tmp_path, runs):
    records = [
        *records_of("bf16", [8, 6, 5, 4], 100),
        *records_of("bf16 (seed 2)", [8], 100),
        *records_of("nvfp4", [8, 6, None, None], 100),  # diverged
    ]
    rows = rows_of(records, runs)
    draw_losses(tmp_path / "loss.png", runs, records, baseline_of(runs, 1), "a title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(rows) == len(runs)


def test_smoothing_keeps_a_constant_and_the_length():
    assert smooth([2.0] * 7, window=4).tolist() == pytest.approx([2.0] * 7)
    assert smooth([1.0], window=4).tolist() == [1.0]


def test_going_on_drops_the_records_past_the_step_and_a_torn_line(tmp_path):
    timings = {"step_ms": 5.0, "tokens_per_s": 9.0, "speed_of_light": 0.5}
    metrics = Metrics(tmp_path, "a", "a", 0)
    for step in (1, 2, 3):
        metrics.write("train", step, {"loss": 1.0 / step, **timings})
    metrics.close()
    metrics = Metrics(tmp_path, "b", "b", 0)
    metrics.write("train", 1, {"loss": float("nan"), **timings})
    metrics.close()
    with metrics.path.open("a") as file:
        file.write('{"run": "b", "kind": "tra')
    metrics = Metrics(tmp_path, "a", "a", 2)
    metrics.write("train", 3, {"loss": 0.5, **timings})
    metrics.close()
    assert without_timings(read_records(metrics.path)) == [
        {"run": "a", "kind": "train", "step": 1, "loss": 1.0},
        {"run": "a", "kind": "train", "step": 2, "loss": 0.5},
        {"run": "b", "kind": "train", "step": 1, "loss": None},
        {"run": "a", "kind": "train", "step": 3, "loss": 0.5},
    ]
