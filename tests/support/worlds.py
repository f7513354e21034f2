"""Several processes, one torch.distributed world, inside one test.

    run_world(4, check_gather, "nvfp4")      check_gather(rank, "nvfp4") in each of 4 processes
    last_words(2, lose_a_rank, seconds=5)    how each rank ended, with a timeout of 5 s
    run_world(2, check, kind="cuda")         a GPU each, over NCCL; fewer GPUs are shared

Processes are forked from a server that has imported torch and minifloat: 0.1 s a world.
Each runs its ops in one thread, or in OMP_NUM_THREADS of them.
"""

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import minifloat as mf
import torch
import torch.distributed as dist

SECONDS = 120
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))  # of each process
KILLED = "the process died without a word"
# Texts of errors about a lost peer.
LOST = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Timed out",
    "have not arrived",
)
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def device_of(rank, kind):
    """Returns a rank's device. Ranks share GPUs where there are fewer."""
    if kind != "cuda":
        return torch.device(kind)
    return torch.device(kind, rank % torch.cuda.device_count())


def take_device(rank, size, kind):
    """Returns device_of(rank, kind), once CUDA and NCCL know of it. Call it before the group is."""
    device = device_of(rank, kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        if size > torch.cuda.device_count():
            os.environ["NCCL_HOSTID"] = (
                f"rank {rank}"  # NCCL refuses two ranks of a host on one GPU
            )
    return device


def run_world(world_size, fn, *args, kind="cpu"):
    """Runs fn(rank, *args) on every rank; raises the traceback of the first rank that fails."""
    with _started(world_size, fn, args, kind, SECONDS) as ends:
        for rank, failure in ends:
            if failure is not None:
                raise AssertionError(f"rank {rank}: {failure}")


def last_words(world_size, fn, *args, seconds, kind="cpu"):
    """Returns each rank's traceback, None after a normal end, KILLED, or its status and output.

    seconds: the group's timeout; None: fn starts its own group.
    """
    with _started(world_size, fn, args, kind, seconds, keeps_errors=True) as ends:
        ends_by_rank = dict(ends)
    return [ends_by_rank[rank] for rank in range(world_size)]


def require_lost(world_size, lose_a_rank, *args, seconds, word):
    """Requires that rank 1 is killed, and others raise in time, with the word in tracebacks."""
    begin = time.monotonic()
    words = last_words(world_size, lose_a_rank, *args, seconds=seconds)
    assert time.monotonic() - begin < 4 * seconds
    assert words.pop(1) == KILLED
    for last in words:
        assert word in last, last
        assert any(lost in last for lost in LOST), last


class Group(NamedTuple):
    """The description of the world that a rank receives."""

    rank: int
    size: int
    kind: str
    folder: Path
    seconds: float | None
    keeps_errors: bool

    @property
    def errors(self):
        return self.folder / f"errors.{self.rank}"


@contextmanager
def _started(world_size, fn, args, kind, seconds, keeps_errors=False):
    """Yields (rank, failure) of each rank as it ends."""
    context = multiprocessing.get_context("forkserver")
    # Read when the server starts: threads of several processes that spin take each other's time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    context.set_forkserver_preload(["tests.support.rank_imports"])
    with tempfile.TemporaryDirectory() as folder:
        reports, processes = {}, []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            group = Group(rank, world_size, kind, Path(folder), seconds, keeps_errors)
            process = context.Process(
                target=_rank_main, args=(group, theirs, fn, args), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            reports[ours] = group, process
        try:
            yield _ends(reports)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _ends(reports):
    deadline = time.monotonic() + SECONDS
    while reports:
        ready = wait(list(reports), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            still = sorted(group.rank for group, _ in reports.values())
            raise TimeoutError(f"ranks {still} still ran after {SECONDS} s")
        for report in ready:
            group, process = reports.pop(report)
            try:
                yield group.rank, report.recv()
            except EOFError:
                yield group.rank, _silent_end(group, process)


def _silent_end(group, process):
    """Describes a process that Python did not end: NCCL's watchdog aborts it with a message."""
    process.join()
    if process.exitcode == -signal.SIGKILL:
        return KILLED
    written = group.errors.read_text() if group.errors.exists() else ""
    return f"the process ended with {process.exitcode}\n{written}"


def _rank_main(group, report, fn, args):
    torch.set_num_threads(THREADS)
    if group.keeps_errors:
        with group.errors.open("wb") as errors:
            os.dup2(errors.fileno(), 2)
    try:
        take_device(group.rank, group.size, group.kind)
        if group.seconds is not None:
            dist.init_process_group(
                BACKENDS[group.kind],
                store=dist.FileStore(str(group.folder / "store"), group.size),
                rank=group.rank,
                world_size=group.size,
                timeout=timedelta(seconds=group.seconds),
            )
        fn(group.rank, *args)
        if dist.is_initialized():
            dist.barrier()
            mf.distributed.destroy_process_group()
    except BaseException:
        report.send(traceback.format_exc())
        raise
    report.send(None)
