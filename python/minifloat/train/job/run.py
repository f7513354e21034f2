"""A run: trains the model under one recipe, from its initial weights or from a checkpoint.

    for step in 1 .. steps:
        the first of the last steps, with `then=`: the model again, under the other recipe
        every MEASURE_EVERY steps: the speed of light, outside the steps' time
        every inspect_every steps: the inspector, outside the steps' time
        batch(seed, step) -> forward, backward in `product_dtype` -> clip -> AdamW -> mf.step
            a loss or gradient that is not finite: its first place, and the end of the run
        every eval_every steps: the fixed validation set
        every checkpoint_every steps, and at a stop: a checkpoint

Parameters and optimizer are fp32. The bytes of the result depend only on the checkpoint and the
step.
"""

import gc
import math
import time
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from ...moe.ranks.gradients import average_expert_gradients
from ...nn.convert.quantize import quantize_
from ...nn.state.model_state import load_training_state, training_state
from ...nn.state.model_state import step as finish_step
from ..checks import Json, TrainError, say
from ..config import RunSpec, TrainConfig
from ..data import Batches
from ..durable_files import write_atomically
from ..model import measure
from ..model.llama import build_model
from . import checkpoint, processes
from .looks import Looks, is_finite

BETAS = (0.9, 0.95)
FINAL_LR = 0.1  # of the peak, at the last step
Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Job:
    """The settings and state that all runs of a job share."""

    config: TrainConfig
    batches: Batches
    tokens: str  # their fingerprint
    out: Path
    starts: Mapping[str, Path]  # the checkpoint that a run resumes from, by the run's name
    light: measure.SpeedOfLight
    stop: Event  # set by a signal on this rank
    world: processes.World

    def should_stop(self) -> bool:
        """Tells whether any rank is to stop. All ranks call it together."""
        return self.world.total(self.stop.is_set()) > 0


def prepare_model(run: RunSpec, config: TrainConfig) -> tuple[nn.Module, Pairs, Pairs]:
    """Builds the model under the run's recipe; bf16 converts nothing.

    Args:
        run: of one recipe.

    Returns:
        (model, converted (name, recipe), skipped (name, reason)).
    """
    model = build_model(config.model, config.seq, run.seed, config.device)
    if not run.converts:
        return model, [], []
    try:
        report = quantize_(model, run.recipe, keep=run.keep, seed=run.seed, verbose=False)
    except (ValueError, TypeError) as error:
        raise TrainError(f"recipe {run.name}: {error}") from error
    return model, report.converted, report.skipped


def learning_rate(step: int, config: TrainConfig) -> float:
    """Returns the rate of a step: linear warmup to config.lr, then a cosine to a tenth of it."""
    warmup = min(config.warmup, config.steps // 2)
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / max(config.steps - warmup, 1)
    return config.lr * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Builds AdamW. Matrices decay, norm weights do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    decay = config.weight_decay
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, fused=True)


def compile_layers(model: nn.Module) -> None:
    """Compiles each layer, and forgets the code of other models: its number is limited."""
    torch.compiler.reset()
    for layer in cast(nn.ModuleList, model.layers):
        layer.compile()


class Run:
    """The state of one run, with its training step, evaluation and checkpoint.

    It begins at the step of the checkpoint that it resumes from, which `restore` loads, else at 0.
    """

    def __init__(self, spec: RunSpec, job: Job) -> None:
        self.spec, self.job, self.config, self.world = spec, job, job.config, job.world
        self.folder = checkpoint.folder_of(job.out, spec)
        self.checkpoints = self.folder / "checkpoints"
        self.fault = ""  # what was not finite in the last step
        self.start = job.starts.get(spec.name)
        self.step: int = checkpoint.read_meta(self.start)["step"] if self.start else 0
        self.tokens: measure.Tokens = {}  # of each expert in the last step
        self.memory = measure.PeakMemory(self.config.device)
        self.options = dcp.StateDictOptions(full_state_dict=self.world.size > 1)
        self.validation = job.batches.validation_set(self.config.eval_batches)
        self.build()

    def next_part(self) -> RunSpec:
        """Returns the part of the run that its next step belongs to."""
        return self.spec.part_of(self.step + 1, self.config.steps)

    def build(self) -> None:
        """Builds the model under the recipe of the next step, and what holds the model."""
        self.part = self.next_part()
        self.model = self.world.shard(
            prepare_model(self.part, self.config)[0],
            self.config.expert_parallel,
            self.config.expert_capacity,
        )
        if self.config.compile:
            compile_layers(self.model)
        self.optimizer = make_optimizer(self.model, self.config)
        self.loss = measure.loss_in_product_dtype(self.model, self.config.device)
        self.looks = Looks(self.model, self.loss, self.world, self.folder)

    def state(self) -> tuple[Json, Json]:
        """Returns whole parameters, buffers and the optimizer's state, copied only if sharded."""
        return dcp.get_state_dict(self.model, self.optimizer, options=self.options)

    def load(self, model: Json, optimizer: Json) -> None:
        """Loads what `state` returned."""
        dcp.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=self.options,
        )

    def change_recipe(self) -> None:
        """Builds the model again under the recipe of the next step, with the same state.

        The state of converted layers ends with them: the new ones have that of a first step. All
        this is outside the steps' time and their peak memory.
        """
        self.looks.close()
        with self.memory.left_out():
            state = tree_map_only(Tensor, Tensor.cpu, self.state())
            del self.model, self.optimizer, self.loss, self.looks
            gc.collect()  # compiled code holds its model in a cycle
            self.build()
            self.load(*state)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Returns this process's sequences of the next step."""
        return self.world.share(self.job.batches.training(self.spec.seed, self.step))

    def train_step(self) -> dict[str, float]:
        """Runs an optimizer step, or where loss or gradient are not finite, finds out why.

        Returns:
            loss (nats a token), lr, grad_norm, experts' load and dropped rows, and the timings.
        """
        start = time.perf_counter()
        lr = learning_rate(self.step + 1, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = self.batch()
        loss = self.loss(*batch)
        torch.autograd.backward(loss)
        average_expert_gradients(self.model)
        norm = processes.clip_gradients(self.model.parameters(), self.config.clip)
        values = {"loss": self.world.mean(loss), "lr": lr, "grad_norm": norm.item()}
        if not is_finite(values):
            self.fault = self.looks.explain(batch)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        finish_step(self.model)
        if self.config.model.mixtures:
            self.tokens = measure.read_tokens(self.model)
            dropped = float(self.world.total(processes.dropped_rows(self.model)))
            values |= {"expert_load": measure.load_of(self.tokens), "dropped_rows": dropped}
        self.step += 1
        seconds = time.perf_counter() - start
        return values | {
            "tokens_per_s": self.config.batch * self.config.seq / seconds,
            "speed_of_light": self.job.light.seconds / seconds,
            "step_ms": 1e3 * seconds,
        }

    def measure_light(self) -> None:
        """Measures the speed of light again, outside the steps' time and their peak memory."""
        with self.memory.left_out():
            self.job.light.measure()
        self.world.wait()  # a rank that ends first does not wait for the others in its next step

    def look(self) -> dict[str, float]:
        """Inspects the next step, outside the steps' time and their peak memory."""
        with self.memory.left_out():
            values = self.looks.look(self.batch())
        processes.forget_dropped(self.model)
        self.world.wait()
        return values

    def evaluate(self) -> dict[str, float]:
        """Computes the mean loss of the validation set (nats a token) under the run's recipe."""
        start = time.perf_counter()
        self.model.eval()  # evaluation does not advance the random state
        with torch.no_grad():
            shares = map(self.world.share, self.validation)
            losses = [self.world.mean(self.loss(*share)) for share in shares]
        self.model.train()
        processes.forget_dropped(self.model)  # a step's record has those of training
        return {"val_loss": sum(losses) / len(losses), "seconds": time.perf_counter() - start}

    def save(self) -> None:
        """Writes a checkpoint: model, optimizer, state of the converted layers."""
        model, optimizer = self.state()
        own = training_state(self.model)
        state = {"model": model, "optimizer": optimizer, "minifloat": own}
        meta = {
            "identity": checkpoint.identity_of(self.spec, self.config, self.job.tokens),
            "peak_bytes": self.memory.bytes(),
            "torch": torch.__version__,
        }
        checkpoint.save(self.checkpoints, self.step, state, meta)

    def save_weights(self) -> None:
        """Writes weights.pt; equal values have equal bytes."""
        weights = {name: processes.whole(t).cpu() for name, t in self.model.state_dict().items()}
        recipes = {"recipe": self.spec.recipe, "then": self.spec.then}
        meta = {"config": asdict(self.config), **recipes, "step": self.step}
        path = self.folder / "weights.pt"
        write_atomically(path, lambda file: torch.save({"model": weights, **meta}, file))

    def restore(self) -> None:
        """Loads the run's checkpoint, if the job has found and verified one.

        That of the last step before a change of recipe has state of the layers that end there.
        """
        if (found := self.start) is None:
            return
        meta = checkpoint.read_meta(found)
        try:
            state = torch.load(found / "state.pt", map_location="cpu", weights_only=True)
            self.load(state["model"], state["optimizer"])
            if self.part == self.spec.part_of(self.step, self.config.steps):
                load_training_state(self.model, state["minifloat"])
        except Exception as error:  # torch's loaders raise any type
            if processes.is_of_a_collective(error):
                raise
            raise TrainError(f"{found}: cannot load it: {checkpoint.reason(error)}") from error
        self.memory.highest = meta["peak_bytes"]
        if meta["torch"] != torch.__version__:
            tqdm.write(
                f"{self.spec.name}: the checkpoint is torch {meta['torch']}'s, this is "
                f"{torch.__version__}: expect results that differ in the last bits"
            )


def train_run(spec: RunSpec, job: Job, title: str) -> Json:
    """Trains a run to its end, or to a stop; returns its status, step and peak memory."""
    config = job.config
    run = Run(spec, job)
    run.restore()
    status, first = "finished", run.step
    with (
        closing(checkpoint.Metrics(job.out, spec.name, spec.folder, run.step)) as metrics,
        warnings.catch_warnings(),
        tqdm(desc=title, total=config.steps, initial=run.step, dynamic_ncols=True) as bar,
    ):
        # Each step's record has the dropped rows.
        warnings.filterwarnings("ignore", message=r"mf\.step: rank \d+ dropped")
        while run.step < config.steps:
            if run.part != run.next_part():
                run.change_recipe()
            if (run.step - first) % measure.MEASURE_EVERY == 0:
                run.measure_light()
            every = config.inspect_every
            if every and run.part.converts and (run.step + 1) % every == 0:
                metrics.write("inspect", run.step + 1, run.look())
            values = run.train_step()
            metrics.write("train", run.step, values)
            if run.tokens and run.step > config.steps - measure.LAST:
                metrics.write("experts", run.step, {"tokens": run.tokens})
            show(bar, values)
            if run.fault:
                status = f"diverged at step {run.step}"
                say(f"{spec.name}: not finite at step {run.step}: {run.fault}")
                break
            is_last = run.step == config.steps
            if run.step % config.eval_every == 0 or is_last:
                metrics.write("eval", run.step, run.evaluate())
            stopping = job.should_stop() and not is_last
            if stopping or run.step % config.checkpoint_every == 0 or is_last:
                metrics.sync()
                run.save()
            if stopping:
                status = f"stopped at step {run.step}"
                break
    run.looks.close()
    if not status.startswith("stopped"):
        run.save_weights()
    peak = run.memory.bytes()
    return {"status": status, "step": run.step, "peak": peak, "not_finite": run.fault}


def show(bar: "tqdm[None]", values: Mapping[str, float]) -> None:
    """Shows loss, experts' load, tokens/s and the share of the speed of light beside the bar."""
    load = ""
    if "expert_load" in values:
        load = f"load {values['expert_load']:.2f}, dropped {values['dropped_rows']:.0f}, "
    bar.set_postfix_str(
        f"loss {values['loss']:.3f}, {load}{values['tokens_per_s'] / 1e3:.1f}k tokens/s, "
        f"{100 * values['speed_of_light']:.0f}% of speed of light",
        refresh=False,
    )
    bar.update()
