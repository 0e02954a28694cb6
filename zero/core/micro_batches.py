"""Micro-batches: which one is the last of its step, and by what its gradients are multiplied.

The engine records here what its caller does, and the hooks and the reducer query it when they need
to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from zero.errors import UsageError

logger = logging.getLogger("zero")


class MicroBatches:
    """The micro-batches of one engine.

    Args:
        steps: micro-batches in a step.
        managed: the engine counts them; otherwise the script's call of `step()` ends the
            accumulation.
        scales_loss: training has a loss scale.

    Attributes:
        count: calls of `step()` so far.
        boundary: whether the current micro-batch is the last one, as the script has set it; None:
            by the count.
        holds_back: no gradient is reduced now (`no_sync`).
        loss_was_scaled: the next backward begins with a loss that was scaled.
        factor: by which the gradients of the current backward are multiplied.
        offloaded: states that are on the host until `reload_states`; meanwhile nothing may be
            computed.
    """

    # How many engines are running `backward` now: the loss of one engine may depend on outputs of
    # others.
    backwards_of_engines: ClassVar[int] = 0

    def __init__(self, steps: int, managed: bool = True, scales_loss: bool = False):
        self.steps = steps
        self.managed = managed
        self.scales_loss = scales_loss
        self.count = 0
        self.boundary: bool | None = None
        self.holds_back = False
        self.loss_was_scaled = False
        self.factor = 1.0
        # The last micro-batch whose loss `engine.backward` has divided; None after the warning.
        self._divided: int | None = -1
        self.offloaded: set[str] = set()

    @property
    def is_last(self) -> bool:
        """Whether the parameters are known to change after the current micro-batch."""
        if self.boundary is not None:
            return self.boundary
        return self.managed and (self.count + 1) % self.steps == 0

    @property
    def reduces_now(self) -> bool:
        """Whether the sum over micro-batches is complete with this one: stages 0 and 1 reduce it
        then, not before.
        """
        return self.is_last and not self.holds_back

    @contextmanager
    def holding_back(self, nested: str) -> Iterator[None]:
        """Context in which no gradient is reduced.

        Raises UsageError with the words `nested` inside of another one.
        """
        if self.holds_back:
            raise UsageError(f"{nested}: leave the first one before the second")
        self.holds_back = True
        try:
            yield
        finally:
            self.holds_back = False

    @contextmanager
    def repeating(self, is_last: bool) -> Iterator[None]:
        """Context of the repetition of one of the step's micro-batches so far: `reduces_now` is
        false before the last one, which is the current one.
        """
        boundary = self.boundary
        if not is_last:
            self.boundary = False
        try:
            yield
        finally:
            self.boundary = boundary

    @contextmanager
    def engine_backward(self, is_divided: bool = True, is_scaled: bool = False) -> Iterator[None]:
        """Context of a backward that the engine runs. `is_divided`: its loss, by `steps`.
        `is_scaled`: the loss scale is in the gradients with which it begins.
        """
        MicroBatches.backwards_of_engines += 1
        self.loss_was_scaled |= is_scaled
        if is_divided and self.steps > 1 and self._divided is not None:
            self._divided = self.count
        try:
            yield
        finally:
            MicroBatches.backwards_of_engines -= 1
            self.loss_was_scaled = False

    def gradients_begin(self) -> None:
        """The first gradient of a backward has arrived.

        Raises RuntimeError if its loss should have been scaled, UsageError if states are offloaded.
        """
        self.refuse_offloaded("backward")
        if self.scales_loss and not self.loss_was_scaled:
            raise RuntimeError(
                "Loss scaling is required with fp16, and the loss was not scaled: call "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )
        by_engine = MicroBatches.backwards_of_engines > 0
        self.factor = 1.0 if by_engine else 1.0 / self.steps
        if not by_engine and self._divided == self.count:
            self._divided = None
            logger.warning(
                "the script runs backward() after engine.backward(loss) in one micro-batch. If it "
                "continues with gradients of that loss, they are divided by "
                "gradient_accumulation_steps twice: call engine.scale(loss).backward() instead of "
                "engine.backward(loss)"
            )
        self.loss_was_scaled &= by_engine

    def refuse_offloaded(self, what: str) -> None:
        """Raise UsageError if states are on the host: `what` needs them on the device."""
        if self.offloaded:
            raise UsageError(
                f"{what}: {', '.join(sorted(self.offloaded))} are offloaded; call "
                "engine.reload_states() first"
            )
