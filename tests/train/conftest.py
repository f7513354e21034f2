"""Fixtures of tests that run a tiny job of `minifloat train`."""

import pytest

from tests.support.tiny_job import options
from tests.support.tiny_text import write_text


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """Makes a folder of text that lowers a tiny model's loss."""
    folder = tmp_path_factory.mktemp("train") / "text"
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(text_folder):
    """Returns the options of a job that takes a second, except recipes and out."""
    return options(text_folder, text_folder.parent / "cache")
