"""AdamW by other libraries over the exact master: `optimizer=torch` and `optimizer=deepspeed`.

The master is rebuilt in fp32 chunk by chunk, stepped by the library's own optimizer class, and split again. Slower than
the native op (two more passes over memory); there to compare with and to fall back on by choice.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatrain_rl.config import AdamWConfig
from megatrain_rl.ops.adamw import join_master, split_master
from megatrain_rl.ops.build_locks import wait_for_builds

# Bounds the fp32 scratch to 128 MB.
_CHUNK = 1 << 24


class LibraryAdamW:
    """make(parameters): builds the library's optimizer. step_state(t): its per-parameter state before update t."""

    def __init__(
        self,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        step_state: Callable[[int], Any],
    ):
        self._parameter = nn.Parameter(torch.zeros(1))
        self._optimizer = make([self._parameter])
        self._step_state = step_state

    def step(
        self,
        weight: Tensor,
        residual: Tensor | None,
        grad: Tensor,
        m: Tensor,
        v: Tensor,
        *,
        lr: float,
        step: int,
        scale: float,
    ) -> None:
        self._optimizer.param_groups[0]["lr"] = lr
        for start in range(0, weight.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            master = weight[part] if residual is None else join_master(weight[part], residual[part])
            self._parameter.data = master
            self._parameter.grad = grad[part].float() * scale
            self._optimizer.state[self._parameter] = {
                "step": self._step_state(step - 1), "exp_avg": m[part], "exp_avg_sq": v[part]
            }  # fmt: skip
            self._optimizer.step()
            if residual is not None:
                split_master(self._parameter.data, weight[part], residual[part])
        self._optimizer.state.clear()
        self._parameter.data = torch.zeros(1)
        self._parameter.grad = None


def fused_adamw(parameters: Iterable[nn.Parameter], adamw: AdamWConfig) -> torch.optim.Optimizer:
    """torch's own fused AdamW."""
    return torch.optim.AdamW(
        parameters, lr=adamw.lr, betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay, fused=True
    )


def deepspeed_cpu_adam(parameters: Iterable[nn.Parameter], adamw: AdamWConfig) -> torch.optim.Optimizer:
    """DeepSpeedCPUAdam with decoupled weight decay. Its op is built when it is first made."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as error:
        raise ValueError(
            "optimizer=deepspeed: deepspeed is not installed; pip install megatrain-rl[deepspeed]"
        ) from error
    wait_for_builds("cpu_adam", wanted_by="DeepSpeed's AdamW (optimizer=deepspeed)")
    return DeepSpeedCPUAdam(
        parameters, lr=adamw.lr, betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay, adamw_mode=True
    )


def torch_adamw(adamw: AdamWConfig) -> LibraryAdamW:
    return LibraryAdamW(lambda parameters: fused_adamw(parameters, adamw), lambda done: torch.tensor(float(done)))


def deepspeed_adamw(adamw: AdamWConfig) -> LibraryAdamW:
    return LibraryAdamW(lambda parameters: deepspeed_cpu_adam(parameters, adamw), lambda done: done)
