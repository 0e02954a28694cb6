"""What zero adds to torch's error when device memory runs out: what filled the memory, and what to
change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zero.device import is_accelerator
from zero.engine import ZeroEngine
from zero.monitor.memory_usage import (
    BUFFERS,
    DEVICE,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    bytes_by_kind,
)

ACTIVATIONS = "activations and temporary tensors"
_ESTIMATE = "zero estimate MODEL --ds-config FILE --world {ranks} --device-memory {total:.1f}G"


@contextmanager
def explained(engine: ZeroEngine) -> Iterator[None]:
    """Context in which torch's OutOfMemoryError gets a second line. It stays the same error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if is_accelerator(engine.comm.device):
            error.args = (f"{error}\n{explanation(engine)}",)
        raise


def explanation(engine: ZeroEngine) -> str:
    """The kinds of memory on the device, the largest first, and a remedy for the largest one."""
    total = torch.accelerator.get_memory_info(engine.comm.device)[1]
    in_use = torch.accelerator.memory_allocated(engine.comm.device)
    kinds = bytes_by_kind(engine).get(DEVICE, {})
    kinds[ACTIVATIONS] = max(0, in_use - sum(kinds.values()))
    largest = sorted((kind for kind in kinds if kinds[kind]), key=lambda kind: -kinds[kind])
    listed = ", ".join(f"{kind} {_size(kinds[kind])}" for kind in largest)
    remedy = _remedy(engine, largest[0]) if largest else "a smaller model"
    command = _ESTIMATE.format(ranks=engine.comm.job.world_size, total=total / 2**30)
    return (
        f"zero: {_size(in_use)} of {_size(total)} were in use by torch on this rank: {listed}. "
        f"Try first: {remedy}. All changes that fit, with their times: {command}"
    )


def _remedy(engine: ZeroEngine, kind: str) -> str:
    zero, shards = engine.settings.zero_optimization, engine.comm.job.world_size > 1
    offload = (
        "zero_optimization.offload_optimizer.device cpu (the price: copies and a slower update)"
    )
    if kind == ACTIVATIONS:
        if getattr(engine.module, "is_gradient_checkpointing", False):
            return (
                "half of train_micro_batch_size_per_gpu, with twice the gradient_accumulation_steps"
            )
        return "gradient checkpointing (the price: activations are computed twice)"
    if kind == OPTIMIZER:
        return "zero_optimization.stage 1" if shards and zero.stage < 1 else offload
    if kind == GRADIENTS:
        return "zero_optimization.stage 2" if shards and zero.stage < 2 else offload
    if kind == PARAMETERS:
        if shards and zero.stage < 3:
            return "zero_optimization.stage 3 (the price: weights are gathered for each use)"
        return "zero_optimization.offload_param.device cpu (the price: copies for each use)"
    return {
        GATHERED: "zero_optimization.stage3_max_live_parameters 0 (the price: nothing is gathered "
        "in advance)",
        BUFFERS: "a smaller zero_optimization.reduce_bucket_size",
    }[kind]


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.2f} MiB"
