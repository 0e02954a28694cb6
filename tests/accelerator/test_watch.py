"""`zero memory` and `zero trace` beside an accelerator: device and host apart, copies on a track of
their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import torch

from tests.dist.tools import test_memory, test_trace
from tests.dist.tools.test_memory import LAYER, LAYERS, OUTPUT, RANKS, SMALL
from tests.processes import run_on
from zero.tools.profile.memory import MemoryRun
from zero.tools.profile.picture import peaks
from zero.tools.profile.trace import merge


def train_beside_the_allocator(rank: int, world_size: int, folder: Path) -> list[int]:
    """What the device had allocated at each sample."""
    allocated, sample = [], MemoryRun._sample

    def look(run: MemoryRun) -> None:
        allocated.append(torch.accelerator.memory_allocated())
        sample(run)

    with mock.patch.object(MemoryRun, "_sample", look):
        test_memory.train(rank, world_size, folder)
    return allocated


def test_memory_of_a_device(tmp_path: Path):
    allocated = run_on(RANKS, train_beside_the_allocator, tmp_path, simulated=True)[1]
    samples = json.loads((tmp_path / "rank1.json").read_text())
    highest, own = peaks(samples)["device"], LAYERS * LAYER // RANKS
    assert own <= highest["parameters"] <= own + SMALL and highest["gathered parameters"] >= LAYER
    ends = next(number for number, each in enumerate(samples) if each["phase"] == "backward") - 1
    kept = samples[ends]["bytes"]["device"]["activations"]
    assert (LAYERS + 1) * OUTPUT <= kept <= (LAYERS + 1) * OUTPUT + SMALL
    # Nothing that lives on the device is unknown to the picture.
    for each, most in zip(samples, allocated, strict=True):
        assert sum(each["bytes"]["device"].values()) <= most + SMALL


def test_trace_of_a_device(tmp_path: Path):
    run_on(2, test_trace.train, tmp_path, "cpu", simulated=True)
    events = merge(tmp_path.glob("rank*.json"))["traceEvents"]
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert {"main thread", "messages"} <= {*threads}
    test_trace.assert_nested(events)
