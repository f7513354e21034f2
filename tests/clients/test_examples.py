"""Each example runs as a user runs it and trains. Resumed and saved bytes are equal."""

import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import minifloat
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FOUR = (*TWO[:-1], "4")
SECONDS = 500  # many times what an example takes on two idle cores
# File and its arguments -> (what runs it, environment, lines that it prints after its losses).
RUNS = {
    "train_one_gpu fp8_delayed": ((), {}, ["resumed weights equal: True"]),
    "train_fsdp2": (TWO, {}, ["resumed weights equal: True"]),
    "train_fsdp2 mxfp4 e4m3/1x128+sr": (TWO, {}, ["resumed weights equal: True"]),
    "train_tensor_parallel": (FOUR, {}, []),
    "train_experts": (TWO, {}, []),
    "train_micro_batches": (
        (),
        {},
        ["  * layers.0.feed_forward     w1, w3, w2 and silu are one op"],
    ),
    "train_micro_batches, two processes": (TWO, {}, []),
    "train_transformers": (
        (),
        {},
        [
            "resumed weights equal: True",
            "saved weights equal: True",
            "served logits equal: True",
        ],
    ),
    "train_transformers nvfp4": (
        (),
        {},
        [
            "resumed weights equal: True",
            "saved weights equal: True",
            "served logits equal: True",
        ],
    ),
    "export": (
        (),
        {},
        [
            "served weights are the codes' values: True",
            "next numbers that the served model knows: 100%",
        ],
    ),
    "train_accelerate": ((), {}, ["resumed weights equal: True"]),
    "train_accelerate, two processes": (TWO, {}, ["resumed weights equal: True"]),
    "train_peft": (
        (),
        {},
        [
            "base unchanged: True",
            "adapters only: True",
            "loaded adapters equal: True",
            "merged equals adapters: True",
        ],
    ),
    "train_lora_quantized": (
        (),
        {},
        [
            "minifloat: 14 converted, 1 not",
            "published keys equal: True",
            "published weights are the original and the adapters: True",
        ],
    ),
    "train_lightning": (
        (),
        {},
        ["forwards with bits of their own: 40", "resumed weights equal: True"],
    ),
    "train_8bit_adam": (
        (),
        {"TORCHDYNAMO_DISABLE": "1"},  # compiling the update takes two minutes
        ["moment: OptimState8bit torch.uint8"],
    ),
    "train_pipeline": (TWO, {}, []),
    "train_megatron": (
        TWO,
        {},
        [
            "bf16: weights of the data-parallel ranks equal: True",
            "bf16: resumed weights equal: True",
            "codes: weights of the data-parallel ranks equal: True",
            "codes: resumed weights equal: True",
        ],
    ),
    "train_megatron nvfp4_pow2 --experts 4": (TWO, {}, ["bf16: resumed weights equal: True"]),
    "train_megatron mxfp8_2d --tensor 2": (
        FOUR,
        {},
        [
            "codes: weights of the data-parallel ranks equal: True",
            "codes: resumed weights equal: True",
        ],
    ),
    "train_zero3": (
        TWO,
        {},
        [
            "fp8_tensorwise: losses and masters equal FSDP2's: True",
            "nvfp4_pow2: losses and masters equal FSDP2's: True",
        ],
    ),
}


def loss_without_inputs(file):
    """Returns the least loss of a model that does not read its inputs."""
    if file in ("export", "train_peft", "train_lora_quantized", "train_transformers"):
        return math.log(64)  # of 64 tokens that occur equally often
    if file in ("train_accelerate", "train_lightning", "train_8bit_adam", "train_pipeline"):
        return 1.0  # the variance of the target, normal numbers
    if file == "train_zero3":
        return 1.0
    text = (FOLDER / "train_one_gpu.py").read_bytes()  # which the others learn
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log(share) for share in shares)


IMPORTED = {"megatron_on_cpu"}  # by examples


def test_all_examples_run():
    files = {path.stem for path in FOLDER.glob("*.py")} - IMPORTED
    assert files == {re.split("[ ,]", name)[0] for name in RUNS}


# The first of docs/quickstart.md. What the next one does under FSDP2, tests of fewer seconds do:
# tests/distributed/fsdp/test_fsdp.py trains and resumes, test_sharded_steps.py checkpoints blocks.
QUICK = ("train_one_gpu fp8_delayed",)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS],
)
def test_an_example_trains(name, tmp_path):
    before, variables, lines = RUNS[name]
    file, *arguments = name.split(",")[0].split()
    package = Path(minifloat.__file__).parents[1]
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *before, FOLDER / f"{file}.py", *arguments],
        cwd=tmp_path,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        | {"PYTHONPATH": os.pathsep.join(paths)}
        | variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"loss: (\S+) -> (\S+)", done.stdout)
    assert losses, done.stdout
    limit = loss_without_inputs(file)
    assert all(float(last) < limit for _, last in losses), done.stdout
    for line in lines:
        assert line in done.stdout.splitlines(), done.stdout
