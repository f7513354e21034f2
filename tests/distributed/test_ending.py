"""A process ends when gloo's threads no longer drop the tensors of a collective."""

import contextlib
import threading
import zlib
from pathlib import Path

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.distributed import ending


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def gloos_threads():
    names = []
    for task in ending.TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended since
            names.append((task / "comm").read_text().strip())
    return names.count(ending.GLOO)


def test_gloos_threads_have_the_name_that_is_waited_for(group):
    dist.all_reduce(torch.ones(4))
    assert gloos_threads() > 0


def test_it_waits_for_a_thread_that_runs(group):
    """The thread stands for gloo's: it has the name, and runs without Python's lock."""
    data, is_named, ended = bytes(1 << 29), threading.Event(), []

    def run():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(ending.GLOO)
        is_named.set()
        for _ in range(3):
            zlib.crc32(data)
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    is_named.wait()
    assert not ended
    mf.distributed.destroy_process_group()
    assert ended
    assert not dist.is_initialized()
    thread.join()


def test_it_does_not_wait_for_ever(group, monkeypatch):
    monkeypatch.setattr(ending, "SECONDS", 0.05)
    monkeypatch.setattr(ending, "any_runs", lambda name: True)
    mf.distributed.destroy_process_group()
    assert not dist.is_initialized()
