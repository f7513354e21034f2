"""A tiny job of `minifloat train` (tens of thousands of parameters), for its tests.

"The same bytes" means the hash of the final weights and every metrics record except its timings.
"""

import hashlib

from minifloat import cli
from minifloat.train.job.checkpoint import TIMINGS, read_records

from tests.support.killed_job import killed_after
from tests.support.worlds import THREADS

STEPS = 24
EVERY = 4  # steps between checkpoints


def options(text, cache):
    """Returns the command's arguments, without recipes and --out."""
    return f"""train --data {text} --cache {cache} --model 32,2,2,1,64 --vocab 300 --seq 32
        --batch 2 --steps {STEPS} --eval-every 6 --eval-batches 2 --checkpoint-every {EVERY}
        --threads {THREADS} --lr 0.002 --device cpu""".split()


def run(tiny, out, *more):
    """Runs the command; returns its exit code."""
    return cli.main([*tiny, "--out", str(out), *more])


def run_and_kill(tiny, out, after, *more):
    """Runs the command and ends it once the checkpoint of step `after` is complete."""
    with killed_after(after):
        run(tiny, out, *more)


def without_timings(records):
    """Returns the reproducible fields of the records."""
    return [{k: v for k, v in record.items() if k not in TIMINGS} for record in records]


def digest(out, name="bf16"):
    """Returns (sha256 of the final weights, the run's metrics without timings)."""
    weights = hashlib.sha256((out / "runs" / name / "weights.pt").read_bytes()).hexdigest()
    records = [r for r in read_records(out / "metrics.jsonl") if r["run"] == name]
    return weights, without_timings(records)
