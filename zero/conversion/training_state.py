"""What every format has in common: the value that its reader returns and its writer takes.

Tensors are read from their files part by part, so that a model need not fit into memory. This file
must not depend on any format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Stored:
    """A tensor in files. `read(start, end)` returns these elements of the flattened tensor, 1-D, on
    the host and in `dtype`. It may be called from several threads.

    Attributes and methods have the names of a tensor's, so that `zero.checkpoint.files.write` takes
    it as the values of a slice.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stored:
        flat = tensor.detach().cpu().contiguous().view(-1)
        return cls(tuple(tensor.shape), tensor.dtype, lambda start, end: flat[start:end])

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel() * self.itemsize

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def __getitem__(self, part: slice) -> Stored:
        """Return a range of the flattened tensor."""
        start, end, _ = part.indices(self.numel())
        shape = torch.Size((end - start,))
        return Stored(shape, self.dtype, lambda first, last: self.read(start + first, start + last))

    def values(self) -> torch.Tensor:
        """Return the flattened tensor."""
        return self.read(0, self.numel())

    def tensor(self) -> torch.Tensor:
        return self.values().view(self.shape)


# The state of an optimizer that is not as large as the parameter, such as `step`. It may be a
# tensor of one element.
Number = bool | int | float | torch.Tensor


@dataclass
class Parameter:
    """A parameter of the model.

    Attributes:
        weights: the fp32 master if there is one, or else the weights.
        dtype: the dtype in which the model uses it.
        group: the index of its param group, or None if it has none.
        state: its optimizer state by key, such as "exp_avg" and "step".
        tied: other names that the model has for it.
    """

    weights: Stored
    dtype: torch.dtype
    trainable: bool = True
    group: int | None = None
    state: dict[str, Stored | Number] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)


@dataclass
class TrainingState:
    """A training run at a step.

    Attributes:
        source: what it was read from, for people: "DeepSpeed 0.19.8, stage 3, 2 ranks".
        parameters: by name, in the model's order.
        buffers: persistent buffers by name.
        optimizer: the name of its class, or None if there is no optimizer state.
        groups: the options of each param group, such as "lr".
        ranks: how many processes saved it.
        client_state: values of the user's script.
        frozen_excluded: whether the weights of frozen parameters are left out.
        model_config: the content of the model's `config.json`, if it is one of transformers'.
        adapters: PEFT's adapters, as `zero.checkpoint.adapters` describes them.
        beside: files of the Trainer that are copied as they are, such as `trainer_state.json`.
        changed: the new content of those of them that are not, by name.
        missing: what the source does not have or the target cannot hold, each in words.
    """

    source: str
    parameters: dict[str, Parameter]
    buffers: dict[str, Stored] = field(default_factory=dict)
    optimizer: str | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)
    lr_scheduler: dict[str, Any] | None = None
    loss_scaler: dict[str, Any] | None = None
    global_steps: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0
    global_samples: int = 0
    ranks: int = 1
    client_state: dict[str, Any] = field(default_factory=dict)
    frozen_excluded: bool = False
    model_config: dict[str, Any] | None = None
    adapters: dict[str, Any] = field(default_factory=dict)
    beside: list[Path] = field(default_factory=list)
    changed: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
