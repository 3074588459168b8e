"""A trained model is written as a folder that transformers (4 and 5) and vLLM load by itself, with its tokenizer."""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from megatrain_rl.model.hf_io import INDEX

log = logging.getLogger(__name__)

SHARD_BYTES = 2 << 30
_TOKENIZER_FILES = (
    "tokenizer*", "tokenization*.py", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken",
    "chat_template*", "*.jinja", "additional_chat_templates",
)  # fmt: skip
_OTHER_FILES = ("generation_config.json", "preprocessor_config.json", "processor_config.json")


class Saveable(Protocol):
    """A tokenizer or a generation config of transformers."""

    def save_pretrained(self, directory: Path) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Companions:
    """What lies beside the weights.

    files: contents by their paths from the folder, as they were when the model was read; it may be gone when a
        checkpoint is written.
    tokenizer, generation_config: as they were used; saved in the place of such files.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    tokenizer: Saveable | None = None
    generation_config: Saveable | None = None

    @classmethod
    def read(cls, source: Path) -> "Companions":
        """The tokenizer and generation files of a model's folder. What cannot be read is told and left out."""
        files = {}
        for pattern in (*_TOKENIZER_FILES, *_OTHER_FILES):
            for path in source.glob(pattern):
                for file in path.rglob("*") if path.is_dir() else (path,):
                    if file.is_dir():
                        continue
                    try:
                        files[str(file.relative_to(source))] = file.read_bytes()
                    except OSError as error:  # a link to nothing, say
                        log.warning("%s cannot be read and will be in no checkpoint: %s", file, error)
        return cls(files=files)

    def write(self, directory: Path) -> None:
        for name, content in self.files.items():
            if self.tokenizer is not None and name not in _OTHER_FILES:
                continue
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
        for part in (self.tokenizer, self.generation_config):
            if part is not None:
                part.save_pretrained(directory)


def write_checkpoint(
    directory: Path, config: PretrainedConfig, tensors: Iterable[tuple[str, Tensor]], companions: Companions
) -> None:
    """Write `config` and `tensors` as a directory that `AutoModelForCausalLM.from_pretrained` loads."""
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
    companions.write(directory)
    _write_config(directory, config, dtype=str(next(iter(by_name.values())).dtype).removeprefix("torch."))


def _write_config(directory: Path, config: PretrainedConfig, *, dtype: str) -> None:
    saved = config.to_dict()
    saved["dtype"] = dtype
    for key in ("_attn_implementation", "quantization_config", "compression_config"):
        saved.pop(key, None)  # of how the model was run or stored, not of these weights
    type(config)(**saved).save_pretrained(directory)
    file = directory / "config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | _older_names(written), indent=2, sort_keys=True) + "\n")


def _older_names(config: dict[str, Any]) -> dict[str, Any]:
    """Settings under the names that transformers 4 reads. It knows no `rope_parameters` and would take defaults."""
    older: dict[str, Any] = {"torch_dtype": config.get("dtype")}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        older["rope_theta"] = rope["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        older["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    return older
