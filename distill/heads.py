"""A model's output head as a module that can run another task in one call.

The loss of a chunk of tokens needs the head's weight, not its logits. The loss is therefore
computed inside the call of the head's module, where an engine has gathered the weight, tied or not,
and will reduce its gradient after backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Task = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Result]
_MARK = 0.734375  # exact in fp16 and bf16, and changed by a soft cap or a scale after the head


class TaskHead(nn.Module):
    """A linear layer. Inside `doing(task)` it returns `task(hidden, weight, bias)` instead of
    logits.

    It replaces an `nn.Linear`, and has that layer's parameters under the same names.
    """

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.in_features = head.in_features
        self.out_features = head.out_features
        self.weight = head.weight
        self.bias = head.bias
        self._task: Task[torch.Tensor | None] | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | None:
        if self._task is not None:
            return self._task(hidden, self.weight, self.bias)
        return linear(hidden, self.weight, self.bias)

    @contextmanager
    def doing(self, task: Task[torch.Tensor | None]) -> Iterator[None]:
        self._task = task
        try:
            yield
        finally:
            self._task = None

    def run(self, task: Task[Result], hidden: torch.Tensor) -> Result:
        """Call this module, and return `task(hidden, weight, bias)` of that call.

        The result does not pass through the module's output, because an engine would expect a
        backward from it.
        """
        call = _Call(task)
        with self.doing(call):
            self(hidden)
        return call.result


class _Call(Generic[Result]):
    """A task that keeps its result and returns nothing."""

    result: Result

    def __init__(self, task: Task[Result]):
        self.task = task

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self.result = self.task(hidden, weight, bias)


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
    first = {name: value[:1] for name, value in inputs.items()}
    with head.doing(_mark):
        try:
            logits = model(**first, use_cache=False).logits
            final = logits.shape == (1,) and bool((logits == _MARK).all())
            reason = "scales or caps its logits after the head"
        except (IndexError, RuntimeError, ValueError) as error:
            final, reason = False, f"works on its logits after the head ({error})"
    if not final:
        logger.warning("the %s %s: its logits are computed as a whole", whose, reason)
    return final


def _mark(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return hidden.new_full((1,), _MARK)
