"""The code on the pages is true: each block of Python runs, or is a part of a script that runs.

A block of C++ is a part of a program under examples/, which ctest runs, one of TOML of a config
there, which tests/torchtitan/test_trainer.py trains. A block of Python may be a part of a script
there, which tests/clients/test_examples.py runs. Every other one runs here, on a CPU: the blocks of
a section (##) in their order, in one namespace and an empty folder. What a section takes as given
is written below. A page of RANKS runs on that many processes.
"""

import ast
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.support.worlds import last_words, run_world

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
RANKS = {"memory.md": 2, "distributed.md": 4, "moe.md": 2, "zero.md": 2, "megatron.md": 1}
# (page, section; None: all of them) -> why its blocks do not run here.
EXCEPTIONS = {
    (
        "numerics_lab.md",
        None,
    ): "tests/lab/test_numerics_lab.py runs it, and compares what it prints",
    (
        "megatron.md",
        "HybridModel",
    ): "it needs megatron-core 0.19; tests/megatron/test_layers.py builds such a model",
}

SUFFIXES = {"python": ".py", "cpp": ".cpp", "toml": ".toml"}
OTHERS = {"", "text", "sh"}  # commands, which tools/check_docs.py checks; output; drawings
SHOWS_FILES = {"{include}", "{literalinclude}", "{command-help}", "{toctree}", "{eval-rst}"}

FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")
PYTHON = re.compile(r"^\s*(?:>>> |import \w+|from [\w.]+ import )|\bmf\.\w+\(", re.MULTILINE)


# ---- Blocks --------------------------------------------------------------------------------------
class Block(NamedTuple):
    """A fenced block of a page.

    Args:
        page: its file.
        section: the title of its section, "" before the first one.
        line: the number of its fence.
        language: the first word after the fence.
        code: its lines, dedented.
    """

    page: Path
    section: str
    line: int
    language: str
    code: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"


def read_blocks(page: Path, text: str) -> Iterator[Block]:
    """Yields the fenced blocks of a page's text."""
    section, opened = "", None
    for number, line in enumerate(text.split("\n"), start=1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened, begin, lines = fence, number, []
        elif opened is None and line.startswith("## "):
            section = line.removeprefix("## ")
        elif opened is not None and fence and fence[2].startswith(opened[2]) and not fence[3]:
            code = textwrap.dedent("\n".join(lines))
            yield Block(page, section, begin, (opened[3].split() or [""])[0], code)
            opened = None
        elif opened is not None:
            lines.append(line)
    assert opened is None, f"{page}: expected an end of the block of line {begin}"


def is_part(code: str, text: str) -> bool:
    """Tells whether a block is whole lines of a file, one after the other, at any indentation."""
    lines, block = text.split("\n"), code.split("\n")
    starts = (i for i, line in enumerate(lines) if line.strip() == block[0])
    return any(textwrap.dedent("\n".join(lines[i : i + len(block)])) == code for i in starts)


def is_part_of_example(block: Block) -> bool:
    files = EXAMPLES.glob(f"*{SUFFIXES[block.language]}")
    return any(is_part(block.code, file.read_text()) for file in files)


def is_exception(block: Block) -> bool:
    return any((block.page.name, section) in EXCEPTIONS for section in (None, block.section))


BLOCKS = [block for page in PAGES for block in read_blocks(page, page.read_text())]
REST = [b for b in BLOCKS if b.language == "python" and not is_part_of_example(b)]
RUN = [block for block in REST if not is_exception(block)]


# ---- What pages take as given --------------------------------------------------------------------
Given = dict[str, Any]


def given_anywhere() -> Given:
    """Returns the modules that pages name without importing them, and a Llama and its batches."""
    from train_one_gpu import TRAINING, Llama, batch

    batches = [batch(TRAINING, seed)[:2] for seed in range(2)]
    given = {"mf": mf, "torch": torch, "nn": nn, "F": F, "dist": dist, "device": "cpu"}
    if dist.is_initialized():
        given |= {"rank": dist.get_rank(), "ranks": dist.get_world_size()}
        given |= {"group": dist.group.WORLD}
    return given | {"model": Llama(), "batches": batches, "micro_batches": batches}


def given_of_experts() -> Given:
    """Returns a Llama with mixtures of experts, and operands of a rank's experts."""
    from train_experts import Llama, new_experts

    tokens, width, hidden, experts, chosen = 40, 64, 32, 8, 2
    here = experts // dist.get_world_size()
    return {
        "model": Llama(new_experts),
        "x": torch.randn(tokens, width),
        "w13": torch.randn(here, 2 * hidden, width),
        "w2": torch.randn(here, width, hidden),
        "indices": torch.rand(tokens, experts).topk(chosen).indices,
        "weights": torch.rand(tokens, chosen),
        "recipe": "mxfp8",
    }


class FeedForward(nn.Module):
    """A block of the section on tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.w1, self.w2 = nn.RMSNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w2(torch.relu(self.w1(self.norm(x))))


def given_of_tensor_parallelism() -> Given:
    block = FeedForward()
    experts = mf.MoE(64, 32, experts=4, top_k=2)
    model = nn.Sequential(block, experts)
    return {"model": model, "block": block, "moe": experts, "x": torch.randn(2, 8, 64)}


def given_of_inspector() -> Given:
    """Returns a model that returns logits."""
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.Linear(128, 256))
    tokens = torch.randint(256, (2, 33))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return {"model": model, "batch": batch, "batches": [batch, batch]}


def given_of_readme() -> Given:
    """Returns nothing; the README's model runs uncompiled here."""
    torch._dynamo.config.disable = True
    return {}


def given_converted() -> Given:
    model = given_anywhere()["model"]
    mf.quantize_(model, "nvfp4 keep=nvfp4_paper")
    return {"model": model}


def given_of_transformers() -> Given:
    """Returns the names of saved models, one with experts, and what a Trainer takes."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        MixtralConfig,
        MixtralForCausalLM,
    )

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64, "hidden_size": 64}
    config = MixtralConfig(
        **sizes, intermediate_size=64, num_key_value_heads=2, num_local_experts=2
    )
    MixtralForCausalLM(config).save_pretrained("mixtral")
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, vocab_size=64, n_embd=64)).save_pretrained(
        "gpt2"
    )
    settings = {"per_device_train_batch_size": 2, "use_cpu": True, "report_to": []}
    settings |= {"max_steps": 2, "save_steps": 1, "disable_tqdm": True}
    tokens = torch.arange(16)
    data = [{"input_ids": tokens, "labels": tokens}] * 8
    return {
        "name": "mixtral",
        "settings": settings,
        "data": data,
        "checkpoint": "run/checkpoint-1",
        "folder": "saved",
    }


def given_of_accelerate() -> Given:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(torch.randn(4, 64))
    accelerator = Accelerator(cpu=True)
    prepared = {"model": model, "optimizer": optimizer, "data": data}
    return {"accelerator": accelerator, "folder": "saved", **prepared}


def given_of_peft() -> Given:
    from train_peft import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    return {"base": LlamaForCausalLM(config)}


def given_of_lightning() -> Given:
    from torch.utils.data import DataLoader
    from train_lightning import Reverser

    x = torch.randn(2, 4, 32)
    return {"module": Reverser(), "data": DataLoader([(x[0], x[1])], batch_size=None)}


def given_of_megatron() -> Given:
    """Returns a small config of Llama's form, a model of it, and a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.support import megatron_models as models

    models.begin()
    import minifloat.megatron
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = models.config()
    tokens, positions, labels = models.batch(0)
    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": config.hidden_size}
    sizes |= {"intermediate_size": config.ffn_hidden_size, "num_attention_heads": 4}
    return {
        "minifloat": minifloat,
        "GPTModel": GPTModel,
        "get_gpt_decoder_block_spec": get_gpt_decoder_block_spec,
        "config": config,
        "model": models.build(config),
        "recipe": "mxfp8",
        "vocab_size": models.VOCABULARY,
        "max_sequence_length": models.TOKENS,
        "tokens": tokens,
        "positions": positions,
        "labels": labels,
        "LlamaForCausalLM": LlamaForCausalLM,
        "llama_config": LlamaConfig(**sizes, num_hidden_layers=config.num_layers),
    }


# (page, section; None: all of them) -> what is given besides given_anywhere.
GIVEN: dict[tuple[str, str | None], Callable[[], Given]] = {
    ("README.md", None): given_of_readme,
    ("choose.md", "Another recipe for the last steps"): given_converted,
    ("clients.md", "Hugging Face Trainer"): given_of_transformers,
    ("clients.md", "accelerate"): given_of_accelerate,
    ("clients.md", "PEFT"): given_of_peft,
    ("clients.md", "Lightning"): given_of_lightning,
    ("distributed.md", "Tensor and sequence parallel"): given_of_tensor_parallelism,
    ("inspector.md", None): given_of_inspector,
    ("megatron.md", None): given_of_megatron,
    ("moe.md", None): given_of_experts,
    ("publish.md", None): given_converted,
    ("serve.md", None): given_converted,
}


# ---- The tests -----------------------------------------------------------------------------------
def run_section(blocks: list[Block]) -> None:
    """Runs blocks of one section. A traceback has the page's lines."""
    torch.manual_seed(0)
    page, section = blocks[0].page, blocks[0].section
    names = given_anywhere()
    for key in ((page.name, None), (page.name, section)):
        names |= GIVEN.get(key, dict)()
    for block in blocks:
        exec(compile("\n" * block.line + block.code, block.page, "exec"), names)


def run_page(rank: int, blocks: list[Block], folder: Path) -> None:
    """Runs blocks of one page, in the folder."""
    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(EXAMPLES))
    for _, section in groupby(blocks, lambda block: block.section):
        run_section(list(section))


@pytest.mark.parametrize("page", sorted({b.page for b in RUN}), ids=lambda page: page.stem)
def test_python_runs(page, tmp_path):
    blocks = [block for block in RUN if block.page == page]
    if page.name in RANKS:
        run_world(RANKS[page.name], run_page, blocks, tmp_path)
    else:  # in a process of its own too: libraries keep settings
        (failure,) = last_words(1, run_page, blocks, tmp_path, seconds=None)
        assert failure is None, failure


def test_no_code_is_left_out():
    for block in REST:
        for node in ast.walk(ast.parse(block.code)):
            is_gap = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert not (is_gap and node.value.value is ...), block.where


@pytest.mark.parametrize("language", ["cpp", "toml"])
def test_other_code_is_a_part_of_an_example(language):
    blocks = [block for block in BLOCKS if block.language == language]
    assert blocks
    assert [block.where for block in blocks if not is_part_of_example(block)] == []


def test_each_block_has_a_language_that_is_tested():
    known = SUFFIXES.keys() | OTHERS | SHOWS_FILES
    assert [b.where for b in BLOCKS if b.language not in known] == []
    hidden = [b.where for b in BLOCKS if b.language in OTHERS and PYTHON.search(b.code)]
    assert hidden == [], "expected ```python"


def test_the_lists_name_pages_that_have_code():
    assert RANKS.keys() <= {block.page.name for block in RUN}
    sections = {(b.page.name, section) for b in REST for section in (None, b.section)}
    assert GIVEN.keys() | EXCEPTIONS.keys() <= sections


def test_blocks_are_found():
    text = "## A\n\n- b:\n  ```python\n  c = 1\n\n  d = 2\n  ```\n~~~sh\n## e\n```\n~~~\n"
    found = list(read_blocks(Path("f.md"), text))
    assert [(b.section, b.line, b.language) for b in found] == [("A", 4, "python"), ("A", 9, "sh")]
    assert [b.code for b in found] == ["c = 1\n\nd = 2", "## e\n```"]


def test_parts_are_whole_lines_in_order():
    text = "def a():\n    b = 1\n\n    if b:\n        c = 2\n"
    for part in ("b = 1", "b = 1\n\nif b:\n    c = 2", "if b:\n    c = 2"):
        assert is_part(part, text)
    for other in ("b =", "if b:\n    c = 3", "if b:\nc = 2", "c = 2\nb = 1"):
        assert not is_part(other, text)
