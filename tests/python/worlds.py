"""Several processes, one torch.distributed world, inside one test.

    run_world(4, check_gather, "nvfp4")      check_gather(rank, "nvfp4") in each of 4 processes

Processes are forked from a server that has imported torch and minifloat, so a world costs little.
"""

import multiprocessing
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 120


def run_world(world_size, fn, *args):
    """fn(rank, *args) on every rank; raises with the traceback of the first rank that fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["minifloat", "torch.distributed.fsdp"])
    with tempfile.TemporaryDirectory() as folder:
        reports, ranks = {}, []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            store = str(Path(folder) / "store")
            process = context.Process(
                target=_rank_main, args=(rank, world_size, store, theirs, fn, args), daemon=True
            )
            process.start()
            theirs.close()
            ranks.append(process)
            reports[ours] = rank
        try:
            _collect(reports)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(reports):
    deadline = time.monotonic() + SECONDS
    while reports:
        ready = wait(list(reports), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            raise TimeoutError(f"ranks {sorted(reports.values())} still ran after {SECONDS} s")
        for report in ready:
            rank = reports.pop(report)
            try:
                failure = report.recv()
            except EOFError:
                failure = "the process died without a word"
            if failure is not None:
                raise AssertionError(f"rank {rank}: {failure}")


def _rank_main(rank, world_size, store, report, fn, args):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
        )
        fn(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        report.send(traceback.format_exc())
        raise
    report.send(None)
