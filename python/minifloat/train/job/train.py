"""The job: reads the data, measures the device, trains the runs one by one, writes the report.

OUT/job.json            the settings, for --resume
OUT/metrics.jsonl       every step and evaluation of every run
OUT/tensorboard/RUN/    event files of these records
OUT/runs/RUN/           checkpoints/, weights.pt and result.json when the run is done, inspect/
OUT/loss.png, report.md, report.json
"""

import os
import platform
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Event

import torch
import torch.utils.deterministic as deterministic

from .. import report
from ..checks import Json, TrainError, say
from ..config import RunSpec, TrainConfig
from ..data import Batches, Corpus, Tokens, load_corpus, require_enough, tokenize
from ..durable_files import lock, write_json, write_text
from ..interrupt import INTERRUPTED, in_main_thread
from ..model import measure
from . import checkpoint
from .checkpoint import FILE, SavedJob, find_starts, folder_of, read_records, results_in
from .processes import World
from .run import Job, prepare_model, train_run


@contextmanager
def stop_signals(stop: Event) -> Iterator[None]:
    """Sets `stop` at the first Ctrl-C or SIGTERM inside; a second one ends the process at once.

    In a thread besides the main one, Python allows no handlers: the signals are the program's.
    """

    def handle(signum: int, frame: object) -> None:
        stop.set()
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        say("\nstopping after this step, with a checkpoint and a report; again to stop at once")

    numbers = (signal.SIGINT, signal.SIGTERM) if in_main_thread() else ()
    before = {n: signal.signal(n, handle) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(
    config: TrainConfig,
    runs: Sequence[RunSpec],
    out: Path,
    cache: Path,
    *,
    saved: SavedJob | None,
    world: World,
) -> int:
    """Trains the runs that are not finished; returns the process's exit code.

    All settings are checked before `out` is changed.

    Args:
        saved: the job in `out` that is resumed; None: the content of `out` is moved aside.
        cache: folder of tokenized text.
        world: the processes of the job. Ranks other than 0 have a temporary `out`.
    """
    make_deterministic(config)
    require_memory(config)
    corpus, tokens = read_data(config, cache)
    facts = {run.name: describe_run(run, config) for run in runs}
    stop = Event()
    if not saved and results_in(out):
        say(f"an earlier job's results moved from {out} to {move_aside(out)}")
    with lock(out):
        starts: dict[str, Path] = {}
        if saved:
            starts = world.agree(partial(find_starts, out, saved, config, tokens.fingerprint))
        for run in runs:
            folder_of(out, run).mkdir(parents=True, exist_ok=True)
        content = {"config": asdict(config), "runs": [asdict(run) for run in runs]}
        write_json(out / "job.json", {**content, "tokens": tokens.fingerprint})
        light = measure.SpeedOfLight(config)
        light.measure()
        say(
            f"products of one step alone: {1e3 * light.seconds:.0f} ms, "
            f"{light.flops / light.seconds / 1e9:.0f} GFLOP/s in "
            f"{measure.describe_product_dtype(config.device)}"
        )
        batches = Batches(tokens.train, tokens.validation, config.seq, config.batch)
        job = Job(config, batches, tokens.fingerprint, out, starts, light, stop, world)
        try:
            with stop_signals(stop):
                train_all(job, runs, facts, saved.results if saved else {})
        except (TrainError, OSError):
            with suppress(TrainError, OSError):
                write_report(job, runs, facts, corpus)
            raise
        write_report(job, runs, facts, corpus)
    return INTERRUPTED if stop.is_set() else 0


def make_deterministic(config: TrainConfig) -> None:
    """Makes equal jobs give equal bytes: fixed threads, no algorithm that depends on timing."""
    if config.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(max(config.threads, 1))
    torch.use_deterministic_algorithms(True, warn_only=config.device == "cuda")
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(config.seed)


def read_data(config: TrainConfig, cache: Path) -> tuple[Corpus, Tokens]:
    """Reads text and token ids, and prints a line about each."""
    corpus = load_corpus(config.data, config.data_mb)
    if corpus.skipped:
        say(
            f"skipped {len(corpus.skipped)} files that are no text, the first: "
            f"{corpus.skipped[0][0]} ({corpus.skipped[0][1]}); report.md lists them"
        )
    if corpus.beyond_limit:
        say(f"--data-mb {config.data_mb:g}: {corpus.beyond_limit}")
    start = time.perf_counter()
    tokens = tokenize(corpus, config.model.vocab, cache)
    require_enough(tokens, corpus, config.seq, config.batch)
    say(
        f"{corpus.source}: {corpus.files} files, {corpus.megabytes}, "
        f"{len(tokens.train) / 1e6:.2f}M + {len(tokens.validation) / 1e6:.2f}M tokens "
        f"({time.perf_counter() - start:.1f} s)"
    )
    return corpus, tokens


def require_memory(config: TrainConfig) -> None:
    """Refuses a model that needs more memory than this machine has."""
    need = 16 * config.model.parameters  # bytes: weight, gradient, AdamW's two moments in fp32
    if config.device == "cuda":
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > memory * config.processes:
        raise TrainError(
            f"--model: expected weights, gradients and AdamW's moments within "
            f"{memory * config.processes / 1e9:.1f} GB of memory, got {need / 1e9:.3g} GB "
            f"({config.model.parameters} parameters)"
        )


def describe_run(run: RunSpec, config: TrainConfig) -> Json:
    """Describes a run before its start; of a run with two recipes, the larger numbers of both."""
    parts = [describe_part(part, config) for part in run.parts]
    saved_total, saved_linears = max(saved for _, saved in parts)
    return {
        "status": "not started",
        "converted": max(converted for converted, _ in parts),
        "saved_total": saved_total,
        "saved_linears": saved_linears,
    }


def describe_part(run: RunSpec, config: TrainConfig) -> tuple[int, measure.SavedBytes]:
    """Describes a run of one recipe, which finds one that does not fit the model.

    Returns:
        (converted layers, bytes saved for backward).
    """
    try:
        model, converted, skipped = prepare_model(run, config)
        forward = measure.loss_in_product_dtype(model, config.device)
        saved = measure.saved_bytes_per_token(model, config, forward)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise TrainError(
            f"{run.name}: expected a step that fits in memory, got: {error}; make --model, "
            "--batch or --seq smaller"
        ) from error
    if converted:
        say(
            f"{run.name}: {len(converted)} {config.model.converted_layers} under "
            f"{run.recipe!r}, {len(skipped)} left as they are (keep={run.keep})"
        )
    return len(converted), saved


def train_all(
    job: Job, runs: Sequence[RunSpec], facts: dict[str, Json], results: Mapping[str, Json]
) -> None:
    """Trains every run without a result, one after the other, until one is stopped."""
    for number, run in enumerate(runs, 1):
        if run.name in results:
            facts[run.name] = results[run.name]
            continue
        if job.should_stop():
            return
        facts[run.name]["status"] = "unfinished"
        outcome = train_run(run, job, f"{run.name} [{number}/{len(runs)}]")
        facts[run.name] |= outcome
        if not outcome["status"].startswith("stopped"):
            folder = folder_of(job.out, run)
            write_json(folder / "result.json", facts[run.name])
            checkpoint.prune(folder / "checkpoints", outcome["step"], keep=1)


def move_aside(out: Path) -> Path:
    """Renames an earlier job's folder to OUT.1, OUT.2, ...: results are never overwritten."""
    out = out if out.name not in ("", "..") else out.resolve()
    with lock(out):
        number = 1
        while (target := out.with_name(f"{out.name}.{number}")).exists():
            number += 1
        return out.rename(target)


def job_facts(job: Job, corpus: Corpus) -> Json:
    """Returns the job's part of report.json: model, data, schedule and device."""
    config, model = job.config, job.config.model
    validation = job.batches.validation_set(config.eval_batches)
    where = f"{platform.machine()} CPU, {config.threads} threads"
    memory = "resident memory that the run added to the process, at its highest"
    if config.device == "cuda":
        where = torch.cuda.get_device_name()
        memory = "all tensors together, at their most (torch.cuda.max_memory_allocated)"
    if config.processes > 1:
        where = f"{config.processes} processes under FSDP2{config.layout}, each {where}"
    else:
        where += config.layout
    left_out = f"; by --data-mb: {corpus.beyond_limit}" if corpus.beyond_limit else ""
    return {
        "setting": [
            f"model: {model.description}",
            f"data: {corpus.source}: {corpus.files} files, {corpus.megabytes} "
            f"({len(corpus.skipped)} files skipped as no text{left_out}), "
            f"{len(job.batches.train)} training tokens, split {corpus.split}",
            f"schedule: {config.steps} steps of {config.batch} x {config.seq} tokens, AdamW, "
            f"learning rate {config.lr:g}, {config.warmup} steps of warmup, cosine to a tenth",
            "precision: fp32 parameters and optimizer, compute in "
            f"{measure.describe_product_dtype(config.device)}, recipes in {model.converted_layers}",
            f"device: {where}, torch {torch.__version__}",
        ],
        "steps": config.steps,
        "validation_tokens": sum(inputs.numel() for inputs, _ in validation),
        "step_flops": job.light.flops,
        "memory_note": memory,
        "layers": model.converted_layers,
        "mixtures": model.mixtures,
        "experts": model.mixtures * getattr(model, "experts", 0),
        "skipped_files": corpus.skipped,
    }


def write_report(job: Job, runs: Sequence[RunSpec], facts: dict[str, Json], corpus: Corpus) -> None:
    """Writes loss.png, report.md and report.json, and prints the table."""
    records = read_records(job.out / FILE)
    baseline = report.baseline_of(runs, job.config.seed)
    rows = report.table_rows(runs, records, facts, baseline)
    context = {**job_facts(job, corpus), "baseline": baseline.name if baseline else "none"}
    started = [run for run, row in zip(runs, rows) if row["step"]]
    if started:
        report.draw_losses(job.out / "loss.png", started, records, baseline, context["setting"][0])
    write_json(job.out / "report.json", {**context, "rows": rows, "config": asdict(job.config)})
    write_text(job.out / "report.md", report.markdown_report(context, rows))
    print(report.markdown_table(rows, job.config.steps))
    print(
        f"{job.out}/report.md, loss.png, metrics.jsonl; tensorboard --logdir {job.out}/tensorboard"
    )
