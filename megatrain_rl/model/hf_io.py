"""A Hugging Face checkpoint folder is read tensor by tensor, from memory-mapped safetensors.

What the folder has to be like is checked by folder.py; folders are written by hf_export.py.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class CheckpointReader:
    """The tensors of a folder by name. Every file is opened at once: a missing or cut one is a ValueError here.

    names: of all tensors. raw_config: config.json as it stands.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise ValueError(f"model path {str(directory)!r} is not a directory")
        if not (self.directory / "config.json").is_file():
            raise ValueError(f"model path {str(directory)!r} has no config.json")
        self.raw_config = read_json(self.directory / "config.json")
        self._require_own_weights()
        self._open: dict[str, safe_open] = {}
        has_index, has_file = (self.directory / INDEX).is_file(), (self.directory / WEIGHTS).is_file()
        if not has_index and not has_file:
            raise ValueError(
                f"model path {str(directory)!r} has neither {WEIGHTS} nor {INDEX}; other formats are not read"
            )
        self._file_of = self._indexed() if has_index else dict.fromkeys(self._opened(WEIGHTS).keys(), WEIGHTS)
        if has_file and set(self._file_of.values()) != {WEIGHTS}:
            raise ValueError(
                f"model path {str(directory)!r} has {WEIGHTS} and {INDEX}, which names other files: transformers would "
                "load the first and vLLM the others; take out the one that is not meant"
            )
        self.names = frozenset(self._file_of)

    def _require_own_weights(self) -> None:
        """transformers would load other weights than those of the usual files."""
        if (self.directory / "adapter_config.json").is_file():
            raise ValueError(
                f"model path {str(self.directory)!r} has adapter_config.json, and adapters are not loaded: merge it into "
                "its base model and save that (peft's merge_and_unload), or take the adapter's files out of the folder"
            )
        named = self.raw_config.get("transformers_weights")
        if named not in (None, WEIGHTS, INDEX):
            raise ValueError(
                f"{self.directory / 'config.json'} has transformers_weights={named!r}: only {WEIGHTS} and {INDEX} are read"
            )

    def _indexed(self) -> dict[str, str]:
        index = read_json(self.directory / INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{self.directory / INDEX} has no weight_map: the file is damaged")
        file_of = dict(weight_map)
        for file in sorted(set(weight_map.values())):
            held = set(self._opened(file).keys())
            missing = sorted(name for name, where in weight_map.items() if where == file and name not in held)
            if missing:
                raise ValueError(f"{self.directory / file} has no tensor {missing[0]!r}, which {INDEX} says it has")
            for name in sorted(held):
                other = file_of.setdefault(name, file)  # transformers loads what the index forgot, too
                if other != file and not torch.equal(
                    self._opened(file).get_tensor(name), self._opened(other).get_tensor(name)
                ):
                    raise ValueError(
                        f"tensor {name!r} is in {self.directory / file} and, with other values, in {other}: files of two "
                        "models lie in one folder"
                    )
        return file_of

    def _opened(self, file: str) -> safe_open:
        if not (self.directory / file).is_file():
            raise ValueError(f"model path {str(self.directory)!r}: the index names {file}, which is missing")
        if file not in self._open:
            self._open[file] = open_safetensors(self.directory / file)
        return self._open[file]

    def config(self) -> PretrainedConfig:
        try:
            return AutoConfig.from_pretrained(self.directory)
        except Exception as error:  # values of another kind than transformers expects end in errors of many kinds
            raise ValueError(f"{self.directory / 'config.json'} cannot be read: {error}") from error

    def place(self, name: str) -> str:
        """How to name a tensor in a message: its file and its name."""
        return f"{self.directory / self._file(name)}: tensor {name!r}"

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The dtype of a tensor, by safetensors' name for it, and its shape."""
        part = self._open[self._file(name)].get_slice(name)
        return part.get_dtype(), tuple(part.get_shape())

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, memory-mapped: pages are read when used."""
        return self._open[self._file(name)].get_tensor(name)

    def _file(self, name: str) -> str:
        if name not in self._file_of:
            raise ValueError(f"model path {str(self.directory)!r} has no tensor {name!r}, which config.json asks for")
        return self._file_of[name]


def open_safetensors(file: Path) -> safe_open:
    """Open a file of tensors on the CPU. A ValueError that names the file if it is no such file, or is cut."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read, it is damaged or incomplete: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. A ValueError that names the file if it does not."""
    try:
        content = json.loads(file.read_text())
    except (ValueError, OSError) as error:  # ValueError: no JSON, or no text
        raise ValueError(f"{file} cannot be read, it is damaged or incomplete: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} cannot be read: it holds no JSON object")
    return content
