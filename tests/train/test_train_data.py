"""Text, tokens and batches of `minifloat train`: deterministic, split cleanly, clear when wrong."""

import os

import numpy as np
import pytest
from minifloat.cli import cache_folder
from minifloat.train.checks import TrainError
from minifloat.train.data import (
    FEW_FILES,
    Batches,
    load_corpus,
    require_enough,
    tokenize,
)

SENTENCE = "the quick brown fox jumps over the lazy dog, {}\n"


def write_files(folder, count, lines=20):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        text = "".join(SENTENCE.format(i * lines + line) for line in range(lines))
        (folder / f"file{i:03}.txt").write_text(text)
    return folder


def test_many_files_are_split_by_file_and_a_new_one_moves_none(tmp_path):
    folder = write_files(tmp_path / "text", 2 * FEW_FILES)
    before = load_corpus([str(folder)], 30)
    assert before.split == "by file"
    assert 0 < len(before.validation) < 0.2 * before.files
    assert len(before.train) + len(before.validation) == before.files == 2 * FEW_FILES
    (folder / "new.txt").write_text("another")
    after = load_corpus([str(folder)], 30)
    assert set(before.train) <= set(after.train)
    assert set(before.validation) <= set(after.validation)
    assert before.fingerprint != after.fingerprint


def test_few_files_give_their_ends(tmp_path):
    folder = write_files(tmp_path / "text", 3)
    corpus = load_corpus([str(folder)], 30)
    assert len(corpus.train) == len(corpus.validation) == 3
    whole = (folder / "file000.txt").read_text()
    assert whole in [a + b for a, b in zip(corpus.train, corpus.validation)]


def test_the_standard_library_is_the_default():
    corpus = load_corpus((), 0.5)
    assert "standard library" in corpus.source
    assert 0.5e6 <= corpus.bytes < 3e6
    assert corpus.left_out > 100
    assert load_corpus((), 0.5).fingerprint == corpus.fingerprint


def test_what_is_no_text_is_skipped_and_named(tmp_path):
    folder = write_files(tmp_path / "text", 2)
    (folder / "image.bin").write_bytes(b"\x89PNG\0\0")
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    skipped = dict(load_corpus([str(folder)], 30).skipped)
    assert skipped == {
        str(folder / "image.bin"): "binary",
        str(folder / "latin.txt"): "not UTF-8 at byte 3",
    }


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(TrainError, match=r"expected a file or a folder, got .*nowhere"):
        load_corpus([str(tmp_path / "nowhere")], 30)


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(TrainError, match="found none"):
        load_corpus([str(tmp_path)], 30)


def test_a_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path):
    folder = write_files(tmp_path / "text", 2)
    (folder / "dangling.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(TrainError, match=r"cannot read .*dangling\.txt: No such file"):
        load_corpus([str(folder)], 30)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_an_error_with_its_name(tmp_path):
    folder = write_files(tmp_path / "text", 2)
    (folder / "file000.txt").chmod(0)
    with pytest.raises(TrainError, match=r"cannot read .*file000\.txt: Permission denied"):
        load_corpus([str(folder)], 30)


def test_tokens_are_cached_and_the_same(tmp_path):
    corpus = load_corpus([str(write_files(tmp_path / "text", 4))], 30)
    first = tokenize(corpus, 300, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    stamp = (entry / "train.npy").stat().st_mtime_ns
    again = tokenize(corpus, 300, tmp_path / "cache")
    assert (entry / "train.npy").stat().st_mtime_ns == stamp
    assert first.fingerprint == again.fingerprint
    fresh = tokenize(corpus, 300, tmp_path / "other")
    assert fresh.fingerprint == first.fingerprint
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(entry / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 300
    assert tokenizer.decode(first.train.tolist()) == "".join(corpus.train)


@pytest.mark.parametrize("file", ["train.npy", "validation.npy", "SHA256SUMS"])
@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_damaged_cache_is_made_again(tmp_path, capsys, file, size):
    corpus = load_corpus([str(write_files(tmp_path / "text", 4))], 30)
    first = tokenize(corpus, 300, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    (entry / file).write_bytes((entry / file).read_bytes()[:size])
    assert tokenize(corpus, 300, tmp_path / "cache").fingerprint == first.fingerprint
    assert f"token ids are made again: {entry / file}: expected" in capsys.readouterr().err
    assert tokenize(corpus, 300, tmp_path / "cache").fingerprint == first.fingerprint
    assert capsys.readouterr().err == ""


def test_too_little_text_says_how_much_is_needed(tmp_path):
    corpus = load_corpus([str(write_files(tmp_path / "text", 2, lines=2))], 30)
    tokens = tokenize(corpus, 300, tmp_path / "cache")
    with pytest.raises(TrainError, match=r"needs 2049 training tokens.*about \d+ kB"):
        require_enough(tokens, corpus, seq=256, batch=8)


def test_a_cache_that_cannot_be_is_named(tmp_path):
    corpus = load_corpus([str(write_files(tmp_path / "text", 2))], 30)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="choose another folder with --cache"):
        tokenize(corpus, 300, tmp_path / "file" / "cache")


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("") == tmp_path / "minifloat"
    assert cache_folder("here").name == "here"


def test_batches_are_a_function_of_seed_and_step():
    ids = np.arange(1001, dtype=np.uint16)
    one, two = Batches(ids, ids, 10, 4), Batches(ids, ids, 10, 4)
    for step in (7, 3, 60):  # in any order, and past the first epoch's 25 steps
        for a, b in zip(one.training(1, step), two.training(1, step)):
            assert a.equal(b)
    assert not one.training(1, 0)[0].equal(one.training(2, 0)[0])
    inputs, targets = one.training(1, 5)
    assert targets.equal(inputs + 1)  # the next token of each


def test_an_epoch_visits_every_chunk_once():
    batches = Batches(np.arange(1001, dtype=np.uint16), np.arange(1001), 10, 4)
    starts = [int(row[0]) for step in range(25) for row in batches.training(1, step)[0]]
    assert sorted(starts) == list(range(0, 1000, 10))


def test_the_validation_set_is_fixed_and_spread():
    batches = Batches(np.arange(1001), np.arange(1001), 10, 4)
    first = [int(row[0]) for x, _ in batches.validation_set(5) for row in x]
    assert len(first) == len(set(first)) == 20
    assert first[0] == 0
    assert first[-1] == 990
    assert len(batches.validation_set(100)) == 25
