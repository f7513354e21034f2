"""Finds the text to train on and splits it into training and validation documents.

Without --data the text is the source of this interpreter's standard library. The result is a
function of the files' relative paths and bytes. Files are ordered by the hashes of their paths, so
a limit on the size selects a uniform sample. A file's side of the split does not depend on the
presence of other files.

The limit bounds the bytes that are read: of text, and as many of files that are no text. The file
that reaches the limit is cut there, unless it ends within a twentieth of the limit.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..checks import TrainError

VALIDATION_SHARE = 0.05
SLACK = 0.05  # of the limit on the size: the last file may exceed the limit by this share
FEW_FILES = 60  # with fewer, the end of every file is validation text instead of whole files
CHUNK = 8192  # bytes of one read: few of a binary file are read
NOT_TEXT = {"__pycache__", "site-packages", "dist-packages", "node_modules"}


@dataclass(frozen=True)
class Corpus:
    """Documents as text, and the files left out: (file, reason)."""

    source: str  # for the report: "Python 3.11 standard library"
    train: list[str]
    validation: list[str]
    skipped: list[tuple[str, str]]
    fingerprint: str  # sha256 of every document's side, name and bytes
    files: int
    bytes: int
    left_out: int  # files beyond the limit on the size
    cut: str  # the file that the limit cut
    split: str  # "by file"

    @property
    def megabytes(self) -> str:
        return f"{self.bytes / 1e6:.1f} MB" if self.bytes >= 1e6 else f"{self.bytes / 1e3:.0f} kB"

    @property
    def beyond_limit(self) -> str:
        """Describes the text that --data-mb has left out."""
        texts = [f"{self.left_out} files left out"] if self.left_out else []
        return ", ".join([*texts, f"{self.cut} cut"] if self.cut else texts)


def path_hash(name: str) -> int:
    """Hashes a relative path (with /) to 64 bits, which decide the file's place and side."""
    return int.from_bytes(
        hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big"
    )


def standard_library() -> tuple[str, list[tuple[str, Path]]]:
    """Finds the .py files of this interpreter's standard library, except site-packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [(name, path) for name, path in walk(root) if name.endswith(".py")]
    if not files:
        raise TrainError(
            f"expected the standard library's .py files in {root}, found none; "
            "name text of your own with --data"
        )
    return f"the source of Python {sysconfig.get_python_version()}'s standard library", files


def walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields (relative path, path) of regular files and links under root, except hidden ones."""

    def fail(error: OSError) -> None:
        raise TrainError(f"--data: cannot read folder {error.filename}: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=fail, followlinks=False):
        folders[:] = sorted(f for f in folders if f not in NOT_TEXT and not f.startswith("."))
        for file in sorted(files):
            path = Path(folder, file)
            if not file.startswith(".") and (path.is_symlink() or path.is_file()):
                yield path.relative_to(root).as_posix(), path


def named_files(paths: Sequence[str]) -> tuple[str, list[tuple[str, Path]]]:
    """Finds the files that --data names, and those of its folders."""
    found: list[tuple[str, Path]] = []
    for text in paths:
        path = Path(os.path.expanduser(text))
        if path.is_dir():
            found += [(f"{path.name}/{name}", file) for name, file in walk(path)]
        elif path.exists():
            found.append((path.name, path))
        else:
            raise TrainError(f"--data: expected a file or a folder, got {text}: no such path")
    if not found:
        raise TrainError(f"--data: expected files of text in {', '.join(paths)}, found none")
    return ", ".join(paths), found


class Document(NamedTuple):
    """The text of a file, or None and the reason why the file is no text."""

    text: str | None
    reason: str
    read: int  # bytes
    cut: bool = False  # the file is longer


def read_document(path: Path, most: int, slack: int) -> Document:
    """Reads a file, or its first `most` bytes if it is more than `slack` longer.

    Raises:
        TrainError: the file cannot be read.
    """
    data = bytearray()
    try:
        with path.open("rb") as file:
            while chunk := file.read(min(CHUNK, most + slack + 1 - len(data))):
                data += chunk
                if b"\0" in chunk:
                    return Document(None, "binary", len(data))
    except OSError as error:
        raise TrainError(f"--data: cannot read {path}: {error.strerror}") from error
    cut = len(data) > most + slack
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:  # a cut may divide a character, whose first bytes are left out
        text = decoder.decode(data[:most] if cut else data, final=not cut)
    except UnicodeDecodeError as error:
        return Document(None, f"not UTF-8 at byte {error.start}", len(data))
    return Document(text, "", len(data), cut)


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
    source, files = named_files(paths) if paths else standard_library()
    files.sort(key=lambda item: (path_hash(item[0]), item[0]))
    names: list[str] = []
    texts: list[str] = []
    skipped: list[tuple[str, str]] = []
    limit = int(megabytes * 1e6)
    left, left_for_others, left_out, cut = limit, limit, 0, ""
    for position, (name, path) in enumerate(files):
        if left <= 0 or left_for_others <= 0:
            left_out = len(files) - position
            break
        document = read_document(path, left, int(SLACK * limit))
        if document.text is None:
            skipped.append((str(path), document.reason))
            left_for_others -= document.read
        elif document.text:
            names.append(name)
            texts.append(document.text)
            left -= document.read
            cut = str(path) if document.cut else ""
    train, validation, split = split_documents(names, texts)
    size, found = sum(len(text.encode()) for text in texts), fingerprint(train, validation)
    return Corpus(source, train, validation, skipped, found, len(names), size, left_out, cut, split)


def fingerprint(train: Sequence[str], validation: Sequence[str]) -> str:
    """Computes the sha256 of both sides: of each document's length and bytes."""
    digest = hashlib.sha256()
    for side, documents in (("train", train), ("validation", validation)):
        digest.update(f"{side} {len(documents)}\n".encode())
        for document in documents:
            data = document.encode()
            digest.update(f"{len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()
