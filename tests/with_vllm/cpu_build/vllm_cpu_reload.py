"""Makes the linear layers of vLLM's CPU build loadable a second time. For the tests' own environment only.

The CPU build packs a linear layer's weights into a form of its own after loading and throws the originals away, so
there is nothing left to load new weights into. Kept, they are loaded in place, and VERL's worker has them packed again
afterwards.
"""


def keep_weights() -> None:
    from vllm.model_executor.layers import utils

    packed = utils.dispatch_cpu_unquantized_gemm

    def dispatch_cpu_unquantized_gemm(layer, remove_weight):
        packed(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm
