"""Settings of a training job, as frozen dataclasses that are saved as JSON and loaded again.

`ModelConfig`, `TrainConfig` and a `RunSpec` for each run hold everything that decides the bytes of
the result, and nothing else: the caller chooses the folder and whether to resume. A resumed job
compares the fields (`differences`) and stops where one differs, except those in `FREE`, which may
change. On the command line:

    --model    dim,layers,heads,kv_heads,ffn                                 a Llama
               moe:dim,layers,heads,kv_heads,hidden,experts,top_k,shared     with experts
    --recipes  bf16,mxfp8,"nvfp4 keep=nvfp4_paper then=mxfp8"
               entries [NAME=]TEXT[ keep=POLICY][ then=RECIPE][@SEED]
    --recipe   "nvfp4_mlp=layers.*.feed_forward.*: nvfp4; layers.*.attention.*: mxfp8"

TEXT is a preset (`nvfp4`), a recipe written out (`fprop=... dgrad=... wgrad=...`) or a map of
module names (`*: nvfp4; layers.0.*: bf16`). POLICY says what stays in high precision; without it
that is mf.quantize_'s default (nn/convert/keep.py). RECIPE is a TEXT too, under which the last
steps train, LAST_SHARE of all, with the same POLICY. `@SEED` starts the same recipe from other
initial weights and draws other batches: the difference of the two runs is the noise of the
comparison.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, cast

from ..moe.router import MOST_EXPERTS
from ..nn.convert.filters import DEFAULT_KEEP, KEEPS, Keep
from . import checks
from .checks import Json, Number, Settings, TrainError, kind, require, setting, shown

MOST = 10**9  # the limit of counts
MOST_SIZE = 10**6
SIZE = Number(int, 1, MOST_SIZE)  # of one dimension of the model
VOCABULARY = Number(int, 257, MOST_SIZE)  # with all bytes and the end of a document
POSITIVE = Number(int, 1, MOST)
ABOVE_ZERO = Number(float, 0, MOST, above=True)

# Fields that may change: the token ids are compared themselves, a step's batch does not depend on
# the number of processes or on compiled code, a capacity, which may drop rows, belongs to the
# processes, and the inspector changes no byte of a result.
FREE = (
    *("data", "data_mb", "processes", "expert_parallel", "expert_capacity", "compile"),
    "inspect_every",
)
ALL_ROWS = "all"

CAPACITY = kind(
    f"a number of rows from 1 to {MOST}, {ALL_ROWS!r} or none",
    lambda value: value is None or value == ALL_ROWS or not POSITIVE(value),
)
BOOL = kind("true or false", lambda value: isinstance(value, bool))
DEVICE = kind("'cpu' or 'cuda'", lambda value: value in ("cpu", "cuda"))
PATHS = kind(
    "a list of texts",
    lambda value: isinstance(value, list | tuple) and not any(map(checks.TEXT, value)),
)


# ---- The model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig(Settings):
    """Sizes of the Llama: dim, layers, heads, kv_heads, ffn, and the vocabulary."""

    dim: int = setting(256, SIZE)
    layers: int = setting(4, SIZE)
    heads: int = setting(4, SIZE)
    kv_heads: int = setting(2, SIZE)
    ffn: int = setting(768, SIZE)
    vocab: int = setting(2048, VOCABULARY, "entries of the tokenizer")

    prefix: ClassVar[str] = ""  # of the text
    names: ClassVar[tuple[str, ...]] = ("dim", "layers", "heads", "kv_heads", "ffn")  # in the text
    example: ClassVar[str] = "256,4,4,2,768"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise TrainError(
                "--model: expected dim to be heads times an even width, "
                f"got {self.dim} / {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise TrainError(
                "--model: expected heads to be a multiple of kv_heads, "
                f"got {self.heads} and {self.kv_heads}"
            )

    @staticmethod
    def where(name: str) -> str:
        return "--vocab" if name == "vocab" else f"--model: {name}"

    @property
    def mixtures(self) -> int:
        """The number of layers with experts."""
        return 0

    @property
    def converted_layers(self) -> str:
        """What a recipe converts in the model, for messages."""
        return "linear layers and weights of experts" if self.mixtures else "linear layers"

    @property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        kv_dim = self.dim // self.heads * self.kv_heads
        layer = 2 * self.dim * (self.dim + kv_dim) + 2 * self.dim
        feed_forward = 3 * self.dim * self.ffn * (self.layers - self.mixtures)
        return 2 * self.vocab * self.dim + self.layers * layer + feed_forward + self.dim

    @property
    def description(self) -> str:
        """The sizes as the report writes them."""
        return (
            f"Llama, dim {self.dim}, {self.layers} layers, {self.heads} heads, {self.kv_heads} "
            f"key/value heads, hidden width {self.ffn}, vocabulary {self.vocab}"
        )

    def __str__(self) -> str:
        return self.prefix + ",".join(str(getattr(self, name)) for name in self.names)


@dataclass(frozen=True)
class MixtureConfig(ModelConfig):
    """Sizes of a Llama whose first feed-forward is dense and whose others are mixtures of experts.

    hidden: width of one expert's hidden layer; top_k: experts of a token; shared: experts' widths
    of the SwiGLU that every token goes through; ffn: hidden width of the first layer. `parse_model`
    sets it to hidden * (top_k + shared), the width that a token goes through in the other layers.
    """

    layers: int = setting(4, Number(int, 2, MOST_SIZE))
    ffn: int = setting(768, Number(int, 1, MOST_SIZE**2))
    hidden: int = setting(256, SIZE)
    experts: int = setting(16, Number(int, 1, MOST_EXPERTS))
    top_k: int = setting(2, SIZE)
    shared: int = setting(1, Number(int, 0, MOST_SIZE))

    prefix: ClassVar = "moe:"
    names: ClassVar = (*ModelConfig.names[:4], "hidden", "experts", "top_k", "shared")
    example: ClassVar = "512,4,8,4,256,16,2,1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.experts:
            raise TrainError(
                f"--model: expected top_k of at most {self.experts} experts, got {self.top_k}"
            )

    @property
    def mixtures(self) -> int:
        return self.layers - 1

    @property
    def parameters(self) -> int:
        expert = 3 * self.dim * self.hidden
        mixture = self.experts * self.dim + (self.experts + self.shared) * expert
        return super().parameters + self.mixtures * mixture

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token is multiplied with, embedding included."""
        idle = (self.experts - self.top_k) * 3 * self.dim * self.hidden
        return self.parameters - self.mixtures * idle

    @property
    def description(self) -> str:
        return (
            f"{super().description}; the first layer dense, the others with {self.experts} experts "
            f"of hidden width {self.hidden}, {self.top_k} a token and {self.shared} shared; "
            f"{self.parameters / 1e6:.1f}M parameters, {self.active_parameters / 1e6:.1f}M of them "
            "active for a token"
        )


def parse_model(text: str, vocab: int) -> ModelConfig:
    """Parses the text of a model of either kind."""
    kind = MixtureConfig if text.startswith(MixtureConfig.prefix) else ModelConfig
    numbers = [SIZE.read(size.strip(" ")) for size in text.removeprefix(kind.prefix).split(",")]
    sizes = {name: size for name, size in zip(kind.names, numbers) if isinstance(size, int)}
    if len(numbers) != len(kind.names) or len(sizes) != len(kind.names):
        raise TrainError(
            f"--model: expected {len(kind.names)} integers {kind.prefix}{','.join(kind.names)} "
            f"({kind.prefix}{kind.example}), got {shown(text)}"
        )
    if kind is MixtureConfig:  # at least 1, so that errors name the sizes of the text
        sizes["ffn"] = max(sizes["hidden"] * (sizes["top_k"] + sizes["shared"]), 1)
    return kind(vocab=vocab, **sizes)


# ---- The job -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainConfig(Settings):
    """The settings of a job: one model, data and schedule for every recipe.

    A field with a help text has an option of that name. data: files and folders, none: Python's
    standard library; processes: the number that shares a step's batch; expert_capacity: most rows
    from one of those that divide the experts to another in a layer, "all": as many as there can be,
    None: exact sizes; compile: whether torch.compile compiles the layers.
    """

    model: ModelConfig = setting(ModelConfig(), checks.ANYTHING)  # noqa: RUF009, frozen
    data: Sequence[str] = setting((), PATHS)
    steps: int = setting(300, POSITIVE, "optimizer steps a recipe")
    seq: int = setting(256, POSITIVE, "tokens a sequence")
    batch: int = setting(12, POSITIVE, "sequences a step")
    lr: float = setting(1.5e-3, ABOVE_ZERO, "peak learning rate")
    warmup: int = setting(30, Number(int, 0, MOST), "steps of linear warmup")
    weight_decay: float = setting(0.1, Number(float, 0, MOST), "AdamW's decay of matrices")
    clip: float = setting(1.0, Number(float, 0, 1e30, above=True), "largest norm of the gradient")
    seed: int = setting(1, checks.SEED, "of the initial weights and the batches")
    eval_every: int = setting(25, POSITIVE, "steps between evaluations")
    eval_batches: int = setting(16, POSITIVE, "batches of validation text")
    checkpoint_every: int = setting(50, POSITIVE, "steps between checkpoints")
    inspect_every: int = setting(
        0, Number(int, 0, MOST), "steps between two looks of the inspector, 0: none"
    )
    data_mb: float = setting(30.0, ABOVE_ZERO, "most megabytes (1e6 bytes) of text to read")
    threads: int = setting(
        0, Number(int, 0, 4096), "CPU threads, 0 on a GPU; a GEMM's last bits depend on them"
    )
    expert_parallel: int = setting(1, SIZE, "processes that divide experts, which rows travel to")
    expert_capacity: int | str | None = setting(None, CAPACITY)
    device: str = setting("cpu", DEVICE)
    processes: int = setting(1, SIZE)
    compile: bool = setting(False, BOOL)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expert_parallel > 1:
            require_divisible(self.model, self.processes, self.expert_parallel)
        elif self.expert_capacity is not None:
            raise TrainError(
                f"--expert-capacity {self.expert_capacity}: expected --expert-parallel of at least "
                "2, whose processes send rows to each other, got 1"
            )

    @staticmethod
    def where(name: str) -> str:
        """Returns a field's option on the command line: eval_every is --eval-every."""
        return "--" + name.replace("_", "-")

    @property
    def layout(self) -> str:
        """The division of experts, and whether layers are compiled, as messages write them."""
        text = ""
        if self.expert_parallel > 1:
            text = f", experts divided over groups of {self.expert_parallel}"
        if self.expert_capacity is not None:
            text += f" with capacity {self.expert_capacity}"
        return text + (", compiled" if self.compile else "")

    def identity(self) -> Json:
        """Returns the fields that a resumed job must have in common with the saved one."""
        return {key: value for key, value in asdict(self).items() if key not in FREE}

    @classmethod
    def from_json(cls, where: str, values: Json) -> "TrainConfig":
        require(where, checks.OBJECT, values)
        if "model" in values:
            at, sizes = f"{where}: model", values["model"]
            require(at, checks.OBJECT, sizes)
            model = MixtureConfig if "experts" in sizes else ModelConfig
            values = values | {"model": model.from_json(at, sizes)}
        return super().from_json(where, values)


def require_divisible(model: ModelConfig, processes: int, expert_parallel: int) -> None:
    """Refuses experts that the processes cannot divide."""
    expected, got = "", str(expert_parallel)
    groups = processes // expert_parallel
    if not isinstance(model, MixtureConfig):
        expected = "1 for a model without experts"
    elif processes % expert_parallel:
        expected, got = "a divisor of the job's processes", f"{got} of {processes}"
    elif model.experts % expert_parallel:
        expected = f"a divisor of the {model.experts} experts"
    elif (own := model.experts // expert_parallel) % groups and model.dim % groups:
        expected = (
            f"the {groups} groups of processes to divide the {own} experts of a process, or the "
            f"width {model.dim}, for FSDP2"
        )
    if expected:
        raise TrainError(f"--expert-parallel: expected {expected}, got {got}")


def differences(saved: Json, asked: Json, prefix: str = "") -> list[str]:
    """Lists the fields that differ, a line each: `model.dim: 256 there, 128 asked for`."""
    found = []
    for key in sorted(saved.keys() | asked.keys()):
        there, here = saved.get(key, "nothing"), asked.get(key, "nothing")
        if isinstance(there, dict) and isinstance(here, dict):
            found += differences(there, here, f"{prefix}{key}.")
        elif there != here:
            found.append(f"{prefix}{key}: {there!r} there, {here!r} asked for")
    return found


def refuse(what: str, found: list[str]) -> None:
    """Raises TrainError, which names what differs, unless nothing was found."""
    if found:
        raise TrainError(
            f"{what}:\n  "
            + "\n  ".join(found)
            + "\nexpected the same values for --resume; choose another --out to start afresh"
        )


# ---- The runs ------------------------------------------------------------------------------------

# A comma separates entries unless it belongs to a product: `...*e4m3/tensor,fast dgrad=...`.
SEPARATOR = re.compile(r",(?!\s*fast(?![\w=]))")
NAME = re.compile(r"\s*([A-Za-z_][\w.+-]*)\s*=(.*)", re.DOTALL)
POLICY = re.compile(r"(.*\S) keep=(\S*)")
THEN = " then="  # in an entry: before the recipe of the last steps
LAST_SHARE = 0.15  # of the steps: those of that recipe (arXiv 2509.25149 changes so near the end)
PRODUCTS = ("fprop", "dgrad", "wgrad")
KEEP = kind(f"one of {', '.join(KEEPS)}", lambda value: value in KEEPS)
LAST_RECIPE = kind(
    "a recipe (keep= is written before then=)",
    lambda value: value and not re.search(r" (keep|then)=", f" {value}"),
)


@dataclass(frozen=True)
class RunSpec(Settings):
    """One run of the job: its name in every table and file, its recipe, its seed, its policy.

    then: the recipe of the last steps; "": the same in all.
    """

    name: str = setting("", checks.TEXT)
    recipe: str = setting("", checks.TEXT)  # or a map: "*: nvfp4; layers.3.*: bf16"
    seed: int = setting(0, checks.SEED)
    keep: Keep = setting(DEFAULT_KEEP, KEEP)  # noqa: RUF009, a text
    then: str = setting("", checks.TEXT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder in ("", ".", "..") or len(self.folder.encode()) > 255:
            raise TrainError(
                f"--recipes: expected a name of 1 to 255 bytes that a folder can have, "
                f"got {shown(self.name)}; write NAME=TEXT to choose one"
            )

    @property
    def parts(self) -> tuple["RunSpec", ...]:
        """The run under each of its recipes, in their order: `then` is empty in a part."""
        first = replace(self, then="")
        return (first, replace(first, recipe=self.then)) if self.then else (first,)

    def part_of(self, step: int, steps: int) -> "RunSpec":
        """Returns the part that a step belongs to, from 1, in a run of so many steps."""
        return self.parts[0] if step <= steps_before_last(steps) else self.parts[-1]

    @property
    def converts(self) -> bool:
        """Whether layers are converted in any step."""
        return any(part.recipe != "bf16" for part in self.parts)

    @property
    def folder(self) -> str:
        """The name as a folder: bf16 (seed 2) becomes bf16_seed_2."""
        return re.sub(r"[^\w.+-]+", "_", self.name).strip("_")


def steps_before_last(steps: int) -> int:
    """Returns after how many of a run's steps its last ones begin: there is at least one."""
    return min(round((1 - LAST_SHARE) * steps), steps - 1)


def parse_entry(entry: str, seed: int) -> RunSpec:
    """Parses `[NAME=]TEXT[ keep=POLICY][ then=RECIPE][@SEED]`; without @SEED with the job's."""
    text, name, run_seed = re.sub(r"\s+", " ", entry).strip(), "", seed
    if not text.isprintable():
        raise TrainError(f"--recipes: expected printable text, got {shown(text)}")
    if (match := NAME.fullmatch(text)) and match[1] not in PRODUCTS:
        name, text = match[1], match[2].strip()
    if "@" in text:
        text, _, after = text.rpartition("@")
        found = checks.SEED.read(after.strip())
        require(f"--recipes: {shown(entry)}: after @", checks.SEED, found)
        run_seed, text = int(found), text.strip()
    text, found_then, then = (part.strip() for part in text.partition(THEN))
    if found_then:
        require(f"--recipes: {shown(entry)}: after then=", LAST_RECIPE, then)
    keep = DEFAULT_KEEP
    if match := POLICY.fullmatch(text):
        text, keep = match[1], cast(Keep, match[2])
        require(f"--recipes: {shown(entry)}: after keep=", KEEP, keep)
    if not text:
        raise TrainError(
            f"--recipes: expected [NAME=]TEXT[ keep=POLICY][ then=RECIPE][@SEED], got {entry!r}"
        )
    if not name:
        name = text if keep == DEFAULT_KEEP else f"{text} (keep {keep})"
        name += f"{THEN}{then}" if then else ""
    if run_seed != seed:
        name += f" (seed {run_seed})"
    return RunSpec(name, text, run_seed, keep, then)


def parse_recipes(lists: Iterable[str], entries: Iterable[str], seed: int) -> tuple[RunSpec, ...]:
    """Parses the runs of `--recipes` (comma-separated) and of `--recipe` (an entry each)."""
    texts = [text for joined in lists for text in SEPARATOR.split(joined)]
    runs = tuple(parse_entry(text, seed) for text in [*texts, *entries])
    folders = [run.folder for run in runs]
    for run in runs:
        if folders.count(run.folder) > 1:
            raise TrainError(
                f"--recipes: expected different names, got {run.name!r} twice; "
                "write NAME=TEXT to tell them apart"
            )
    return runs
