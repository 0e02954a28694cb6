"""The ranks that share a sequence, and what they exchange."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zero.comm import world
from zero.errors import UsageError, require_divisor

IGNORED = -100  # a label that does not count


class SequenceGroup:
    """This rank's group of `size` neighbouring ranks, which share each sequence. Made by
    `make_group`.

    Attributes:
        size: how many they are.
        rank: this rank's number among them: it has the piece of that number.
        group: their process group.
        device: where they compute.
    """

    def __init__(self, size: int):
        ranks = world.get_world_size()
        require_divisor("sequence_parallel_size", size, "the number of ranks", ranks)
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

    def all_to_all(self, tensor: torch.Tensor, scatter_dim: int, gather_dim: int) -> torch.Tensor:
        """Split this rank's tensor along `scatter_dim` over the ranks, and join the pieces received
        along `gather_dim`.

        `scatter_dim` becomes `size` times shorter, `gather_dim` as much longer. The gradient takes
        the way back."""
        return all_to_all(tensor, self.group, scatter_dim, gather_dim)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, piece) of every rank as (batch, sequence). Without a gradient."""
        tensor = tensor.contiguous().to(self.device)
        pieces = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(pieces, tensor, group=self.group)
        return torch.cat(pieces, dim=1)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def mean_loss(self, loss: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
        """The mean over the tokens of whole sequences, from each rank's mean over the tokens of its
        piece.

        Args:
            loss: a scalar, the mean over the tokens here, ignored if no token here has a label.
            shift_labels: the labels here, of any shape; -100 does not count.

        The value is equal on all ranks of the group. The mean of its gradients over all ranks of
        the job is the gradient of the mean.
        """
        tokens = (shift_labels != IGNORED).sum().to(device=loss.device, dtype=torch.float32)
        total = tokens.clone()
        dist.all_reduce(total, group=self.group)
        part = torch.where(tokens > 0, loss, torch.zeros_like(loss)) * (tokens / total.clamp(min=1))
        value = part.detach().clone()
        dist.all_reduce(value, group=self.group)
        # The engine divides by the number of ranks, and the parts of a sequence are to be added.
        scaled = part * self.size
        return scaled + (value - scaled.detach())


def all_to_all(tensor: torch.Tensor, group: Any, scatter_dim: int, gather_dim: int) -> torch.Tensor:
    """`SequenceGroup.all_to_all` over any process group.

    Raises UsageError if its size does not divide `scatter_dim`."""
    size, parts = tensor.shape[scatter_dim], dist.get_world_size(group)
    if size % parts:
        raise UsageError(
            f"sequence parallelism: {parts} ranks do not divide dimension {scatter_dim} of a "
            f"tensor of shape {tuple(tensor.shape)}"
        )
    return _AllToAll.apply(tensor, group, scatter_dim, gather_dim)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: Any, scatter_dim: int, gather_dim: int
    ) -> torch.Tensor:
        ctx.way_back = (group, gather_dim, scatter_dim)
        sent = torch.stack(tensor.chunk(dist.get_world_size(group), dim=scatter_dim))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), dim=gather_dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return _AllToAll.apply(gradient, *ctx.way_back), None, None, None


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
