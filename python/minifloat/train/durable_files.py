"""Files that survive a kill: atomic writes, a folder's checksums, the lock of a folder.

SHA256SUMS has the checksums of a folder's files, in the format of `sha256sum`:

    <sha256>  state.json
    <sha256>  state.pt
    # <sha256 of the lines above>

The file is written last, and its last line covers the lines before. `sha256sum -c SHA256SUMS`
checks a checkpoint too. A checksum finds damage. It is no signature: a writer of the files can
change it.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .checks import TrainError, read_text

CHECKSUMS = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  (.+)\n")
CHUNK = 1 << 20  # bytes


def sync_folder(folder: Path) -> None:
    """Makes renames and new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls `write` on a temporary file and renames it to `path`; on failure removes it."""
    fresh = path.with_name(f".{path.name}.writing")
    try:
        with fresh.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8. Bytes of a file name that are not UTF-8 are written as escapes."""
    write_atomically(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def write_json(path: Path, value: object) -> None:
    """Writes a value as JSON, atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def sha256_of(path: Path) -> str:
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


def write_checksums(folder: Path) -> None:
    """Writes the checksums of all files that the folder holds."""
    names = sorted(path.name for path in folder.iterdir() if path.name != CHECKSUMS)
    lines = "".join(f"{sha256_of(folder / name)}  {name}\n" for name in names)
    write_text(folder / CHECKSUMS, lines + last_line(lines))


def verify_checksums(folder: Path) -> None:
    """Raises TrainError, which names the file, where a byte has changed since the write."""
    text = read_text(folder / CHECKSUMS)
    lines = "".join(text.splitlines(keepends=True)[:-1])
    if not lines or text != lines + last_line(lines):
        raise TrainError(
            f"{folder / CHECKSUMS}: expected lines of checksums and a last one that covers them, "
            "got other bytes"
        )
    for expected, name in LINE.findall(lines):
        got = sha256_of(folder / name)
        if got != expected:
            raise TrainError(
                f"{folder / name}: expected the bytes with sha256 {expected[:16]}..., "
                f"got {got[:16]}..."
            )


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Locks a folder for this process. The system releases the lock when the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TrainError(
                f"{folder} is in use by another job; choose another folder with --out"
            ) from error
        yield
