"""The text that pretrain.py trains on, as token ids and as data sets of equal windows.

Files are ordered by the hashes of their paths, so a limit on the size selects a uniform sample.
Another hash decides whether a file is training or validation text, whatever is beside it.
"""

import codecs
import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import Dataset

LIMIT = 30_000_000  # bytes of text, at most
VALIDATION = 0.05  # of the files, or of each file where they are few
FEW_FILES = 60
MERGES = 4_000_000  # characters of training text that the tokenizer learns from
END = "<|endoftext|>"
NOT_TEXT = {"__pycache__", "site-packages", "dist-packages", "node_modules"}  # folders


class Windows(Dataset):
    """Windows of `length` token ids that do not overlap: all of them, or `count` spread evenly."""

    def __init__(self, ids, length, count=None):
        self.ids, self.length = ids, length
        whole = len(ids) // length
        self.places = np.arange(whole)
        if count is not None and count < whole:
            self.places = np.linspace(0, whole - 1, count).round()

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        begin = int(self.places[index]) * self.length
        ids = torch.from_numpy(self.ids[begin : begin + self.length].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def read_tokens(paths, vocabulary):
    """Reads text, learns byte-level byte-pair encoding from its training side, and encodes it.

    Args:
        paths: files and folders of UTF-8 text; none: the standard library's source.
        vocabulary: entries of the tokenizer, at most.

    Returns:
        {"train": ids (tokens,) uint32 with the end-of-text token after each document,
        "validation": of held-out text, "about": a line for the report}.

    Raises:
        ValueError: a path does not exist, or no file is text.
    """
    about, names, texts = read_documents(paths)
    sides, how = split(names, texts)
    tokenizer = ByteLevelBPETokenizer()
    sample = "".join(sides[0])[:MERGES]
    pieces = [sample[i : i + 100_000] for i in range(0, len(sample), 100_000)]
    given = dict(min_frequency=0, show_progress=False, special_tokens=[END])
    tokenizer.train_from_iterator(pieces, vocabulary, **given)
    train, validation = (encode(tokenizer, side) for side in sides)
    about += f", {how}: {len(train):,} training and {len(validation):,} validation tokens"
    return {"train": train, "validation": validation, "about": about}


def encode(tokenizer, documents):
    """Returns the token ids of documents, 64 of them at a time."""
    end = tokenizer.token_to_id(END)
    parts = [documents[i : i + 64] for i in range(0, len(documents), 64)]
    encoded = (each for part in parts for each in tokenizer.encode_batch(part))
    return np.concatenate([np.array([*each.ids, end], np.uint32) for each in encoded])


def read_documents(paths):
    """Returns a description of the text, its files' names and their texts, in the order of hashes.

    A file that is not UTF-8, or has a zero byte, is left out. The last one is cut at the limit.
    """
    files = [found for path in paths for found in find_files(Path(path).expanduser())]
    about = ", ".join(map(str, paths))
    if not paths:
        library = find_files(Path(sysconfig.get_path("stdlib")))
        files = [(name, path) for name, path in library if name.endswith(".py")]
        about = f"the source of Python {sysconfig.get_python_version()}'s standard library"
    names, texts, left, skipped = [], [], LIMIT, 0
    for name, path in sorted(files, key=lambda file: hash_of(file[0])):
        with path.open("rb") as file:
            data = file.read(left)
        try:  # a cut may be within a character
            text, _ = codecs.utf_8_decode(data, "strict", len(data) < left)
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            skipped += 1
            continue
        names.append(name)
        texts.append(text)
        left -= len(data)
        if not left:
            break
    if not any(texts):
        raise ValueError(f"--data: expected files of UTF-8 text in {about}, found none")
    about += f": {len(names)} files, {(LIMIT - left) / 1e6:.1f} MB"
    return about + (f", {skipped} left out that are not UTF-8" if skipped else ""), names, texts


def find_files(root):
    """Yields (name, path) of a file, or of a folder's files but the hidden ones."""
    if root.is_file():
        yield root.name, root
    elif not root.is_dir():
        raise ValueError(f"--data: expected a file or a folder, got {root}: no such path")
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_TEXT and name[0] != "."]
        for file in files:
            path = Path(folder, file)
            if file[0] != "." and path.is_file():
                yield path.relative_to(root).as_posix(), path


def hash_of(name):
    """Hashes a name to 64 bits."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big")


def split(names, texts):
    """Returns (training documents, validation documents), and how they were split."""
    if len(names) < FEW_FILES:
        cuts = [len(text) - int(len(text) * VALIDATION) for text in texts]
        halves = [(text[:cut], text[cut:]) for text, cut in zip(texts, cuts)]
        return [*zip(*halves)], "the end of each file held out"
    sides = [], []
    for name, text in zip(names, texts):
        sides[hash_of("split:" + name) < VALIDATION * 2**64].append(text)
    return sides, "split by file"
