"""How whole tensors come together on their owners for a step, and how their new values go back to
the shards.

    start            gradient and master of each tensor: from the shards to its owner     8 bytes an element, fp32
    wait             the owner has whole gradients and masters
    return_masters   the new masters: from the owners to the shards                       4 bytes an element
    finish           they are in the shards

Only tensors that do not lie on their owner as a whole move. This file does not know what an
optimizer is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from zero.comm.communicator import Communicator
from zero.comm.work import Pending
from zero.core.layout import Piece, Slot
from zero.core.optimizer_shard import OptimizerShard
from zero.core.sharded_param import placeholder

# Fp32 elements that move to the owner for each element of the tensor: its gradient and its master.
_MOVED = 2


@dataclass(eq=False)
class WholeTensor:
    """One of the model's parameters, as the optimizer sees it.

    Ranks are places in the shard group.

    Attributes: name: the model's. group: index of the param group. parts: {rank: the piece in its
    shard}. rank: of this process. owner: the rank that updates it, or None if every rank does
    (stage 0). param: what the optimizer has, fp32 and in the true shape. It shows NaN outside of
    the step."""

    name: str
    group: int
    shard: OptimizerShard
    slot: Slot
    parts: dict[int, Piece]
    rank: int
    param: nn.Parameter
    owner: int | None = None

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

    def part_for(self, rank: int) -> torch.Tensor:
        """The part of the updated values that belongs to `rank`, 1-D."""
        piece = self.parts[rank]
        return self.param.data.reshape(-1)[piece.inside : piece.inside + piece.numel]

    def hide(self) -> None:
        """Free the values and the gradient."""
        self.param.grad = None
        self.param.data = placeholder(self.slot.shape, torch.float32, self.shard.group.comm.device)


class Assembly:
    """The tensors of some groups, assembled on their owners for one call of the optimizer.

    Args: tensors: of each group, all that are trained; the same groups and tensors on all ranks of
    the shard group. Attributes: own: those that this rank updates. masters: {group: its master on
    the compute device, 1-D, fp32}."""

    def __init__(self, tensors: Mapping[OptimizerShard, Sequence[WholeTensor]], comm: Communicator):
        self._tensors = tensors
        self._comm = comm
        everything = [tensor for of_shard in tensors.values() for tensor in of_shard]
        self.own = [tensor for tensor in everything if tensor.is_own]
        self._moving = [tensor for tensor in everything if tensor.moves]
        self.masters: dict[OptimizerShard, torch.Tensor] = {}
        self._grads: dict[OptimizerShard, torch.Tensor] = {}
        self._loads: list[Pending] = []
        self._exchange = Pending()

    def start(self) -> None:
        """Start to bring gradients and masters to the owners.

        If tensors move, it waits for offloaded ones.
        """
        for shard in self._tensors:
            self.masters[shard] = self._load(shard, shard.master)
            zeros = partial(
                torch.zeros, shard.master.numel(), dtype=torch.float32, device=self._comm.device
            )
            self._grads[shard] = zeros() if shard.grad is None else self._load(shard, shard.grad)
        if self._moving:
            self._wait_for_loads()
            self._gather()

    def _load(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        target, load = load_values(shard, values)
        self._loads.append(load)
        return target

    def _wait_for_loads(self) -> None:
        for load in self._loads:
            load.wait()
        self._loads.clear()

    def _gather(self) -> None:
        ranks, own = (
            range(self._comm.shard_group.size),
            [tensor for tensor in self._moving if tensor.is_own],
        )
        values = [
            (each, (each.part(self._grads[each.shard]), each.part(self.masters[each.shard])))
            for each in self._moving
        ]
        sent = [
            [part for tensor, parts in values if tensor.owner == to for part in parts]
            for to in ranks
        ]
        sizes = [
            _MOVED * sum(each.parts[src].numel for each in own if src in each.parts)
            for src in ranks
        ]

        def assemble(received: torch.Tensor) -> None:
            position = 0
            for tensor in own:
                values = torch.empty(
                    _MOVED, *tensor.slot.shape, dtype=torch.float32, device=received.device
                )
                tensor.param.grad, tensor.param.data = values.unbind()
            for src in ranks:
                for tensor in own:
                    if (piece := tensor.parts.get(src)) is not None:
                        for whole in (tensor.param.grad, tensor.param.data):
                            part = received[position : position + piece.numel]
                            whole.view(-1)[piece.inside : piece.inside + piece.numel].copy_(part)
                            position += piece.numel

        self._exchange = self._start_exchange(sent, sizes, assemble)

    def wait(self) -> None:
        """Block until this rank's tensors have their gradients and masters."""
        with self._comm.clock.waiting("whole tensors"):
            self._wait_for_loads()
            self._exchange.wait()
        for shard, tensors in self._tensors.items():
            master = self.masters[shard] = self.masters[shard].float()
            for tensor in tensors:
                if tensor.is_own and not tensor.moves:
                    tensor.param.data = tensor.part(master).view(tensor.slot.shape)
                    grad = tensor.part(self._grads[shard])
                    tensor.param.grad = grad.to(torch.float32).view(tensor.slot.shape)
        self._grads.clear()

    def return_masters(self) -> None:
        """Start to bring the new masters to the shards.

        The optimizer's tensors lose their values.
        """
        rank, ranks = self._comm.shard_group.rank, range(self._comm.shard_group.size)
        if self._moving:
            sent = [
                [each.part_for(to) for each in self._moving if each.is_own and to in each.parts]
                for to in ranks
            ]
            coming = [
                each
                for src in ranks
                for each in self._moving
                if each.owner == src and rank in each.parts
            ]
            sizes = [
                sum(each.parts[rank].numel for each in coming if each.owner == src) for src in ranks
            ]

            def write(received: torch.Tensor) -> None:
                places = [each.part(self.masters[each.shard]) for each in coming]
                for place, values in zip(
                    places, received.split([len(place) for place in places]), strict=True
                ):
                    place.copy_(values)

            self._exchange = self._start_exchange(sent, sizes, write)
        for shard, tensors in self._tensors.items():
            for tensor in tensors:
                place = tensor.part(self.masters[shard])
                if (
                    tensor.is_own
                    and not tensor.moves
                    and tensor.param.data_ptr() != place.data_ptr()
                ):
                    place.copy_(
                        tensor.param.data.reshape(-1)
                    )  # the optimizer has put another tensor there
                tensor.hide()

    def finish(self) -> None:
        """Block until `masters` have all new values."""
        with self._comm.clock.waiting("whole tensors"):
            self._exchange.wait()

    def _start_exchange(
        self, sent: list[list[torch.Tensor]], sizes: list[int], use: Callable[[torch.Tensor], None]
    ) -> Pending:
        """Send the parts `sent[i]` to rank i, as fp32.

        `use` gets what comes: for each rank i, `sizes[i]` elements.
        """
        device = self._comm.device
        parts = [part.to(torch.float32) for to_rank in sent for part in to_rank]
        packed = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device=device)
        received = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        sent_sizes = [sum(part.numel() for part in to_rank) for to_rank in sent]
        exchange = self._comm.start_all_to_all_of_parts(received, packed, sizes, sent_sizes)
        return Pending([exchange], lambda: use(received))


def load_values(shard: OptimizerShard, values: torch.Tensor) -> tuple[torch.Tensor, Pending]:
    """(`values` on the compute device, the load to wait for).

    A copy if the group is offloaded, else `values` itself.
    """
    if not shard.is_offloaded:
        return values, Pending()
    target = torch.empty(values.shape, dtype=values.dtype, device=shard.group.comm.device)
    return target, shard.tier.load(target.view(-1), values.view(-1))
