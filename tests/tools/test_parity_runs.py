"""The records of the parity trial: a run is trained once, and a table has one trial."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def parity(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_parity")


def test_a_run_with_a_record_is_not_trained_again(parity, tmp_path):
    spec = parity.parse_entry("nvfp4", 2)
    record = {"name": "nvfp4", "seed": 2, "trial": {"steps": 1}, "tokens": "a"}
    parity.write_record(tmp_path / parity.file_name(spec), record)
    parity.train_runs([spec], parity.Trial(), tmp_path / "no data", tmp_path, limit=1)
    assert parity.records_in([tmp_path]) == [record]
    parity.write_record(tmp_path / "bf16_seed_2.jsonl.xz", record | {"tokens": "b"})
    with pytest.raises(SystemExit, match="expected the tokens of"):
        parity.records_in([tmp_path])


def test_records_in_the_repository_are_of_one_trial(parity):
    records = parity.records_in([parity.RESULTS])
    bf16 = parity.losses_of(records, "val")["bf16"]
    assert len(bf16) == 3
    for record in records:
        steps = record["trial"]["steps"]
        assert len(record["loss"]) == len(record["norm"]) == steps
        assert record["val"] == record["evaluations"][str(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["mxfp8", "torchao_rowwise"])
def test_a_small_run_leaves_its_record(parity, tmp_path, monkeypatch, entry):
    """Two steps on a CPU, where torchao's conversion is tried without its GEMMs."""
    trial = parity.Trial("32,1,2,2,64", seq=16, batch=2, steps=2, warmup=1, device="cpu")
    ids = numpy.random.default_rng(0).integers(0, parity.VOCABULARY, 200)
    tokens = SimpleNamespace(train=ids, validation=ids[:100], fingerprint="of these")
    monkeypatch.setattr(parity, "load_tokens", lambda _: tokens)
    converted = []
    monkeypatch.setattr(
        parity, "convert_by_torchao", lambda _, recipe: converted.append(recipe), raising=True
    )
    spec = parity.parse_run(entry, 9)
    parity.train_runs([spec], trial, tmp_path, tmp_path, limit=60)
    (record,) = parity.records_in([tmp_path])
    assert (record["name"], record["recipe"], record["seed"]) == (entry, entry, 9)
    assert len(record["loss"]) == 2
    assert converted == [entry.removeprefix("torchao_")] * entry.startswith("torchao_")
