"""The path for optimizers whose update of an element depends on the rest of its tensor: Adafactor, Muon, Shampoo.

Each tensor has an owner rank (`zero.optim.ownership`) in each shard group, which keeps the optimizer's state of it.
Gradients are reduced and masters are kept in shards, as for every optimizer. Only tensors that do not lie on their
owner as a whole move:

    step  gradient and master of such a tensor: from the shards to its owner             8 bytes an element, fp32
          `step()` of the user's own optimizer on tensors of true shapes
          the new master: from the owner to the shards                                   4 bytes an element

The optimizer sees a parameter for each of the model's, in the same groups and order, with the model's names. It has a
gradient on its owner alone, and torch's optimizers skip parameters without one. At stage 0 every rank has all masters,
and updates all of them.

`step()` is called once. Units that are offloaded are an exception: each is brought to the compute device and updated by
a call of its own, which begins with the same numbers in the param groups.

This file does not know how gradients are reduced, nor when a step is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from zero.agreement import differences
from zero.comm import Communicator
from zero.errors import UsageError
from zero.layout import Piece, Slot
from zero.offload.tiers import Tier
from zero.optim.numbers import numbers_of, set_numbers
from zero.optim.ownership import owners
from zero.optim.rounding import StochasticRounding
from zero.optim.tiles import Tile
from zero.optim.wrappers import closed, opened
from zero.optimizer_shard import OptimizerShard
from zero.parameters import placeholder

# Fp32 elements that move to the owner for each element of the tensor: its gradient and its master.
_MOVED = 2
# Attributes of parameters that the engine sets. Others are the script's, and its optimizer may ask for them.
_ENGINES_OWN = ("ds_", "_zero", "_ds")


@dataclass(eq=False)
class WholeTensor:
    """One of the model's parameters, as the optimizer sees it.

    Ranks are places in the shard group.

    Attributes: name: the model's. group: number of the param group. parts: {rank: the piece in its shard}. owner: the
    rank that updates it, or None if every rank does. param: what the optimizer has: fp32, in the true shape. It has
    values in the step only.
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

    def part_for(self, rank: int) -> torch.Tensor:
        """The part of the updated values that belongs to `rank`, 1-D."""
        piece = self.parts[rank]
        return self.param.data.reshape(-1)[piece.inside : piece.inside + piece.numel]

    def hide(self) -> None:
        """Free the values and the gradient."""
        self.param.grad = None
        self.param.data = placeholder(self.slot.shape, torch.float32, self.shard.unit.comm.device)


def _tensors(
    shards: Sequence[OptimizerShard], group_of: Mapping[nn.Parameter, int], comm: Communicator
) -> Iterator[tuple[nn.Parameter, WholeTensor]]:
    rank, size = comm.shard_group.rank, comm.shard_group.size
    for shard in shards:
        unit = shard.unit
        pieces = [{piece.slot: piece for piece in unit.layout.pieces(each)} for each in range(size)]
        for index, (param, name, slot) in enumerate(zip(unit.params, unit.param_names, unit.layout.slots, strict=True)):
            if param in group_of:
                parts = {each: of_rank[index] for each, of_rank in enumerate(pieces) if index in of_rank}
                seen = nn.Parameter(placeholder(slot.shape, torch.float32, comm.device))
                vars(seen).update(
                    {key: value for key, value in vars(param).items() if not key.startswith(_ENGINES_OWN)}
                )
                yield param, WholeTensor(name, group_of[param], shard, slot, parts, rank, seen)


class WholeTensorState:
    """All parameters of `optimizer` as whole tensors, of which this rank updates its own.

    Attributes: of_param: {the model's parameter: its whole tensor}, in the order of units. moved: elements of tensors
    that do not lie on their owner as a whole.
    """

    tiles: Sequence[Tile] = ()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[OptimizerShard],
        group_of: Mapping[nn.Parameter, int],
        comm: Communicator,
        rounding: StochasticRounding | None = None,
    ):
        self._optimizer, self._comm, self._rounding = optimizer, comm, rounding
        self.of_param = dict(_tensors(shards, group_of, comm))
        self._is_divided = comm.shard_group.size > 1 and not any(shard.unit.layout.replicated for shard in shards)
        if self._is_divided:
            held = [
                [each.parts[rank].numel if rank in each.parts else 0 for rank in range(comm.shard_group.size)]
                for each in self.tensors
            ]
            for tensor, owner in zip(self.tensors, owners(held, [each.group for each in self.tensors]), strict=True):
                tensor.owner = owner
        self.moved = sum(each.slot.numel for each in self.tensors if each.moves)
        self._of_shard = {shard: [each for each in self.tensors if each.shard is shard] for shard in shards}
        self._replace_params()

    def _replace_params(self) -> None:
        """Give the optimizer the whole tensors in the place of the model's parameters, with the state they have."""
        of_param = self.of_param
        for key, value in vars(self._optimizer).items():
            if key not in ("param_groups", "state") and any(
                isinstance(each, nn.Parameter) and each in of_param for each in tree_leaves(value)
            ):
                raise UsageError(
                    f"optimizer {type(self._optimizer).__name__} keeps parameters of its own in the attribute {key!r}. "
                    "It would update nothing, because it gets other tensors in param_groups: let step() read those"
                )
        for group in self._optimizer.param_groups:
            names = group.get("param_names", [None] * len(group["params"]))
            known = [(p, name) for p, name in zip(group["params"], names, strict=True) if p in of_param]
            group["params"] = [of_param[param].param for param, _ in known]
            if "param_names" in group:
                group["param_names"] = [name for _, name in known]
        state = self._optimizer.state
        for param, tensor in of_param.items():
            made_early = state.pop(param, None)  # by the constructor
            if made_early is not None and tensor.is_own:
                state[tensor.param] = made_early

    @property
    def tensors(self) -> list[WholeTensor]:
        return list(self.of_param.values())

    @property
    def own(self) -> list[WholeTensor]:
        """The tensors that this rank updates."""
        return [tensor for tensor in self.tensors if tensor.is_own]

    # -- step

    def update(self, factor: float) -> None:
        """Update all tensors with their gradients times `factor`. Every rank must call.

        Raises UsageError, on every rank, if `step()` changes a number of its own by the tensors of a rank or of a unit:
        Prodigy's estimate, for instance. A number that counts steps is the same everywhere.
        """
        before = numbers_of(self._optimizer)
        found = []
        for shards in self._calls():
            set_numbers(self._optimizer, before)
            self._update(shards, self._optimizer.step, factor)
            found.append(numbers_of(self._optimizer))
        after = found[-1] if found else before
        unequal = [
            f"{key}: {each.get(key)}, then {value}"
            for each in found
            for key, value in after.items()
            if each.get(key) != value
        ]
        if self._is_divided:
            unequal += differences(self._comm, {key: after[key] for key in after if after[key] != before.get(key)})
        if unequal:
            raise UsageError(
                f"optimizer {type(self._optimizer).__name__} keeps a global value that depends on which tensors this "
                f"rank has ({unequal[0]}), and tensors are divided among ranks or units: train in one process without "
                "offload_optimizer, or take an optimizer that keeps such numbers in its state"
            )

    def switch(self, change: Callable[[], object]) -> None:
        """Let the optimizer change the weights: `train()` or `eval()` of a schedule-free one. Every rank must call."""
        before, state = numbers_of(self._optimizer), self._optimizer.state
        for shards in self._calls():
            set_numbers(self._optimizer, before)
            # Unlike `step()`, these functions look at tensors without a gradient.
            absent = {t.param: state.pop(t.param) for t in self.own if t.shard not in shards and t.param in state}
            self._update(shards, change, 1.0)
            state.update(absent)

    def _calls(self) -> list[list[OptimizerShard]]:
        """The units whose tensors are on the compute device at the same time."""
        here = [shard for shard in self._of_shard if not shard.is_offloaded]
        return [here] * bool(here) + [[shard] for shard in self._of_shard if shard.is_offloaded]

    def _update(self, shards: Sequence[OptimizerShard], change: Callable[[], object], factor: float) -> None:
        """Update the tensors of some units by one call of the optimizer's method `change`."""
        masters = {shard: self._bring(shard) for shard in shards}
        own = [tensor for shard in shards for tensor in self._of_shard[shard] if tensor.is_own]
        if factor != 1.0:
            for tensor in own:
                tensor.param.grad.mul_(factor)
        places = [self._load_state(tensor) for tensor in own]
        for tensor in own:
            self._change_state(tensor, closed)
        change()
        for tensor in own:
            self._change_state(tensor, opened)
            self._separate(tensor)
        for tensor, of_state in zip(own, places, strict=True):
            self._store_state(tensor, of_state)
        for shard, master in masters.items():
            self._return(shard, master)
            if self._rounding is not None:
                wide, master = master, torch.empty_like(master, dtype=shard.master.dtype)
                self._rounding.store(master, wide, shard, 0)
            if master is not shard.master:
                shard.tier.store(shard.master, master).wait()
            shard.round_into_shard(0, master).wait()

    def _separate(self, tensor: WholeTensor) -> None:
        """Copy state that is the gradient or the parameter itself: their memory is used again after the step."""
        used = {each.untyped_storage().data_ptr() for each in (tensor.param, tensor.param.grad) if each is not None}

        def copied(value: torch.Tensor) -> torch.Tensor:
            return value.clone() if value.dim() and value.untyped_storage().data_ptr() in used else value

        if state := self.of(tensor):
            state.update(tree_map_only(torch.Tensor, copied, dict(state)))

    def _load(self, shard: OptimizerShard, values: torch.Tensor) -> torch.Tensor:
        """`values` of a unit on the compute device: a copy if the unit is offloaded."""
        if not shard.is_offloaded:
            return values
        target = torch.empty(values.shape, dtype=values.dtype, device=self._comm.device)
        shard.tier.load(target.view(-1), values.view(-1)).wait()
        return target

    def _bring(self, shard: OptimizerShard) -> torch.Tensor:
        """Give this rank's tensors of one unit their gradients and masters; the master of the shard."""
        tensors, master = self._of_shard[shard], self._load(shard, shard.master).float()
        grad = torch.zeros_like(master) if shard.grad is None else self._load(shard, shard.grad)
        for tensor in tensors:
            if tensor.is_own and not tensor.moves:
                tensor.param.data = tensor.part(master).view(tensor.slot.shape)
                tensor.param.grad = tensor.part(grad).to(torch.float32).view(tensor.slot.shape)
        if moving := [tensor for tensor in tensors if tensor.moves]:
            self._gather(moving, grad, master)
        return master

    def _gather(self, moving: Sequence[WholeTensor], grad: torch.Tensor, master: torch.Tensor) -> None:
        """Assemble gradients and masters on the owners, from parts of them in the layout of the shards."""
        ranks = range(self._comm.shard_group.size)
        sent = [[part for t in moving if t.owner == to for part in (t.part(grad), t.part(master))] for to in ranks]
        own = [tensor for tensor in moving if tensor.is_own]
        sizes = [_MOVED * sum(t.parts[src].numel for t in own if src in t.parts) for src in ranks]
        received, position = self._exchange(sent, sizes), 0
        for tensor in own:
            values = torch.empty(_MOVED, *tensor.slot.shape, dtype=torch.float32, device=self._comm.device)
            tensor.param.grad, tensor.param.data = values.unbind()
        for src in ranks:
            for tensor in own:
                if (piece := tensor.parts.get(src)) is not None:
                    for whole in (tensor.param.grad, tensor.param.data):
                        part = received[position : position + piece.numel]
                        whole.view(-1)[piece.inside : piece.inside + piece.numel].copy_(part)
                        position += piece.numel

    def _return(self, shard: OptimizerShard, master: torch.Tensor) -> None:
        """Write the new values of one unit to `master`, which is in the layout of the shard."""
        tensors = self._of_shard[shard]
        if moving := [tensor for tensor in tensors if tensor.moves]:
            rank, ranks = self._comm.shard_group.rank, range(self._comm.shard_group.size)
            sent = [[t.part_for(to) for t in moving if t.is_own and to in t.parts] for to in ranks]
            sizes = [sum(t.parts[rank].numel for t in moving if t.owner == src and rank in t.parts) for src in ranks]
            received, position = self._exchange(sent, sizes), 0
            for tensor in sorted(moving, key=lambda tensor: tensor.owner):
                place = tensor.part(master)
                place.copy_(received[position : position + place.numel()])
                position += place.numel()
        for tensor in tensors:
            place = tensor.part(master)
            if tensor.is_own and not tensor.moves and tensor.param.data_ptr() != place.data_ptr():
                place.copy_(tensor.param.data.reshape(-1))  # the optimizer has put another tensor there
            tensor.hide()

    def _exchange(self, sent: list[list[torch.Tensor]], sizes: list[int]) -> torch.Tensor:
        """Send the parts `sent[i]` to rank i; what comes, `sizes[i]` elements from rank i, in the order of ranks."""
        device = self._comm.device
        parts = [part.to(device, torch.float32) for to_rank in sent for part in to_rank]
        packed = torch.cat(parts) if parts else torch.empty(0, device=device)
        received = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        self._comm.all_to_all(received, packed, sizes, [sum(part.numel() for part in to_rank) for to_rank in sent])
        return received

    # -- state

    def of(self, tensor: WholeTensor) -> dict:
        """The tensor's state, possibly empty, by the optimizer's names."""
        return self._optimizer.state.get(tensor.param, {})

    def put(self, tensor: WholeTensor, state: dict) -> None:
        """Replace the tensor's state."""
        self._optimizer.state[tensor.param] = state

    def _change_state(self, tensor: WholeTensor, change: Callable[[dict], dict]) -> None:
        if state := self.of(tensor):
            self.put(tensor, change(dict(state)))

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
        """The masters have moved: nothing to do, as each step takes them from where they are."""

    def _load_state(self, tensor: WholeTensor) -> list[object]:
        """Bring the state of an offloaded tensor to the compute device; where its values were."""
        state = self.of(tensor)
        if not (state and tensor.shard.is_offloaded):
            return []
        load = partial(self._load, tensor.shard)
        self.put(tensor, tree_map_only(torch.Tensor, lambda value: load(value) if value.dim() else value, dict(state)))
        return tree_leaves(state)

    def _store_state(self, tensor: WholeTensor, places: list[object]) -> None:
        """Write the state of an offloaded tensor back to `places`, or to new ones if it has changed its form."""
        if not tensor.shard.is_offloaded:
            return
        tier, (values, form) = tensor.shard.tier, tree_flatten(dict(self.of(tensor)))
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.dim():
                place = places[index] if len(places) == len(values) else None
                if isinstance(place, torch.Tensor) and (place.shape, place.dtype) == (value.shape, value.dtype):
                    tier.store(place.view(-1), value.reshape(-1)).wait()
                    values[index] = place
                else:
                    values[index] = tier.keep(value.reshape(-1)).view(value.shape)
        self.put(tensor, tree_unflatten(values, form))
