"""The path for optimizers whose update of an element depends on the rest of its tensor: Adafactor, Muon, Shampoo.

Each tensor has an owner rank (`zero.optim.ownership`), which keeps the optimizer's state of it. Gradients are reduced
and masters are kept in shards, as for every optimizer. Only tensors that do not lie on their owner as a whole move:

    step  gradient and master of such a tensor: from the shards to its owner             8 bytes an element, fp32
          `step()` of the user's own optimizer, once, on tensors of true shapes
          the new master: from the owner to the shards                                   4 bytes an element

The optimizer sees a parameter for each of the model's, in the same groups and order, with the model's names. On a rank
that does not own it, it has no gradient. So `step()` leaves it alone: torch's optimizers skip such parameters.
At stage 0 every rank has all masters, and updates all of them.

This file does not know how gradients are reduced, nor when a step is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zero.agreement import hyper_parameters
from zero.comm import Communicator
from zero.errors import UsageError
from zero.layout import Piece, Slot
from zero.offload.tiers import Tier
from zero.optim.ownership import owners
from zero.optim.tiles import Tile
from zero.optimizer_shard import OptimizerShard
from zero.parameters import placeholder

# Fp32 elements that move to the owner for each element of the tensor: its gradient and its master.
_MOVED = 2


@dataclass(eq=False)
class WholeTensor:
    """One of the model's parameters, as the optimizer sees it.

    Attributes: name: the model's. group: number of the param group. parts: {rank: the piece in its shard}. owner: the
    rank that updates it, or None if every rank does. param: what the optimizer has; fp32, in the true shape. It has
    values if this rank is the owner and no other rank has a part, and in the step.
    """

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
        """This rank's part, 1-D and possibly empty, of a tensor in the layout of the shard."""
        piece = self.parts.get(self.rank)
        return flat[:0] if piece is None else flat[piece.start : piece.start + piece.numel]

    def hide(self) -> None:
        """Free the values and the gradient."""
        self.param.grad = None
        self.param.data = placeholder(self.slot.shape, torch.float32, self.shard.tier.device)

    def show(self) -> None:
        """Between steps: the master, if all of it lies here on its owner, else nothing."""
        self.hide()
        if self.is_own and not self.moves:
            self.param.data = self.part(self.shard.master).view(self.slot.shape)


def _tensors(
    shards: Sequence[OptimizerShard], group_of: Mapping[nn.Parameter, int], comm: Communicator
) -> Iterator[tuple[nn.Parameter, WholeTensor]]:
    rank, size = comm.shard_group
    for shard in shards:
        unit = shard.unit
        pieces = [{piece.slot: piece for piece in unit.layout.pieces(each)} for each in range(size)]
        for index, (param, name, slot) in enumerate(zip(unit.params, unit.param_names, unit.layout.slots, strict=True)):
            if param in group_of:
                parts = {each: of_rank[index] for each, of_rank in enumerate(pieces) if index in of_rank}
                seen = nn.Parameter(placeholder(slot.shape, torch.float32, shard.tier.device))
                yield param, WholeTensor(name, group_of[param], shard, slot, parts, rank, seen)


class WholeTensorState:
    """All parameters of `optimizer` as whole tensors, of which this rank updates its own.

    Attributes: tensors: one for each parameter, in the order of units. moved: elements of tensors that do not lie on
    their owner as a whole.
    """

    tiles: Sequence[Tile] = ()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[OptimizerShard],
        group_of: Mapping[nn.Parameter, int],
        comm: Communicator,
    ):
        self._optimizer, self._comm = optimizer, comm
        of_param = dict(_tensors(shards, group_of, comm))
        self.tensors = list(of_param.values())
        if not any(shard.unit.layout.replicated for shard in shards):
            held = [
                [each.parts[rank].numel if rank in each.parts else 0 for rank in range(comm.shard_group.size)]
                for each in self.tensors
            ]
            for tensor, owner in zip(self.tensors, owners(held, [each.group for each in self.tensors]), strict=True):
                tensor.owner = owner
        self.moved = sum(each.slot.numel for each in self.tensors if each.moves)
        self._of_shard = {shard: [each for each in self.tensors if each.shard is shard] for shard in shards}
        self._replace_params(of_param)
        self.follow_masters()

    def _replace_params(self, of_param: Mapping[nn.Parameter, WholeTensor]) -> None:
        """Give the optimizer the whole tensors in the place of the model's parameters, with the state they have."""
        for group in self._optimizer.param_groups:
            names = group.get("param_names", [None] * len(group["params"]))
            known = [(p, name) for p, name in zip(group["params"], names, strict=True) if p in of_param]
            group["params"] = [of_param[param].param for param, _ in known]
            if "param_names" in group:
                group["param_names"] = [name for _, name in known]
        state = self._optimizer.state
        for param, made_early in list(state.items()):  # by the constructor
            del state[param]
            if param in of_param and of_param[param].is_own:
                state[of_param[param].param] = made_early

    @property
    def own(self) -> list[WholeTensor]:
        """The tensors that this rank updates."""
        return [tensor for tensor in self.tensors if tensor.is_own]

    # -- step

    def update(self, factor: float) -> None:
        """Update all tensors with their gradients times `factor`. Every rank must call."""
        before = hyper_parameters(self._optimizer.param_groups)
        for shard in self._of_shard:
            self._bring(shard)
        for tensor in self.own:
            if factor != 1.0:
                tensor.param.grad.mul_(factor)
        self._optimizer.step()
        self._refuse_changed(before)
        for shard in self._of_shard:
            self._return(shard)
            shard.round_into_shard(0, shard.master).wait()

    def _bring(self, shard: OptimizerShard) -> None:
        """Give this rank's tensors of one unit their gradients, and their masters if these are not here."""
        for tensor in self._of_shard[shard]:
            if tensor.is_own and not tensor.moves:
                tensor.param.grad = tensor.part(shard.grad).to(torch.float32).view(tensor.slot.shape)
        moving = [tensor for tensor in self._of_shard[shard] if tensor.moves]
        if not moving:
            return
        rank, size = self._comm.shard_group
        sent = [
            [part for t in moving if t.owner == to for part in (t.part(shard.grad), t.part(shard.master))]
            for to in range(size)
        ]
        sizes = [_MOVED * sum(t.parts[src].numel for t in moving if t.is_own and src in t.parts) for src in range(size)]
        received = self._exchange(sent, sizes)
        for tensor in moving:
            if tensor.is_own:
                tensor.param.data, tensor.param.grad = (
                    torch.empty(tensor.slot.shape, dtype=torch.float32, device=shard.tier.device) for _ in range(2)
                )
        position = 0
        for src in range(size):
            for tensor in moving:
                if tensor.is_own and src in tensor.parts:
                    piece = tensor.parts[src]
                    for whole in (tensor.param.grad, tensor.param.data):
                        part = received[position : position + piece.numel]
                        whole.view(-1)[piece.inside : piece.inside + piece.numel].copy_(part)
                        position += piece.numel

    def _return(self, shard: OptimizerShard) -> None:
        """Write the new values of one unit to the masters."""
        moving = [tensor for tensor in self._of_shard[shard] if tensor.moves]
        rank, size = self._comm.shard_group
        if moving:
            sent = [
                [_piece_of(tensor, to) for tensor in moving if tensor.is_own and to in tensor.parts]
                for to in range(size)
            ]
            sizes = [
                sum(t.parts[rank].numel for t in moving if t.owner == src and rank in t.parts) for src in range(size)
            ]
            received, position = self._exchange(sent, sizes), 0
            for tensor in sorted(moving, key=lambda tensor: tensor.owner):
                place = tensor.part(shard.master)
                place.copy_(received[position : position + place.numel()])
                position += place.numel()
        for tensor in self._of_shard[shard]:
            if tensor.is_own and not tensor.moves:
                place = tensor.part(shard.master)
                if tensor.param.data_ptr() != place.data_ptr():  # the optimizer has put another tensor there
                    place.copy_(tensor.param.data.reshape(-1))
            tensor.show()

    def _exchange(self, sent: list[list[torch.Tensor]], sizes: list[int]) -> torch.Tensor:
        """Send the parts `sent[i]` to rank i; what comes, `sizes[i]` elements from rank i, in the order of ranks."""
        device = self._comm.device
        parts = [part.to(device, torch.float32) for to_rank in sent for part in to_rank]
        packed = torch.cat(parts) if parts else torch.empty(0, device=device)
        received = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        self._comm.all_to_all(received, packed, sizes, [sum(part.numel() for part in to_rank) for to_rank in sent])
        return received

    def _refuse_changed(self, before: Mapping[str, float]) -> None:
        """Raise UsageError if several ranks share the tensors and the step has changed a number of a param group."""
        after = hyper_parameters(self._optimizer.param_groups)
        changed = [key for key in after if key not in before or after[key] != before[key]]
        if changed and self._comm.world_size > 1:
            raise UsageError(
                f"optimizer {type(self._optimizer).__name__} changes a number of its own in step() ({changed[0]}). It "
                "may depend on all parameters, and each rank has some of them: train in one process, or take an "
                "optimizer that keeps what changes in its state"
            )

    # -- state

    def of(self, tensor: WholeTensor) -> dict:
        """The tensor's state, possibly empty, by the optimizer's names."""
        return self._optimizer.state.get(tensor.param, {})

    def put(self, tensor: WholeTensor, state: dict) -> None:
        """Replace the tensor's state."""
        self._optimizer.state[tensor.param] = state

    def nbytes(self, shard: OptimizerShard) -> int:
        """Bytes of the state tensors of one unit."""
        found: list[int] = []
        for tensor in self._of_shard[shard]:
            tree_map_only(torch.Tensor, lambda value: found.append(value.nbytes), self.of(tensor))
        return sum(found)

    def move(self, shard: OptimizerShard, tier: Tier) -> None:
        """Bring the state tensors of one unit to `tier`."""

        def moved(value: torch.Tensor) -> torch.Tensor:
            return tier.keep(value.reshape(-1)).view(value.shape) if value.dim() else value

        for tensor in self._of_shard[shard]:
            if state := self.of(tensor):
                state.update(tree_map_only(torch.Tensor, moved, dict(state)))

    def follow_masters(self) -> None:
        """The masters have moved: show them again."""
        for tensor in self.tensors:
            tensor.show()


def _piece_of(tensor: WholeTensor, rank: int) -> torch.Tensor:
    """What belongs into the shard of `rank`, 1-D."""
    piece = tensor.parts[rank]
    return tensor.param.data.reshape(-1)[piece.inside : piece.inside + piece.numel]
