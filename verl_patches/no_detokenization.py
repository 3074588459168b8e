"""vLLM does not turn answers into text that nobody reads.

Symptom: with many answers at once the process of the vLLM server is busy with Python work for every token, and generation waits for it:
    57 us a token on one core, 24 without text (recipes/records/vllm_output_cost_cpu.json).
Cause: the server hands token ids to vLLM and takes token ids from it, but leaves `detokenize` at vLLM's default, true.
Upstream: verl 0.9.1, workers/rollout/vllm_rollout/vllm_async_server.py:634, vLLMHttpServer.generate. No issue known.
Remove when: the server asks for no text.

Requests with stop strings, which are looked for in the text, keep it.
"""

import functools
from types import ModuleType

MODULE = "verl.workers.rollout.vllm_rollout.vllm_async_server"


def apply(module: ModuleType) -> None:
    make = module.SamplingParams

    @functools.wraps(make, updated=())
    def sampling_params(*args, **kwargs):
        if not kwargs.get("stop"):
            kwargs.setdefault("detokenize", False)
        return make(*args, **kwargs)

    module.SamplingParams = sampling_params
