"""The card is divided into the trainer's budget, the rollout engine's share and a reserve.

The reserve has two parts. The first is what the engine takes beyond its share. vLLM's share holds weights, cache, CUDA
graphs and the most that a forward pass of its own profile took. Outside are its CUDA context and kernels, and what the
sampler needs beyond the profile, such as counts for penalties or blocks of the allocator that fit no longer: some
copies of the logits, (sequences at a time) x (vocabulary) numbers in fp32. The second part is left free.

VERL gives a rollout engine `rollout.gpu_memory_utilization`, a fraction of the whole card, 0.5 unless set. With
model_engine=megatrain the yaml says `auto`: the fraction is worked out from the budget here, in the driver and before
Ray starts. A fraction set by hand is checked against the same sum. Nothing here makes a CUDA context. Called by
prepare.py.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

AUTO = "auto"
# VERL's own default. It replaces `auto` for rollouts that have no share of a card.
_UNUSED_FRACTION = 0.5
# Bytes of an engine outside torch's allocator: CUDA context, kernels, cuBLAS. 1.02e9 were seen (vLLM 0.24, H200).
_CONTEXT_BYTES = 1_500_000_000
# Bytes that an engine's allocator may hold beyond the share: blocks of weight loading, and of sizes no longer needed.
_BLOCKS_BYTES = 500_000_000
# Copies of the logits in fp32 that a sampler may need beyond vLLM's profile. Counts for penalties are three.
_LOGITS_COPIES = 3
# Bytes that are left free, half a GiB and a little: kernels that are loaded late, of either process.
SPARE_BYTES = 550_000_000
# The vocabulary of a model whose config is not local yet: the largest of the common ones.
_LARGE_VOCABULARY = 262_144
# Bytes that an engine needs at least inside its share, beside the weights: activations and some cache.
_LEAST_CACHE_BYTES = 2_000_000_000
# Bytes that the GPU's driver keeps of an idle card, at most.
_IDLE_BYTES = 1_500_000_000
_ENGINES = ("vllm",)
_FRACTION = "actor_rollout_ref.rollout.gpu_memory_utilization"
_SEQUENCES = "actor_rollout_ref.rollout.max_num_seqs"
_CARD = "actor_rollout_ref.actor.megatrain.card_gb"
_BUDGET = "actor_rollout_ref.actor.megatrain.gpu_budget_gb"


@dataclass(frozen=True, kw_only=True)
class Card:
    """The bytes that a card has, and those that are free."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Division:
    """What trainer, engine and reserve have of a card, in bytes.

    share: the engine's, by its fraction. torch_beyond, context: what it takes beyond that, in torch's allocator and
    outside. fraction: the share as a part of the card, as VERL's setting has it.
    """

    card: Card
    budget: int
    fraction: float
    torch_beyond: int

    @property
    def share(self) -> int:
        return int(self.fraction * self.card.total_bytes)

    @property
    def beyond(self) -> int:
        return _CONTEXT_BYTES + self.torch_beyond

    def line(self) -> str:
        return (
            f"GPU memory: trainer {gb(self.budget)}, rollout engine {gb(self.share)} and up to {gb(self.beyond)} beyond "
            f"that, {gb(SPARE_BYTES)} or more free, of the card's {gb(self.card.total_bytes)}"
        )

    def settings(self) -> dict[str, float]:
        """What the engine's process and the one that watches memory need to know, under the names that they read."""
        return {
            "engine_share_gb": self.share / 1e9,
            "engine_beyond_share_gb": self.beyond / 1e9,
            "engine_torch_fraction": (self.share + self.torch_beyond) / self.card.total_bytes,
        }


def division(config: DictConfig, card: Card | None) -> Division | None:
    """How `card` is divided, once the engine's fraction is filled in; None if nothing is shared."""
    if card is None:
        return None
    return Division(
        card=card,
        budget=int(config.actor_rollout_ref.actor.megatrain.gpu_budget_gb * 1e9),
        fraction=config.actor_rollout_ref.rollout.gpu_memory_utilization,
        torch_beyond=_torch_beyond(config),
    )


def reserve_bytes(config: DictConfig) -> int:
    """The bytes of a card that neither the trainer's budget nor the engine's share may have."""
    return _CONTEXT_BYTES + _torch_beyond(config) + SPARE_BYTES


def _torch_beyond(config: DictConfig) -> int:
    logits = config.actor_rollout_ref.rollout.max_num_seqs * _vocabulary(config) * 4
    return _BLOCKS_BYTES + _LOGITS_COPIES * logits


def _vocabulary(config: DictConfig) -> int:
    """The number of tokens that the model knows, from its config.json if that is local."""
    try:
        model = json.loads((model_folder(config) / "config.json").read_text())
        return int(model.get("vocab_size") or model["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return _LARGE_VOCABULARY


def shared_card(config: DictConfig, read_card: Callable[[], Card | None] | None = None) -> Card | None:
    """The card that the trainer and the rollout engine of this run share.

    None if they share none, or if it cannot be read and the fraction was set by hand. A ValueError if it cannot be read
    and the fraction is `auto`. read_card: takes the place of `visible_card`.
    """
    rollout = config.actor_rollout_ref.rollout
    name = None if OmegaConf.is_missing(rollout, "name") else rollout.name
    knobs = OmegaConf.select(config, "actor_rollout_ref.actor.megatrain")
    if knobs is None or config.trainer.device != "cuda" or name not in _ENGINES:
        return None
    card = (read_card or visible_card)()
    if card is None and rollout.gpu_memory_utilization == AUTO:
        # not even card_gb helps: the engine takes a fraction of what the card really has
        raise ValueError(f"{_FRACTION}={AUTO}: nvidia-smi cannot tell the GPU's memory on this machine; set a fraction")
    return card


def engine_fraction(config: DictConfig, card: Card | None) -> float:
    """The rollout engine's share of `card` as a fraction: what `auto` stands for, or the one set by hand if it fits.

    A ValueError names what to change if it does not fit. card: None if nothing is shared.
    """
    fraction = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if fraction != AUTO and not isinstance(fraction, int | float):
        raise ValueError(f"{_FRACTION}={fraction}: must be {AUTO} or a number in (0, 1]")
    if card is None:
        return _UNUSED_FRACTION if fraction == AUTO else fraction
    knobs = config.actor_rollout_ref.actor.megatrain
    told = None if knobs.card_gb is None else int(knobs.card_gb * 1e9)
    idle = card.total_bytes - min(_IDLE_BYTES, card.total_bytes - card.free_bytes)
    usable = min(idle, told or idle)
    budget = int(knobs.gpu_budget_gb * 1e9)
    reserve = reserve_bytes(config)
    share = usable - budget - reserve if fraction == AUTO else int(fraction * card.total_bytes)
    weights = engine_weight_bytes(config)
    _check(share, usable=usable, budget=budget, reserve=reserve, card=card, weights=weights, by_hand=fraction != AUTO)
    # rounded down, so that the sum is kept
    return int(share / card.total_bytes * 1000) / 1000 if fraction == AUTO else fraction


def _check(
    share: int, *, usable: int, budget: int, reserve: int, card: Card, weights: int | None, by_hand: bool
) -> None:
    needed = budget + share + reserve
    sums = f"trainer {gb(budget)} + rollout engine {gb(share)} + reserve {gb(reserve)}"
    if by_hand and needed > usable:
        raise ValueError(
            f"{_FRACTION}: {sums} is more than the card's {gb(usable)}; lower it (or set {AUTO}), lower {_BUDGET}, or lower "
            f"{_SEQUENCES}, which the reserve follows"
        )
    least = _LEAST_CACHE_BYTES + (weights or 0)
    if share < least:
        holds = f"the weights ({gb(weights)}) and a cache" if weights else "a cache"
        raise ValueError(
            f"a card of {gb(usable)} leaves the rollout engine {gb(max(0, share))} beside a trainer of {gb(budget)}, "
            f"too little for {holds}: lower {_BUDGET} or {_SEQUENCES}, set actor_rollout_ref.rollout.quantization=fp8, or use a larger "
            "card"
        )
    if needed > card.free_bytes:
        raise ValueError(
            f"{sums} is more than the {gb(card.free_bytes)} that are free on the card: another process uses it. "
            f"End that process, or set {_CARD} to what this run may use"
        )


def gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def model_folder(config: DictConfig) -> Path:
    """Where the model lies, if it is local; of a name on the hub, a path at which nothing is."""
    return Path(os.path.expanduser(str(config.actor_rollout_ref.model.path)))


def engine_weight_bytes(config: DictConfig) -> int | None:
    """Bytes of the rollout engine's weights, from the files of a local model; None if the model is not local yet."""
    files = list(model_folder(config).glob("*.safetensors"))
    if not files:
        return None
    total = sum(file.stat().st_size for file in files)
    return total // 2 if config.actor_rollout_ref.rollout.get("quantization") == "fp8" else total


def visible_card() -> Card | None:
    """The first card that CUDA would see, as nvidia-smi reports it; None if there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if not visible:
        return None
    command = ["nvidia-smi", "-i", visible, "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        total, free = (int(mib) << 20 for mib in out.strip().splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return Card(total_bytes=total, free_bytes=free)
