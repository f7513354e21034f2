"""Checkpoint folders: safetensors in one file or in shards, and how their weights are quantized.

    config.json           quantization_config.quant_method: METHODS
    hf_quant_config.json  ModelOpt's, where config.json says nothing

A tensor is read where its values are needed, alone. Names, shapes and dtypes are in the headers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
METHODS = ("compressed-tensors", "modelopt", "fp8", "mxfp4")
# safetensors' names of dtypes.
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


def listed(names: Iterable[str], most: int = 4) -> str:
    """Returns names for a message, the first ones where there are many."""
    found = sorted(names)
    rest = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + rest


class Checkpoint:
    """The tensors of a folder, by name.

    Args:
        function: the caller's name, for errors.
        folder: it has *.safetensors, and where these are several an index or not.

    Raises:
        ValueError: there is no such folder or file, or the index names other tensors than the
            files have.
    """

    def __init__(self, function: str, folder: object) -> None:
        from safetensors import safe_open  # which minifloat alone does not need

        self.function, self.folder = function, Path(str(folder))
        if not self.folder.is_dir():
            raise self.error(f"expected a folder of safetensors, got {self.folder}")
        index = self._json(INDEX).get("weight_map")
        files = sorted({*index.values()}) if index else self._files()
        self._file: dict[str, Any] = {}  # of each name
        for file in files:
            if not (self.folder / file).is_file():
                raise self.error(f"expected the shard {file}, got none in {folder}")
            opened = safe_open(self.folder / file, framework="pt")
            self._file |= dict.fromkeys(opened.keys(), opened)
        if index and self._file.keys() != index.keys():
            differ = listed(self._file.keys() ^ index.keys())
            raise self.error(
                f"expected {INDEX} to name the tensors of its files, got a difference in {differ}"
            )

    def _files(self) -> list[str]:
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            raise self.error(f"expected *.safetensors in {self.folder}, got none")
        return files

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def error(self, text: str) -> ValueError:
        """Returns an error of the caller."""
        return ValueError(f"{self.function}: {text}")

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape, from the file's header."""
        return tuple(self._file[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | str:
        """Returns a tensor's dtype, from the file's header; safetensors' text of an unknown one."""
        text = self._file[name].get_slice(name).get_dtype()
        return DTYPES.get(text, text)

    def read(self, name: str) -> Tensor:
        """Returns a tensor on the CPU."""
        return self._file[name].get_tensor(name)

    def require_method(self) -> str:
        """Returns how the weights are quantized.

        Raises:
            ValueError: the folder does not say so, or names a method or an option whose weights
                this library does not read.
        """
        config = self._json("config.json").get("quantization_config") or {}
        method = config.get("quant_method")
        if not config and (config := self._json("hf_quant_config.json")):
            method = "modelopt"
        if method not in METHODS:
            raise self.error(
                f"expected quantization_config.quant_method in "
                f"{self.folder / 'config.json'} as one of {', '.join(METHODS)}, or "
                f"hf_quant_config.json, got {method!r}"
            )
        groups = config.get("config_groups") or {}
        for name, group in groups.items() if isinstance(groups, dict) else ():
            weights = group.get("weights") or {}
            if method == "compressed-tensors" and (
                weights.get("type") != "float" or not weights.get("symmetric", True)
            ):
                raise self.error(
                    f"expected symmetric weights of type float in "
                    f"config_groups.{name}, got {weights}"
                )
        if config.get("transform_config"):
            raise self.error(
                f"expected weights without transforms, got transform_config "
                f"{config['transform_config']}"
            )
        return method


class StateDict(Checkpoint):
    """The tensors of a state dict, as those of a folder."""

    def __init__(self, function: str, tensors: Mapping[str, Tensor]) -> None:
        self.function, self.folder = function, Path("a state dict")
        self._tensors = tensors

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name]
