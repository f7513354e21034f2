"""mf.export writes a model as servers read it: codes, scales and what a loader must know of them.

The order of work, so that nothing is written of a model that cannot be:

    1  sort the tensors, and name what cannot be written, on all ranks
    2  plan the files, from shapes alone, and write the configuration aside
    3  tensor by tensor: gather, cast, and write each file once it is complete
    4  the index and the configuration, last: a folder without them does not load

The first rank writes. It has one parameter whole, and the codes of a file, 5 GB at most.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import require_bool, require_module, require_one_of
from ..distributed.handshake import raise_on_all
from ..nn.names import join, unwrapped
from ..nn.registry import require_layers_of_torch
from ..spec import Spec
from ..tensor.quantized import Quantized
from .codes import input_tensors, tensors_of
from .configuration import unread_in_modelopt, write_configuration, write_json
from .ranks import (
    first_difference,
    is_writer,
    of_all_ranks,
    wait_for_all,
    whole_of,
    without_values,
)
from .scales import (
    groups_of_other_formats,
    groups_of_other_scales,
    largest_input,
    require_groups,
    shared_amaxes,
    underflows_of,
)
from .schemes import COMPRESSED_TENSORS, FORMATS, INDEX, MODELOPT
from .weights import Found, Names, Weight, find, names_of

PATTERN = "model{suffix}.safetensors"
DTYPES = (None, torch.float32, torch.bfloat16)


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    format: str = COMPRESSED_TENSORS,
    *,
    amaxes: Mapping[str, Tensor] | None = None,
    weight_only: bool = False,
    dtype: torch.dtype | None = None,
    adapter: Any = None,
) -> None:
    """Writes a converted model to a folder that servers and transformers load.

    The codes are those that a forward reads now, byte for byte. Layers that are not converted are
    written as they are, and are listed as ignored. Of a model of transformers the folder has the
    names and the configuration that save_pretrained gives; its tokenizer is the caller's to save.

    All ranks of torch.distributed call it together. Each parameter that they share is gathered
    alone, and the first rank writes.

    Args:
        model: one that mf.quantize_ converted, of any library.
        folder: absent, or empty.
        format: "compressed-tensors" or "modelopt".
        amaxes: what mf.calibrate returned, for servers that cast x by a scale known before: those
            of NVFP4, and of `e4m3/tensor`, which else is cast by token. Without them layers of
            `nvfp4/row` are written as weights alone. None: no layer has one.
        weight_only: whether servers leave x in high precision.
        dtype: what forwards read weights in, where it is not their own: autocast's, or the
            param_dtype of FSDP2. Weights are rounded to it before they are cast.
        adapter: torchtitan's StateDictAdapter of the model, for Hugging Face's names and, where its
            hf_assets_path has one, config.json; None: the model's own names.

    Raises:
        TypeError, ValueError: an argument is not as expected, or a converted layer cannot be
            written: all such layers are named. What one rank raises, or where ranks have other
            arguments or tensors, every rank raises as a ValueError. Nothing is written then.
        OSError: the folder cannot be written, and what was written is removed; a RuntimeError on
            the other ranks, as for a configuration that transformers or JSON refuse, before
            anything is written.

    Source: docs/serve.md.

    Example:
        >>> import os, tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        >>> report = mf.quantize_(model, "*: mxfp8; 1: bf16")
        >>> folder = os.path.join(tempfile.mkdtemp(), "served")
        >>> mf.export(model, folder)
        >>> sorted(os.listdir(folder))
        ['config.json', 'model.safetensors']
    """
    try:
        model = unwrapped(require_module("export", model))
        require_arguments(format, amaxes, weight_only, dtype)
        require_layers_of_torch("export", model)
        target, amaxes = Path(folder), dict(amaxes or {})
        convert = names_of(model, adapter)
        found = found_by(adapter, model, convert, weight_only, amaxes)
        require_groups(found.weights)
        problems = problems_of(found, target, format, amaxes)
    except Exception as error:
        raise_on_all(error, None)
    wait_for_all("export", f"format={format!r}, weight_only={weight_only}, dtype={dtype}")
    raise_together(found, problems)
    shared = shared_amaxes(found.weights, dtype)
    if format == COMPRESSED_TENSORS:
        raise_together(found, underflows_of(found.weights, shared, amaxes, dtype))

    writer = Writer(found, convert, target, format, amaxes, shared, dtype)
    assets = getattr(adapter, "hf_assets_path", None)
    with TemporaryDirectory() as name:
        aside = Path(name)
        writer.attempt(writer.plan)
        writer.attempt(partial(write_configuration, model, found, aside, format, assets))
        raise_everywhere(writer.error)
        try:
            gather(writer)
            writer.attempt(partial(writer.finish, aside))
        except BaseException:
            writer.take_back()
            raise
    raise_everywhere(writer.error)
    if is_writer():
        warn_of_groups(writer)


# ---- checks on all ranks -------------------------------------------------------------------------


def require_arguments(format: object, amaxes: object, weight_only: object, dtype: object) -> None:
    """Checks the arguments that need no model."""
    require_one_of("format", format, FORMATS)
    require_bool("weight_only", weight_only)
    require_one_of("dtype", dtype, DTYPES)
    if not isinstance(amaxes, (Mapping, type(None))):
        raise TypeError(f"amaxes: expected a mapping of names, got {type(amaxes).__name__}")


def found_by(
    adapter: Any,
    model: nn.Module,
    convert: Names,
    weight_only: bool,
    amaxes: Mapping[str, Tensor],
) -> Found:
    """Returns the tensors of a model; ValueError where an adapter is of another."""
    try:
        return find(model, adapter, convert, weight_only, amaxes)
    except Exception as error:
        if adapter is None:
            raise
        raise ValueError(f"export: expected an adapter of this model, got {error!r}") from error


def is_taken(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def problems_of(
    found: Found, folder: Path, format: str, amaxes: Mapping[str, Tensor]
) -> dict[str, str]:
    """Returns why the model cannot be written, by the layer's or the argument's name."""
    problems = dict(found.problems)
    if format == MODELOPT:
        problems |= unread_in_modelopt(found)
    for weight in found.weights:
        if weight.layer not in problems and not weight.is_finite():
            problems[weight.layer] = "its weight has Inf or NaN"
    problems |= {n: "it has no values, on meta" for n, t in found.others.items() if t.is_meta}
    known = {weight.layer for weight in found.weights} | set(found.problems)
    problems |= {f"amaxes: {n}": "no converted layer has this name" for n in {*amaxes} - known}
    problems |= {
        f"amaxes: {n}": f"expected a finite tensor () of at least 0, got {amax!r}"
        for n, amax in amaxes.items()
        if not (isinstance(amax, Tensor) and amax.dim() == 0 and 0 <= amax.item() < math.inf)
    }
    if not found.weights and not found.problems:
        problems["model"] = "expected layers that mf.quantize_ converted, got none"
    if is_taken(folder):
        problems["folder"] = f"expected an absent or empty one, got {folder}"
    return problems


def described(found: Found) -> list[str]:
    """Returns what ranks compare of the tensors that they gather, in order."""
    texts = []
    for weight in found.weights:
        fprop = weight.state.recipe.fprop
        scale = ", a scale of x" if weight.storage.needs_input_amax else ""
        texts.append(f"{weight.name} {weight.shape} of {fprop.a}*{fprop.b}{scale}")
    return texts + list(found.others)


def raise_together(found: Found, problems: dict[str, str]) -> None:
    """Raises ValueError on every rank where one has a problem, or has other tensors."""
    every = of_all_ranks((described(found), problems))
    joined = {name: why for _, of_rank in every for name, why in of_rank.items()}
    if difference := first_difference([texts for texts, _ in every]):
        joined["ranks"] = f"expected the same tensors on every rank, got {difference}"
    if joined:
        listed = "".join(f"\n  {name or 'the model'}: {why}" for name, why in joined.items())
        raise ValueError(f"export: expected a model that can be written, got{listed}")


def raise_everywhere(error: Exception | None) -> None:
    """Raises the writer's error: itself, and on other ranks its text."""
    texts = of_all_ranks(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    text = next((text for text in texts if text is not None), None)
    if text is not None:
        raise RuntimeError(f"export: rank 0 could not write the folder: {text}")


def gather(writer: Writer) -> None:
    """Gathers each tensor on all ranks, and gives it to the writer."""
    for weight in writer.found.weights:
        whole, amax = weight.whole(), weight.whole_amax(writer.shared)
        writer.attempt(partial(writer.take_weight, weight, whole, amax))
    for name, tensor in writer.found.others.items():
        whole = whole_of(tensor, writer.found.divided.get(name))
        writer.attempt(partial(writer.take_other, name, whole))


# ---- files ---------------------------------------------------------------------------------------


@dataclass
class Writer:
    """The files of a folder, each written once all of its tensors are there."""

    found: Found
    convert: Names
    folder: Path
    format: str
    amaxes: dict[str, Tensor]  # of x
    shared: dict[str, Tensor]  # amaxes of W that layers share
    dtype: torch.dtype | None
    files: dict[str, str] = field(default_factory=dict)  # of each tensor
    missing: dict[str, set[str]] = field(default_factory=dict)  # tensors of each file
    held: defaultdict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    tensor_amaxes: dict[str, Tensor] = field(default_factory=dict)  # of layers with a tensor scale
    written: list[Path] = field(default_factory=list)
    error: Exception | None = None

    def attempt(self, step: Callable[[], None]) -> None:
        """Runs a step on the first rank, unless one failed before: other ranks still gather."""
        if self.error is None and is_writer():
            try:
                step()
            except Exception as error:
                self.error = error
                self.take_back()

    def take_back(self) -> None:
        """Removes what was written."""
        for path in self.written:
            with suppress(OSError):  # of a disk that fails
                path.unlink(missing_ok=True)

    def plan(self) -> None:
        """Divides tensors without values among files."""
        from huggingface_hub import split_state_dict_into_shards_factory

        tensors: dict[str, Tensor] = {}
        every = [self.layers(w, w.codes_without_values()) for w in self.found.weights]
        for name, tensor in self.found.others.items():
            empty = without_values(tensor, self.found.divided.get(name))
            every.append(dict(self.convert({name: empty})))
        for of_one in every:
            if twice := sorted(tensors.keys() & of_one.keys()):
                raise ValueError(f"export: expected tensors of different names, got two {twice[0]}")
            tensors |= of_one
        self.split = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda tensor: tensor.numel() * tensor.itemsize,
            get_storage_id=lambda tensor: None,
            filename_pattern=PATTERN,
        )
        self.files = self.split.tensor_to_filename
        self.missing = {file: {*names} for file, names in self.split.filename_to_tensors.items()}

    def take_weight(self, weight: Weight, whole: Tensor, amax: Tensor | None) -> None:
        """Casts a parameter, and writes its layers."""
        self.take(self.layers(weight, weight.cast(whole, self.dtype, amax)))

    def take_other(self, name: str, whole: Tensor) -> None:
        """Writes a tensor as it is."""
        self.take(dict(self.convert({name: whole.cpu()})))

    def layers(self, weight: Weight, q: Quantized) -> dict[str, Tensor]:
        """Returns the tensors of a parameter's layers by their names in the folder."""
        found: dict[str, Tensor] = {}
        is_one_scale = Spec.parse(q.spec).amax_of == "tensor"
        x, x_amax = Spec.parse(weight.state.recipe.fprop.a), None
        if weight.storage.needs_input_amax:
            x_amax = largest_input(weight, self.found.weights, self.amaxes)
        for part in weight.parts:
            tensors = tensors_of(q, part, weight.storage, self.format)
            if x_amax is not None:
                tensors |= input_tensors(x, x_amax, weight.storage, self.format)
            found |= {join(part.name, name): tensor for name, tensor in tensors.items()}
            if is_one_scale and not q.codes.is_meta:
                amax = q.amax[part.expert] if q.amax.dim() else q.amax
                self.tensor_amaxes[part.name] = amax.cpu()
        return found

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Keeps tensors until their files are complete, which are then written."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        for name, tensor in tensors.items():  # safetensors takes none that shares memory
            file, tensor = self.files[name], tensor.contiguous()
            is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
            self.held[file][name] = tensor.clone() if is_view else tensor
            self.missing[file].discard(name)
            if not self.missing[file]:
                self.folder.mkdir(parents=True, exist_ok=True)
                tensors_of_file, path = apart(self.held.pop(file)), self.folder / file
                self.written.append(path)
                try:
                    save_file(tensors_of_file, path, metadata={"format": "pt"})
                except SafetensorError as error:  # such as of a full disk
                    raise OSError(f"export: {path}: {error}") from error

    def finish(self, configuration: Path) -> None:
        """Writes the index and the configuration."""
        if self.split.is_sharded:
            index = {"metadata": self.split.metadata, "weight_map": self.files}
            self.written.append(self.folder / INDEX)
            write_json(self.folder / INDEX, index)
        for path in configuration.iterdir():
            self.written.append(self.folder / path.name)
            shutil.copy(path, self.folder)


def warn_of_groups(writer: Writer) -> None:
    """Warns of layers that servers join, and that have several scales or formats."""
    if groups := groups_of_other_scales(writer.tensor_amaxes):
        warnings.warn(
            f"export: {len(groups)} groups of layers that servers compute as one have tensor "
            f"scales of their own, such as {groups[0]}. vLLM takes one of the scales for all "
            "of them, so what it computes differs from the codes' values; convert the model "
            "with share_amax='servers' before it is trained",
            stacklevel=3,
        )
    if groups := groups_of_other_formats(writer.found):
        warnings.warn(
            f"export: {len(groups)} groups of layers that servers compute as one have several "
            f"formats, such as {groups[0]}. Servers that join them need one; convert all "
            "layers of a group, by one recipe, or none",
            stacklevel=3,
        )


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors of which no two share memory: buffers that are views of one another."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return found
