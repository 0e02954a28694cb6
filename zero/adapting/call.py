"""One forward of the script, which can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

KEY = "on_out_of_memory"


@dataclass
class Call:
    """A forward of the script.

    Attributes:
        run: the engine's own forward.
        module: the model.
        random: the states of the generators before it.
        shown: what the script has received for its outputs, by their places. The first is the loss.
        outputs: the tensors with a graph in the same places.
    """

    run: Callable[..., Any]
    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    random: object = None
    shown: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seen = self._versions()

    @property
    def is_written(self) -> bool:
        """Whether a buffer of the model, or a tensor among the arguments, has been written to since
        the call.
        """
        return self._seen != self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        tensors = [*self.module.buffers(), *tree_leaves((self.args, self.kwargs))]
        return [
            (id(each), 0 if each.is_inference() else each._version)
            for each in tensors
            if isinstance(each, torch.Tensor)
        ]

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients of the outputs, by their places."""
        found = {place: shown.grad for place, shown in self.shown.items()}
        return {place: grad for place, grad in found.items() if grad is not None}

    def run_all(self) -> Any:
        """What the engine's forward returns."""
        return self.run(*self.args, **self.kwargs)

    def run_one(self) -> Any:
        """The same for one sample: the first row of each tensor that has as many as the batch."""
        leaves = tree_leaves((self.args, self.kwargs))
        batches = [each for each in leaves if isinstance(each, torch.Tensor) and each.dim() >= 2]

        def one(tensor: torch.Tensor) -> torch.Tensor:
            is_batch = batches and tensor.dim() and len(tensor) == len(batches[0])
            return tensor[:1] if is_batch else tensor

        args, kwargs = tree_map_only(torch.Tensor, one, (self.args, self.kwargs))
        return self.run(*args, **kwargs)

    def run_for_gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run again: the outputs that got a gradient, and these gradients."""
        leaves, grads = tree_flatten(self.run_all())[0], self.gradients()
        return [leaves[place] for place in grads], [*grads.values()]
