"""The monitors beside an accelerator: what a record says of links and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.accelerator import device
from tests.accelerator.test_counts import EVERY_UNIT, ROWS, WIDTH, Model
from tests.dist.training import ds_config, start, step
from tests.processes import run_on


def train(rank: int, world_size: int, folder: Path, offload: dict[str, Any]) -> int:
    """Train with records. Return how often the host waits for the device in the last step."""
    records = {"json_monitor": {"enabled": True, "output_path": str(folder)}}
    engine, _ = start(Model().to(device.NAME), ds_config(**EVERY_UNIT, **offload, **records))
    batch = {"x": torch.ones(ROWS, WIDTH, device=device.NAME)}
    for _ in range(4):
        step(engine, [batch])
    before = device.waits()
    engine.backward(engine(**batch))
    engine.step()
    waits = device.waits() - before
    assert device.mistakes() == []
    return waits


def records_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "DeepSpeedJobName" / "steps.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == 5
    return records


def test_links_are_counted(tmp_path: Path):
    run_on(2, train, tmp_path, {"offload_optimizer": {"device": "cpu"}}, simulated=True)
    records = records_of(tmp_path)
    shard = 4 * records[0]["run"]["parameters"] / 2
    for record in records:
        # Each gradient goes out in its own step.
        assert record["links"]["device to host"] >= shard and record["links"]["network"] > 0
        assert record["mfu"] is None  # the peak of this device is not known
    # Updated weights may come in behind the next forward, so at any point of the next record. The
    # last ones may not.
    came = sum(record["links"]["host to device"] for record in records)
    assert came >= (len(records) - 1) * shard
    assert min(records[-1]["ranks"]["device_bytes"]) > 0


def test_a_record_does_not_wait_for_the_device(tmp_path: Path):
    """The host waits for the norm alone, as without a monitor."""
    assert run_on(2, train, tmp_path, {}, simulated=True) == [1, 1]
    assert records_of(tmp_path)[-1]["loss"] > 0
