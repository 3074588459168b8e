"""verl_patches/no_detokenization.py with a stand-in for vLLM, which is not installed beside these tests; with_vllm has the real one."""

import importlib.util
import types

import pytest

import verl_patches
from verl_patches import no_detokenization


def made_by_server(patched: bool, **sampling) -> dict:
    """What reaches vLLM's SamplingParams where VERL's server makes them."""
    module = types.ModuleType(no_detokenization.MODULE)
    module.SamplingParams = lambda **given: given
    if patched:
        no_detokenization.apply(module)
    return module.SamplingParams(max_tokens=5, **sampling)


def test_defect_is_still_there():
    source = open(
        importlib.util.find_spec("verl").submodule_search_locations[0]
        + "/workers/rollout/vllm_rollout/vllm_async_server.py"
    ).read()
    assert "SamplingParams(max_tokens=max_tokens, **sampling_params)" in source and "detokenize" not in source
    assert "detokenize" not in made_by_server(False)


def test_patch_mends_it():
    assert made_by_server(True, temperature=0.5) == {"max_tokens": 5, "temperature": 0.5, "detokenize": False}


@pytest.mark.parametrize("sampling", [{"stop": ["</answer>"]}, {"stop": "x"}, {"detokenize": True}])
def test_text_that_is_wanted_is_made(sampling):
    assert made_by_server(True, **sampling).get("detokenize", True)


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="SamplingParams"):
        no_detokenization.apply(types.ModuleType(no_detokenization.MODULE))


@pytest.mark.parametrize("version", ["0.9.0", "0.10.0"])
def test_nothing_outside_the_gate(version):
    asked = []
    verl_patches.install(lambda name, hook: asked.append(name), version=version)
    assert no_detokenization.MODULE not in asked
