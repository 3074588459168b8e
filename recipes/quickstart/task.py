"""The quickstart's task: column addition of two three-digit numbers whose digits are 0-4, e.g. `132+401` -> `533`.

15625 problems; those for the warm-up, for GRPO and held out are drawn without replacement, so a held-out problem is
never trained on and has to be worked out digit by digit. `compute_score` is the rule reward, which VERL loads from
this file by path; imports nothing heavy. Used by build.py and evaluate.py.
"""

import random
from dataclasses import dataclass

DIGITS = 3
LARGEST_DIGIT = 4
# Share of the reward for the right digits of a wrong answer; the rest is for an exact one.
PARTIAL_CREDIT = 0.2


@dataclass(frozen=True)
class Problem:
    left: str
    right: str

    @property
    def question(self) -> str:
        return f"{self.left}+{self.right}"

    @property
    def answer(self) -> str:
        return f"{int(self.left) + int(self.right):0{DIGITS}d}"


def draw_problems(count: int, rng: random.Random) -> list[Problem]:
    """`count` different problems in random order."""
    base = LARGEST_DIGIT + 1
    numbers = [f"{a}{b}{c}" for a in range(base) for b in range(base) for c in range(base)]
    pairs = rng.sample(range(len(numbers) ** 2), count)
    return [Problem(numbers[p // len(numbers)], numbers[p % len(numbers)]) for p in pairs]


def careless_answer(problem: Problem, error_rate: float, rng: random.Random) -> str:
    """The answer as a careless pupil writes it: each digit is a guess with probability `error_rate`."""
    return "".join(rng.choice("0123456789") if rng.random() < error_rate else digit for digit in problem.answer)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs
) -> float:
    """1 if exact; else, at the right length, PARTIAL_CREDIT times the share of right digits; else 0."""
    if solution_str == ground_truth:
        return 1.0
    if len(solution_str) != len(ground_truth):
        return 0.0
    right = sum(a == b for a, b in zip(solution_str, ground_truth, strict=True))
    return PARTIAL_CREDIT * right / len(ground_truth)
