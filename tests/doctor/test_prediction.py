"""`minifloat doctor --model`: rows of given measurements, what is measured, what it prints."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from minifloat import cli
from minifloat.doctor import meter, pays
from minifloat.doctor.meter import Meter, time_host
from minifloat.doctor.model_sizes import ModelSizes, Part, read_sizes
from minifloat.doctor.predict import (
    HostTime,
    Job,
    Measured,
    PartTime,
    Row,
    explain,
    linked_bytes,
    moved_bytes,
    predict,
    table,
)
from minifloat.engine_choice import Engine
from minifloat.nn.linear import Linear

CPU = torch.device("cpu")
TINY = "hidden=128,intermediate=256,layers=2,heads=2,kv_heads=1,vocab=512"


# ---- Rows of given measurements ------------------------------------------------------------------
SIZES = ModelSizes(hidden=8, intermediate=16, layers=3, heads=2, kv_heads=1, head_dim=4, vocab=32)
HEAD = SIZES.parts()[-1]
WEIGHTS = 8 * 16 + 8 * 8 + 2 * 8 * 16 + 16 * 8  # of a block
MOVED = 8 * (2 * (3 * (24 * 8 + 14 * 16 + 4 * 3 * 4)) + 8 * 32) + 7 * 2 * (3 * WEIGHTS + 2 * 8 * 32)


def measured(**changes):
    """Returns 8 ms of products a part at 2 tokens; FP8 takes half, and casts."""
    parts = SIZES.parts()
    times = {
        "parts": {
            "bf16": {part: PartTime(8.0, 0.0, 0.0, 2) for part in parts},
            "fp8_rowwise": {part: PartTime(4.0, 0.5, 0.25, 2) for part in parts if part != HEAD},
        },
        "attention": 1.5,
        "host": {"bf16": HostTime(1.0, 2.0), "fp8_rowwise": HostTime(1.0, 4.0)},
        "copy": MOVED / 10,
    }
    return Measured(**{**times, **changes})


def test_rows():
    bf16, fp8 = predict(Job(SIZES, tokens=8, seq=4), measured())
    assert (bf16.recipe, bf16.speed, bf16.limit, bf16.link) == ("bf16", 1.0, "GEMMs", 0.0)
    assert (bf16.gemms, bf16.casts) == (4 * 8.0 * 13, 0.0)  # four parts in three blocks, the head
    assert (bf16.attention, bf16.memory) == (3 * 2 * 1.5, pytest.approx(10.0))
    assert bf16.ms == bf16.device == pytest.approx(4 * 8 * 13 + 9 + 10)
    assert (fp8.gemms, fp8.casts) == (4 * (4 * 12 + 8), 12 * (4 * 0.5 + 0.25))
    assert fp8.ms == pytest.approx(4 * 56 + 27 + 9 + 10)
    assert fp8.speed == bf16.ms / fp8.ms
    assert (bf16.host, fp8.host) == (7.0, 13.0)  # once a step, and for each of three blocks


def test_what_limits():
    job = Job(SIZES, tokens=8, seq=4, gpus=2, link=1e-6)
    late = {"bf16": HostTime(1.0, 2.0), "fp8_rowwise": HostTime(10.0, 400.0)}
    bf16, fp8 = predict(Job(SIZES, 8, 4), measured(host=late))
    assert (bf16.limit, fp8.limit, fp8.ms) == ("GEMMs", "host", 1210.0)
    assert explain(fp8, "") == "host, 1210.0 ms; the device computes for 270.0 ms of them"
    bf16, fp8 = predict(job, measured())
    assert (bf16.limit, bf16.ms) == ("link", bf16.link)
    assert bf16.link == pytest.approx(linked_bytes(job, "bf16"))  # at a byte a ms
    slow = measured(attention=1e3)
    assert [row.limit for row in predict(Job(SIZES, 8, 4), slow)] == ["attention"] * 2
    assert [row.limit for row in predict(Job(SIZES, 8, 4), measured(copy=1.0))] == ["memory"] * 2


def test_bytes():
    assert moved_bytes(Job(SIZES, 8, 4)) == MOVED
    states = 7 * 2 * (3 * WEIGHTS + 2 * 8 * 32)
    assert moved_bytes(Job(SIZES, 8, 4, gpus=4)) == MOVED - states * 3 / 4
    assert moved_bytes(Job(SIZES, 8, 4, is_compiled=True)) < MOVED
    # Half comes from the other GPU: W twice and its gradient; in FP8 a byte a code.
    whole = 3 * 2 * (3 * WEIGHTS + 2 * 8 * 32)
    assert linked_bytes(Job(SIZES, 8, 4, gpus=2), "bf16") == whole / 2
    codes = 3 * 2 * 2 * 8 * 32 + 3 * WEIGHTS * (2 + 2 * 1)
    assert linked_bytes(Job(SIZES, 8, 4, gpus=2), "fp8_rowwise") == codes / 2
    assert linked_bytes(Job(SIZES, 8, 4, gpus=2), "nvfp4_served") == whole / 2
    assert linked_bytes(Job(SIZES, 8, 4), "mxfp4") == 0.0


def test_a_tied_head_is_gathered_and_updated_once():
    tied, once = replace(SIZES, tied=1), 8 * 32
    assert linked_bytes(Job(tied, 8, 4, gpus=2), "mxfp8") == (
        linked_bytes(Job(SIZES, 8, 4, gpus=2), "mxfp8") - 3 * 2 * once / 2
    )
    assert moved_bytes(Job(tied, 8, 4)) == MOVED - 7 * 2 * once


def test_the_table():
    rows = predict(Job(SIZES, tokens=8, seq=4), measured())
    assert table(rows, {"fp8_rowwise": "wgrad"}) == [
        "recipe                      ms  speed     GEMMs     casts attention    memory      host"
        "      link",
        "bf16                     435.0   1.00     416.0       0.0       9.0      10.0       7.0"
        "       0.0",
        "fp8_rowwise              270.0   1.61     224.0      27.0       9.0      10.0      13.0"
        "       0.0",
        "what limits:",
        "  bf16                 GEMMs, 96% of the device's time",
        "  fp8_rowwise          GEMMs, 83% of the device's time; emulated here: wgrad",
    ]


def test_the_page_shows_this_format():
    """Makes rows of the page's numbers, and prints them again. The page has … for what it omits."""
    page = (Path(__file__).parents[2] / "docs" / "choose.md").read_text(encoding="utf-8")
    block = re.search("```text\n(NVIDIA H200: predicted .*?)```", page, re.DOTALL)[1]
    first, names, *lines = [line for line in block.splitlines() if line.strip() != "…"]
    limits = lines[lines.index("what limits:") + 1 :]
    rows, emulated = [], {}
    for line, limit in zip(lines, limits):
        recipe, *numbers = line.split()
        ms, speed, *times = map(float, numbers)
        name, reason = limit.split(maxsplit=1)
        assert name == recipe
        rows.append(Row(recipe, ms, speed, *times, limit=reason.partition(",")[0]))
        emulated[recipe] = reason.partition("emulated here: ")[2]
        assert ms == pytest.approx(max(rows[-1].device, *times[4:]), abs=0.3)  # of rounded parts
    assert table(rows, emulated) == [names, *lines]
    job = asdict(Job(SIZES, tokens=16384, seq=8192))
    about = {"device": "NVIDIA H200", "job": job, "seconds": 1, "rows": [], "emulated": {}}
    assert next(pays.as_text(about)).partition(";")[0] == first.partition(";")[0]
    assert [row.speed for row in rows] == [round(rows[0].ms / row.ms, 2) for row in rows]


# ---- Measurements --------------------------------------------------------------------------------
def test_equal_parts_are_measured_once(monkeypatch):
    measure, calls = Meter(CPU), []
    monkeypatch.setattr(measure, "device_ms", lambda call: calls.append(call) or 2.0)
    model = read_sizes(TINY)
    first = measure.measure(Job(model, 64, 32), ["fp8_rowwise"])
    count = len(calls)
    assert measure.measure(Job(model, 128, 32), ["fp8_rowwise", "bf16"]) == first
    assert len(calls) == count
    measure.measure(Job(model, 16, 16), ["fp8_rowwise"])
    assert len(calls) > count
    assert set(first.parts) == set(first.host) == {"bf16", "fp8_rowwise"}
    assert first.host["bf16"] == HostTime(0.0, 0.0)  # the CPU is the device


def test_large_things_are_measured_in_part(monkeypatch):
    """Each call takes 3 ms, a cast 1 ms; 8 * 128 outputs of the weight are left of 128 * 128."""
    monkeypatch.setattr(meter, "MOST_WEIGHTS", 1 << 17)
    monkeypatch.setattr(meter, "MOST_SEQ", 16)
    measure = Meter(CPU)
    monkeypatch.setattr(measure, "device_ms", lambda call: 7.0)
    monkeypatch.setattr(measure, "cast", lambda *_: 1.0)
    part = Part("down", 128, (1 << 14,), 1)
    assert measure.part(part, "bf16", 8) == PartTime(16 * 7.0, 0.0, 0.0, 8)
    assert measure.part(part, "mxfp4", 8) == PartTime(16 * 4.0, 1 + 16 * 1.0, 16 * 1.0, 8)
    assert measure.part(Part("o", 128, (256,), 1), "bf16", 8).products == 7.0
    assert measure.attention(2, 1, 32, 64) == 4 * 7.0
    assert meter.with_fewer_outputs(Part("", 128, (1 << 14, 1 << 11), 1)).ns == (896, 128)


def test_what_torch_has_cached_is_free(monkeypatch):
    """Half of the free memory holds as many tokens as it holds without the cache."""
    part, cached = Part("o", 1024, (1024,), 1), [1 << 30]
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: ((1 << 30) - sum(cached), 0))
    gpu = Meter(torch.device("cuda"))
    assert gpu.most(part) == gpu.most(part) == 16384


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
def test_the_host_is_timed_at_two_depths(monkeypatch, recipe):
    nets = []

    def step_ms(net, x, recipe):
        nets.append(net)
        y = net(x).float().sum()
        y.backward()
        return 5.0 + 3.0 * len(net)

    monkeypatch.setattr(meter, "step_ms", step_ms)
    assert time_host(recipe, False, CPU) == HostTime(5.0, 3.0)
    assert nets[0][0] is nets[1][0]


@pytest.mark.parametrize(("recipe", "converted"), [("bf16", 0), ("mxfp8", 7)])
def test_small_blocks_are_trained(monkeypatch, recipe, converted):
    monkeypatch.setattr(meter, "STEPS", 1)
    monkeypatch.setattr(meter, "SMALL", {"hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 64})
    nets, stepped = [], []
    monkeypatch.setattr(meter, "step", stepped.append)
    monkeypatch.setattr(meter, "DEPTHS", (1, 2))
    trained = meter.step_ms

    def step_ms(net, x, recipe):
        before = [p.clone() for p in net.parameters()]
        ms = trained(net, x, recipe)
        changed = [not torch.equal(p, old) for p, old in zip(net.parameters(), before)]
        nets.append((sum(changed), sum(isinstance(m, Linear) for m in net.modules())))
        return ms

    monkeypatch.setattr(meter, "step_ms", step_ms)
    host = time_host(recipe, False, CPU)
    assert host.step + host.block > 0.0
    assert nets == [(7, converted), (14, 2 * converted)]  # norms of 1 take larger steps to change
    assert len(stepped) == (12 if converted else 0)  # six steps at each depth


# ---- The command ---------------------------------------------------------------------------------
def run(capsys, *arguments):
    code = cli.main(["doctor", "--model", *arguments])
    return code, capsys.readouterr()


def test_the_help_has_the_defaults_of_the_prediction(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(pays, "TOKENS", 96)
    monkeypatch.setattr(pays, "SEQUENCE", 48)
    monkeypatch.setattr(pays.Job, "gpus", 3)
    monkeypatch.setattr(pays.Job, "link", 12.5)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["doctor", "--help"])
    defaults = re.findall(r"\(default: ([\w.]+)", capsys.readouterr().out)
    assert defaults[:4] == ["96", "48", "3", "12.5"]


def test_the_prediction_as_text(capsys):
    options = ("--tokens", "64", "--seq", "32", "--recipes", "fp8_rowwise", "nvfp4")
    code, printed = run(capsys, TINY, *options, "--gpus", "4")
    assert code == 0, printed.err
    first, names, *lines = printed.out.splitlines()
    assert first.startswith(
        "CPU: predicted step of 64 tokens a GPU, sequences of 32, eager blocks, FSDP2 over 4 GPUs "
        "at 200 GB/s (assumed, not measured); measured in "
    )
    assert names.split()[:3] == ["recipe", "ms", "speed"]
    assert [line.split()[0] for line in lines[:3]] == ["bf16", "fp8_rowwise", "nvfp4"]
    assert all(float(line.split()[1]) > 0 for line in lines[:3])
    assert lines[3] == "what limits:"
    assert "emulated here: fprop, dgrad, wgrad" in lines[5]
    assert len(lines) == 7


def test_the_prediction_of_experts_as_json(capsys):
    options = ("--tokens", "64", "--recipes", "mxfp8", "--gpus", "2", "--link", "0.5", "--compile")
    code, printed = run(capsys, f"{TINY},experts=8,experts_per_token=2", *options, "--json")
    assert code == 0, printed.err
    about = json.loads(printed.out)
    assert about["device"] == "CPU"
    assert about["link_is"] == "given"
    assert about["job"]["model"]["experts"] == 8
    assert {name: about["job"][name] for name in ("tokens", "seq", "link", "is_compiled")} == {
        "tokens": 64,
        "seq": 64,
        "link": 0.5,
        "is_compiled": True,
    }
    bf16, mxfp8 = about["rows"]
    assert mxfp8["casts"] > bf16["casts"] == 0
    assert mxfp8["speed"] == pytest.approx(bf16["ms"] / mxfp8["ms"], rel=0.01)
    assert "FSDP2 over 2 GPUs at 0.5 GB/s (given, not measured)" in next(pays.as_text(about))


def test_the_prediction_of_a_part_of_a_config(monkeypatch):
    sizes = replace(read_sizes(TINY), section="text_config")
    monkeypatch.setattr(pays, "read_sizes", lambda model: sizes)
    about = pays.predict_model("a model with images", ["bf16"], tokens=64)
    assert "eager blocks, of text_config alone; measured in" in next(pays.as_text(about))


@pytest.mark.parametrize(
    ("sizes", "emulated"),
    [
        ({}, ["dgrad"]),
        ({"experts": 8}, ["dgrad", "wgrad"]),
        ({"experts": 8, "dense_layers": 2}, ["dgrad"]),
    ],
)
def test_emulated_products_are_those_of_the_layers_that_the_model_has(monkeypatch, sizes, emulated):
    def engines(recipe, capability, experts):
        native = {"fprop": True, "dgrad": experts, "wgrad": not experts}
        return [Engine(product, "", "", is_native, "") for product, is_native in native.items()]

    monkeypatch.setattr(pays, "engines", engines)
    model = replace(read_sizes(TINY), experts_per_token=2, expert_intermediate=64, **sizes)
    assert pays.emulated(model, "mxfp8", (9, 0)) == emulated


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--recipes", "fp8"), "--recipes: expected presets (bf16, "),
        (("--tokens", "48", "--seq", "32"), "--tokens: expected whole sequences of 32, got 48"),
        (("--tokens", "5000"), "--tokens: expected whole sequences of 4096, got 5000"),
        (("--tokens", "64", "--seq", "128"), "--tokens: expected whole sequences of 128, got 64"),
        (("--link", "50"), "--link: expected --gpus of 2 or more, got 1, which gathers nothing"),
    ],
)
def test_wrong_options(capsys, options, text):
    code, printed = run(capsys, TINY, *options)
    assert (code, printed.out) == (1, "")
    assert printed.err.startswith(f"minifloat doctor: error: {text}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [("--tokens", "0"), ("--gpus", "²"), ("--link", "0"), ("--link", "nan"), ("--link", "1e999")],
)
def test_wrong_numbers(capsys, options):
    with pytest.raises(SystemExit, match="2"):
        run(capsys, TINY, *options)
    assert f"{options[0]}: expected a positive " in capsys.readouterr().err


@pytest.mark.parametrize("beside", [(), ("--gpu",), ("--json",)])
@pytest.mark.parametrize("options", ["--tokens 64", "--seq 4 --gpus 2", "--link .5", "--compile"])
def test_options_of_a_prediction_without_a_model(capsys, options, beside):
    code = cli.main(["doctor", *beside, *options.split(), "--recipes", "mxfp8"])
    printed = capsys.readouterr()
    names = ", ".join(re.findall("--[a-z]+", options))
    error = f"{names}, --recipes: expected --model CONFIG beside, got none"
    assert (code, printed.out) == (2, "")
    assert printed.err == f"minifloat doctor: error: {error}\n"


def test_what_excludes_a_prediction(capsys):
    with pytest.raises(SystemExit, match="2"):
        run(capsys, TINY, "--gpu")
    assert "not allowed with argument" in capsys.readouterr().err
    code, printed = run(capsys, "no_such_file")
    assert (code, printed.err.count("\n")) == (1, 1)
