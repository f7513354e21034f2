"""The runs of pretrain.py: the entries of --recipes, and what the Trainer calls in a run."""

import math
import re
import statistics
import time
from dataclasses import dataclass

import minifloat as mf
import torch
from minifloat.transformers import TrainingStateCallback
from transformers import TrainerCallback

SEED = 1  # of entries without another
COMPLETE = "complete"  # a file in each checkpoint that was written to its end
# A comma separates entries unless it belongs to a product: `...*e4m3/tensor,fast dgrad=...`.
SEPARATOR = re.compile(r",(?!\s*fast(?![\w=]))")
ENTRY = re.compile(
    r"(?:(?!(?:fprop|dgrad|wgrad)=)(?P<name>[A-Za-z_][\w.+-]*)=)?"
    r"(?P<text>[^@=][^@]*?) ?(?:@ ?(?P<seed>\d{1,18}))?"
)


@dataclass(frozen=True)
class Run:
    """One run. text: its recipe as mf.quantize_ takes it, such as `nvfp4 keep=nvfp4_paper`"""

    name: str
    text: str
    seed: int

    @property
    def converts(self):
        return self.text.split()[0] != "bf16"

    @property
    def folder(self):
        """The name as a folder: bf16 (seed 2) becomes bf16_seed_2."""
        return re.sub(r"[^\w.+-]+", "_", self.name).strip("_")

    def convert(self, model):
        """Converts a model in place; bf16 converts nothing."""
        if self.converts:
            mf.quantize_(model, self.text, seed=self.seed)


def parse_runs(text):
    """Parses the entries of --recipes.

    Raises:
        ValueError: an entry is not as it should be, or two have one name.
    """
    runs = []
    for entry in SEPARATOR.split(text):
        entry = " ".join(entry.split())
        if not (found := ENTRY.fullmatch(entry)):
            expected = "[NAME=]TEXT[ keep=POLICY][@SEED]"
            raise ValueError(f"--recipes: expected {expected}, got {entry!r}")
        seed = int(found["seed"] or SEED)
        name = found["name"] or found["text"] + (f" (seed {seed})" if seed != SEED else "")
        runs.append(Run(name, found["text"], seed))
    folders = [run.folder for run in runs]
    if "" in folders or len({*folders}) < len(folders):
        raise ValueError(f"--recipes: expected different names, got {', '.join(folders)}")
    return runs


class Watch(TrainerCallback):
    """Times steps, ends a run that diverges, evaluates the last step, marks whole checkpoints."""

    def __init__(self):
        self.seconds, self.is_finite = [], True

    def on_step_begin(self, *args, **named):
        self.begin = time.perf_counter()

    def on_step_end(self, args, state, control, **named):
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.begin)
        if state.global_step == state.max_steps:
            control.should_log = control.should_evaluate = True
            control.should_save = False  # from there the Trainer would take one step more

    def on_log(self, args, state, control, logs=None, **named):
        if "loss" not in logs:
            return
        self.is_finite = math.isfinite(logs["loss"]) and math.isfinite(logs["grad_norm"])
        if not self.is_finite:
            control.should_training_stop = True
            control.should_evaluate = control.should_save = False
        state.log_history[-1]["step_seconds"] = statistics.median(self.seconds)
        self.seconds = []

    def on_save(self, args, state, control, **named):
        (TrainingStateCallback.folder_of(args, state) / COMPLETE).touch()
