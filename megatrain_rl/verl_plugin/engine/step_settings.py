"""Settings of the next optimizer step, in the form in which VERL's Tinker worker changes them.

The worker writes into the `param_groups` of a torch optimizer. Of this engine only the learning rate can change from
step to step. Used by engine.py.
"""

import dataclasses
from typing import Any

from megatrain_rl.trainer import StreamTrainer


class StepSettings:
    """Has the one attribute that VERL looks for."""

    def __init__(self, trainer: StreamTrainer):
        self.param_groups = [_Group(trainer)]


class _Group(dict[str, Any]):
    """The learning rate of the next step. A new one stays for later steps, as in a torch optimizer, under the schedule
    from then on."""

    def __init__(self, trainer: StreamTrainer):
        super().__init__(lr=trainer.lr)
        self._trainer = trainer

    def update(self, values: dict[str, Any]) -> None:  # type: ignore[override]  # VERL calls it with one dict
        other = sorted(values.keys() - {"lr"})
        if other:
            raise ValueError(
                f"optim_step_params={other}: strategy megatrain changes lr alone, set optim.{other[0]} for the run"
            )
        trainer = self._trainer
        factor = trainer.schedule.factor
        if trainer.adamw is None or not factor > 0:
            raise ValueError(
                "optim_step_params.lr cannot be set where the schedule's learning rate is 0; set optim.lr_warmup_steps=0"
            )
        trainer.adamw = dataclasses.replace(trainer.adamw, lr=values["lr"] / factor)
        super().update(lr=trainer.lr)
