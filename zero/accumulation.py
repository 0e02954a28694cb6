"""The calls by which a script says where a step ends, and when gradients are reduced.

The state is in `zero.core.micro_batches`. This file knows nothing about groups or the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zero.config import ResolvedConfig
from zero.core.micro_batches import MicroBatches
from zero.core.reduction import GradientReducer
from zero.errors import UsageError


class Accumulation:
    """Mixed into the engine, which sets `reducer`.

    Attributes:
        micro_batches: shared with the hooks and the reducer.
        global_samples: samples of all ranks in all steps so far.
    """

    reducer: GradientReducer

    def __init__(self, settings: ResolvedConfig) -> None:
        super().__init__()
        self.settings = settings
        self.global_samples = 0
        self.micro_batches = MicroBatches(
            settings.gradient_accumulation_steps,
            settings.managed_gradient_accumulation,
            scales_loss=settings.fp16.enabled,
        )

    @property
    def micro_steps(self) -> int:
        """The number of calls of `step()` so far."""
        return self.micro_batches.count

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        self.micro_batches.count = count

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches. If not, each call of `step()` ends the
        accumulation.
        """
        return self.micro_batches.managed

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before the parameters are updated."""
        return self.micro_batches.is_last

    @property
    def ends_step(self) -> bool:
        """Whether the next call of `step()` updates the parameters."""
        return self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the current micro-batch is the last one of a step. From now on the engine
        no longer counts micro-batches itself.
        """
        if not self.managed_gradient_accumulation():
            raise UsageError(
                "set_gradient_accumulation_boundary: managed_gradient_accumulation is false, so "
                "that each step() is the boundary; leave the call out"
            )
        self.micro_batches.boundary = is_boundary

    def _count_samples(self) -> None:
        """At the end of an accumulation, before its gradients are forgotten."""
        steps = self.settings.gradient_accumulation_steps
        steps_made = steps if self.managed_gradient_accumulation() else self.reducer.backwards
        self.global_samples += self.settings.train_batch_size // steps * steps_made

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients are not reduced over the ranks, at stages 0 and 1.

        Leave it before you call `step()`.
        """
        stage = self.settings.zero_optimization.stage
        if stage >= 2:
            raise UsageError(
                f"no_sync context manager is incompatible with zero_optimization.stage {stage}: at "
                "this ZeRO stage no "
                "rank keeps whole gradients; use stage 1, or coalesce_grad_reduction()"
            )
        if self.micro_batches.holds_back:
            raise UsageError(
                "no_sync context manager reentry is unsupported: leave the first one before the "
                "second"
            )
        self.micro_batches.holds_back = True
        try:
            yield
        finally:
            self.micro_batches.holds_back = False

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """A context in which the gradients of several backward passes are reduced only once, when
        the context ends, at stages 1 to 3.

        Until then each rank holds full gradients, as at stage 1. Leave the context before you call
        `step()`. A boundary that is set inside is reset when the context ends."""
        if not self.managed_gradient_accumulation():
            raise UsageError(
                "coalesce_grad_reduction: managed_gradient_accumulation is false, so that step() "
                "ends the accumulation"
            )
        if self.settings.zero_optimization.stage == 0:
            raise NotImplementedError(
                "coalesce_grad_reduction acts at zero_optimization.stage 1 to 3; use no_sync()"
            )
        if self.micro_batches.holds_back:
            raise UsageError(
                "coalesce_grad_reduction cannot be nested inside another one or inside no_sync"
            )
        boundary = self.micro_batches.boundary
        self.micro_batches.holds_back = True
        try:
            with self.reducer.deferring():
                yield
        finally:
            self.micro_batches.holds_back = False
            self.micro_batches.boundary = boundary
