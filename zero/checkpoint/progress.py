"""How far a run is: what a checkpoint, an engine and other formats share of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from typing import Any

import torch

from zero.checkpoint.manifest import FORMAT, FORMAT_VERSION, Manifest
from zero.checkpoint.values import decode, dtype_name, encode


@dataclass
class Progress:
    """How far a run is, and what goes on with it beside the model and the optimizer.

    Attributes:
        client_state: values of the user's script.
    """

    global_steps: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0
    global_samples: int = 0
    gradient_accumulation_steps: int = 0
    loss_scaler: dict[str, Any] | None = None
    lr_scheduler: dict[str, Any] | None = None
    client_state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> Progress:
        return Progress(**{name: decode(getattr(manifest, name)) for name in _PROGRESS})


_PROGRESS = [each.name for each in fields(Progress)]


def describe_progress(progress: Progress, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a manifest that says how far a run is and which tensors are whole."""
    return {name: encode(getattr(progress, name), name) for name in _PROGRESS} | {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "torch": torch.__version__,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "plain": {
            name: {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
            for name, value in plain.items()
        },
        "files": {},
        "tensors": {},
    }
