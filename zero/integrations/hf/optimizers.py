"""Notices an optimizer that transformers drops: `Trainer(optimizers=...)` with a configuration."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from zero.errors import UsageError


def refuse_dropped(optimizer: Any) -> None:
    """Raise UsageError if a Trainer is preparing its model, and was given another optimizer, or a
    scheduler, by `optimizers=`. Where it has a DeepSpeed configuration, it makes its own.

    Args:
        optimizer: what `initialize` gets.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "transformers.trainer":
        frame = frame.f_back
    # The Trainer has forgotten them by now, its callbacks have not. In a second run, these have
    # what accelerate and the Trainer have made.
    callbacks = getattr(frame and frame.f_locals.get("self"), "callback_handler", None)
    given = getattr(callbacks, "optimizer", None), getattr(callbacks, "lr_scheduler", None)
    if type(given[0]).__module__.startswith("accelerate."):
        return
    for kind, each in zip((torch.optim.Optimizer, LRScheduler), given, strict=True):
        if isinstance(each, kind) and each is not optimizer:
            raise UsageError(
                f"Trainer(optimizers=...): transformers drops the {type(each).__name__} that you "
                "pass, because a DeepSpeed configuration is given, and would train with its own. "
                "Override create_optimizer (or create_scheduler) of the Trainer, or pass "
                "optimizer_cls_and_kwargs, or set the section optimizer of the configuration"
            )
