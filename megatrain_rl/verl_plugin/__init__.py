"""VERL's side of the trainer. Only this package, rollout/ and verl_patches/ import verl.

- register.py is the `verl.plugins` entry point: it installs the hooks by which VERL finds everything below.
- targets.py has the names that the yaml files under configs/ give as `_target_`.
- config.py has the config classes that the yaml files build. knobs.py writes the yaml files and the README's table from
  their fields.
- supported.py refuses what strategy megatrain does not support.
- monitoring.py adds memory and waiting times to VERL's logger and writes the run's record.
- startup_times.py measures the phases between the command and the first step.
- platform_cpu.py is a VERL platform for machines without a GPU.

Three rooms are named by the process, or the part of VERL, that calls them:

- driver/ runs in the process of the user's command, before Ray starts.
- task_runner/ runs in VERL's task runner, the process that drives the steps.
- engine/ runs in the trainer's process: VERL's engine on our StreamTrainer.
"""
