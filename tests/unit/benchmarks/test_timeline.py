"""Times of a program: what lies beside compute is not waited for."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.scaling.rehearsal import Op, make_groups
from benchmarks.scaling.timeline import Machine, predict
from zero.build import warn_if_crowded
from zero.config import load_config

NUMEL = 1 << 20
# Groups of 4 MiB; gathering one takes two ranks 2 s.
LINK = NUMEL * 4 / 2 / 2.0
NODES = {"per_node": 2, "between": LINK / 100, "latency_between": 0.0}


def predicted(
    program: list[Op], groups: int, ranks: int, machine: dict[str, Any], section: dict[str, Any]
) -> dict[str, Any]:
    section = {"stage": 3, **section}
    config = load_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": section})
    with torch.device("meta"):
        layers = (nn.Linear(1024, 1024, bias=False) for _ in range(groups))
        made = make_groups(nn.Sequential(*layers), config, ranks)
    speeds = {"flops": 1.0, "device_memory_bandwidth": float("inf")}
    links = {"within": LINK, "latency_within": 0.0}
    return predict(made, program, config, Machine(**speeds | links | machine), ranks)


def waits(
    cost: float, machine: dict[str, Any] | None = None, ranks: int = 2, **section: Any
) -> dict[str, Any]:
    """Of two groups, each of which computes for `cost` seconds."""
    compute, ends = Op("compute", -1, cost), [Op("backward ends"), Op("step")]
    program = [Op("gather", 0), Op("gather", 1), Op("use", 0), compute, Op("use", 1)]
    program += [Op("reduce", 1), compute, Op("reduce", 0), *ends]
    return predicted(program, 2, ranks, machine or {}, section)


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
    speeds = {"host_adam": NUMEL / 2 / 3.0, "pcie": 1e12}  # 3 s a group
    late = waits(10.0, speeds, **offloaded)
    # Both gathers are asked for before any compute: they wait for both updates.
    assert late["waits"]["optimizer"] == pytest.approx(6.0, rel=1e-3)
    blocking = waits(10.0, speeds, offload_optimizer={"device": "cpu", "overlap_step": False})
    assert blocking["waits"]["update"] == pytest.approx(6.0, rel=1e-3)


def test_a_ring_crosses_nodes_at_the_speed_of_the_slowest_link_that_groups_share():
    links = {"within": 100.0, "between": 10.0, "latency_within": 1.0, "latency_between": 5.0}
    machine = Machine(per_node=2, **links)
    assert machine.collective(100, 1) == 0
    assert machine.collective(100, 2) == machine.exchange(100, 2) == pytest.approx(50 / 100 + 1)
    assert machine.collective(100, 4) == pytest.approx(75 / 10 + 5 + 2 * 1)
    # 2 ranks on 2 nodes; the other rank of each node has such a group as well.
    assert machine.collective(100, 2, stride=2) == pytest.approx(50 / (10 / 2) + 5)
    # Directly, both ranks of a node send half of their buffers to the other node.
    assert machine.exchange(100, 4) == pytest.approx(2 * 50 / 10 + 5)


def network(**section: Any) -> float:
    """Seconds of communication of 4 ranks on 2 nodes."""
    return waits(1.0, NODES, ranks=4, **section)["busy"]["network"]


def test_shards_of_groups_stay_within_a_node_and_gradients_are_summed_over_both():
    between = 4 * NUMEL / (LINK / 100)  # seconds of a group's bytes over the link of a node
    assert network() == pytest.approx(4 * 3 / 4 * between)
    # Per group an all-gather and a reduction within, then the shards' all-reduce: both ranks of a
    # node send theirs.
    assert network(mics_shard_size=2) == pytest.approx(2 * (2 + 2) + 2 * between)
    # Half of the traffic are weights in fp32, which then take 260 instead of 1,024 bytes a block.
    coded = network(zero_quantized_weights=True)
    assert coded == pytest.approx(network() / 2 * (1 + 260 / 1024))


@pytest.mark.parametrize(("coded", "part"), [(False, 1.0), (True, 260 / 1024)])
def test_second_shards_are_gathered_within_a_node_and_uncoded(coded, part):
    section = {"zero_hpz_partition_size": 2, "zero_quantized_weights": coded}
    program = [Op("gather", 0), Op("use", 0), Op("gather", 0), Op("use", 0), Op("step")]
    found = predicted(program, 1, 4, NODES, section)
    assert found["busy"]["network"] == pytest.approx(part * 3 / 4 * 4 * NUMEL / (LINK / 100) + 2)


@pytest.mark.parametrize(
    ("limit", "warned"), [(10**9, True), (2 * 30_000**2, False), (10**8, False)]
)
def test_blocks_that_find_no_room_beside_each_other_are_a_warning(limit, warned, caplog):
    config = load_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(30_000, 30_000, bias=False) for _ in range(3)))
    warn_if_crowded(make_groups(model, config, 2), limit)
    assert len(caplog.messages) == warned
    assert not warned or f"{2 * 30_000**2:,} would be enough" in caplog.text
