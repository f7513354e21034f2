"""Several processes, one torch.distributed world, inside one test.

    run_world(4, check_gather, "nvfp4")      check_gather(rank, "nvfp4") in each of 4 processes
    last_words(2, lose_a_rank, seconds=5)    how each rank ended, with a timeout of 5 s

Processes are forked from a server that has imported torch and minifloat, so a world costs little.
"""

import multiprocessing
import tempfile
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 120
KILLED = "the process died without a word"


def run_world(world_size, fn, *args):
    """fn(rank, *args) on every rank; raises with the traceback of the first rank that fails."""
    with _started(world_size, fn, args, SECONDS) as ends:
        for rank, failure in ends:
            if failure is not None:
                raise AssertionError(f"rank {rank}: {failure}")


def last_words(world_size, fn, *args, seconds):
    """Each rank's traceback, KILLED, or None where it ended well.

    seconds: the group's timeout; None: fn starts its own group.
    """
    with _started(world_size, fn, args, seconds) as ends:
        words = dict(ends)
    return [words[rank] for rank in range(world_size)]


@contextmanager
def _started(world_size, fn, args, seconds):
    """(rank, failure) of each rank as it ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["minifloat", "torch.distributed.fsdp"])
    with tempfile.TemporaryDirectory() as folder:
        reports, ranks = {}, []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            group = rank, world_size, str(Path(folder) / "store"), seconds
            process = context.Process(
                target=_rank_main, args=(group, theirs, fn, args), daemon=True
            )
            process.start()
            theirs.close()
            ranks.append(process)
            reports[ours] = rank
        try:
            yield _ends(reports)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _ends(reports):
    deadline = time.monotonic() + SECONDS
    while reports:
        ready = wait(list(reports), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            raise TimeoutError(f"ranks {sorted(reports.values())} still ran after {SECONDS} s")
        for report in ready:
            rank = reports.pop(report)
            try:
                yield rank, report.recv()
            except EOFError:
                yield rank, KILLED


def _rank_main(group, report, fn, args):
    rank, world_size, store, seconds = group
    torch.set_num_threads(1)
    try:
        if seconds is not None:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=seconds),
            )
        fn(rank, *args)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        report.send(traceback.format_exc())
        raise
    report.send(None)
