"""Module and autograd hooks that drive the units: gather before use, release after it, reduce when complete.

[Note: life of a unit in a training step]
    forward of a module    acquire its units -> the module runs -> leave
    backward of its output acquire again (autograd is about to run the module backwards)
    last gradient arrived  leave; start the reduction

All uses of a trainable parameter lie before the moment its gradient is complete, so a unit whose gradients have all
arrived is not needed any more. That does not serve units whose gradients come late or never: tied ones
(complete only after the last owner) and frozen ones. These leave when the gradients of the inputs of the call are
complete. What is still held at the end of backward is released then.

Activation checkpointing runs forward code again inside of backward. Where it runs a hooked module again, the unit
acquired there is kept for the backward that follows; where it runs inside of the hooked module (as in transformers),
the unit was acquired before. Autograd's graph does not tell which gradients will come (reentrant checkpointing makes
graphs on the way), so a unit with a parameter that got none is held to the end of backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from zero.gradients import GradientReducer
from zero.schedule import Schedule
from zero.unit import Residency, State, Unit


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def tensors_with_grad(value: object) -> Iterator[torch.Tensor]:
    """The tensors that require grad in a nest of tuples, lists and dicts (HF's outputs are dicts)."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_with_grad(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_with_grad(item)


class ModuleHooks:
    """Installs and serves the hooks of one engine's model.

    Args: model: the root module; units: all of its units; schedule: the policy, by position in `units`;
    reducer: takes the gradients; residency: counts what is gathered. `last_micro_step` tells whether the parameters
    change before the next forward.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        schedule: Schedule,
        reducer: GradientReducer,
        residency: Residency,
        last_micro_step: Callable[[], bool],
    ):
        self.units, self.schedule, self.reducer, self.residency = list(units), schedule, reducer, residency
        self.index = {unit: i for i, unit in enumerate(self.units)}
        self.last_micro_step = last_micro_step
        self._held: Counter[Unit] = Counter()
        self._in_backward: set[Unit] = set()
        self._arrived: dict[Unit, set[int]] = {unit: set() for unit in self.units}
        self._reduced: set[Unit] = set()
        self._backward_is_open = False
        self.handles: list = []
        self._install(model)

    # -- installation

    def _install(self, model: nn.Module) -> None:
        self.handles.append(model.register_forward_pre_hook(self._root_pre_forward))
        per_module: dict[nn.Module, list[Unit]] = {}
        for unit in self.units:
            for module in () if unit.persistent else unit.modules:
                per_module.setdefault(module, []).append(unit)
        for module, units in per_module.items():
            before, after = partial(self._pre_forward, units), partial(self._post_forward, units)
            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self.handles.append(module.register_forward_hook(after, with_kwargs=True))
        # Registered last, so that it runs after the hooks of units that the root module itself owns.
        self.handles.append(model.register_forward_hook(self._root_post_forward))
        for unit in self.units:
            if unit.trainable:
                for i, param in enumerate(unit.params):
                    hook = partial(self._gradient_ready, unit, i)
                    self.handles.append(param.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    # -- passes

    def _root_pre_forward(self, module: nn.Module, args: tuple) -> None:
        if in_backward():
            return
        self._forget_broken_pass()
        training = torch.is_grad_enabled()
        kind = ("train", module.training) if training else ("infer", module.training)
        self.schedule.begin(kind, wraps=not training or not self.last_micro_step())

    def _root_post_forward(self, module: nn.Module, args: tuple, output: object) -> None:
        if in_backward():
            return
        outputs = list(tensors_with_grad(output)) if torch.is_grad_enabled() else []
        for tensor in outputs:
            tensor.register_hook(self._backward_begins)
        if not outputs:
            self._end_pass()

    def _forget_broken_pass(self) -> None:
        """A forward or backward that ended in an exception left its units in use."""
        for unit in self.units:
            while self._held[unit]:
                self._leave(unit)
        self._in_backward.clear()
        self._reduced.clear()
        for arrived in self._arrived.values():
            arrived.clear()
        self._backward_is_open = False

    def _end_pass(self) -> None:
        self.schedule.end()
        for unit in self.units:
            if unit.state is State.FETCHING:
                unit.free()

    # -- forward

    def _pre_forward(self, units: list[Unit], module: nn.Module, args: tuple, kwargs: dict) -> None:
        recomputing = in_backward()
        for unit in units:
            if recomputing and unit in self._in_backward:
                continue
            self._acquire(unit)
            if recomputing:
                self._in_backward.add(unit)
            if torch.is_grad_enabled() and (unit.shared or not unit.trainable):
                inputs = list(tensors_with_grad((args, kwargs)))
                if inputs:
                    register_multi_grad_hook(inputs, partial(self._inputs_done, unit), mode="all")

    def _post_forward(self, units: list[Unit], module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        if not in_backward():
            for unit in units:
                self._leave(unit)
        # The backward of an embedding needs its indices, not its weight.
        if not torch.is_grad_enabled() or isinstance(module, nn.Embedding):
            return
        passed_through = {id(tensor) for tensor in tensors_with_grad((args, kwargs))}
        for tensor in tensors_with_grad(output):
            if tensor.grad_fn is not None and id(tensor) not in passed_through:
                # On the node, not on the tensor: hooks of the tensor, which is the next module's input, come first,
                # so that the next module's units leave before these are gathered.
                tensor.grad_fn.register_prehook(partial(self._pre_backward, units))

    # -- backward

    def _backward_begins(self, grad: torch.Tensor) -> None:
        if not self._backward_is_open:
            self._backward_is_open = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)

    def _pre_backward(self, units: list[Unit], grads: tuple) -> None:
        for unit in units:
            complete = not unit.shared and len(self._arrived[unit]) == len(unit.params)
            if not complete and unit not in self._in_backward:
                self._in_backward.add(unit)
                self._acquire(unit)

    def _inputs_done(self, unit: Unit, grads: Sequence[torch.Tensor | None]) -> None:
        self._leave_backward(unit)

    def _gradient_ready(self, unit: Unit, index: int, param: nn.Parameter) -> None:
        self.reducer.collect(unit, index)
        arrived = self._arrived[unit]
        arrived.add(index)
        if len(arrived) == len(unit.params):
            if not unit.shared:
                self._leave_backward(unit)
            if unit not in self._reduced:
                self._reduced.add(unit)
                self.reducer.reduce(unit)

    def _leave_backward(self, unit: Unit) -> None:
        if unit in self._in_backward:
            self._in_backward.remove(unit)
            self._leave(unit)

    def finish_backward(self) -> None:
        """Release what is still held and reduce what is not reduced yet: the same units, in order, on every rank."""
        self._backward_is_open = False
        for unit in list(self._in_backward):
            self._leave_backward(unit)
        for unit in self.units:
            if unit.trainable and (unit not in self._reduced or self.reducer.has_pending(unit)):
                self.reducer.reduce(unit)
            self._arrived[unit].clear()
        self._reduced.clear()
        self.reducer.drain()
        self._end_pass()

    # -- gathering by the schedule

    def _acquire(self, unit: Unit) -> None:
        if unit.persistent:
            return
        me = self.index[unit]
        self.schedule.visit(me)
        if unit.state is State.SHARDED:
            self._make_room(unit.layout.numel)
            unit.fetch()
        self._prefetch()
        unit.acquire()
        self._held[unit] += 1

    def _prefetch(self) -> None:
        in_flight = 0
        for i in self.schedule.upcoming():
            unit = self.units[i]
            if unit.state is State.SHARDED:
                if not self.schedule.may_prefetch(i, in_flight, self.residency.live):
                    return
                unit.fetch()
            if unit.state is State.FETCHING:
                in_flight += unit.layout.numel
            if in_flight >= self.schedule.prefetch_bucket_size:
                return

    def _make_room(self, numel: int) -> None:
        """Release units out of use, the one needed last first, until `numel` more elements may be gathered."""
        limit = self.schedule.max_live_parameters
        if self.residency.live + numel <= limit:
            return
        idle = [i for i, unit in enumerate(self.units) if unit.users == 0 and unit.state is State.RESIDENT]
        for i in sorted(idle, key=self.schedule.distance, reverse=True):
            if self.residency.live + numel <= limit:
                return
            self.units[i].free()

    def _leave(self, unit: Unit) -> None:
        if unit.persistent:
            return
        self._held[unit] -= 1
        if not unit.leave():
            return
        unit.conceal()
        if not self.schedule.keep(self.index[unit], self.residency.live):
            unit.free()
