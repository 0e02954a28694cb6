"""Measures the speeds from which `zero estimate` predicts seconds, on all ranks at the same time,
so that what they share is shared as in training.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero.checkpoint.disk import replace_text
from zero.device import CPU, is_accelerator, synchronize
from zero.offload.nvme import ScratchFile
from zero.optim import adam8bit, adam_cpu

# The fastest of the tries within this time counts, so that other work on the machine does not.
SECONDS, LEAST_TRIES = 1.5, 3
# Rows, inner size and columns of a product. A CPU trains on few tokens at a time, and multiplies so
# few rows more slowly than a large square.
MATRICES, MATRICES_ON_HOST = (4096, 4096, 4096), (128, 512, 2048)
VALUES = 64 << 20  # bytes of a tensor that is copied or sent
FILE_BYTES = 128 << 20  # of each of two tensors in a file
ELEMENTS = 16 << 20  # of a sub-group that is updated
# Bytes that an update of one element moves: a 16-bit gradient is read, master and moments are read
# and written, 16-bit weights are written. Moments are fp32, or codes with a scale for each block.
UPDATED = 28
UPDATED_8_BIT = 2 + 2 * 4 + 2 * 2 + 2
# Units: TFLOP/s for matrix products, thousands of calls a second, GB/s for the rest.
TERA, GIGA, KILO = 1e12, 1e9, 1e3


def measure(device: torch.device, folder: Path) -> dict[str, Any]:
    """The fields of `Speeds` that can be measured here, of this rank.

    Args:
        folder: for the file of a training with nvme offload.
    """
    found = {name: round(speed, 4) for name, speed in _measured(device, folder)}
    return found | {"has_accelerator": is_accelerator(device)}


def _measured(device: torch.device, folder: Path) -> Iterator[tuple[str, float]]:
    yield "compute", _matrix_products(device, torch.bfloat16)
    yield "compute_fp32", _matrix_products(device, torch.float32)
    yield "device_memory", _memory(device)
    yield "calls", _calls(device)
    if is_accelerator(device):
        host = torch.ones(VALUES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device=device)
        for name, target, source in (("to_device", there, host), ("from_device", host, there)):
            copy = partial(target.copy_, source, non_blocking=True)
            yield name, VALUES / fastest(copy, device) / GIGA
    yield from dict.fromkeys(("disk_read", "disk_written"), file_speed(folder)).items()
    yield "memory", UPDATED * ELEMENTS / _update(coded=False) / GIGA
    yield "memory_8_bit", UPDATED_8_BIT * ELEMENTS / _update(coded=True) / GIGA
    if dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        part = torch.ones(VALUES // ranks, dtype=torch.uint8, device=device)
        whole = torch.empty(part.numel() * ranks, dtype=torch.uint8, device=device)
        gather = partial(dist.all_gather_into_tensor, whole, part)
        # As many tries on each rank: a collective that one leaves out would block the others.
        yield "network", part.nbytes * (ranks - 1) / fastest(gather, device, limit=0) / GIGA


def fastest(run: Callable[[], object], device: torch.device, limit: float | None = None) -> float:
    """Return the seconds of the fastest of the tries within `limit` seconds, at least three after a
    first one.

    limit: None: `SECONDS`.
    """
    limit = SECONDS if limit is None else limit
    run()
    tries: list[float] = []
    while len(tries) < LEAST_TRIES or sum(tries) < limit:
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        tries.append(time.perf_counter() - start)
    return min(tries)


def _matrix_products(device: torch.device, dtype: torch.dtype) -> float:
    rows, inner, columns = MATRICES if is_accelerator(device) else MATRICES_ON_HOST
    a = torch.randn(rows, inner, device=device, dtype=dtype)
    b = torch.randn(inner, columns, device=device, dtype=dtype)
    return 2 * rows * inner * columns / fastest(lambda: a @ b, device) / TERA


def _memory(device: torch.device) -> float:
    """As an elementwise operation has it: two tensors are read, and one is written."""
    a, b, out = (torch.ones(VALUES // 4, device=device) for _ in range(3))
    return 3 * a.nbytes / fastest(lambda: torch.add(a, b, out=out), device) / GIGA


def _calls(device: torch.device) -> float:
    """As training has it, with Python's modules and autograd, but with so few elements that the
    operations themselves take no time. What is one call, `zero estimate` decides.
    """
    from zero.tools.estimate.machine import Memory  # here: it imports the whole engine
    from zero.tools.estimate.traffic import CALLS, COMPUTE

    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, device=device)
    inputs = torch.randn(1, 2, 16, device=device)

    def run() -> None:
        layer(inputs).sum().backward()

    run()  # makes the gradients
    with Memory("") as counted:
        run()
    return counted.done[COMPUTE, CALLS] / fastest(run, device) / KILO


def file_speed(folder: Path) -> float:
    """GB/s at which a file in the folder is read and written as in a step: by the engine's
    requests, past the page cache, and beside each other, because many disks serve both from one
    rate.

    Raises OSError if it cannot be written.
    """
    file = ScratchFile(folder)
    try:
        return file.measure(FILE_BYTES, SECONDS)[0] / GIGA
    finally:
        file.close()


def _update(coded: bool) -> float:
    """Seconds of an update of `ELEMENTS` elements by Adam on the CPU."""
    master, grad = torch.ones(ELEMENTS), torch.ones(ELEMENTS, dtype=torch.bfloat16)
    moments = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    state = adam8bit.encode(*moments) if coded else moments
    out = torch.empty_like(grad)
    group = torch.optim.AdamW([master]).param_groups[0]
    step = partial(adam_cpu.adam, master, grad, *state, out, group, step=10, factor=1.0)
    return fastest(step, CPU)


def write(file: Path, measured: list[dict[str, Any]], device: str) -> None:
    """Write what all ranks have measured; the slowest one counts."""
    slowest = {name: min(each[name] for each in measured) for name in measured[0]}
    source = (
        f"measured by {len(measured)} process{'es' if len(measured) > 1 else ''} on "
        f"{platform.node()}, {device}, {time.strftime('%Y-%m-%d')}"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, json.dumps({"speeds": slowest | {"source": source}}, indent=2) + "\n")
