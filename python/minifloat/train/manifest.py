"""The checksums of a checkpoint's files: SHA256SUMS, in the format of `sha256sum`.

    <sha256>  .metadata
    <sha256>  __0_0.distcp
    <sha256>  state.json
    # <sha256 of the lines above>

The file is written last, and its last line covers the lines before. `sha256sum -c SHA256SUMS`
checks a checkpoint too. A checksum finds damage. It is no signature: a writer of the files can
change it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from .fields import TrainError, read_text
from .files import write_text

NAME = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  (.+)\n")
CHUNK = 1 << 20  # bytes


def digest(path: Path) -> str:
    """Returns the sha256 of a file's bytes; TrainError where it cannot be read."""
    state = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                state.update(chunk)
    except OSError as error:
        raise TrainError(f"{path}: expected a readable file, got: {error.strerror}") from error
    return state.hexdigest()


def last_line(lines: str) -> str:
    """Returns the line that covers the lines before it."""
    return f"# {hashlib.sha256(lines.encode()).hexdigest()}\n"


def write(folder: Path) -> None:
    """Writes the checksums of all files that the folder holds."""
    names = sorted(path.name for path in folder.iterdir() if path.name != NAME)
    lines = "".join(f"{digest(folder / name)}  {name}\n" for name in names)
    write_text(folder / NAME, lines + last_line(lines))


def verify(folder: Path) -> None:
    """Raises TrainError, which names the file, where a byte has changed since the write."""
    text = read_text(folder / NAME)
    lines = "".join(text.splitlines(keepends=True)[:-1])
    if not lines or text != lines + last_line(lines):
        raise TrainError(
            f"{folder / NAME}: expected lines of checksums and a last one that covers them, "
            "got other bytes"
        )
    for expected, name in LINE.findall(lines):
        got = digest(folder / name)
        if got != expected:
            raise TrainError(
                f"{folder / name}: expected the bytes with sha256 {expected[:16]}..., "
                f"got {got[:16]}..."
            )
