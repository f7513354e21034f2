"""Checkpoint folders: safetensors in one file or in shards, and how their weights are quantized.

    config.json           quantization_config.quant_method: METHODS
    hf_quant_config.json  ModelOpt's, where config.json says nothing

Files are mapped to memory: a tensor is read from the disk where its values are, and alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .schemes import COMPRESSED_TENSORS, INDEX, METHODS, MODELOPT


class Source(NamedTuple):
    """Tensors by name, for a function that loads them.

    Args:
        function: its name, for errors.
        where: what the tensors are of, for errors.
        tensors: those of a folder or of a state dict.
    """

    function: str
    where: object
    tensors: Mapping[str, Tensor]

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.function}: {text}")

    def error_of_list(self, expected: str, problems: list[str]) -> ValueError:
        """Returns an error with the first 8 problems."""
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        return self.error(f"{expected} in {self.where}, got: {'; '.join(problems[:8])}{more}")


class MappedTensors(Mapping[str, Tensor]):
    """The tensors of safetensors files, by name."""

    def __init__(self, source: Source, paths: Iterable[Path], index: Mapping[str, Path]) -> None:
        """Opens the files.

        Args:
            source: for errors.
            paths: of the files.
            index: name of a tensor -> the file that has it; empty: there is no index.

        Raises:
            ValueError: a file is damaged, two have a tensor and no index names one of them, or the
                index names others than the files have.
        """
        from safetensors import SafetensorError, safe_open  # which minifloat alone does not need

        self.strays: list[str] = []  # names in files that the index does not name for them
        self._files: dict[str, Any] = {}
        found: dict[str, Path] = {}
        for path in paths:
            try:
                opened = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise source.error(f"expected safetensors in {path}, got {error}") from None
            names: list[str] = opened.keys()
            for name in names:
                if index.get(name, path) != path:
                    self.strays.append(f"{name} in {path.name}")
                    continue
                if name in found:
                    raise source.error(
                        f"expected {INDEX} where files have the same names, got {name} in "
                        f"{found[name].name} and {path.name}"
                    )
                found[name], self._files[name] = path, opened
        if index and self.keys() != index.keys():
            differing = min(self.keys() ^ index.keys())
            raise source.error(
                f"expected {INDEX} to name the tensors of its files, got {differing}"
            )

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_json(source: Source, path: Path, key: str | None = None) -> dict[str, Any]:
    """Returns a file's object, or the one of a key in it; nothing where there is none.

    Raises:
        ValueError: the file is no JSON of objects.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise source.error(f"expected JSON in {path}, got {error}") from None
    found = require_object(source, str(path), found)
    if key is None:
        return found
    return require_object(source, f"{path} at {key!r}", found.get(key) or {})


def require_object(source: Source, where: str, value: Any) -> dict[str, Any]:
    """Returns a value of JSON; ValueError where it is no object."""
    if not isinstance(value, dict):
        raise source.error(f"expected an object in {where}, got {type(value).__name__}")
    return value


def open_folder(function: str, name: object) -> Source:
    """Opens a checkpoint's files.

    Raises:
        ValueError: there is no such folder or file, a file is damaged, files have the same names
            without an index, or it names other tensors than they have.
    """
    folder = Path(str(name))
    source = Source(function, folder, {})
    index = read_json(source, folder / INDEX, "weight_map")
    paths = sorted({folder / str(file) for file in index.values()} or folder.glob("*.safetensors"))
    absent = [str(path) for path in paths if not path.is_file()]
    if absent or not paths:
        raise source.error(f"expected safetensors in {folder}, got no {(absent or ['file'])[0]}")
    of_index = {name: folder / str(file) for name, file in index.items()}
    return source._replace(tensors=MappedTensors(source, paths, of_index))


def require_method(source: Source) -> None:
    """Raises ValueError where a folder's quantization is none that this library reads."""
    folder = Path(str(source.where))
    config = read_json(source, folder / "config.json", "quantization_config")
    method = config.get("quant_method")
    if not config and read_json(source, folder / "hf_quant_config.json"):
        method = MODELOPT
    if method not in METHODS:
        raise source.error(
            f"expected quantization_config.quant_method in {folder / 'config.json'} as one of "
            f"{', '.join(METHODS)}, or hf_quant_config.json, got {method!r}"
        )
    groups = config.get("config_groups") if method == COMPRESSED_TENSORS else None
    for name, group in require_object(source, "config_groups", groups or {}).items():
        where = f"config_groups.{name}"
        weights = require_object(source, where, group).get("weights") or {}
        weights = require_object(source, f"{where}.weights", weights)
        if not weights:  # a group of activations alone, such as those of attention
            continue
        if weights.get("type") != "float" or not weights.get("symmetric", True):
            raise source.error(
                f"expected symmetric weights of type float in {where}, got {weights}"
            )
    if config.get("transform_config"):
        raise source.error(
            f"expected weights without transforms, got transform_config "
            f"{config['transform_config']}"
        )


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Tells whether two tensors are equal, where each NaN is the one of the other."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
