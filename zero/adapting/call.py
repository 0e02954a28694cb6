"""One forward of the script, which can be repeated."""

from __future__ import annotations

import inspect
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
    def why_final(self) -> str:
        """Why the call cannot be repeated; empty if it can."""
        if self._seen != self._versions():
            return "the inputs of the micro-batch or the model's buffers were written to"
        if any(each.requires_grad for each in self._tensors()):
            return "an input requires a gradient, to which each repetition would add"
        return ""

    @property
    def depends_on_cache(self) -> bool:
        """Whether the model may compute something else if it makes no cache of keys and values, as
        when it recomputes activations: transformers then finds packed sequences by their positions.
        """
        config = getattr(self.module, "config", None)
        cache = self._named().get("use_cache")
        makes_cache = getattr(config, "use_cache", False) if cache is None else cache
        return bool(makes_cache) and self._named().get("position_ids") is not None

    def _named(self) -> dict[str, Any]:
        """The arguments by their names."""
        bound = inspect.signature(self.module.forward).bind(*self.args, **self.kwargs)
        return {**bound.arguments, **self.kwargs}

    def _versions(self) -> list[tuple[int, int]]:
        tensors = [*self.module.buffers(), *self._tensors()]
        return [(id(each), 0 if each.is_inference() else each._version) for each in tensors]

    def _tensors(self) -> list[torch.Tensor]:
        given = tree_leaves((self.args, self.kwargs))
        return [each for each in given if isinstance(each, torch.Tensor)]

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients of the outputs, by their places."""
        found = {place: shown.grad for place, shown in self.shown.items()}
        return {place: grad for place, grad in found.items() if grad is not None}

    def run_all(self) -> Any:
        """What the engine's forward returns."""
        return self.run(*self.args, **self.kwargs)

    def run_one(self) -> Any:
        """The same for one sample: the first row of each tensor that has as many as the batch."""
        batches = [each for each in self._tensors() if each.dim() >= 2]

        def one(tensor: torch.Tensor) -> torch.Tensor:
            is_batch = batches and tensor.dim() and len(tensor) == len(batches[0])
            return tensor[:1] if is_batch else tensor

        args, kwargs = tree_map_only(torch.Tensor, one, (self.args, self.kwargs))
        return self.run(*args, **kwargs)

    def run_for_gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run again: the outputs that got a gradient, and these gradients."""
        leaves, grads = tree_flatten(self.run_all())[0], self.gradients()
        return [leaves[place] for place in grads], [*grads.values()]
