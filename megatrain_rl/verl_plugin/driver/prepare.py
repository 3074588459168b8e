"""A run of ours is refused, or its open settings are filled in, in the driver and before Ray starts.

`prepare` is called ahead of VERL's own check of the config (verl_patches/before_ray.py). It gets the config that VERL
goes on with.
"""

import logging

from omegaconf import DictConfig, OmegaConf, open_dict

from megatrain_rl.verl_plugin import startup_times, supported
from megatrain_rl.verl_plugin.config import REFERENCE_MARKER
from megatrain_rl.verl_plugin.driver import algorithm, environment, files, gpu_share, inputs, names, numbers
from verl_patches import ours, weight_transfer_timeout

log = logging.getLogger(__name__)


def prepare(config: DictConfig) -> None:
    """Refuse the run with a ValueError, or fill in its settings. Nothing happens to runs of other strategies."""
    card = refuse(config)
    if ours.our_roles(config).isdisjoint({"actor", "ref"}):
        return
    fill_in(config, card)


def refuse(config: DictConfig) -> gpu_share.Card | None:
    """Raise a ValueError if the run would fail later or would not do what its config says. Nothing is changed.

    Returns the card that trainer and rollout engine share, or None if they share none.
    """
    supported.check_run(config)
    if ours.our_roles(config).isdisjoint({"actor", "ref"}):
        return None
    numbers.check_numbers(config)
    names.check_parts(config)
    algorithm.check_algorithm(config)
    files.check_data(config)
    files.check_truncation(config)
    files.check_modules(config)
    files.check_output(config)
    if ours.is_ours(config):
        files.check_resumable(config, role="actor")
    inputs.check_model_code(config)
    inputs.check_context(config)
    inputs.check_mini_batch(config)
    inputs.check_loggers(config)
    inputs.check_disk(config)
    card = gpu_share.shared_card(config)
    gpu_share.engine_fraction(config, card)
    weight_transfer_timeout.limit_seconds()
    return card


def fill_in(config: DictConfig, card: gpu_share.Card | None) -> None:
    """Set what follows from other settings, and mark the run as ours. Nothing is refused."""
    rollout = config.actor_rollout_ref.rollout
    files.expand_home(config)
    _settle_the_end(config)
    with open_dict(rollout):
        rollout.max_model_len = inputs.context(config)
        rollout.gpu_memory_utilization = gpu_share.engine_fraction(config, card)
    mark_reference(config)
    if ours.is_ours(config):
        with open_dict(rollout):
            division = gpu_share.division(config, card)
            rollout.custom = ours.marked(rollout.get("custom"), division.settings() if division else None)
        if division:
            print(division.line(), flush=True)
        mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
        if config.trainer.use_v1 and mode in ours.TRAINERS:
            config.trainer.v1.trainer_mode = ours.TRAINERS[mode]
        elif config.trainer.use_v1 and mode not in ours.TRAINERS.values():
            log.warning(
                "trainer.v1.trainer_mode=%s is a trainer of your own: with RunOfOurs of megatrain_rl.verl_plugin.task_runner.trainer "
                "before VERL's class it starts sooner, takes samples sooner and watches memory from the start",
                mode,
            )
    startup_times.note_start()
    environment.fill_in(config)


def prepare_sft(config: DictConfig) -> None:
    """The same for an SFT run of ours, in the process that trains: it is refused, or its settings are filled in."""
    supported.check_sft(config)
    files.check_sft_data(config)
    files.check_output(config)
    files.check_resumable(config, role="")
    files.expand_home(config)
    _settle_the_end(config)


def _settle_the_end(config: DictConfig) -> None:
    """Fill in the epochs that `trainer.total_training_steps` needs, and the checkpoint to go on from.

    VERL ends with its epochs, without the rest of the steps and without saving the last, which is saved at the step
    `total_training_steps` only. With as many epochs as steps it ends there. Its SFT and v0 loops look at the end only
    after a step, so a run that has done all its steps gets no epoch.
    """
    trainer, steps = config.trainer, config.trainer.total_training_steps
    with open_dict(trainer):
        if steps is not None:
            done = files.steps_done(config)
            trainer.total_epochs = max(trainer.total_epochs, steps) if done < steps else 0
            if done >= steps:
                log.warning(
                    "trainer.total_training_steps=%d: the run goes on from step %d, nothing is left to train",
                    steps,
                    done,
                )
        named = files.resume_path(config)
        if named is not None:
            trainer.resume_from_path = named


def mark_reference(config: DictConfig) -> None:
    """Have VERL ask the actor's engine for reference log-probs instead of building a second engine.

    VERL does so only if LoRA is configured (rank above 0, or `lora_adapter_path` not null), which it works out from the
    config in six places. model_engine=megatrain sets the key in its yaml (configs/megatrain_extra), where null is the
    user's wish for a separate reference. On the default model_engine the key is set here, if and only if actor and
    reference are ours and a KL term needs the reference.
    """
    from verl.trainer.ppo.utils import need_reference_policy

    roles = config.actor_rollout_ref
    both = {"actor", "ref"} <= ours.our_roles(config)
    if not both or not need_reference_policy(config) or OmegaConf.select(roles, "actor.megatrain") is not None:
        return
    if roles.model.lora_adapter_path is None:
        with open_dict(roles.model):
            roles.model.lora_adapter_path = REFERENCE_MARKER
