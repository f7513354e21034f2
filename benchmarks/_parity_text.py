"""Documents of packages, for the trial's text: which files are text, which of them repeat others.

A document is one file of a wheel or a source archive, as text. It is left out where

    its name     is none of SUFFIXES, or has one of NOT_SOURCE among its folders
    its bytes    are fewer than SMALLEST, more than LARGEST, or no UTF-8
    its lines    are data: long, or mostly digits, or marked as generated
    its shingles were in earlier documents, to a share of REPEATED or more

Shingles are all windows of SHINGLE characters, white space left out. Each has a 64-bit polynomial
hash, and the hashes that end in SAMPLE_BITS zeros are compared: a choice by content, so it is the
same in every document that has the window.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TEXT_SUFFIXES = """.py .pyi .pyx .pxd .pxi .c .h .cc .cpp .cxx .hpp .hh .inc .ipp .cu .cuh .go .rs
    .rb .php .pl .pm .erl .hrl .hs .js .ts .java .m .mm .f .f90 .sh .sql .td .tcl .lua .cmake .rst
    .md .txt .adoc .sgml .tex .texi .pod .rdoc .xsd .proto .y .l .cl .glsl .comp"""
SUFFIXES = frozenset(TEXT_SUFFIXES.split())
NOT_SOURCE = frozenset(["locale", "po", "third_party", "vendor", "vendored", "_vendor", "deps"])
SMALLEST, LARGEST = 300, 200_000  # bytes of a document
MOST_OF_PACKAGE = 25_000_000  # bytes of one package's documents, before repeated ones are left out
LONGEST_LINE, LONG_LINES, MOST_DIGITS = 2000, 100, 0.2  # one line, their mean, the share of digits
GENERATED = re.compile(rb"(?i)do not edit|auto-?generated|generated (by|from|automatically)")
HEAD = 1000  # bytes in which a generated file says so
SHINGLE, SAMPLE_BITS, REPEATED = 32, 5, 0.5
BASE, MIX = 0x9E3779B97F4A7C15, np.uint64(0xD6E8FEB86659FD93)  # odd


@dataclass(frozen=True)
class Document:
    """A file's name in its package, its text in UTF-8, and the sampled hashes of its shingles."""

    name: str
    data: bytes
    shingles: np.ndarray  # uint64, sorted, each once


def is_text_name(name: str) -> bool:
    *folders, file = name.split("/")
    stem, dot, suffix = file.rpartition(".")
    return bool(stem) and dot + suffix in SUFFIXES and NOT_SOURCE.isdisjoint(folders)


def files_of(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yields (name, bytes) of an archive's files whose names and sizes are those of documents."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for entry in wheel.infolist():
                if is_text_name(entry.filename) and SMALLEST <= entry.file_size <= LARGEST:
                    yield entry.filename, wheel.read(entry)
        return
    with tarfile.open(archive) as source:
        for member in source:
            if member.isfile() and is_text_name(member.name) and SMALLEST <= member.size <= LARGEST:
                file = source.extractfile(member)
                assert file is not None, f"{archive}: {member.name}: expected a file"
                yield member.name, file.read()


def is_prose_or_code(data: bytes) -> bool:
    """Tells whether a file reads as written by people: UTF-8, lines of usual length, few digits."""
    if b"\0" in data or GENERATED.search(data[:HEAD]):
        return False
    lines = data.split(b"\n")
    if max(map(len, lines)) > LONGEST_LINE or len(data) > LONG_LINES * len(lines):
        return False
    if len(data) - len(data.translate(None, b"0123456789")) > MOST_DIGITS * len(data):
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def shingles_of(data: bytes) -> np.ndarray:
    """Returns the sampled hashes of all windows of SHINGLE characters, white space left out.

    A window's hash is that of its first half times BASE^half plus that of its second, modulo 2^64:
    log2(SHINGLE) passes over the text.
    """
    text = np.frombuffer(b"".join(data.split()), np.uint8)
    if len(text) < SHINGLE:
        return np.zeros(0, np.uint64)
    hashes, power, half = text.astype(np.uint64) + np.uint64(1), BASE, 1
    while half < SHINGLE:
        hashes = hashes[:-half] * np.uint64(power) + hashes[half:]
        power, half = power * power % 2**64, 2 * half
    hashes = (hashes ^ (hashes >> np.uint64(29))) * MIX
    sampled = hashes[(hashes >> np.uint64(64 - SAMPLE_BITS)) == 0]
    return np.unique(sampled)


def order_of(name: str, seed: int) -> bytes:
    """Returns the key by which documents are shuffled."""
    return hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogateescape")).digest()


def documents_of(archives: list[Path], seed: int) -> list[Document]:
    """Returns a package's documents, shuffled, to MOST_OF_PACKAGE bytes."""
    found = []
    for archive in archives:
        for name, data in files_of(archive):
            plain = data.replace(b"\r\n", b"\n")
            if is_prose_or_code(plain):
                found.append((f"{archive.name}/{name}", plain))
    found.sort(key=lambda pair: order_of(pair[0], seed))
    kept, size = [], 0
    for name, data in found:
        size += len(data)
        if size > MOST_OF_PACKAGE:
            break
        kept.append(Document(name, data, shingles_of(data)))
    return kept


def without_repeated(documents: list[Document]) -> list[Document]:
    """Returns the documents of which less than REPEATED of the shingles were in earlier ones."""
    counts = np.array([len(document.shingles) for document in documents])
    hashes = np.concatenate([document.shingles for document in documents])
    owners = np.repeat(np.arange(len(documents)), counts)
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    repeated = np.bincount(owners, owners[first[inverse]] < owners, len(documents))
    is_new = (counts > 0) & (repeated < REPEATED * counts)
    return [document for document, new in zip(documents, is_new, strict=True) if new]
