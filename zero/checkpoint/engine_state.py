"""What checkpoints take from an engine, and give back to it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from zero.checkpoint.progress import Progress
from zero.comm.communicator import Communicator
from zero.config import ResolvedConfig
from zero.core.param_group import ParamGroup
from zero.core.reduction import GradientReducer
from zero.optim.sharded_optimizer import ZeroOptimizer


class EngineState(Protocol):
    """The parts of an engine whose values are saved and restored."""

    module: nn.Module
    groups: list[ParamGroup]
    optimizer: ZeroOptimizer | None
    reducer: GradientReducer
    comm: Communicator
    settings: ResolvedConfig
    lr_scheduler: Any

    def progress(self, client_state: dict[str, Any]) -> Progress:
        """Return how far the run is."""
        ...

    def go_on_from(self, progress: Progress) -> None:
        """Restore the counters, and the loss scale if there is one."""
        ...

    def zero_grad(self) -> None: ...
