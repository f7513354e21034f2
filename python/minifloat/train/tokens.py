"""Token ids of text: byte-level byte-pair encoding trained on the training text, both cached.

A cache entry is the folder CACHE/tokens-<key>, key = hash of (the documents, the vocabulary, the
version of this file's algorithm). It is renamed into place, so a kill leaves no partial entry.

    tokenizer.json               the vocabulary and merges
    train.npy, validation.npy    ids, uint16 or uint32
    SHA256SUMS                   their checksums: a damaged entry is made again
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import manifest
from .corpus import Corpus
from .fields import TrainError
from .saved import say

ALGORITHM = "byte-level BPE 1"  # part of the key: change it when the ids of a text change
END_OF_TEXT = "<|endoftext|>"
SAMPLE_BYTES = 4_000_000  # of training text, for the merges
SMALLEST_VOCABULARY = 257  # all bytes and the end of a document


@dataclass(frozen=True)
class Tokens:
    """Token ids of both sides, documents joined by the end-of-text token: (tokens,) each."""

    train: np.ndarray
    validation: np.ndarray
    vocabulary: int
    fingerprint: str  # sha256 of both arrays
    bytes_per_token: float


def cache_folder(asked: str | None) -> Path:
    """Returns --cache, else $XDG_CACHE_HOME/minifloat, else ~/.cache/minifloat."""
    if asked:
        return Path(os.path.expanduser(asked))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "minifloat"


def train_tokenizer(documents: Iterable[str], vocabulary: int, sample_bytes: int = SAMPLE_BYTES):
    """Trains a `tokenizers.Tokenizer` of at most `vocabulary` entries, on the first bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sample, total = [], 0
    for document in documents:
        sample.append(document[: sample_bytes - total])
        total += len(sample[-1])
        if total >= sample_bytes:
            break
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def encode(tokenizer, documents: Sequence[str]) -> np.ndarray:
    """Returns the ids of all documents, each with an end-of-text token after it: (tokens,)."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    arrays = []
    for start in range(0, len(documents), 64):
        for item in tokenizer.encode_batch(documents[start : start + 64]):
            arrays.append(np.array([*item.ids, end], dtype=dtype))
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def build_entry(corpus: Corpus, vocabulary: int, folder: Path) -> None:
    """Fills `folder` with the tokenizer and the ids of both sides."""
    tokenizer = train_tokenizer(corpus.train, vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    np.save(folder / "train.npy", encode(tokenizer, corpus.train))
    np.save(folder / "validation.npy", encode(tokenizer, corpus.validation))
    manifest.write(folder)


def is_intact(entry: Path) -> bool:
    """Tells whether an entry is present and complete; removes a damaged entry."""
    if not entry.exists():
        return False
    try:
        manifest.verify(entry)
    except TrainError as error:
        say(f"token ids are made again: {error}")
        shutil.rmtree(entry)
        return False
    return True


def tokenize(corpus: Corpus, vocabulary: int, cache: Path) -> Tokens:
    """Returns the ids of a corpus, from the cache, or computes and caches them."""
    if vocabulary < SMALLEST_VOCABULARY:
        raise TrainError(f"--vocab: expected at least {SMALLEST_VOCABULARY}, got {vocabulary}")
    text = f"{ALGORITHM}\n{SAMPLE_BYTES}\n{vocabulary}\n{corpus.fingerprint}"
    entry = cache / f"tokens-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    try:
        if not is_intact(entry):
            cache.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(prefix=".tokens-", dir=cache))
            try:
                build_entry(corpus, vocabulary, fresh)
                publish(fresh, entry)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        train, validation = np.load(entry / "train.npy"), np.load(entry / "validation.npy")
    except OSError as error:
        raise TrainError(
            f"cannot keep token ids in {cache}: {error.strerror or error}; "
            "choose another folder with --cache"
        ) from error
    digest = hashlib.sha256(train.tobytes() + validation.tobytes()).hexdigest()
    count = max(len(train) + len(validation), 1)
    return Tokens(train, validation, vocabulary, digest, corpus.bytes / count)


def publish(fresh: Path, entry: Path) -> None:
    """Renames a finished entry into place, unless another job has done so."""
    try:
        fresh.rename(entry)
    except OSError:
        if not entry.exists():
            raise


def require_enough(tokens: Tokens, corpus: Corpus, seq: int, batch: int) -> None:
    """Refuses text too short for one batch of each side; the message has the size needed."""
    need = batch * seq + 1
    for side, ids in (("training", tokens.train), ("validation", tokens.validation)):
        if len(ids) < need:
            per_token = max(tokens.bytes_per_token, 1.0)
            share = 0.05 if side == "validation" else 0.95
            wanted = need * per_token / share / 1e3
            raise TrainError(
                f"too little text: one batch of {batch} x {seq} needs {need} {side} tokens, "
                f"{corpus.source} has {len(ids)}; expected about {wanted:.0f} kB of text, got "
                f"{corpus.bytes / 1e3:.0f} kB (or make --batch or --seq smaller)"
            )
