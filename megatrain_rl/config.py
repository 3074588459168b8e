"""Every setting of the trainer: frozen, keyword-only, validated once, here.

`StreamConfig` is what `actor.megatrain.*` means in VERL; `AdamWConfig` is the update. Code receives one of these and reads
plain attributes; nobody looks a setting up with a default of its own.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp32": "float32"}

ParamDtype = Literal["bfloat16", "float32"]

_CHOICES = {
    "optimizer": ("native", "torch", "deepspeed"),
    "param_dtype": tuple(DTYPES),
    "grad_dtype": tuple(DTYPES),
    "optimizer_state_dtype": tuple(DTYPES),
    "attention": ("auto", "varlen", "flash_attn", "sdpa"),
    "reference": ("mmap", "pinned"),
}


def _require(condition: bool, setting: str, value: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"{setting}={value!r}: must be {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_knobs(given: Mapping[str, Any], owner: type, prefix: str) -> None:
    """Raise one ValueError naming the first unknown key of `given` and the nearest known one."""
    known = [f.name for f in dataclasses.fields(owner)]
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(sorted(known))}"
            raise ValueError(f"unknown setting {prefix}{key}; {hint}")


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How the model is streamed.

    gpu_budget_gb: GPU memory of this process in GB (1e9 bytes), CUDA context included; a hard cap on CUDA.
    checkpoint_interval: one layer input in so many is kept in host RAM; the others are recomputed inside their window.
    num_grad_slabs: device staging buffers through which gradients leave; more lets backward run further ahead of the link.
    ring_depth: device slots for layer weights; 2 is double buffering.
    pack_tokens: most tokens of a pack (one forward of one layer); None takes what the budget holds, at most 10240.
        A single longer sequence gets a pack of its own as long as the budget holds it.
    optimizer: "native" (exact master, this package's op), "torch" (the same update by torch.optim.AdamW(fused=True)) or
        "deepspeed" (DeepSpeedCPUAdam; needs the `deepspeed` extra).
    param_dtype: dtype of the weights on the device and of the copy that is streamed. With bfloat16 an int16 residual makes
        the fp32 master exact.
    grad_dtype: dtype of the gradients in host RAM; sums over packs are fp32 on the device whatever this is.
    optimizer_state_dtype: dtype of AdamW's moments. bfloat16 saves 4 bytes a parameter and rounds stochastically (native optimizer only);
        the master stays exact. Dtypes may be given as bf16 and fp32 too.
    overlap_optimizer: step each block as its gradient lands, beneath backward; False steps all of them after it. Same result.
    compile: torch.compile the layers and the head's elementwise part on CUDA; None does so when the model is large enough for it to pay
        (hidden size 1024 and more). Costs half a minute at the first step.
    attention: "auto" (torch varlen on CUDA, SDPA elsewhere), "varlen", "flash_attn" or "sdpa".
    reference: where frozen reference weights live: "mmap" reads the checkpoint files through two pinned staging buffers (no
        anonymous host RAM; page cache makes it fast), "pinned" keeps a copy of 2 bytes a parameter.
    cpu_threads: threads of the host optimizer; None takes seven of every eight cores this process may use: the rest drives the GPU.
    host_budget_gb: host RAM in GB that the trainer may use; None reads what the machine (or its cgroup) has.
    """

    gpu_budget_gb: float = 9.0
    checkpoint_interval: int = 1
    num_grad_slabs: int = 12
    ring_depth: int = 2
    pack_tokens: int | None = None
    optimizer: Literal["native", "torch", "deepspeed"] = "native"
    param_dtype: ParamDtype = "bfloat16"
    grad_dtype: ParamDtype = "bfloat16"
    optimizer_state_dtype: ParamDtype = "float32"
    overlap_optimizer: bool = True
    compile: bool | None = None
    attention: Literal["auto", "varlen", "flash_attn", "sdpa"] = "auto"
    reference: Literal["mmap", "pinned"] = "mmap"
    cpu_threads: int | None = None
    host_budget_gb: float | None = None

    def __post_init__(self):
        for name in ("param_dtype", "grad_dtype", "optimizer_state_dtype"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, _DTYPE_ALIASES.get(value, value))
        budget = self.gpu_budget_gb
        _require(_is_number(budget) and budget > 0, "gpu_budget_gb", budget, "a positive number of GB")
        for name in ("checkpoint_interval", "num_grad_slabs", "ring_depth"):
            value = getattr(self, name)
            _require(_is_count(value), name, value, "a whole number of at least 1")
        for name in ("pack_tokens", "cpu_threads"):
            value = getattr(self, name)
            _require(value is None or _is_count(value), name, value, "a whole number of at least 1, or null")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _require(value in choices, name, value, f"one of {', '.join(choices)}")
        _require(self.compile is None or isinstance(self.compile, bool), "compile", self.compile, "true, false or null")
        _require(isinstance(self.overlap_optimizer, bool), "overlap_optimizer", self.overlap_optimizer, "true or false")
        _require(
            self.optimizer_state_dtype == "float32" or self.optimizer == "native",
            "optimizer_state_dtype",
            self.optimizer_state_dtype,
            f"float32 with optimizer={self.optimizer}; set optimizer=native",
        )
        host = self.host_budget_gb
        _require(
            host is None or (_is_number(host) and host > 0), "host_budget_gb", host, "a positive number of GB, or null"
        )

    @classmethod
    def from_mapping(cls, knobs: Mapping[str, Any], prefix: str = "") -> "StreamConfig":
        """Build from user input. An unknown key is a ValueError that names the nearest known one; `prefix` is for its text."""
        check_knobs(knobs, cls, prefix)
        return cls(**knobs)

    @property
    def param_torch_dtype(self) -> torch.dtype:
        return DTYPES[self.param_dtype]

    @property
    def grad_torch_dtype(self) -> torch.dtype:
        return DTYPES[self.grad_dtype]

    @property
    def optimizer_state_torch_dtype(self) -> torch.dtype:
        return DTYPES[self.optimizer_state_dtype]


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Decoupled weight decay Adam (Loshchilov & Hutter 2019, algorithm 2), the update of `torch.optim.AdamW`.

    clip_grad: limit of the global L2 norm; 0 or None switches clipping off.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float | None = 1.0

    def __post_init__(self):
        for name in ("lr", "eps", "weight_decay"):
            _require(_is_number(getattr(self, name)), name, getattr(self, name), "a number")
        _require(self.lr >= 0, "lr", self.lr, "not negative")
        _require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "betas", self.betas, "two numbers in [0, 1)"
        )
        _require(self.eps > 0, "eps", self.eps, "positive")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "not negative")
        _require(self.clip_grad is None or self.clip_grad >= 0, "clip_grad", self.clip_grad, "not negative, or null")
