"""Makes everything the quickstart trains on, in one folder.

The folder: model/ (random Qwen2, byte-level tokenizer), sft.parquet (careless demonstrations), train.parquet (problems
for GRPO), held_out.parquet.

usage: build.py FOLDER SEED [HIDDEN]

HIDDEN: the model's width, 96 unless given, in four heads; a multiple of 128 is in heads of 64, which vLLM wants.
"""

import random
import sys
from pathlib import Path

import pandas as pd
import torch
from task import Problem, careless_answer, draw_problems
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megatrain_rl.bench.tokenizer import byte_level_tokenizer

NUM_DEMONSTRATIONS = 4096
NUM_TRAIN = 1024
NUM_HELD_OUT = 256
# Sloppy enough that the warmed-up policy is right about one time in four: the rest is for GRPO to find out from the
# reward.
ERROR_RATE = 0.4


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, hidden: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    heads = 4 if hidden < 128 else hidden // 64
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        # Qwen's 0.02 is for wide models: at this width attention would take hundreds of steps to leave the uniform.
        initializer_range=0.1 * (96 / hidden) ** 0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def rl_row(problem: Problem, split: str, index: int) -> dict:
    return {
        "data_source": "quickstart/addition",
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index},
    }


def sft_row(problem: Problem, rng: random.Random) -> dict:
    answer = careless_answer(problem, ERROR_RATE, rng)
    return {"messages": [{"role": "user", "content": problem.question}, {"role": "assistant", "content": answer}]}


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    hidden = int(sys.argv[3]) if len(sys.argv) > 3 else 96
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer()
    model = build_model(tokenizer, seed, hidden)
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    stop = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    stop.save_pretrained(folder / "model")

    rng = random.Random(seed)
    problems = draw_problems(NUM_DEMONSTRATIONS + NUM_TRAIN + NUM_HELD_OUT, rng)
    demonstrations, rest = problems[:NUM_DEMONSTRATIONS], problems[NUM_DEMONSTRATIONS:]
    train, held_out = rest[:NUM_TRAIN], rest[NUM_TRAIN:]
    pd.DataFrame([sft_row(p, rng) for p in demonstrations]).to_parquet(folder / "sft.parquet")
    pd.DataFrame([rl_row(p, "train", i) for i, p in enumerate(train)]).to_parquet(folder / "train.parquet")
    pd.DataFrame([rl_row(p, "held_out", i) for i, p in enumerate(held_out)]).to_parquet(folder / "held_out.parquet")
    print(
        f"model: Qwen2, {model.num_parameters():,} parameters, {len(tokenizer)} tokens; "
        f"problems: {len(demonstrations)} demonstrations, {len(train)} for GRPO, {len(held_out)} held out"
    )


if __name__ == "__main__":
    main()
