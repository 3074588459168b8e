"""Where VERL compares the log-probs of rollout and trainer, a run of ours adds their gap in nats.

Symptom: VERL logs the gap between probabilities, in which that of unlikely tokens cannot be seen.
Cause: its function takes exponentials before it compares, and what it compares is at hand nowhere else.
Upstream: verl 0.9.1, utils/debug/metrics.py:63, calculate_debug_metrics. No issue known.
Remove when: VERL logs the gap of log-probs.

VERL's v1 trainers take the function by name when they are imported, which is after its module and so after this patch.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "verl.utils.debug.metrics"
VERSIONS = {"verl": TESTED_VERL}


def apply(module: ModuleType, compare: Callable[[Any], dict[str, float]]) -> None:
    """compare: called with the data of each comparison; returns what to add, nothing in runs of others."""

    def calculate_debug_metrics(calculate, data, *args, **kwargs):
        return calculate(data, *args, **kwargs) | compare(data)

    wrap(module, "calculate_debug_metrics", calculate_debug_metrics, patch=__name__)
