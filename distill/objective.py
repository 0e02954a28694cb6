"""The loss of one batch: where it is computed, how its parts are added, and their sums for the log.

[Note: normalisation] Losses are summed over the targets of this rank's micro-batch. The sum is
divided by the targets of the whole step (all micro-batches, all ranks), and multiplied by the
number of ranks, because engines and DDP average gradients over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from accelerate import Accelerator

from distill.batch import Batch
from distill.fused import (
    Recipe,
    StoredTeacher,
    Targets,
    Teacher,
    TokenLosses,
    fused_head_loss,
    logits_loss,
)
from distill.teacher import Observed

TokenLoss = Callable[[Targets, Recipe], tuple[torch.Tensor, TokenLosses]]


class BatchLosses(NamedTuple):
    """The losses of a batch.

    total: scalar, the sum over the targets of (1 - kd_alpha) ce + kd_alpha kd, with its gradient.
    tokens: the losses of each target, without gradient. hidden, relation: scalars, the sums of the
    losses between layers, with their gradients; zero if they are not used.
    """

    total: torch.Tensor
    tokens: TokenLosses
    hidden: torch.Tensor
    relation: torch.Tensor


def objective(
    losses: BatchLosses, hidden_weight: float = 0.0, relation_weight: float = 0.0
) -> torch.Tensor:
    """Return what is minimised, summed over the targets of the batch.

    The parts: cross-entropy and divergence as in arXiv 1503.02531, hidden states 1909.10351,
    attention relations 2012.15828.
    """
    return losses.total + hidden_weight * losses.hidden + relation_weight * losses.relation


def share_of_step(total: torch.Tensor, tokens: torch.Tensor | int, ranks: int) -> torch.Tensor:
    """Return a micro-batch's share of the step's mean loss per token. See the note above.

    `tokens`: the number of targets in the step, over which `total` is averaged. `ranks`: the number
    of ranks, by which the gradients will be divided.
    """
    # Without targets in the whole step, `total` is 0.
    tokens = tokens.clamp_min(1) if isinstance(tokens, torch.Tensor) else max(1, tokens)
    return total / tokens * ranks


class HeadLoss:
    """Computes the loss of a batch inside the call of the student's head.

    There, an engine has gathered the head's weight, and will reduce its gradient. If there is a
    teacher, it is called from within, so that both weights are available. The object lives for one
    batch: `of_hidden_states` is the task of a `TaskHead`, and `of_logits` takes the output of a
    model whose head is not a plain one. Afterwards `tokens` has the losses of each target.
    """

    tokens: TokenLosses

    def __init__(self, batch: Batch, recipe: Recipe, teacher: Observed | StoredTeacher | None):
        self.batch = batch
        self.recipe = recipe
        self.teacher = teacher

    def of_hidden_states(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum of the losses, (1,), for the head's input (batch, length, H)."""
        rows = hidden.flatten(0, 1)[self.batch.rows]
        return self._sum(partial(fused_head_loss, rows, weight, bias)).view(1)

    def of_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses, a scalar, for logits (batch, length, V)."""
        return self._sum(partial(logits_loss, logits.flatten(0, 1)[self.batch.rows]))

    def _sum(self, token_loss: TokenLoss) -> torch.Tensor:
        if isinstance(self.teacher, Observed):
            compute = partial(self._compare, token_loss)
            total, self.tokens = self.teacher.compute(compute, self.batch.labels.device)
        else:
            total, self.tokens = self._compare(token_loss, self.teacher)
        return total

    def _compare(
        self, token_loss: TokenLoss, teacher: Teacher | None
    ) -> tuple[torch.Tensor, TokenLosses]:
        targets = Targets(self.batch.labels, teacher, self.batch.has_teacher)
        return token_loss(targets, self.recipe)


class LossSums:
    """The parts of the loss, summed over this rank's targets since the last log.

    The sums stay on the device, so the host does not wait for them in each micro-batch.
    """

    NAMES = ("ce_loss", "kd_loss", "hidden_loss", "relation_loss")

    def __init__(self, device: torch.device):
        # MPS has no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros(len(self.NAMES), dtype=dtype, device=device)
        self._clear()

    def _clear(self) -> None:
        self._sums.zero_()
        self._tokens = 0
        self.batches = 0

    @torch.no_grad()
    def add(self, losses: BatchLosses) -> None:
        tokens = losses.tokens
        sums = (tokens.ce.sum(), tokens.kd.sum(), losses.hidden, losses.relation)
        self._sums += torch.stack([part.to(self._sums.dtype) for part in sums])
        self._tokens += len(tokens.ce)
        self.batches += 1

    def pop_means(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the means over the targets of all ranks, and start again. All ranks call this."""
        tokens = self._sums.new_full((1,), self._tokens)
        sums = torch.cat([self._sums, tokens]).to(torch.float32)
        *parts, count = cast(torch.Tensor, accelerator.reduce(sums, "sum")).tolist()
        self._clear()
        return {name: part / count for name, part in zip(self.NAMES, parts, strict=True) if count}
