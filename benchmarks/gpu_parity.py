"""What a recipe costs in loss over 3,000 steps of a Llama of 122M parameters, paired with bf16.

    python benchmarks/gpu_parity.py --data FOLDER --recipes bf16,fp8_rowwise --seeds 1,2,3 --out OUT

FOLDER is what `parity_data.py` made. A run trains from the weights and in the order of its seed, so
runs of one seed differ by the recipe alone. Every window of text is read at most once.

    step     loss in bf16 autocast, fp32 parameters -> clip -> AdamW -> mf.step
    rate     linear warm-up, then a cosine to FINAL_LR of the peak
    val      mean loss of the whole validation text under the run's recipe
    average  the same of the mean of the weights at every AVERAGE_EVERY-th step of the last tenth

Entries are those of _entries.py, `RECIPE then=OTHER` among them: OTHER is the recipe of the
last 15% of the steps, or of the last 5% by `RECIPE then=OTHER last=5%`. Entries that follow each
other with the same RECIPE, the longest last part first, share the first steps: they run once.

An entry `RECIPE wire=SPEC` passes gradients through the wire format of quantize_gradients_, as
four ranks would send them: each has a quarter of the batch. Compare it with `RECIPE wire=bf16`.

A run that has ended leaves OUT/NAME_seed_SEED.jsonl.xz: what was run, the loss and the gradient's
norm of each step, evaluations, and the loss of each part of the validation text. A run with such a
file in OUT or in research/parity is not trained again. Without --data the tables of those are
printed; --plot FOLDER draws their curves.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import re
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import torch
from _entries import THEN, RunSpec, parse_entry, split_name
from _measure import PeakMemory
from _parity_records import BF16, RESULTS, draw_images, print_tables, records_in, write_record
from _parity_tokens import VOCABULARY, load_tokens
from _parity_wire import RANKS, WIRE, Wire
from _peers import convert_by_torchao
from minifloat.doctor.products import product_dtype
from minifloat.nn.convert.quantize import quantize_
from minifloat.nn.state.model_state import step as finish_step
from torch import Tensor, nn

from tests.support.llama import Llama, ModelConfig, compile_layers, cross_entropy, init_weights

BETAS = (0.9, 0.95)
FINAL_LR = 0.05  # of the peak, at the last step
AVERAGE_EVERY = 10  # steps, in the last tenth
DIGITS = 5  # of a loss, after the point
TORCHAO_PREFIX = "torchao_"  # begins the name of a run of torchao's: torchao_rowwise
LAST = re.compile(r"(.*\S) last=(\d+)%")


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

    def is_quantized(self, module: nn.Module, _: str) -> bool:
        """Tells torchao which layers to convert: those of mf.quantize_, all but the head."""
        return module is not self.output

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return self.head_loss(x, targets)


@dataclass(frozen=True)
class Plan:
    """A run, whose name is that of its first steps, and the spec of its gradients."""

    spec: RunSpec
    name: str
    wire: str = ""  # "": gradients are not sent
    percent: int = 15  # of the steps: those under the recipe after then=

    @classmethod
    def parse(cls, entry: str, seed: int) -> Plan:
        """Parses an entry of _entries.py, or `RECIPE wire=SPEC then=OTHER last=5%`.

        RECIPE may be a torchao run's name. A name that an entry gives is the whole name of its run.
        """
        text, then, other = entry.partition(THEN)
        text, _, wire = text.partition(WIRE)
        is_named = bool(split_name(text)[0])
        text = f"{text}={BF16}" if text.startswith(TORCHAO_PREFIX) else text
        other, percent = match.groups() if (match := LAST.fullmatch(other)) else (other, 0)
        spec = parse_entry(f"{text}{then}{other}", seed)
        first = spec.name.partition(THEN)[0]
        name = f"{first}{WIRE}{wire}" if wire and not is_named else first
        if spec.then and not is_named:
            name += f"{THEN}{spec.then}" + (f" last={percent}%" if percent else "")
        return cls(replace(spec, name=first), name, wire, int(percent) or cls.percent)

    def first_steps(self, steps: int) -> int:
        """Returns after how many steps the last part begins."""
        return min(round((100 - self.percent) * steps / 100), steps - 1)

    @property
    def recipe(self) -> str:
        return self.spec.name if self.spec.name.startswith(TORCHAO_PREFIX) else self.spec.recipe

    @property
    def file_name(self) -> str:
        spec = replace(self.spec, name=self.name)
        return f"{spec.folder}_seed_{spec.seed}.jsonl.xz"


class Run:
    """One recipe from one seed."""

    def __init__(self, spec: RunSpec, trial: Trial, text: Text, wire: str) -> None:
        self.spec, self.trial, self.text = spec, trial, text
        config = ModelConfig.parse(trial.model, VOCABULARY)
        self.model = LossLlama(config, trial.seq)
        init_weights(self.model, spec.seed)
        self.model.to(trial.device)
        self.parameters = list(self.model.parameters())
        if spec.converts:
            quantize_(self.model, spec.recipe, keep=spec.keep, seed=spec.seed)
        elif spec.name.startswith(TORCHAO_PREFIX):
            convert_by_torchao(
                self.model, spec.name.removeprefix(TORCHAO_PREFIX), self.model.is_quantized
            )
        self.wire = Wire(self.model, list(self.model.layers), wire, spec.seed) if wire else None
        compile_layers(self.model)
        matrices = [p for p in self.parameters if p.dim() >= 2]
        vectors = [p for p in self.parameters if p.dim() < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=trial.lr, betas=BETAS, weight_decay=trial.weight_decay, fused=True
        )
        self.sums = [torch.zeros_like(p) for p in self.parameters]  # for the mean of the weights
        self.added = 0
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.evaluations: dict[int, float] = {}
        self.batches = text.train.batches(text.train.order(spec.seed))
        if len(self.batches) < trial.steps:
            sys.exit(f"--data: expected {trial.steps} batches of text, got {len(self.batches)}")
        self.memory, self.clock = PeakMemory(trial.device), Clock(trial)

    @torch.no_grad()
    def take_over(self, other: Run) -> None:
        """Goes on from where another run of the same weights stands, which stays as it is."""
        torch._foreach_copy_(self.parameters, other.parameters)
        torch._foreach_copy_(self.sums, other.sums)
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.added = other.added
        self.losses, self.norms = [*other.losses], [*other.norms]
        self.evaluations = {**other.evaluations}
        self.clock.rates = [*other.clock.rates]

    def loss(self, windows: Windows, rows_B: Tensor) -> Tensor:
        """Computes the mean loss of a batch, in nats a token."""
        inputs, targets = windows.gather(rows_B)
        with torch.autocast(self.trial.device, product_dtype(self.trial.device)):
            return self.model(inputs, targets)

    def backward(self, rows_B: Tensor, step: int) -> Tensor:
        """Computes .grad of the mean loss of a batch, which it returns."""
        if self.wire is None:
            loss = self.loss(self.text.train, rows_B)
            loss.backward()
            return loss.detach()
        losses = []
        for rows in rows_B.view(RANKS, -1):
            loss = self.loss(self.text.train, rows)
            loss.backward()
            self.wire.send(step)
            losses.append(loss.detach())
        self.wire.receive()
        return torch.stack(losses).mean()

    def train_step(self, step: int, rows_B: Tensor) -> tuple[Tensor, Tensor]:
        """Trains step `step`, from 1; returns the loss and the gradient's norm, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.trial.rate(step)
        loss = self.backward(rows_B, step)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.trial.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.spec.converts:
            finish_step(self.model)
        last = self.trial.steps
        if step == last or (step > 0.9 * last and step % AVERAGE_EVERY == 0):
            with torch.no_grad():
                torch._foreach_add_(self.sums, self.parameters)
            self.added += 1
        return loss, norm

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

    def train_to(self, last: int) -> None:
        """Trains the steps that are left up to step `last`, with the evaluations among them."""
        trial = self.trial
        begin = len(self.losses)
        self.clock.start(begin)
        for step, rows_B in enumerate(self.batches[begin:last], start=begin + 1):
            loss, norm = self.train_step(step, rows_B)
            self.losses.append(loss)
            self.norms.append(norm)
            if step % trial.eval_every == 0 or step == trial.steps:
                self.clock.stop(step)
                self.parts = self.evaluate()
                self.evaluations[step] = statistics.mean(self.parts)
                print(
                    f"{self.spec.name}: step {step}, val {self.evaluations[step]:.4f}, "
                    f"{self.clock.tokens_per_s:,.0f} tokens/s, {self.clock.seconds:.0f} s",
                    flush=True,
                )
                self.clock.start(step)

    def record(self) -> dict[str, Any]:
        """Trains to the last step and evaluates the mean of the weights; returns what was found."""
        self.train_to(self.trial.steps)
        self.average_weights()
        average = self.evaluate()
        return {
            "val": self.evaluations[self.trial.steps],
            "average": statistics.mean(average),
            "evaluations": self.evaluations,
            "parts": rounded(self.parts),
            "average_parts": rounded(average),
            "loss": rounded(torch.stack(self.losses).tolist()),
            "norm": rounded(torch.stack(self.norms).tolist()),
            "tokens_per_s": round(self.clock.tokens_per_s),
            "peak_gib": round(self.memory.bytes() / 2**30, 2),
        }


def train_runs(plans: list[Plan], trial: Trial, data: Path, out: Path, limit: float) -> None:
    """Trains the runs that have no record yet, while another one ends within `limit` seconds."""
    missing = [p for p in plans if not any((f / p.file_name).exists() for f in (out, RESULTS))]
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
    seconds, shared, trunk = 0.0, None, None  # the run of first steps, and what it depends on
    for plan in missing:
        start, spec = time.perf_counter(), plan.spec
        ready = start  # when its first steps have run
        if start - begin + seconds > limit:
            print(f"{plan.name}, seed {spec.seed}: left to another command")
            return
        said = {
            "name": plan.name,
            "recipe": plan.recipe,
            "keep": spec.keep,
            **({"wire": plan.wire} if plan.wire else {}),
            "seed": spec.seed,
            "trial": asdict(trial),
            "tokens": tokens.fingerprint,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if trial.device == "cuda" else "cpu",
            "date": time.strftime("%Y-%m-%d"),
        }
        if not spec.then:
            run = Run(spec, trial, text, plan.wire)
        else:
            first, last = spec.parts
            begin_of_last = plan.first_steps(trial.steps)
            key = (first.recipe, first.keep, first.seed, plan.recipe, plan.wire)
            if shared is None or trunk != key or len(shared.losses) > begin_of_last:
                trunk, shared = key, Run(first, trial, text, plan.wire)
            shared.train_to(begin_of_last)
            ready = time.perf_counter()
            run = Run(replace(last, name=spec.then), trial, text, plan.wire)
            run.take_over(shared)
            said |= {"then": spec.then, "percent": plan.percent}
        found = run.record()
        end = time.perf_counter()
        seconds = end - ready
        write_record(out / plan.file_name, {**said, "seconds": round(end - start), **found})
        del run
        gc.collect()  # the compiled code of a run holds its model in a cycle


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="FOLDER/text of parity_data.py")
    parser.add_argument("--out", type=Path, default=timing.ROOT / "build" / "parity" / "runs")
    parser.add_argument(
        "--recipes",
        default=BF16,
        help="PRESET[ keep=POLICY][ wire=SPEC][ then=RECIPE[ last=5%]], torchao_…",
    )
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME=TEXT")
    parser.add_argument("--seeds", default="1,2,3", help="of weights and order")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of this command")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="images of the curves")
    for field in fields(Trial):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default)
    arguments = parser.parse_args()
    trial = Trial(**{field.name: getattr(arguments, field.name) for field in fields(Trial)})
    entries = [*filter(None, arguments.recipes.split(",")), *arguments.recipe]
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    if arguments.data:
        plans = [Plan.parse(entry, seed) for seed in seeds for entry in entries]
        train_runs(plans, trial, arguments.data, arguments.out, arguments.limit)
    records = records_in([RESULTS, arguments.out])
    print_tables(records)
    if arguments.plot:
        draw_images(records, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
