"""Ends process groups of gloo such that Python can exit after them.

A thread of gloo frees the tensors of a collective a moment after the collective has ended, and
takes Python's interpreter lock for that. Python 3.13 and older kill a thread that takes the lock
while Python exits: "terminate called without an active exception", exit code -6.
torch's destroy_process_group joins these threads only where nothing refers to the group any more.
Models under FSDP2 and caches of DTensor refer to it. So this module waits until the threads are
idle.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

GLOO = "pt_gloo_runloop"  # torch's name of these threads
TASKS = Path("/proc/self/task")
PAUSE, QUIET, SECONDS = 0.01, 3, 10.0


def destroy_process_group() -> None:
    """Ends torch.distributed as its destroy_process_group does, so that the process can exit.

    Frees models that nothing refers to, destroys all groups, and waits until gloo's threads are
    idle, for 10 s at most. Call it last, where the function that built the model has returned.

    Raises:
        ValueError, AssertionError: torch.distributed's, of a group that is not there.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> mf.distributed.destroy_process_group()
        >>> dist.is_initialized()
        False
    """
    import torch.distributed as dist

    gc.collect()
    dist.destroy_process_group()
    deadline, quiet = time.monotonic() + SECONDS, 0
    # Each pause lets a thread take Python's lock. One that waits for it would seem idle.
    while quiet < QUIET and time.monotonic() < deadline:
        time.sleep(PAUSE)
        quiet = 0 if any_runs(GLOO) else quiet + 1


def any_runs(name: str) -> bool:
    """Tells whether a thread of this process that has the name runs, or waits for a processor."""
    for task in TASKS.iterdir() if TASKS.exists() else ():
        try:
            text = (task / "stat").read_text()
        except OSError:  # it has ended since
            continue
        found, state = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2]
        if found == name and state != "S":
            return True
    return False
