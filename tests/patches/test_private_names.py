"""verl_patches/README.md lists every private name of another library that the project uses, and each is still there."""

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\S+) \| `([\w.]+)` \| (.+) \|$", re.MULTILINE)
LISTED = {
    name: re.findall(r"`([\w/.]+)`", users)
    for _, name, users in ROW.findall((ROOT / "verl_patches/README.md").read_text().split("## Private names")[1])
}


def attention_implementation() -> object:
    from transformers import Qwen2Config

    return Qwen2Config(attn_implementation="sdpa")._attn_implementation == "sdpa"


def root_of_a_node() -> object:
    from omegaconf import OmegaConf

    config = OmegaConf.create({"a": {"b": 1}})
    return config.a._get_root() is config


def being_imported() -> object:
    return hasattr(importlib.import_module("json").__spec__, "_initializing")


def socket_of_the_sender() -> object:
    """Its package refuses to be imported where there is no rollout engine."""
    folder = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    source = (folder / "workers/rollout/vllm_rollout/bucketed_weight_transfer.py").read_text()
    return "class BucketedWeightSender" in source and "def _init_socket(self)" in source


def trainer_method(name: str):
    def there() -> object:
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        return inspect.isfunction(vars(PPOTrainer).get(name))

    return there


def mutable_fields() -> object:
    from verl.workers.config import OptimizerConfig

    return isinstance(OptimizerConfig._mutable_fields, set)


def switch_for_clusters() -> object:
    """The address of this node follows it, and so do the servers of Ray's processes."""
    from ray._private import ray_constants, services

    source = inspect.getsource(services.get_node_ip_address)
    return isinstance(ray_constants.ENABLE_RAY_CLUSTER, bool) and "if not ray_constants.ENABLE_RAY_CLUSTER" in source


CHECKS = {
    "ray._private.ray_constants.ENABLE_RAY_CLUSTER": switch_for_clusters,
    "PretrainedConfig._attn_implementation": attention_implementation,
    "DictConfig._get_root": root_of_a_node,
    "ModuleSpec._initializing": being_imported,
    "BucketedWeightSender._init_socket": socket_of_the_sender,
    "OptimizerConfig._mutable_fields": mutable_fields,
    **{
        f"PPOTrainer.{n}": trainer_method(n)
        for n in (
            "_setup",
            "_build_replay_buffer",
            "_init_dataloader",
            "_balance_batch",
            "_compute_old_log_prob",
            "_compute_advantage",
            "_update_actor",
            "_add_prompts_to_generate",
            "_val_metrics_update",
        )
    },
}


@pytest.mark.parametrize("name", LISTED)
def test_the_name_is_still_there(name):
    if name in CHECKS:
        assert CHECKS[name]()
        return
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", LISTED)
def test_it_is_used_where_the_list_says(name):
    private = next(part for part in reversed(name.split(".")) if part.startswith("_"))
    for user in LISTED[name]:
        assert private in {found.split(".")[-1] for found, _ in private_names(ROOT / user)}, user


def private_names(file: Path) -> set[tuple[str, int]]:
    """(Private part of a name, line) for each use of one that is not the file's own object's."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Attribute):
            found.add((node.attr, line))
        elif isinstance(node, ast.ImportFrom):
            found |= {(part, line) for part in [*(node.module or "").split("."), *(a.name for a in node.names)]}
        elif isinstance(node, ast.Import):
            found |= {(part, line) for a in node.names for part in a.name.split(".")}
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if function in ("wrap", "getattr", "setattr", "hasattr", "pop", "on_import"):
                found |= {(part, line) for text in given for part in text.split(".")}
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            found |= {(part, line) for part in node.value.value.split(".")}  # MODULE of a patch
    return {(name, line) for name, line in found if re.fullmatch(r"_[a-zA-Z]\w*", name)}


def test_no_private_name_is_used_that_is_not_listed():
    """A private name that is defined nowhere in the project is another library's."""
    files = [f for room in ("megatrain_rl", "verl_patches", "recipes", "examples") for f in (ROOT / room).rglob("*.py")]
    own = {name for file in files for name in defined(file)}
    listed = {part for name in LISTED for part in name.split(".") if part.startswith("_")}
    unknown = {
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in files
        for name, line in private_names(file)
        if name not in own | listed
    }
    assert unknown == set()


def defined(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}
