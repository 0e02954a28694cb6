"""What every format has in common: the value that its reader returns and its writer takes.

Tensors are read from their files part by part, so that a model need not fit into memory. This file
must not depend on any format."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint.files import Stored
from zero.checkpoint.state import Progress

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
    """

    weights: Stored
    dtype: torch.dtype
    trainable: bool = True
    group: int | None = None
    state: dict[str, Stored | Number] = field(default_factory=dict)


@dataclass(kw_only=True)
class TrainingState(Progress):
    """A training run at a step.

    Attributes:
        source: what it was read from, for people: "DeepSpeed 0.19.8, stage 3, 2 ranks".
        parameters: by name, in the model's order.
        buffers: persistent buffers by name.
        tied: other names that the model has for some parameters: {other name: name}.
        optimizer: the name of its class, or None if there is no optimizer state.
        groups: the options of each param group, such as "lr".
        ranks: how many processes saved it.
        frozen_excluded: whether the weights of frozen parameters are left out.
        model_config: the content of the model's `config.json`, if it is one of transformers'.
        adapters: PEFT's adapters, as `zero.checkpoint.models` describes them.
        beside: files of the Trainer that are copied as they are, such as `trainer_state.json`.
        changed: the new content of those of them that are not, by name.
        missing: what the source does not have or the target cannot hold, each in words.
    """

    source: str
    parameters: dict[str, Parameter] = field(default_factory=dict)
    buffers: dict[str, Stored] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)
    ranks: int = 1
    frozen_excluded: bool = False
    model_config: dict[str, Any] | None = None
    adapters: dict[str, Any] = field(default_factory=dict)
    beside: list[Path] = field(default_factory=list)
    changed: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
