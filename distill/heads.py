"""A model's output head as a module that can run another task in one call.

The loss of a chunk of tokens needs the head's weight, not its logits. So the loss is computed
inside of the call of the head's module: there an engine has gathered the weight, tied or not, and
it reduces its gradient after backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Task = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], object]
_MARK = 0.734375  # exact in fp16 and bf16, and changed by a soft cap or a scale after the head


class TaskHead(nn.Module):
    """A linear layer. Inside of `doing(task)` it returns `task(hidden, weight, bias)` instead of
    logits.

    It replaces an `nn.Linear`, and has that layer's parameters under the same names.
    """

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.in_features = head.in_features
        self.out_features = head.out_features
        self.weight = head.weight
        self.bias = head.bias
        self._task: Task | None = None

    def forward(self, hidden: torch.Tensor) -> object:
        if self._task is not None:
            return self._task(hidden, self.weight, self.bias)
        return linear(hidden, self.weight, self.bias)

    @contextmanager
    def doing(self, task: Task) -> Iterator[None]:
        self._task = task
        try:
            yield
        finally:
            self._task = None


def install_task_head(model: PreTrainedModel, whose: str) -> TaskHead | None:
    """Replace the model's head by a `TaskHead` and return that.

    For another kind of head: log it, and return None.
    """
    head = model.get_output_embeddings()
    if isinstance(head, TaskHead):
        return head
    if type(head) is not nn.Linear:
        logger.warning(
            "the %s's head is a %s: its logits are computed as a whole", whose, type(head).__name__
        )
        return None
    task_head = TaskHead(head)
    model.set_output_embeddings(task_head)
    return task_head


@torch.no_grad()
def is_final(head: TaskHead, model: nn.Module, inputs: dict[str, torch.Tensor], whose: str) -> bool:
    """Whether the model returns the head's output unchanged as its logits. If not, log it.

    A soft cap or a logit scale after the head would be missed by a loss that is computed in the
    head. This is tested with the first example of `inputs`."""
    marker = None

    def mark(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        nonlocal marker
        marker = hidden.new_full((1,), _MARK)
        return marker

    with head.doing(mark):
        try:
            logits = model(
                **{name: value[:1] for name, value in inputs.items()}, use_cache=False
            ).logits
            final = logits.shape == marker.shape and bool((logits == marker).all())
            reason = "scales or caps its logits after the head"
        except (IndexError, RuntimeError, ValueError) as error:
            final, reason = False, f"works on its logits after the head ({error})"
    if not final:
        logger.warning("the %s %s: its logits are computed as a whole", whose, reason)
    return final
