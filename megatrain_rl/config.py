"""Every setting of the trainer: frozen, keyword-only, described and validated once, here.

`StreamConfig` is what `actor.megatrain.*` means in VERL; `AdamWConfig` is the update. Code receives one of these and
reads plain attributes; nobody looks a setting up with a default of its own.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp32": "float32"}

_CHOICES = {
    "optimizer": ("native", "torch", "deepspeed"),
    "param_dtype": tuple(DTYPES),
    "grad_dtype": tuple(DTYPES),
    "optimizer_state_dtype": tuple(DTYPES),
    "attention": ("auto", "varlen", "flash_attn", "sdpa"),
    "reference": ("mmap", "pinned"),
    "host_numa": ("default", "interleave"),
}


def _require(condition: bool, setting: str, value: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"{setting}={value!r}: must be {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def knob(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that users may set: a knob.

    help: its description, from which configs/*.yaml and the tables of settings are written.
    more: further metadata for those files; see megatrain_rl/verl_plugin/knobs.py.
    """
    return dataclasses.field(default=default, metadata={"help": help, **more})


def check_knobs(given: Iterable[str], known: Iterable[str], prefix: str) -> None:
    """Raise a ValueError if a name of `given` is not known. It names the first such name and the nearest known one.

    prefix: what stands before the names in the error's text.
    """
    known = list(known)
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(sorted(known))}"
            raise ValueError(f"unknown setting {prefix}{key}; {hint}")


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How the model is streamed. This is the knobs' one home: each field has its description and its default here."""

    gpu_budget_gb: float = knob(
        9.0, "GPU memory of the trainer's process in GB (1e9 bytes), CUDA context included; a hard cap"
    )
    checkpoint_interval: int = knob(
        1, "one layer input in so many is kept in host RAM; backward recomputes those between two kept ones"
    )
    num_grad_slabs: int = knob(
        12,
        "device staging buffers through which gradients leave for host RAM; with more of them backward runs further "
        "ahead of the link",
    )
    ring_depth: int = knob(2, "device slots for layer weights; 2 is double buffering")
    pack_tokens: int | None = knob(
        None,
        "most tokens of a pack (one forward of one layer); null takes what the budget holds, at most 10240; "
        "a longer sequence gets a pack of its own if the budget holds it",
    )
    share_prompts: bool = knob(
        False,
        "whether a prompt that several rows of a mini-batch begin with is computed once for all of them; the result is "
        "the same",
    )
    optimizer: Literal["native", "torch", "deepspeed"] = knob(
        "native",
        "who applies AdamW on the host, always to the same exact fp32 master: native (this package's op), torch "
        "(torch.optim.AdamW, fused) or deepspeed (DeepSpeedCPUAdam; needs the extra `deepspeed`)",
    )
    param_dtype: Literal["bfloat16", "float32"] = knob(
        "bfloat16",
        "dtype of the weights on the device; with bfloat16 an int16 residual in host RAM makes the fp32 master exact; "
        "float32 runs everything in fp32",
    )
    grad_dtype: Literal["bfloat16", "float32"] = knob(
        "bfloat16",
        "dtype of the gradients in host RAM; sums over packs are fp32 whatever this is, and what several calls or sweeps "
        "add up in bfloat16 is rounded up or down at random, so that nothing is lost on average",
    )
    optimizer_state_dtype: Literal["bfloat16", "float32"] = knob(
        "float32",
        "dtype of AdamW's moments; bfloat16 saves 4 bytes a parameter and rounds stochastically (native optimizer "
        "only); the master stays exact",
    )
    overlap_optimizer: bool = knob(
        True,
        "whether a block (a layer, the embedding or the head) is stepped as soon as its gradient lands, while "
        "backward goes on; the result is the same",
    )
    compile: bool | None = knob(
        None,
        "whether layers and the head's elementwise part are compiled (torch.compile, CUDA only); null compiles when "
        "the model is large enough for it to pay (hidden size 1024 and more)",
    )
    attention: Literal["auto", "varlen", "flash_attn", "sdpa"] = knob(
        "auto",
        "attention over packed sequences: varlen (torch), flash_attn or sdpa; auto is varlen on CUDA, sdpa elsewhere",
    )
    reference: Literal["mmap", "pinned"] = knob(
        "mmap",
        "where frozen reference weights live: mmap reads the model's files through two pinned staging blocks (no "
        "anonymous host RAM; fast while the files are in page cache), pinned keeps a copy of 2 bytes a parameter",
    )
    cpu_threads: int | None = knob(
        None,
        "threads of the host optimizer and of torch on the CPU; null takes seven of every eight cores that this "
        "process may use for the optimizer, since the others drive the GPU, and all of them for torch",
    )
    host_budget_gb: float | None = knob(
        None,
        "host RAM in GB that the trainer may use; null reads what the machine has and what the limits on this process "
        "(cgroups, NUMA nodes, ulimit) leave of it",
    )
    host_numa: Literal["default", "interleave"] = knob(
        "default",
        "where host RAM lies on a machine of several processor sockets: default is the system's choice, usually the "
        "socket of the thread that touches a page first; interleave deals pages out to all sockets in turn",
    )

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
        """Build the config from user input. An unknown key is a ValueError, as in `check_knobs`, which has `prefix`."""
        check_knobs(knobs, (f.name for f in dataclasses.fields(cls)), prefix)
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
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), the update of `torch.optim.AdamW`.

    clip_grad: limit of the gradient's L2 norm over all parameters; 0 or None switches clipping off.
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
