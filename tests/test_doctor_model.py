"""`minifloat doctor --model`: the sizes of models, rows of given measurements, what it prints."""

from __future__ import annotations

import json

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
    explain,
    linked_bytes,
    moved_bytes,
    predict,
    table,
)
from minifloat.nn.linear import Linear

CPU = torch.device("cpu")
TINY = "hidden=128,intermediate=256,layers=2,heads=2,kv_heads=1,vocab=512"
LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


@pytest.fixture
def read(tmp_path):
    """Reads the sizes of a config in a file."""

    def read(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_sizes(str(tmp_path))

    return read


# ---- Sizes ---------------------------------------------------------------------------------------
def test_a_llama(read, tmp_path):
    sizes = read(LLAMA)
    assert sizes == ModelSizes(4096, 14336, 32, 32, 8, 128, 128256)
    assert sizes == read_sizes(str(tmp_path / "config.json"))
    assert sizes == read({"model_type": "a model with images", "text_config": LLAMA})
    short = "hidden=4096, intermediate=14336,layers=32,heads=32,kv_heads=8,vocab=128256"
    assert sizes == read_sizes(short)
    assert sizes == read_sizes(",".join(f"{name}={size}" for name, size in LLAMA.items()))
    weights = sum(part.count * part.weights for part in sizes.parts()) + sizes.other_weights
    assert weights == 8030261248 - 65 * 4096  # Llama3-8B's parameters without its norms
    assert [(p.name, p.count, p.is_converted) for p in sizes.parts()] == [
        ("q, k, v", 32, True),
        ("o", 32, True),
        ("gate, up", 32, True),
        ("down", 32, True),
        ("head", 1, False),
    ]


def test_heads_without_a_number_of_their_own(read):
    config = {name: size for name, size in LLAMA.items() if name != "num_key_value_heads"}
    assert read({**config, "head_dim": None}) == ModelSizes(4096, 14336, 32, 32, 32, 128, 128256)
    assert read({**LLAMA, "head_dim": 64}).parts()[:2] == [
        Part("q, k, v", 4096, (2048, 512, 512), 32),
        Part("o", 2048, (4096,), 32),
    ]


def test_a_mixtral(read):
    sizes = read({**LLAMA, **EXPERTS})
    assert sizes.parts()[2:4] == [
        Part("experts' gate, up", 4096, (28672,), 32, experts=8, rows=2),
        Part("experts' down", 14336, (4096,), 32, experts=8, rows=2),
    ]
    assert sizes.gated_widths() == 32 * 2 * 14336


@pytest.mark.parametrize(
    ("extra", "dense"),
    [
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, 0),
        ({"decoder_sparse_step": 2, "mlp_only_layers": None}, 16),  # 0, 2, …
        ({"mlp_only_layers": [0, 31]}, 2),
        ({"first_k_dense_replace": 3}, 3),
    ],
)
def test_a_qwen3_moe(read, extra, dense):
    sizes = read({**LLAMA, **QWEN, "shared_expert_intermediate_size": 512, **extra})
    counts = {part.name: part.count for part in sizes.parts()}
    assert counts["experts' down"] == counts["shared down"] == 32 - dense
    assert counts.get("down", 0) == dense
    widths = dense * 14336 + (32 - dense) * (8 * 768 + 512)
    assert sizes.gated_widths() == widths
    down = next(part for part in sizes.parts() if part.name == "experts' down")
    assert (down.k, down.ns, down.experts, down.rows) == (768, (4096,), 128, 8)
    assert down.weights == 128 * 768 * 4096


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": "4096"}, "expected hidden_size as a positive integer, got '4096'"),
        ({"num_hidden_layers": 0}, "expected num_hidden_layers as a positive integer, got 0"),
        ({"vocab_size": True}, "expected vocab_size as a positive integer, got True"),
        ({"vocab_size": None}, "expected vocab_size, got hidden_size, "),
        ({"num_key_value_heads": 5}, "heads as a multiple of kv_heads, got 32 and 5"),
        ({"num_key_value_heads": 0}, "heads as a multiple of kv_heads, got 32 and 0"),
        ({"hidden_size": 16}, "no more heads than the hidden size, got hidden 16 and heads 32"),
        ({"kv_lora_rank": 512}, "projections q, k, v and o, got kv_lora_rank"),
        ({"num_local_experts": 8}, r"expected num_experts_per_tok in 1\.\.8, got 0"),
        ({**EXPERTS, "num_experts_per_tok": 9}, r"expected num_experts_per_tok in 1\.\.8, got 9"),
        ({**EXPERTS, "mlp_only_layers": 3}, "expected decoder_sparse_step, mlp_only_layers and"),
    ],
)
def test_a_wrong_config(read, change, text):
    with pytest.raises(ValueError, match=f"config.json: .*{text}"):
        read({**LLAMA, **change})


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("no_such_folder", "expected a config.json, a folder with one, or sizes as hidden=N, .*"),
        ("hidden=4096,width=2", "expected sizes as hidden=N, .*; got 'width=2'"),
        ("hidden=-1", "expected sizes as .*; got 'hidden=-1'"),
        ("hidden=²", "expected sizes as .*; got 'hidden=²'"),
        ("hidden=4096,layers=2", "expected intermediate_size, num_attention_heads, vocab_size, "),
    ],
)
def test_a_wrong_model(model, text):
    with pytest.raises(ValueError, match=f"--model: {text}"):
        read_sizes(model)


@pytest.mark.parametrize(
    ("content", "text"),
    [("{", "expected JSON, got Expecting"), ("[1]", "expected a JSON object, got list")],
)
def test_a_file_that_is_no_config(tmp_path, content, text):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"config.json: {text}"):
        read_sizes(str(tmp_path))


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
    # Half comes from the other GPU: W twice and its gradient; in FP8 a byte a code, and scales.
    whole = 3 * 2 * (3 * WEIGHTS + 2 * 8 * 32)
    assert linked_bytes(Job(SIZES, 8, 4, gpus=2), "bf16") == whole / 2
    codes = 3 * 2 * 2 * 8 * 32 + 3 * WEIGHTS * (2 + 2 * (1 + 4 / 1024))
    assert linked_bytes(Job(SIZES, 8, 4, gpus=2), "fp8_rowwise") == pytest.approx(codes / 2)
    assert linked_bytes(Job(SIZES, 8, 4), "mxfp4") == 0.0


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


def test_the_prediction_of_experts_as_json(capsys, tmp_path):
    sizes = dict(pair.split("=") for pair in TINY.split(","))
    config = {name: int(size) for name, size in sizes.items()} | EXPERTS
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--tokens", "64", "--recipes", "mxfp8", "--link", "50", "--compile", "--json")
    code, printed = run(capsys, str(tmp_path), *options)
    assert code == 0, printed.err
    about = json.loads(printed.out)
    assert about["device"] == "CPU"
    assert about["link_is"] == "given"
    assert about["job"]["model"]["experts"] == 8
    assert {name: about["job"][name] for name in ("tokens", "seq", "link", "is_compiled")} == {
        "tokens": 64,
        "seq": 64,
        "link": 50.0,
        "is_compiled": True,
    }
    bf16, mxfp8 = about["rows"]
    assert mxfp8["casts"] > bf16["casts"] == 0
    assert mxfp8["speed"] == pytest.approx(bf16["ms"] / mxfp8["ms"], rel=0.01)
    assert "(given, not measured)" not in "\n".join(pays.as_text(about))  # of one GPU


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--recipes", "fp8"), "--recipes: expected presets (bf16, "),
        (("--tokens", "48", "--seq", "32"), "--tokens: expected whole sequences of 32, got 48"),
        (("--tokens", "5000"), "--tokens: expected whole sequences of 4096, got 5000"),
    ],
)
def test_wrong_options(capsys, options, text):
    code, printed = run(capsys, TINY, *options)
    assert (code, printed.out) == (1, "")
    assert printed.err.startswith(f"minifloat doctor: error: {text}")
    assert printed.err.count("\n") == 1


def test_wrong_usage(capsys):
    for options in (("--tokens", "0"), ("--gpus", "²"), ("--gpu",)):
        with pytest.raises(SystemExit, match="2"):
            run(capsys, TINY, *options)
    assert "not allowed with argument" in capsys.readouterr().err
    code, printed = run(capsys, "no_such_file")
    assert (code, printed.err.count("\n")) == (1, 1)
