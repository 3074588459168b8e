"""verl_patches/before_sft.py: VERL's SFT mains give their config to a function first, where ours is asked before."""

import importlib.util
import types
from pathlib import Path

import pandas as pd
import pytest
from patch_cases import OUTSIDE, asked, empty
from verl_cases import composed

from megatrain_rl.verl_plugin.driver import prepare
from verl_patches import before_sft, ours


@pytest.fixture(autouse=True)
def no_run_before(monkeypatch):
    monkeypatch.setattr(ours, "_sft_lives_here", False)


def seen_by_ours(config) -> list:
    calls: list = []
    module = types.ModuleType(before_sft.MODULE)
    module.auto_set_device = lambda given: calls.append("verl")
    before_sft.apply(module, lambda given: calls.append(given))
    before_sft.apply(module, lambda given: calls.append(given))
    module.auto_set_device(config)
    assert calls[-1] == "verl"
    return calls[:-1]


def sft(*overrides: str):
    return composed("engine=megatrain", "optim=megatrain", *overrides, name="sft_trainer_engine")


def test_defect_is_still_there():
    """Both mains ask for the device first, and the epochs bound the loop."""
    folder = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / "trainer"
    for name in ("sft_trainer.py", "sft_trainer_ray.py"):
        source = (folder / name).read_text()
        assert "    auto_set_device(config)\n    run_sft(config)" in source
        assert "in range(start_epoch, self.config.trainer.total_epochs)" in source


def test_patch_mends_it(tmp_path):
    rows = tmp_path / "train.parquet"
    pd.DataFrame({"messages": [[{"role": "user", "content": "2 + 2?"}]] * 8}).to_parquet(rows)
    config = sft(
        f"data.train_files={rows}",
        "data.train_batch_size=8",
        "trainer.total_epochs=2",
        "trainer.total_training_steps=50",
    )
    [given] = seen_by_ours(config)
    assert ours.sft_lives_here(), "resumed_epoch.py asks for it, in both mains"
    prepare.prepare_sft(given)
    assert config.trainer.total_epochs == 50


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.train_files=nothing.parquet"], r"data\.train_files.*nothing\.parquet"),
        (["data.train_files=null"], r"data\.train_files"),
        (["data.train_files=null", "data.custom_cls.path=x.py", "trainer.resume_from_path=/no/global_step_1"], r"resume_from_path"),
        (["data.train_files=null", "data.custom_cls.path=x.py", "trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/global_step_1"], r"resume_from_path"),
    ],
)  # fmt: skip
def test_what_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        prepare.prepare_sft(sft(*overrides))


def test_other_runs_are_left_alone():
    assert seen_by_ours(composed(name="sft_trainer_engine")) == []
    assert seen_by_ours(composed("model_engine=megatrain")) == []
    assert seen_by_ours(None) == []
    assert not ours.sft_lives_here()


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="auto_set_device"):
        before_sft.apply(empty(before_sft.MODULE), print)


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert before_sft.MODULE not in asked(version) and before_sft.MODULE in asked("0.9.1")
