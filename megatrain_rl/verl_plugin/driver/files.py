"""The files that a run reads, and the checkpoint that it goes on from, are looked at in the driver.

Only local paths are looked at: a path with a scheme (hdfs://, s3://) is VERL's to fetch. Called by prepare.py.
"""

import ast
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from megatrain_rl.checkpoint.folder import is_complete

_ROWS_LOOKED_AT = 64
_BATCH = "data.train_batch_size"
_RESUME = "trainer.resume_from_path"
_REWARD = "reward.custom_reward_function"
# Python files of the user's own, which VERL loads.
_MODULES = (
    f"{_REWARD}.path", "reward.reward_manager.module.path", "data.custom_cls.path",
    "trainer.v1.sampler.custom_sampler.path",
)  # fmt: skip


def check_data(config: DictConfig) -> None:
    """Raise a ValueError for data that is not there, is too little for a batch, or holds no conversations."""
    data = config.data
    for split in ("train", "val"):
        setting = f"data.{split}_files"
        if not data.get(f"{split}_files"):
            raise ValueError(
                f"{setting} is not set: VERL reads both files, set {setting} (validation may use train_files too)"
            )
    for name in ("train_batch_size", "max_prompt_length", "max_response_length"):
        if data[name] is not None and not (isinstance(data[name], int) and data[name] > 0):
            raise ValueError(f"data.{name}={data[name]}: must be a whole number above 0")
    if OmegaConf.select(config, "data.custom_cls.path"):
        return  # the user's own class reads the files
    rows = {split: _check_files(config, f"{split}_files") for split in ("train", "val")}
    limit = data.get("train_max_samples", -1)
    train = rows["train"]
    if train is None:
        return
    train = min(train, limit) if limit and limit > 0 else train
    if train < data.train_batch_size:
        raise ValueError(
            f"{_BATCH}={data.train_batch_size} is more than the {train} rows of data.train_files: a step would have no "
            f"whole batch; lower {_BATCH} or add data"
        )


def _check_files(config: DictConfig, name: str) -> int | None:
    """The number of rows, or None if a file is not local."""
    total: int | None = 0
    for path in _paths(config.data, name):
        if path is None:
            total = None
            continue
        first, count = _read(path, f"data.{name}")
        if not first:
            raise ValueError(f"data.{name}: {path} has no rows")
        for number, row in enumerate(first):
            _check_prompt(row, number, path, config.data)
            _check_rewarded(row, f"data.{name}: row {number} of {path}", config)
        total = None if total is None else total + count
    return total


def _paths(data: DictConfig, name: str) -> Iterator[Path | None]:
    """The files of a setting, None for one that VERL fetches. A ValueError for one that is not there."""
    given = data.get(name)
    for text in given if isinstance(given, ListConfig | list) else [given]:
        path = local(str(text)) if text else None
        if path is not None and not path.is_file():
            raise ValueError(f"data.{name}: there is no file {path}")
        yield path


def check_sft_data(config: DictConfig) -> None:
    """Raise a ValueError for files of an SFT run that are not there, or have fewer rows than a batch.

    VERL leaves an incomplete batch out, so such a run would train on nothing, or log a validation loss of nothing.
    """
    data = config.data
    batch = data.train_batch_size
    if not (isinstance(batch, int) and batch > 0):
        raise ValueError(f"{_BATCH}={batch}: must be a whole number above 0")
    if OmegaConf.select(config, "data.custom_cls.path"):
        return
    for name, limit in (("train_files", data.train_max_samples), ("val_files", data.val_max_samples)):
        paths = list(_paths(data, name)) if data.get(name) else []  # SFT may have no validation
        if not paths or None in paths:
            continue
        rows = sum(_read(path, f"data.{name}")[1] for path in paths if path is not None)
        rows = min(rows, limit) if limit > 0 else rows
        if rows < batch:
            raise ValueError(
                f"{_BATCH}={batch} is more than the {rows} rows of data.{name}: there would be no whole batch; lower "
                f"{_BATCH} or add data"
            )
    if not data.get("train_files"):
        raise ValueError("data.train_files is not set")


def _read(path: Path, setting: str) -> tuple[list[dict[str, Any]], int]:
    """The first rows of a file, and how many there are."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            with parquet.ParquetFile(path) as file:
                batches = file.iter_batches(batch_size=_ROWS_LOOKED_AT)
                first = next(batches, None)
                return [] if first is None else first.to_pylist(), file.metadata.num_rows
        if path.suffix in (".json", ".jsonl"):
            rows = list(_json_rows(path))
            return rows[:_ROWS_LOOKED_AT], len(rows)
    except Exception as error:  # pyarrow's own errors have no common class
        raise ValueError(f"{setting}: {path} cannot be read: {error}") from error
    raise ValueError(f"{setting}: {path} is neither .parquet nor .json or .jsonl, which VERL reads")


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text()
    if text.lstrip().startswith("["):
        yield from json.loads(text)
    else:
        yield from (json.loads(line) for line in text.splitlines() if line.strip())


def _check_prompt(row: dict[str, Any], number: int, path: Path, data: DictConfig) -> None:
    key = data.prompt_key
    if key not in row:
        raise ValueError(f"data.prompt_key={key}: {path} has no such column; it has {', '.join(row)}")
    prompt = row[key]
    messages = (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt)
    )
    if not messages:
        kind = "text" if isinstance(prompt, str) else f"{type(prompt).__name__} {prompt!r}"[:80]
        raise ValueError(
            f"data.prompt_key={key}: row {number} of {path} has {kind} where a conversation is needed, a list of messages with "
            '"role" and "content"; VERL would train without the question'
        )
    asking = [message for message in prompt if message["role"] == "user"] or prompt
    if not all(message["content"] for message in asking):
        raise ValueError(f"data.prompt_key={key}: row {number} of {path} has a message without content")


def _check_rewarded(row: dict[str, Any], where: str, config: DictConfig) -> None:
    """Raise a ValueError if VERL could give the row's answers no reward: every one of them would fail."""
    reward, agent = config.reward, config.actor_rollout_ref.rollout.agent
    users_own = reward.reward_manager.source != "register" or agent.agent_loop_config_path or "agent_name" in row
    if users_own or reward.reward_model.enable:
        return
    source, truth = row.get("data_source"), row.get("reward_model")
    if source is None or not isinstance(truth, dict) or "ground_truth" not in truth:
        raise ValueError(
            f"{where} has no data_source, or no reward_model with a ground_truth in it, which VERL gives to the reward function"
        )
    if OmegaConf.select(config, f"{_REWARD}.path") is None and not _has_rule(str(source)):
        raise ValueError(
            f"{where} has data_source={source}, for which VERL has no rule of reward: set {_REWARD}.path to the file of "
            "your function, or data_source to one that VERL knows"
        )


@functools.cache
def _has_rule(source: str) -> bool:
    from verl.utils.reward_score import default_compute_score

    try:
        default_compute_score(source, "", "")
    except NotImplementedError:
        return False
    except Exception:  # it has one, which takes no empty answer
        return True
    return True


def check_truncation(config: DictConfig) -> None:
    """Raise a ValueError for a way of truncating that VERL's rollouts do not honour: they cut prompts on the left."""
    data = config.data
    if data.truncation in ("right", "middle") and not data.filter_overlong_prompts:
        raise ValueError(
            f"data.truncation={data.truncation}: rollouts cut a long prompt on the left whatever it says; set "
            "data.filter_overlong_prompts=true to leave such prompts out, or data.truncation=left"
        )


def check_modules(config: DictConfig) -> None:
    """Raise a ValueError if a Python file of the user's is not there, or has not what is named beside it."""
    for setting in _MODULES:
        given = OmegaConf.select(config, setting)
        if not given or "://" in str(given):
            continue
        path = Path(os.path.expanduser(str(given)))
        if not path.is_file():
            raise ValueError(f"{setting}: there is no file {path}")
        # VERL takes a manager's class from the manager's name
        name = "reward.reward_manager.name" if "manager" in setting else f"{setting.removesuffix('path')}name"
        _check_has(path, str(OmegaConf.select(config, name)), setting, name)


def _check_has(path: Path, wanted: str, setting: str, name: str) -> None:
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{setting}: {path} is no Python file: {error}") from error
    plain = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    named = {node.name for node in tree.body if isinstance(node, plain)}
    other = any(not isinstance(node, plain | ast.Expr) for node in tree.body)
    if wanted not in named and not (other and wanted in path.read_text()):  # it may be assigned or imported
        has = ", ".join(sorted(named)) or "none"
        raise ValueError(f"{name}={wanted}: {path} has no such function or class; it has {has}")


def resume_path(config: DictConfig) -> str | None:
    """`trainer.resume_from_path` as VERL needs it, or a ValueError. None if the run does not resume from a path.

    VERL reads the step from the end of the path, and takes it as it stands.
    """
    mode, given = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode not in ("disable", "auto", "resume_path"):
        raise ValueError(f"trainer.resume_mode={mode}: must be auto, disable or resume_path")
    in_sft = "actor_rollout_ref" not in config  # where VERL takes the path with `auto` too
    if mode != "resume_path" and not (mode == "auto" and in_sft and given):
        if mode == "auto" and given is not None:
            raise ValueError(
                f"{_RESUME}={given} is not read with trainer.resume_mode=auto: set trainer.resume_mode=resume_path"
            )
        return None
    if not isinstance(given, str) or not given:
        raise ValueError(f"trainer.resume_mode=resume_path needs {_RESUME}, a folder global_step_N")
    path = Path(os.path.expanduser(given))
    if not path.name.startswith("global_step_") or not path.name.removeprefix("global_step_").isdigit():
        parent = path.parent if path.parent.name.startswith("global_step_") else None
        instead = f"; did you mean {parent}?" if parent else ""
        raise ValueError(f"{_RESUME}={given}: must end in global_step_N{instead}")
    return str(path.absolute())


def check_resumable(config: DictConfig, role: str) -> None:
    """Raise a ValueError if the checkpoint that the run would go on from is not there, or is none of ours.

    role: the folder of the trainer's state in a step's folder, "" in SFT.
    """
    folder = _resumed_folder(config)
    if folder is None:
        return
    where = (
        f"{_RESUME}={folder}"
        if resume_path(config)
        else f"trainer.default_local_dir has {folder.name}, which trainer.resume_mode=auto goes on from, and it"
    )
    place = folder / role if role else folder
    beside = place.with_name(f"{place.name}.old")  # where a crash may have left it
    if not is_complete(place) and not is_complete(beside):
        what = "is of another engine or not complete" if place.exists() else "is not there"
        raise ValueError(
            f"{where} {what}: {place} has no trainer_state.json; set another path, or trainer.resume_mode=disable"
        )


def steps_done(config: DictConfig) -> int:
    """The number of the step that the run goes on from; 0 if it begins anew."""
    folder = _resumed_folder(config)
    return 0 if folder is None else int(folder.name.removeprefix("global_step_"))


def _resumed_folder(config: DictConfig) -> Path | None:
    named = resume_path(config)
    return Path(named) if named else _latest(config)


def _latest(config: DictConfig) -> Path | None:
    if config.trainer.resume_mode != "auto":
        return None
    root = output_folder(config)
    tracker = root / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return None
    step = tracker.read_text(errors="replace").strip()
    if not step.isdigit():
        raise ValueError(
            f"{tracker} has {step[:40]!r} and not the step to go on from: write the step's number into it, or set "
            "trainer.resume_mode=disable"
        )
    folder = root / f"global_step_{int(step)}"
    return folder if folder.exists() else None  # VERL starts anew where it is gone


def check_output(config: DictConfig) -> None:
    """Raise a ValueError if the folder of checkpoints cannot be one."""
    given, folder = config.trainer.default_local_dir, output_folder(config)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"trainer.default_local_dir={given}: {there} is a file")
    if not os.access(there, os.W_OK):
        raise ValueError(f"trainer.default_local_dir={given}: {there} cannot be written")


def output_folder(config: DictConfig) -> Path:
    """`trainer.default_local_dir`, which has the checkpoints, as an absolute path."""
    return Path(os.path.expanduser(str(config.trainer.default_local_dir))).absolute()


def expand_home(config: DictConfig) -> None:
    """Put the user's home in the place of `~` in the paths that VERL takes as they stand."""
    for setting in ("trainer.default_local_dir", "data.train_files", "data.val_files", *_MODULES):
        given = OmegaConf.select(config, setting)
        if isinstance(given, str) and given.startswith("~"):
            OmegaConf.update(config, setting, os.path.expanduser(given))
        elif isinstance(given, ListConfig) and any(str(path).startswith("~") for path in given):
            OmegaConf.update(config, setting, [os.path.expanduser(str(path)) for path in given])


def local(text: str) -> Path | None:
    """A path on this machine, or None for one that VERL fetches."""
    return None if "://" in text and not text.startswith("pkg://") else Path(os.path.expanduser(text))
