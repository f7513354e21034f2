"""A job of `minifloat train` that ends as kill -9 would end it, inside the process of the tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from minifloat.train.job import checkpoint


class Killed(BaseException):
    """An exception that stands for kill -9: the program does not catch it."""


@contextmanager
def killed_after(step: int) -> Iterator[None]:
    """Ends the job that the body runs, once the checkpoint of `step` is complete."""
    save = checkpoint.save

    def save_and_die(folder, number, state, meta):
        save(folder, number, state, meta)
        if number == step:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save_and_die)
        with pytest.raises(Killed):
            yield
