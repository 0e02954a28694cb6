"""Repeats a micro-batch that ran out of memory, in smaller parts
(`"on_out_of_memory": "adapt"`).

The script gets the outputs of its forward detached from their graph. Its own backward therefore
ends at these outputs, and yields their gradients: that of the loss, or those of outputs from which
the script computes a loss itself, as TRL does. The engine's backward starts from these gradients,
and can be repeated.

[Note: what a rank does when its memory is full] It frees its activations and replays the
remaining gathers and reductions of the forward or backward, without computing
(`zero/core/replay.py`). After each forward and backward, all ranks report whether theirs failed. If
one did, all of them drop the gradients of the step, make the same changes, and repeat the step's
micro-batches from their inputs and random states. Below stage 3 nothing is gathered, and the
reductions have a fixed order. At stage 3, a rank can only know from an earlier forward and backward
what the others will gather. The first training forward is therefore preceded by a forward and
backward of one sample, which must be recorded alike on all ranks.

[Note: parts of a micro-batch] The loss must be the mean over the micro-batch's labels, or their sum
divided by a number that the script passes. This is tested by comparing the loss of two samples
with the loss of each, also where they have unequal numbers of labels; and the loss of the
micro-batch with those of its halves, if there was enough memory for its forward. Other outputs may
have gradients if they have a row for each sample. The rows of two samples are compared likewise.

[Note: how much is changed] A step that fails again and again costs more than a few samples. Before
the step is repeated, a forward and backward of one sample and one of several show how much memory
is free at their peaks, and so how many samples a part may have. If there is no room for a single
one, the next change is made."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from zero.checkpoint.state import random_states, restore_random_states
from zero.core.layout import LEAF_FLAG
from zero.device import empty_cache, is_accelerator, room
from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.monitor.memory_usage import DEVICE, OPTIMIZER, bytes_by_kind, place_of
from zero.monitor.out_of_memory import add_line, explain, full_memory
from zero.offload.tiers import Tier
from zero.optim.placement import MASTERS, MOMENTS
from zero.slicing.experts import SlicedExperts
from zero.slicing.probe import evaluating

logger = logging.getLogger("zero")

KEY = "on_out_of_memory"
_WRITES = "the forward writes to the model's buffers"
_BESIDE = "the script computes gradients beside those of the forward's outputs"
_NO_ROWS = "the script's loss depends on an output that has no row for each sample"
_FORWARD, _VALUES, _BACKWARD = "forward", "forward without gradients", "backward"
_NOT_THERE = "the memory of the host is full, and activations are on the device"
_NO_MEAN = "its loss is not the mean over its labels"
_NOT_APART = "the outputs of a sample depend on the other samples"
_IGNORED = -100  # labels that transformers' losses do not count
_CACHES = ("cache", "past_key_values")  # names of the argument since transformers 5.24, and before
# Of the memory that is free at the peak: the next batch may be longer, and allocators lose some.
_USED = 0.9

T = TypeVar("T")


class _NotEnough(Exception):
    """Some rank ran out of memory. All ranks raise this; `error` is this rank's own, or None."""

    def __init__(self, error: Exception | None):
        super().__init__()
        self.error = error


@dataclass
class _Call:
    """A forward of the script.

    Attributes:
        run: the engine's own forward.
        shown: what the script has received for its outputs, by their places. The first is the loss.
        outputs: the tensors with a graph in the same places; empty if the call was cut.
    """

    run: Callable[..., Any]
    inputs: tuple[tuple, dict[str, Any]]
    random: object
    buffers: list[tuple[int, int]]
    shown: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of samples in the micro-batch: rows of the first tensor that is no scalar."""
        leaves = tree_flatten(self.inputs)[0]
        sizes = (each.shape[0] for each in leaves if isinstance(each, torch.Tensor) and each.dim())
        return next(sizes, 0)

    def of_rows(self, chosen: slice | list[int]) -> tuple[tuple, dict[str, Any]]:
        """The inputs of some of the samples."""
        rows = self.rows

        def narrowed(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[chosen] if tensor.dim() and tensor.shape[0] == rows else tensor

        return tree_map_only(torch.Tensor, narrowed, self.inputs)

    def run_rows(self, chosen: slice | None = None) -> Any:
        """What the engine's forward returns for some of the samples, or for all."""
        args, kwargs = self.inputs if chosen is None else self.of_rows(chosen)
        return self.run(*args, **kwargs)

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients of the outputs, by their places."""
        found = {place: shown.grad for place, shown in self.shown.items()}
        return {place: grad for place, grad in found.items() if grad is not None}


class Adaptation:
    """Handles running out of memory for one engine. Raises UsageError if the engine cannot repeat a
    micro-batch.
    """

    def __init__(self, engine: ZeroEngine):
        self._engine = engine
        self._parts = self._evaluation_parts = 1
        self._states_on_host = False  # except in a step
        self._is_alone = False
        self._is_checked = self._is_rehearsed = False
        # Forwards that await their backward, and those whose gradients are in the step's sum.
        self._waiting: list[_Call] = []
        self._done: list[_Call] = []
        self._backwards = self._micro_step = 0
        # For a transformers model: whether labels are shifted by one before they are counted.
        loss_name = getattr(getattr(engine.module, "loss_function", None), "__name__", "")
        seq2seq = getattr(getattr(engine.module, "config", None), "is_encoder_decoder", False)
        self._predicts_next = loss_name == "ForCausalLMLoss" and not seq2seq
        self._control = engine.comm.control("adapting to the memory that there is")
        stage = engine.settings.zero_optimization.stage
        self._gathers_with_others = self._control.world_size > 1 and stage == 3
        hindrance = next(_hindrances(engine), None)
        if hindrance and self._control.world_size > 1:
            raise UsageError(
                f'{KEY} "adapt": not with several processes and {hindrance}, because a process '
                'whose memory is full would leave the others waiting. Set it to "explain"'
            )

    def settings(self) -> dict[str, int]:
        """For a checkpoint."""
        return {
            "parts": self._parts,
            "recomputes": int(self._recomputes),
            "max_live": self._engine.schedule.max_live_parameters,
            "states_on_host": int(self._states_on_host),
        }

    def restore(self, settings: dict[str, int]) -> None:
        schedule = self._engine.schedule
        self._parts = settings["parts"]
        if settings["recomputes"] and self._can_recompute:
            self._recompute()
        schedule.max_live_parameters = min(schedule.max_live_parameters, settings["max_live"])
        if settings.get("states_on_host") and is_accelerator(self._engine.comm.device):
            self._move_states(on_host=True)

    # -- what the script calls

    def forward(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        module, reducer = self._engine.module, self._engine.reducer
        if not (torch.is_grad_enabled() or module.training):
            return self._evaluate(_Call(run, (args, kwargs), None, _seen(module)))
        if not (torch.is_grad_enabled() and module.training):
            return run(*args, **kwargs)
        if self._micro_step != self._engine.micro_steps:
            self._micro_step, self._waiting = self._engine.micro_steps, []
        call = _Call(run, (args, kwargs), random_states(self._engine.comm.device), _seen(module))
        if self._gathers_with_others:
            self._rehearse(call)
        done = self._done if reducer.backwards else []
        is_known = not reducer.backwards or self._backwards == reducer.backwards
        dropped: list[_Call] = []
        while True:
            try:
                if dropped:
                    self._repeat(dropped, ends=False)
                    self._backwards, dropped = reducer.backwards, []
                    restore_random_states(call.random, self._engine.comm.device)
                return self._shown(call)
            except _NotEnough as raised:
                error = raised.error
            if not is_known:
                raise _final(error, _BESIDE)
            reducer.clear()
            dropped = list(done)
            self._change([*done, call], error)
            restore_random_states(call.random, self._engine.comm.device)

    def backward(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run `run`, the engine's backward of the loss, which ends at the outputs shown."""
        engine, reducer, waiting = self._engine, self._engine.reducer, self._waiting
        if reducer.backwards == 0:
            self._done, self._backwards = [], 0
        before = reducer.backwards
        result = run()
        calls = [each for each in waiting if each.gradients()]
        if not calls:
            return result  # the script computes its loss itself
        self._waiting = []
        is_known = self._backwards == before == reducer.backwards
        for call in calls:  # logits are large
            call.shown = {place: call.shown[place] for place in call.gradients()}
            call.outputs = {place: call.outputs[place] for place in call.shown if call.outputs}
        after = random_states(engine.comm.device)
        calls_to_repeat = calls if self._parts > 1 else []
        while True:
            try:
                if calls_to_repeat:
                    self._repeat(calls_to_repeat)
                else:
                    self._gradients(calls)
                break
            except _NotEnough as raised:
                error = raised.error
            for call in calls:
                call.outputs = {}
            reducer.clear()
            if not is_known:
                raise _final(error, _BESIDE)
            calls_to_repeat = [*self._done, *calls]
            self._change(calls_to_repeat, error)
        restore_random_states(after, engine.comm.device)
        self._done += calls
        self._backwards = reducer.backwards
        return result

    def step(self, run: Callable[[], None]) -> None:
        """Run `run`, the engine's step, with the optimizer's state on the device.

        Raises UsageError if a backward has ended at the loss and no other call has continued from
        there.
        """
        if any(call.gradients() for call in self._waiting):
            raise UsageError(
                f'{KEY} "adapt": call engine.backward(loss) instead of loss.backward(), which '
                'cannot be repeated; or set it to "explain"'
            )
        if not (self._states_on_host and self._engine.ends_step):
            return run()
        self._move_states(on_host=False)
        run()
        self._move_states(on_host=True)

    def _rehearse(self, call: _Call) -> None:
        """Before the first micro-batch at stage 3, run a forward and backward of one sample. See
        the note.
        """
        engine = self._engine
        if self._waiting:
            raise UsageError(
                f'{KEY} "adapt": at stage 3 with several processes, call backward before the next '
                'forward; or set it to "explain"'
            )
        if self._is_rehearsed:
            return
        self._is_rehearsed = True
        run = lambda: tree_flatten(call.run_rows(slice(1)))[0]  # noqa: E731
        if recomputes := self._can_recompute:  # starts the same gathers, in less memory
            self._recompute()
        with torch.no_grad():
            self._together(_VALUES, run)
        outputs = self._together(_FORWARD, run)[:1]
        if _begins_with_loss(outputs):
            self._run_backward(outputs, [torch.ones_like(outputs[0])])
        if recomputes:
            engine.module.gradient_checkpointing_disable()  # pyright: ignore[reportCallIssue]
        engine.hooks.forget_broken_pass()
        engine.reshard()
        engine.reducer.clear()
        restore_random_states(call.random, engine.comm.device)
        if call.buffers != _seen(engine.module):
            raise UsageError(f'{KEY} "adapt": {_WRITES}; set it to "explain"')
        recorded = self._control.exchange(engine.hooks.recorder.names)
        if any(each != recorded[0] for each in recorded):
            raise UsageError(
                f'{KEY} "adapt": processes go different ways through the model; set it to "explain"'
            )

    def _evaluate(self, call: _Call) -> Any:
        """Run a forward of an evaluation, in parts if memory is not enough for the whole."""
        # Below stage 3 a script may evaluate on some of the ranks.
        self._is_alone = not self._gathers_with_others
        try:
            while True:
                try:
                    if self._evaluation_parts == 1:
                        return self._together(_VALUES, call.run_rows)
                    return tree_unflatten(*self._values(call, self._evaluation_parts))
                except _NotEnough as raised:
                    error = raised.error
                self._cut_evaluation(call, error)
        finally:
            self._is_alone = False

    def _cut_evaluation(self, call: _Call, error: Exception | None) -> None:
        most, why = self._most_rows([call]), ""
        has_labels = any(self._of_ranks(call.inputs[1].get("labels") is not None))
        if most <= self._evaluation_parts:
            why = f"an evaluation of {most} sample(s) is split into as many parts already"
        elif any(call.inputs[1].get(name) is not None for name in _CACHES):
            why = "the forward continues a cache"
        elif has_labels:
            why = self._why_whole([call])
        why = self._of_all(why)
        if not why and has_labels:
            why = self._of_all(self._why_no_sum(call))
        if why:
            raise _final(error, why)
        self._evaluation_parts = min(2 * self._evaluation_parts, most)
        self._tell(f"each batch of an evaluation is now split into {self._evaluation_parts} parts")

    # -- one try

    def _shown(self, call: _Call) -> Any:
        """The outputs of a forward, without their graphs."""
        structure: Any
        leaves, structure = self._values(call, self._parts) if self._parts > 1 else ([], None)
        is_cut = _begins_with_loss(leaves)
        if not is_cut:
            leaves.clear()
            output = self._together(_FORWARD, call.run_rows)
            leaves, structure = tree_flatten(output)
            if not _begins_with_loss(leaves):
                return output
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and (
                leaf.requires_grad or (is_cut and leaf.is_floating_point())
            ):
                call.shown[place] = shown = leaf.detach().requires_grad_()
                if leaf.requires_grad:
                    call.outputs[place] = leaf
                # The Trainer scales the loss in place, which torch forbids for a leaf.
                leaves[place] = shown if shown.dim() else shown.clone()
        self._waiting.append(call)
        return tree_unflatten(leaves, structure)

    def _values(self, call: _Call, parts: int) -> tuple[list[Any], Any]:
        """Return the outputs of a forward in parts, none of which has a graph: the loss if there is
        one, and tensors with as many rows as the micro-batch; None for anything else.
        """
        values: list[Any] = []
        terms: list[torch.Tensor] = []
        structure = None
        with torch.no_grad():
            for chosen, weight in self._cut(call, parts):
                output = self._together(_VALUES, partial(call.run_rows, chosen))
                leaves, structure = tree_flatten(output)
                del output

                def keep() -> None:
                    loss, rows = leaves[0], chosen.stop - chosen.start  # noqa: B023
                    if not values:
                        values.extend(_for_all(leaf, rows, call.rows) for leaf in leaves)  # noqa: B023
                    for value, leaf in zip(values, leaves, strict=True):  # noqa: B023
                        if value is not None:
                            value[chosen] = leaf  # noqa: B023
                    if _begins_with_loss(leaves):  # noqa: B023
                        # The mean over no labels is NaN.
                        terms.append(loss * weight if weight else torch.zeros_like(loss))  # noqa: B023

                self._together(None, (lambda: None) if weight is None else keep)
                leaves = []
        if terms:
            values[0] = torch.stack(terms).sum()
        if call.buffers != _seen(self._engine.module):
            raise UsageError(f'{KEY} "adapt": {_WRITES}; set it to "explain"')
        return values, structure

    def _gradients(self, calls: Sequence[_Call]) -> None:
        """Run the backward of forwards that still have their graphs."""
        outputs = [each for call in calls for each in call.outputs.values()]
        grads = [each for call in calls for each in call.gradients().values()]
        for call in calls:
            call.outputs = {}
        self._run_backward(outputs, grads)

    def _repeat(self, calls: Sequence[_Call], ends: bool = True) -> None:
        """Run the forward and backward of micro-batches, each in parts. `ends`: the last one is the
        current micro-batch, which may be the last of its step.
        """
        engine, micro_batches = self._engine, self._engine.micro_batches
        boundary = micro_batches.boundary
        try:
            for index, call in enumerate(calls, 1):
                restore_random_states(call.random, engine.comm.device)
                parts = list(self._cut(call))
                done = engine.reducer.backwards
                for number, (chosen, weight) in enumerate(parts, 1):
                    is_last = ends and index == len(calls) and number == len(parts)
                    micro_batches.boundary = boundary if is_last else False
                    run = partial(_outputs_of, call, chosen, weight)
                    self._run_backward(*self._together(_FORWARD, run))
                engine.reducer.backwards = done + 1
        finally:
            micro_batches.boundary = boundary

    def _run_backward(self, outputs: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Empty `outputs`, so that the graph is freed on the way."""
        engine = self._engine

        def run() -> None:
            engine.micro_batches.loss_was_scaled = True
            with engine.micro_batches.engine_backward(False), engine.comm.clock.phase("backward"):
                torch.autograd.backward(outputs, grads)

        self._together(_BACKWARD, run, held=outputs)
        outputs.clear()

    def _together(self, kind: str | None, act: Callable[[], T], held: list | None = None) -> T:
        """Return what `act` returns; raise _NotEnough on all ranks if one of them ran out of
        memory, and any other error of one rank on all.

        `kind` is the kind of forward or backward, or None if it is neither. `held` contains tensors
        that a rank frees if it runs out of memory.
        """
        hooks, error, other, result = self._engine.hooks, None, None, None
        with hooks.recorder.recording(kind):
            try:
                result = act()
                hooks.recorder.complete()
            except Exception as raised:
                if full_memory(raised) is None:
                    other = raised
                else:
                    explain(self._engine, raised)
                    # The frames of the traceback hold activations.
                    error = raised.with_traceback(None)
            if (other or error) is not None and kind is not None and self._has_others:
                if held is not None:
                    held.clear()
                if not self._gathers_with_others or hooks.recorder.can_replay:
                    self._join()
                else:
                    why = f"this process has no room for a {kind} of one sample"
                    raise other or _final(error, why)
        failed = error is not None
        try:
            if self._has_others:
                failed = self._control.any(failed, other)
            elif other is not None:
                raise other
        except Exception as raised:
            hooks.forget_broken_pass()
            raise (other or raised) from None
        if failed:
            del result
            hooks.forget_broken_pass()
            self._engine.reshard()
            raise _NotEnough(error)
        return result  # pyright: ignore[reportReturnType]

    def _join(self) -> None:
        """Take part in what the others gather and reduce until the end of the forward or backward,
        whose gradients are of no use. If there is not even memory for that, wait for reductions
        that have started.
        """
        reducer = self._engine.reducer
        for entry in reducer.gradients.values():
            entry.parts.clear()
        self._free()
        while True:
            try:
                return self._engine.hooks.replay_rest()
            except Exception as raised:
                if full_memory(raised) is None:
                    raise
                buffered = reducer.buffered
                reducer.drain()
                self._free()
                if reducer.buffered == buffered:
                    raise

    def _free(self) -> None:
        gc.collect()
        empty_cache(self._engine.comm.device)

    # -- what is changed

    def _change(self, calls: Sequence[_Call], error: Exception | None) -> None:
        """Change as much as is needed, the same on all ranks; raise `error` if nothing is left to
        change. No gradients are kept now. See the note.
        """
        self._free()
        elsewhere = error is not None and full_memory(error) != place_of(self._engine.comm.device)
        if why := self._of_all(
            _NOT_THERE if elsewhere and self._engine.activations is None else ""
        ):
            raise _final(error, why)
        most, done = self._most_rows(calls), []
        why = self._of_all(self._why_whole(calls))
        is_whole = bool(why)
        if not why and most <= self._parts:
            why = f"a micro-batch of {most} sample(s) is split into {self._parts} part(s) already"
        elif not why and not self._is_checked:
            why = self._of_all(self._why_no_sum(calls[-1]))
            self._is_checked = not why
            is_whole = bool(why)
        if why and not self._change_other(done):
            raise _final(error, why)
        # What the forward writes would be written once more.
        if why != _WRITES:
            while not (rows := self._rows_with_room(calls[-1], most, is_whole)):
                if not self._change_other(done):
                    break
            least = self._parts if done else 2 * self._parts
            parts = min(most, max(least, -(-most // rows) if rows else most))
            if not is_whole and parts > self._parts:
                self._parts = parts
                done.append(
                    f"each micro-batch is now split into {parts} parts, with the whole's gradient"
                )
        self._tell(f"{' and '.join(done)}, and the step is repeated")

    def _rows_with_room(self, call: _Call, most: int, is_whole: bool) -> int:
        """Return how many samples have room for a forward and backward on all ranks, at most
        `most`; 0 if not even one has. `is_whole`: the micro-batch cannot be cut.
        """
        if is_whole or most == 1:
            is_only = self._engine.settings.gradient_accumulation_steps == 1
            return most if self._free_at_peak(call, most, is_only) is not None else 0
        with_one = self._free_at_peak(call, 1)
        if with_one is None:
            return 0
        rows, too_many = most, most + 1
        while rows > 2:
            rows = max(2, rows // 4)
            with_more = self._free_at_peak(call, rows)
            if with_more is not None:
                each = max(1, (with_one - with_more) // (rows - 1))
                fit = 1 + max(0, int(_USED * with_one)) // each
                fit = min(fit, too_many - 1)
                # That is not exact on the host, where freed memory is not given back at once.
                return min(self._of_ranks(max(fit, int(_USED * rows))))
            too_many = rows
        return 1

    def _free_at_peak(self, call: _Call, rows: int, is_only: bool = False) -> int | None:
        """Return the bytes that are free at the peak of the forward and backward of some samples,
        or None if a rank has not enough. `is_only`: the step has no other backward, whose gradients
        would also need memory.
        """
        engine, parts = self._engine, self._parts
        loss = torch.zeros((), device=engine.comm.device, requires_grad=True)
        loss.grad = torch.ones_like(loss)
        some = _Call(call.run, call.of_rows(slice(rows)), call.random, call.buffers, {0: loss})
        room(engine.comm.device)
        try:
            self._parts = 1
            self._repeat([some] if is_only else [some, some])
            return room(engine.comm.device)[0]
        except _NotEnough:
            return None
        finally:
            self._parts = parts
            engine.reducer.clear()
            self._free()

    def _change_other(self, done: list[str]) -> bool:
        """Change one thing but the size of the parts, and add it to `done`. False if nothing is
        left.
        """
        schedule = self._engine.schedule
        if self._can_recompute:
            self._recompute()
            done.append("activations are now recomputed in backward")
        elif self._engine.settings.zero_optimization.stage == 3 and schedule.max_live_parameters:
            schedule.max_live_parameters = 0
            done.append("zero_optimization.stage3_max_live_parameters is now 0")
        elif all(self._of_ranks(self._can_move_states)):
            self._move_states(on_host=True)
            done.append("the optimizer's state is now in host memory except during a step")
        else:
            return False
        return True

    @property
    def _can_move_states(self) -> bool:
        """Whether the device holds state of the optimizer, which only the step needs."""
        optimizer = self._engine.optimizer
        if self._states_on_host or optimizer is None or hasattr(optimizer.optimizer, "eval"):
            return False  # schedule-free optimizers use it for an evaluation, too
        return bool(bytes_by_kind(self._engine).get(DEVICE, {}).get(OPTIMIZER))

    def _move_states(self, on_host: bool) -> None:
        optimizer, device = self._engine.optimizer, self._engine.comm.device
        assert optimizer is not None
        optimizer.wait()
        optimizer.move(
            (MOMENTS, MASTERS), Tier(torch.device("cpu") if on_host else device, on_host)
        )
        self._states_on_host |= on_host
        empty_cache(device)

    def _tell(self, done: str) -> None:
        if self._is_alone or self._control.rank == 0:
            step = self._engine.global_steps + 1
            logger.warning("step %d ran out of memory, so %s", step, done)

    @property
    def _has_others(self) -> bool:
        return self._control.world_size > 1 and not self._is_alone

    def _of_ranks(self, value: T) -> list[T]:
        """The value of each rank that takes part."""
        return self._control.exchange(lambda: value) if self._has_others else [value]

    def _most_rows(self, calls: Sequence[_Call]) -> int:
        return max(self._of_ranks(max(call.rows for call in calls)))

    @property
    def _recomputes(self) -> bool:
        return getattr(self._engine.module, "is_gradient_checkpointing", False)

    @property
    def _can_recompute(self) -> bool:
        can = getattr(self._engine.module, "supports_gradient_checkpointing", False)
        return can and not self._recomputes

    def _recompute(self) -> None:
        enable: Any = self._engine.module.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def _of_all(self, why: str) -> str:
        """Return the first reason that a rank gives, or an empty text."""
        return next(filter(None, self._of_ranks(why)), "")

    def _why_whole(self, calls: Sequence[_Call]) -> str:
        """Return why micro-batches cannot be split; empty if they can."""
        module = self._engine.module
        if any(call.buffers != _seen(module) for call in calls):
            return _WRITES
        if any(call.inputs[1].get("labels") is None for call in calls):
            return "the forward gets no argument labels"
        if getattr(module, "loss_function", None) is None:
            return "the model is not one of transformers', whose losses are known"
        return _why_no_rows(calls)

    def _why_no_sum(self, call: _Call) -> str:
        """Return why the loss of several samples is not the weighted sum of their losses, if so."""
        try:
            with torch.no_grad(), evaluating(self._engine.module):
                found = [self._why_no_sum_of(pair) for pair in self._pairs(call)]
                if call.shown and self._parts == 1:
                    # What is kept of the first forward may leave no room for another.
                    with suppress(_NotEnough):
                        found.append(self._why_no_sum_of(call))
        except _NotEnough:
            return "memory is not enough for two samples, even without gradients"
        except Exception as raised:  # of any kind: the forward is somebody else's
            return f"a forward of two samples fails: {raised}"
        return next(filter(None, found), "")

    def _pairs(self, call: _Call) -> list[_Call]:
        """Two samples of the micro-batch that differ in their labels, twice. If they have a label
        for each token, the second time one of them keeps a single label, because otherwise the mean
        over samples might be the same as the mean over labels.
        """
        labels, counted = call.inputs[1]["labels"], self._counted(call)
        counts = counted.sum(1).tolist()
        first, *others = sorted(range(call.rows), key=lambda row: -counts[row])
        others.sort(key=lambda row: not counts[row] or bool((labels[row] == labels[first]).all()))
        args, kwargs = call.of_rows([first, *others[:1]])
        pairs = [kwargs, kwargs]  # as many on all ranks
        # Labels of images have other values for what is not counted.
        if others and counts[others[0]] and labels.dim() == 2 and not labels.is_floating_point():
            kept = counted[others[0]].nonzero()[-1]
            single = torch.full_like(labels[others[0]], _IGNORED)
            single[kept] = labels[others[0], kept]
            pairs[1] = kwargs | {"labels": torch.stack([labels[first], single])}
        return [_Call(call.run, (args, each), None, []) for each in pairs]

    def _why_no_sum_of(self, call: _Call) -> str:
        """Return why these samples have other values together than apart, if so. All ranks run the
        same number of forwards.
        """
        output = self._together(_VALUES, call.run_rows)
        leaves = tree_flatten(output)[0]
        has_other_loss = getattr(output, "aux_loss", None) is not None
        if not _begins_with_loss(leaves) or has_other_loss:
            return _NO_MEAN
        whole, losses = leaves[0].float(), []
        # Logits of a whole micro-batch are large.
        rows = {
            place: leaf
            for place, leaf in enumerate([] if call.shown else leaves)
            if _has_rows(leaf, call.rows) and leaf.is_floating_point()
        }
        tolerance = 1e-4 if self._engine.settings.compute_dtype == torch.float32 else 2e-2
        del output, leaves
        why = ""
        for chosen, weight in self._cut(call, 2):
            part = self._together(_VALUES, partial(call.run_rows, chosen))
            leaves = tree_flatten(part)[0]
            if weight:
                losses.append(leaves[0].float() * weight)
            for place, values in rows.items():
                usual = values[chosen].float()
                if (leaves[place] - usual).norm() > tolerance * usual.norm():
                    why = _NOT_APART
            del part, leaves
        is_sum = torch.isclose(whole, torch.stack(losses).sum(), rtol=tolerance)
        return why if is_sum else _NO_MEAN

    def _counted(self, call: _Call) -> torch.Tensor:
        """Which labels of each sample its loss counts."""
        labels = call.inputs[1].get("labels")
        counted = torch.ones(call.rows, 1) if labels is None else labels != _IGNORED
        if self._predicts_next and counted.dim() > 1:
            counted[:, 0] = False
        return counted.reshape(call.rows, -1)

    def _cut(self, call: _Call, parts: int | None = None) -> Iterator[tuple[slice, float | None]]:
        """The samples of each part, and what its loss counts. None: this rank has fewer samples
        than parts, and repeats one, because all ranks run as many backwards.
        """
        parts, rows = parts or self._parts, call.rows
        if parts == 1:
            yield slice(None), 1.0
            return
        bounds = [rows * number // parts for number in range(parts + 1)]
        is_sum = call.inputs[1].get("num_items_in_batch") is not None
        of_rows = self._counted(call).sum(1).tolist()
        for start, end in pairwise(bounds):
            if start == end:
                yield slice(0, 1), None
                continue
            share = sum(of_rows[start:end]) / max(1, sum(of_rows))
            yield slice(start, end), 1.0 if is_sum else share


def _hindrances(engine: ZeroEngine) -> Iterator[str]:
    """What keeps a rank from knowing for what the others wait."""
    settings, zero = engine.settings, engine.settings.zero_optimization
    modules = list(engine.module.modules())
    if zero.stage == 0:
        yield "zero_optimization.stage 0"
    if engine.comm.job.world_size != engine.comm.shard_group.size:
        yield "mics_shard_size or layers that processes share"
    if settings.sequence_parallel_size > 1:
        yield "sequence_parallel_size"
    for key in "zero_quantized_gradients", "zero_quantized_weights":
        if getattr(zero, key):
            yield f"zero_optimization.{key}"
    if zero.zero_hpz_partition_size > 1:
        yield "zero_optimization.zero_hpz_partition_size"
    if zero.stage == 3 and any(getattr(module, LEAF_FLAG, False) for module in modules):
        yield "leaf modules"
    if any(isinstance(vars(module).get("forward"), SlicedExperts) for module in modules):
        yield "experts that are gathered in slices"


def _begins_with_loss(leaves: Sequence[Any]) -> bool:
    loss = leaves[0] if leaves else None
    return isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point()


def _outputs_of(
    call: _Call, chosen: slice, weight: float | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs of some samples that need a gradient, and these gradients. `weight` is that of
    the samples' loss; None if all gradients are zero.
    """
    leaves = tree_flatten(call.run_rows(chosen))[0]
    outputs, grads = [], []
    for place, grad in call.gradients().items():
        if leaves[place].requires_grad:
            outputs.append(leaves[place])
            rows = grad[chosen] * (weight is not None) if grad.dim() else grad * (weight or 0.0)
            grads.append(rows)
    return outputs, grads


def _has_rows(leaf: Any, rows: int) -> bool:
    """Whether `leaf` is a tensor of `rows` samples."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == rows


def _for_all(leaf: Any, rows: int, all_rows: int) -> torch.Tensor | None:
    """A tensor for all samples, where `leaf` is one of `rows` samples."""
    return leaf.new_empty((all_rows, *leaf.shape[1:])) if _has_rows(leaf, rows) else None


def _why_no_rows(calls: Sequence[_Call]) -> str:
    """Return why the gradients of the outputs cannot be cut; empty if they can."""
    others = [
        _has_rows(grad, call.rows)
        for call in calls
        for place, grad in call.gradients().items()
        if place or grad.dim()
    ]
    return "" if all(others) else _NO_ROWS


def _seen(module: nn.Module) -> list[tuple[int, int]]:
    """What changes when a buffer is written."""
    return [(id(buffer), buffer._version) for buffer in module.buffers()]


def _final(error: Exception | None, why: str) -> Exception:
    error = error or torch.OutOfMemoryError("another rank ran out of memory")
    add_line(error, f'zero: {KEY} is "adapt", but nothing more can be changed: {why}')
    return error
