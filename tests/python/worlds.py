"""Several processes that make one gloo group: run_world(world_size, fn, *args).

Each rank runs fn(rank, *args). The first failure is raised here with that rank's traceback, and the
other processes are ended: a rank that waits in a collective for one that failed never returns.
"""

import multiprocessing
import tempfile
import time
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

TIMEOUT = 120.0  # seconds
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["minifloat", "torch.distributed.fsdp"])


class RankFailedError(AssertionError):
    pass


def run_rank(rank, world_size, store, pipe, fn, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        fn(rank, *args)
        pipe.send(None)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


def run_world(world_size, fn, *args):
    with tempfile.TemporaryDirectory() as folder:
        ranks, processes = {}, []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            arguments = (rank, world_size, f"{folder}/store", there, fn, args)
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            ranks[here] = rank
            processes.append(process)
        try:
            collect(ranks, time.monotonic() + TIMEOUT)
            for process in processes:
                process.join(5.0)
        finally:
            for process in processes:
                process.kill()


def collect(ranks, deadline):
    """Until every rank has finished; raises at the first that failed."""
    waiting = dict(ranks)
    while waiting:
        ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise RankFailedError(f"ranks {sorted(waiting.values())} still ran after {TIMEOUT} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                failure = pipe.recv()
            except EOFError:
                failure = "the process died without a word"
            if failure is not None:
                raise RankFailedError(f"rank {rank} of {len(ranks)}:\n{failure}")
