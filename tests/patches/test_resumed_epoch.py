"""verl_patches/resumed_epoch.py with the loader that VERL uses: after an epoch's end the next one is trained."""

import inspect
import types

import pytest
from patch_cases import OUTSIDE, asked, empty
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.checkpoint import checkpoint_handler

from verl_patches import ours, resumed_epoch


@pytest.fixture(autouse=True)
def ours_lives_here(monkeypatch):
    monkeypatch.setattr(ours, "_sft_lives_here", True)


def loader() -> StatefulDataLoader:
    return StatefulDataLoader(list(range(8)), batch_size=2)


def resumed(after: int, *, patched: bool = True) -> list[list[list[int]]]:
    """The batches of the two passes that follow a checkpoint after so many steps."""
    first = loader()
    steps, state = 0, None
    while state is None:
        for _ in first:
            steps += 1
            if steps == after:
                state = first.state_dict()
                break

    class CheckpointHandler:
        train_dataloader = loader()

        def load_checkpoint(self):
            self.train_dataloader.load_state_dict(state)
            return after

    module = types.SimpleNamespace(CheckpointHandler=CheckpointHandler)
    if patched:
        resumed_epoch.apply(module)
        resumed_epoch.apply(module)
    handler = CheckpointHandler()
    assert handler.load_checkpoint() == after
    return [[batch.tolist() for batch in handler.train_dataloader] for _ in range(2)]


WHOLE = [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_defect_is_still_there():
    assert resumed(4, patched=False) == [[], WHOLE]
    source = inspect.getsource(checkpoint_handler.CheckpointHandler)
    assert "self.train_dataloader.load_state_dict(dataloader_state_dict)" in source


def test_patch_mends_it():
    assert resumed(4) == [WHOLE, WHOLE] and resumed(8) == [WHOLE, WHOLE]


def test_within_an_epoch_the_rest_of_it_is_trained():
    assert resumed(3) == [WHOLE[3:], WHOLE] == resumed(3, patched=False)


def test_runs_of_other_strategies_are_left_alone(monkeypatch):
    monkeypatch.setattr(ours, "_sft_lives_here", False)
    assert resumed(4) == [[], WHOLE]


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="CheckpointHandler"):
        resumed_epoch.apply(empty(resumed_epoch.MODULE))


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert resumed_epoch.MODULE not in asked(version) and resumed_epoch.MODULE in asked("0.9.1")
