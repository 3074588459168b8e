"""GSM8K-style questions as VERL's parquet files: train.parquet and test.parquet.

    python examples/prepare_gsm8k.py data/gsm8k                                        openai/gsm8k from the hub
    python examples/prepare_gsm8k.py data/gsm8k --train train.jsonl --test test.jsonl  local files

Local files (.jsonl, .json, .parquet) have the columns `question` and `answer`; an answer ends with `#### NUMBER`. Rows
without such an answer are left out, counted by reason.
Rewards are VERL's own rule for this data source: 1 when the last `#### NUMBER` of a response is right, else 0.
"""

import argparse
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

HUB_NAME = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_FINAL = re.compile(r"####\s*(-?[\d.,]+)\s*$")
_NUMBER = re.compile(r"-?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?")


def read_file(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    readers = {".jsonl": lambda p: pd.read_json(p, lines=True), ".json": pd.read_json, ".parquet": pd.read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"{path}: must be one of {', '.join(readers)}")
    try:
        return readers[path.suffix](path)
    except Exception as error:  # pandas' and pyarrow's errors have no common class
        raise ValueError(f"{path}: cannot be read: {first_line(error)}") from error


def read_hub(name: str, split: str) -> pd.DataFrame:
    from datasets import load_dataset

    try:
        return load_dataset(name, "main", split=split).to_pandas()
    except Exception as error:  # the hub's library raises dozens of kinds
        raise ValueError(
            f"{name} could not be read from the hub ({first_line(error)}); give local files by --train and --test"
        ) from error


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def final_answer(answer: Any) -> str:
    """The number after `####`, without thousands separators, as VERL's rule compares it. A ValueError says why there is
    none."""
    if not isinstance(answer, str):
        nothing = pd.api.types.is_scalar(answer) and pd.isna(answer)
        raise ValueError("the answer is empty" if nothing else "the answer is no text")
    match = _FINAL.search(answer.strip())
    if match is None:
        raise ValueError("the answer does not end with '#### NUMBER'")
    if not _NUMBER.fullmatch(match.group(1)):
        raise ValueError("the answer ends with a number that is not written like 1,234.5")
    return match.group(1).replace(",", "")


def rows(frame: pd.DataFrame, split: str, source: str) -> tuple[list[dict], Counter[str]]:
    """The rows that VERL reads, and how many were left out, by reason."""
    missing = {"question", "answer"} - set(frame.columns)
    if missing:
        raise ValueError(f"{source}: no column {', '.join(sorted(missing))}")
    made, dropped, example = [], Counter[str](), ""
    for i, (question, answer) in enumerate(zip(frame["question"], frame["answer"], strict=True)):
        try:
            if not isinstance(question, str) or not question.strip():
                raise ValueError("there is no question")
            truth = final_answer(answer)
        except ValueError as error:
            dropped[str(error)] += 1
            example = example or f"{error}: {str(answer)[-60:]!r}"
            continue
        made.append(
            {
                "data_source": HUB_NAME,  # chooses the reward rule
                "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"split": split, "index": i, "question": question, "answer": answer},
            }
        )
    if not made:
        raise ValueError(f"{source}: no question is left of {len(frame)}" + (f"; {example}" if example else ""))
    return made, dropped


def write(tables: dict[str, list[dict]], folder: Path) -> None:
    """Written beside their places, and renamed once all are whole. An OSError says what the disk refuses."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = {split: folder / f"{split}.parquet.tmp" for split in tables}
    for file in beside.values():
        if file.with_suffix("").is_dir():
            raise ValueError(f"{file.with_suffix('')} is a folder")
    try:
        for split, table in tables.items():
            pd.DataFrame(table).to_parquet(beside[split])
        for file in beside.values():
            os.replace(file, file.with_suffix(""))
    finally:
        for file in beside.values():
            file.unlink(missing_ok=True)


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
    if arguments.limit is not None and arguments.limit < 1:
        parser.error("--limit must be 1 or more")
    try:
        made = {}
        for split in ("train", "test"):
            file = getattr(arguments, split)
            frame = read_hub(arguments.hub_name, split) if file is None else read_file(file)
            made[split] = rows(frame.head(arguments.limit or len(frame)), split, str(file or arguments.hub_name))
        write({split: table for split, (table, _) in made.items()}, arguments.folder)
    except (OSError, ValueError) as error:
        sys.exit(f"prepare_gsm8k: {first_line(error)}")
    for split, (table, dropped) in made.items():
        left_out = "".join(f"; left out {count}, where {reason}" for reason, count in dropped.items())
        print(f"{arguments.folder / split}.parquet: {len(table)} questions{left_out}")


if __name__ == "__main__":
    main()
