"""Module and autograd hooks: they follow a training step and call the three policies.

    zero/gathering.py   what to unshard, and when to reshard
    zero/reduction.py   which reduction may start
    zero/reads.py       parameters that are read outside of their modules

This file knows nothing of transfers, of memory or of the optimizer.

[Note: life of a unit in a training step]
    forward of a module    unshard its units -> the module runs -> release them
    backward of its output unshard them again (autograd is about to run the module backwards)
    its last gradient      release; the reduction may start

Every use of a trainable parameter lies before the moment its gradient is complete. So a unit that has all of its
gradients is not needed any more. Tied units get theirs only after the last owner, and frozen ones never. Both are
released when the gradients of the call's inputs are complete. Units still unsharded at the end of backward are released
then.

Activation checkpointing runs forward code again inside of backward. If it runs a hooked module again, the unit
unsharded there stays so for the backward that follows. If it runs inside of the hooked module (as in transformers), the
unit was unsharded before. Autograd's graph does not tell which gradients will come, since reentrant checkpointing makes
graphs on the way. So a unit with a parameter that got no gradient stays unsharded to the end of backward.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from zero.errors import UsageError
from zero.gathering import Gathering
from zero.reads import MissingGradients, OutsideReads, tensors_with_grad
from zero.reduction import ReductionOrder
from zero.unit import Unit

logger = logging.getLogger("zero")


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _gradient_ready(hooks: weakref.ref[ModuleHooks], number: int, index: int, param: nn.Parameter) -> None:
    """The parameter's gradient is complete. This hook owns neither `ModuleHooks` nor the unit.

    Python's garbage collector does not see the hooks that autograd keeps. A hook that owned them would keep them alive.
    """
    # Autograd also calls this if a function returned None for the parameter: then there is no gradient.
    if param.grad is not None and (found := hooks()) is not None:
        found.gradient_ready(found.units[number], index)


class ModuleHooks:
    """Installs and serves the hooks of one engine's model.

    Args: model: the root module; units: all of its units; gathering, reductions: the policies. `last_micro_step` says
    whether the parameters change before the next forward; `gradients_begin` is called at the first gradient of each
    backward. Unless `ignore_unused`, a trainable parameter without a gradient is an error.

    Attributes: forward_hooks, backward_hooks: the handles of what is installed. part: the part of the model that runs
    next, if it runs in parts (`zero.pipeline`), else None; absent: units that get no gradients in the next backward.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        gathering: Gathering,
        reductions: ReductionOrder,
        last_micro_step: Callable[[], bool],
        gradients_begin: Callable[[], None],
        ignore_unused: bool = True,
    ):
        self.module, self.units = model, list(units)
        self._gathering, self._reductions, self._reads = gathering, reductions, OutsideReads(gathering)
        self._missing, self._ignore_unused = MissingGradients(), ignore_unused
        self._last_micro_step, self._gradients_begin = last_micro_step, gradients_begin
        # Units that are unsharded for the backward that runs, or that will follow.
        self._in_backward: set[Unit] = set()
        # Calls of the root module under way: its forward may call it again.
        self._depth = 0
        # From the first call of a module to the end of backward, or of a forward without gradients.
        self._in_pass = self._training = False
        # Forwards whose backward has not ended.
        self._awaited = 0
        # Until the first backward has ended: every parameter of a used unit must get a gradient, or is named in a
        # warning. Later an expert may get none.
        self._is_first = True
        self._unfrozen: set[Unit] = set()
        self._backward_is_open = self._has_gradients = False
        self.part: Hashable = None
        self.absent: Collection[Unit] = frozenset()
        self.forward_hooks: list = []
        self.backward_hooks: list = []
        self.install()

    # -- installation

    def install(self) -> None:
        """Put the hooks on the model; after `remove`, put them on again."""
        # torch.compile must not trace them: a module may be compiled with its hooks (`nn.Module.compile`).
        opaque = torch.compiler.disable
        self.forward_hooks.append(self.module.register_forward_pre_hook(opaque(self._root_pre_forward)))
        per_module: dict[nn.Module, list[Unit]] = {}
        for unit in self.units:
            for module in () if unit.persistent else unit.modules:
                per_module.setdefault(module, []).append(unit)
        for module, units in per_module.items():
            before, after = opaque(partial(self._pre_forward, units)), opaque(partial(self._post_forward, units))
            self.forward_hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self.forward_hooks.append(module.register_forward_hook(after, with_kwargs=True))
        # Registered last, so that it runs after the hooks of units that the root module itself owns.
        self.forward_hooks.append(self.module.register_forward_hook(opaque(self._root_post_forward), always_call=True))
        for number, unit in enumerate(self.units):
            if unit.trainable:
                for i, param in enumerate(unit.params):
                    hook = partial(_gradient_ready, weakref.ref(self), number, i)
                    self.backward_hooks.append(param.register_post_accumulate_grad_hook(hook))
            if not unit.persistent:
                unit.watch_reads(opaque(partial(self._read_outside, unit)))

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in [*self.forward_hooks, *self.backward_hooks]:
            handle.remove()
        self.forward_hooks.clear()
        self.backward_hooks.clear()
        for unit in self.units:
            unit.watch_reads(None)

    # -- passes

    def _root_pre_forward(self, module: nn.Module, args: tuple) -> None:
        if in_backward():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._release_modules()
        if not self._awaited:
            self._release_reads()
        self._begin_pass(("train again" if self._awaited else "train") if torch.is_grad_enabled() else "infer")

    def _begin_pass(self, name: str) -> None:
        self._in_pass, self._training = True, torch.is_grad_enabled()
        if self._training:
            self._warn_of_unfrozen()
        self._record(name)

    def _record(self, name: str) -> None:
        kind = (name, self.module.training, self.part)
        self._gathering.begin_pass(kind, wraps=not self._training or not self._last_micro_step())

    def _warn_of_unfrozen(self) -> None:
        for unit in self.units:
            if not unit.trainable and unit not in self._unfrozen and any(param.requires_grad for param in unit.params):
                self._unfrozen.add(unit)
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
        """Release the units of a forward that had no backward, or that raised an exception."""
        self._release_modules()
        self._release_reads()
        self._awaited = 0
        self._in_pass = False

    def _release_modules(self) -> None:
        self._gathering.release_all_but(self._reads.held)
        self._in_backward.clear()
        self._reductions.clear()
        self._backward_is_open = False

    def _release_reads(self) -> None:
        self._reads.release()
        self._missing.clear()

    def _end_pass(self) -> None:
        if not self._awaited:
            self._release_reads()
            self._in_pass = False
        self._gathering.end_pass()

    # -- forward

    def _pre_forward(self, units: list[Unit], module: nn.Module, args: tuple, kwargs: dict) -> None:
        recomputing = in_backward()
        if not self._in_pass and torch.is_grad_enabled():
            self._begin_pass("part")  # of the model is called, without the root
            self._awaited += 1
        for unit in units:
            if recomputing and unit in self._in_backward:
                continue
            self._gathering.unshard(unit)
            if recomputing:
                self._in_backward.add(unit)
            elif self._training and self._is_first:
                for i in range(len(unit.params)):
                    self._missing.was_read(unit, i)
            if torch.is_grad_enabled() and (unit.shared or not unit.trainable):
                inputs = list(tensors_with_grad((args, kwargs)))
                if inputs:
                    register_multi_grad_hook(inputs, partial(self._inputs_done, unit), mode="all")

    def _read_outside(self, unit: Unit, param: nn.Parameter, func: Callable) -> None:
        if not self._in_pass:
            return
        if self._training and not in_backward() and func is not torch.Tensor.detach:
            self._missing.was_read(unit, unit.index[param])
        self._reads.hold(unit)

    def _post_forward(self, units: list[Unit], module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        if not in_backward():
            self._reads.hold_returned(units, output)
            for unit in units:
                self._gathering.release(unit)
        # The backward of an embedding needs its indices, not its weight.
        if not torch.is_grad_enabled() or isinstance(module, nn.Embedding):
            return
        passed_through = {id(tensor) for tensor in tensors_with_grad((args, kwargs))}
        for tensor in tensors_with_grad(output):
            if tensor.grad_fn is not None and id(tensor) not in passed_through:
                # The hook is on the node, not on the tensor. The tensor is also the next module's input, and hooks of
                # tensors run first. So the next module's units are released before these are unsharded.
                tensor.grad_fn.register_prehook(partial(self._pre_backward, units))

    # -- backward

    def _backward_begins(self, *_: object) -> None:
        """Called at each possible start of a backward: a gradient of the root's output, a module's or a parameter's."""
        if not self._backward_is_open:
            self._backward_is_open = self._in_pass = True
            self._has_gradients = False
            if self._awaited > 1 or not self._gathering.in_pass:  # it belongs to an earlier forward than the last one
                self._gathering.end_pass()
                self._record("backward")
            self._reductions.begin(self.absent)
            self._reads.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _pre_backward(self, units: list[Unit], grads: tuple) -> None:
        self._backward_begins()
        for unit in units:
            complete = not unit.shared and self._reductions.is_complete(unit)
            if not complete and unit not in self._in_backward:
                self._in_backward.add(unit)
                self._gathering.unshard(unit)

    def _inputs_done(self, unit: Unit, grads: Sequence[torch.Tensor | None]) -> None:
        self._release_from_backward(unit)

    def gradient_ready(self, unit: Unit, index: int) -> None:
        """The gradient of the unit's parameter number `index` is complete."""
        self._backward_begins()
        if not self._has_gradients:
            self._has_gradients = True
            self._gradients_begin()
        self._missing.has_gradient(unit, index)
        if self._reductions.collect(unit, index):
            if not unit.shared:
                self._release_from_backward(unit)
            self._reductions.complete(unit)

    def _release_from_backward(self, unit: Unit) -> None:
        if unit in self._in_backward:
            self._in_backward.remove(unit)
            self._gathering.release(unit)

    def _finish_backward(self) -> None:
        """Autograd has run the whole graph."""
        self._backward_is_open = False
        for unit in list(self._in_backward):
            self._release_from_backward(unit)
        if not self._ignore_unused:
            self._refuse_unused()
        self._is_first = False
        self._reductions.finish()
        self._awaited = max(0, self._awaited - 1)
        if not self._awaited:
            self._missing.warn()
        self._end_pass()

    def _refuse_unused(self) -> None:
        name = next(self._reductions.missing(), None)
        if name is not None:
            raise UsageError(
                f"parameter {name!r} got no gradient in this backward, and "
                "zero_optimization.ignore_unused_parameters is false: set it to true, or freeze the parameter"
            )
