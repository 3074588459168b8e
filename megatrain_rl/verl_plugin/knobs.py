"""The yaml files that list the knobs, and the table in this folder's README.md, are written from the knobs.

    python -m megatrain_rl.verl_plugin.knobs        writes the files anew; a test compares them with this module

A knob is a field of a config class: in megatrain_rl/config.py (how the model is streamed) or in config.py beside this
file (what only a run by VERL has). In a field's metadata, `help` is its description, `in_yaml` takes the default's
place in the file, `in_rl` is the default in RL, and `derived` marks a field that follows from other settings.
"""

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

from megatrain_rl.verl_plugin.config import SETTINGS

_ROOT = Path(__file__).parents[1]
ENGINE_YAML = _ROOT / "configs" / "engine" / "megatrain.yaml"
REFERENCE_YAML = _ROOT / "configs" / "ref" / "megatrain_ref.yaml"
README = Path(__file__).with_name("README.md")
TABLE_BEGINS, TABLE_ENDS = "<!-- knobs: begin -->", "<!-- knobs: end -->"

_GENERATED = (
    "# Written by `python -m megatrain_rl.verl_plugin.knobs` from the fields of the config classes; change these.\n"
)

_ENGINE_HEAD = f"""\
# The streaming trainer: `actor_rollout_ref.actor.megatrain` in RL, `engine` in SFT.
{_GENERATED}
# Builds the engine config; an unknown key is an error that names the nearest known one
_target_: megatrain_rl.verl_plugin.targets.engine_config
"""

_REFERENCE_HEAD = f"""\
# A reference in an engine of its own, forward only. Used only if actor_rollout_ref.model.lora_adapter_path=null is set:
# by default the actor's engine computes reference log-probs with frozen weights (megatrain_extra/defaults.yaml).
{_GENERATED}
defaults:

  # VERL's reference settings
  - ref

  # The streaming knobs
  - ../engine@megatrain: megatrain

  - _self_

# Builds the reference config
_target_: megatrain_rl.verl_plugin.targets.MegaTrainActorConfig

megatrain:

  # A reference is never trained
  forward_only: true
"""


def engine_yaml() -> str:
    parts = [_ENGINE_HEAD]
    for f in SETTINGS:
        value = f.metadata.get("in_yaml") or _yaml(f.default)
        parts.append(f"\n{_comment(f.metadata['help'])}\n{f.name}: {value}\n")
    return "".join(parts)


def reference_yaml() -> str:
    parts = [_REFERENCE_HEAD]
    for f in _knobs():
        parts.append(f"\n  # Same as the actor's\n  {f.name}: ${{actor_rollout_ref.actor.megatrain.{f.name}}}\n")
    return "".join(parts)


def table() -> str:
    lines = ["| `actor.megatrain.` | default | meaning |", "|---|---|---|"]
    for f in _knobs():
        default = _yaml(f.default)
        if "in_rl" in f.metadata:
            default = f"{_yaml(f.metadata['in_rl'])} (SFT: {default})"
        lines.append(f"| `{f.name}` | {default} | {f.metadata['help']} |")
    return "\n".join(lines) + "\n"


def readme() -> str:
    """The text of the README, with the table written anew."""
    before, _, rest = README.read_text().partition(TABLE_BEGINS)
    _, _, after = rest.partition(TABLE_ENDS)
    return f"{before}{TABLE_BEGINS}\n{table()}{TABLE_ENDS}{after}"


def written() -> dict[Path, str]:
    """Every file that follows from the knobs, with the text that it should have."""
    return {ENGINE_YAML: engine_yaml(), REFERENCE_YAML: reference_yaml(), README: readme()}


def _knobs() -> list[dataclasses.Field]:
    return [f for f in SETTINGS if not f.metadata.get("derived")]


def _comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in textwrap.wrap(text[0].upper() + text[1:], 116))


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    for file, text in written().items():
        file.write_text(text)
