"""Module and autograd hooks: they follow a training step and call the two policies.

    zero/core/gathering.py   what to unshard, and when to reshard
    zero/core/reduction.py   which reduction may start

[Note: life of a group in a training step]
    forward of a module    unshard its groups -> the module runs -> release them
    backward of its output unshard them again (autograd is about to run the module backwards)
    its last gradient      the reduction may start, and memory be freed early
    backward of an output  of an earlier module: release

Autograd numbers operations as they are created, and runs their backwards from the highest number
down. So once it comes to a number from before a call, the call's backward is over, and its groups
are released: on all ranks at the same moment, also where a rank gets no gradient for an expert that
it did not use. Groups still unsharded at the end of backward are released then.

Activation checkpointing runs forward code again inside backward. If it runs a hooked module again,
the group unsharded there stays so for the backward that follows. If it runs inside the hooked
module (as in transformers), the group was unsharded before. Reentrant checkpointing runs a
backward inside the backward. The groups of that one are released at its end, because a second
recomputation must gather them on all ranks, whichever gradients they have."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph
from torch._C._autograd import _get_sequence_nr as next_operation
from torch.autograd import forward_ad
from torch.autograd.graph import Node, get_gradient_edge

from zero.core.gathering import Gathering, OutsideReads
from zero.core.micro_batches import MicroBatches
from zero.core.nests import groups_shown_by, kept_by, tensors_in, tensors_with_grad, with_base
from zero.core.param_group import ParamGroup, State, owning_group
from zero.core.reduction import ReductionOrder
from zero.core.taken_gradients import StandIns
from zero.errors import UsageError

logger = logging.getLogger("zero")


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _gradient_ready(
    hooks: weakref.ref[ModuleHooks], number: int, index: int, param: nn.Parameter
) -> None:
    """The parameter's gradient is complete. This hook owns neither `ModuleHooks` nor the group.

    Python's garbage collector does not see the hooks that autograd keeps. A hook that owned them
    would keep them alive."""
    # Autograd also calls this if a function returned None for the parameter: then there is no
    # gradient.
    if param.grad is not None and (found := hooks()) is not None:
        found.gradient_ready(found.groups[number], index)


class _Hook:
    """A hook on the engine's model. A deep copy of the model is an ordinary model, whose hook does
    nothing.
    """

    def __init__(self, hook: Callable[..., Any]):
        # torch.compile must not trace it: a module may be compiled with its hooks
        # (`nn.Module.compile`).
        self._hook = torch.compiler.disable(partial(_call_outside_of_transforms, hook))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hook(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Callable[..., None]:
        return _do_nothing


def _call_outside_of_transforms(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Inside torch.func.vmap the engine's own tensors are not batched."""
    with torch._C._DisableFuncTorch():
        return function(*args, **kwargs)


def _is_of_script(hook: Any) -> bool:
    """Not one of this package's: of a parameter that is divided over ranks, the hook takes this
    rank's part of the gradient.
    """
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return not module.startswith("zero.")


def _do_nothing(*args: object, **kwargs: object) -> None: ...


@dataclass(eq=False, repr=False)
class _Backward:
    """The backward that runs.

    Attributes:
        task: its number in autograd, where backwards inside of it have others.
        is_derivative: it gives the parameters no gradients.
        has_gradients: the first gradient of a parameter has arrived.
        nested: the groups that are unsharded for each backward inside of it, by its task.
    """

    task: int = field(default_factory=torch._C._current_graph_task_id)
    is_derivative: bool = False
    has_gradients: bool = False
    nested: dict[int, set[ParamGroup]] = field(default_factory=dict)

    def is_nested(self, group: ParamGroup) -> bool:
        return any(group in used for used in self.nested.values())


@dataclass(eq=False, repr=False)
class ModuleHooks:
    """Installs and serves the hooks of one engine's model.

    Args:
        module: the root module.
        groups: all of its groups.
        gathering, reductions: the policies.
        ignore_unused: a trainable parameter without a gradient is not an error.

    Attributes:
        forward_hooks, backward_hooks: the handles of what is installed.
        recorder: records forwards and backwards.
    """

    module: nn.Module
    groups: Sequence[ParamGroup]
    _gathering: Gathering
    _reductions: ReductionOrder
    _micro_batches: MicroBatches
    ignore_unused: bool = True

    def __post_init__(self) -> None:
        self.recorder = self._gathering.recorder
        self._reads = OutsideReads(self._gathering)
        # Groups that are unsharded for a backward, and the number of the first operation of the
        # call whose backward has begun; None if it is still to follow.
        self._in_backward: dict[ParamGroup, int | None] = {}
        # Calls under way, with the numbers of their first operations.
        self._calls: list[tuple[list[ParamGroup], int]] = []
        # Each thread numbers its operations itself, so numbers of several cannot be compared.
        self._thread = threading.current_thread()
        self._mixes_threads = False
        # Calls of the root module under way: its forward may call it again.
        self._depth = 0
        # From the first call of a module to the end of backward, or of a forward without gradients.
        self._in_pass = self._training = False
        # Forwards whose backward has not ended.
        self._awaited = 0
        self._unfrozen: set[ParamGroup] = set()
        self._backward: _Backward | None = None
        # Modules whose attributes were searched for views of their own weights, or of all weights.
        self._searched: set[tuple[nn.Module, bool]] = set()
        # Between some backwards and the next backward or step.
        self._stand_ins = StandIns()
        # Groups that are unsharded while their gradients are computed, if their modules are called
        # and return all results. A script may also use their weights in other ways.
        self._called: set[ParamGroup] = set()
        self._hooked = {
            group
            for group in self.groups
            if group.modules
            and not (group.persistent or group.shared)
            and all(type(module).forward is not nn.Embedding.forward for module in group.modules)
        }
        self._part: Hashable = None
        self._absent: Collection[ParamGroup] = frozenset()
        self.forward_hooks: list = []
        self.backward_hooks: list = []
        self._warn_of_hooks()
        self.install()

    # -- installation

    def install(self) -> None:
        """Put the hooks on the model; after `remove`, put them on again."""

        begins, ends = _Hook(self._root_pre_forward), _Hook(self._root_post_forward)
        self.forward_hooks.append(self.module.register_forward_pre_hook(begins))
        per_module: dict[nn.Module, list[ParamGroup]] = {}
        for group in self.groups:
            for module in () if group.persistent else group.modules:
                per_module.setdefault(module, []).append(group)
        for module, groups in per_module.items():
            before = _Hook(partial(self._pre_forward, groups))
            after = _Hook(partial(self._post_forward, groups))
            self.forward_hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self.forward_hooks.append(module.register_forward_hook(after, with_kwargs=True))
        # Registered last, so that it runs after the hooks of groups that the root module itself
        # owns.
        self.forward_hooks.append(self.module.register_forward_hook(ends, always_call=True))
        self._listen()
        for group in self.groups:
            if not group.persistent:
                group.read_hook = _Hook(partial(self._read_outside, group))
                group.graph_hook = self._reads.hold_for_graph

    def _listen(self) -> None:
        """Take each gradient after the hooks that scripts have put on its parameter so far."""
        former = iter(self.backward_hooks)
        handles = []
        for number, group in enumerate(self.groups):
            for i, param in enumerate(group.params if group.trainable else ()):
                handle = next(former, None)
                if handle is None or param.requires_grad:  # torch takes no hook of a frozen one
                    if handle is not None:
                        handle.remove()
                    hook = partial(_gradient_ready, weakref.ref(self), number, i)
                    handle = param.register_post_accumulate_grad_hook(hook)
                handles.append(handle)
        self.backward_hooks[:] = handles

    def remove(self) -> None:
        """Take all hooks off the model."""
        self._stand_ins.take_back()
        for handle in [*self.forward_hooks, *self.backward_hooks]:
            handle.remove()
        self.forward_hooks.clear()
        self.backward_hooks.clear()
        for group in self.groups:
            group.read_hook = group.graph_hook = None

    # -- passes

    def run_part(self, part: Hashable, absent: Collection[ParamGroup]) -> None:
        """The next forward or backward is that of a part of the model, if it runs in parts
        (`zero.parallel.pipeline`). Groups in `absent` get no gradients in it.
        """
        self._part, self._absent = part, absent

    def _root_pre_forward(self, module: nn.Module, args: tuple) -> None:
        if in_backward():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._release_modules()
        if not self._awaited:
            self._release_reads()
        name = "train again" if self._awaited else "train"
        self._begin_pass(name if torch.is_grad_enabled() else "infer")

    def _begin_pass(self, name: str) -> None:
        self._in_pass = True
        if not self._awaited:
            self._thread, self._mixes_threads = threading.current_thread(), False
        self._training = torch.is_grad_enabled()
        if self._training:
            if self._stand_ins.backwards == 0:
                self._listen()
            self._warn_of_unfrozen()
        self._record(name)

    def _record(self, name: str) -> None:
        kind = (name, self.module.training, self._part)
        params_change = self._training and self._micro_batches.is_last
        self._gathering.begin_pass(kind, wraps=not params_change, trains=self._training)

    def _warn_of_hooks(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # sharded parameters look at each access
            hooked = [
                name
                for group in self.groups
                for name, param in zip(group.param_names, group.params, strict=True)
                if any(map(_is_of_script, (param._post_accumulate_grad_hooks or {}).values()))
            ]
        if hooked and (self._micro_batches.steps > 1 or not self._micro_batches.managed):
            logger.warning(
                "%s: a hook of register_post_accumulate_grad_hook gets the gradient of each "
                "micro-batch alone, and not, as in plain torch, the sum so far: use "
                "register_hook, or change gradients before the step with "
                "zero.fragments.safe_set_full_grad",
                ", ".join(hooked[:5]) + " and others" * (len(hooked) > 5),
            )

    def _warn_of_unfrozen(self) -> None:
        for group in self.groups:
            if group.trainable or group in self._unfrozen:
                continue
            if any(param.requires_grad for param in group.params):
                self._unfrozen.add(group)
                logger.warning(
                    "%s was frozen when the engine was created, and stays frozen: set "
                    "requires_grad before initialize()",
                    group,
                )

    def _root_post_forward(self, module: nn.Module, args: tuple, output: object) -> None:
        """Also called, with None, after an exception in forward."""
        if in_backward():
            return
        self._depth = max(0, self._depth - 1)
        if self._depth > 0 or (output is None and self.recorder.is_recording):
            return  # in the second case, the rest is replayed after the exception
        # A module may keep views of another module's weights.
        sharded = [group for group in self.groups if not group.persistent]
        self._find_views(module, sharded, whole_model=True)
        records = torch.is_grad_enabled()
        with_grad = list(tensors_with_grad(output, in_objects=True)) if records else []
        if not with_grad:
            self._end_pass()
            return
        self._awaited += 1
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in with_grad:
                tensor.register_hook(self._backward_begins)

    def forget_broken_pass(self) -> None:
        """Release the groups of a forward that had no backward, or that raised an exception."""
        self._stand_ins.take_back()
        self._release_modules()
        self._release_reads()
        self._awaited = 0
        self._in_pass = False

    def replay_rest(self) -> None:
        """A forward or backward has raised an exception, perhaps on this rank alone: start what the
        other ranks start until its end. The results are of no use.
        """
        self.recorder.replay_rest()
        if self._reductions.is_open:  # in the first backward, which has no recording
            self._reductions.finish()
        # The replay has ended all uses.
        self._in_backward.clear()
        self._reads.held.clear()
        self.forget_broken_pass()

    def _release_modules(self) -> None:
        if self._gathering.uses:
            self._gathering.release_all_but(self._reads.held)
        self._in_backward.clear()
        self._calls.clear()
        self._reductions.clear()
        self._backward = None

    def _release_reads(self) -> None:
        self._called.clear()
        if self._reads.held:
            self._reads.release()

    def _end_pass(self, has_trained: bool = False) -> None:
        if not self._awaited:
            self._release_reads()
            self._in_pass = False
            if has_trained:
                self._reads.end_backwards()
        self._gathering.end_pass(has_trained)

    # -- forward

    def _pre_forward(
        self, groups: list[ParamGroup], module: nn.Module, args: tuple, kwargs: dict
    ) -> None:
        recomputing = in_backward()
        if not self._in_pass and torch.is_grad_enabled():
            self._begin_pass("part")  # of the model is called, without the root
            self._awaited += 1
        if recomputing:
            self._leave_calls(groups)
        else:
            self._mixes_threads |= threading.current_thread() is not self._thread
            self._calls.append((groups, next_operation()))
        for group in groups:
            if recomputing and group in self._in_backward:
                continue
            self._gathering.unshard(group)
            if recomputing:
                self._in_backward[group] = None

    def _read_outside(self, group: ParamGroup, param: nn.Parameter, func: Callable) -> None:
        if self._in_pass:
            self._reads.hold(group)

    def _post_forward(
        self, groups: list[ParamGroup], module: nn.Module, args: tuple, kwargs: dict, output: object
    ) -> None:
        # Its results may be computed later, with the weights.
        keeps = getattr(module.forward, "keeps_weights", False) and torch.is_grad_enabled()
        start = 0  # of a call in backward, whose groups are released at the end of that
        if not in_backward():
            call, start = self._calls.pop()
            while call is not groups:  # a call inside of this one ended in an exception
                call, start = self._calls.pop()
            self._find_views(module, groups)
            returned = groups_shown_by(output, groups)
            for group in groups:
                if group.has_aliases or group in returned or keeps:
                    self._reads.hold(group)
                self._gathering.release(group)
        # The backward of an embedding needs its indices, not its weight.
        if keeps or not torch.is_grad_enabled() or type(module).forward is nn.Embedding.forward:
            return
        passed_through = {
            id(each) for tensor in tensors_with_grad((args, kwargs)) for each in with_base(tensor)
        }
        # A cache of all blocks goes through each of them.
        objects = {id(value) for value in (*args, *kwargs.values())}
        is_hooked = False
        for tensor in tensors_with_grad(output, in_objects=True, known=objects):
            for each in with_base(tensor):
                if each.grad_fn is None or id(each) in passed_through:
                    continue
                each.grad_fn.register_prehook(partial(self._pre_backward, groups, start))
                is_hooked = True
        self._called.update(self._hooked.intersection(groups))
        may_follow = passed_through or any(group.trainable for group in groups)
        if (may_follow and not is_hooked) or forward_ad._current_level >= 0:
            # The result is kept on the module, or written into an argument; or the graph gets
            # forward-mode derivatives, whose nodes do not show up in any output.
            for group in groups:
                self._reads.hold(group)

    def _find_views(
        self, module: nn.Module, groups: Sequence[ParamGroup], whole_model: bool = False
    ) -> None:
        """After a module's first call, note which of `groups` have weights that it keeps views
        of.
        """
        if (module, whole_model) in self._searched:
            return
        self._searched.add((module, whole_model))
        # Parameters that are also in a list, like those of an LSTM, and codes in buffers are not
        # views. Looking at the storage of codes would leave them gathered.
        views = [each for each in tensors_in(kept_by(module)) if owning_group(each) is None]
        for group in groups_shown_by(views, groups):
            group.has_aliases = True

    # -- backward

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        """A gradient of the root's output has arrived."""
        self._running_backward()

    def _running_backward(self) -> _Backward:
        """The backward that runs. Called at each of its possible starts: a gradient of the root's
        output, a module's or a parameter's.
        """
        if self._backward is not None:
            return self._backward
        self._backward = begun = _Backward()
        self._reads.begin_backward()
        begun.is_derivative = _asks_for_other_gradients(self._trained_params())
        if begun.is_derivative:
            finish = partial(self._finish_derivative, self._in_pass, keeps_graph())
            self._in_pass = True
        else:
            finish = self._finish_backward
            self._gradients_begin()
        torch.autograd.Variable._execution_engine.queue_callback(finish)
        return begun

    def _trained_params(self) -> Iterator[nn.Parameter]:
        trained = (group for group in self.groups if group.trainable)
        return (param for group in trained for param in group.params)

    def _gradients_begin(self) -> None:
        self._stand_ins.take_back()
        self._in_pass = True
        # It may belong to an earlier forward than the last one.
        if self._awaited > 1 or not self._gathering.in_pass:
            self._gathering.end_pass()
            self._record("backward")
        self._reductions.begin(self._absent)
        self.recorder.done.append((self._gradients_begin, ()))

    def _pre_backward(self, groups: list[ParamGroup], start: int, grads: tuple) -> None:
        """The backward of a call that uses `groups` begins. `start`: of its first operation."""
        backward, task = self._running_backward(), torch._C._current_graph_task_id()
        is_nested = task != backward.task
        if is_nested and not backward.is_derivative and task not in backward.nested:
            backward.nested[task] = set()
            finish = partial(self._finish_nested, backward.nested, task)
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        self._leave_calls(groups)
        for group in groups:
            is_shown = group in self._in_backward
            # This call may be a part of another one of the same group: a recursion, for example.
            around = self._in_backward.get(group)
            if around is None:
                self._in_backward[group] = start
                if is_nested and not backward.is_derivative:
                    backward.nested[task].add(group)
            elif not is_nested:
                self._in_backward[group] = min(start, around)
            if not is_shown:
                self._gathering.unshard(group)
            if torch.is_grad_enabled():
                # No module's call shows when the derivative of this derivative needs the weights.
                self._reads.hold(group)

    def _leave_calls(self, used: Collection[ParamGroup]) -> None:
        """Release the groups of calls whose backward is over, but not those in `used`."""
        backward, node = self._running_backward(), torch._C._current_autograd_node()
        # A backward inside the backward has other numbers.
        is_other = torch._C._current_graph_task_id() != backward.task
        if node is None or is_other or self._mixes_threads:
            return
        number = node._sequence_nr()
        for group, start in reversed(list(self._in_backward.items())):
            is_over = start is not None and number < start and not backward.is_nested(group)
            if is_over and group not in used:
                self._release_from_backward(group)

    def gradient_ready(self, group: ParamGroup, index: int) -> None:
        """The gradient of the group's parameter number `index` is complete."""
        backward = self._running_backward()
        if backward.is_derivative:
            raise UsageError(
                f"parameter {group.param_names[index]!r} got a gradient from a backward inside of "
                "torch.autograd.grad, which asks for other gradients: run the backward of the loss "
                "instead"
            )
        if torch._C._current_graph_task_id() != backward.task:
            self._reductions.has_nested_backward = True
        if torch.is_grad_enabled():
            raise UsageError(
                "backward(create_graph=True) keeps a graph in each parameter's `.grad`, which the "
                "engine takes away: use torch.autograd.grad(loss, parameters, create_graph=True), "
                "and then call backward without create_graph"
            )
        if not backward.has_gradients:
            backward.has_gradients = True
            self._micro_batches.gradients_begin()
        if group in self._called and group.state is not State.UNSHARDED:
            modules = ", ".join(sorted({type(module).__name__ for module in group.modules}))
            raise UsageError(
                f"the gradient of {group.param_names[index]!r} was computed while its weights were "
                f"already resharded: the backward needs a result of {modules} that its forward did "
                "not return. Return it, alone or in a tuple, list, dict or dataclass, instead of "
                "only keeping it on the module"
            )
        if self._reductions.collect(group, index):
            # With backwards inside of backwards, a second gradient may follow.
            is_last = not (group.shared or self._reductions.has_nested_backward)
            if is_last and group in self._in_backward:
                self._gathering.free_early(group)
            self._reductions.complete(group)
            self.recorder.done.append((self._reductions.complete, (group,)))

    def leave_stand_ins(self) -> None:
        """Notice work on the gradients of the last backward, if it is one of those to watch."""
        self._stand_ins.leave(self._trained_params())

    def _release_from_backward(self, group: ParamGroup) -> None:
        if group in self._in_backward:
            del self._in_backward[group]
            self._gathering.release(group)
            if self._reductions.is_open and group.trainable:
                self._reductions.leave(group)

    def _finish_nested(self, nested: dict[int, set[ParamGroup]], task: int) -> None:
        """A backward inside the backward is over, on all ranks. Its groups may be unsharded again
        for another one, even if a rank has all of their gradients.
        """
        for group in sorted(nested.pop(task, ()), key=lambda group: group.serial):
            self._release_from_backward(group)

    def _close_backward(self) -> None:
        """Autograd has run the whole graph."""
        self._backward = None
        for group in reversed(list(self._in_backward)):
            self._release_from_backward(group)

    def _finish_derivative(self, was_in_pass: bool, graph_is_kept: bool) -> None:
        """The script has computed a derivative itself. Forwards that await a backward still do,
        unless their graph is gone.
        """
        self._close_backward()
        self._in_pass = was_in_pass
        if self._awaited and not self._depth and not graph_is_kept:
            self._awaited -= 1
            self._end_pass(has_trained=True)

    def _finish_backward(self) -> None:
        self._close_backward()
        if not self.ignore_unused and (name := next(self._reductions.missing(), None)) is not None:
            raise UsageError(
                f"parameter {name!r} got no gradient in this backward, and "
                "zero_optimization.ignore_unused_parameters is false: set it to true, or freeze "
                "the parameter"
            )
        is_last = self._micro_batches.is_last or not self._micro_batches.managed
        self._stand_ins.end_backward(is_last)
        if not self._micro_batches.holds_back:
            self.leave_stand_ins()
        self._reductions.finish()
        self.recorder.done.append((self._reductions.finish, ()))
        self._awaited = max(0, self._awaited - 1)
        self._end_pass(has_trained=True)


# -- what autograd is asked for: `torch.autograd.grad(out, x)` and `out.backward(inputs=[x])` run
# the same hooks as `loss.backward()`, but give the model's parameters no gradient to reduce.


def _asks_for_other_gradients(params: Iterable[torch.Tensor]) -> bool:
    """Whether the backward that calls this from a hook gives no gradient to any of `params`,
    because its caller has named other tensors.

    A backward of a loss that does not depend on `params` is not one of these, because other ranks,
    whose loss does depend on them, rely on this one."""
    is_reached = torch._C._will_engine_execute_node
    try:
        return not (
            any(is_reached(_accumulator(param)) for param in params if param.requires_grad)
            or all(map(is_reached, _leaves(torch._C._current_autograd_node())))
        )
    except RuntimeError:
        # torch does not answer for a leaf whose gradient `torch.autograd.grad` returns.
        return True


def _accumulator(param: torch.Tensor) -> Node:
    """The node that adds to `param.grad`."""
    # Nothing reads the values, and this is not part of what torch.func differentiates.
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableFuncTorch():
        return get_gradient_edge(param).node


def _leaves(root: Node) -> Iterator[Node]:
    """The nodes under `root` that add to the gradients of leaves."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
