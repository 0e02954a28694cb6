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

A parameter that is read outside of its modules' calls (as `self.embedding.weight` in another module's forward, or in
a loss after the model's forward), or that a module returns, is gathered then. It is held until as many backwards have
ended as there were forwards, since nothing tells which of them still needs it; at the latest until the step.

[Note: order of reductions]
Every rank starts its reductions in one agreed order, each as soon as it and all before it are complete, so that ranks
whose graphs differ (an expert used on one rank only, a skipped layer) never wait for different units. At first the
order is that of the units, backwards; after the first backward, and then ever more rarely, rank 0 tells the others
the order in which its units completed (as DistributedDataParallel rebuilds its buckets).
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from zero.comm import Communicator
from zero.errors import UsageError
from zero.gradients import GradientReducer
from zero.schedule import Schedule
from zero.unit import Residency, State, Unit

logger = logging.getLogger("zero")


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a nest of tuples, lists and dicts (HF's outputs are dicts)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value):
        yield from tensors_in(vars(value))


def tensors_with_grad(value: object) -> Iterator[torch.Tensor]:
    """Those of `tensors_in` that require grad."""
    return (tensor for tensor in tensors_in(value) if tensor.requires_grad)


def _gradient_ready(hooks: weakref.ref[ModuleHooks], number: int, index: int, param: nn.Parameter) -> None:
    """The parameter's gradient is complete. The parameter's hook owns neither the hooks nor the unit.

    Autograd keeps such hooks where Python's garbage collector does not look: they would keep engine and model for ever.
    """
    # Autograd also calls where a function returned None for the parameter: there is no gradient then.
    if param.grad is not None and (found := hooks()) is not None:
        found.gradient_ready(found.units[number], index)


class ModuleHooks:
    """Installs and serves the hooks of one engine's model.

    Args: model: the root module; units: all of its units; schedule: the policy, by position in `units`;
    reducer: takes the gradients; comm: to agree on their order; residency: counts what is gathered.
    `last_micro_step` tells whether the parameters change before the next forward; `gradients_begin` is called with
    the first gradient of each backward. Unless `ignore_unused`, a trainable parameter without a gradient is an error.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        schedule: Schedule,
        reducer: GradientReducer,
        comm: Communicator,
        residency: Residency,
        last_micro_step: Callable[[], bool],
        gradients_begin: Callable[[], None],
        ignore_unused: bool = True,
    ):
        self.units, self.schedule, self.reducer, self.residency = list(units), schedule, reducer, residency
        self.comm, self.ignore_unused = comm, ignore_unused
        self.index = {unit: i for i, unit in enumerate(self.units)}
        self.last_micro_step, self.gradients_begin = last_micro_step, gradients_begin
        self._held: Counter[Unit] = Counter()
        self._held_to_end: set[Unit] = set()
        # In the order of first reading. No call of a module tells when backward needs these: it has them all along.
        self._read_elsewhere: dict[Unit, None] = {}
        self._in_backward: set[Unit] = set()
        # Calls of the root module under way: its forward may call it again.
        self._depth = 0
        # From the first call of a module to the end of backward, or of a forward without gradients.
        self._in_pass = self._training = False
        # Forwards whose backward has not ended.
        self._awaited = 0
        # By unit and index, parameters that a training forward has read and that have no gradient yet. Those that their
        # own modules read are watched in the first pass only: later on an expert may well rest for a step.
        self._want_gradient: set[tuple[Unit, int]] = set()
        self._without_gradient: set[str] = set()
        self._thawed: set[Unit] = set()
        self._arrived: dict[Unit, set[int]] = {unit: set() for unit in self.units}
        # Units that complete last in every model: spread over all of it, or used at both of its ends.
        late = [unit for unit in self.units if unit.persistent or unit.shared]
        self._order = [unit for unit in reversed(self.units) if unit.trainable and unit not in late]
        self._order += [unit for unit in reversed(late) if unit.trainable]
        self._complete: dict[Unit, None] = {}
        self._started = 0
        self._backwards = 0
        self._backward_is_open = self._has_gradients = False
        self.module = model
        self.forward_hooks: list = []
        self.backward_hooks: list = []
        self.install()

    # -- installation

    def install(self) -> None:
        """Put the hooks on, also again after `remove`."""
        model = self.module
        self.forward_hooks.append(model.register_forward_pre_hook(self._root_pre_forward))
        per_module: dict[nn.Module, list[Unit]] = {}
        for unit in self.units:
            for module in () if unit.persistent else unit.modules:
                per_module.setdefault(module, []).append(unit)
        for module, units in per_module.items():
            before, after = partial(self._pre_forward, units), partial(self._post_forward, units)
            self.forward_hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self.forward_hooks.append(module.register_forward_hook(after, with_kwargs=True))
        # Registered last, so that it runs after the hooks of units that the root module itself owns.
        self.forward_hooks.append(model.register_forward_hook(self._root_post_forward, always_call=True))
        for number, unit in enumerate(self.units):
            if unit.trainable:
                for i, param in enumerate(unit.params):
                    hook = partial(_gradient_ready, weakref.ref(self), number, i)
                    self.backward_hooks.append(param.register_post_accumulate_grad_hook(hook))
            if not unit.persistent:
                unit.on_read = partial(self._read_outside, unit)

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in [*self.forward_hooks, *self.backward_hooks]:
            handle.remove()
        self.forward_hooks.clear()
        self.backward_hooks.clear()
        for unit in self.units:
            unit.on_read = None

    # -- passes

    def _root_pre_forward(self, module: nn.Module, args: tuple) -> None:
        if in_backward():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._forget_modules()
        if not self._awaited:
            self._release_reads()
        self._begin_pass("train" if torch.is_grad_enabled() else "infer")

    def _begin_pass(self, name: str) -> None:
        self._in_pass, self._training = True, torch.is_grad_enabled()
        if self._training:
            self._warn_of_thawed()
        kind = (name, self.module.training)
        self.schedule.begin(kind, wraps=not self._training or not self.last_micro_step())

    def _warn_of_thawed(self) -> None:
        for unit in self.units:
            if not unit.trainable and unit not in self._thawed and any(param.requires_grad for param in unit.params):
                self._thawed.add(unit)
                logger.warning(
                    "%s was frozen when the engine was made, and stays as it is: set requires_grad before initialize()",
                    unit,
                )

    def _root_post_forward(self, module: nn.Module, args: tuple, output: object) -> None:
        """Also called, with None, after an exception in forward."""
        if in_backward():
            return
        self._depth = max(0, self._depth - 1)
        if self._depth > 0:
            return
        outputs = list(tensors_with_grad(output)) if torch.is_grad_enabled() else []
        for tensor in outputs:
            tensor.register_hook(self._backward_begins)
        if outputs:
            self._awaited += 1
        else:
            self._end_pass()

    def forget_broken_pass(self) -> None:
        """Release whatever a forward without a backward, or one that ended in an exception, left in use."""
        self._forget_modules()
        self._release_reads()
        self._awaited = 0
        self._in_pass = False

    def _forget_modules(self) -> None:
        for unit in self.units:
            while self._held[unit] > (unit in self._held_to_end):
                self._leave(unit)
        self._in_backward.clear()
        self._clear_order()
        self._backward_is_open = False

    def _release_reads(self) -> None:
        for unit in self._held_to_end:
            self._leave(unit)
        self._held_to_end.clear()
        self._want_gradient.clear()

    def _end_pass(self) -> None:
        if not self._awaited:
            self._release_reads()
            self._in_pass = False
        self.schedule.end()
        for unit in self.units:
            if unit.state is State.FETCHING:
                unit.free()

    # -- forward

    def _pre_forward(self, units: list[Unit], module: nn.Module, args: tuple, kwargs: dict) -> None:
        recomputing = in_backward()
        if not self._in_pass and torch.is_grad_enabled():
            self._begin_pass("part")  # of the model is called, without the root
            self._awaited += 1
        for unit in units:
            if recomputing and unit in self._in_backward:
                continue
            self._acquire(unit)
            if recomputing:
                self._in_backward.add(unit)
            elif self._training and self._backwards == 0:
                self._want_gradient.update((unit, i) for i in range(len(unit.params)))
            if torch.is_grad_enabled() and (unit.shared or not unit.trainable):
                inputs = list(tensors_with_grad((args, kwargs)))
                if inputs:
                    register_multi_grad_hook(inputs, partial(self._inputs_done, unit), mode="all")

    def _read_outside(self, unit: Unit, param: nn.Parameter, func: Callable) -> None:
        """A function needs the values of a sharded parameter. Between passes it sees NaN: a rank may read alone."""
        if not self._in_pass:
            return
        if self._training and not in_backward() and func is not torch.Tensor.detach:
            self._want_gradient.add((unit, unit.index[param]))
        self._hold_to_end(unit)

    def _hold_to_end(self, unit: Unit) -> None:
        if torch.is_grad_enabled():
            self._read_elsewhere[unit] = None
        if unit not in self._held_to_end:
            self._acquire(unit)
            self._held_to_end.add(unit)

    def _hold_returned(self, units: list[Unit], output: object) -> None:
        """Hold the units whose values `output` holds: a module may return a parameter or a view of one."""
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(output)}
        for unit in units:
            if unit.full.untyped_storage().data_ptr() in storages:
                self._hold_to_end(unit)

    def _post_forward(self, units: list[Unit], module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        if not in_backward():
            self._hold_returned(units, output)
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

    def _backward_begins(self, *_: object) -> None:
        """The first sign of a backward: of an output of the root, of a module, or a parameter's gradient."""
        if not self._backward_is_open:
            self._backward_is_open = self._in_pass = True
            self._has_gradients = False
            for unit in self._read_elsewhere:
                self._hold_to_end(unit)
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)

    def _pre_backward(self, units: list[Unit], grads: tuple) -> None:
        self._backward_begins()
        for unit in units:
            complete = not unit.shared and len(self._arrived[unit]) == len(unit.params)
            if not complete and unit not in self._in_backward:
                self._in_backward.add(unit)
                self._acquire(unit)

    def _inputs_done(self, unit: Unit, grads: Sequence[torch.Tensor | None]) -> None:
        self._leave_backward(unit)

    def gradient_ready(self, unit: Unit, index: int) -> None:
        """The gradient of the unit's parameter number `index` is complete."""
        self._backward_begins()
        if not self._has_gradients:
            self._has_gradients = True
            self.gradients_begin()
        self.reducer.collect(unit, index)
        self._want_gradient.discard((unit, index))
        arrived = self._arrived[unit]
        arrived.add(index)
        if len(arrived) == len(unit.params):
            if not unit.shared:
                self._leave_backward(unit)
            self._complete[unit] = None
            self._start_reductions()

    def _start_reductions(self) -> None:
        while self._started < len(self._order) and self._order[self._started] in self._complete:
            self.reducer.reduce(self._order[self._started])
            self._started += 1

    def _leave_backward(self, unit: Unit) -> None:
        if unit in self._in_backward:
            self._in_backward.remove(unit)
            self._leave(unit)

    def finish_backward(self) -> None:
        """Release what is still held and reduce what is not reduced yet: the same units, in order, on every rank."""
        self._backward_is_open = False
        for unit in list(self._in_backward):
            self._leave_backward(unit)
        if not self.ignore_unused:
            self._refuse_unused()
        again = [unit for unit in self._order[: self._started] if self.reducer.has_pending(unit)]
        for unit in self._order[self._started :] + again:
            self.reducer.reduce(unit)
        self._agree_on_order()
        self.reducer.drain()
        self.reducer.backwards += 1
        self._awaited = max(0, self._awaited - 1)
        if not self._awaited:
            self._warn_of_lost_gradients()
        self._end_pass()

    def _warn_of_lost_gradients(self) -> None:
        """Name, once, the trainable parameters that a training forward read and that no backward gave a gradient."""
        wanting = ((unit, unit.param_names[i]) for unit, i in self._want_gradient if unit.params[i].requires_grad)
        names = sorted({name for unit, name in wanting if unit.trainable} - self._without_gradient)
        self._without_gradient.update(names)
        if names:
            logger.warning(
                "a training forward read %s%s, but backward gave no gradient: is the result unused or detached?",
                ", ".join(map(repr, names[:5])),
                f" and {len(names) - 5} more" * (len(names) > 5),
            )

    def _refuse_unused(self) -> None:
        for unit in self._order:
            for i, name in enumerate(unit.param_names):
                if unit.params[i].requires_grad and i not in self._arrived[unit]:
                    raise UsageError(
                        f"parameter {name!r} got no gradient in this backward, and "
                        "zero_optimization.ignore_unused_parameters is false: set it to true, or freeze the parameter"
                    )

    def _agree_on_order(self) -> None:
        """Take over rank 0's order of completion after backward number 1, 2, 4, 8, ..."""
        self._backwards += 1
        if self.comm.world_size > 1 and self._backwards & (self._backwards - 1) == 0:
            units = [*self._complete, *(unit for unit in self._order if unit not in self._complete)]
            order = torch.tensor([self.index[unit] for unit in units], device=self.comm.device)
            self.comm.broadcast(order, src=0)
            self._order = [self.units[i] for i in order.tolist()]
        self._clear_order()

    def _clear_order(self) -> None:
        self._complete.clear()
        self._started = 0
        for arrived in self._arrived.values():
            arrived.clear()

    # -- gathering by the schedule

    def _acquire(self, unit: Unit) -> None:
        if unit.persistent:
            return
        self.comm.watchdog.position = unit
        self.comm.clock.progress.advance(len(self.units))
        self.schedule.visit(self.index[unit])
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
                # Several ranks must decide alike, so there it is waited for.
                if unit.is_late and self.comm.world_size == 1:
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
