"""The trial's text as files that travel in parts, and its token ids.

    train-00.txt.xz ..   training documents, a zero byte after each; PART bytes of text a file
    validation.txt.xz    those of other packages
    tokenizer.json       byte-level byte-pair encoding of the first training documents
    SHA256SUMS           checksums of the files above

The text travels, and ids are made where they are read: in half a minute on 16 cores, and in many
on the small machine that makes the text (research/parity.md).
"""

from __future__ import annotations

import hashlib
import lzma
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer, Tokenizer

END = b"\0"  # after each document
PART = 28_000_000  # bytes of text: as many files as a machine has cores
LEVEL = 4  # of xz
VOCABULARY = 16384
TOKENIZER_BYTES = 20_000_000  # of training text, for the merges
VALIDATION, TOKENIZER = "validation.txt.xz", "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
CHECKSUMS = "SHA256SUMS"


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
    tokenizer = train_tokenizer(map(bytes.decode, train))
    tokenizer.save(str(folder / TOKENIZER))
    write_checksums(folder)
    return digest.hexdigest()


def train_tokenizer(documents: Iterable[str]) -> ByteLevelBPETokenizer:
    """Trains a tokenizer of VOCABULARY entries on the first TOKENIZER_BYTES characters."""
    sample, left = [], TOKENIZER_BYTES
    for document in documents:
        sample.append(document[:left])
        left -= len(sample[-1])
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        sample, VOCABULARY, min_frequency=0, show_progress=False, special_tokens=[END_OF_TEXT]
    )
    return tokenizer


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_checksums(folder: Path) -> None:
    """Writes the checksums of a folder's files, in the format of `sha256sum`."""
    names = sorted(path.name for path in folder.iterdir() if path.name != CHECKSUMS)
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in names]
    (folder / CHECKSUMS).write_text("".join(lines))


def verify_checksums(folder: Path) -> None:
    """Ends the program, and names the file, where a byte has changed since the write."""
    for line in (folder / CHECKSUMS).read_text().splitlines():
        expected, name = line.split("  ", 1)
        if (got := sha256_of(folder / name)) != expected:
            sys.exit(f"{folder / name}: expected the bytes with sha256 {expected}, got {got}")


def encode_file(path: Path) -> np.ndarray:
    """Returns the ids of a file's documents, under the tokenizer beside it."""
    tokenizer = Tokenizer.from_file(str(path.with_name(TOKENIZER)))
    texts = lzma.decompress(path.read_bytes()).split(END)[:-1]
    end = tokenizer.token_to_id(END_OF_TEXT)
    arrays = [
        np.array([*item.ids, end], np.uint16)
        for start in range(0, len(texts), 64)
        for item in tokenizer.encode_batch([t.decode() for t in texts[start : start + 64]])
    ]
    return np.concatenate(arrays)


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
