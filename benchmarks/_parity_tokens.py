"""The trial's text as files that travel in parts, and its token ids.

    train-00.txt.xz ..   training documents, a zero byte after each; PART bytes of text a file
    validation.txt.xz    those of other packages
    tokenizer.json       byte-level byte-pair encoding of the first training documents
    SHA256SUMS           checksums of the files above

The text travels, and ids are made where they are read: in half a minute on 16 cores, and in many
on the small machine that makes the text (docs/parity.md).
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from minifloat.train.data import encode, train_tokenizer
from minifloat.train.durable_files import CHECKSUMS, sha256_of, verify_checksums, write_checksums

END = b"\0"  # after each document
PART = 28_000_000  # bytes of text: as many files as a machine has cores
LEVEL = 4  # of xz
VOCABULARY = 16384
TOKENIZER_BYTES = 20_000_000  # of training text, for the merges
VALIDATION, TOKENIZER = "validation.txt.xz", "tokenizer.json"


@dataclass(frozen=True)
class ParityTokens:
    """Ids of both sides, documents joined by the end-of-text token: (tokens,) uint16 each."""

    train: np.ndarray
    validation: np.ndarray
    fingerprint: str  # sha256 of both arrays


def in_parts(documents: list[bytes], size: int) -> Iterable[bytes]:
    """Yields the text in pieces that end with a document, of `size` bytes or a little more."""
    part = bytearray()
    for document in documents:
        part += document + END
        if len(part) >= size:
            yield bytes(part)
            part.clear()
    if part:
        yield bytes(part)


def write_text_parts(folder: Path, train: list[bytes], validation: list[bytes]) -> str:
    """Writes both sides, the tokenizer and the checksums; returns the sha256 of the text."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()

    def write(named: tuple[str, bytes]) -> None:
        name, text = named
        (folder / name).write_bytes(lzma.compress(text, preset=LEVEL))

    texts = {f"train-{i:02}.txt.xz": text for i, text in enumerate(in_parts(train, PART))}
    texts[VALIDATION] = b"".join(document + END for document in validation)
    for text in texts.values():
        digest.update(text)
    with ThreadPoolExecutor() as pool:  # lzma releases the interpreter's lock
        list(pool.map(write, texts.items()))
    tokenizer = train_tokenizer(map(bytes.decode, train), VOCABULARY, TOKENIZER_BYTES)
    tokenizer.save(str(folder / TOKENIZER))
    write_checksums(folder)
    return digest.hexdigest()


def encode_file(path: Path) -> np.ndarray:
    """Returns the ids of a file's documents, under the tokenizer beside it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path.with_name(TOKENIZER)))
    texts = lzma.decompress(path.read_bytes()).split(END)[:-1]
    return encode(tokenizer, [text.decode() for text in texts])


def load_tokens(folder: Path) -> ParityTokens:
    """Checks a folder's files and returns the ids of its text, which it keeps there."""
    verify_checksums(folder)
    ids = folder / f"ids-{sha256_of(folder / CHECKSUMS)[:12]}.npz"
    if not ids.exists():
        paths = [*sorted(folder.glob("train-*.txt.xz")), folder / VALIDATION]
        with ProcessPoolExecutor() as pool:
            *parts, validation = pool.map(encode_file, paths)
        np.savez(ids, train=np.concatenate(parts), validation=validation)
    with np.load(ids) as arrays:
        train, validation = arrays["train"], arrays["validation"]
    digest = hashlib.sha256(train.tobytes() + validation.tobytes()).hexdigest()
    return ParityTokens(train, validation, digest)
