"""Measures each optimizer step of one engine and has rank 0 write it.

All ranks take part: a record has the mean loss of all of them, their memory, and the slowest one's
name. This file does not know where a record goes."""

from __future__ import annotations

import logging
import math
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zero.comm import traffic
from zero.comm.world import ranks_of_machine
from zero.config.monitor import FlopsProfilerConfig
from zero.device import CPU, is_accelerator, memory_in_use, peak_memory
from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.monitor.collectives import use_log
from zero.monitor.facts import facts
from zero.monitor.memory_usage import held
from zero.monitor.mfu import operations_per_token, peak
from zero.monitor.writers import Record, Writer, writers

logger = logging.getLogger("zero")

# What each rank tells: columns of the table that is summed over ranks.
_COLUMNS = (
    "loss", "has_loss", "seconds", "waited", "host_memory", "host_memory_now", "device_memory",
    "device_memory_now",
    "tokens", "operations",
)  # fmt: skip
_DISK = {traffic.READ: "read", traffic.WRITTEN: "written"}


def make(engine: ZeroEngine) -> Monitor | None:
    """The engine's monitor, or None where the configuration asks for nothing."""
    settings = engine.settings
    sections = (settings.csv_monitor, settings.json_monitor, settings.tensorboard, settings.wandb)
    # accelerate sets `steps_per_print` to infinity.
    asked = any(section.enabled for section in sections) or math.isfinite(
        settings.steps_per_print or math.inf
    )
    others = settings.wall_clock_breakdown, settings.memory_breakdown
    if not (
        asked or any(others) or settings.flops_profiler.enabled or settings.comms_logger.enabled
    ):
        return None
    found, problem = [], None
    if engine.comm.job.rank == 0:
        try:
            found = writers(settings)
        except UsageError as error:
            problem = str(error)
    if problem := engine.comm.exchange(problem)[0]:
        raise UsageError(problem)
    return Monitor(engine, found, asked)


class Monitor:
    """Follows one engine. The engine calls `loss` for each micro-batch, and `end_step` after each
    optimizer step.

    `gathers`: records are wanted, so all ranks exchange their numbers after each step. They are one
    small all-reduce."""

    def __init__(self, engine: ZeroEngine, writers: list[Writer], gathers: bool):
        self._engine = engine
        self._writers = writers
        self._gathers = gathers
        self._losses: list[torch.Tensor] = []
        self._is_first = True
        self._warnings = _Warnings()
        self._operations = operations_per_token(engine)
        self._peak = peak(engine.comm.device, engine.settings.compute_dtype)
        self._begin()
        # What ends with the engine, whether it is destroyed or only forgotten.
        self._endings: list[weakref.finalize] = []
        if gathers:
            hook = engine.module.register_forward_pre_hook(self._count_tokens, with_kwargs=True)
            self._at_end(hook.remove)
        if writers:
            logger.addFilter(self._warnings)
            self._at_end(logger.removeFilter, self._warnings)
        if engine.settings.comms_logger.enabled:
            self._at_end(use_log(engine.settings.comms_logger, engine.comm.job).leave)
        profiler = engine.settings.flops_profiler
        self._flops = (
            Flops(engine, profiler) if profiler.enabled and engine.comm.job.rank == 0 else None
        )
        if self._flops is not None:
            self._flops.before_step(1)

    def _at_end(self, act: Callable[..., object], *args: object) -> None:
        self._endings.append(weakref.finalize(self, act, *args))

    def close(self) -> None:
        """The engine is destroyed: another one of the same model has a monitor of its own."""
        for ending in self._endings:
            ending()

    def _begin(self) -> None:
        """A step begins."""
        self._tokens = self._done = 0
        self._moved = self._counts()
        self._start = time.perf_counter()

    def _counts(self) -> tuple[Counter[str], ...]:
        """So far: elements and bytes of collectives, bytes by link, and seconds in which the disk
        was busy.
        """
        busy = Counter({link: traffic.busy_seconds(link) for link in _DISK})
        return (
            Counter(self._engine.comm.elements),
            Counter(self._engine.comm.bytes),
            Counter(traffic.MOVED),
            busy,
        )

    def _count_tokens(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Tokens, padding included, of what a model of language is given: those of `input_ids`, and
        of a decoder.

        Also the operations that they take.
        """
        if torch.is_grad_enabled() and torch.is_tensor(
            ids := kwargs.get("input_ids", args[0] if args else None)
        ):
            is_text = ids.dim() == 2 and not ids.is_floating_point()
            of_decoder = kwargs.get("decoder_input_ids", kwargs.get("labels"))
            two = is_text and getattr(getattr(module, "config", None), "is_encoder_decoder", False)
            counts = (
                is_text * ids.numel(),
                of_decoder.numel() if two and of_decoder is not None else 0,
            )
            self._tokens += sum(counts)
            self._done += counts[0] * self._operations[0] + counts[1] * self._operations[1]

    def loss(self, loss: torch.Tensor) -> None:
        """A micro-batch's loss, divided by the number of micro-batches."""
        self._losses.append(loss.detach())

    def end_step(self) -> None:
        """An optimizer step is over."""
        engine, seconds = self._engine, time.perf_counter() - self._start
        if self._flops is not None:
            self._flops.after_step(engine.global_steps, seconds)
        if self._gathers:
            table = self._gather(seconds)
            if self._writers:
                self._write(self._record(table))
        if engine.settings.wall_clock_breakdown and engine.comm.job.rank == 0:
            print(f"step {engine.global_steps}: {engine.comm.clock}", file=sys.stderr)
        if engine.settings.memory_breakdown and engine.comm.job.rank == 0:
            print(f"step {engine.global_steps}: {_memory_line(engine)}", file=sys.stderr)
        engine.comm.clock.reset()
        self._losses.clear()
        self._begin()
        if self._flops is not None:
            self._flops.before_step(engine.global_steps + 1)

    def _write(self, record: Record) -> None:
        """A full or missing disk ends the writing, not the training."""
        if self._is_first:
            record["run"], self._is_first = facts(self._engine), False
        if self._warnings.met:
            record["warnings"], self._warnings.met = self._warnings.met, []
        for writer in list(self._writers):
            try:
                writer.write(record)
            except OSError as error:
                logger.warning("%s: nothing more is written here: %s", type(writer).__name__, error)
                self._writers.remove(writer)

    def _gather(self, seconds: float) -> torch.Tensor:
        """Every rank's numbers: (ranks, columns), fp64, on the host."""
        comm = self._engine.comm.job
        total = (
            torch.stack([loss.double() for loss in self._losses]).sum().item()
            if self._losses
            else 0.0
        )
        # Without an accelerator there is no memory of a device.
        present = is_accelerator(comm.device)
        own = [
            total,
            float(bool(self._losses)),
            seconds,
            sum(comm.clock.waits.values()),
            peak_memory(CPU),
            memory_in_use(CPU),
            peak_memory(comm.device) * present,
            memory_in_use(comm.device) * present,
            self._tokens,
            self._done,
        ]
        table = torch.zeros(comm.world_size, len(_COLUMNS), dtype=torch.float64, device=comm.device)
        table[comm.rank] = torch.tensor(own, dtype=torch.float64)
        return comm.all_reduce(table).cpu()

    def _record(self, table: torch.Tensor) -> Record:
        engine, clock = self._engine, self._engine.comm.clock
        column = {name: table[:, number] for number, name in enumerate(_COLUMNS)}
        ranks = column["has_loss"].sum().item()
        # A rank that others wait for waits least.
        slowest = int((column["seconds"] - column["waited"]).argmax())
        waits = {
            f"{phase}_{what.replace(' ', '_')}": round(spent, 6)
            for (phase, what), spent in clock.waits.items()
        }
        seconds = column["seconds"].max().item()
        of_ranks = column["tokens"].sum().item() / seconds  # model groups share their tokens
        flops = column["operations"].mean().item() / seconds
        names = (*traffic.LINKS, traffic.BETWEEN) if ranks_of_machine() else traffic.LINKS
        elements, nbytes, moved, busy = (
            now - before for now, before in zip(self._counts(), self._moved, strict=True)
        )
        return {
            "step": engine.global_steps,
            "samples": engine.global_samples,
            "loss": _finite(column["loss"].sum().item() / ranks) if ranks else None,
            "skipped": not engine.was_step_applied(),
            "grad_norm": _finite(engine.get_global_grad_norm()),
            "lr": float(engine.optimizer.param_groups[0]["lr"]),
            "loss_scale": None if engine.scaler is None else engine.scaler.scale,
            "samples_per_second": engine.settings.train_batch_size / seconds,
            "tokens_per_second": of_ranks
            / (engine.comm.model.world_size if engine.comm.model else 1)
            or None,
            "model_flops_per_second": flops or None,
            "mfu": flops / self._peak if flops and self._peak else None,
            "seconds": {name: round(spent, 6) for name, spent in clock.phases.items()},
            "waits": waits,
            "elements": dict(elements),
            "bytes": dict(nbytes),
            "links": {link: moved[link] for link in names},
            "disk_bytes_per_second": {
                name: moved[link] / busy[link] for link, name in _DISK.items() if busy[link]
            },
            "memory": {
                "gathered_elements_peak": engine.residency.peak,
                "host_bytes_peak": int(column["host_memory"].max()),
                "device_bytes_peak": int(column["device_memory"].max()),
            },
            "ranks": {
                "slowest": slowest,
                "working_seconds": [
                    round(each, 6) for each in (column["seconds"] - column["waited"]).tolist()
                ],
                "host_bytes_peak": column["host_memory"].long().tolist(),
                "host_bytes": column["host_memory_now"].long().tolist(),
                "device_bytes_peak": column["device_memory"].long().tolist(),
                "device_bytes": column["device_memory_now"].long().tolist(),
            },
        }


class _Warnings(logging.Filter):
    """Keeps what the engine warns of until it is written.

    A handler would do so too, but with a handler Python no longer prints warnings by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.met.append(record.getMessage())
        return True


def _memory_line(engine: ZeroEngine) -> str:
    places = held(engine) | {"host at most": {"this process": peak_memory(CPU)}}
    return "; ".join(
        f"{place} {', '.join(f'{kind} {nbytes / 2**20:.1f} MiB' for kind, nbytes in kinds.items())}"
        for place, kinds in places.items()
    )


def _finite(value: float | None) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if value is not None and math.isfinite(value) else None


class Flops:
    """Counts the floating-point operations of one step, with torch's counter."""

    def __init__(self, engine: ZeroEngine, section: FlopsProfilerConfig):
        self._engine = engine
        self._section = section
        # The engine and its `module` are two levels of their own.
        self._depth = 2 + (section.module_depth if section.module_depth > 0 else 999)
        self._counter: FlopCounterMode | None = None

    def before_step(self, number: int) -> None:
        if number == self._section.profile_step:
            self._counter = FlopCounterMode(display=False, depth=self._depth)
            self._counter.__enter__()

    def after_step(self, number: int, seconds: float) -> None:
        if self._counter is None:
            return
        counter, self._counter = self._counter, None
        counter.__exit__(None, None, None)
        total = counter.get_total_flops()
        text = (
            f"floating-point operations of step {number} on rank 0: {total:.4g} in {seconds:.3g} "
            "s, "
            f"{total / seconds / 1e12:.4g} TFLOP/s\n{counter.get_table(depth=self._depth)}\n"
        )
        if self._section.output_file is None:
            print(text, file=sys.stderr)
        else:
            with open(self._section.output_file, "w", encoding="utf-8") as out:
                out.write(text)
