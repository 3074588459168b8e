"""Every knob stands in one dataclass: the yaml files and the table in the README follow from it."""

import pytest
import verl  # noqa: F401  (loads the plug-in)
import yaml

from megatrain_rl.verl_plugin import knobs
from megatrain_rl.verl_plugin.config import DERIVED, SETTINGS


@pytest.mark.parametrize("file", knobs.written(), ids=lambda file: file.name)
def test_files_are_as_the_knobs_say(file):
    assert file.read_text() == knobs.written()[file], "run `python -m megatrain_rl.verl_plugin.knobs`"


def test_the_reference_has_every_knob_of_the_actor():
    """An engine of the reference's own takes the actor's settings, whichever knobs there are."""
    reference = yaml.safe_load(knobs.REFERENCE_YAML.read_text())["megatrain"]
    assert reference.pop("forward_only") is True
    names = {f.name for f in SETTINGS} - set(DERIVED)
    assert reference == {name: f"${{actor_rollout_ref.actor.megatrain.{name}}}" for name in names}


def test_the_actors_file_adds_only_what_differs_in_rl():
    actor = yaml.safe_load((knobs.ENGINE_YAML.parents[1] / "actor" / "megatrain_actor.yaml").read_text())["megatrain"]
    in_rl = {f.name: f.metadata["in_rl"] for f in SETTINGS if "in_rl" in f.metadata}
    assert {name: value for name, value in actor.items() if name not in DERIVED} == in_rl


def test_every_setting_is_described():
    for f in SETTINGS:
        assert len(f.metadata["help"]) > 15 and "\n" not in f.metadata["help"] and "|" not in f.metadata["help"]
