"""What a recipe costs in loss over 3,000 steps of a Llama of 122M parameters, paired with bf16.

    python benchmarks/gpu_parity.py --data FOLDER --recipes bf16,fp8_rowwise --seeds 1,2,3 --out OUT

FOLDER is what `parity_data.py` made. A run trains from the weights and in the order of its seed, so
runs of one seed differ by the recipe alone. Every window of text is read at most once.

    step     loss in bf16 autocast, fp32 parameters -> clip -> AdamW -> mf.step
    rate     linear warm-up, then a cosine to FINAL_LR of the peak
    val      mean loss of the whole validation text under the run's recipe
    average  the same of the mean of the weights at every AVERAGE_EVERY-th step of the last tenth

A run that has ended leaves OUT/NAME_seed_SEED.jsonl.xz: what was run, the loss and the gradient's
norm of each step, evaluations, and the loss of each part of the validation text. A run with such a
file in OUT or in docs/parity is not trained again. Without --data the tables of those are printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import lzma
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import torch
from _parity_tokens import VOCABULARY, load_tokens
from gpu_loss import BF16, table
from minifloat.nn.convert.quantize import quantize_
from minifloat.nn.state.model_state import step as finish_step
from minifloat.train.config import ModelConfig, RunSpec, parse_entry, parse_model
from minifloat.train.job.processes import clip_gradients
from minifloat.train.job.run import BETAS, compile_layers
from minifloat.train.model.llama import Llama, cross_entropy, init_weights
from minifloat.train.model.measure import PeakMemory, product_dtype
from torch import Tensor

RESULTS = timing.ROOT / "docs" / "parity"
FINAL_LR = 0.05  # of the peak, at the last step
AVERAGE_EVERY = 10  # steps, in the last tenth
DIGITS = 5  # of a loss, after the point
LAST = 100  # steps whose mean is the training loss of a run
TORCHAO = "torchao_"  # begins the name of a run of torchao's: torchao_rowwise


@dataclass(frozen=True)
class Trial:
    """The settings that all runs share."""

    model: str = "1024,8,16,4,2752"
    seq: int = 1024
    batch: int = 36
    steps: int = 3000
    lr: float = 1e-3
    warmup: int = 200
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int = 750
    device: str = "cuda"

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step, from 1."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        progress = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.lr * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


class Windows:
    """Windows of seq + 1 tokens on the device; those of one text share only their last token."""

    def __init__(self, ids: Any, trial: Trial) -> None:
        self.ids = torch.from_numpy(ids.astype("int32")).to(trial.device)
        self.count = (len(ids) - 1) // trial.seq
        self.seq, self.batch = trial.seq, trial.batch
        self.places = torch.arange(trial.seq + 1, device=trial.device)

    def order(self, seed: int) -> Tensor:
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(seed))

    def batches(self, order: Tensor) -> list[Tensor]:
        """Cuts an order into batches of windows, on the device; leaves out what is left."""
        whole = len(order) // self.batch * self.batch
        return list(order[:whole].to(self.places.device).view(-1, self.batch))

    def gather(self, rows_B: Tensor) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, each (batch, seq) int64."""
        tokens = self.ids[rows_B[:, None] * self.seq + self.places].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True)
class Text:
    """The windows of both sides."""

    train: Windows
    validation: Windows


class Clock:
    """The rate of training, from the second evaluation's interval on: the first one compiles."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.first = trial, time.perf_counter()
        self.rates: list[float] = []
        self.start(0)

    def start(self, step: int) -> None:
        self.step, self.begin = step, self.now()

    def stop(self, step: int) -> None:
        tokens = (step - self.step) * self.trial.tokens_per_step
        self.rates.append(tokens / (self.now() - self.begin))

    def now(self) -> float:
        if self.trial.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(self.rates[1:] or self.rates)

    @property
    def seconds(self) -> float:
        return self.now() - self.first


def rounded(values: list[float]) -> list[float]:
    return [round(value, DIGITS) for value in values]


class LossLlama(Llama):
    """The Llama that returns its loss, with norm, head and loss in one compiled graph."""

    def __init__(self, config: ModelConfig, seq: int) -> None:
        super().__init__(config, seq)
        self.head_loss = torch.compile(self.uncompiled_head_loss, fullgraph=True)

    def uncompiled_head_loss(self, x_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        return cross_entropy(self.output(self.norm(x_BSD)), targets_BS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return self.head_loss(x, targets)


def convert_by_torchao(model: LossLlama, recipe: str) -> None:
    """Converts the layers that mf.quantize_ converts: all but the head."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    head = model.output
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, _: m is not head)


def parse_run(entry: str, seed: int) -> RunSpec:
    """Parses an entry of --recipes: as `minifloat train` does, or the name of a torchao run."""
    return parse_entry(f"{entry}={BF16}" if entry.startswith(TORCHAO) else entry, seed)


class Run:
    """One recipe from one seed."""

    def __init__(self, spec: RunSpec, trial: Trial, text: Text) -> None:
        self.spec, self.trial, self.text = spec, trial, text
        config = parse_model(trial.model, VOCABULARY)
        self.model = LossLlama(config, trial.seq)
        init_weights(self.model, spec.seed)
        self.model.to(trial.device)
        self.parameters = list(self.model.parameters())
        if spec.converts:
            quantize_(self.model, spec.recipe, keep=spec.keep, seed=spec.seed, verbose=False)
        elif spec.name.startswith(TORCHAO):
            convert_by_torchao(self.model, spec.name.removeprefix(TORCHAO))
        compile_layers(self.model)
        matrices = [p for p in self.parameters if p.dim() >= 2]
        vectors = [p for p in self.parameters if p.dim() < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=trial.lr, betas=BETAS, weight_decay=trial.weight_decay, fused=True
        )
        self.sums = [torch.zeros_like(p) for p in self.parameters]  # for the mean of the weights
        self.added = 0

    def loss(self, windows: Windows, rows_B: Tensor) -> Tensor:
        """Computes the mean loss of a batch, in nats a token."""
        inputs, targets = windows.gather(rows_B)
        with torch.autocast(self.trial.device, product_dtype(self.trial.device)):
            return self.model(inputs, targets)

    def train_step(self, step: int, rows_B: Tensor) -> tuple[Tensor, Tensor]:
        """Trains step `step`, from 1; returns the loss and the gradient's norm, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.trial.rate(step)
        loss = self.loss(self.text.train, rows_B)
        loss.backward()
        norm = clip_gradients(self.parameters, self.trial.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.spec.converts:
            finish_step(self.model)
        last = self.trial.steps
        if step == last or (step > 0.9 * last and step % AVERAGE_EVERY == 0):
            with torch.no_grad():
                torch._foreach_add_(self.sums, self.parameters)
            self.added += 1
        return loss.detach(), norm

    def evaluate(self) -> list[float]:
        """Returns the loss of each batch of the validation text."""
        validation = self.text.validation
        self.model.eval()  # evaluation does not advance the random state
        with torch.no_grad():
            rows = torch.arange(validation.count)
            losses = [self.loss(validation, rows_B) for rows_B in validation.batches(rows)]
        self.model.train()
        return torch.stack(losses).tolist()

    @torch.no_grad()
    def average_weights(self) -> None:
        """Replaces the weights by their mean over the steps at which they were added up."""
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            parameter.copy_(total / self.added)

    def train(self) -> dict[str, Any]:
        """Trains to the last step; returns the run's record."""
        trial, losses, norms, evaluations = self.trial, [], [], {}
        batches = self.text.train.batches(self.text.train.order(self.spec.seed))
        if len(batches) < trial.steps:
            sys.exit(f"--data: expected {trial.steps} batches of text, got {len(batches)}")
        memory, clock = PeakMemory(trial.device), Clock(trial)
        for step, rows_B in enumerate(batches[: trial.steps], start=1):
            loss, norm = self.train_step(step, rows_B)
            losses.append(loss)
            norms.append(norm)
            if step % trial.eval_every == 0 or step == trial.steps:
                clock.stop(step)
                parts = self.evaluate()
                evaluations[step] = statistics.mean(parts)
                print(
                    f"{self.spec.name}: step {step}, val {evaluations[step]:.4f}, "
                    f"{clock.tokens_per_s:,.0f} tokens/s, {clock.seconds:.0f} s",
                    flush=True,
                )
                clock.start(step)
        self.average_weights()
        average = self.evaluate()
        return {
            "val": evaluations[trial.steps],
            "average": statistics.mean(average),
            "evaluations": evaluations,
            "parts": rounded(parts),
            "average_parts": rounded(average),
            "loss": rounded(torch.stack(losses).tolist()),
            "norm": rounded(torch.stack(norms).tolist()),
            "tokens_per_s": round(clock.tokens_per_s),
            "peak_gib": round(memory.bytes() / 2**30, 2),
        }


def file_name(spec: RunSpec) -> str:
    return f"{spec.folder}_seed_{spec.seed}.jsonl.xz"


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes a record as lines of JSON, one a field, compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt") as file:
        file.writelines(json.dumps({key: value}) + "\n" for key, value in record.items())


def read_record(path: Path) -> dict[str, Any]:
    with lzma.open(path, "rt") as file:
        return {key: value for line in file for key, value in json.loads(line).items()}


def records_in(folders: list[Path]) -> list[dict[str, Any]]:
    """Reads all records; refuses those of another trial or text."""
    paths = [path for folder in folders for path in sorted(folder.glob("*.jsonl.xz"))]
    records = [read_record(path) for path in paths]
    for path, record in zip(paths, records, strict=True):
        for key in ("trial", "tokens"):
            if record[key] != records[0][key]:
                sys.exit(f"{path}: expected the {key} of {paths[0]}, got {record[key]}")
    return sorted(records, key=lambda record: (record["name"] != BF16, record["seed"]))


def losses_of(records: list[dict[str, Any]], key: str) -> dict[str, dict[int, float]]:
    """Returns the losses by recipe and seed. key: val, average, or loss: the last steps' mean."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        value = record[key]
        loss = statistics.mean(value[-LAST:]) if isinstance(value, list) else value
        found.setdefault(record["name"], {})[record["seed"]] = loss
    return found


def sampling_error(record: dict[str, Any], base: dict[str, Any]) -> float:
    """Returns the standard error of a gap in percent that the choice of validation text leaves."""
    gaps = [a - b for a, b in zip(record["parts"], base["parts"], strict=True)]
    return 100 * statistics.stdev(gaps) / math.sqrt(len(gaps)) / base["val"]


def noise(losses: dict[int, float]) -> str:
    """Says the standard deviation of one recipe's losses over seeds, in percent of their mean."""
    if len(losses) < 2:
        return "one seed"
    values = list(losses.values())
    return f"{100 * statistics.stdev(values) / statistics.mean(values):.3f}%"


def print_tables(records: list[dict[str, Any]]) -> None:
    for key in ("val", "average", "loss"):
        losses = losses_of(records, key)
        print(f"{key}; bf16 over seeds: {noise(losses.get(BF16, {}))}\n{table(losses)}\n")
    base = {record["seed"]: record for record in records if record["name"] == BF16}
    print("| run | tokens/s | peak GiB | seconds | sampling error of the gap |")
    print("|---|---|---|---|---|")
    for record in records:
        other = base.get(record["seed"] if record["name"] != BF16 else min(base))
        error = sampling_error(record, other) if other not in (None, record) else None
        print(
            f"| `{record['name']}`, seed {record['seed']} | {record['tokens_per_s']:,} | "
            f"{record['peak_gib']} | {record['seconds']} | "
            f"{'-' if error is None else f'{error:.3f}%'} |"
        )


def train_runs(specs: list[RunSpec], trial: Trial, data: Path, out: Path, limit: float) -> None:
    """Trains the runs that have no record yet, while another one ends within `limit` seconds."""
    missing = [s for s in specs if not any((f / file_name(s)).exists() for f in (out, RESULTS))]
    if not missing:
        return
    begin = time.perf_counter()
    tokens = load_tokens(data)
    print(
        f"{len(tokens.train):,} training and {len(tokens.validation):,} validation tokens in "
        f"{time.perf_counter() - begin:.0f} s, sha256 {tokens.fingerprint}",
        flush=True,
    )
    text = Text(Windows(tokens.train, trial), Windows(tokens.validation, trial))
    seconds = 0
    for spec in missing:
        start = time.perf_counter()
        if start - begin + seconds > limit:
            print(f"{spec.name}, seed {spec.seed}: left to another command")
            return
        said = {
            "name": spec.name,
            "recipe": spec.name if spec.name.startswith(TORCHAO) else spec.recipe,
            "keep": spec.keep,
            "seed": spec.seed,
            "trial": asdict(trial),
            "tokens": tokens.fingerprint,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if trial.device == "cuda" else "cpu",
            "date": time.strftime("%Y-%m-%d"),
        }
        found = Run(spec, trial, text).train()
        seconds = round(time.perf_counter() - start)
        write_record(out / file_name(spec), {**said, "seconds": seconds, **found})
        gc.collect()  # the compiled code of a run holds its model in a cycle


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="FOLDER/text of parity_data.py")
    parser.add_argument("--out", type=Path, default=timing.ROOT / "build" / "parity" / "runs")
    parser.add_argument(
        "--recipes", default=BF16, help="presets, PRESET keep=POLICY, torchao_rowwise"
    )
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME=TEXT")
    parser.add_argument("--seeds", default="1,2,3", help="of weights and order")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of this command")
    for field in fields(Trial):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default)
    arguments = parser.parse_args()
    trial = Trial(**{field.name: getattr(arguments, field.name) for field in fields(Trial)})
    entries = [*filter(None, arguments.recipes.split(",")), *arguments.recipe]
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    if arguments.data:
        specs = [parse_run(entry, seed) for seed in seeds for entry in entries]
        train_runs(specs, trial, arguments.data, arguments.out, arguments.limit)
    print_tables(records_in([RESULTS, arguments.out]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
