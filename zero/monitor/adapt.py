"""Repeats a micro-batch for which memory was not enough, in smaller parts
(`"on_out_of_memory": "adapt"`).

The script gets the outputs of its forward cut off from their graph. So its own backward ends at
the loss, and tells the loss's gradient. The engine's begins there, and can be repeated.

[Note: what a rank does when its memory is full] Nothing is gathered in a forward at stages 1 and
2, and the reductions of a backward come in an agreed order. So a rank whose forward fails leaves
nobody waiting, and one whose backward fails can join the reductions that are left, with zeros.
After each forward and backward all ranks tell whether theirs failed. If one did, all of them forget
the gradients of the step, change the same thing, and repeat the step's micro-batches from their
inputs and random states. At stage 3 a rank that fails leaves the others in an all-gather, and
cannot tell which ones they will start: then only a job of one process can go on.

[Note: parts of a micro-batch] The loss must be the mean over the micro-batch's labels, or their sum
divided by a number that the script gives. Two samples show whether it is: the loss of both is
compared with that of each."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from zero.batch_slices import evaluating
from zero.checkpoint.state import random_states, restore_random_states
from zero.device import empty_cache
from zero.engine import ZeroEngine
from zero.errors import UsageError

logger = logging.getLogger("zero")

KEY = "on_out_of_memory"
_WRITES = "the forward writes to the model's buffers"
_BESIDE = "the script computes gradients beside those of the loss"
_IGNORED = -100  # labels that transformers' losses do not count
# What torch's allocator of host memory says; it has no class of its own.
_HOST = "DefaultCPUAllocator: can't allocate memory"

T = TypeVar("T")


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, on a device or in host memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _HOST in str(error)


class _NotEnough(Exception):
    """Memory was not enough on some rank. All ranks raise it; `error`: this rank's own, or None."""

    def __init__(self, error: Exception | None):
        super().__init__()
        self.error = error


@dataclass
class _Call:
    """A forward of the script.

    Attributes:
        run: the engine's own forward.
        outputs: tensors with a graph; empty if there is none, because the call was cut.
        shown: what the script has got in their place, the loss first.
    """

    run: Callable[..., Any]
    inputs: tuple[tuple, dict[str, Any]]
    random: object
    buffers: list[tuple[int, int]]
    outputs: list[torch.Tensor] = field(default_factory=list)
    shown: list[torch.Tensor] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Samples of the micro-batch: of the first tensor that is not a scalar."""
        leaves = tree_flatten(self.inputs)[0]
        sizes = (each.shape[0] for each in leaves if isinstance(each, torch.Tensor) and each.dim())
        return next(sizes, 0)

    def of_rows(self, start: int, end: int) -> tuple[tuple, dict[str, Any]]:
        """The inputs of some of the samples."""
        rows = self.rows

        def narrowed(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[start:end] if tensor.dim() and tensor.shape[0] == rows else tensor

        return tree_map_only(torch.Tensor, narrowed, self.inputs)


class Adaptation:
    """What an engine does if memory is not enough. Raises UsageError for an engine that cannot
    repeat a micro-batch.
    """

    def __init__(self, engine: ZeroEngine):
        self._engine = engine
        self._parts = 1
        self._is_checked = False
        # Forwards that wait for their backward, and those whose gradients are in the step's sum.
        self._waiting: list[_Call] = []
        self._done: list[_Call] = []
        self._backwards = self._micro_step = 0
        # Of a transformers model: whether the labels are shifted by one when they are counted.
        loss_name = getattr(getattr(engine.module, "loss_function", None), "__name__", "")
        seq2seq = getattr(getattr(engine.module, "config", None), "is_encoder_decoder", False)
        self._predicts_next = loss_name == "ForCausalLMLoss" and not seq2seq
        self._ranks = engine.comm.job
        zero = engine.settings.zero_optimization
        shares = self._ranks.world_size != engine.comm.shard_group.size
        shares |= engine.settings.sequence_parallel_size > 1
        if self._ranks.world_size > 1:
            engine.hooks.expect_nested_backwards()
            if zero.stage not in (1, 2) or shares or zero.zero_quantized_gradients:
                raise UsageError(
                    f'{KEY} "adapt": with several processes this needs zero_optimization.stage 1 '
                    "or 2, without mics_shard_size, zero_quantized_gradients, or layers or "
                    "sequences that processes share: elsewhere a process whose memory is full "
                    'would leave the others waiting. Set it to "explain"'
                )

    def settings(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"parts": self._parts, "max_live": self._engine.schedule.max_live_parameters}

    def restore(self, settings: dict[str, int]) -> None:
        schedule = self._engine.schedule
        self._parts = settings["parts"]
        schedule.max_live_parameters = min(schedule.max_live_parameters, settings["max_live"])

    # -- what the script calls

    def forward(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        module = self._engine.module
        if not (torch.is_grad_enabled() and module.training):
            return run(*args, **kwargs)
        if self._micro_step != self._engine.micro_steps:
            self._micro_step, self._waiting = self._engine.micro_steps, []
        call = _Call(run, (args, kwargs), random_states(self._engine.comm.device), _seen(module))
        while True:
            try:
                return self._shown(call)
            except _NotEnough as raised:
                error = raised.error
            self._change([call], error)
            restore_random_states(call.random, self._engine.comm.device)

    def backward(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """`run`: the engine's own backward of the script's loss, which ends at what was shown."""
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
            engine.hooks.forget_broken_pass()
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
        """Before a step. Raises UsageError if a backward has ended at the loss, and no other call
        has gone on from there.
        """
        if any(tensor.grad is not None for call in self._waiting for tensor in call.shown):
            raise UsageError(
                f'{KEY} "adapt": call engine.backward(loss) instead of loss.backward(), which '
                'cannot be repeated; or set it to "explain"'
            )

    # -- one try

    def _shown(self, call: _Call) -> Any:
        """The outputs of a forward, without their graphs."""
        leaves: list[Any] = []
        structure: Any = None
        if self._parts > 1:
            leaves, structure = self._together(lambda: self._values(call))
        is_cut = bool(leaves)
        if not leaves:
            output = self._together(lambda: call.run(*call.inputs[0], **call.inputs[1]))
            leaves, structure = tree_flatten(output)
            if not _begins_with_loss(leaves):
                return output
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and (
                leaf.requires_grad or (is_cut and leaf.is_floating_point())
            ):
                leaves[place] = leaf.detach().requires_grad_()
                call.outputs += [leaf] * leaf.requires_grad
                call.shown.append(leaves[place])
        self._waiting.append(call)
        return tree_unflatten(leaves, structure)

    def _values(self, call: _Call) -> tuple[list[Any], Any]:
        """The outputs of a forward in parts, of which none has a graph: the loss, and what has as
        many rows as the micro-batch. Nothing if the forward computes no loss.
        """
        found, losses, structure = [], [], None
        with torch.no_grad():
            for (args, kwargs), weight in self._cut(call):
                if weight is None:
                    continue
                leaves, structure = tree_flatten(call.run(*args, **kwargs))
                if not _begins_with_loss(leaves):
                    return [], None
                # The mean over no labels is NaN.
                losses.append(leaves[0] * weight if weight else torch.zeros_like(leaves[0]))
                found.append(leaves)
            merged = [_joined(column) for column in zip(*found, strict=True)]
        if call.buffers != _seen(self._engine.module):
            raise UsageError(f'{KEY} "adapt": {_WRITES}; set it to "explain"')
        return [torch.stack(losses).sum(), *merged[1:]], structure

    def _gradients(self, calls: Sequence[_Call]) -> None:
        """The backward of forwards whose graphs are there."""
        pairs = [pair for call in calls for pair in zip(call.outputs, call.shown, strict=True)]
        for call in calls:
            call.outputs = []
        pairs = [(output, shown.grad) for output, shown in pairs if shown.grad is not None]
        outputs, grads = map(list, zip(*pairs, strict=True))
        del pairs
        self._run_backward(outputs, grads)

    def _repeat(self, calls: Sequence[_Call]) -> None:
        """Forward and backward of micro-batches, each in parts."""
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
                    run = lambda: tree_flatten(call.run(*args, **kwargs))[0][:1]  # noqa: B023, E731
                    outputs = self._together(run)
                    grad = call.shown[0].grad
                    assert grad is not None
                    self._run_backward(outputs, [grad * (weight or 0.0)])
                engine.reducer.backwards = done + 1
        finally:
            micro_batches.boundary = boundary

    def _run_backward(self, outputs: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """`outputs` loses its tensors, so that the graph is freed on the way."""
        engine = self._engine

        def run() -> None:
            engine.micro_batches.loss_was_scaled = True
            with engine.micro_batches.engine_backward(False), engine.comm.clock.phase("backward"):
                torch.autograd.backward(outputs, grads)

        def join_others() -> None:
            outputs.clear()  # what is left of the graph
            engine.hooks.finish_broken_backward()

        self._together(run, then=join_others)
        outputs.clear()

    def _together(self, act: Callable[[], T], then: Callable[[], None] | None = None) -> T:
        """What `act` returns, if memory was enough on all ranks; else raise _NotEnough on all.

        `then`: what a rank does whose own memory was not enough, so that no other waits for it.
        """
        error, result = None, None
        try:
            result = act()
        except Exception as raised:
            if not is_lack_of_memory(raised):
                self._engine.hooks.forget_broken_pass()
                raise
            # The frames of the traceback hold activations.
            error = raised.with_traceback(None)
        if error is not None and then is not None and self._ranks.world_size > 1:
            then()
        failed = torch.tensor(float(error is not None))
        if self._ranks.world_size > 1:
            failed = self._ranks.all_reduce(failed)
        if failed:
            del result
            raise _NotEnough(error)
        return result  # pyright: ignore[reportReturnType]

    # -- what is changed

    def _change(self, calls: Sequence[_Call], error: Exception | None) -> None:
        """Change one thing, the same on all ranks. Raises `error` if nothing is left to change."""
        engine, schedule = self._engine, self._engine.schedule
        engine.hooks.forget_broken_pass()
        gc.collect()
        empty_cache(engine.comm.device)
        rows = max(call.rows for call in calls)
        found = self._ranks.exchange((self._why_whole(calls), rows))
        why = next(filter(None, (reason for reason, _ in found)), "")
        most = max(rows for _, rows in found)
        if not why and most <= self._parts:
            why = f"a micro-batch of {most} sample(s) is cut into {self._parts} part(s) already"
        if not why:
            self._parts = min(2 * self._parts, most)
            done = (
                f"each micro-batch is cut into {self._parts} parts, with the gradient of the whole"
            )
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

    def _why_whole(self, calls: Sequence[_Call]) -> str:
        """Why micro-batches cannot be cut; empty if they can."""
        module = self._engine.module
        if any(call.buffers != _seen(module) for call in calls):
            return _WRITES
        if any("labels" not in call.inputs[1] for call in calls):
            return "the forward gets no argument labels"
        if getattr(module, "loss_function", None) is None:
            return "the model is not one of transformers', whose losses are known"
        if not self._is_checked and calls[-1].rows > 1:
            try:
                with torch.no_grad(), evaluating(module):
                    self._is_checked = self._is_sum(calls[-1])
            except Exception as raised:  # of any kind: the forward is somebody else's
                return f"a forward of two samples fails: {raised}"
            finally:
                self._engine.hooks.forget_broken_pass()
            if not self._is_checked:
                return "its loss is not the mean of those of its samples"
        return ""

    def _is_sum(self, call: _Call) -> bool:
        """Whether the loss of two samples is the weighted sum of the loss of each."""
        two = _Call(call.run, call.of_rows(0, 2), None, [])
        output = two.run(*two.inputs[0], **two.inputs[1])
        leaves = tree_flatten(output)[0]
        has_other_loss = getattr(output, "aux_loss", None) is not None
        if not _begins_with_loss(leaves) or has_other_loss:
            return False
        losses = [
            tree_flatten(two.run(*args, **kwargs))[0][0].float() * weight
            for (args, kwargs), weight in self._cut(two, 2)
            if weight
        ]
        tolerance = 1e-4 if self._engine.settings.compute_dtype == torch.float32 else 2e-2
        return bool(torch.isclose(leaves[0].float(), torch.stack(losses).sum(), rtol=tolerance))

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
        labels = call.inputs[1].get("labels")
        is_sum = call.inputs[1].get("num_items_in_batch") is not None
        counts = torch.ones(rows) if labels is None else (labels != _IGNORED)
        if self._predicts_next and counts.dim() > 1:
            counts = counts[:, 1:]
        of_rows = counts.reshape(rows, -1).sum(1).tolist()
        for start, end in pairwise(bounds):
            if start == end:
                yield call.of_rows(0, 1), None
                continue
            share = sum(of_rows[start:end]) / max(1, sum(of_rows))
            yield call.of_rows(start, end), 1.0 if is_sum else share


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
    error.args = (f'{error}\nzero: {KEY} is "adapt", but nothing more can be changed: {why}',)
    return error
