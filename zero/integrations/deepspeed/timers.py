"""`deepspeed.utils.timer`: stopwatches by name, and samples per second.

The engine's own clock is `zero.comm.clock`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from zero.comm.clock import Throughput
from zero.integrations.deepspeed.accelerator import get_accelerator
from zero.integrations.deepspeed.utilities import log_dist, logger


class SynchronizedWallClockTimer:
    """Stopwatches by name:

    `timers("forward").start()`. Each waits for the device when it is started or stopped.
    """

    class Timer:
        """One stopwatch; all durations in milliseconds.

        Arguments without a description are for compatibility.
        """

        def __init__(self, name: str):
            self.name_ = name
            self.started_ = False
            self.records = []
            self._start = 0.0

        def start(self) -> None:
            assert not self.started_, f"{self.name_} timer has already been started"
            get_accelerator().synchronize()
            self._start = time.perf_counter()
            self.started_ = True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            assert self.started_, "timer is not started"
            get_accelerator().synchronize()
            self.records.append(1000 * (time.perf_counter() - self._start))
            self.started_ = False

        def reset(self) -> None:
            self.records = []
            self.started_ = False

        def elapsed(self, reset: bool = True) -> float:
            """The sum so far; a running stopwatch goes on."""
            running = self.started_
            if running:
                self.stop()
            total = sum(self.records)
            if reset:
                self.reset()
            if running:
                self.start()
            return total

        def mean(self) -> float:
            return statistics.fmean(self.records) if self.records else 0.0

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, self.Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        return self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log these stopwatches, each divided by `normalizer`, from `ranks` (default: 0)."""
        known = [name for name in names if name in self.timers]
        parts = [f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in known]
        log_dist(" | ".join(["time (ms)", *parts]), ranks or [0])

    def get_mean(
        self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        return {
            name: self.timers[name].mean() / normalizer for name in names if name in self.timers
        }


class NoopTimer(SynchronizedWallClockTimer):
    """Stopwatches that always show 0, for scripts that switch timing off."""

    def _nothing(self, *args: object, **kwargs: object) -> None:
        pass

    log = _nothing
    Timer = type(
        "Timer", (SynchronizedWallClockTimer.Timer,), {"start": _nothing, "stop": _nothing}
    )


class ThroughputTimer(Throughput):
    """`Throughput`, which acts if `config.enabled` and logs the samples per second every
    `steps_per_output` steps.
    """

    def __init__(
        self,
        config: object,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ):
        super().__init__(batch_size or 1, start_step)
        self.config = config
        self.steps_per_output = steps_per_output
        self.logging = logging_fn or logger.info

    def start(self) -> None:
        if self.config.enabled:
            super().start()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        super().stop(global_step)
        if global_step and report_speed and self.steps_per_output:
            if self.global_step_count % self.steps_per_output == 0:
                self.logging(
                    f"step {self.global_step_count}: {self.avg_samples_per_sec():.4g} samples per "
                    "second"
                )
