"""The gradients of one backward on the device of one rank, for `zero estimate`: as `zero/gradients.py` reduces them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from zero.config import Config
from zero.estimate.buffers import Staging
from zero.estimate.messages import of_reduction
from zero.estimate.states import DISK, Kept

# A part of device memory: at stages 0 and 1, in whole units.
SUMS = "sums of micro-batches"


class Gradients:
    """Bytes until the reduction of gradients has ended.

    Args: look: is called with the temporary bytes of a reduction while these are there; adds: to those of earlier
    micro-batches; sums: of those there are sums in whole units, not reduced yet; keeps: this backward's gradients are
    added to these sums, and not reduced.
    """

    def __init__(
        self,
        config: Config,
        units: Sequence[Kept],
        world_size: int,
        staging: Staging,
        look: Callable[[int], None],
        adds: bool,
        sums: bool = False,
        keeps: bool = False,
    ):
        zero, self._keeps, self._sum_item = config.zero_optimization, keeps, config.sum_dtype.itemsize
        self._has_sums, self._flat = sums, 0
        self.sums = sum(self._sum_of(unit) for unit in units if unit.trainable) if sums else 0
        self._units, self._world_size, self._staging, self._adds = units, world_size, staging, adds
        self._item, self._look = config.compute_dtype.itemsize, look
        self._kept_item = config.gradient_bytes(sums_have_16_bits=True)
        unasked = config.sum_dtype if sums else config.compute_dtype
        self._sent_item = ((world_size > 1 and config.communication_data_type) or unasked).itemsize
        self._bucket, self._overlaps = zero.reduce_bucket_size, zero.overlap_comm
        self._extras = [of_reduction(unit, config, world_size, self._sent_item, adds) for unit in units]
        self._in_flight: deque[int] = deque()  # numbers of units
        self._leaving: deque[tuple[Kept, int]] = deque()
        self.apart = 0
        self.kept = sum(unit.gradient for unit in units if not unit.offloaded) if adds else 0

    def _sum_of(self, unit: Kept) -> int:
        return unit.layout.padded * self._sum_item

    def collect(self, numel: int) -> None:
        self.apart += numel * self._item

    def flatten(self, number: int) -> None:
        """Gradients of a unit are copied to a flat buffer, which is about to be reduced, or added to the sums."""
        unit = self._units[number]
        self._flat = unit.layout.padded * (self._item if self._keeps or self._has_sums else self._sent_item)
        if self._adds and _is_in_file(unit):
            self._staging.copy_in(self._staging.take(unit.gradient))

    def reduce(self, number: int) -> None:
        """The copies' originals are free."""
        unit = self._units[number]
        self.apart -= unit.layout.numel * self._item
        if self._keeps:
            self._keep(unit)
            return
        if self._has_sums:  # the sum is what is reduced; in another dtype, there are both for a moment
            self.sums -= self._sum_of(unit)
            self._flat = unit.layout.padded * self._sent_item
            self._look(self._sum_of(unit) if self._sent_item != self._sum_item else 0)
        if self._is_result(unit):
            self._flat = 0
            self.kept += 0 if unit.offloaded or self._adds else unit.gradient
            self._take_out(unit)
            return
        while self._in_flight and self._flying + unit.layout.padded > self._bucket:
            self._finish_oldest()
        self._flat = 0
        self._in_flight.append(number)
        self.kept += 0 if unit.offloaded or self._adds else unit.gradient
        self._look(self._extras[number].start)
        if not self._overlaps:
            self._finish_oldest()

    def _is_result(self, unit: Kept) -> bool:
        """Whether the flat buffer of one rank is kept, or added to what is kept."""
        return self._world_size == 1 and self._sent_item == self._kept_item and not (unit.offloaded and self._adds)

    def _keep(self, unit: Kept) -> None:
        """The flat buffer is added to the sum, or becomes the first one, in its dtype."""
        if not self._has_sums:
            self._flat = 0 if self._item == self._sum_item else self._flat
            self.sums += self._sum_of(unit)
            self._look(0)
        self._flat = 0

    @property
    def _flying(self) -> int:
        """Elements whose reduction has started."""
        return sum(self._units[number].layout.padded for number in self._in_flight)

    def _finish_oldest(self) -> None:
        self._look(self._extras[self._in_flight[0]].end)
        self._take_out(self._units[self._in_flight.popleft()])

    def _take_out(self, unit: Kept) -> None:
        """The result of an offloaded unit leaves the device."""
        if unit.offloaded:
            self._leave(most=1)
            self._leaving.append((unit, self._staging.take(unit.gradient) if _is_in_file(unit) else 0))

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
        """Bytes that are not kept: gradients apart, flat buffers, messages, results on their way to another tier."""
        results = sum(unit.gradient for unit in map(self._units.__getitem__, self._in_flight) if unit.offloaded)
        flying = self._flying * self._sent_item + sum(self._extras[number].held for number in self._in_flight)
        return self.apart + self._flat + flying + results + sum(unit.gradient for unit, _ in self._leaving)


def _is_in_file(unit: Kept) -> bool:
    return unit.place(unit.gradient) == DISK
