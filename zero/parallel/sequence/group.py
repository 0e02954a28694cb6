"""The ranks that share a sequence, and what they exchange. This file knows no model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zero.comm import world
from zero.errors import UsageError

IGNORED = -100  # a label that does not count


class SequenceGroup:
    """This rank's group of `size` neighbouring ranks, which share each sequence. Made by
    `make_group`.

    Attributes: size: how many they are. rank: this rank's number among them: it has the piece of
    that number. group: their process group. device: where they compute."""

    def __init__(self, size: int):
        ranks = world.get_world_size()
        if size < 1 or ranks % size:
            raise UsageError(
                f"sequence_parallel_size: {size} does not divide the number of ranks, {ranks}"
            )
        self.device = world.compute_device()
        backend = world.default_backend(self.device)
        # Under the plain name, the backward of torch's differentiable all-gather confuses group
        # ranks with global ranks. The Trainer's loss uses this function.
        backend = "cpu:gloo" if backend == "gloo" else backend
        group, _ = dist.new_subgroups(size, timeout=world.group_timeout(), backend=backend)
        self.group: Any = group
        self.size = size
        self.rank = dist.get_rank(self.group)

    @property
    def is_destroyed(self) -> bool:
        """Whether the script has destroyed the process groups since."""
        return self.group not in dist.distributed_c10d._world.pg_map

    def exchange(self, tensor: torch.Tensor, cut: int, join: int) -> torch.Tensor:
        """All-to-all: cut this rank's tensor along dimension `cut`, and join the pieces received
        along `join`.

        Dimension `cut` becomes `size` times shorter, `join` as much longer. The gradient takes the
        way back."""
        return _Exchange.apply(tensor, self, cut, join)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, piece) of every rank as (batch, sequence). Without a gradient."""
        tensor = tensor.contiguous().to(self.device)
        pieces = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(pieces, tensor, group=self.group)
        return torch.cat(pieces, dim=1)

    def exchange_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def exchange_bytes(
        self, parts: list[torch.Tensor], sizes: list[int]
    ) -> tuple[torch.Tensor, ...]:
        """Send part i (1-D, uint8) to rank i.

        Returns what each rank has sent here, of `sizes` bytes.
        """
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        sent = torch.cat(parts).to(self.device)
        dist.all_to_all_single(
            received, sent, sizes, [part.numel() for part in parts], group=self.group
        )
        return received.split(sizes)

    def mean_loss(self, loss: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
        """The mean over the tokens of whole sequences, from each rank's mean over the tokens of its
        piece.

        Args: loss: a scalar, the mean over the tokens here, ignored if no token here has a label.
        shift_labels: the labels here, of any shape; -100 does not count. The value is equal on all
        ranks of the group. The mean of its gradients over all ranks of the job is the gradient of
        the mean."""
        tokens = (shift_labels != IGNORED).sum().to(device=loss.device, dtype=torch.float32)
        total = tokens.clone()
        dist.all_reduce(total, group=self.group)
        part = torch.where(tokens > 0, loss, torch.zeros_like(loss)) * (tokens / total.clamp(min=1))
        value = part.detach().clone()
        dist.all_reduce(value, group=self.group)
        # The engine divides by the number of ranks, and the parts of a sequence are to be added.
        scaled = part * self.size
        return scaled + (value - scaled.detach())


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, ranks: SequenceGroup, cut: int, join: int
    ) -> torch.Tensor:
        ctx.ranks = ranks
        ctx.cut = cut
        ctx.join = join
        return _all_to_all(tensor, ranks, cut, join)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return _all_to_all(gradient, ctx.ranks, ctx.join, ctx.cut), None, None, None


def _all_to_all(tensor: torch.Tensor, ranks: SequenceGroup, cut: int, join: int) -> torch.Tensor:
    sent = torch.stack(tensor.chunk(ranks.size, dim=cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    return torch.cat(received.unbind(), dim=join)


_current: SequenceGroup | None = None


def make_group(size: int) -> SequenceGroup:
    """The sequence group of this rank; all ranks must call it.

    One of the same size is used again.
    """
    global _current
    if _current is None or _current.size != size or _current.is_destroyed:
        _current = SequenceGroup(size)
    return _current


def current_group() -> SequenceGroup | None:
    """The group that `make_group` has made last, if there is one."""
    return _current
