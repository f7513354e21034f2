"""What a recipe costs in loss over 3,000 steps of a Llama of 122M parameters, paired with bf16.

    python benchmarks/gpu_parity.py --data FOLDER --recipes bf16,fp8_rowwise --seeds 1,2,3 --out OUT

FOLDER is what `parity_data.py` made. A run trains from the weights and in the order of its seed, so
runs of one seed differ by the recipe, and by what another GPU or library changes.

--trial dense     as above; every window of text is read at most once
        late      of hidden width 2816, and the first third of the steps is bf16's in every run:
                  those of one seed share it, so that they differ by less than runs of their own
                  would
        experts   late, with 16 experts in place of each feed-forward but the first, and 24
                  windows a step, as torchtitan's trial
        long      dense, 12,000 steps: the text 3.3 times, each time in another order

    step     loss in bf16 autocast, fp32 parameters -> clip -> AdamW -> mf.step
    rate     linear warm-up, then a cosine to FINAL_LR of the peak
    val      mean loss of the whole validation text under the run's recipe
    average  the same of the mean of the weights at every AVERAGE_EVERY-th step of the last tenth

Entries are those of _entries.py, `RECIPE then=OTHER` among them: OTHER is the recipe of the
last 15% of the steps, or of the last 5% by `RECIPE then=OTHER last=5%`. Entries that follow each
other with the same RECIPE, the longest last part first, share the steps before: they run once.
RECIPE alone goes on from those too, if it comes after them.

An entry `RECIPE wire=SPEC` passes gradients through the wire format of quantize_gradients_, as
four ranks would send them: each has a quarter of the batch. Compare it with `RECIPE wire=bf16`.

A run that has ended leaves OUT/NAME_seed_SEED.jsonl.xz: what was run, the loss and the gradient's
norm of each step, evaluations, and the loss of each part of the validation text. A run with such a
file in OUT or among the trial's records is not trained again: research/parity has those of dense,
and a folder for each other trial. After --limit seconds the run at hand leaves its state,
OUT/NAME_seed_SEED.pt, from which the same command goes on to the same bits. The state after steps
that runs share is OUT/steps_END_seed_SEED_HASH.pt, from which other commands go on too, since a
second training has other bits on a GPU: start them when it is there. Without --data the
tables of all records are printed; --plot FOLDER draws their curves. Several runs may share a GPU
by tools/with_mps.sh: their records say so, and their speed is in no table.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import math
import os
import re
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import _gpu_timing as timing  # first: it makes minifloat importable
import torch
from _entries import THEN, RunSpec, parse_entry, split_name
from _parity_records import BF16, RESULTS, draw_images, print_tables, records_in, write_record
from _parity_run import TRIALS, Run, Text, Trial, Windows
from _parity_tokens import load_tokens
from _parity_wire import WIRE
from _peers import OF_PEERS

DENSE = "dense"  # the trial whose records are in RESULTS itself
LAST = re.compile(r"(.*\S) last=([1-9]\d?)%")


def shown_recipe(spec: RunSpec) -> str:
    """Returns a run's recipe, or the name of a peer's run, which has none here."""
    return spec.name if spec.name.startswith(OF_PEERS) else spec.recipe


class Part(NamedTuple):
    """Steps under one recipe: which, the last of them, and the spec of their gradients."""

    spec: RunSpec
    end: int
    wire: str = ""


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

        RECIPE may be a peer's, torchao_… or te_…. A name that an entry gives is the whole name of
        its run.
        """
        text, then, other = " ".join(entry.split()).partition(THEN)
        text, _, wire = text.partition(WIRE)
        is_named = bool(split_name(text)[0])
        text = f"{text}={BF16}" if text.startswith(OF_PEERS) else text
        other, percent = match.groups() if (match := LAST.fullmatch(other)) else (other, 0)
        spec = parse_entry(f"{text}{then}{other}", seed)
        first = spec.name.partition(THEN)[0]
        name = f"{first}{WIRE}{wire}" if wire and not is_named else first
        if spec.then and not is_named:
            name += f"{THEN}{spec.then}" + (f" last={percent}%" if percent else "")
        return cls(replace(spec, name=first), name, wire, int(percent) or cls.percent)

    def parts(self, trial: Trial) -> list[Part]:
        """Returns the parts that follow each other, of which runs share all but the last."""
        *firsts, last = self.spec.parts
        if trial.bf16_steps >= trial.steps:
            sys.exit(f"--steps: expected more than {trial.bf16_steps}, got {trial.steps}")
        found = [Part(RunSpec(BF16, BF16, last.seed), trial.bf16_steps)] if trial.bf16_steps else []
        for first in firsts:
            end = min(round((100 - self.percent) * trial.steps / 100), trial.steps - 1)
            if end <= trial.bf16_steps:
                sys.exit(f"--trial: expected a last part of less than {self.percent}% of the steps")
            found.append(Part(first, end, self.wire))
            last = replace(last, name=self.spec.then)
        return [*found, Part(last, trial.steps, self.wire)]

    @property
    def recipe(self) -> str:
        return shown_recipe(self.spec)

    @property
    def file_name(self) -> str:
        spec = replace(self.spec, name=self.name)
        return f"{spec.folder}_seed_{spec.seed}.jsonl.xz"

    @property
    def state_name(self) -> str:
        return self.file_name.replace(".jsonl.xz", ".pt")


def load_state(path: Path, device: str) -> dict[str, Any]:
    """Returns a run's state that a command has left; empty: none."""
    if not path.exists():
        return {}
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes a state under its name when it is whole: another command may wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    torch.save(state, partial)
    partial.replace(path)


class Trainer:
    """Trains runs one after the other, until a deadline.

    out: of records, and of the state of the run that the deadline ends.
    """

    def __init__(self, trial: Trial, data: Path, out: Path, limit: float) -> None:
        self.trial, self.out = trial, out
        begin = time.perf_counter()
        self.deadline = begin + limit
        tokens = load_tokens(data)
        print(
            f"{len(tokens.train):,} training and {len(tokens.validation):,} validation tokens in "
            f"{time.perf_counter() - begin:.0f} s, sha256 {tokens.fingerprint}",
            flush=True,
        )
        self.text = Text(Windows(tokens.train, trial), Windows(tokens.validation, trial))
        self.fingerprint = tokens.fingerprint

    def said(self, plan: Plan) -> dict[str, Any]:
        """Returns what a record says of its run."""
        spec = plan.spec
        return {
            "name": plan.name,
            "recipe": plan.recipe,
            "keep": spec.keep,
            **({"wire": plan.wire} if plan.wire else {}),
            "seed": spec.seed,
            "trial": self.trial.said,
            "tokens": self.fingerprint,
            "torch": str(torch.__version__),
            **({"then": spec.then, "percent": plan.percent} if spec.then else {}),
        }

    def read_state(self, plan: Plan) -> dict[str, Any]:
        """Returns the state that a deadline has left of the run; empty: none."""
        path = self.out / plan.state_name
        state = load_state(path, self.trial.device)
        if state and state["said"] != self.said(plan):
            sys.exit(f"{path}: expected a state of {self.said(plan)}, got one of {state['said']}")
        return state

    def new_run(self, part: Part, state: dict[str, Any], before: dict[str, Any]) -> Run:
        """Returns the run of a part, at a state of it, else after the part before."""
        run = Run(part.spec, self.trial, self.text, part.wire)
        if state:
            run.load(state)
        elif before:
            run.load(before | {"training": {}})  # the state of that part's recipe stays behind
        return run

    def train_steps(self, plan: Plan, state: dict[str, Any]) -> tuple[Run, int, bool]:
        """Trains the steps that are left of a run.

        Returns:
            The run of the part at hand, which part that is, and whether the last one has ended.
        """
        parts = plan.parts(self.trial)
        keys = self.keys_of(parts)
        own = state.get("part", 0)
        for begin in reversed(range(own, len(parts))):  # the last part that has a state
            found = self.read_shared(keys[begin], parts[begin], state if begin == own else {})
            if found:
                break
        before: dict[str, Any] = {}
        state = found
        for i, part in enumerate(parts[begin:-1], start=begin):
            if not state or len(state["losses"]) < part.end:
                run = self.new_run(part, state, before)
                if not run.train_to(part.end, self.deadline):
                    return run, i, False
                state = self.keep_shared(keys[i], part, run)
            before, state = state, {}
        run = self.new_run(parts[-1], state, before)
        del before
        return run, len(parts) - 1, run.train_to(parts[-1].end, self.deadline)

    def keys_of(self, parts: list[Part]) -> list[str]:
        """Returns what the state of each part depends on, besides its step."""
        key = f"{self.trial.said} {self.fingerprint} {torch.__version__}"
        keys = []
        for part in parts:
            spec = part.spec
            keys.append(f"{key} {(shown_recipe(spec), spec.keep, spec.seed, part.wire)}")
            key = f"{keys[-1]} {part.end}"
        return keys

    def shared_path(self, key: str, part: Part, step: int | str) -> Path:
        """Returns where the state after a step of a part that runs share is."""
        number = hashlib.sha256(key.encode()).hexdigest()[:12]
        return self.out / f"steps_{step}_seed_{part.spec.seed}_{number}.pt"

    def read_shared(self, key: str, part: Part, own: dict[str, Any]) -> dict[str, Any]:
        """Returns the last state of a part: the run's own, or one that a command has kept."""
        paths = self.out.glob(self.shared_path(key, part, "*").name)
        steps = [int(path.name.split("_")[1]) for path in paths]
        last = max((step for step in steps if step <= part.end), default=0)
        if last <= len(own.get("losses", ())):
            return own
        return load_state(self.shared_path(key, part, last), self.trial.device)

    def keep_shared(self, key: str, part: Part, run: Run) -> dict[str, Any]:
        """Keeps and returns the state after a shared part: another command's, where it was first.

        A second training has other bits.
        """
        path = self.shared_path(key, part, part.end)
        state = load_state(path, self.trial.device)
        if not state:
            state = run.state()
            save_state(path, state)
        return state

    def train(self, plan: Plan) -> bool:
        """Trains a run and writes its record, or at the deadline its state: then returns False."""
        start, state = time.perf_counter(), self.read_state(plan)
        path = self.out / plan.state_name
        run, part, has_ended = self.train_steps(plan, state)
        seconds = time.perf_counter() - start + state.get("seconds", 0.0)
        if not has_ended:
            said = {"said": self.said(plan), "seconds": seconds, "part": part}
            save_state(path, run.state() | said)
            print(f"{plan.name}, seed {plan.spec.seed}: step {len(run.losses)}, state in {path}")
            return False
        device = torch.cuda.get_device_name() if self.trial.device == "cuda" else "cpu"
        found = run.record()
        said = self.said(plan) | {"device": device, "date": time.strftime("%Y-%m-%d")}
        if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:  # tools/with_mps.sh: others run beside it
            said["shares_gpu"] = True
        write_record(self.out / plan.file_name, {**said, "seconds": round(seconds), **found})
        path.unlink(missing_ok=True)
        return True


def train_runs(
    plans: list[Plan], trial: Trial, data: Path, folders: list[Path], limit: float
) -> None:
    """Trains the runs that have no record in `folders` for `limit` seconds; writes to the last."""
    for plan in plans:
        plan.parts(trial)  # ends the program where a plan has none
    missing = [p for p in plans if not any((f / p.file_name).exists() for f in folders)]
    if not missing:
        return
    trainer = Trainer(trial, data, folders[-1], limit)
    for plan in missing:
        if not trainer.train(plan):
            return
        gc.collect()  # the compiled code of a run holds its model in a cycle


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="FOLDER/text of parity_data.py")
    parser.add_argument(
        "--out", type=Path, help="None: build/parity/runs, of another trial its folder there"
    )
    parser.add_argument(
        "--recipes",
        default=BF16,
        help="PRESET[ keep=POLICY][ wire=SPEC][ then=RECIPE[ last=5%%]], torchao_…, te_…",
    )
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME=TEXT")
    parser.add_argument("--seeds", default="1,2,3", help="of weights and order")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of this command")
    parser.add_argument("--trial", default=DENSE, choices=TRIALS)
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="images of the curves")
    for field in fields(Trial):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), help="None: the trial's")
    arguments = parser.parse_args()
    given = {field.name: getattr(arguments, field.name) for field in fields(Trial)}
    changes = {name: value for name, value in given.items() if value is not None}
    trial = replace(TRIALS[arguments.trial], **changes)
    folder = "" if arguments.trial == DENSE else arguments.trial
    out = arguments.out or timing.ROOT / "build" / "parity" / "runs" / folder
    folders = [out] if changes else [RESULTS / folder, out]
    entries = [*filter(None, arguments.recipes.split(",")), *arguments.recipe]
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    if arguments.data:
        plans = [Plan.parse(entry, seed) for seed in seeds for entry in entries]
        train_runs(plans, trial, arguments.data, folders, arguments.limit)
    records = records_in(folders)
    print_tables(records)
    if arguments.plot:
        draw_images(records, folder, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
