"""Describes a run by its effective configuration and its environment.

Nothing secret: no arguments, no tokens.
"""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import torch

from zero.comm import world
from zero.comm.control import versions
from zero.config.table import table
from zero.device import is_accelerator
from zero.engine import ZeroEngine
from zero.monitor.memory_usage import bytes_by_kind

# Environment variables that begin like this are recorded.
_VARIABLES = ("NCCL_", "GLOO_", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def describe_run(engine: ZeroEngine) -> dict[str, Any]:
    """For the first record: "configuration" (rows of the table at the start), "environment",
    "memory" (bytes held by rank 0 after the first step, by place and kind), "parameters" (their
    number; a quantized base counts as its bytes). Late updates are waited for, because the first
    one makes the optimizer's state."""
    if engine.optimizer is not None:
        engine.optimizer.wait()
    return {
        "configuration": [row._asdict() for row in table(engine.settings)],
        "environment": _environment(engine),
        "memory": bytes_by_kind(engine),
        "parameters": sum(slot.numel for group in engine.groups for slot in group.layout.slots),
    }


def _environment(engine: ZeroEngine) -> dict[str, str]:
    device = engine.comm.device
    name = platform.processor() or platform.machine()
    if is_accelerator(device):
        module = torch.get_device_module(device)
        name = getattr(module, "get_device_name", lambda _: device.type)(device)
    libraries = {name.removeprefix("version of "): found for name, found in versions().items()}
    variables = {key: os.environ[key] for key in sorted(os.environ) if key.startswith(_VARIABLES)}
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "ranks": str(engine.comm.world_size),
        "device": f"{name} on {platform.node()}",
        "cores": f"{os.cpu_count()}, torch uses {torch.get_num_threads()}",
        "backend": world.get_backend(),
        "python": platform.python_version(),
        "system": platform.platform(),
        **libraries,
        **variables,
    }
