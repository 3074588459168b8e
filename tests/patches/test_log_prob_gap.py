"""verl_patches/log_prob_gap.py: VERL compares probabilities alone, the patch adds what it is handed; gate.

What is added, and in which runs: tests/verl_plugin/test_monitoring.py.
"""

import inspect
import types

import pytest
from patch_cases import OUTSIDE, asked, empty

from verl_patches import log_prob_gap


def test_defect_is_still_there():
    from verl.utils.debug import metrics

    source = inspect.getsource(inspect.unwrap(metrics.calculate_debug_metrics))
    assert "torch.exp(" in source and "log_prob_gap" not in source


def test_patch_mends_it():
    module = types.ModuleType(log_prob_gap.MODULE)
    module.calculate_debug_metrics = lambda data: {"verl's": data}
    for _ in range(2):
        log_prob_gap.apply(module, lambda data: {"ours": data + 1})
    assert module.calculate_debug_metrics(1) == {"verl's": 1, "ours": 2}


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="calculate_debug_metrics"):
        log_prob_gap.apply(empty(log_prob_gap.MODULE), print)


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert log_prob_gap.MODULE not in asked(version)
    assert log_prob_gap.MODULE in asked("0.9.1")
