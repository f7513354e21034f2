"""torchtitan 0.2's trainer on local text, with no download, on a GPU or a CPU.

    prepare("cpu")                                  before any other import of torchtitan
    assets = write_assets(folder, 2048, texts)      a tokenizer, and the text
    rows = train(assets, ["--training.steps=10", …])

torchtitan has no CPU backend. prepare("cpu") replaces what asks for a GPU: the device's name and
memory, the kernel that pads groups of tokens (torchtitan's own CPU form takes its place), histc of
integers, which torch has for CUDA alone, and FSDP2's scaled sums, which gloo lacks.

The package `datasets`, with pyarrow and pandas, is larger than all else that torchtitan needs. Only
its names are read here: a module with those names stands in where it is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

DATASET = "local_text"  # among torchtitan's datasets
END_OF_TEXT = "<|end|>"


class Texts:
    """Documents of a folder's texts.json, as torchtitan reads a dataset that can be resumed."""

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents, self.next = list(documents), 0

    def __iter__(self) -> Iterator[str]:
        while self.next < len(self.documents):
            self.next += 1
            yield self.documents[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def texts_of_rank(texts: Texts, rank: int, world_size: int) -> Texts:
    return Texts(texts.documents[rank::world_size])


def read_texts(path: str) -> Texts:
    return Texts(json.loads((Path(path) / "texts.json").read_text()))


# ---- Preparation ---------------------------------------------------------------------------------
def prepare(device: str) -> None:
    """Makes torchtitan importable and usable: on "cuda" or "cpu", with the dataset DATASET."""
    stand_in_for_datasets()
    if device == "cpu":
        use_cpu()
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    text_datasets.split_dataset_by_node = texts_of_rank
    text_datasets.DATASETS.setdefault(
        DATASET, DatasetConfig(path="", loader=read_texts, sample_processor=str)
    )


def stand_in_for_datasets() -> None:
    if "datasets" in sys.modules or importlib.util.find_spec("datasets") is not None:
        return
    package, module = ModuleType("datasets"), ModuleType("datasets.distributed")
    package.Dataset, package.load_dataset = type("Dataset", (), {}), None
    package.distributed, module.split_dataset_by_node = module, texts_of_rank
    sys.modules.update({"datasets": package, "datasets.distributed": module})


class CpuModule(ModuleType):
    """torch.cpu, with what torchtitan asks of a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "A100 (a CPU: this peak is no peak)"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=1 << 34)

    def current_device(self) -> int:
        return 0

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def set_device(self, device: Any) -> None: ...
    def reset_peak_memory_stats(self) -> None: ...
    def empty_cache(self) -> None: ...


def use_cpu() -> None:
    """Imports torchtitan as it would be on a machine whose device is the CPU."""
    if "torchtitan" in sys.modules:
        device = sys.modules["torchtitan.tools.utils"].device_type
        assert device == "cpu", f"expected no import of torchtitan before this one, got {device}"
        return
    cpu, utils = CpuModule("cpu"), torch._utils
    asked = utils._get_available_device_type, utils._get_device_module
    utils._get_available_device_type, utils._get_device_module = lambda: "cpu", lambda _: cpu
    try:
        from torchtitan.models.moe import utils as moe_utils
    finally:
        utils._get_available_device_type, utils._get_device_module = asked
    moe_utils.generate_permute_indices = partial(moe_utils.generate_permute_indices, use_cpu=True)
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_of_sums(self: FSDPModule, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # gloo scales no sum

    FSDPModule.set_gradient_divide_factor = set_factor_of_sums
    histc = torch.histc
    torch.histc = lambda x, **options: histc(x.float(), **options).to(x.dtype)


# ---- Text ----------------------------------------------------------------------------------------
def write_assets(
    folder: Path, vocabulary: int, texts: Sequence[str], sample: int | None = None
) -> Path:
    """Trains a byte-level tokenizer, and writes what torchtitan reads: model.hf_assets_path.

    Args:
        sample: how many of the texts the tokenizer is trained on; None: all.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:sample], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "texts.json").write_text(json.dumps(list(texts)))
    return folder


# ---- Training ------------------------------------------------------------------------------------
class Recorder:
    """A logger of torchtitan's metrics that keeps them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.rows.append({"step": step, **metrics})

    def close(self) -> None: ...


def config_of(*options: str) -> Any:
    """Parses options of torchtitan's command line, with the section [minifloat]."""
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args(["--job.custom_config_module=minifloat.torchtitan", *options])


def trainer_of(assets: Path, options: Sequence[str]) -> Any:
    """Builds torchtitan's Trainer from options of its command line, after `prepare`."""
    from torchtitan.train import Trainer

    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank() if dist.is_initialized() else 0))
    given = [
        f"--model.hf_assets_path={assets}",
        f"--training.dataset={DATASET}",
        f"--training.dataset_path={assets}",
        f"--job.dump_folder={assets / 'out'}",
        *options,
    ]
    return Trainer(config_of(*given))


def train(assets: Path, options: Sequence[str], check: Any = None) -> list[dict[str, Any]]:
    """Trains, and returns torchtitan's metrics of each logged step; calls check(trainer) after."""
    trainer = trainer_of(assets, options)
    recorder = trainer.metrics_processor.logger = Recorder()
    try:
        trainer.train()
        if check is not None:
            check(trainer)
    finally:
        trainer.close()
    return recorder.rows
