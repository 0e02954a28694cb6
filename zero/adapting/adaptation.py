"""What is changed when memory runs out, and when a step is repeated.

The script gets the outputs of its forward detached from their graph. Its own backward therefore
ends at these outputs, and yields their gradients: that of the loss, or those of outputs from which
the script computes a loss itself, as TRL does. The engine's backward starts from these gradients,
and can be repeated.

[Note: what is repeated] A forward may have effects: a counter, a generator of its own, an iterator,
a file. Only code that is known to have none is repeated (`zero/slicing/known.py`). Any other model
trains as it does without this.

[Note: what a rank does when its memory is full] It frees its activations and replays the
remaining gathers and reductions of the forward or backward, without computing
(`zero/core/schedule.py`). After each forward and backward, all ranks report whether theirs failed.
If one did, all of them make the same change, and repeat it from its inputs and random states. A
backward may have left some of its gradients in the sum of the step, so all of these are dropped,
and the step's earlier micro-batches are repeated, too. Below stage 3 nothing is gathered, and the
reductions have a fixed order. At stage 3, a rank can only know from an earlier forward and backward
what the others will gather. The first training forward is therefore preceded by a forward and
backward of one sample, which must be recorded alike on all ranks.

[Note: what is changed] Nothing that is changed changes a result. First, activations are recomputed;
then nothing is gathered in advance; then each block runs its batch in slices and the head its
tokens in chunks (`zero/slicing/`): 2, then 4, and so on, up to one sample in each; at last, the
blocks' inputs wait for backward in host memory. No change moves a gather or a reduction, so that
what has been recorded stays true."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from zero.adapting.call import KEY, Call
from zero.checkpoint.state import random_states, restore_random_states
from zero.core.layout import LEAF_FLAG
from zero.device import empty_cache, is_accelerator
from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.monitor.memory_usage import place_of
from zero.monitor.out_of_memory import add_line, explain, full_memory
from zero.offload.activations import HostActivations
from zero.slicing.experts import SlicedExperts
from zero.slicing.known import why_not_known

logger = logging.getLogger("zero")

_BESIDE = "the script computes gradients beside those of the forward's outputs"
_FORWARD, _BACKWARD = "forward", "backward"
_NOT_THERE = "the memory of the host is full, and activations are on the device"

T = TypeVar("T")


class _NotEnough(Exception):
    """Some rank ran out of memory. All ranks raise this; `error` is this rank's own, or None."""

    def __init__(self, error: Exception | None):
        super().__init__()
        self.error = error


class Adaptation:
    """Handles running out of memory for one engine. Raises UsageError if its ranks could not join
    the collectives of each other.
    """

    def __init__(self, engine: ZeroEngine):
        self._engine = engine
        self._is_rehearsed = False
        # Forwards that await their backward, and those whose gradients are in the step's sum.
        self._waiting: list[Call] = []
        self._done: list[Call] = []
        self._backwards = self._micro_step = 0
        self._control = engine.comm.control("adapting to the memory that there is")
        stage = engine.settings.zero_optimization.stage
        self._gathers_with_others = self._control.world_size > 1 and stage == 3
        hindrance = next(_hindrances(engine), None)
        if hindrance and self._control.world_size > 1:
            raise UsageError(
                f'{KEY} "adapt": not with several processes and {hindrance}, because a process '
                'whose memory is full would leave the others waiting. Set it to "explain"'
            )
        # Why nothing is ever repeated; empty if it is.
        self._refusal = self._of_all(why_not_known(engine.module))
        if self._refusal and self._control.rank == 0:
            logger.warning('%s "adapt" has the effect of "explain": %s', KEY, self._refusal)

    # -- what the script calls

    def forward(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run `run`, the engine's forward. In training, its outputs have no graph."""
        engine = self._engine
        if not (torch.is_grad_enabled() and engine.module.training):
            return run(*args, **kwargs)
        if not self._is_rehearsed:  # hooks may have come since the engine was made
            self._refusal = self._refusal or self._of_all(why_not_known(engine.module))
        if self._refusal:
            return self._unchanged(partial(run, *args, **kwargs))
        if self._micro_step != engine.micro_steps:
            self._micro_step, self._waiting = engine.micro_steps, []
        call = Call(run, engine.module, args, kwargs, random_states(engine.comm.device))
        self._rehearse(call)
        while True:
            try:
                return self._shown(call)
            except _NotEnough as raised:
                error = raised.error
            self._change([call], error)
            restore_random_states(call.random, engine.comm.device)

    def backward(self, run: Callable[[], torch.Tensor], retain_graph: bool) -> torch.Tensor:
        """Run `run`, the engine's backward of the loss, which ends at the outputs shown."""
        if retain_graph:
            raise UsageError(f'{KEY} "adapt": retain_graph keeps a graph; set it to "explain"')
        engine, reducer, waiting = self._engine, self._engine.reducer, self._waiting
        if self._refusal:
            return self._unchanged(run)
        if reducer.backwards == 0:
            self._done, self._backwards = [], 0
        before = reducer.backwards
        try:
            result = run()
        except BaseException:
            # What has arrived at the outputs is of no loss that another backward continues.
            self._waiting = [each for each in waiting if not each.gradients()]
            raise
        calls = [each for each in waiting if each.gradients()]
        if not calls:
            return result  # the script computes its loss itself
        self._waiting = []
        is_known = self._backwards == before == reducer.backwards
        for call in calls:  # logits are large
            call.shown = {place: call.shown[place] for place in call.gradients()}
            call.outputs = {place: call.outputs[place] for place in call.shown if call.outputs}
        after = random_states(engine.comm.device)
        calls_to_repeat: list[Call] = []
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

    def require_repeatable(self) -> None:
        """Before a step: raise UsageError if a backward has ended at the loss and no other call has
        continued from there.
        """
        if any(call.gradients() for call in self._waiting):
            raise UsageError(
                f'{KEY} "adapt": call engine.backward(loss) instead of loss.backward(), which '
                'cannot be repeated; or set it to "explain"'
            )

    def _unchanged(self, run: Callable[[], T]) -> T:
        """Run a forward or backward that cannot be repeated."""
        try:
            return run()
        except Exception as error:
            if full_memory(error) is not None:
                explain(self._engine, error)
                raise _final(error, self._refusal) from None
            raise

    def _rehearse(self, call: Call) -> None:
        """Before the first micro-batch at stage 3, run a forward and backward of one sample. See
        the note.
        """
        engine, is_first = self._engine, not self._is_rehearsed
        self._is_rehearsed = True
        if not self._gathers_with_others:
            return
        if self._waiting:
            raise UsageError(
                f'{KEY} "adapt": at stage 3 with several processes, call backward before the next '
                'forward; or set it to "explain"'
            )
        if not is_first:
            return
        if recomputes := self._can_recompute:  # starts the same gathers, in less memory
            self._recompute()
        leaves = self._together(_FORWARD, lambda: tree_flatten(call.run_one())[0])
        outputs = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
        del leaves, outputs[1:]
        if outputs:
            self._run_backward(outputs, [torch.ones_like(outputs[0])])
        if recomputes:
            engine.module.gradient_checkpointing_disable()  # pyright: ignore[reportCallIssue]
        engine.hooks.forget_broken_pass()
        engine.reshard()
        engine.reducer.clear()
        restore_random_states(call.random, engine.comm.device)
        self._require_unwritten([call])
        recorded = self._control.exchange(engine.hooks.recorder.names)
        if any(each != recorded[0] for each in recorded):
            raise UsageError(
                f'{KEY} "adapt": processes go different ways through the model; set it to "explain"'
            )

    # -- one try

    def _shown(self, call: Call) -> Any:
        """The outputs of a forward, without their graphs."""
        leaves, structure = tree_flatten(self._together(_FORWARD, call.run_all))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                call.outputs[place] = leaf
                call.shown[place] = shown = leaf.detach().requires_grad_()
                # The Trainer scales the loss in place, which torch forbids for a leaf.
                leaves[place] = shown if shown.dim() else shown.clone()
        self._waiting.append(call)
        return tree_unflatten(leaves, structure)

    def _gradients(self, calls: Sequence[Call]) -> None:
        """Run the backward of forwards that still have their graphs."""
        outputs = [each for call in calls for each in call.outputs.values()]
        grads = [each for call in calls for each in call.gradients().values()]
        for call in calls:
            call.outputs = {}
        self._run_backward(outputs, grads)

    def _repeat(self, calls: Sequence[Call]) -> None:
        """Run the forward and backward of micro-batches. The last one is the current one, which may
        be the last of its step.
        """
        engine = self._engine
        self._require_unwritten(calls)
        for call in calls:
            restore_random_states(call.random, engine.comm.device)
            with engine.micro_batches.repeating(is_last=call is calls[-1]):
                self._run_backward(*self._together(_FORWARD, call.run_for_gradients))

    def _run_backward(self, outputs: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Empty `outputs`, so that the graph is freed on the way."""
        engine = self._engine

        def run() -> None:
            backward = engine.micro_batches.engine_backward(is_divided=False, is_scaled=True)
            with backward, engine.comm.clock.phase("backward"):
                torch.autograd.backward(outputs, grads)

        self._together(_BACKWARD, run, held=outputs)
        outputs.clear()

    def _together(self, kind: str, act: Callable[[], T], held: list | None = None) -> T:
        """Return what `act` returns, a forward or backward; raise _NotEnough on all ranks if one of
        them ran out of memory, and any other error of one rank on all.

        `held` contains tensors that a rank frees if it runs out of memory.
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
            if (other or error) is not None and self._control.world_size > 1:
                if held is not None:
                    held.clear()
                if not self._gathers_with_others or hooks.recorder.can_replay:
                    self._join()
                else:
                    why = f"this process has no room for a {kind} of one sample"
                    raise other or _final(error, why)
        failed = error is not None
        try:
            if self._control.world_size > 1:
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
        reducer.drop_collected()
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

    def _change(self, calls: Sequence[Call], error: Exception | None) -> None:
        """Make the next change, the same on all ranks; raise `error` if nothing is left to change.
        See the note.
        """
        self._free()
        engine, slices = self._engine, self._engine.slices
        schedule, stage = engine.schedule, engine.settings.zero_optimization.stage
        refusal = self._of_all(self._why_not_repeated(calls, error))
        is_compiled = engine.is_compiled and slices.number == 1
        why_whole = self._of_all("blocks are compiled" if is_compiled else slices.why_not())
        counts = self._of_ranks((slices.number, slices.samples))
        number, samples = map(max, zip(*counts, strict=True))
        keeps_cache = any(call.depends_on_cache for call in calls)
        can_recompute = all(self._of_ranks(self._can_recompute and not keeps_cache))
        if refusal:
            raise _final(error, refusal)
        if can_recompute:
            self._recompute()
            done = "activations are now recomputed in backward"
        elif stage == 3 and schedule.max_live_parameters:
            schedule.limit_live_parameters(0)
            done = "zero_optimization.stage3_max_live_parameters is now 0"
        elif number < samples and not why_whole:
            number = min(2 * number, samples)
            slices.refine(number)
            done = f"each block now runs its batch in {number} slices"
        elif is_accelerator(engine.comm.device) and engine.activations is None:
            engine.activations = HostActivations(engine.comm.device)
            done = "activations now wait for backward in host memory"
        else:
            in_slices = f"a batch of {samples} sample(s) runs in {number} slice(s) already"
            raise _final(error, why_whole or in_slices)
        if self._control.rank == 0:
            step = engine.global_steps + 1
            logger.warning("step %d ran out of memory, so %s, and the step is repeated", step, done)

    def _require_unwritten(self, calls: Sequence[Call]) -> None:
        """Raise UsageError if a rank's calls would not get what they have got at first."""
        if why := self._of_all(_first(call.why_final for call in calls)):
            raise UsageError(f'{KEY} "adapt": {why}; set it to "explain"')

    def _why_not_repeated(self, calls: Sequence[Call], error: Exception | None) -> str:
        engine = self._engine
        if why := _first(call.why_final for call in calls):
            return why
        elsewhere = error is not None and full_memory(error) != place_of(engine.comm.device)
        if elsewhere and engine.activations is None:
            return _NOT_THERE
        return why_not_known(engine.module)

    @property
    def _can_recompute(self) -> bool:
        module = self._engine.module
        can = getattr(module, "supports_gradient_checkpointing", False)
        return can and not getattr(module, "is_gradient_checkpointing", False)

    def _recompute(self) -> None:
        enable: Any = self._engine.module.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def _of_ranks(self, value: T) -> list[T]:
        """The value of each rank."""
        return self._control.exchange(lambda: value)

    def _of_all(self, why: str) -> str:
        """The first reason that a rank gives, or an empty text."""
        return _first(self._of_ranks(why))


def _first(reasons: Iterable[str]) -> str:
    return next(filter(None, reasons), "")


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


def _final(error: Exception | None, why: str) -> Exception:
    error = error or torch.OutOfMemoryError("another rank ran out of memory")
    add_line(error, f'zero: {KEY} is "adapt", but nothing more can be changed: {why}')
    return error
