"""verl_patches/no_detokenization.py with a stand-in for vLLM; tests/with_vllm has the real one."""

import asyncio
import importlib.util
import types
from pathlib import Path

import pytest
from patch_cases import OUTSIDE, asked, empty

from verl_patches import no_detokenization, ours


def made_by_server(patched: bool, *, mine: bool = True, **sampling) -> dict:
    """The arguments with which VERL's server makes SamplingParams. mine: whether the rollout is one of ours."""

    class vLLMHttpServer:
        config = types.SimpleNamespace(custom=ours.marked(None) if mine else None)

        async def generate(self, prompt_ids, sampling_params, request_id, image_data=None):
            return dict(max_tokens=5, **sampling_params)

    module = types.ModuleType(no_detokenization.MODULE)
    module.vLLMHttpServer = vLLMHttpServer
    if patched:
        no_detokenization.apply(module)
        no_detokenization.apply(module)
    return asyncio.run(vLLMHttpServer().generate(request_id="1", prompt_ids=[1], sampling_params=sampling))


def test_defect_is_still_there():
    folder = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / "workers/rollout/vllm_rollout"
    source = (folder / "vllm_async_server.py").read_text()
    assert "SamplingParams(max_tokens=max_tokens, **sampling_params)" in source and "detokenize" not in source
    assert "async def generate(\n        self,\n        prompt_ids: list[int],\n        sampling_params: dict" in source
    assert "detokenize" not in made_by_server(False)


def test_patch_mends_it():
    assert made_by_server(True, temperature=0.5) == {"max_tokens": 5, "temperature": 0.5, "detokenize": False}


@pytest.mark.parametrize("sampling", [{"stop": ["</answer>"]}, {"stop": "x"}, {"detokenize": True}])
def test_text_that_is_wanted_is_made(sampling):
    assert made_by_server(True, **sampling).get("detokenize", True)


def test_rollouts_of_other_strategies_are_left_alone():
    assert made_by_server(True, mine=False, temperature=0.5) == {"max_tokens": 5, "temperature": 0.5}


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="vLLMHttpServer"):
        no_detokenization.apply(empty(no_detokenization.MODULE))
    module = types.ModuleType(no_detokenization.MODULE)
    module.vLLMHttpServer = type("vLLMHttpServer", (), {"generate": lambda self, prompt: None})
    with pytest.raises(AttributeError, match="sampling_params"):
        no_detokenization.apply(module)


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert no_detokenization.MODULE not in asked(version)
    assert no_detokenization.MODULE in asked("0.9.1")
