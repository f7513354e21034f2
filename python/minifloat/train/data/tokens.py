"""Token ids of text, and batches of them: byte-level byte-pair encoding of the training text.

A cache entry is the folder CACHE/tokens-<key>, key = hash of (the documents, the vocabulary, the
version of this file's algorithm). It is renamed into place, so a kill leaves no partial entry.

    tokenizer.json               the vocabulary and merges
    train.npy, validation.npy    ids, uint16 or uint32
    SHA256SUMS                   their checksums: a damaged entry is made again

A batch is a pure function of (seed, step), so a resumed run needs no loader state. The ids are cut
into chunks of `seq` tokens (and one more, the last target). Epoch e visits the chunks in the order
of a permutation drawn from (seed, e); step s takes the chunks at places s * batch to
(s + 1) * batch - 1 of that endless sequence.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checks import TrainError, say
from ..durable_files import verify_checksums, write_checksums
from .corpus import VALIDATION_SHARE, Corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ALGORITHM = "byte-level BPE 1"  # part of the key: change it when the ids of a text change
END_OF_TEXT = "<|endoftext|>"
SAMPLE_BYTES = 4_000_000  # of training text, for the merges
SMALLEST_VOCABULARY = 257  # all bytes and the end of a document

Ids = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Tokens:
    """Token ids of both sides, documents joined by the end-of-text token: (tokens,) each."""

    train: Ids
    validation: Ids
    fingerprint: str  # sha256 of both arrays
    bytes_per_token: float


def cache_folder(asked: str) -> Path:
    """Returns --cache, else $XDG_CACHE_HOME/minifloat, else ~/.cache/minifloat."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(asked or f"{base}/minifloat"))


def train_tokenizer(
    documents: Iterable[str], vocabulary: int, sample_bytes: int = SAMPLE_BYTES
) -> Tokenizer:
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


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> Ids:
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
    write_checksums(folder)


def is_intact(entry: Path) -> bool:
    """Tells whether an entry is present and complete; removes a damaged entry."""
    if not entry.exists():
        return False
    try:
        verify_checksums(entry)
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
                fresh.rename(entry)
            except OSError:
                if not entry.exists():  # another job has made it
                    raise
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
    return Tokens(train, validation, digest, corpus.bytes / count)


def require_enough(tokens: Tokens, corpus: Corpus, seq: int, batch: int) -> None:
    """Refuses text too short for one batch of each side; the message has the size needed."""
    need = batch * seq + 1
    for side, ids in (("training", tokens.train), ("validation", tokens.validation)):
        if len(ids) < need:
            share = VALIDATION_SHARE if side == "validation" else 1 - VALIDATION_SHARE
            wanted = need * max(tokens.bytes_per_token, 1.0) / share / 1e3
            raise TrainError(
                f"too little text: one batch of {batch} x {seq} needs {need} {side} tokens, "
                f"{corpus.source} has {len(ids)}; expected about {wanted:.0f} kB of text, got "
                f"{corpus.bytes / 1e3:.0f} kB (or make --batch or --seq smaller)"
            )


class Batches:
    """Training and validation batches of (inputs, targets), each (batch, seq) int64."""

    def __init__(self, train: Ids, validation: Ids, seq: int, batch: int) -> None:
        self.train, self.validation, self.seq, self.batch = train, validation, seq, batch
        self.chunks = (len(train) - 1) // seq
        self.order = lru_cache(maxsize=4)(self._order)

    def _order(self, seed: int, epoch: int) -> Ids:
        return np.random.default_rng([seed, epoch]).permutation(self.chunks)

    def training(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Returns the batch of a step (from 0)."""
        places = range(step * self.batch, (step + 1) * self.batch)
        chunks = [self.order(seed, p // self.chunks)[p % self.chunks] for p in places]
        return self._gather(self.train, chunks)

    def validation_set(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Returns at most `count` batches, spread evenly over the validation text."""
        chunks = (len(self.validation) - 1) // self.seq
        count = min(count, chunks // self.batch)
        spread = np.linspace(0, chunks - 1, count * self.batch).round().astype(np.int64)
        return [self._gather(self.validation, rows) for rows in spread.reshape(count, self.batch)]

    def _gather(self, ids: Ids, chunks: Iterable[int]) -> tuple[Tensor, Tensor]:
        rows = [ids[c * self.seq : c * self.seq + self.seq + 1].astype(np.int64) for c in chunks]
        rows_BS = torch.from_numpy(np.stack(rows))
        return rows_BS[:, :-1].contiguous(), rows_BS[:, 1:].contiguous()
