"""A reward that differs from answer to answer and means nothing, for measuring with random weights.

Used by measure_grpo_h200.sh.
"""

import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """The reward of an answer, in [0, 1)."""
    return zlib.crc32(solution_str.encode()) / 2**32
