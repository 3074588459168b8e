"""vLLM does not turn answers into text that nobody reads.

Symptom: with many answers at once the process of the vLLM server is busy with Python work for every token, and
    generation waits for it: 57 us a token on one core, 24 without text (recipes/records/vllm_output_cost_cpu.json).
Cause: the server hands token ids to vLLM and takes token ids from it, but leaves `detokenize` at vLLM's default, true.
Upstream: verl 0.9.1, workers/rollout/vllm_rollout/vllm_async_server.py:634, vLLMHttpServer.generate. No issue known.
Remove when: the server asks for no text.

Requests with stop strings, which are looked for in the text, keep it, and so do rollouts of other strategies.
"""

import inspect
from types import ModuleType

from verl_patches.ours import is_our_rollout
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "verl.workers.rollout.vllm_rollout.vllm_async_server"
VERSIONS = {"verl": TESTED_VERL}


def apply(module: ModuleType) -> None:
    server = module.vLLMHttpServer
    signature = inspect.signature(server.generate)
    if "sampling_params" not in signature.parameters:
        raise AttributeError(f"{MODULE}.vLLMHttpServer.generate has no sampling_params: this patch no longer fits VERL")

    async def generate(generate, self, *args, **kwargs):
        sampling = signature.bind(self, *args, **kwargs).arguments["sampling_params"]  # a dict of this request alone
        if is_our_rollout(self.config) and not sampling.get("stop"):
            sampling.setdefault("detokenize", False)
        return await generate(self, *args, **kwargs)

    wrap(server, "generate", generate, patch=__name__)
