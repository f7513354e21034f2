"""Atomic writes of files, and the lock of a folder."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .fields import TrainError


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
        fresh.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON, atomically."""
    text = json.dumps(value, indent=1) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8. Bytes of a file name that are not UTF-8 are written as escapes."""
    write_atomically(path, lambda file: file.write(text.encode(errors="backslashreplace")))


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
