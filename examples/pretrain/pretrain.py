"""Trains a small Llama from scratch once a recipe, side by side, with Hugging Face's Trainer.

    python examples/pretrain/pretrain.py [--recipes "bf16,nvfp4 keep=nvfp4_paper"] [--data FOLDER]
        [--steps N] [--model DIM,LAYERS,HEADS,KV_HEADS,FFN] [--out runs/train] [--resume]

Runs of the same seed have the same initial weights and the same batches. An entry of --recipes is
[NAME=]TEXT[ keep=POLICY][@SEED]; TEXT is a preset, a recipe written out, or a map of module names.
Another SEED shows the noise of the comparison. All other options are the Trainer's:
--learning_rate 1e-3, --torch_compile, --report_to tensorboard, --use_cpu, --full_determinism.

OUT/report.md, loss.png       the table and the picture
OUT/runs/RUN/                 the model and checkpoints, which transformers loads
OUT/job.json, tokens.npz      what --resume reads: it goes on after the last complete checkpoint
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with more, Trainer uses torch's DataParallel

import numpy as np
import torch
from minifloat.transformers import TrainingStateCallback
from report import baseline_of, write_report
from runs import COMPLETE, Watch, parse_runs
from text import Windows, read_tokens
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

DEFAULTS = """--per_device_train_batch_size 12 --per_device_eval_batch_size 12
    --learning_rate 1.5e-3 --warmup_steps 0.1 --lr_scheduler_type cosine_with_min_lr
    --lr_scheduler_kwargs {"min_lr_rate":0.1} --weight_decay 0.1 --adam_beta2 0.95
    --logging_steps 10 --logging_nan_inf_filter false --eval_strategy steps --eval_steps 50
    --prediction_loss_only true --save_steps 50 --save_total_limit 2 --report_to none"""
VALIDATION_WINDOWS = 192
SIZES = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size"


class Job:
    """All runs of a command. results: by run, what table_rows reads"""

    def __init__(self, options, runs, tokens):
        self.options, self.tokens, self.out = options, tokens, Path(options.out)
        empty = {"state": "not started", "log_history": []}
        self.results = {run: empty | {"saved_bytes": self.saved_bytes(run)} for run in runs}

    def folder(self, run):
        return self.out / "runs" / run.folder

    def arguments(self, run):
        """Returns the Trainer's arguments of a run."""
        has_gpu = torch.cuda.is_available() and "--use_cpu" not in self.options.trainer
        has = torch.cpu.get_capabilities()
        has_bf16 = has_gpu or has.get("avx512_f") or has.get("bf16")  # else it is slower than fp32
        given = [f"--use_cpu={not has_gpu}", f"--bf16={bool(has_bf16)}", *DEFAULTS.split()]
        own = {"max_steps": self.options.steps, "seed": run.seed, "data_seed": run.seed}
        own["output_dir"] = self.folder(run)
        for word in self.options.trainer:
            if word.startswith("--") and word[2:].partition("=")[0].replace("-", "_") in own:
                raise ValueError(f"expected --steps, --out, or @SEED of a recipe, got {word}")
        given += [*self.options.trainer, *(f"--{name}={value}" for name, value in own.items())]
        parser = HfArgumentParser(TrainingArguments, allow_abbrev=False)
        arguments, left = parser.parse_args_into_dataclasses(given, return_remaining_strings=True)
        if left:
            raise ValueError(f"expected an option of pretrain.py or of the Trainer, got {left[0]}")
        return arguments

    def model(self, run):
        """Builds a run's model, a function of the options and of its seed."""
        torch.manual_seed(run.seed)
        model = AutoModelForCausalLM.from_config(model_config(self.options))
        init_weights(model)
        run.convert(model)
        return model

    def saved_bytes(self, run):
        """Counts the bytes a token that a forward saves for its backward.

        Two sequences less one: storages that do not grow with the tokens are not counted.
        """
        arguments = self.arguments(run)
        model = self.model(run).to(arguments.device)
        ids = torch.arange(2 * self.options.seq, device=arguments.device).view(2, -1)

        def saved_by(ids):
            saved = {}  # storage address -> bytes; autograd keeps the storages alive

            def pack(tensor):
                storage = tensor.untyped_storage()
                saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                torch.autocast(ids.device.type, torch.bfloat16, enabled=arguments.bf16),
            ):
                loss = model(input_ids=ids, labels=ids).loss
            del loss
            return sum(saved.values())

        ids %= self.options.vocab
        return (saved_by(ids) - saved_by(ids[:1])) / self.options.seq

    def train(self, run):
        """Trains a run to its end, from its last complete checkpoint; returns state and log."""
        start, watch = last_checkpoint(self.folder(run)), Watch()
        trainer = Trainer(
            self.model(run),
            self.arguments(run),
            train_dataset=Windows(self.tokens["train"], self.options.seq),
            eval_dataset=Windows(self.tokens["validation"], self.options.seq, VALIDATION_WINDOWS),
            callbacks=[*([TrainingStateCallback()] if run.converts else []), watch],
        )
        trainer.train(resume_from_checkpoint=start and str(start))
        trainer.save_model()
        state = "finished" if watch.is_finite else f"diverged by step {trainer.state.global_step}"
        return {"state": state, "log_history": trainer.state.log_history}

    def train_all(self):
        """Trains the runs that have no result yet, with a report after each; returns the table."""
        for run in self.results:
            path = self.folder(run) / "result.json"
            if not path.exists():
                print(f"\n{run.name}:", flush=True)
                whole = path.with_suffix(".writing")  # renamed, so that a kill leaves no half
                whole.write_text(json.dumps(self.results[run] | self.train(run)))
                whole.rename(path)
            self.results[run] = json.loads(path.read_text())
            table = self.report()
        return table

    def report(self):
        """Writes the report of the runs so far; returns the table."""
        options, run = self.options, next(iter(self.results))
        arguments = self.arguments(run)
        parameters = sum(p.numel() for p in self.model(run).parameters()) / 1e6
        device = torch.cuda.get_device_name() if arguments.device.type == "cuda" else "CPU"
        batch = arguments.train_batch_size * arguments.gradient_accumulation_steps
        setting = [
            f"model: {options.model}, vocabulary {options.vocab}, {parameters:.1f}M parameters",
            f"text: {self.tokens['about']}",
            f"schedule: {options.steps} steps of {batch} x {options.seq} tokens",
            f"products: {'bf16 autocast' if arguments.bf16 else 'fp32, no fast bf16 here'}",
            f"device: {device}, torch {torch.__version__}",
        ]
        baseline = baseline_of([*self.results])
        return write_report(self.out, setting, self.results, baseline, batch * options.seq)


def model_config(options):
    """Returns the configuration of --model: sizes of a Llama, or one that transformers reads."""
    if not re.fullmatch(r"\d+(,\d+){4}", options.model):
        if not Path(options.model).exists():
            expected = "DIM,LAYERS,HEADS,KV_HEADS,FFN or the file of a transformers config"
            raise ValueError(f"--model: expected {expected}, got {options.model!r}")
        return AutoConfig.from_pretrained(options.model, vocab_size=options.vocab, use_cache=False)
    sizes = dict(zip(SIZES.split(), map(int, options.model.split(","))))
    return LlamaConfig(vocab_size=options.vocab, rms_norm_eps=1e-5, use_cache=False, **sizes)


@torch.no_grad()
def init_weights(model):
    """Widens the head, and scales what is added to the residual, as small models learn faster."""
    config = model.config
    for name, weight in model.named_parameters():
        if name == "lm_head.weight":
            weight.normal_(std=config.hidden_size**-0.5)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight /= (2 * config.num_hidden_layers) ** 0.5


def last_checkpoint(folder):
    """Returns the newest complete checkpoint; None where there is none."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)


# ---- The command ---------------------------------------------------------------------------------


def parse_options(argv):
    """Parses the options; those left out are the saved job's under --resume, else the defaults."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--recipes", default="bf16,nvfp4 keep=nvfp4_paper,bf16@2", help="comma-separated entries")
    text = "files or folders of text; none: the source of Python's standard library"
    add("--data", nargs="+", metavar="PATH", default=[], help=text)
    add("--steps", type=int, default=200, help="optimizer steps a recipe")
    add("--model", default="256,4,4,2,768", help="sizes of a Llama, or a config of transformers")
    add("--vocab", type=int, default=2048, help="entries of the tokenizer")
    add("--seq", type=int, default=256, help="tokens a sequence")
    add("--out", default="runs/train", help="folder of results")
    add("--resume", action="store_true", help="go on with the job in --out")
    options, options.trainer = parser.parse_known_args(argv)
    saved = Path(options.out, "job.json")
    options.resume = options.resume and saved.exists()
    if options.resume:
        asked = json.loads(saved.read_text())
        parser.set_defaults(**asked)
        options, trainer = parser.parse_known_args(argv)
        options.trainer = trainer or asked["trainer"]
        for name, value in asked.items():
            if getattr(options, name) != value:
                raise ValueError(
                    f"--resume: expected {name} {value!r} as in {saved}, got "
                    f"{getattr(options, name)!r}; choose another --out to start afresh"
                )
    return options


def prepare(options):
    """Checks all settings, then writes the job's files; returns the job.

    The files of an earlier job are moved from OUT to OUT.1, OUT.2, ...
    """
    out = Path(options.out)
    for name, least in (("steps", 1), ("vocab", 257), ("seq", 2)):
        if (got := getattr(options, name)) < least:
            raise ValueError(f"--{name}: expected at least {least}, got {got}")
    runs = parse_runs(options.recipes)
    if options.resume:
        with np.load(out / "tokens.npz") as file:
            return Job(options, runs, dict(file))
    tokens = read_tokens(options.data, options.vocab)
    for side in ("train", "validation"):
        if (count := len(tokens[side])) < options.seq:
            expected = f"at least {options.seq} tokens of {side} text, a sequence"
            raise ValueError(f"--data: expected {expected}, got {count}")
    job = Job(options, runs, tokens)
    if (out / "job.json").exists():
        free = next(f"{out}.{n}" for n in range(1, 10**6) if not Path(f"{out}.{n}").exists())
        print(f"an earlier job's results are moved from {out} to {out.rename(free)}")
    out.mkdir(parents=True, exist_ok=True)
    np.savez(out / "tokens.npz", **job.tokens)
    kept = {key: value for key, value in vars(options).items() if key not in ("out", "resume")}
    (out / "job.json").write_text(json.dumps(kept, indent=1) + "\n")
    return job


def main(argv=None):
    """Runs the command; returns the exit code. 1: an expected failure, 130: interrupted."""
    logging.disable_progress_bar()  # that of each file of weights
    try:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("expected one process; train_fsdp2.py is the example of several")
        job = prepare(parse_options(argv))
        print(f"{job.train_all()}\n{job.out}/report.md, loss.png")
    except (ValueError, OSError) as error:
        print(f"pretrain.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pretrain.py: interrupted; --resume (make train RESUME=1) goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
