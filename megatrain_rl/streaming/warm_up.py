"""What the first step would do beside its work is done before it: layers and head are compiled, kernels are loaded."""

from typing import TYPE_CHECKING

import torch

from megatrain_rl.batch import pack_sequences
from megatrain_rl.objectives import NegativeLogLikelihood
from megatrain_rl.planner import PACK_MULTIPLE

if TYPE_CHECKING:
    from megatrain_rl.trainer import StreamTrainer


def warm_up(trainer: "StreamTrainer", *, train: bool, on_gpu: bool) -> None:
    """Run packs of the usual size through `trainer`. train: backward too, whose gradients are dropped."""
    # On a GPU a whole pack: what is compiled is tuned for the size that it is first called with.
    tokens = trainer.pack_tokens if on_gpu else min(trainer.pack_tokens, PACK_MULTIPLE)
    lengths = [max(1, tokens // 2), max(1, tokens // 3)]
    packs = pack_sequences(
        [torch.zeros(n, dtype=torch.long) for n in lengths],
        max_tokens=trainer.pack_tokens,
        prompt_lengths=[0] * len(lengths)
        if trainer.config.share_prompts
        else None,  # layers of either kind are compiled
    )
    for entropy in (False, True):
        trainer.log_probs(packs, entropy=entropy)
    if train:
        trainer.forward_backward(packs, NegativeLogLikelihood(packs))
        trainer.zero_grad()
