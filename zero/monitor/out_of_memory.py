"""What zero adds to the error when memory runs out: what filled the memory, and what to change."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import psutil
import torch

from zero.engine import ZeroEngine
from zero.errors import size
from zero.monitor.memory_usage import DEVICE, HOST, bytes_by_kind, place_of

ACTIVATIONS = "activations and temporary tensors"
_MODEL = "the model, of which an engine is being made"
# By kind of memory: the stage that shards it, what helps, and what helps if it is in host memory.
_REMEDIES = json.loads(Path(__file__).with_name("remedies.json").read_text(encoding="utf-8"))
_ESTIMATE = "zero estimate MODEL --ds-config FILE --world {ranks} --{place}-memory {total:.1f}G"
# What torch says of host memory: its errors for that have no class of their own.
_HOST_TEXTS = os.strerror(errno.ENOMEM), "std::bad_alloc"


def full_memory(error: BaseException) -> str | None:
    """The place where an allocation has failed, "device" or "host"; None for another error."""
    if isinstance(error, torch.OutOfMemoryError):
        return DEVICE
    if isinstance(error, OSError):
        return HOST if error.errno == errno.ENOMEM else None
    is_host = isinstance(error, MemoryError) or any(text in str(error) for text in _HOST_TEXTS)
    return HOST if is_host else None


def explain(engine: ZeroEngine, error: Exception) -> None:
    """Give an error for lack of memory a second line. It stays the same error."""
    place, devices = full_memory(error), (HOST, place_of(engine.comm.device))
    if place in devices and "zero: " not in str(error):
        add_line(error, explanation(engine, place))


def add_line(error: Exception, line: str) -> None:
    """Add a line to what an error says."""
    if isinstance(error, OSError):
        error.strerror = f"{error.strerror}\n{line}"
    else:
        error.args = (f"{error}\n{line}",)


def explanation(engine: ZeroEngine, place: str) -> str:
    """The kinds of memory in a place, the largest first, and a remedy for the largest one."""
    if place == DEVICE:
        total = torch.accelerator.get_memory_info(engine.comm.device)[1]
        in_use = torch.accelerator.memory_allocated(engine.comm.device)
        who = "by torch"
    else:
        total, in_use = _host_memory()
        who = "in host memory"
    is_made = hasattr(engine, "optimizer")
    kinds = bytes_by_kind(engine).get(place, {}) if is_made else {_MODEL: in_use}
    if place == place_of(engine.comm.device):
        kinds[ACTIVATIONS] = max(0, in_use - sum(kinds.values()))
    largest = sorted((kind for kind in kinds if kinds[kind]), key=lambda kind: -kinds[kind])
    listed = ", ".join(f"{kind} {size(kinds[kind])}" for kind in largest)
    remedy = _remedy(engine, largest[0], place) if largest else "a smaller model"
    ranks = engine.comm.job.world_size
    command = _ESTIMATE.format(ranks=ranks, place=place, total=total / 2**30)
    return (
        f"zero: {size(in_use)} of {size(total)} were in use {who} on this rank: {listed}. "
        f"Try first: {remedy}. All changes that fit, with their times: {command}"
    )


def _host_memory() -> tuple[int, int]:
    """The most bytes that this process may use, and those that it uses: of addresses, if their
    number is limited (`ulimit -v`).
    """
    used, limit = psutil.Process().memory_info(), resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        return limit, used.vms
    return psutil.virtual_memory().total, used.rss


def _remedy(engine: ZeroEngine, kind: str, place: str) -> str:
    stage, shards = engine.settings.zero_optimization.stage, engine.comm.job.world_size > 1
    found = _REMEDIES[kind]
    needed = found.get("stage", 0)
    if place == HOST and "on the host" in found:
        return found["on the host"]
    if kind == ACTIVATIONS and getattr(engine.module, "is_gradient_checkpointing", False):
        return "half of train_micro_batch_size_per_gpu, with twice the gradient_accumulation_steps"
    if shards and stage < needed:
        price = " (the price: weights are gathered for each use)" if needed == 3 else ""
        return f"zero_optimization.stage {needed}{price}"
    return found["remedy"]
