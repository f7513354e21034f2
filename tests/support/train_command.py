"""The command `minifloat train` in processes of its own, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.worlds import THREADS


def start(
    folder: Path, out: Path, processes: int, *more: str, model: str, seq: int, batch: int
) -> subprocess.Popen[str]:
    """Starts a small job on the CPU, by torchrun where there are several processes.

    Args:
        folder: of the text, beside which the cache of tokens is.
        out: of the results.
        processes: how many.
        more: options that override those here.
        model, seq, batch: the sizes.
    """
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    options = f"""train --data {folder} --cache {folder.parent}/cache --out {out} --vocab 300
        --model {model} --seq {seq} --batch {batch} --eval-every 4 --eval-batches 2
        --checkpoint-every 4 --threads {THREADS} --device cpu""".split()
    return subprocess.Popen(
        [*launcher, "-m", "minifloat", *options, *more],
        env={**os.environ, "OMP_NUM_THREADS": str(THREADS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
