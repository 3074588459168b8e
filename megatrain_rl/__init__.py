"""GRPO on one GPU for models whose training state does not fit it.

Importing this package imports nothing heavy: VERL loads it in every one of its processes. The front door is
`megatrain_rl.trainer.StreamTrainer`; VERL users need no import at all (see `megatrain_rl.verl_plugin`).
"""

__version__ = "0.1.0"
