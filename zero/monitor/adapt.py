"""Repeats a micro-batch for which memory was not enough, in smaller parts
(`"on_out_of_memory": "adapt"`).

The script gets the outputs of its forward detached from their graph. Its own backward therefore
ends at the loss, and yields the loss's gradient. The engine's backward starts from that gradient,
and can be repeated.

[Note: what a rank does when its memory is full] It frees its activations and replays the
remaining gathers and reductions of the forward or backward, without computing
(`zero/core/replay.py`). After each forward and backward, all ranks report whether theirs failed. If
one did, all of them drop the gradients of the step, make the same change, and repeat the step's
micro-batches from their inputs and random states. Below stage 3 nothing is gathered, and the
reductions have a fixed order. At stage 3, a rank can only know from an earlier forward and backward
what the others will gather. The first training forward is therefore preceded by a forward and
backward of one sample, which must be recorded alike on all ranks.

[Note: parts of a micro-batch] The loss must be the mean over the micro-batch's labels, or their sum
divided by a number that the script passes. This is tested by comparing the loss of two samples
with the loss of each, also where they have unequal numbers of labels; and the loss of the
micro-batch with those of its halves, if there was enough memory for its forward."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from zero.checkpoint.state import random_states, restore_random_states
from zero.core.layout import LEAF_FLAG
from zero.device import empty_cache
from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.monitor.memory_usage import place_of
from zero.monitor.out_of_memory import add_line, explain, full_memory
from zero.slicing.experts import SlicedExperts
from zero.slicing.probe import evaluating

logger = logging.getLogger("zero")

KEY = "on_out_of_memory"
_WRITES = "the forward writes to the model's buffers"
_BESIDE = "the script computes gradients beside those of the loss"
_FORWARD, _VALUES, _BACKWARD = "forward", "forward without gradients", "backward"
_NOT_THERE = "the memory of the host is full, and activations are on the device"
_IGNORED = -100  # labels that transformers' losses do not count

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
        outputs: tensors with a graph; empty if there is none, because the call was cut.
        shown: what the script has received in their place, starting with the loss.
    """

    run: Callable[..., Any]
    inputs: tuple[tuple, dict[str, Any]]
    random: object
    buffers: list[tuple[int, int]]
    outputs: list[torch.Tensor] = field(default_factory=list)
    shown: list[torch.Tensor] = field(default_factory=list)

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


class Adaptation:
    """Handles running out of memory for one engine. Raises UsageError if the engine cannot repeat a
    micro-batch.
    """

    def __init__(self, engine: ZeroEngine):
        self._engine = engine
        self._parts = 1
        self._is_checked = self._is_rehearsed = False
        # Forwards that await their backward, and those whose gradients are in the step's sum.
        self._waiting: list[_Call] = []
        self._done: list[_Call] = []
        self._backwards = self._micro_step = 0
        # For a transformers model: whether labels are shifted by one before they are counted.
        loss_name = getattr(getattr(engine.module, "loss_function", None), "__name__", "")
        seq2seq = getattr(getattr(engine.module, "config", None), "is_encoder_decoder", False)
        self._predicts_next = loss_name == "ForCausalLMLoss" and not seq2seq
        self._ranks = engine.comm.job
        stage = engine.settings.zero_optimization.stage
        self._gathers_with_others = self._ranks.world_size > 1 and stage == 3
        if self._ranks.world_size > 1:
            engine.hooks.expect_nested_backwards()
            if hindrance := next(_hindrances(engine), None):
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
        }

    def restore(self, settings: dict[str, int]) -> None:
        schedule = self._engine.schedule
        self._parts = settings["parts"]
        if settings["recomputes"] and self._can_recompute:
            self._recompute()
        schedule.max_live_parameters = min(schedule.max_live_parameters, settings["max_live"])

    # -- what the script calls

    def forward(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        module = self._engine.module
        if not (torch.is_grad_enabled() and module.training):
            return run(*args, **kwargs)
        if self._micro_step != self._engine.micro_steps:
            self._micro_step, self._waiting = self._engine.micro_steps, []
        call = _Call(run, (args, kwargs), random_states(self._engine.comm.device), _seen(module))
        if self._gathers_with_others:
            self._rehearse(call)
        while True:
            try:
                return self._shown(call)
            except _NotEnough as raised:
                error = raised.error
            self._change([call], error)
            restore_random_states(call.random, self._engine.comm.device)

    def backward(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run `run`, the engine's backward of the loss, which ends at the outputs shown."""
        engine, reducer, waiting = self._engine, self._engine.reducer, self._waiting
        if reducer.backwards == 0:
            self._done, self._backwards = [], 0
        before = reducer.backwards
        result = run()
        calls = [each for each in waiting if any(t.grad is not None for t in each.shown)]
        if not calls:
            return result  # the script computes its loss itself
        self._waiting = []
        is_known = self._backwards == before == reducer.backwards
        only_loss = all(t.grad is None for call in calls for t in call.shown[1:])
        if self._parts > 1 and not only_loss:
            raise UsageError(f'{KEY} "adapt": {_BESIDE}; set it to "explain"')
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
                call.outputs = []
            reducer.clear()
            if not (is_known and only_loss):
                raise _final(error, _BESIDE)
            calls_to_repeat = [*self._done, *calls]
            self._change(calls_to_repeat, error)
        restore_random_states(after, engine.comm.device)
        self._done += calls
        self._backwards = reducer.backwards
        return result

    def refuse_other_backwards(self) -> None:
        """Called before a step. Raises UsageError if a backward has ended at the loss and no other
        call has continued from there.
        """
        if any(tensor.grad is not None for call in self._waiting for tensor in call.shown):
            raise UsageError(
                f'{KEY} "adapt": call engine.backward(loss) instead of loss.backward(), which '
                'cannot be repeated; or set it to "explain"'
            )

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
        args, kwargs = call.of_rows(slice(1))
        run = lambda: tree_flatten(call.run(*args, **kwargs))[0]  # noqa: E731
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
        recorded = self._ranks.exchange(engine.hooks.recorder.names())
        if any(each != recorded[0] for each in recorded):
            raise UsageError(
                f'{KEY} "adapt": processes go different ways through the model; set it to "explain"'
            )

    # -- one try

    def _shown(self, call: _Call) -> Any:
        """The outputs of a forward, without their graphs."""
        leaves: list[Any] = []
        structure: Any = None
        if self._parts > 1:
            leaves, structure = self._values(call)
        is_cut = bool(leaves)
        if not leaves:
            output = self._together(_FORWARD, lambda: call.run(*call.inputs[0], **call.inputs[1]))
            leaves, structure = tree_flatten(output)
            if not _begins_with_loss(leaves):
                return output
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and (
                leaf.requires_grad or (is_cut and leaf.is_floating_point())
            ):
                shown = leaf.detach().requires_grad_()
                call.outputs += [leaf] * leaf.requires_grad
                call.shown.append(shown)
                # The Trainer scales the loss in place, which torch forbids for a leaf.
                leaves[place] = shown if shown.dim() else shown.clone()
        self._waiting.append(call)
        return tree_unflatten(leaves, structure)

    def _values(self, call: _Call) -> tuple[list[Any], Any]:
        """Return the outputs of a forward in parts, none of which has a graph: the loss, and
        tensors with as many rows as the micro-batch. Nothing if the forward computes no loss.
        """
        found, weights, structure = [], [], None
        with torch.no_grad():
            for (args, kwargs), weight in self._cut(call):
                output = self._together(_VALUES, lambda: call.run(*args, **kwargs))  # noqa: B023
                leaves, structure = tree_flatten(output)
                if not _begins_with_loss(leaves):
                    return [], None
                if weight is not None:
                    weights.append(weight)
                    found.append(leaves)

            def merged() -> list[Any]:
                # The mean over no labels is NaN.
                terms = [
                    leaves[0] * weight if weight else torch.zeros_like(leaves[0])
                    for leaves, weight in zip(found, weights, strict=True)
                ]
                rest = list(zip(*found, strict=True))[1:]
                return [torch.stack(terms).sum(), *map(_joined, rest)]

            values = self._together(None, merged)
        if call.buffers != _seen(self._engine.module):
            raise UsageError(f'{KEY} "adapt": {_WRITES}; set it to "explain"')
        return values, structure

    def _gradients(self, calls: Sequence[_Call]) -> None:
        """Run the backward of forwards that still have their graphs."""
        pairs = [pair for call in calls for pair in zip(call.outputs, call.shown, strict=True)]
        for call in calls:
            call.outputs = []
        pairs = [(output, shown.grad) for output, shown in pairs if shown.grad is not None]
        outputs, grads = map(list, zip(*pairs, strict=True))
        del pairs
        self._run_backward(outputs, grads)

    def _repeat(self, calls: Sequence[_Call]) -> None:
        """Run the forward and backward of micro-batches, each in parts."""
        engine, micro_batches = self._engine, self._engine.micro_batches
        boundary = micro_batches.boundary
        try:
            for call in calls:
                del call.shown[1:]  # logits are large
                restore_random_states(call.random, engine.comm.device)
                parts = list(self._cut(call))
                done = engine.reducer.backwards
                for number, ((args, kwargs), weight) in enumerate(parts, 1):
                    is_last = call is calls[-1] and number == len(parts)
                    micro_batches.boundary = boundary if is_last else False

                    def run() -> tuple[list[torch.Tensor], torch.Tensor]:
                        grad = call.shown[0].grad  # noqa: B023
                        assert grad is not None
                        loss = tree_flatten(call.run(*args, **kwargs))[0][:1]  # noqa: B023
                        return loss, grad * (weight or 0.0)  # noqa: B023

                    outputs, scale = self._together(_FORWARD, run)
                    self._run_backward(outputs, [scale])
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
        memory.

        `kind` is the kind of forward or backward, or None if it is neither. `held` contains tensors
        that a rank frees if it runs out of memory.
        """
        hooks, error, result = self._engine.hooks, None, None
        with hooks.recorder.recording(kind):
            try:
                result = act()
                hooks.recorder.complete()
            except Exception as raised:
                if full_memory(raised) is None:
                    hooks.forget_broken_pass()
                    raise
                explain(self._engine, raised)
                # The frames of the traceback hold activations.
                error = raised.with_traceback(None)
            if error is not None and kind is not None and self._ranks.world_size > 1:
                if held is not None:
                    held.clear()
                self._free()
                if self._gathers_with_others and not hooks.recorder.can_replay:
                    raise _final(error, f"this process has no room for a {kind} of one sample")
                hooks.replay_rest()
        failed = torch.tensor(float(error is not None))
        if self._ranks.world_size > 1:
            failed = self._ranks.all_reduce(failed)
        if failed:
            del result
            hooks.forget_broken_pass()
            self._engine.reshard()
            raise _NotEnough(error)
        return result  # pyright: ignore[reportReturnType]

    def _free(self) -> None:
        gc.collect()
        empty_cache(self._engine.comm.device)

    # -- what is changed

    def _change(self, calls: Sequence[_Call], error: Exception | None) -> None:
        """Change one thing, the same on all ranks; raise `error` if nothing is left to change."""
        engine, schedule = self._engine, self._engine.schedule
        self._free()
        elsewhere = error is not None and full_memory(error) != place_of(engine.comm.device)
        if why := self._of_all(_NOT_THERE if elsewhere and engine.activations is None else ""):
            raise _final(error, why)
        most = max(self._ranks.exchange(max(call.rows for call in calls)))
        why = self._of_all(self._why_whole(calls))
        if not why and most <= self._parts:
            why = f"a micro-batch of {most} sample(s) is cut into {self._parts} part(s) already"
        if not why and not self._is_checked:
            why = self._of_all(self._why_no_sum(calls[-1]))
            self._is_checked = not why
        if not why:
            self._parts = min(2 * self._parts, most)
            done = (
                f"each micro-batch is cut into {self._parts} parts, with the gradient of the whole"
            )
        elif self._can_recompute:
            self._recompute()
            done = "activations are recomputed in the backward"
        elif engine.settings.zero_optimization.stage == 3 and schedule.max_live_parameters:
            schedule.max_live_parameters = 0
            done = "zero_optimization.stage3_max_live_parameters is 0 now"
        else:
            raise _final(error, why)
        if self._ranks.rank == 0:
            logger.warning(
                "step %d: memory was not enough; %s, and the step is repeated",
                engine.global_steps + 1,
                done,
            )

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
        return next(filter(None, self._ranks.exchange(why)), "")

    def _why_whole(self, calls: Sequence[_Call]) -> str:
        """Return why micro-batches cannot be split; empty if they can."""
        module = self._engine.module
        if any(call.buffers != _seen(module) for call in calls):
            return _WRITES
        if any(call.inputs[1].get("labels") is None for call in calls):
            return "the forward gets no argument labels"
        if getattr(module, "loss_function", None) is None:
            return "the model is not one of transformers', whose losses are known"
        return ""

    def _why_no_sum(self, call: _Call) -> str:
        """Return why the loss of several samples is not the weighted sum of their losses, if so."""
        try:
            with torch.no_grad(), evaluating(self._engine.module):
                found = [self._is_sum(pair) for pair in self._pairs(call)]
                if call.shown and self._parts == 1:
                    # What is kept of the first forward may leave no room for another.
                    with suppress(_NotEnough):
                        found.append(self._is_sum(call))
        except _NotEnough:
            return "memory is not enough for two samples, even without gradients"
        except Exception as raised:  # of any kind: the forward is somebody else's
            return f"a forward of two samples fails: {raised}"
        return "" if all(found) else "its loss is not the mean over its labels"

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

    def _is_sum(self, call: _Call) -> bool:
        """Whether the loss of samples is the weighted sum of the losses of their halves. All ranks
        run the same number of forwards.
        """
        output = self._together(_VALUES, lambda: call.run(*call.inputs[0], **call.inputs[1]))
        leaves = tree_flatten(output)[0]
        has_other_loss = getattr(output, "aux_loss", None) is not None
        if not _begins_with_loss(leaves) or has_other_loss:
            return False
        whole, losses = leaves[0].float(), []
        del output, leaves  # logits are large
        for (args, kwargs), weight in self._cut(call, 2):
            part = self._together(_VALUES, lambda: call.run(*args, **kwargs))  # noqa: B023
            if weight:
                losses.append(tree_flatten(part)[0][0].float() * weight)
        tolerance = 1e-4 if self._engine.settings.compute_dtype == torch.float32 else 2e-2
        return bool(torch.isclose(whole, torch.stack(losses).sum(), rtol=tolerance))

    def _counted(self, call: _Call) -> torch.Tensor:
        """Which labels of each sample its loss counts."""
        labels = call.inputs[1].get("labels")
        counted = torch.ones(call.rows, 1) if labels is None else labels != _IGNORED
        if self._predicts_next and counted.dim() > 1:
            counted[:, 0] = False
        return counted.reshape(call.rows, -1)

    def _cut(
        self, call: _Call, parts: int | None = None
    ) -> Iterator[tuple[tuple[tuple, dict[str, Any]], float | None]]:
        """The inputs of each part, and what its loss counts. None: this rank has fewer samples than
        parts, and repeats one, because all ranks run as many backwards.
        """
        parts, rows = parts or self._parts, call.rows
        if parts == 1:
            yield call.inputs, 1.0
            return
        bounds = [rows * number // parts for number in range(parts + 1)]
        is_sum = call.inputs[1].get("num_items_in_batch") is not None
        of_rows = self._counted(call).sum(1).tolist()
        for start, end in pairwise(bounds):
            if start == end:
                yield call.of_rows(slice(1)), None
                continue
            share = sum(of_rows[start:end]) / max(1, sum(of_rows))
            yield call.of_rows(slice(start, end)), 1.0 if is_sum else share


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


def _joined(column: Sequence[Any]) -> torch.Tensor | None:
    tensors = [each for each in column if each is not None]
    is_rows = tensors and all(isinstance(each, torch.Tensor) and each.dim() for each in tensors)
    return torch.cat(tensors) if is_rows else None


def _seen(module: nn.Module) -> list[tuple[int, int]]:
    """What changes when a buffer is written."""
    return [(id(buffer), buffer._version) for buffer in module.buffers()]


def _final(error: Exception | None, why: str) -> Exception:
    error = error or torch.OutOfMemoryError("memory was not enough on another rank")
    add_line(error, f'zero: {KEY} is "adapt", but nothing more can be changed: {why}')
    return error
