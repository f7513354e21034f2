"""The command line of `minifloat train`: errors before the first write."""

import os
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from minifloat import _native, cli
from minifloat.train import durable_files
from minifloat.train.checks import Number, TrainError
from minifloat.train.config import ModelConfig, TrainConfig, parse_recipes
from minifloat.train.data import load_corpus
from minifloat.train.job import train
from minifloat.train.job.processes import joined
from minifloat.train.model import measure
from minifloat.train.model.llama import Llama

from tests.support.tiny_job import run

LAST_SEED = 2**63 - 1
NUMBERS = [
    field.name
    for field in fields(TrainConfig)
    if isinstance(field.metadata.get("check"), Number) and field.metadata["help"]
]

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


# ---- what is refused -----------------------------------------------------------------------------

REFUSED = [  # (options, message): exit code 1
    ("--steps 0", "--steps: expected at least 1, got 0"),
    ("--steps -3", "--steps: expected at least 1, got -3"),
    ("--steps 9999999999", "--steps: expected at most 1000000000, got 9999999999"),
    ("--seq 0", "--seq: expected at least 1, got 0"),
    ("--batch 0", "--batch: expected at least 1, got 0"),
    ("--batch 4000", "too little text"),
    (f"--batch {10**400}", "--batch: expected at most 1000000000, got 1000"),
    ("--expert-capacity 0", "--expert-capacity: expected a number of rows from 1 to "),
    ("--expert-capacity all", "--expert-capacity all: expected --expert-parallel of at least 2"),
    ("--lr 0", "--lr: expected more than 0, got 0"),
    ("--lr=-1e-3", "--lr: expected more than 0, got -0.001"),
    ("--lr 1e999", "--lr: expected a finite number, got inf"),
    ("--clip 0", "--clip: expected more than 0, got 0"),
    ("--weight-decay -0.1", "--weight-decay: expected at least 0, got -0.1"),
    ("--warmup -5", "--warmup: expected at least 0, got -5"),
    ("--threads -1", "--threads: expected at least 0, got -1"),
    ("--threads 0", "--threads: expected at least 1, got 0"),
    ("--threads 1000000", "--threads: expected at most 4096, got 1000000"),
    ("--eval-every 0", "--eval-every: expected at least 1, got 0"),
    ("--eval-batches -1", "--eval-batches: expected at least 1, got -1"),
    ("--checkpoint-every 0", "--checkpoint-every: expected at least 1, got 0"),
    ("--data-mb 0", "--data-mb: expected more than 0, got 0"),
    ("--data-mb 1e300", "--data-mb: expected at most 1000000000, got 1e+300"),
    ("--data-mb 1e-3", "too little text"),
    ("--data /nowhere/at/all", "expected a file or a folder, got /nowhere/at/all"),
    ("--data ~no_such_user/text", "expected a file or a folder, got "),
    ("--seed -1", "--seed: expected at least 0, got -1"),
    (f"--seed {2**64}", f"--seed: expected at most {LAST_SEED}, got {2**64}"),
    ("--recipes bf16@99999999999999999999", f"after @: expected at most {LAST_SEED}, got 9999"),
    ("--recipes bf16@-1", "after @: expected at least 0, got -1"),
    ("--recipes bf16@²", "after @: expected an integer, got '²'"),
    ("--recipes bf16@1_0", "after @: expected an integer, got '1_0'"),
    ("--recipes nvfp5", "recipe nvfp5"),
    ("--recipes bf16\udcff", "expected printable text, got 'bf16\\udcff'"),
    ("--recipe _=bf16", "expected a name of 1 to 255 bytes that a folder can have, got '_'"),
    (f"--recipe {'n' * 256}=bf16", "expected a name of 1 to 255 bytes"),
    ("--model 1,2", "--model: expected 5 integers"),
    ("--model ²2,2,2,1,64", "--model: expected 5 integers"),
    ("--model 3_2,2,2,1,64", "--model: expected 5 integers"),
    ("--model 32,0,2,1,64", "--model: layers: expected at least 1, got 0"),
    ("--model 32,2,-2,1,64", "--model: heads: expected at least 1, got -2"),
    (f"--model 32,2,2,1,{'9' * 30}", "--model: ffn: expected at most 1000000, got 999"),
    ("--model 1000000,1000000,2,1,1000000", "--model: expected weights, gradients and AdamW's"),
    ("--model moe:32,3", "--model: expected 8 integers moe:dim,layers,heads,kv_heads,hidden,"),
    ("--model moe:32,3,2,1,32,4,2,x", "--model: expected 8 integers moe:dim"),
    ("--model moe:moe:32,3,2,1,32,4,2,1", "--model: expected 8 integers moe:dim"),
    ("--model moe32,3,2,1,32,4,2,1", "--model: expected 5 integers dim,layers"),
    ("--model moe:32,1,2,1,32,4,2,1", "--model: layers: expected at least 2, got 1"),
    ("--model moe:32,3,2,1,32,4,5,1", "--model: expected top_k of at most 4 experts, got 5"),
    ("--model moe:32,3,2,1,32,0,1,1", "--model: experts: expected at least 1, got 0"),
    ("--model moe:32,3,2,1,32,1024,1,1", "--model: experts: expected at most 1023, got 1024"),
    ("--model moe:32,3,2,1,32,4,0,1", "--model: top_k: expected at least 1, got 0"),
    ("--model moe:32,3,2,1,0,4,2,1", "--model: hidden: expected at least 1, got 0"),
    ("--model moe:32,3,2,1,32,4,2,-1", "--model: shared: expected at least 0, got -1"),
    ("--model moe:30,3,4,1,32,4,2,1", "--model: expected dim to be heads times an even width"),
    ("--model moe:9990,99,9,1,999999,9,9,9", "--model: expected weights, gradients and AdamW's"),
    ("--vocab 0", "--vocab: expected at least 257, got 0"),
    ("--vocab 100", "--vocab: expected at least 257, got 100"),
    ("--vocab 99999999999999", "--vocab: expected at most 1000000"),
    ("--out /dev/null", "--out: expected a folder, got the file /dev/null"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[case[0][:30] for case in REFUSED])
def test_what_cannot_be_is_refused_before_anything_is_written(
    tiny, tmp_path, capsys, given, message
):
    assert run(tiny, tmp_path / "out", *given.split()) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("error:") == 1
    assert list(tmp_path.iterdir()) == []


# Python's int and float take 1_0, so it tells whether an option has the strict types; the other
# texts are those of one option of each type.
NO_NUMBERS = [(name, "1_0") for name in [*NUMBERS, "vocab", "expert_capacity"]] + [
    (name, text)
    for name in ("steps", "lr", "expert_capacity")
    for text in ("nan", "inf", "٣", "", " 1", "0x10", "many")
]


@pytest.mark.parametrize(("name", "text"), NO_NUMBERS)
def test_what_is_no_number_is_wrong_usage(tiny, tmp_path, capsys, name, text):
    option = "--" + name.replace("_", "-")
    with pytest.raises(SystemExit) as ended:
        run(tiny, tmp_path / "out", f"{option}={text}")
    assert ended.value.code == 2
    assert f"argument {option}: expected a" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_every_field_that_is_a_number_has_its_range():
    numbers = {name for name, value in vars(TrainConfig()).items() if type(value) in (int, float)}
    assert numbers == {*NUMBERS, "processes"}


def test_the_last_seed_is_taken():
    (spec,) = parse_recipes([f"bf16@{LAST_SEED}"], [], seed=1)
    assert spec.seed == LAST_SEED
    given = {"recipes": [], "recipe": []}
    runs = cli.asked_runs(given, TrainConfig(seed=LAST_SEED), ())
    assert [spec.seed for spec in runs] == [LAST_SEED, LAST_SEED, 0]


def test_a_model_counts_its_parameters():
    config = ModelConfig(dim=48, layers=3, heads=4, kv_heads=2, ffn=80, vocab=300)
    with torch.device("meta"):
        assert config.parameters == sum(p.numel() for p in Llama(config, 8).parameters())


def test_a_step_that_does_not_fit_in_memory_is_refused(monkeypatch):
    def saved_bytes(*_):
        return torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(measure, "saved_bytes_per_token", saved_bytes)
    (spec,) = parse_recipes(["bf16"], [], seed=1)
    config = TrainConfig(ModelConfig(32, 2, 2, 1, 64, 300))
    with pytest.raises(TrainError, match="bf16: expected a step that fits in memory, got"):
        train.describe_run(spec, config)


def test_a_missing_package_is_named(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "PACKAGES", ("tqdm", "no_such_package"))
    assert run(tiny, tmp_path / "out") == 1
    assert "got none of no_such_package; install them with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: expected an integer, got 'two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: expected at least 1, got 0"),
        ({"WORLD_SIZE": "2"}, "RANK: expected torchrun's value beside WORLD_SIZE=2, got none"),
    ],
)
def test_variables_that_torchrun_would_not_set_are_refused(monkeypatch, variables, message):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainError, match=message), joined("cpu", batch=4):
        pass


@pytest.mark.parametrize(
    ("sees_device", "has_backend", "given", "want"),
    [
        (True, True, {}, ("cuda", 0)),
        (True, True, {"device": "cpu"}, ("cpu", 3)),
        (True, False, {}, ("cpu", 3)),
        (False, True, {}, ("cpu", 3)),
    ],
)
def test_the_job_picks_its_device(monkeypatch, sees_device, has_backend, given, want):
    torch.set_num_threads(3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_device)
    monkeypatch.setattr(_native.ops, "has_cuda", lambda: has_backend)
    config = cli.machine_defaults(TrainConfig(), given)
    assert (config.device, config.threads) == want


def test_a_build_without_cuda_says_so(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_native.ops, "has_cuda", lambda: False)
    assert run(tiny, tmp_path / "out", "--device", "cuda") == 1
    assert "no CUDA backend" in capsys.readouterr().err


# ---- --data-mb, names of files -------------------------------------------------------------------


def bytes_read():
    """Returns the bytes that this process has read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the system counts no reads")
@pytest.mark.parametrize("content", [b"some words of text\n", b"\xc3\xbc", b"text\0", b"text\xff"])
def test_data_mb_bounds_what_is_read(tmp_path, content):
    file = tmp_path / "big.txt"
    file.write_bytes(content * (10**7 // len(content)))
    before = bytes_read()
    corpus = load_corpus([str(tmp_path)], 0.1)
    assert bytes_read() - before < 0.12e6
    if corpus.skipped:
        assert corpus.skipped == [
            (str(file), "binary" if b"\0" in content else "not UTF-8 at byte 4")
        ]
    else:
        assert 0.1e6 - 2 < corpus.bytes <= 0.1e6
        assert corpus.cut == str(file)


def test_a_device_without_an_end_is_read_to_the_limit():
    assert load_corpus(["/dev/zero"], 1).skipped == [("/dev/zero", "binary")]


def test_files_beyond_the_limit_are_counted(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name * 1000)
    corpus = load_corpus([str(tmp_path)], 0.0015)
    assert (corpus.files, corpus.bytes, corpus.left_out) == (2, 1500, 1)
    assert corpus.beyond_limit == f"1 files left out, {corpus.cut} cut"
    nearly = load_corpus([str(tmp_path)], 0.00191)  # the second ends within a twentieth
    assert (nearly.files, nearly.bytes, nearly.left_out, nearly.cut) == (2, 2000, 1, "")
    whole = load_corpus([str(tmp_path)], 0.003)
    assert (whole.files, whole.bytes, whole.beyond_limit) == (3, 3000, "")


def test_files_that_are_no_text_are_not_read_without_end(tmp_path):
    for number in range(100):
        (tmp_path / f"{number}").write_bytes(bytes(1000))
    corpus = load_corpus([str(tmp_path)], 0.01)
    assert (len(corpus.skipped), corpus.left_out) == (10, 90)


def test_a_name_that_is_no_utf_8_is_written_with_escapes(tmp_path):
    durable_files.write_text(tmp_path / "report.md", "data: caf\udce9\n")
    assert (tmp_path / "report.md").read_text() == "data: caf\\udce9\n"
