"""MemoryPlan: what fits the GPU budget and the host, decided before anything is allocated.

Every estimate is in bytes and errs on the large side; a GPU test runs the largest admitted pack under the hard cap.
What cannot fit is a ValueError that names the setting to change and a value that would do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain_rl.batch import PackedBatch
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.host.machine import available_host_bytes, tightest_limit
from megatrain_rl.model.decoder import DecoderSpec

# CUDA context and loaded kernels of one process on an H200, by NVML (see the records).
CONTEXT_BYTES = 900_000_000
# cuBLAS takes its workspaces from the allocator, 32 MiB each: one for the thread that runs forward, one for autograd's.
_WORKSPACE_BYTES = 96 << 20
# Indices and statistics of the packs of a sweep: 36 bytes a token.
_INDEX_BYTES = 64 << 20
# Rotary tables of the first packs of a sweep are kept on the device, those of later ones made anew in every layer: what
# is kept must not grow with the batch.
ROTARY_TOKENS = 65536
# What rounding and unlike neighbours leave unused between tensors.
_SLACK_BYTES = 128 << 20
# Beside the two large segments: the libraries' workspaces, segments of small tensors, and what large ones are rounded
# to.
_OUTSIDE_BYTES = _WORKSPACE_BYTES + (64 << 20)
# Measured on an H200: 3 GB beyond the plan once everything is loaded and compiled.
_PROCESS_HOST_BYTES = 5_000_000_000
# Longer packs make no layer faster; this much lets batches of 2^k tokens of uneven sequences be cut into packs of about
# 8192.
MAX_PACK_TOKENS = 10240
# Below this a layer's kernels no longer hide its transfer and a budget is as good as too small.
MIN_PACK_TOKENS = 256
MAX_HEAD_CHUNK, MIN_HEAD_CHUNK = 2048, 64
# With this chunk the head's products hide the traffic of the gradient sum they add to; below it the ring makes room
# instead.
_GOOD_HEAD_CHUNK = 1024
# All slabs together: enough for a whole layer of most models, so that compute never waits for one.
_MAX_SLABS_NUMEL = 256 << 20
_RESIDENT_BYTES = 256 << 20
# A pack that is not resident has so many in backward: its layer input and gradient, those of the next pack on their
# way, the new gradient, and two more leaving.
_HIDDEN_TENSORS = 7
# Packs are padded to a multiple of this where layers are compiled: matrix products keep their fast shapes.
PACK_MULTIPLE = 128
# From this width on a compiled layer is faster by more than its compilation costs within a few dozen steps.
_COMPILE_HIDDEN_SIZE = 1024


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Host RAM of the training state, in bytes.

    weights: the policy's, as they are streamed.
    residual: what bf16 weights lack of their fp32 masters.
    moments: both of AdamW's.
    gradients: one number per parameter.
    reference: a pinned copy of the frozen weights, or staging buffers for those that are read from files.
    """

    weights: int
    residual: int
    moments: int
    gradients: int
    reference: int

    @property
    def total(self) -> int:
        return self.weights + self.residual + self.moments + self.gradients + self.reference


@dataclass(frozen=True, kw_only=True)
class DeviceCosts:
    """Device memory of a model's parts, in bytes.

    fixed: held all the time.
    ring: weight slots, held while layers run.
    forward_token, backward_token: more for each token of the pack that a layer runs on.
    layer_sum: fp32 gradient sum of a layer, held in backward.
    head_weight: output matrix.
    head_sum: fp32 gradient sum of the output matrix; later the embedding's takes the same place.
    head_token, head_chunk_token: more while the head runs, for each token of its pack and for each token whose logits
        exist.
    hidden_token: for each token of the largest pack, hidden states that wait, arrive or leave; held all the time.
    copied_token: for each token that is computed for another sequence, the copies of its keys and values; 0 where no
        prompts are shared. Those of a token that is computed where it stands are in forward_token and backward_token.
    """

    fixed: int
    slabs: int  # a part of `fixed`: staging buffers through which gradients leave
    ring: int
    forward_token: int
    backward_token: int
    layer_sum: int
    head_weight: int
    head_sum: int
    head_token: int
    head_chunk_token: int
    hidden_token: int
    copied_token: int

    def head(self, pack_tokens: int, *, ring_in_head: bool) -> int:
        """Bytes of the head phase, without its chunk's logits."""
        held = self.fixed + (self.ring if ring_in_head else 0)
        return held + self.head_weight + self.head_sum + pack_tokens * self.head_token

    def peak(self, pack_tokens: int, head_chunk: int, *, ring_in_head: bool) -> int:
        """Bytes of the largest phase, without hidden states.

        The phases: forward with the output matrix already under way, head, backward, embedding.
        """
        layers = self.fixed + self.ring
        forward = layers + pack_tokens * self.forward_token + (self.head_weight if ring_in_head else 0)
        backward = layers + self.layer_sum + pack_tokens * self.backward_token
        head = self.head(pack_tokens, ring_in_head=ring_in_head) + head_chunk * self.head_chunk_token
        return max(forward, backward, head)

    def with_hidden(self, pack_tokens: int, head_chunk: int, *, ring_in_head: bool) -> int:
        """Bytes of `peak` and of the hidden states, when no pack is larger."""
        return self.hidden_token * pack_tokens + self.peak(pack_tokens, head_chunk, ring_in_head=ring_in_head)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Sizes that a trainer works with.

    pack_tokens: most tokens of a pack cut by default.
    max_pack_tokens: most tokens the budget can hold in one pack, so the longest sequence.
    slab_numel: elements of a gradient slab.
    ring_in_head: whether weight slots stay while the head runs, so that the last layers' weights arrive meanwhile;
        under a tight budget they make room for it.
    resident_bytes: device memory for running hidden states kept there.
    hidden_bytes: device memory for all hidden states, those included.
    gpu_cap_bytes: device memory that the allocator may reserve, and does at the start.
    host: planned host RAM by kind, without layer inputs; host_bytes is their sum.
    host_limit_bytes: host RAM there is.
    """

    costs: DeviceCosts
    pack_tokens: int
    max_pack_tokens: int
    slab_numel: int
    ring_in_head: bool
    resident_bytes: int
    hidden_bytes: int
    gpu_cap_bytes: int
    host: HostCosts
    host_limit_bytes: int

    @property
    def reserved_bytes(self) -> int:
        """Device memory left for everything but hidden states."""
        return self.gpu_cap_bytes - self.hidden_bytes - _OUTSIDE_BYTES

    @property
    def idle_bytes(self) -> int:
        """Device memory held between sweeps too."""
        return self.costs.fixed + self.hidden_bytes + _OUTSIDE_BYTES

    def head_chunk(self, pack_tokens: int) -> int:
        """How many tokens of a pack of this size may have logits at once."""
        room = self.reserved_bytes - self.costs.head(pack_tokens, ring_in_head=self.ring_in_head)
        return max(MIN_HEAD_CHUNK, min(MAX_HEAD_CHUNK, room // self.costs.head_chunk_token))

    @property
    def repeat_cost(self) -> float:
        """Memory of a token that is computed for another sequence, as a share of one that is computed."""
        return self.costs.copied_token / max(self.costs.forward_token, self.costs.backward_token)

    def counted_tokens(self, pack: PackedBatch) -> int:
        """What the memory of a pack is counted by: tokens that are computed, and a share of those that are not."""
        computed = pack.num_computed
        return computed + math.ceil(self.repeat_cost * (pack.num_tokens - computed))

    def peak(self, pack_tokens: int) -> int:
        """Device memory, in bytes, of a sweep whose largest pack has `pack_tokens` tokens."""
        chunk = self.head_chunk(pack_tokens)
        return self.hidden_bytes + self.costs.peak(pack_tokens, chunk, ring_in_head=self.ring_in_head)

    @property
    def host_bytes(self) -> int:
        return self.host.total

    def device_lines(self) -> dict[str, int]:
        """The use of every byte of the GPU budget."""
        return {
            "CUDA context and loaded kernels": CONTEXT_BYTES,
            "workspaces of libraries": _OUTSIDE_BYTES,
            "hidden states that wait, arrive or leave": self.hidden_bytes,
            "indices, rotary tables, slack": self.costs.fixed - self.costs.slabs,
            "gradient slabs": self.costs.slabs,
            "shared by layers and head, which take turns": self.reserved_bytes - self.costs.fixed,
        }

    def shared_lines(self) -> dict[str, int]:
        """The parts of the shared memory whose size the model gives. The rest of it is for the tokens of a pack."""
        stays = ", stays while the head runs" if self.ring_in_head else ""
        return {
            f"layers: weight ring{stays}": self.costs.ring,
            "layers: gradient sum of one, in backward": self.costs.layer_sum,
            "head: output matrix": self.costs.head_weight,
            "head: gradient sum of the output matrix": self.costs.head_sum,
        }

    def host_lines(self) -> dict[str, int]:
        """The use of every byte of host RAM that there is."""
        return {
            "weights": self.host.weights,
            "residual of the fp32 masters": self.host.residual,
            "AdamW's moments": self.host.moments,
            "gradients": self.host.gradients,
            "reference": self.host.reference,
            "room for layer inputs": self.host_limit_bytes - self.host_bytes,
        }

    def table(self) -> list[str]:
        """The plan in lines, one for each kind of memory; what is indented further is part of the line above."""

        def lines(parts: dict[str, int], indent: str) -> list[str]:
            return [f"{indent}{size / 1e9:7.2f} GB  {kind}" for kind, size in parts.items()]

        device, host = self.device_lines(), self.host_lines()
        return [
            f"packs of {self.pack_tokens} tokens, sequences up to {self.max_pack_tokens}",
            f"GPU memory, {sum(device.values()) / 1e9:.2f} GB:",
            *lines(device, "  "),
            *lines(self.shared_lines(), "      "),
            f"host RAM, {sum(host.values()) / 1e9:.2f} GB:",
            *lines(host, "  "),
        ]


def compiles(config: StreamConfig, spec: DecoderSpec) -> bool:
    """True when layers and head are compiled, where there is CUDA.

    Without a setting they are not with the exact attention path, which depends on the bounds of each sequence.
    """
    if config.compile is not None:
        return config.compile
    exact = config.attention == "sdpa" or config.param_dtype != "bfloat16"
    return spec.hidden_size >= _COMPILE_HIDDEN_SIZE and not exact


def make_plan(spec: DecoderSpec, config: StreamConfig, adamw: AdamWConfig | None, *, reference: bool) -> MemoryPlan:
    """Plan the memory of a trainer; a ValueError names what does not fit. `adamw` None: forward only.

    reference: a frozen copy of the weights is read too.
    """
    train = adamw is not None
    cap = int(config.gpu_budget_gb * 1e9) - CONTEXT_BYTES
    slab_numel = -(-min(_MAX_SLABS_NUMEL, spec.max_layer_numel) // config.num_grad_slabs)
    costs = _device_costs(spec, config, slab_numel, train)
    least = costs.with_hidden(MIN_PACK_TOKENS, MIN_HEAD_CHUNK, ring_in_head=False) + _OUTSIDE_BYTES
    if least > cap:
        raise ValueError(
            f"gpu_budget_gb={config.gpu_budget_gb:g} is too small for this model: it needs at least "
            f"{math.ceil((least + CONTEXT_BYTES) / 1e8) / 10:g}; raise gpu_budget_gb or lower ring_depth and num_grad_slabs"
        )
    resident = min(_RESIDENT_BYTES, (cap - least) // 8)
    room = cap - resident - _OUTSIDE_BYTES
    wanted = config.pack_tokens or MAX_PACK_TOKENS
    ring_in_head = costs.with_hidden(wanted, _GOOD_HEAD_CHUNK, ring_in_head=True) <= room
    max_tokens = _max_pack_tokens(costs, room, ring_in_head=ring_in_head)
    if config.pack_tokens is not None and config.pack_tokens > max_tokens:
        raise ValueError(
            f"pack_tokens={config.pack_tokens} does not fit gpu_budget_gb={config.gpu_budget_gb:g}: at most {max_tokens}; "
            "lower pack_tokens or raise gpu_budget_gb"
        )
    host = _host_costs(spec, config, train, reference)
    host_bytes = host.total
    host_limit = int(config.host_budget_gb * 1e9) if config.host_budget_gb else usable_host_bytes()
    if host_bytes > host_limit:
        limit = tightest_limit()
        scarce = f" (the tightest limit on this process is {limit})" if limit else ""
        pinned = " reference=mmap," if reference and config.reference == "pinned" else ""
        moments = ""
        if train and config.optimizer == "native" and config.optimizer_state_dtype == "float32":
            moments = " optimizer_state_dtype=bfloat16 (4 bytes a parameter less),"
        raise ValueError(
            f"the training state needs {host_bytes / 1e9:.1f} GB of host RAM and {host_limit / 1e9:.1f} GB are available{scarce}: "
            f"{(host_bytes - host_limit) / 1e9:.1f} GB short; use a smaller model,{pinned}{moments} or set host_budget_gb if more is there"
        )
    return MemoryPlan(
        costs=costs,
        pack_tokens=min(wanted, max_tokens),
        max_pack_tokens=max_tokens,
        slab_numel=slab_numel,
        ring_in_head=ring_in_head,
        resident_bytes=resident,
        hidden_bytes=resident + max_tokens * costs.hidden_token,
        gpu_cap_bytes=cap,
        host=host,
        host_limit_bytes=host_limit,
    )


def _max_pack_tokens(costs: DeviceCosts, room: int, *, ring_in_head: bool) -> int:
    """Most tokens of a pack whose every phase fits `room` bytes; a multiple of what packs are padded to."""
    low, high = 0, room // costs.hidden_token
    while low < high:
        middle = (low + high + 1) // 2
        if costs.with_hidden(middle, MIN_HEAD_CHUNK, ring_in_head=ring_in_head) <= room:
            low = middle
        else:
            high = middle - 1
    return low // PACK_MULTIPLE * PACK_MULTIPLE


def check_packs(plan: MemoryPlan, config: StreamConfig, packs: Sequence[PackedBatch], *, vocab_size: int) -> None:
    """A ValueError for a pack that the budget cannot hold or that was not planned for, and for an unknown token.

    A pack longer than pack_tokens is one long sequence.
    """
    if not packs:
        raise ValueError("no packs: the mini-batch is empty")
    for pack in packs:
        if pack.source_T is not None and not config.share_prompts:
            raise ValueError(
                "packs that were made with prompt_lengths need room for copies of keys and values: set share_prompts=true, or "
                "make them without"
            )
        if plan.counted_tokens(pack) > plan.max_pack_tokens:
            what = "a sequence" if len(pack.sequence_ids) == 1 else "a pack"
            raise ValueError(
                f"{what} of {plan.counted_tokens(pack)} tokens does not fit gpu_budget_gb={config.gpu_budget_gb:g}: at most "
                f"{plan.max_pack_tokens}; raise gpu_budget_gb or shorten prompts and responses"
            )
        lowest, highest = (int(end) for end in pack.tokens_T.aminmax())
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"token id {lowest if lowest < 0 else highest}: the model has ids from 0 to {vocab_size - 1}; the tokenizer "
                "belongs to another model, or padding was left in a sequence"
            )


def cut_sweeps(
    plan: MemoryPlan, packs: Sequence[PackedBatch], tokens: Sequence[int], *, bytes_per_token: int
) -> list[list[PackedBatch]]:
    """Consecutive groups of packs whose layer inputs fit host RAM beside the training state: one sweep each.

    tokens: number of tokens of each pack, with padding. bytes_per_token: bytes of all layer inputs of a token.
    A single pack that does not fit is a ValueError.
    """
    room = plan.host_limit_bytes - plan.host_bytes
    sizes = [bytes_per_token * n for n in tokens]
    for n, size in zip(tokens, sizes, strict=True):
        if size > room:
            raise ValueError(
                f"layer inputs of a pack of {n} tokens need {size / 1e9:.1f} GB of host RAM beside "
                f"{plan.host_bytes / 1e9:.1f} GB of training state; {plan.host_limit_bytes / 1e9:.1f} GB are available: "
                "lower pack_tokens, raise checkpoint_interval, or set host_budget_gb if more is there"
            )
    # about equal sweeps: one of a single pack could not hide its transfers
    even = sum(sizes) / max(1, math.ceil(sum(sizes) / max(1, room)))
    sweeps: list[list[PackedBatch]] = []
    filled = 0
    for pack, size in zip(packs, sizes, strict=True):
        if not sweeps or filled + size > room or filled >= even:
            sweeps.append([])
            filled = 0
        sweeps[-1].append(pack)
        filled += size
    return sweeps


def _device_costs(spec: DecoderSpec, config: StreamConfig, slab_numel: int, train: bool) -> DeviceCosts:
    weight, hidden = config.param_torch_dtype.itemsize, spec.hidden_size
    # inputs and outputs of every matrix product of a layer
    widths = max(
        sum(sum(slot.shape) for slot in block.layout.slots.values() if len(slot.shape) == 2) for block in spec.layers
    )
    head_matrix = spec.vocab_size * hidden
    compiled = compiles(config, spec)
    slabs = config.num_grad_slabs * slab_numel * config.grad_torch_dtype.itemsize if train else 0
    # keys and values in front of each answer; their gradients, in fp32 while copies are summed
    copied = spec.key_value_width * (weight + (weight + 8 if train else 0)) if config.share_prompts else 0
    return DeviceCosts(
        fixed=_INDEX_BYTES + ROTARY_TOKENS * 2 * spec.head_dim * weight + _SLACK_BYTES + slabs,
        slabs=slabs,
        ring=config.ring_depth * spec.max_layer_numel * weight,
        forward_token=weight * (widths + 2 * hidden) + copied,
        # saved, as gradients in flight, and as factors of the weights' gradients
        backward_token=weight * ((3 if compiled else 5) * widths // 2 + 2 * hidden) + copied if train else 0,
        layer_sum=4 * spec.max_layer_numel if train else 0,
        head_weight=weight * head_matrix,
        head_sum=4 * head_matrix if train else 0,
        # the gradient of the hidden states, before it is put where hidden states wait; in fp32, of those that predict
        # several tokens
        head_token=hidden * (weight + (4 if config.share_prompts else 0)),
        hidden_token=weight * hidden * _HIDDEN_TENSORS,
        copied_token=copied,
        # logits in fp32 and their gradient; not compiled, up to six more fp32 rows. Hidden and normed states of the
        # chunk and their gradients, with the norm's fp32 copies.
        head_chunk_token=(4 + weight + (0 if compiled else 24)) * spec.vocab_size + hidden * (5 * weight + 20),
    )


def usable_host_bytes() -> int:
    """Host RAM available now, less what Python, CUDA and other libraries of this process will still take of it."""
    available = available_host_bytes()
    return available - min(_PROCESS_HOST_BYTES, available // 10)


def state_bytes_per_parameter(config: StreamConfig) -> int:
    """Bytes of weight, residual (of bf16 weights) and both moments: training keeps them, a checkpoint holds them."""
    weight = config.param_torch_dtype.itemsize
    return weight + _residual_bytes(config) + _moments_bytes(config)


def _residual_bytes(config: StreamConfig) -> int:
    return 2 if config.param_dtype == "bfloat16" else 0


def _moments_bytes(config: StreamConfig) -> int:
    return 2 * config.optimizer_state_torch_dtype.itemsize


def _host_costs(spec: DecoderSpec, config: StreamConfig, train: bool, reference: bool) -> HostCosts:
    weight, parameters = config.param_torch_dtype.itemsize, spec.num_parameters
    frozen = 0
    if reference:
        staged = 2 * max(b.layout.numel for b in spec.blocks)
        frozen = weight * (parameters if config.reference == "pinned" else staged)
    return HostCosts(
        weights=parameters * weight,
        residual=parameters * _residual_bytes(config) if train else 0,
        moments=parameters * _moments_bytes(config) if train else 0,
        gradients=parameters * config.grad_torch_dtype.itemsize if train else 0,
        reference=frozen,
    )
