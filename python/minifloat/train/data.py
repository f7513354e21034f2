"""The text of a job, its token ids, and batches of them.

Text. Without --data it is the source of this interpreter's standard library. The documents are a
function of the files' relative paths and bytes. Files are ordered by the hashes of their paths, so
a limit on the size selects a uniform sample. A file's side of the split, training or validation,
does not depend on the presence of other files. The limit bounds the bytes that are read: of text,
and as many of files that are no text. The file that reaches the limit is cut there, unless it ends
within a twentieth of the limit.

Token ids are those of byte-level byte-pair encoding, learnt from the training text. A cache entry
is the folder CACHE/tokens-<key>, key = hash of (the documents, the vocabulary, the version of this
file's algorithm). It is renamed into place, so a kill leaves no partial entry.

    tokenizer.json               the vocabulary and merges
    train.npy, validation.npy    ids, uint16 or uint32
    SHA256SUMS                   their checksums: a damaged entry is made again

A batch is a pure function of (seed, step), so a resumed run needs no loader state. The ids are cut
into chunks of `seq` tokens (and one more, the last target). Epoch e visits the chunks in the order
of a permutation drawn from (seed, e); step s takes the chunks at places s * batch to
(s + 1) * batch - 1 of that endless sequence.
"""

import codecs
import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor

from .checks import TrainError, say
from .durable_files import verify_checksums, write_checksums

VALIDATION_SHARE = 0.05
SLACK = 0.05  # of the limit on the size: the last file may exceed the limit by this share
FEW_FILES = 60  # with fewer, the end of every file is validation text instead of whole files
CHUNK = 8192  # bytes of one read: few of a binary file are read
NOT_TEXT = {"__pycache__", "site-packages", "dist-packages", "node_modules"}

ALGORITHM = "byte-level BPE 1"  # part of the key: change it when the ids of a text change
END_OF_TEXT = "<|endoftext|>"
SAMPLE_BYTES = 4_000_000  # of training text, for the merges

Ids = npt.NDArray[np.uint16 | np.uint32 | np.int64]


# ---- Text ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Documents as text, and the files left out: (file, reason)."""

    source: str  # for the report: "Python 3.11 standard library"
    train: list[str]
    validation: list[str]
    skipped: list[tuple[str, str]]
    files: int
    left_out: int  # files beyond the limit on the size
    cut: str  # the file that the limit cut
    split: str  # "by file"

    @cached_property
    def bytes(self) -> int:
        return sum(len(text.encode()) for text in (*self.train, *self.validation))

    @property
    def megabytes(self) -> str:
        return f"{self.bytes / 1e6:.1f} MB" if self.bytes >= 1e6 else f"{self.bytes / 1e3:.0f} kB"

    @property
    def fingerprint(self) -> str:
        """The sha256 of the documents of both sides."""
        return hashlib.sha256(json.dumps([self.train, self.validation]).encode()).hexdigest()

    @property
    def beyond_limit(self) -> str:
        """Describes the text that --data-mb has left out."""
        texts = [f"{self.left_out} files left out"] if self.left_out else []
        return ", ".join([*texts, f"{self.cut} cut"] if self.cut else texts)


def path_hash(name: str) -> int:
    """Hashes a relative path (with /) to 64 bits, which decide the file's place and side."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big")


def walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields (relative path, path) of regular files and links under root, except hidden ones."""

    def fail(error: OSError) -> None:
        raise TrainError(f"--data: cannot read folder {error.filename}: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = (f for f in folders if f not in NOT_TEXT and not f.startswith("."))
        for file in files:
            path = Path(folder, file)
            if not file.startswith(".") and (path.is_symlink() or path.is_file()):
                yield path.relative_to(root).as_posix(), path


def find_files(paths: Sequence[str]) -> tuple[str, list[tuple[str, Path]]]:
    """Finds the files that --data names and those of its folders, or the standard library's.

    Returns:
        (the source for messages, (relative path, path) of each file).
    """
    if not paths:
        library = walk(Path(sysconfig.get_path("stdlib")))
        source = f"the source of Python {sysconfig.get_python_version()}'s standard library"
        return source, [(name, path) for name, path in library if name.endswith(".py")]
    found: list[tuple[str, Path]] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += [(f"{path.name}/{name}", file) for name, file in walk(path)]
        elif path.exists():
            found.append((path.name, path))
        else:
            raise TrainError(f"--data: expected a file or a folder, got {path}: no such path")
    if not found:
        raise TrainError(f"--data: expected files of text in {', '.join(paths)}, found none")
    return ", ".join(paths), found


def read_document(path: Path, most: int, slack: int) -> tuple[str | None, str, int]:
    """Reads a file, or its first `most` bytes if it is more than `slack` longer.

    Returns:
        (text, None where the file is none; the reason for that; bytes read).

    Raises:
        TrainError: the file cannot be read.
    """
    data = bytearray()
    try:
        with path.open("rb") as file:
            while chunk := file.read(min(CHUNK, most + slack + 1 - len(data))):
                data += chunk
                if b"\0" in chunk:
                    return None, "binary", len(data)
    except OSError as error:
        raise TrainError(f"--data: cannot read {path}: {error.strerror}") from error
    cut = len(data) > most + slack
    try:  # a cut may divide a character, whose first bytes are left out
        text, _ = codecs.utf_8_decode(data[:most] if cut else data, "strict", not cut)
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start}", len(data)
    return text, "", len(data)


def split_documents(names: list[str], texts: list[str]) -> tuple[list[str], list[str], str]:
    """Splits documents by file, or within each file where files are few.

    Returns:
        (training, validation, description of the split).
    """
    sides: tuple[list[str], list[str]] = ([], [])
    if len(names) >= FEW_FILES:
        limit = int(VALIDATION_SHARE * 2**64)
        for name, text in zip(names, texts):
            sides[path_hash("split:" + name) < limit].append(text)
        return *sides, "by file"
    for text in texts:
        cut = len(text) - int(len(text) * VALIDATION_SHARE)
        sides[0].append(text[:cut])
        sides[1].append(text[cut:])
    return *sides, "the end of each file, because the files are few"


def load_corpus(paths: Sequence[str], megabytes: float) -> Corpus:
    """Reads about `megabytes` (1e6 bytes) of text; see the head of this file."""
    source, files = find_files(paths)
    files.sort(key=lambda item: (path_hash(item[0]), item[0]))
    names: list[str] = []
    texts: list[str] = []
    skipped: list[tuple[str, str]] = []
    limit = int(megabytes * 1e6)
    slack = int(SLACK * limit)
    left, left_for_others, left_out, cut = limit, limit, 0, ""
    for position, (name, path) in enumerate(files):
        if left <= 0 or left_for_others <= 0:
            left_out = len(files) - position
            break
        text, reason, read = read_document(path, left, slack)
        if text is None:
            skipped.append((str(path), reason))
            left_for_others -= read
        elif text:
            names.append(name)
            texts.append(text)
            cut = str(path) if read > left + slack else ""
            left -= read
    train, validation, split = split_documents(names, texts)
    return Corpus(source, train, validation, skipped, len(names), left_out, cut, split)


# ---- Token ids and batches -----------------------------------------------------------------------


class Tokens(NamedTuple):
    """Token ids of both sides, documents joined by the end-of-text token: (tokens,) each."""

    train: Ids
    validation: Ids
    fingerprint: str  # sha256 of both arrays


def train_tokenizer(
    documents: Iterable[str], vocabulary: int, sample_bytes: int = SAMPLE_BYTES
) -> ByteLevelBPETokenizer:
    """Trains a tokenizer of at most `vocabulary` entries, on the first bytes."""
    sample, left = [], sample_bytes
    for document in documents:
        sample.append(document[:left])
        left -= len(sample[-1])
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        sample, vocabulary, min_frequency=0, show_progress=False, special_tokens=[END_OF_TEXT]
    )
    return tokenizer


def encode(tokenizer: ByteLevelBPETokenizer | Tokenizer, documents: Sequence[str]) -> Ids:
    """Returns the ids of all documents, each with an end-of-text token after it: (tokens,)."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    arrays = [
        np.array([*item.ids, end], dtype=dtype)
        for start in range(0, len(documents), 64)
        for item in tokenizer.encode_batch(documents[start : start + 64])
    ]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def build_entry(corpus: Corpus, vocabulary: int, entry: Path) -> None:
    """Makes the cache's folder `entry`: the tokenizer, and the ids of both sides."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus.train, vocabulary)
    with tempfile.TemporaryDirectory(
        prefix=".tokens-", dir=entry.parent, ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        tokenizer.save(str(folder / "tokenizer.json"))
        np.save(folder / "train.npy", encode(tokenizer, corpus.train))
        np.save(folder / "validation.npy", encode(tokenizer, corpus.validation))
        write_checksums(folder)
        try:
            folder.rename(entry)
        except OSError:
            if not entry.exists():  # another job has made it
                raise


def tokenize(corpus: Corpus, vocabulary: int, cache: Path) -> Tokens:
    """Returns the ids of a corpus, from the cache, or computes and caches them."""
    text = f"{ALGORITHM}\n{SAMPLE_BYTES}\n{vocabulary}\n{corpus.fingerprint}"
    entry = cache / f"tokens-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    try:
        if entry.exists():
            try:
                verify_checksums(entry)
            except TrainError as error:
                say(f"token ids are made again: {error}")
                shutil.rmtree(entry)
        if not entry.exists():
            build_entry(corpus, vocabulary, entry)
        train, validation = np.load(entry / "train.npy"), np.load(entry / "validation.npy")
    except OSError as error:
        raise TrainError(
            f"cannot keep token ids in {cache}: {error.strerror or error}; "
            "choose another folder with --cache"
        ) from error
    digest = hashlib.sha256(train.tobytes() + validation.tobytes()).hexdigest()
    return Tokens(train, validation, digest)


def require_enough(tokens: Tokens, corpus: Corpus, seq: int, batch: int) -> None:
    """Refuses text too short for one batch of each side; the message has the size needed."""
    need = batch * seq + 1
    for side, ids, share in (
        ("training", tokens.train, 1 - VALIDATION_SHARE),
        ("validation", tokens.validation, VALIDATION_SHARE),
    ):
        if len(ids) < need:
            count = len(tokens.train) + len(tokens.validation)
            wanted = need * max(corpus.bytes / max(count, 1), 1.0) / share / 1e3
            raise TrainError(
                f"too little text: one batch of {batch} x {seq} needs {need} {side} tokens, "
                f"{corpus.source} has {len(ids)}; expected about {wanted:.0f} kB of text, got "
                f"{corpus.bytes / 1e3:.0f} kB (or make --batch or --seq smaller)"
            )


@lru_cache(maxsize=4)
def order(chunks: int, seed: int, epoch: int) -> Ids:
    """Draws the order in which an epoch visits the chunks."""
    return np.random.default_rng([seed, epoch]).permutation(chunks)


class Batches:
    """Training and validation batches of (inputs, targets), each (batch, seq) int64."""

    def __init__(self, train: Ids, validation: Ids, seq: int, batch: int) -> None:
        self.train, self.validation, self.seq, self.batch = train, validation, seq, batch
        self.chunks = (len(train) - 1) // seq

    def training(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Returns the batch of a step (from 0)."""
        places = range(step * self.batch, (step + 1) * self.batch)
        chunks = [order(self.chunks, seed, p // self.chunks)[p % self.chunks] for p in places]
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
