"""The path for optimizers whose update of an element depends on the rest of its tensor: Adafactor,
Muon, Shampoo.

Each tensor has an owner rank (`zero.optim.assignment`) in each shard group, which keeps the
optimizer's state of it. Gradients are reduced and masters are kept in shards, as for every
optimizer. In a step the tensors come together on their owners (`zero.optim.redistribute`), which
call `step()` of the user's own optimizer on tensors of true shapes.

The optimizer sees a parameter for each of the model's, in the same groups and order, with the
model's names. It has a gradient on its owner alone, and torch's optimizers skip parameters without
one. At stage 0 every rank has all masters, and updates all of them.

[Note: overlap] `step()` is called once if there is one part of a step (`zero.optim.assignment`).
Else each part has a call of its own, which begins with the same counts
(`zero.optim.optimizer_counters`). Unknown classes have one part: they may keep anything. While one
part is updated, gradients and masters of the next one are on their way to the owners, and new
masters of the last one on their way back. So an owner holds what has moved of two parts, not of
all. Groups that are offloaded have calls of their own, as each has to be on the compute device.

This file does not know how gradients are reduced, nor when a step is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from zero.comm.communicator import Communicator
from zero.comm.consistency import differences
from zero.core.optimizer_shard import OptimizerShard
from zero.core.sharded_param import placeholder
from zero.errors import UsageError
from zero.offload.tiers import Tier
from zero.optim.assignment import owners, parts
from zero.optim.elementwise import steps_in_parts
from zero.optim.optimizer_counters import counts_of, flat, restore
from zero.optim.redistribute import Assembly, WholeTensor, load_values
from zero.optim.rounding import StochasticRounding
from zero.optim.subgroups import Tile
from zero.optim.tensor_subclass_state import closed, opened

# Attributes of parameters that the engine sets. Others are the script's, and its optimizer may ask
# for them.
_ENGINES_OWN = ("ds_", "_zero", "_ds")


def _tensors(
    shards: Sequence[OptimizerShard], group_of: Mapping[nn.Parameter, int], comm: Communicator
) -> Iterator[tuple[nn.Parameter, WholeTensor]]:
    rank, size = comm.shard_group.rank, comm.shard_group.size
    for shard in shards:
        param_group = shard.group
        pieces = [
            {piece.slot: piece for piece in param_group.layout.pieces(each)} for each in range(size)
        ]
        for index, (param, name, slot) in enumerate(
            zip(param_group.params, param_group.param_names, param_group.layout.slots, strict=True)
        ):
            if param in group_of:
                parts = {
                    each: of_rank[index] for each, of_rank in enumerate(pieces) if index in of_rank
                }
                seen = nn.Parameter(placeholder(slot.shape, torch.float32, comm.device))
                vars(seen).update(
                    {
                        key: value
                        for key, value in vars(param).items()
                        if not key.startswith(_ENGINES_OWN)
                    }
                )
                yield param, WholeTensor(name, group_of[param], shard, slot, parts, rank, seen)


class WholeTensorState:
    """All parameters of `optimizer` as whole tensors, of which this rank updates its own.

    Attributes: of_param: {the model's parameter: its whole tensor}, in the order of groups. moved:
    elements of tensors that do not lie on their owner as a whole."""

    tiles: Sequence[Tile] = ()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[OptimizerShard],
        group_of: Mapping[nn.Parameter, int],
        comm: Communicator,
        rounding: StochasticRounding | None = None,
    ):
        self._optimizer = optimizer
        self._comm = comm
        self._rounding = rounding
        self.of_param = dict(_tensors(shards, group_of, comm))
        self._is_divided = comm.shard_group.size > 1 and not any(
            shard.group.layout.replicated for shard in shards
        )
        self._part_of = dict.fromkeys(shards, 0)
        if self._is_divided:
            self._find_owners(shards)
        self.moved = sum(each.slot.numel for each in self.tensors if each.moves)
        self._of_shard = {
            shard: [each for each in self.tensors if each.shard is shard] for shard in shards
        }
        self._replace_params()

    def _find_owners(self, shards: Sequence[OptimizerShard]) -> None:
        ranks = range(self._comm.shard_group.size)
        if steps_in_parts(self._optimizer):
            self._part_of = dict(
                zip(shards, parts([shard.group.layout for shard in shards]), strict=True)
            )
        held = [
            [each.parts[rank].numel if rank in each.parts else 0 for rank in ranks]
            for each in self.tensors
        ]
        groups = [(self._part_of[each.shard], each.group) for each in self.tensors]
        for tensor, owner in zip(self.tensors, owners(held, groups), strict=True):
            tensor.owner = owner

    def _replace_params(self) -> None:
        """Give the optimizer the whole tensors in the place of the model's parameters, with the
        state they have.
        """
        of_param = self.of_param
        for key, value in vars(self._optimizer).items():
            if key not in ("param_groups", "state") and any(
                isinstance(each, nn.Parameter) and each in of_param for each in tree_leaves(value)
            ):
                raise UsageError(
                    f"optimizer {type(self._optimizer).__name__} keeps parameters of its own in "
                    f"the attribute {key!r}. "
                    "It would update nothing, because it gets other tensors in param_groups: let "
                    "step() read those"
                )
        for group in self._optimizer.param_groups:
            names = group.get("param_names", [None] * len(group["params"]))
            known = [
                (p, name) for p, name in zip(group["params"], names, strict=True) if p in of_param
            ]
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

        Raises UsageError, on every rank, if `step()` keeps a number that depends on which tensors
        it was given, such as Prodigy's estimate. A number that counts steps is the same everywhere.
        """
        before = counts_of(self._optimizer)
        former = after = flat(before)
        found = []
        for assembly in self._assemblies():
            restore(self._optimizer, before)
            if factor != 1.0:
                for tensor in assembly.own:
                    tensor.param.grad.mul_(factor)
            self._change(assembly, self._optimizer.step)
            after = flat(counts_of(self._optimizer))
            found.append(after)
        unequal = [
            f"{key}: {each.get(key)}, then {value}"
            for each in found
            for key, value in after.items()
            if each.get(key) != value
        ]
        if self._is_divided:
            unequal += differences(
                self._comm, {key: after[key] for key in after if after[key] != former.get(key)}
            )
        if unequal:
            raise UsageError(
                f"optimizer {type(self._optimizer).__name__} keeps a global value that depends on "
                "which tensors this "
                f"rank has ({unequal[0]}), and tensors are divided among ranks or groups: train in "
                "one process without "
                "offload_optimizer, or take an optimizer that keeps such numbers in its state"
            )

    def switch(self, change: Callable[[], object]) -> None:
        """Let the optimizer change the weights:

        `train()` or `eval()` of a schedule-free one. Every rank must call.
        """
        before, state = counts_of(self._optimizer), self._optimizer.state
        for assembly in self._assemblies():
            restore(self._optimizer, before)
            # Unlike `step()`, these functions look at tensors without a gradient.
            present = set(assembly.own)
            absent = {
                t.param: state.pop(t.param)
                for t in self.own
                if t not in present and t.param in state
            }
            self._change(assembly, change)
            state.update(absent)

    def _assemblies(self) -> Iterator[Assembly]:
        """The tensors of all groups, some groups at a time, each ready to be updated.

        See the note on overlap.
        """
        assemblies = [
            Assembly({shard: self._of_shard[shard] for shard in part}, self._comm)
            for part in self._calls()
        ]
        last = None
        for number, assembly in enumerate(assemblies):
            if number == 0:
                assembly.start()
            assembly.wait()
            if number + 1 < len(assemblies):
                assemblies[number + 1].start()
            yield assembly
            assembly.return_masters()
            if last is not None:
                self._store(last)
            last, assemblies[number] = assembly, None
        if last is not None:
            self._store(last)

    def _calls(self) -> Iterator[list[OptimizerShard]]:
        """The groups that are updated by one call: those of a part, without offloaded ones, which
        come one by one.
        """
        for part in sorted(set(self._part_of.values())):
            if here := [
                shard
                for shard, own in self._part_of.items()
                if own == part and not shard.is_offloaded
            ]:
                yield here
        yield from ([shard] for shard in self._of_shard if shard.is_offloaded)

    def _change(self, assembly: Assembly, change: Callable[[], object]) -> None:
        """Call the optimizer's method `change` for the tensors of an assembly."""
        places = [self._load_state(tensor) for tensor in assembly.own]
        for tensor in assembly.own:
            self._change_state(tensor, closed)
        change()
        for tensor in assembly.own:
            self._change_state(tensor, opened)
            self._separate(tensor)
        for tensor, of_state in zip(assembly.own, places, strict=True):
            self._store_state(tensor, of_state)

    def _store(self, assembly: Assembly) -> None:
        """Keep the new masters of an assembly, and round them into the weights."""
        assembly.finish()
        for shard, master in assembly.masters.items():
            if self._rounding is not None:
                wide, master = master, torch.empty_like(master, dtype=shard.master.dtype)
                self._rounding.store(master, wide, shard, 0)
            if master is not shard.master:
                shard.tier.store(shard.master, master).wait()
            shard.round_into_shard(0, master).wait()

    def _separate(self, tensor: WholeTensor) -> None:
        """Copy state that is the gradient or the parameter itself: their memory is used again after
        the step.
        """
        used = {
            each.untyped_storage().data_ptr()
            for each in (tensor.param, tensor.param.grad)
            if each is not None
        }

        def copied(value: torch.Tensor) -> torch.Tensor:
            return (
                value.clone()
                if value.dim() and value.untyped_storage().data_ptr() in used
                else value
            )

        if state := self.of(tensor):
            state.update(tree_map_only(torch.Tensor, copied, dict(state)))

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
        """Bytes of the state tensors of one group."""
        found: list[int] = []
        for tensor in self._of_shard[shard]:
            tree_map_only(torch.Tensor, lambda value: found.append(value.nbytes), self.of(tensor))
        return sum(found)

    def move(self, shard: OptimizerShard, tier: Tier) -> None:
        """Bring the state tensors of one group to `tier`."""

        def moved(value: torch.Tensor) -> torch.Tensor:
            return tier.keep(value.reshape(-1)).view(value.shape) if value.dim() else value

        for tensor in self._of_shard[shard]:
            if state := self.of(tensor):
                state.update(tree_map_only(torch.Tensor, moved, dict(state)))

    def follow_masters(self) -> None:
        """The masters have moved: nothing to do, as each step takes them from where they are."""

    def _load_state(self, tensor: WholeTensor) -> list[object]:
        """Bring the state of an offloaded tensor to the compute device.

        Returns the tensors that held it before.
        """
        state = self.of(tensor)
        if not (state and tensor.shard.is_offloaded):
            return []

        def load(value: torch.Tensor) -> torch.Tensor:
            target, loaded = load_values(tensor.shard, value)
            loaded.wait()
            return target

        self.put(
            tensor,
            tree_map_only(
                torch.Tensor, lambda value: load(value) if value.dim() else value, dict(state)
            ),
        )
        return tree_leaves(state)

    def _store_state(self, tensor: WholeTensor, places: list[object]) -> None:
        """Write the state of an offloaded tensor back to `places`, or to new ones if it has changed
        its form.
        """
        if not tensor.shard.is_offloaded:
            return
        tier, (values, form) = tensor.shard.tier, tree_flatten(dict(self.of(tensor)))
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.dim():
                place = places[index] if len(places) == len(values) else None
                if isinstance(place, torch.Tensor) and (place.shape, place.dtype) == (
                    value.shape,
                    value.dtype,
                ):
                    tier.store(place.view(-1), value.reshape(-1)).wait()
                    values[index] = place
                else:
                    values[index] = tier.keep(value.reshape(-1)).view(value.shape)
        self.put(tensor, tree_unflatten(values, form))
