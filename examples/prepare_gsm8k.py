"""GSM8K-style questions as VERL's parquet files: train.parquet and test.parquet.

    python examples/prepare_gsm8k.py data/gsm8k                                        openai/gsm8k from the hub
    python examples/prepare_gsm8k.py data/gsm8k --train train.jsonl --test test.jsonl  local files

Local files (.jsonl, .json, .parquet) have the columns `question` and `answer`; an answer ends with `#### NUMBER`.
Rewards are VERL's own rule for this data source: 1 when the last `#### NUMBER` of a response is right, else 0.
"""

import argparse
import re
import sys
from pathlib import Path

import pandas as pd

HUB_NAME = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_FINAL = re.compile(r"####\s*(-?[\d.,]+)\s*$")


def read_file(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    readers = {".jsonl": lambda p: pd.read_json(p, lines=True), ".json": pd.read_json, ".parquet": pd.read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"{path}: must be one of {', '.join(readers)}")
    return readers[path.suffix](path)


def read_hub(name: str, split: str) -> pd.DataFrame:
    from datasets import load_dataset

    try:
        return load_dataset(name, "main", split=split).to_pandas()
    except Exception as error:  # the hub's library raises dozens of kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{name} could not be read from the hub ({reason}); give local files by --train and --test"
        ) from error


def final_answer(answer: str) -> str:
    """The number after `####`, without thousands separators, as VERL's rule compares it."""
    match = _FINAL.search(answer.strip())
    if match is None:
        raise ValueError(f"answer {answer[-60:]!r} does not end with '#### NUMBER'")
    return match.group(1).replace(",", "")


def rows(frame: pd.DataFrame, split: str, source: str) -> list[dict]:
    missing = {"question", "answer"} - set(frame.columns)
    if missing:
        raise ValueError(f"{source}: no column {', '.join(sorted(missing))}")
    return [
        {
            "data_source": HUB_NAME,  # chooses the reward rule
            "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": final_answer(answer)},
            "extra_info": {"split": split, "index": i, "question": question, "answer": answer},
        }
        for i, (question, answer) in enumerate(zip(frame["question"], frame["answer"], strict=True))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where train.parquet and test.parquet go")
    parser.add_argument("--hub-name", default=HUB_NAME, help="data set of the hub, with configuration `main`")
    parser.add_argument("--train", type=Path, help="local file instead; needs --test")
    parser.add_argument("--test", type=Path, help="local file instead; needs --train")
    parser.add_argument("--limit", type=int, help="most questions of each file")
    arguments = parser.parse_args()
    if (arguments.train is None) != (arguments.test is None):
        parser.error("--train and --test go together")
    try:
        tables = {}
        for split in ("train", "test"):
            file = getattr(arguments, split)
            frame = read_hub(arguments.hub_name, split) if file is None else read_file(file)
            tables[split] = rows(frame.head(arguments.limit or len(frame)), split, str(file or arguments.hub_name))
    except ValueError as error:
        sys.exit(f"prepare_gsm8k: {error}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for split, table in tables.items():
        pd.DataFrame(table).to_parquet(arguments.folder / f"{split}.parquet")
        print(f"{arguments.folder / split}.parquet: {len(table)} questions")


if __name__ == "__main__":
    main()
