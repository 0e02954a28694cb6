"""The gradients of one backward on the device of one rank, for `zero estimate`: as
`zero/core/reduction.py` reduces them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from zero.config import Config
from zero.tools.estimate.buffers import Staging
from zero.tools.estimate.messages import of_reduction
from zero.tools.estimate.states import DISK, Kept

# A part of device memory: at stages 0 and 1, in whole groups.
SUMS = "sums of micro-batches"


class Gradients:
    """Bytes until the reduction of gradients has ended.

    Args: look: is called with the temporary bytes of a reduction while these are there; adds: to
    those of earlier micro-batches; sums: of those there are sums in whole groups, not reduced yet;
    keeps: this backward's gradients are added to these sums, and not reduced."""

    def __init__(
        self,
        config: Config,
        groups: Sequence[Kept],
        world_size: int,
        staging: Staging,
        look: Callable[[int], None],
        adds: bool,
        sums: bool = False,
        keeps: bool = False,
    ):
        zero, self._keeps, self._sum_item = (
            config.zero_optimization,
            keeps,
            config.sum_dtype.itemsize,
        )
        self._has_sums = sums
        self._flat = 0
        self.sums = sum(self._sum_of(group) for group in groups if group.trainable) if sums else 0
        self._groups = groups
        self._world_size = world_size
        self._staging = staging
        self._adds = adds
        self._item = config.compute_dtype.itemsize
        self._look = look
        self._kept_item = config.gradient_bytes(sums_have_16_bits=True)
        unasked = config.sum_dtype if sums else config.compute_dtype
        self._sent_item = ((world_size > 1 and config.communication_data_type) or unasked).itemsize
        self._bucket = zero.reduce_bucket_size
        self._overlaps = zero.overlap_comm
        self._extras = [
            of_reduction(group, config, world_size, self._sent_item, adds) for group in groups
        ]
        self._in_flight: deque[int] = deque()  # numbers of groups
        self._leaving: deque[tuple[Kept, int]] = deque()
        self.apart = 0
        self.kept = sum(group.gradient for group in groups if not group.offloaded) if adds else 0

    def _sum_of(self, group: Kept) -> int:
        return group.layout.padded * self._sum_item

    def collect(self, numel: int) -> None:
        self.apart += numel * self._item

    def flatten(self, number: int) -> None:
        """Gradients of a group are copied to a flat buffer, which is about to be reduced, or added
        to the sums.
        """
        group = self._groups[number]
        self._flat = group.layout.padded * (
            self._item if self._keeps or self._has_sums else self._sent_item
        )
        if self._adds and _is_in_file(group):
            self._staging.copy_in(self._staging.take(group.gradient))

    def reduce(self, number: int) -> None:
        """The copies' originals are free."""
        group = self._groups[number]
        self.apart -= group.layout.numel * self._item
        if self._keeps:
            self._keep(group)
            return
        if (
            self._has_sums
        ):  # the sum is what is reduced; in another dtype, there are both for a moment
            self.sums -= self._sum_of(group)
            self._flat = group.layout.padded * self._sent_item
            self._look(self._sum_of(group) if self._sent_item != self._sum_item else 0)
        if self._is_result(group):
            self._flat = 0
            self.kept += 0 if group.offloaded or self._adds else group.gradient
            self._take_out(group)
            return
        while self._in_flight and self._flying + group.layout.padded > self._bucket:
            self._finish_oldest()
        self._flat = 0
        self._in_flight.append(number)
        self.kept += 0 if group.offloaded or self._adds else group.gradient
        self._look(self._extras[number].start)
        if not self._overlaps:
            self._finish_oldest()

    def _is_result(self, group: Kept) -> bool:
        """Whether the flat buffer of one rank is kept, or added to what is kept."""
        return (
            self._world_size == 1
            and self._sent_item == self._kept_item
            and not (group.offloaded and self._adds)
        )

    def _keep(self, group: Kept) -> None:
        """The flat buffer is added to the sum, or becomes the first one, in its dtype."""
        if not self._has_sums:
            self._flat = 0 if self._item == self._sum_item else self._flat
            self.sums += self._sum_of(group)
            self._look(0)
        self._flat = 0

    @property
    def _flying(self) -> int:
        """Elements whose reduction has started."""
        return sum(self._groups[number].layout.padded for number in self._in_flight)

    def _finish_oldest(self) -> None:
        self._look(self._extras[self._in_flight[0]].end)
        self._take_out(self._groups[self._in_flight.popleft()])

    def _take_out(self, group: Kept) -> None:
        """The result of an offloaded group leaves the device."""
        if group.offloaded:
            self._leave(most=1)
            self._leaving.append(
                (group, self._staging.take(group.gradient) if _is_in_file(group) else 0)
            )

    def _leave(self, most: int) -> None:
        """Wait until at most so many are on their way from the device."""
        while len(self._leaving) > most:
            if buffer := self._leaving.popleft()[1]:
                self._staging.give([buffer])

    def end(self) -> None:
        while self._in_flight:
            self._finish_oldest()
        self._leave(most=0)

    @property
    def moving(self) -> int:
        """Bytes that are not kept: gradients apart, flat buffers, messages, results on their way to
        another tier.
        """
        results = sum(
            group.gradient
            for group in map(self._groups.__getitem__, self._in_flight)
            if group.offloaded
        )
        flying = self._flying * self._sent_item + sum(
            self._extras[number].held for number in self._in_flight
        )
        return (
            self.apart
            + self._flat
            + flying
            + results
            + sum(group.gradient for group, _ in self._leaving)
        )


def _is_in_file(group: Kept) -> bool:
    return group.place(group.gradient) == DISK
