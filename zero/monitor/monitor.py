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
from functools import partial

import torch
from torch import nn

from zero.comm import traffic
from zero.comm.world import ranks_of_machine
from zero.device import CPU, is_accelerator, memory_in_use, peak_memory
from zero.engine import ZeroEngine
from zero.monitor.collectives import use_log
from zero.monitor.memory_usage import bytes_by_kind
from zero.monitor.mfu import operations_per_token, peak
from zero.monitor.run_info import describe_run
from zero.monitor.writers import Record, Writer, writers

logger = logging.getLogger("zero")

_DISK = {traffic.READ: "read", traffic.WRITTEN: "written"}


def make(engine: ZeroEngine) -> Monitor | None:
    """The engine's monitor, or None where the configuration asks for nothing."""
    settings = engine.settings
    sections = (settings.csv_monitor, settings.json_monitor, settings.tensorboard, settings.wandb)
    # accelerate sets `steps_per_print` to infinity.
    prints = math.isfinite(settings.steps_per_print or math.inf)
    wants_records = prints or any(section.enabled for section in sections)
    others = (
        settings.wall_clock_breakdown,
        settings.memory_breakdown,
        settings.comms_logger.enabled,
    )
    if not wants_records and not any(others):
        return None
    control = engine.comm.control("opening the monitors")
    opened = control.together(lambda: writers(settings) if control.rank == 0 else [])
    return Monitor(engine, opened, wants_records)


class Monitor:
    """Follows one engine. The engine calls `loss` for each micro-batch, and `end_step` after each
    optimizer step.

    `wants_records`: all ranks exchange their numbers after each step. They are one small
    all-reduce."""

    def __init__(self, engine: ZeroEngine, writers: list[Writer], wants_records: bool):
        self._engine = engine
        self._writers = writers
        self._wants_records = wants_records
        self._losses: list[torch.Tensor] = []
        self._is_first = True
        self._warnings: list[str] = []
        self._operations_per_token = operations_per_token(engine)
        self._peak = peak(engine.comm.device, engine.settings.compute_dtype)
        self._begin()
        # What ends with the engine, whether it is destroyed or only forgotten.
        self._endings: list[weakref.finalize] = []
        if wants_records:
            # The model must not own the engine by this hook.
            hook = partial(_before_forward, weakref.ref(self))
            self._at_end(engine.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        if writers:
            kept = partial(_keep_warning, self._warnings)
            logger.addFilter(kept)
            self._at_end(logger.removeFilter, kept)
        if engine.settings.comms_logger.enabled:
            self._at_end(use_log(engine.settings.comms_logger, engine.comm.job).leave)

    def _at_end(self, act: Callable[..., object], *args: object) -> None:
        self._endings.append(weakref.finalize(self, act, *args))

    def close(self) -> None:
        """The engine is destroyed: another one of the same model has a monitor of its own."""
        for ending in self._endings:
            ending()

    def _begin(self) -> None:
        """A step begins."""
        self._tokens = self._operations = 0
        self._before = self._totals()
        self._start = time.perf_counter()

    def _totals(self) -> dict[str, Counter[str]]:
        """So far: elements and bytes of collectives, bytes by link, seconds in which the disk was
        busy.
        """
        comm, busy = self._engine.comm, {link: traffic.busy_seconds(link) for link in _DISK}
        counts = {"elements": comm.elements, "bytes": comm.bytes, "links": traffic.MOVED}
        return {name: Counter(count) for name, count in (counts | {"disk": busy}).items()}

    def count_tokens(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Count the tokens that a language model gets, padding included, in `input_ids` and for a
        decoder, and the operations that they take.
        """
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor) or not torch.is_grad_enabled():
            return
        if ids.dim() != 2 or ids.is_floating_point():
            return  # not text
        of_decoder = kwargs.get("decoder_input_ids", kwargs.get("labels"))
        two = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
        counts = ids.numel(), of_decoder.numel() if two and of_decoder is not None else 0
        self._tokens += sum(counts)
        for count, operations in zip(counts, self._operations_per_token, strict=True):
            self._operations += count * operations

    def loss(self, loss: torch.Tensor) -> None:
        """A micro-batch's loss, divided by the number of micro-batches.

        The copy has arrived when the step has got its norm. Nothing else waits for the device.
        """
        self._losses.append(loss.detach().to(CPU, non_blocking=True))

    def end_step(self) -> None:
        """An optimizer step is over."""
        engine, seconds = self._engine, time.perf_counter() - self._start
        if self._wants_records:
            numbers = self._exchange(seconds)
            if self._writers:
                self._write(self._record(numbers))
        if engine.settings.wall_clock_breakdown and engine.comm.job.rank == 0:
            print(f"step {engine.global_steps}: {engine.comm.clock}", file=sys.stderr)
        if engine.settings.memory_breakdown and engine.comm.job.rank == 0:
            print(f"step {engine.global_steps}: {_memory_line(engine)}", file=sys.stderr)
        engine.comm.clock.reset()
        self._losses.clear()
        self._begin()

    def _write(self, record: Record) -> None:
        """A full or missing disk ends the writing, not the training."""
        if self._is_first:
            record["run"] = describe_run(self._engine)
            self._is_first = False
        if self._warnings:
            record["warnings"] = self._warnings.copy()
            self._warnings.clear()
        for writer in list(self._writers):
            try:
                writer.write(record)
            except OSError as error:
                logger.warning("%s: nothing more is written here: %s", type(writer).__name__, error)
                self._writers.remove(writer)

    def _exchange(self, seconds: float) -> dict[str, torch.Tensor]:
        """What each rank reports about a step: a number for each of them, fp64 on the host."""
        comm = self._engine.comm.job
        loss = sum(loss.double() for loss in self._losses)
        has_device = is_accelerator(comm.device)
        own = {
            "loss": float(loss),
            "has_loss": bool(self._losses),
            "seconds": seconds,
            "waited": sum(comm.clock.waits.values()),
            "host_bytes_peak": peak_memory(CPU),
            "host_bytes": memory_in_use(CPU),
            "device_bytes_peak": peak_memory(comm.device) if has_device else 0,
            "device_bytes": memory_in_use(comm.device) if has_device else 0,
            "tokens": self._tokens,
            "operations": self._operations,
        }
        table = torch.zeros(comm.world_size, len(own), dtype=torch.float64)
        table[comm.rank] = torch.tensor([*own.values()], dtype=torch.float64)
        return dict(zip(own, comm.all_reduce(table).unbind(1), strict=True))

    def _record(self, ranks: dict[str, torch.Tensor]) -> Record:
        engine, clock = self._engine, self._engine.comm.clock
        now = self._totals()
        moved = {name: count - self._before[name] for name, count in now.items()}
        with_loss = ranks["has_loss"].sum().item()
        working = ranks["seconds"] - ranks["waited"]
        seconds = ranks["seconds"].max().item()
        copies = engine.comm.model.world_size if engine.comm.model else 1  # share their tokens
        flops = ranks["operations"].mean().item() / seconds
        links = (*traffic.LINKS, traffic.BETWEEN) if ranks_of_machine() else traffic.LINKS
        memory = "host_bytes_peak", "host_bytes", "device_bytes_peak", "device_bytes"
        held = {name: ranks[name].long().tolist() for name in memory}
        assert engine.optimizer is not None
        return {
            "step": engine.global_steps,
            "samples": engine.global_samples,
            "loss": _finite(ranks["loss"].sum().item() / with_loss) if with_loss else None,
            "skipped": not engine.was_step_applied(),
            "grad_norm": _finite(engine.get_global_grad_norm()),
            "lr": float(engine.optimizer.param_groups[0]["lr"]),
            "loss_scale": None if engine.scaler is None else engine.scaler.scale,
            "samples_per_second": engine.settings.train_batch_size / seconds,
            "tokens_per_second": ranks["tokens"].sum().item() / seconds / copies or None,
            "model_flops_per_second": flops or None,
            "mfu": flops / self._peak if flops and self._peak else None,
            "seconds": {name: round(spent, 6) for name, spent in clock.phases.items()},
            "waits": {
                f"{phase}_{what.replace(' ', '_')}": round(spent, 6)
                for (phase, what), spent in clock.waits.items()
            },
            "elements": dict(moved["elements"]),
            "bytes": dict(moved["bytes"]),
            "links": {link: moved["links"][link] for link in links},
            "disk_bytes_per_second": {
                _DISK[link]: moved["links"][link] / busy for link, busy in moved["disk"].items()
            },
            "memory": {
                "gathered_elements_peak": engine.residency.peak,
                "host_bytes_peak": max(held["host_bytes_peak"]),
                "device_bytes_peak": max(held["device_bytes_peak"]),
            },
            "ranks": {
                "slowest": int(working.argmax()),  # a rank that others wait for waits least
                "working_seconds": [round(spent, 6) for spent in working.tolist()],
                **held,
            },
        }


def _before_forward(
    monitor: weakref.ref[Monitor], module: nn.Module, args: tuple, kwargs: dict
) -> None:
    if (measuring := monitor()) is not None:
        measuring.count_tokens(module, args, kwargs)


def _keep_warning(kept: list[str], record: logging.LogRecord) -> bool:
    """A filter that keeps the engine's warnings until they are written.

    A handler would do so too, but with a handler Python no longer prints warnings by itself.
    """
    if record.levelno >= logging.WARNING:
        kept.append(record.getMessage())
    return True


def _memory_line(engine: ZeroEngine) -> str:
    places = bytes_by_kind(engine) | {"host at most": {"this process": peak_memory(CPU)}}
    return "; ".join(
        f"{place} {', '.join(f'{kind} {nbytes / 2**20:.1f} MiB' for kind, nbytes in kinds.items())}"
        for place, kinds in places.items()
    )


def _finite(value: float | None) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if value is not None and math.isfinite(value) else None
