"""The trial of gpu_parity.py: its settings, the text on the device, and one run of training."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import _gpu_timing as timing  # noqa: F401  first: it makes minifloat importable
import torch
from _entries import RunSpec
from _measure import PeakMemory, product_dtype
from _parity_tokens import VOCABULARY
from _parity_wire import RANKS, Wire
from _peers import OF_PEERS, convert_by_peer
from minifloat.nn.convert.quantize import quantize_
from minifloat.nn.state.model_state import load_training_state, training_state
from minifloat.nn.state.model_state import step as finish_step
from torch import Tensor, nn

from tests.support.llama import Llama, ModelConfig, compile_layers, cross_entropy, init_weights

BETAS = (0.9, 0.95)
FINAL_LR = 0.05  # of the peak, at the last step
AVERAGE_EVERY = 10  # steps, in the last tenth
DIGITS = 5  # of a loss, after the point


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
    bf16_steps: int = 0  # first steps, which are bf16's in each run: those of one seed share them

    @property
    def said(self) -> dict[str, Any]:
        """What a record says of its trial."""
        return {k: value for k, value in asdict(self).items() if k != "bf16_steps" or value}

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step, from 1."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        progress = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.lr * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


# By the name of --trial. Each has its folder of records.
TRIALS = {
    "dense": Trial(),
    # 124M parameters: peers' blocks of 128 must divide the widths, and 2752 is no multiple.
    "late": Trial(model="1024,8,16,4,2816", bf16_steps=1000, eval_every=1500),
    # 121M of 391M parameters active: 16 experts, 2 and a shared one a token. 24 windows a step, as
    # torchtitan's trial.
    "experts": Trial(
        model="1024,8,16,4,2752,896,16,2,1", batch=24, bf16_steps=1000, eval_every=1500
    ),
    "long": Trial(steps=12_000, eval_every=3000),  # reads the text 3.3 times
}


class Windows:
    """Windows of seq + 1 tokens on the device; those of one text share only their last token."""

    def __init__(self, ids: Any, trial: Trial) -> None:
        self.ids = torch.from_numpy(ids.astype("int32")).to(trial.device)
        self.count = (len(ids) - 1) // trial.seq
        self.seq, self.batch = trial.seq, trial.batch
        self.places = torch.arange(trial.seq + 1, device=trial.device)

    def orders(self, seed: int) -> Iterator[Tensor]:
        """Yields an order of all windows for each time that the text is read."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randperm(self.count, generator=generator)

    def batches_of(self, seed: int, steps: int) -> list[Tensor]:
        """Returns the batches of `steps` steps: the whole text, each time in another order."""
        if self.count < self.batch:
            sys.exit(f"--data: expected {self.batch} windows of text, got {self.count}")
        batches = chain.from_iterable(map(self.batches, self.orders(seed)))
        return list(islice(batches, steps))

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
        """Tells peers which layers to convert: those of mf.quantize_, all but the head."""
        return module is not self.output

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return self.head_loss(x, targets)


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
        elif spec.name.startswith(OF_PEERS):
            convert_by_peer(self.model, spec.name, self.model.is_quantized)
        # Experts are balanced by mf.step under bf16 too.
        self.has_state = spec.converts or config.experts > 0
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
        self.parts: list[float] = []  # of the last evaluation
        self.batches = text.train.batches_of(spec.seed, trial.steps)
        self.memory, self.clock = PeakMemory(trial.device), Clock(trial)

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
        if self.has_state:
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

    def state(self) -> dict[str, Any]:
        """Returns what the steps that are left depend on, and what those behind found."""
        return {
            "model": self.model.state_dict(),
            "training": training_state(self.model) if self.has_state else {},
            "optimizer": self.optimizer.state_dict(),
            "sums": self.sums,
            "added": self.added,
            "losses": self.losses,
            "norms": self.norms,
            "evaluations": self.evaluations,
            "parts": self.parts,
            "rates": self.clock.rates,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state of the same run."""
        self.model.load_state_dict(state["model"])
        if state["training"]:
            load_training_state(self.model, state["training"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sums, self.added = state["sums"], state["added"]
        self.losses, self.norms = state["losses"], state["norms"]
        self.evaluations, self.parts = state["evaluations"], state["parts"]
        self.clock.rates = state["rates"]

    def train_to(self, last: int, deadline: float = math.inf) -> bool:
        """Trains the steps that are left up to step `last`, with the evaluations among them.

        Returns:
            Whether step `last` was reached before time.perf_counter() was at the deadline.
        """
        trial = self.trial
        begin = len(self.losses)
        self.clock.start(begin)
        for step, rows_B in enumerate(self.batches[begin:last], start=begin + 1):
            if time.perf_counter() >= deadline:
                return False
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
        return True

    def record(self) -> dict[str, Any]:
        """Evaluates the mean of the weights after the last step; returns what was found."""
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
