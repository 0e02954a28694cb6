"""The monitors beside an accelerator: the log of collectives, and what a record says of links and
memory.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from tests.accelerator import device
from tests.accelerator.test_counts import EVERY_UNIT, ROWS, WIDTH, Model
from tests.dist.training import ds_config, start, step
from tests.processes import run_on
from zero.monitor import log_summary


def train(rank: int, world_size: int, folder: Path) -> str:
    """Train with an optimizer in host memory. Return what this rank's log of collectives prints."""
    sections = {
        "comms_logger": {"enabled": True},
        "json_monitor": {"enabled": True, "output_path": str(folder)},
    }
    offload = {"offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    engine, _ = start(Model().to(device.NAME), ds_config(**offload) | sections)
    for _ in range(3):
        step(engine, [{"x": torch.randn(ROWS, WIDTH, device=device.NAME)}])
    assert device.mistakes() == []
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        log_summary()
    return printed.getvalue()


def test_collectives_are_logged_and_links_counted(tmp_path: Path):
    first, second = run_on(2, train, tmp_path, simulated=True)
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= set(
        first.splitlines()
    ) and second == ""
    records = [
        json.loads(line)
        for line in (tmp_path / "DeepSpeedJobName" / "steps.jsonl").read_text().splitlines()
    ]
    shard = 4 * records[0]["run"]["parameters"] / 2
    for record in records:
        # Each gradient goes out in its own step.
        assert record["links"]["device to host"] >= shard and record["links"]["network"] > 0
        assert record["mfu"] is None  # the peak of this device is not known
    # Updated weights may come in behind the next forward, so at any point of the next record. The
    # last ones may not.
    assert (
        sum(record["links"]["host to device"] for record in records) >= (len(records) - 1) * shard
    )
    assert min(records[-1]["ranks"]["device_bytes"]) > 0


def waits_with_records(rank: int, world_size: int, folder: Path) -> int:
    """How often the host waits for the device in a step that is recorded."""
    records = {"json_monitor": {"enabled": True, "output_path": str(folder)}}
    engine, _ = start(Model().to(device.NAME), ds_config(**EVERY_UNIT) | records)
    batch = {"x": torch.ones(ROWS, WIDTH, device=device.NAME)}
    for _ in range(4):
        step(engine, [batch])
    before = device.waits()
    loss = engine(**batch)
    engine.backward(loss)
    engine.step()
    waits = device.waits() - before
    assert device.mistakes() == []
    if rank == 0:
        file = folder / "DeepSpeedJobName" / "steps.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(records) == 5 and records[-1]["loss"] == pytest.approx(loss.item())
    return waits


def test_a_record_does_not_wait_for_the_device(tmp_path: Path):
    """The host waits for the norm alone, as without a monitor."""
    assert run_on(2, waits_with_records, tmp_path, simulated=True) == [1, 1]
