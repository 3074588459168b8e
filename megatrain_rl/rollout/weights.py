"""WeightUpdate: buckets of named tensors are collected, checked as a whole, and only then copied into the model.

Invariant: a model holds the weights of one update entirely or not at all. The price is one copy of the weights in RAM
while an update is under way. Called by `server.py`.
"""

import torch
from torch import Tensor, nn


class WeightUpdate:
    """One update of `model` in the making. HF parameter names; a tied one may come under any of its names."""

    def __init__(self, model: nn.Module):
        # remove_duplicate=False lists a tied parameter under each of its names.
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._staged: dict[str, Tensor] = {}

    def add(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Take a bucket. ValueError for a name the model does not have, a wrong shape, or a name that came before."""
        for name, tensor in bucket:
            if name not in self._parameters:
                raise ValueError(f"weight update: the rollout's model has no parameter {name}")
            expected = self._parameters[name].shape
            if tensor.shape != expected:
                raise ValueError(
                    f"weight update: {name} has shape {tuple(tensor.shape)}, the model's is {tuple(expected)}"
                )
            if name in self._staged:
                raise ValueError(f"weight update: {name} was sent twice")
            self._staged[name] = tensor

    @torch.no_grad()
    def commit(self) -> None:
        """Copy all of it into the model; if a parameter is missing or tied names disagree, a ValueError and no copy."""
        source: dict[int, str] = {}
        for name, tensor in self._staged.items():
            first = source.setdefault(id(self._parameters[name]), name)
            if first != name and not torch.equal(self._staged[first], tensor):
                raise ValueError(
                    f"weight update: {first} and {name} are one tied parameter but were sent with different values"
                )
        missing = [name for name, parameter in self._parameters.items() if id(parameter) not in source]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"weight update: {missing[0]}{more} did not arrive")
        for name in source.values():
            self._parameters[name].copy_(self._staged[name])
        self._staged.clear()
