"""MemoryPlan: what fits the GPU budget and the host, decided before anything is allocated.

Every estimate is in bytes and errs on the large side; a GPU test holds the estimate against the measured peak. What cannot fit is
a ValueError that names the setting to change and a value that would do.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain_rl.batch import PackedBatch
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.model.decoder import DecoderSpec

# CUDA context, cuBLAS workspaces and loaded kernels of one process on an H200, by NVML (see the foundation record).
CONTEXT_BYTES = 900_000_000
MAX_PACK_TOKENS = 8192
# Below this a layer's kernels no longer hide its transfer and a budget is as good as too small.
MIN_PACK_TOKENS = 256
MAX_HEAD_CHUNK, MIN_HEAD_CHUNK = 1024, 64
_MAX_SLAB_NUMEL = 16 << 20
_RESIDENT_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """pack_tokens: most tokens of a pack cut by default. max_pack_tokens: most tokens the budget can hold in one pack, so the
    longest sequence. head_chunk: tokens whose logits exist at once. slab_numel: elements of a gradient slab. resident_bytes: for
    running hidden states kept on the device. gpu_cap_bytes: what the allocator may reserve. host_bytes: planned host RAM
    without layer inputs; host_limit_bytes: what there is."""

    pack_tokens: int
    max_pack_tokens: int
    head_chunk: int
    slab_numel: int
    resident_bytes: int
    gpu_cap_bytes: int
    host_bytes: int
    host_limit_bytes: int


def make_plan(spec: DecoderSpec, config: StreamConfig, adamw: AdamWConfig | None, *, reference: bool) -> MemoryPlan:
    """adamw None: forward only."""
    train = adamw is not None
    cap = int(config.gpu_budget_gb * 1e9) - CONTEXT_BYTES
    slab_numel = min(_MAX_SLAB_NUMEL, -(-spec.max_layer_numel // config.num_grad_slabs))
    fixed = _fixed_bytes(spec, config, slab_numel, train)
    head, per_head_token = _head_bytes(spec, config, train), _head_token_bytes(spec, config)
    token = _token_bytes(spec, config, train)
    layer = spec.max_layer_numel * config.param_torch_dtype.itemsize if train else 0  # one pack's parameter gradients
    least = fixed + max(
        head + MIN_HEAD_CHUNK * per_head_token + MIN_PACK_TOKENS * _head_pack_token_bytes(spec, config),
        layer + MIN_PACK_TOKENS * token,
    )
    if least > cap:
        raise ValueError(
            f"gpu_budget_gb={config.gpu_budget_gb:g} is too small for this model: it needs at least "
            f"{math.ceil((least + CONTEXT_BYTES) / 1e8) / 10:g}; raise gpu_budget_gb or lower ring_depth and num_grad_slabs"
        )
    resident = min(_RESIDENT_BYTES, (cap - least) // 4)
    # a pack must fit its layer phase, and its head phase at the smallest chunk
    room, pack_token = cap - fixed - resident, _head_pack_token_bytes(spec, config)
    max_tokens = min((room - layer) // token, (room - head - MIN_HEAD_CHUNK * per_head_token) // pack_token)
    if config.pack_tokens is not None and config.pack_tokens > max_tokens:
        raise ValueError(
            f"pack_tokens={config.pack_tokens} does not fit gpu_budget_gb={config.gpu_budget_gb:g}: at most {max_tokens}; "
            "lower pack_tokens or raise gpu_budget_gb"
        )
    pack_tokens = config.pack_tokens or min(MAX_PACK_TOKENS, max_tokens)
    host_bytes = _host_bytes(spec, config, train, reference)
    host_limit = int(config.host_budget_gb * 1e9) if config.host_budget_gb else available_host_bytes()
    if host_bytes > host_limit:
        raise ValueError(
            f"the training state needs {host_bytes / 1e9:.1f} GB of host RAM and {host_limit / 1e9:.1f} GB are available: "
            f"{(host_bytes - host_limit) / 1e9:.1f} GB short; use a smaller model, reference=mmap, or set host_budget_gb if more is there"
        )
    return MemoryPlan(
        pack_tokens=pack_tokens,
        max_pack_tokens=max_tokens,
        head_chunk=max(MIN_HEAD_CHUNK, min(MAX_HEAD_CHUNK, (room - head - pack_tokens * pack_token) // per_head_token)),
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


def check_layer_inputs(plan: MemoryPlan, layer_input_bytes: int) -> None:
    """Layer inputs of a sweep live in host RAM beside the training state."""
    if plan.host_bytes + layer_input_bytes > plan.host_limit_bytes:
        raise ValueError(
            f"layer inputs of this mini-batch need {layer_input_bytes / 1e9:.1f} GB of host RAM beside {plan.host_bytes / 1e9:.1f} GB "
            f"of training state; {plan.host_limit_bytes / 1e9:.1f} GB are available: lower ppo_mini_batch_size or raise "
            "checkpoint_interval"
        )


def available_host_bytes() -> int:
    """Memory this process may still take: what the kernel calls available, or less if a cgroup says so."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available


def _fixed_bytes(spec: DecoderSpec, config: StreamConfig, slab_numel: int, train: bool) -> int:
    ring = config.ring_depth * spec.max_layer_numel * config.param_torch_dtype.itemsize
    if not train:
        return ring
    slabs = config.num_grad_slabs * slab_numel * config.grad_torch_dtype.itemsize
    return ring + slabs + 4 * spec.max_layer_numel  # the fp32 sum of one layer's gradients


def _head_bytes(spec: DecoderSpec, config: StreamConfig, train: bool) -> int:
    """Output matrix, its fp32 gradient sum; the embedding's gradient sum takes the same place later."""
    matrix = spec.vocab_size * spec.hidden_size
    return matrix * (config.param_torch_dtype.itemsize + (4 if train else 0))


def _head_token_bytes(spec: DecoderSpec, config: StreamConfig) -> int:
    """Two fp32 rows (logits, probabilities) and one in the weights' dtype."""
    return spec.vocab_size * (8 + config.param_torch_dtype.itemsize)


def _head_pack_token_bytes(spec: DecoderSpec, config: StreamConfig) -> int:
    """Hidden states, normed states and their gradients of one token of a pack in the head, with the norm's fp32 copies."""
    return spec.hidden_size * (5 * config.param_torch_dtype.itemsize + 20)


def _token_bytes(spec: DecoderSpec, config: StreamConfig, train: bool) -> int:
    """Working memory of one token while a layer runs: inputs and outputs of every matrix product, twice in backward (once saved,
    once as gradients in flight), once in forward; plus a few hidden states."""
    widths = 0
    for block in spec.layers[:1]:
        widths = sum(slot.shape[0] + slot.shape[1] for slot in block.layout.slots.values() if len(slot.shape) == 2)
    factor = 2 if train else 1
    return config.param_torch_dtype.itemsize * (factor * widths + 8 * spec.hidden_size)


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
