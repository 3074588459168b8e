"""Hugging Face checkpoint directories: read by tensor from memory-mapped safetensors, written in bounded shards."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 << 30
# Copied beside saved weights so that the directory loads by itself.
_COMPANIONS = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "generation_config.json")  # fmt: skip


class CheckpointReader:
    """Tensors of a checkpoint directory by name. Every file named by the index is checked to exist at once."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise ValueError(f"model path {str(directory)!r} is not a directory")
        if not (self.directory / "config.json").is_file():
            raise ValueError(f"model path {str(directory)!r} has no config.json")
        if (self.directory / INDEX).is_file():
            self._file_of: dict[str, str] = json.loads((self.directory / INDEX).read_text())["weight_map"]
        elif (self.directory / WEIGHTS).is_file():
            with safe_open(self.directory / WEIGHTS, framework="pt") as f:
                self._file_of = dict.fromkeys(f.keys(), WEIGHTS)
        else:
            raise ValueError(f"model path {str(directory)!r} has neither {WEIGHTS} nor {INDEX}")
        for file in sorted(set(self._file_of.values())):
            if not (self.directory / file).is_file():
                raise ValueError(f"model path {str(directory)!r}: the index names {file}, which is missing")
        self._open: dict[str, safe_open] = {}

    def config(self) -> PretrainedConfig:
        return AutoConfig.from_pretrained(self.directory)

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, memory-mapped: pages are read when used."""
        if name not in self._file_of:
            raise ValueError(f"model path {str(self.directory)!r} has no tensor {name!r}")
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(self.directory / file, framework="pt", device="cpu")
        return self._open[file].get_tensor(name)


def write_checkpoint(
    directory: Path, config: PretrainedConfig, tensors: Iterable[tuple[str, Tensor]], companions_of: Path | None
) -> None:
    """Write `config` and `tensors` as a directory that `AutoModelForCausalLM.from_pretrained` loads.

    companions_of: a directory whose tokenizer and generation files are copied along.
    """
    directory.mkdir(parents=True)
    by_name = dict(tensors)
    # The library's own function for torch counts a tensor's whole storage, which here is a block of many parameters.
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: by_name[name] for name in names}, directory / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=1))
    saved = config.to_dict()
    saved["dtype"] = str(next(iter(by_name.values())).dtype).removeprefix("torch.")
    saved.pop("_attn_implementation", None)
    type(config)(**saved).save_pretrained(directory)
    if companions_of is not None:
        for pattern in _COMPANIONS:
            for companion in companions_of.glob(pattern):
                shutil.copyfile(companion, directory / companion.name)
