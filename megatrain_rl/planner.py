"""MemoryPlan: what fits the GPU budget and the host, decided before anything is allocated.

Every estimate is in bytes and errs on the large side; a GPU test runs the largest admitted pack under the hard cap. What cannot fit
is a ValueError that names the setting to change and a value that would do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain_rl.batch import PackedBatch
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.host.machine import available_host_bytes
from megatrain_rl.model.decoder import DecoderSpec

# CUDA context and loaded kernels of one process on an H200, by NVML (see the foundation record).
CONTEXT_BYTES = 900_000_000
# cuBLAS takes its workspaces from the allocator: one for the thread that runs forward, one for autograd's.
_WORKSPACE_BYTES = 96 << 20
# Indices of the packs of a sweep, and their rotary tables as far as these are kept (see LayerRunner).
_INDEX_BYTES = 64 << 20
MAX_PACK_TOKENS = 8192
# Below this a layer's kernels no longer hide its transfer and a budget is as good as too small.
MIN_PACK_TOKENS = 256
MAX_HEAD_CHUNK, MIN_HEAD_CHUNK = 1024, 64
_MAX_SLAB_NUMEL = 16 << 20
_RESIDENT_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class DeviceCosts:
    """Device memory of a model's parts, in bytes.

    fixed: held all the time. layer, per_layer_token: more while a layer runs on a pack. head, per_head_pack_token,
    per_head_chunk_token: more while the head runs on a pack, and for each token whose logits exist.
    """

    fixed: int
    layer: int
    per_layer_token: int
    head: int
    per_head_pack_token: int
    per_head_chunk_token: int

    def peak(self, pack_tokens: int, head_chunk: int) -> int:
        layer_phase = self.layer + pack_tokens * self.per_layer_token
        head_phase = self.head + pack_tokens * self.per_head_pack_token + head_chunk * self.per_head_chunk_token
        return self.fixed + max(layer_phase, head_phase)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """pack_tokens: most tokens of a pack cut by default. max_pack_tokens: most tokens the budget can hold in one pack, so the
    longest sequence. slab_numel: elements of a gradient slab. resident_bytes: for running hidden states kept on the device.
    gpu_cap_bytes: what the allocator may reserve. host_bytes: planned host RAM without layer inputs; host_limit_bytes: what
    there is."""

    costs: DeviceCosts
    pack_tokens: int
    max_pack_tokens: int
    slab_numel: int
    resident_bytes: int
    gpu_cap_bytes: int
    host_bytes: int
    host_limit_bytes: int

    def head_chunk(self, pack_tokens: int) -> int:
        """Tokens of a pack of this size whose logits may exist at once."""
        costs = self.costs
        room = self.gpu_cap_bytes - self.resident_bytes - costs.fixed - costs.head
        room -= pack_tokens * costs.per_head_pack_token
        return max(MIN_HEAD_CHUNK, min(MAX_HEAD_CHUNK, room // costs.per_head_chunk_token))


def make_plan(spec: DecoderSpec, config: StreamConfig, adamw: AdamWConfig | None, *, reference: bool) -> MemoryPlan:
    """adamw None: forward only."""
    train = adamw is not None
    cap = int(config.gpu_budget_gb * 1e9) - CONTEXT_BYTES
    slab_numel = min(_MAX_SLAB_NUMEL, -(-spec.max_layer_numel // config.num_grad_slabs))
    costs = _device_costs(spec, config, slab_numel, train)
    least = costs.peak(MIN_PACK_TOKENS, MIN_HEAD_CHUNK)
    if least > cap:
        raise ValueError(
            f"gpu_budget_gb={config.gpu_budget_gb:g} is too small for this model: it needs at least "
            f"{math.ceil((least + CONTEXT_BYTES) / 1e8) / 10:g}; raise gpu_budget_gb or lower ring_depth and num_grad_slabs"
        )
    resident = min(_RESIDENT_BYTES, (cap - least) // 4)
    room = cap - costs.fixed - resident
    head_room = room - costs.head - MIN_HEAD_CHUNK * costs.per_head_chunk_token
    max_tokens = min((room - costs.layer) // costs.per_layer_token, head_room // costs.per_head_pack_token)
    if config.pack_tokens is not None and config.pack_tokens > max_tokens:
        raise ValueError(
            f"pack_tokens={config.pack_tokens} does not fit gpu_budget_gb={config.gpu_budget_gb:g}: at most {max_tokens}; "
            "lower pack_tokens or raise gpu_budget_gb"
        )
    host_bytes = _host_bytes(spec, config, train, reference)
    host_limit = int(config.host_budget_gb * 1e9) if config.host_budget_gb else available_host_bytes()
    if host_bytes > host_limit:
        pinned = " reference=mmap," if reference and config.reference == "pinned" else ""
        raise ValueError(
            f"the training state needs {host_bytes / 1e9:.1f} GB of host RAM and {host_limit / 1e9:.1f} GB are available: "
            f"{(host_bytes - host_limit) / 1e9:.1f} GB short; use a smaller model,{pinned} or set host_budget_gb if more is there"
        )
    return MemoryPlan(
        costs=costs,
        pack_tokens=config.pack_tokens or min(MAX_PACK_TOKENS, max_tokens),
        max_pack_tokens=max_tokens,
        slab_numel=slab_numel,
        resident_bytes=resident,
        gpu_cap_bytes=cap,
        host_bytes=host_bytes,
        host_limit_bytes=host_limit,
    )


def check_packs(plan: MemoryPlan, config: StreamConfig, packs: Sequence[PackedBatch]) -> None:
    """A pack the budget cannot hold is a ValueError. A pack longer than pack_tokens is one long sequence."""
    for pack in packs:
        if pack.num_tokens > plan.max_pack_tokens:
            what = "a sequence" if len(pack.sequence_ids) == 1 else "a pack"
            raise ValueError(
                f"{what} of {pack.num_tokens} tokens does not fit gpu_budget_gb={config.gpu_budget_gb:g}: at most "
                f"{plan.max_pack_tokens}; raise gpu_budget_gb or shorten prompts and responses"
            )


def cut_sweeps(
    plan: MemoryPlan, packs: Sequence[PackedBatch], *, num_slots: int, bytes_per_token: int
) -> list[list[PackedBatch]]:
    """Consecutive groups of packs whose layer inputs fit host RAM beside the training state: one sweep each.

    num_slots: places of one hidden state per token; bytes_per_token: of one hidden state.
    """
    room = plan.host_limit_bytes - plan.host_bytes
    sweeps: list[list[PackedBatch]] = []
    size = 0
    for pack in packs:
        pack_bytes = num_slots * bytes_per_token * pack.num_tokens
        if pack_bytes > room:
            raise ValueError(
                f"layer inputs of a pack of {pack.num_tokens} tokens need {pack_bytes / 1e9:.1f} GB of host RAM beside "
                f"{plan.host_bytes / 1e9:.1f} GB of training state; {plan.host_limit_bytes / 1e9:.1f} GB are available: "
                "lower pack_tokens, raise checkpoint_interval, or set host_budget_gb if more is there"
            )
        if not sweeps or size + pack_bytes > room:
            sweeps.append([])
            size = 0
        sweeps[-1].append(pack)
        size += pack_bytes
    return sweeps


def _device_costs(spec: DecoderSpec, config: StreamConfig, slab_numel: int, train: bool) -> DeviceCosts:
    weight, hidden = config.param_torch_dtype.itemsize, spec.hidden_size
    fixed = _WORKSPACE_BYTES + _INDEX_BYTES + config.ring_depth * spec.max_layer_numel * weight
    if train:  # slabs, and the fp32 sum of one layer's gradients
        fixed += config.num_grad_slabs * slab_numel * config.grad_torch_dtype.itemsize + 4 * spec.max_layer_numel
    widths = max(
        sum(sum(slot.shape) for slot in block.layout.slots.values() if len(slot.shape) == 2) for block in spec.layers
    )
    return DeviceCosts(
        fixed=fixed,
        # one pack's parameter gradients
        layer=spec.max_layer_numel * weight if train else 0,
        # inputs and outputs of every matrix product: once in forward; in backward saved and as gradients in flight
        per_layer_token=weight * ((2 if train else 1) * widths + 8 * hidden),
        # output matrix and its fp32 gradient sum; the embedding's gradient sum takes the same place later
        head=spec.vocab_size * hidden * (weight + (4 if train else 0)),
        # hidden and normed states and their gradients, with the norm's fp32 copies
        per_head_pack_token=hidden * (5 * weight + 20),
        # up to three fp32 rows: log-probabilities, probabilities and their product or what logsumexp needs
        per_head_chunk_token=12 * spec.vocab_size,
    )


def _host_bytes(spec: DecoderSpec, config: StreamConfig, train: bool, reference: bool) -> int:
    weight = config.param_torch_dtype.itemsize
    per_parameter = weight
    if train:
        per_parameter += 8 + config.grad_torch_dtype.itemsize + (2 if weight == 2 else 0)
    total = spec.num_parameters * per_parameter
    if reference and config.reference == "pinned":
        total += spec.num_parameters * weight
    elif reference:
        total += 2 * weight * max(b.layout.numel for b in spec.blocks)
    return total
