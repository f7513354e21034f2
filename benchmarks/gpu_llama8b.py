"""A whole Llama3-8B on one GPU: each recipe's tokens/s, MFU, peak memory, and largest batch.

    python benchmarks/gpu_llama8b.py --limit 540     # again: the recipes that have no record yet
    python benchmarks/gpu_llama8b.py --recipes ""    # prints the tables alone
    python benchmarks/gpu_llama8b.py --tiny          # on a CPU, to try the script

32 layers of dim 4096, 32 heads, 8 key/value heads, hidden width 14336, vocabulary 128,256;
sequences of 8192 random tokens, so speed is measured and not loss. Parameters, gradients and
AdamW's states are bf16. Each block is one compiled graph that all 32 share. Converted are all
linear layers but the head, with fuse=True and recompute="weight".

    step     blocks of the whole batch -> norm, head and loss, forward and backward, a sequence at a
             time -> backward of the blocks -> fused AdamW -> mf.step
    MFU      tokens/s * (6 N + 6 L S D) over 989 TFLOP/s, the dense bf16 peak of H100 and H200, for
             every recipe. N: parameters without the embedding, 7.50 billion; L layers, S tokens of
             a sequence, D width: two causal products of 2 S D / 2 each, and twice that in backward
    kept     GiB that a sequence's forward keeps in the blocks for backward
    largest  the largest batch that fits without activation checkpointing, of 1 to 6; blocks are
             checkpointed where not even 1 fits. The batch to try comes from the first sample's peak
             and kept

Expected by hand, in GiB; a sequence has 8192 tokens, and tensors are bf16:

    parameters, gradients, two states  8.03e9 elements: 14.96 each
    a block keeps, KiB a token         its input, norms' outputs, the sum after attention, q and
                                       attention's output 8 each, k and v 2 each, gate, up and their
                                       product 28 each: 136. FP8: codes of three inputs, and no
                                       product of gate and up: 104. FP4: 99
    kept, 32 blocks, a sequence        bf16 34.0, FP8 26.1, FP4 24.7; checkpointed 2.0
    head, at the peak                  logits 1.96, the same again where their gradient does not
                                       overwrite them, the head's gradient 0.98: 2.9 to 4.9
    peak                               44.9 + 4.9 + kept. bf16: 84 for 1 sequence, 118 for 2, 152
                                       for 3; FP8: 128 for 3, 154 for 4; FP4: 124 and 149
    peak, checkpointed                 all gradients, at the end of backward: 59.8 + 3

So on 139 GiB bf16 should fit 2 sequences and the recipes 3; on 78 GiB bf16 none, FP4 1.

A name that ends with +policy keeps what mf.checkpoint_policy keeps of each block: its input, q, k,
v, attention's output, the sum after it, gate and up, 92 KiB a token, so 23.0 GiB a sequence.

A recipe is a process of its own, and leaves OUT/RECIPE_DEVICE.jsonl.xz. bf16 comes first: all
others are also measured at its largest batch. A recipe with a record for this GPU in OUT or in
research/parity/llama8b is not run again. The tables are printed from those records.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import torch
from _measure import PeakMemory, product_dtype, step_flops
from _parity_records import BF16, Record, read_record, write_record
from _parity_run import LossLlama
from _peers import OF_PEERS, convert_by_peer
from minifloat.nn.checkpoint_policy import checkpoint_policy
from minifloat.nn.convert.quantize import quantize_
from minifloat.nn.state.model_state import step as finish_step
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support.llama import ModelConfig, compile_layers

RESULTS = timing.ROOT / "research" / "parity" / "llama8b"
RECIPES = [BF16, "fp8_tensorwise", "fp8_rowwise", "mxfp4", "nvfp4_pow2"]
RECIPES += ["torchao_tensorwise", "torchao_rowwise"]
POLICY = "+policy"  # of a recipe's name: each block is checkpointed by mf.checkpoint_policy
RECIPES += [f"{recipe}{POLICY}" for recipe in ("fp8_tensorwise", "fp8_rowwise", "mxfp4")]
CONTEXTS = partial(create_selective_checkpoint_contexts, checkpoint_policy)
OPTIONS: dict[str, Any] = {"fuse": True, "recompute": "weight"}  # of mf.quantize_
PEAK = 989e12  # operations a second
GIB = 2**30
SPARE = 2 * GIB  # of the GPU's memory, for the code of kernels
WARM_UP = 2  # steps: the first one compiles, and makes the optimizer's states
# One pool of pages, so that a batch fails for its size and not for gaps between blocks.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Trial:
    """The settings that all recipes share."""

    model: str = "4096,32,32,8,14336"
    vocabulary: int = 128_256
    seq: int = 8192
    most: int = 6  # sequences of a batch
    steps: int = 5  # that are timed
    device: str = "cuda"


TINY = Trial("64,2,2,1,128", vocabulary=512, seq=64, most=2, steps=1, device="cpu")


@dataclass(frozen=True)
class Sample:
    """A recipe at one batch."""

    batch: int  # sequences
    is_checkpointed: bool
    tokens_per_s: float
    mfu: float  # 1: PEAK
    peak_gib: float
    kept_gib: float
    loss: float  # of the last step


Take = Callable[[int, bool], Sample | None]  # (batch, is_checkpointed); None: it does not fit


class Run:
    """The model under one recipe, and its optimizer."""

    def __init__(self, name: str, trial: Trial) -> None:
        self.trial, self.is_converted = trial, name != BF16 and not name.startswith(OF_PEERS)
        self.limit = math.inf  # bytes
        if trial.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            self.limit = free - SPARE
            torch.cuda.set_per_process_memory_fraction(self.limit / total)
        config = ModelConfig.parse(trial.model, trial.vocabulary)
        torch.manual_seed(0)
        torch.set_default_dtype(product_dtype(trial.device))
        with torch.device(trial.device):
            self.model = LossLlama(config, trial.seq)
        self.flops = step_flops(self.model, trial.seq, trial.seq)  # of a sequence
        torch.set_default_dtype(torch.float32)
        if self.is_converted:
            quantize_(self.model, name.removesuffix(POLICY), **OPTIONS)
        elif name != BF16:
            convert_by_peer(self.model, name, self.model.is_quantized)
        if name.endswith(POLICY):
            for i, layer in enumerate(self.model.layers):
                self.model.layers[i] = checkpoint_wrapper(layer, context_fn=CONTEXTS)
        compile_layers(self.model)
        timing.compile_each_shape()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.kept = 0  # bytes, of the latest batch

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.trial.device == "cuda" else 0

    def blocks(self, inputs: Tensor, is_checkpointed: bool) -> Tensor:
        """Computes the output of the last block: (batch, seq, dim)."""
        model, before = self.model, self.allocated()
        x = model.tok_embeddings(inputs)
        for layer in model.layers:
            if is_checkpointed:
                x = checkpoint(layer, x, model.rotary, use_reentrant=False)
            else:
                x = layer(x, model.rotary)
        self.kept = self.allocated() - before
        return x

    def train_step(self, inputs: Tensor, targets: Tensor, is_checkpointed: bool) -> Tensor:
        """Trains on a batch; returns its mean loss. inputs, targets: (batch, seq) int64."""
        x = self.blocks(inputs, is_checkpointed)
        loss, gradients = torch.zeros((), device=x.device), []
        for part, target in zip(x.split(1), targets.split(1), strict=True):
            leaf = part.detach().requires_grad_()  # frees a sequence's logits before the next one's
            one = self.model.head_loss(leaf, target) / len(x)
            one.backward()
            loss += one.detach()
            gradients.append(leaf.grad)
        x.backward(torch.cat(gradients))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.is_converted:
            finish_step(self.model)
        return loss

    def sample(self, batch: int, is_checkpointed: bool) -> Sample:
        """Trains some steps of a batch and times them.

        Raises:
            torch.OutOfMemoryError: the batch does not fit.
            FloatingPointError: the loss is not finite.
        """
        trial = self.trial
        size = (batch, trial.seq + 1)
        tokens = torch.randint(trial.vocabulary, size, device=trial.device)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        losses = []

        def step() -> None:
            losses.append(self.train_step(inputs, targets, is_checkpointed))

        memory = PeakMemory(trial.device)
        for _ in range(WARM_UP):
            step()
        if trial.device == "cuda":
            ms = statistics.median(timing.event_ms(step, trial.steps))
        else:
            ms = timing.host_ms(step, trial.steps)
        last = losses[-1].item()
        if not math.isfinite(last):
            raise FloatingPointError(f"expected a finite loss, got {last}")
        return Sample(
            batch=batch,
            is_checkpointed=is_checkpointed,
            tokens_per_s=round(1e3 * batch * trial.seq / ms),
            mfu=round(1e3 * batch * self.flops / ms / PEAK, 4),
            peak_gib=round(memory.bytes() / GIB, 2),
            kept_gib=round(self.kept / batch / GIB, 2),
            loss=round(last, 4),
        )

    def sample_if_fits(self, batch: int, is_checkpointed: bool) -> Sample | None:
        try:
            found = self.sample(batch, is_checkpointed)
            said = f"{found.tokens_per_s:,} tokens/s, {found.peak_gib} GiB"
        except torch.OutOfMemoryError:
            found, said = None, "does not fit"
        if found is None:  # the error, which holds the step's tensors, is gone
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
        print(f"  batch {batch}{', checkpointed' * is_checkpointed}: {said}", flush=True)
        return found

    def most_expected(self, sample: Sample) -> int:
        """Returns the largest batch that fits by the peak and the kept bytes of a sample."""
        if not sample.kept_gib:
            return self.trial.most
        more = (self.limit / GIB - sample.peak_gib) / sample.kept_gib
        return min(self.trial.most, sample.batch + max(math.floor(more), 0))


def climb(take: Take, first: int, is_checkpointed: bool, expected: Callable[[Sample], int]) -> None:
    """Takes samples of the batches from `first` down to one that fits, then of the largest."""
    refused, found = math.inf, None
    for batch in range(first, 0, -1):
        if (found := take(batch, is_checkpointed)) is not None:
            break
        refused = batch
    if found is None:
        return
    for batch in range(int(min(expected(found), refused - 1)), found.batch, -1):
        if take(batch, is_checkpointed) is not None:
            return


def take_samples(
    take: Take, expected: Callable[[Sample], int], base: Sample | None
) -> tuple[list[Sample], list[tuple[int, bool]]]:
    """Finds the largest batch, and measures at bf16's.

    Args:
        take: measures a batch.
        expected: the largest batch that a sample lets expect.
        base: bf16's largest batch; None: this is bf16.

    Returns:
        (samples; the batches that did not fit).
    """
    samples: list[Sample] = []
    refused: list[tuple[int, bool]] = []

    def record(batch: int, is_checkpointed: bool) -> Sample | None:
        found = take(batch, is_checkpointed)
        if found is None:
            refused.append((batch, is_checkpointed))
        else:
            samples.append(found)
        return found

    first = 1 if base is None else base.batch
    climb(record, 1 if base is not None and base.is_checkpointed else first, False, expected)
    if not samples:
        climb(record, first, True, expected)
    elif base is not None and base.is_checkpointed:
        record(base.batch, True)
    return samples, refused


def largest(record: Record) -> Sample:
    """Returns the sample of the largest batch, without checkpointing where one is."""
    samples = [Sample(**sample) for sample in record["samples"]]
    return max(samples, key=lambda sample: (not sample.is_checkpointed, sample.batch))


# ---- Records -------------------------------------------------------------------------------------
def file_name(recipe: str, device: str) -> str:
    return f"{recipe}_{device.lower().replace(' ', '_')}.jsonl.xz"


def find_record(recipe: str, device: str, folders: list[Path]) -> Record | None:
    paths = [folder / file_name(recipe, device) for folder in folders]
    return next((read_record(path) for path in paths if path.exists()), None)


def run_recipe(name: str, trial: Trial, device: str, out: Path) -> None:
    """Measures one recipe in this process and writes its record."""
    start, base = time.perf_counter(), None
    if name != BF16:
        of_bf16 = find_record(BF16, device, [out, RESULTS])
        if of_bf16 is None:
            sys.exit(f"{name}: expected a record of bf16 on {device}, got none")
        base = largest(of_bf16)
    run = Run(name, trial)
    samples, refused = take_samples(run.sample_if_fits, run.most_expected, base)
    if not samples:
        sys.exit(f"{name}: expected a batch that fits, got none")
    record = {
        "name": name,
        "device": device,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "trial": asdict(trial),
        "options": OPTIONS if run.is_converted else {},
        "limit_gib": round(run.limit / GIB, 1) if math.isfinite(run.limit) else None,
        "samples": [asdict(sample) for sample in samples],
        "refused": refused,
        "seconds": round(time.perf_counter() - start),
    }
    write_record(out / file_name(name, device), record)


def run_missing(names: list[str], device: str, out: Path, limit: float) -> bool:
    """Runs the recipes without a record, while another one ends within `limit` seconds.

    Returns:
        Whether all that were started left a record.
    """
    begin, seconds, are_done = time.perf_counter(), 0.0, True
    for name in names:
        if find_record(name, device, [out, RESULTS]) is not None:
            continue
        start = time.perf_counter()
        if start - begin + seconds > limit:
            print(f"{name}: left to another command")
            continue
        print(f"{name}:", flush=True)
        command = [sys.executable, __file__, *sys.argv[1:], "--recipe", name]
        code = subprocess.run(command, env={**ALLOCATOR, **os.environ}).returncode
        seconds = max(seconds, time.perf_counter() - start)
        print(f"  exit code {code}, {time.perf_counter() - start:.0f} s", flush=True)
        are_done = are_done and code == 0
    return are_done


def sample_cells(sample: Sample, base: Sample) -> str:
    """Formats a sample: its batch, and the speed beside bf16's largest batch."""
    return (
        f"{sample.batch}{', checkpointed' * sample.is_checkpointed} | {sample.tokens_per_s:,} | "
        f"{sample.tokens_per_s / base.tokens_per_s:.2f} | {100 * sample.mfu:.1f}% | "
        f"{sample.peak_gib}"
    )


def table(records: list[Record]) -> str:
    """Formats the records of one GPU, which have bf16's: each at bf16's batch, and at its own."""
    base = next(largest(record) for record in records if record["name"] == BF16)
    titles = "batch | tokens/s | speed, bf16 = 1 | MFU | peak GiB"
    lines = [f"| recipe | {titles} | largest {titles} | kept GiB a sequence |"]
    lines.append("|---" * 12 + "|")
    for record in records:
        samples = [Sample(**sample) for sample in record["samples"]]
        setting = (base.batch, base.is_checkpointed)
        same = next((s for s in samples if (s.batch, s.is_checkpointed) == setting), None)
        cells = sample_cells(same, base) if same else " | ".join("-" * 5)
        own = largest(record)
        lines.append(
            f"| `{record['name']}` | {cells} | {sample_cells(own, base)} | {own.kept_gib} |"
        )
    return "\n".join(lines)


def print_tables(folders: list[Path]) -> None:
    """Prints a table for each GPU of which bf16 has a record."""
    paths = [path for folder in folders for path in sorted(folder.glob("*.jsonl.xz"))]
    records = sorted(map(read_record, paths), key=lambda record: RECIPES.index(record["name"]))
    for record in records:
        if record["name"] == BF16:
            of_device = [r for r in records if r["device"] == record["device"]]
            print(f"\n{record['device']}, torch {record['torch']}\n{table(of_device)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", default=",".join(RECIPES), help="%(default)s")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of this command")
    parser.add_argument("--out", type=Path, default=timing.ROOT / "build" / "llama8b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--recipe", choices=RECIPES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names, are_done = [name for name in arguments.recipes.split(",") if name], True
    if unknown := [name for name in names if name not in RECIPES]:
        sys.exit(f"--recipes: expected some of {', '.join(RECIPES)}, got {', '.join(unknown)}")
    if names:
        trial = TINY if arguments.tiny else Trial()
        device = timing.device_name(timing.require_device(trial.device))
        if arguments.recipe:
            run_recipe(arguments.recipe, trial, device, arguments.out)
            return 0
        are_done = run_missing(names, device, arguments.out, arguments.limit)
    print_tables([RESULTS, arguments.out])
    return 0 if are_done else 1


if __name__ == "__main__":
    sys.exit(main())
