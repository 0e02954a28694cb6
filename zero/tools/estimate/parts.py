"""Attributes memory to a part, and traffic to a cause, while a method of the engine runs.

This is the only file of the estimate that knows the engine's methods by name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from zero.comm.quantized import CompressedCommunicator
from zero.core.optimizer_shard import OptimizerShard
from zero.core.param_group import ParamGroup
from zero.core.reduction import GradientReducer
from zero.core.secondary_partition import SecondaryPartitionGroup
from zero.optim.sharded_optimizer import ZeroOptimizer
from zero.optim.subgroups import SubGroup, SubGroupInMemory, is_state_tensor
from zero.tools.estimate.machine import Memory
from zero.tools.estimate.traffic import UPDATES

# The parts of memory.
PARAMETERS, GATHERED, SECOND = "parameters", "gathered parameters", "second shards"
GRADIENTS, MASTERS, STATE, ACTIVATIONS = "gradients", "masters", "optimizer state", "activations"
MOVING, SUMS, CODES = "gradients on their way", "sums of micro-batches", "codes of quantization"
TILES, WHOLE = "temporary tensors of the optimizer", "whole tensors of the optimizer"
# The causes of traffic.
GATHERS, REFRESH = "parameters for forward and backward", "updated parameters"
EXCHANGE = "whole tensors to their owners and back"

Labels = Callable[..., Iterable[tuple[torch.Tensor | None, str]]]


class During(NamedTuple):
    """While `method` of `owner` runs, count new memory as `part` and traffic as `cause` (None: no
    change). `labels` returns tensors that belong to another part from now on. It gets the method's
    arguments, before the call and after it.
    """

    owner: type
    method: str
    part: str | None = None
    cause: str | None = None
    labels: Labels | None = None


def _labels(find: Callable[..., tuple[torch.Tensor | None, str]]) -> Labels:
    """The label of one tensor, which `find` returns."""
    return lambda *args: [find(*args)]


def _states(*of_params: dict[str, Any]) -> Iterator[tuple[torch.Tensor, str]]:
    for state in of_params:
        yield from ((each, STATE) for each in state.values() if is_state_tensor(each))


_gradient = _labels(lambda shard, *_: (shard.grad, GRADIENTS))
_full = _labels(lambda group, *_: (group.full, PARAMETERS if group.persistent else GATHERED))
_second = _labels(lambda group: (group.second, SECOND))
_master = _labels(lambda shard, *_: (shard.master, PARAMETERS if shard.shares_weights else MASTERS))
_sum = _labels(lambda reducer, group: (reducer.gradients[group].carried, SUMS))
_collected = _labels(lambda _, group, index: (group.params[index].grad, MOVING))


_METHODS = (
    During(ParamGroup, "__init__", PARAMETERS),
    During(ParamGroup, "all_gather", GATHERED, GATHERS, _full),
    During(ParamGroup, "wait_for_all_gather", GATHERED, GATHERS),
    During(SecondaryPartitionGroup, "wait_for_all_gather", labels=_second),
    During(ParamGroup, "refresh", cause=REFRESH),
    During(ParamGroup, "write_shard", cause=REFRESH),
    During(OptimizerShard, "make_master", MASTERS, UPDATES, _master),
    During(OptimizerShard, "reduction_target", labels=_gradient),
    During(OptimizerShard, "put_gradient", GRADIENTS, GRADIENTS, _gradient),
    During(OptimizerShard, "widen_gradient", GRADIENTS, GRADIENTS, _gradient),
    During(GradientReducer, "collect", MOVING, GRADIENTS, _collected),
    During(GradientReducer, "reduce", MOVING, GRADIENTS, _sum),
    During(GradientReducer, "drain", MOVING, GRADIENTS),
    During(GradientReducer, "keep_up", MOVING, GRADIENTS),
    During(CompressedCommunicator, "all_gather", CODES),
    During(CompressedCommunicator, "reduce_scatter", CODES),
    During(
        ZeroOptimizer, "step", TILES, UPDATES, lambda each: _states(*each.optimizer.state.values())
    ),
    During(SubGroupInMemory, "write", STATE, UPDATES),
    During(SubGroup, "put_state", STATE, UPDATES, lambda _, state: _states(state)),
)


@contextlib.contextmanager
def labelled(memory: Memory) -> Iterator[None]:
    """Context in which `memory` is told the part and the cause that it counts for."""
    with contextlib.ExitStack() as stack:
        for each in _METHODS:
            stack.enter_context(mock.patch.object(each.owner, each.method, _told(memory, each)))
        yield


def _told(memory: Memory, during: During) -> Callable[..., Any]:
    method = getattr(during.owner, during.method)

    def label(args: tuple) -> None:
        for tensor, part in during.labels(*args) if during.labels is not None else ():
            memory.label(tensor, part)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = memory.part, memory.cause
        is_whole = isinstance(args[0], ZeroOptimizer) and args[0].whole is not None
        memory.part = WHOLE if is_whole else during.part or memory.part
        memory.cause = EXCHANGE if is_whole else during.cause or memory.cause
        label(args)
        try:
            return method(*args, **kwargs)
        finally:
            label(args)
            memory.part, memory.cause = before

    return call
