"""Decides which rank updates which whole tensor, sends the tensors to their owners for a step, and
their new values back to the shards.

    start            gradients and masters go from the shards to the owners (8 bytes an element)
    wait             the owner has whole gradients and masters, in fp32
    return_masters   the new masters go from the owners to the shards (4 bytes an element)

Only tensors that do not lie on their owner as a whole move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zero.comm.communicator import Communicator
from zero.comm.work import Pending
from zero.core.layout import Piece, Slot
from zero.core.optimizer_shard import OptimizerShard
from zero.core.sharded_param import placeholder

# How far a rank may own more than its share of a group.
SLACK = 1.05


def owners(held: Sequence[Sequence[int]], group_of: Sequence[int]) -> list[int]:
    """The owner of each tensor. Pure arithmetic: nothing is moved here.

    A tensor stays on the rank that holds most of it, as long as this rank then owns little more
    than its share. Else it goes to the rank that owns least. So most tensors that lie within one
    shard do not move, and each rank has about the same work. Groups are balanced one by one, since
    the work for an element differs between them: Muon multiplies matrices for some groups, and
    AdamW updates the others.

    Args:
        held: for each tensor its elements on each rank.
        group_of: for each tensor the number of those with which it is balanced, such as its param
            group.
    """
    ranks, found = range(len(held[0]) if held else 0), [0] * len(held)
    total = [0] * len(ranks)
    for group in sorted(set(group_of)):
        members = sorted(
            (i for i in range(len(held)) if group_of[i] == group), key=lambda i: -sum(held[i])
        )
        sizes = [sum(held[i]) for i in members]
        most = max(sizes[0], SLACK * sum(sizes) / len(ranks))
        load = [0] * len(ranks)
        for i, size in zip(members, sizes, strict=True):
            owner = max(ranks, key=lambda rank: (held[i][rank], -load[rank], -total[rank]))
            if load[owner] + size > most:
                owner = min(ranks, key=lambda rank: (load[rank], total[rank], -held[i][rank]))
            found[i] = owner
            load[owner] += size
            total[owner] += size
    return found


@dataclass(eq=False)
class WholeTensor:
    """One of the model's parameters, as the optimizer sees it.

    Ranks are places in the shard group.

    Attributes:
        name: the model's.
        group_index: into the optimizer's `param_groups`.
        parts: {rank: the piece in its shard}.
        rank: of this process.
        param: what the optimizer has, fp32 and in the true shape. It shows NaN outside of the step.
        optimizer: the user's.
        owner: the rank that updates it, or None if every rank does (stage 0).
    """

    optimizer: torch.optim.Optimizer
    name: str
    group_index: int
    shard: OptimizerShard
    slot: Slot
    parts: dict[int, Piece]
    rank: int
    param: nn.Parameter
    owner: int | None = None

    @property
    def state(self) -> dict:
        """The optimizer's state of it, possibly empty, by the optimizer's names."""
        return self.optimizer.state.get(self.param, {})

    def put_state(self, state: dict) -> None:
        """Replace the state."""
        self.optimizer.state[self.param] = state

    @property
    def is_own(self) -> bool:
        """Whether this rank updates it."""
        return self.owner in (None, self.rank)

    @property
    def moves(self) -> bool:
        """Whether parts of it lie on other ranks than the owner."""
        return self.owner is not None and any(rank != self.owner for rank in self.parts)

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of the tensor, 1-D and possibly empty: a view of `flat`, which is laid
        out as the shard.
        """
        piece = self.parts.get(self.rank)
        return flat[:0] if piece is None else flat[piece.start : piece.start + piece.numel]

    def hide(self) -> None:
        """Free the values and the gradient."""
        self.param.grad = None
        self.param.data = placeholder(self.slot.shape, torch.float32, self.shard.group.comm.device)


class GatheredForStep:
    """The tensors of some groups, gathered on their owners for one call of the optimizer.

    Args:
        tensors: of each group, all that are trained; the same groups and tensors on all ranks of
            the shard group.

    Attributes:
        own: those that this rank updates.
        masters: {group: its master on the compute device, 1-D, fp32}.
    """

    def __init__(self, tensors: Mapping[OptimizerShard, Sequence[WholeTensor]], comm: Communicator):
        self._comm = comm
        self._all = [tensor for of_shard in tensors.values() for tensor in of_shard]
        self._moving = [tensor for tensor in self._all if tensor.moves]
        self.own = [tensor for tensor in self._all if tensor.is_own]
        self.masters = {shard: shard.master for shard in tensors}
        self._grads: dict[OptimizerShard, torch.Tensor] = {}
        self._whole: dict[WholeTensor, torch.Tensor] = {}
        self._works: list[Pending] = []

    def start(self) -> None:
        """Start to bring gradients and masters to the owners.

        If tensors move, it waits for offloaded ones.
        """
        for shard in self.masters:
            self.masters[shard], load = load_values(shard, shard.master)
            self._works.append(load)
            if shard.grad is None:
                numel, device = shard.master.numel(), self._comm.device
                self._grads[shard] = torch.zeros(numel, dtype=torch.float32, device=device)
            else:
                self._grads[shard], load = load_values(shard, shard.grad)
                self._works.append(load)
        if self._moving:
            self._wait_for_works()
            for tensor in self._moving:
                if tensor.is_own:
                    shape, device = (2, *tensor.slot.shape), self._comm.device
                    self._whole[tensor] = torch.empty(shape, dtype=torch.float32, device=device)
            exchange = self._start_exchange(
                in_shards=lambda shard: [self._grads[shard], self.masters[shard]],
                whole=lambda tensor: list(self._whole[tensor].unbind()),
                to_owners=True,
            )
            self._works.append(exchange)

    def _wait_for_works(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()

    def wait(self) -> None:
        """Block until this rank's tensors have their gradients and masters."""
        with self._comm.clock.waiting("whole tensors"):
            self._wait_for_works()
        self.masters = {shard: master.float() for shard, master in self.masters.items()}
        for tensor in self.own:
            if tensor.moves:
                tensor.param.grad, tensor.param.data = self._whole.pop(tensor).unbind()
            else:
                shape, grad = tensor.slot.shape, tensor.part(self._grads[tensor.shard])
                tensor.param.data = tensor.part(self.masters[tensor.shard]).view(shape)
                tensor.param.grad = grad.to(torch.float32).view(shape)
        self._grads.clear()

    def return_masters(self) -> None:
        """Bring the new masters to the shards. The optimizer's tensors lose their values."""
        moved = Pending()
        if self._moving:
            moved = self._start_exchange(
                in_shards=lambda shard: [self.masters[shard]],
                whole=lambda tensor: [tensor.param.data],
                to_owners=False,
            )
        for tensor in self._all:
            place = tensor.part(self.masters[tensor.shard])
            stays = tensor.is_own and not tensor.moves
            if stays and tensor.param.data_ptr() != place.data_ptr():
                place.copy_(tensor.param.data.reshape(-1))  # the optimizer put another tensor there
            tensor.hide()
        with self._comm.clock.waiting("whole tensors"):
            moved.wait()

    def _start_exchange(
        self,
        in_shards: Callable[[OptimizerShard], list[torch.Tensor]],
        whole: Callable[[WholeTensor], list[torch.Tensor]],
        to_owners: bool,
    ) -> Pending:
        """Send the moving tensors as fp32 from the shards to their owners, or back.

        Args:
            in_shards: flat tensors of a shard, of each of which a moving tensor has a part.
            whole: as many tensors of a moving tensor's shape, which its owner has.
        """
        ranks = range(self._comm.shard_group.size)
        # What this rank has in its shards, by owner; and of its own tensors, by the shards' ranks.
        at_shards = [
            [
                tensor.part(flat)
                for tensor in self._moving
                if tensor.owner == rank
                for flat in in_shards(tensor.shard)
            ]
            for rank in ranks
        ]
        at_owner = [
            [
                values.reshape(-1)[piece.inside : piece.inside + piece.numel]
                for tensor in self._moving
                if tensor.is_own and (piece := tensor.parts.get(rank)) is not None
                for values in whole(tensor)
            ]
            for rank in ranks
        ]
        sent, places = (at_shards, at_owner) if to_owners else (at_owner, at_shards)
        device = self._comm.device
        parts = [part.to(torch.float32) for to_rank in sent for part in to_rank]
        packed = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device=device)
        sent_sizes = [sum(part.numel() for part in to_rank) for to_rank in sent]
        sizes = [sum(place.numel() for place in of_rank) for of_rank in places]
        received = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        exchange = self._comm.start_all_to_all_of_parts(received, packed, sizes, sent_sizes)

        def write() -> None:
            targets = [place for of_rank in places for place in of_rank]
            found = received.split([target.numel() for target in targets])
            for target, values in zip(targets, found, strict=True):
                target.copy_(values)

        return Pending([exchange], write)


def load_values(shard: OptimizerShard, values: torch.Tensor) -> tuple[torch.Tensor, Pending]:
    """(`values` on the compute device, the load to wait for).

    A copy if the group is offloaded, else `values` itself.
    """
    if not shard.is_offloaded:
        return values, Pending()
    target = torch.empty(values.shape, dtype=values.dtype, device=shard.group.comm.device)
    return target, shard.tier.load(target.view(-1), values.view(-1))
