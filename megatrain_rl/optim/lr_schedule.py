"""LRSchedule: the factor of the learning rate, a pure function of the steps it has counted."""

import math
from typing import Any, Literal, get_args

Kind = Literal["constant", "cosine", "linear"]
KINDS: tuple[str, ...] = get_args(Kind)


class LRSchedule:
    """`factor` times `AdamWConfig.lr` is the rate of the next step. It grows from 0 to 1 over `warmup_steps`, then:

    constant: 1. cosine: to `min_lr_ratio` at `total_steps` in `num_cycles` waves (0.5 is one descent).
    linear: a straight line to `min_lr_ratio` at `total_steps`.
    """

    def __init__(
        self,
        *,
        kind: Kind = "constant",
        warmup_steps: int = 0,
        total_steps: int = 0,
        min_lr_ratio: float = 0.0,
        num_cycles: float = 0.5,
    ):
        if kind not in KINDS:
            raise ValueError(f"lr_scheduler_type={kind!r}: must be one of {', '.join(KINDS)}")
        if kind != "constant" and total_steps <= warmup_steps:
            raise ValueError(
                f"lr_scheduler_type={kind} needs total_training_steps ({total_steps}) above lr_warmup_steps ({warmup_steps})"
            )
        if not 0 <= min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio={min_lr_ratio}: must be between 0 and 1")
        self.kind = kind
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.min_lr_ratio = min_lr_ratio
        self.num_cycles = num_cycles
        self.steps_done = 0

    @property
    def factor(self) -> float:
        """The factor of the next step, from 0 to 1."""
        step = self.steps_done
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        if self.kind == "linear":
            return 1.0 - (1.0 - self.min_lr_ratio) * progress
        wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * self.num_cycles * progress))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * wave

    def step(self) -> None:
        """Count one step."""
        self.steps_done += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps_done": self.steps_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps_done = int(state["steps_done"])
