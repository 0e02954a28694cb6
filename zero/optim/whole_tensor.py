"""The path for optimizers whose update of an element depends on the rest of its tensor: Adafactor,
Muon, Shampoo.

Each tensor has an owner rank in each shard group, which keeps the
optimizer's state of it. Gradients are reduced and masters are kept in shards, as for every
optimizer. In a step the tensors come together on their owners (`zero.optim.redistribute`), which
call `step()` of the user's own optimizer on tensors of true shapes.

The optimizer sees a parameter for each of the model's, in the same groups and order, with the
model's names. It has a gradient on its owner alone, and torch's optimizers skip parameters without
one. At stage 0 every rank has all masters, and updates all of them.

`step()` is called once for all groups on the compute device. A group that is offloaded has a call
of its own, because each has to be on the compute device meanwhile. While it is updated, the next
one is read. All calls but one are made on a twin (`twin_of`), so that a step counts once.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from zero.comm.communicator import Communicator
from zero.comm.control import Record
from zero.core.optimizer_shard import OptimizerShard
from zero.core.sharded_param import placeholder
from zero.errors import UsageError
from zero.optim.redistribute import GatheredForStep, WholeTensor, load_values, owners
from zero.optim.rounding import StochasticRounding
from zero.optim.subgroups import SubGroup

# Attributes of parameters that the engine sets. Others are the script's, and its optimizer may ask
# for them.
_ENGINES_OWN = ("ds_", "_zero", "_ds")


def _tensors(
    optimizer: torch.optim.Optimizer,
    shards: Sequence[OptimizerShard],
    group_of: Mapping[nn.Parameter, int],
    comm: Communicator,
) -> Iterator[tuple[nn.Parameter, WholeTensor]]:
    rank, size = comm.shard_group.rank, comm.shard_group.size
    for shard in shards:
        group = shard.group
        pieces = [(each, piece) for each in range(size) for piece in group.layout.pieces(each)]
        for index, (param, name, slot) in enumerate(
            zip(group.params, group.param_names, group.layout.slots, strict=True)
        ):
            if param in group_of:
                parts = {each: piece for each, piece in pieces if piece.slot == index}
                seen = nn.Parameter(placeholder(slot.shape, torch.float32, comm.device))
                for key, value in vars(param).items():
                    if not key.startswith(_ENGINES_OWN):
                        vars(seen)[key] = value
                number = group_of[param]
                yield param, WholeTensor(optimizer, name, number, shard, slot, parts, rank, seen)


class WholeTensorState:
    """All parameters of `optimizer` as whole tensors, of which this rank updates its own.

    Attributes:
        of_param: {the model's parameter: its whole tensor}, in the order of groups.
    """

    sub_groups: Sequence[SubGroup] = ()

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
        self.of_param = dict(_tensors(optimizer, shards, group_of, comm))
        self._is_divided = comm.shard_group.size > 1 and not any(
            shard.group.layout.replicated for shard in shards
        )
        if self._is_divided:
            ranks = range(comm.shard_group.size)
            held = [
                [tensor.parts[rank].numel if rank in tensor.parts else 0 for rank in ranks]
                for tensor in self.tensors
            ]
            groups = [tensor.group_index for tensor in self.tensors]
            for tensor, owner in zip(self.tensors, owners(held, groups), strict=True):
                tensor.owner = owner
        self._of_shard = {
            shard: [tensor for tensor in self.tensors if tensor.shard is shard] for shard in shards
        }
        self._replace_params()

    def _replace_params(self) -> None:
        """Replace the model's parameters in the optimizer by the whole tensors, together with
        their state.
        """
        of_param = self.of_param
        for key, value in vars(self._optimizer).items():
            if key not in ("param_groups", "state") and any(
                isinstance(each, nn.Parameter) and each in of_param for each in tree_leaves(value)
            ):
                raise UsageError(
                    f"optimizer {type(self._optimizer).__name__} keeps parameters of its own in "
                    f"the attribute {key!r}. It would update nothing, because it gets other "
                    "tensors in param_groups: let step() read those"
                )
        for param_group in self._optimizer.param_groups:
            names = param_group.get("param_names", [None] * len(param_group["params"]))
            named = zip(param_group["params"], names, strict=True)
            known = [(param, name) for param, name in named if param in of_param]
            param_group["params"] = [of_param[param].param for param, _ in known]
            if "param_names" in param_group:
                param_group["param_names"] = [name for _, name in known]
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

    def update(self, factor: float, idle: Collection[str] = ()) -> None:
        """Update all tensors with their gradients times `factor`, except those with the names in
        `idle`. Every rank must call.

        Raises UsageError, on every rank, if `step()` keeps a number that depends on which tensors
        it was given, such as Prodigy's estimate. A number that counts steps is the same everywhere.
        """
        before = counts_of(self._optimizer)
        of_calls = self._call("step", factor, idle)
        after = of_calls[-1] if of_calls else before
        unequal = [
            f"{key}: {counts.get(key)}, then {value}"
            for counts in of_calls
            for key, value in after.items()
            if counts.get(key) != value
        ]
        if self._is_divided:
            changed = {key: value for key, value in after.items() if value != before.get(key)}
            record, worlds = Record({}, changed, bool(unequal)), self._comm.worlds
            control = self._comm.control("an update of whole tensors")
            found, is_flagged = control.differences(lambda: record, worlds)
            unequal += found or ["as another rank tells"] * is_flagged
        if unequal:
            raise UsageError(
                f"optimizer {type(self._optimizer).__name__} keeps a global value that depends on "
                f"which tensors this rank has ({unequal[0]}), and tensors are divided among ranks "
                "or groups: train in one process without offload_optimizer, or take an optimizer "
                "that keeps such numbers in its state"
            )

    def switch(self, mode: str) -> None:
        """Let the optimizer change the weights: `mode` is the method "train" or "eval" of a
        schedule-free one. Every rank must call.
        """
        self._call(mode)

    def _call(
        self, method: str, factor: float = 1.0, idle: Collection[str] = ()
    ) -> list[dict[str, str]]:
        """Call the optimizer's `method` for the tensors of all groups, with their gradients times
        `factor`, except those of `idle` tensors. Returns the optimizer's counters after each
        call; the last ones are its own.
        """
        together = [shard for shard in self._of_shard if not shard.is_offloaded]
        alone = [[shard] for shard in self._of_shard if shard.is_offloaded]
        coming = [
            GatheredForStep({shard: self._of_shard[shard] for shard in shards}, self._comm)
            for shards in (*alone, together)
            if shards
        ]
        counts: list[dict[str, str]] = []
        for gathered in coming[:1]:
            gathered.start()
        while coming:
            gathered = coming.pop(0)
            gathered.wait()
            for following in coming[:1]:
                following.start()
            for tensor in gathered.own:
                if tensor.name in idle:
                    tensor.param.grad = None
                elif factor != 1.0 and tensor.param.grad is not None:
                    tensor.param.grad.mul_(factor)
            counts.append(self._call_for(gathered.own, method, by_twin=bool(coming)))
            gathered.return_masters()
            self._store(gathered)
        return counts

    def _call_for(
        self, tensors: Sequence[WholeTensor], method: str, by_twin: bool
    ) -> dict[str, str]:
        """Call `method` for these tensors, of which the optimizer has the state alone: `train()`,
        unlike `step()`, also looks at tensors without a gradient.
        """
        optimizer, state, counted = self._optimizer, self._optimizer.state, {}
        present = {tensor.param for tensor in tensors}
        absent = [key for key in state if isinstance(key, torch.Tensor) and key not in present]
        hidden = {key: state.pop(key) for key in absent}
        if by_twin:
            optimizer = counting_twin(optimizer)
            counted = {key: value for key, value in state.items() if key not in present}
            state.update(copy.deepcopy(counted))
        former = {tensor: tensor.state for tensor in tensors}
        for tensor in tensors:
            if former[tensor]:
                tensor.put_state(closed(_loaded(tensor)))
        getattr(optimizer, method)()
        for tensor in tensors:
            if tensor.state:
                _keep_state(tensor, former[tensor])
        counts = counts_of(optimizer)
        if by_twin:
            for key in [key for key in state if not isinstance(key, torch.Tensor)]:
                del state[key]
        state.update(counted | hidden)
        return counts

    def _store(self, gathered: GatheredForStep) -> None:
        """Keep the new masters, and round them into the weights."""
        for shard, master in gathered.masters.items():
            if self._rounding is not None:
                wide, master = master, torch.empty_like(master, dtype=shard.master.dtype)
                self._rounding.store(master, wide, shard, 0)
            if master is not shard.master:
                shard.tier.store(shard.master, master).wait()
            shard.round_into_shard(0, master).wait()

    def follow_masters(self) -> None:
        """The masters have moved: nothing to do, as each step takes them from where they are."""


# -- state


def _loaded(tensor: WholeTensor) -> dict:
    """The state of a tensor on the compute device: a copy if it is offloaded."""

    def load(value: torch.Tensor) -> torch.Tensor:
        if not value.dim():
            return value
        target, loading = load_values(tensor.shard, value)
        loading.wait()
        return target

    return tree_map_only(torch.Tensor, load, dict(tensor.state))


def _keep_state(tensor: WholeTensor, former: dict) -> None:
    """Keep the state that a call has left: on the tensor's tier, in the memory of the `former`
    state where that has the same form.

    A state that is the gradient or the parameter itself is copied, because their memory is used
    again after the step."""
    reused = {
        values.untyped_storage().data_ptr()
        for values in (tensor.param, tensor.param.grad)
        if values is not None
    }
    tier, places = tensor.shard.tier, tree_leaves(former)
    values, form = tree_flatten(opened(dict(tensor.state)))
    for index, value in enumerate(values):
        if not (isinstance(value, torch.Tensor) and value.dim()):
            continue
        if not tensor.shard.is_offloaded:
            if value.untyped_storage().data_ptr() in reused:
                values[index] = value.clone()
            continue
        place = places[index] if len(places) == len(values) else None
        form_of = value.shape, value.dtype
        if isinstance(place, torch.Tensor) and (place.shape, place.dtype) == form_of:
            tier.store(place.view(-1), value.reshape(-1)).wait()
            values[index] = place
        else:
            values[index] = tier.keep(value.reshape(-1)).view(value.shape)
    tensor.put_state(tree_unflatten(values, form))


# -- state in tensors that wrap others, such as torchao's 8-bit moments
#
# Between steps such state is opened to plain tensors, by torch's protocol for traceable wrapper
# subclasses (`__tensor_flatten__`, `__tensor_unflatten__`). So whoever moves, counts or stores it
# sees ordinary tensors only.

_KIND = "wrapper of tensors"


def opened(value: Any) -> Any:
    """`value`, with each wrapper in it, also in lists, tuples and dicts, as a dict of what it
    wraps.
    """
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        kind = type(value)
        return {
            _KIND: f"{kind.__module__}:{kind.__qualname__}",
            "tensors": {name: opened(getattr(value, name)) for name in names},
            "context": context,
            "size": tuple(value.shape),
            "stride": tuple(value.stride()),
        }
    return _in_containers(opened, value)


def closed(value: Any) -> Any:
    """The inverse of `opened`. Raises UsageError for a class that this process has not imported."""
    if isinstance(value, dict) and _KIND in value:
        tensors = {name: closed(each) for name, each in value["tensors"].items()}
        make = _class(value[_KIND]).__tensor_unflatten__
        return make(tensors, value["context"], torch.Size(value["size"]), value["stride"])
    return _in_containers(closed, value)


def _in_containers(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(function, value))
    return value


def _class(name: str) -> type:
    """The wrapper class of this name.

    A name may come from a file, so nothing is imported for it.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_tensor = isinstance(found, type) and issubclass(found, torch.Tensor)
    if not (is_tensor and hasattr(found, "__tensor_unflatten__")):
        raise UsageError(
            f"optimizer state in tensors of class {name}: this process has no such class; import it"
        )
    return found


# -- a second object of the user's optimizer, for calls that must not change the first one
#
# There is no way to copy an optimizer of any class, so a twin is made without a constructor. It
# shares the settings, hooks and state of the original unless it gets others.

# What torch and its schedulers keep on an optimizer, and what is looked at by itself.
_NOT_COUNTED = {"_step_count", "_opt_called", "param_groups", "params", "state"}


def twin_of(optimizer: torch.optim.Optimizer, **attributes: object) -> torch.optim.Optimizer:
    """An optimizer of the same class, with these attributes instead of the original's."""
    twin = object.__new__(type(optimizer))
    twin.__dict__ |= optimizer.__dict__ | attributes
    twin.__dict__.pop("step", None)  # torch's schedulers put a counting one there
    return twin


def counting_twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A twin that counts by itself: steps, learning rates and flags in its param groups and
    attributes. It shares the entries of `state`.
    """
    groups = [group | _copied(group) for group in optimizer.param_groups]
    return twin_of(optimizer, **_copied(vars(optimizer)), param_groups=groups)


def counts_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What an optimizer counts outside of its parameters' state, by name: numbers in param groups,
    attributes and entries of `state` that belong to no parameter, also in dicts, lists and tuples.

    Each is a text, because a NaN then equals itself.
    """
    places: dict[str, Mapping] = {
        f"param group {number},": group for number, group in enumerate(optimizer.param_groups)
    }
    places |= {"attribute": vars(optimizer), "state": optimizer.state}
    return dict(
        leaf
        for name, place in places.items()
        for key, value in place.items()
        if _is_count(key, value)
        for leaf in _leaves(f"{name} {key}", value)
    )


def _copied(place: Mapping) -> dict[Any, Any]:
    return {key: copy.deepcopy(value) for key, value in place.items() if _is_count(key, value)}


def _leaves(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, (Mapping, list, tuple)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{name} {key}", each)
    else:
        number = value.item() if isinstance(value, (torch.Tensor, numpy.generic)) else value
        yield name, repr(number)


def _is_count(key: object, value: object) -> bool:
    """Whether `value` is a number, a text or None, or consists of such, and is no parameter's."""
    if not isinstance(key, (str, int)) or key in _NOT_COUNTED:
        return False
    if isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return all(_is_count(inner, each) for inner, each in items)
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not isinstance(value, nn.Parameter)
    return value is None or isinstance(value, (bool, int, float, str, numpy.generic))
