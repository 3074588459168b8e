"""Measures a checkpoint on the held-out problems with transformers alone, independent of trainer and rollout.

usage: evaluate.py CHECKPOINT held_out.parquet RESULT.json SEED

Writes {"reward", "greedy_accuracy", "samples": [[question, answer, completion], ...]}. The reward is the mean of the
training reward over SAMPLES draws per problem at temperature 1, the policy that GRPO trains; the samples are first
draws.
"""

import json
import sys
from pathlib import Path

import pandas as pd
import torch
from task import compute_score
from transformers import AutoModelForCausalLM, AutoTokenizer

SAMPLES = 4
MAX_NEW_TOKENS = 8
NUM_SHOWN = 6


def complete(model, tokenizer, prompts: list[list[int]], **sampling) -> list[str]:
    """One completion a prompt, in order. Prompts have one length: three-digit numbers throughout."""
    ids = torch.tensor(prompts)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, **sampling)
    return tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)


def main() -> None:
    checkpoint, problems, result, seed = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    frame = pd.read_parquet(problems)
    answers = [row["ground_truth"] for row in frame["reward_model"]]
    chats = [[dict(message) for message in row] for row in frame["prompt"]]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]

    torch.manual_seed(int(seed))
    drawn = complete(model, tokenizer, prompts * SAMPLES, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    scores = [compute_score("", text, answer) for text, answer in zip(drawn, answers * SAMPLES, strict=True)]
    greedy = complete(model, tokenizer, prompts, do_sample=False)
    right = sum(text == answer for text, answer in zip(greedy, answers, strict=True))
    summary = {
        "reward": sum(scores) / len(scores),
        "greedy_accuracy": right / len(answers),
        "samples": [[chats[i][0]["content"], answers[i], drawn[i]] for i in range(NUM_SHOWN)],
    }
    Path(result).write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
