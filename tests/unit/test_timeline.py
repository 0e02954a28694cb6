"""Times of a program: what lies beside compute is not waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.rehearsal import Op, make_units
from benchmarks.timeline import Machine, predict
from zero.config import load_config

RANKS, NUMEL = 2, 1 << 20
# Two units of 4 MiB; gathering one takes 2 s, and computing takes `cost`.
LINK = NUMEL * 4 / 2 / 2.0


def waits(cost: float, machine: dict[str, Any] | None = None, **section: Any) -> dict[str, Any]:
    config = load_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **section}})
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    units = make_units(model, config, RANKS)
    program = [Op("gather", 0), Op("gather", 1), Op("use", 0), Op("compute", -1, cost), Op("use", 1)]
    program += [Op("reduce", 1), Op("compute", -1, cost), Op("reduce", 0), Op("backward ends"), Op("step")]
    speeds = {"flops": 1.0, "within": LINK, "latency_within": 0.0, "device_memory_bandwidth": float("inf")}
    return predict(units, program, config, Machine(**speeds | (machine or {})), RANKS)


@pytest.mark.parametrize(("cost", "gather", "reduce"), [(10.0, 2.0, 2.0), (1.0, 3.0, 3.0)])
def test_only_what_is_longer_than_compute_is_waited_for(cost, gather, reduce):
    found = waits(cost)
    assert found["waits"]["gather"] == pytest.approx(gather)
    assert found["waits"]["reduce"] == pytest.approx(reduce)
    assert found["step"] == pytest.approx(2 * cost + gather + reduce)


def test_a_full_bucket_makes_compute_wait_for_the_oldest_reduction():
    assert waits(1.0, reduce_bucket_size=NUMEL)["step"] == waits(1.0)["step"]
    assert waits(1.0, overlap_comm=False)["waits"]["reduce"] == pytest.approx(4.0)


def test_an_update_on_the_host_runs_beside_the_next_forward():
    offloaded = {"offload_optimizer": {"device": "cpu"}}
    speeds = {"host_adam": NUMEL / 2 / 3.0, "pcie": 1e12}  # 3 s a unit
    late = waits(10.0, speeds, **offloaded)
    # Both gathers are asked for before any compute: they wait for both updates.
    assert late["waits"]["optimizer"] == pytest.approx(6.0, rel=1e-3)
    blocking = waits(10.0, speeds, offload_optimizer={"device": "cpu", "overlap_step": False})
    assert blocking["waits"]["update"] == pytest.approx(6.0, rel=1e-3)


def test_a_ring_crosses_nodes_at_the_speed_of_the_slowest_link():
    machine = Machine(within=100.0, between=10.0, per_node=2, latency_within=1.0, latency_between=5.0)
    assert machine.collective(100, 1) == 0
    assert machine.collective(100, 2) == pytest.approx(50 / 100 + 1)
    assert machine.collective(100, 4) == pytest.approx(75 / 10 + 5 + 2 * 1)
