"""A Hugging Face checkpoint of a real shape with random weights, and a tokenizer that needs no download.

For runs without a network: speed and memory are those of the real model, what it says is noise.

    python examples/make_random_model.py qwen2.5-7b models/random-7b
    python examples/make_random_model.py --list
"""

import argparse
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from megatrain_rl.bench.shapes import SHAPES, shape_config
from megatrain_rl.bench.tokenizer import byte_level_tokenizer
from megatrain_rl.host.machine import usable_cores

SHARD_BYTES = 4_000_000_000
# Elements drawn at a time by one thread, from a generator of their own: the numbers do not depend on how many threads
# there are.
PIECE = 1 << 24


def parameter_shapes(config: PretrainedConfig) -> dict[str, torch.Size]:
    """Shapes by name, in the model's order; a tied output matrix is not among them.

    Names the model's class in `config`, as checkpoints do.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def random_weight(name: str, shape: torch.Size, config: PretrainedConfig, seed: np.random.SeedSequence) -> torch.Tensor:
    """A bf16 weight: matrices are normal with the config's `initializer_range`, biases 0, norms 1."""
    if len(shape) < 2:
        return (
            torch.zeros(shape, dtype=torch.bfloat16)
            if name.endswith("bias")
            else torch.ones(shape, dtype=torch.bfloat16)
        )
    weight = torch.empty(shape.numel(), dtype=torch.bfloat16)
    starts = range(0, weight.numel(), PIECE)

    def fill(start: int, piece_seed: np.random.SeedSequence) -> None:
        piece = weight[start : start + PIECE]
        drawn = np.random.default_rng(piece_seed).standard_normal(len(piece), dtype=np.float32)
        piece.copy_(torch.from_numpy(drawn).mul_(config.initializer_range))

    with ThreadPoolExecutor(usable_cores()) as threads:
        list(threads.map(fill, starts, seed.spawn(len(starts))))
    return weight.view(shape)


def write_checkpoint(config: PretrainedConfig, folder: Path, seed: int) -> int:
    """Write the checkpoint and return its number of parameters. `folder` appears when it is complete."""
    building = folder.with_name(folder.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    tokenizer = byte_level_tokenizer(config.vocab_size)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, tokenizer.eos_token_id, tokenizer.pad_token_id
    config.dtype = torch.bfloat16
    shapes = parameter_shapes(config)
    seeds = dict(zip(shapes, np.random.SeedSequence(seed).spawn(len(shapes)), strict=True))
    split = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: 2 * shape.numel(),
        max_shard_size=SHARD_BYTES,
        filename_pattern="model{suffix}.safetensors",
    )
    groups = list(split.filename_to_tensors.values())
    index: dict[str, str] = {}
    with ThreadPoolExecutor(1) as writer:
        written = writer.submit(lambda: None)
        for number, names in enumerate(groups, start=1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            weights = {name: random_weight(name, shapes[name], config, seeds[name]) for name in names}
            written.result()  # one file is written while the next is drawn
            written = writer.submit(save_file, weights, building / file, metadata={"format": "pt"})
            index |= dict.fromkeys(names, file)
        written.result()
    total = sum(shape.numel() for shape in shapes.values())
    content = {"metadata": {"total_size": 2 * total}, "weight_map": index}
    (building / "model.safetensors.index.json").write_text(json.dumps(content, indent=1))
    config.save_pretrained(building)
    GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id).save_pretrained(building)
    tokenizer.save_pretrained(building)
    building.rename(folder)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", help="a name of --list")
    parser.add_argument("folder", nargs="?", type=Path, help="the checkpoint, a folder that does not exist yet")
    parser.add_argument("--layers", type=int, help="instead of as many as the shape has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the shapes and exit")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(SHAPES))
        return
    if arguments.folder is None:
        parser.error("needs a shape and a folder")
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists already; remove it or choose another folder")
    try:
        config = shape_config(arguments.shape, layers=arguments.layers)
    except ValueError as error:
        parser.error(str(error).replace("--shape ", "shape "))
    total = write_checkpoint(config, arguments.folder, arguments.seed)
    print(f"{arguments.folder}: {arguments.shape}, {config.num_hidden_layers} layers, {total:,} parameters in bf16")


if __name__ == "__main__":
    sys.exit(main())
