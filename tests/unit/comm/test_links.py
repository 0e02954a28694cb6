"""Bytes by link: which receivers are on other machines, and what a busy disk is."""

from collections import Counter
from unittest import mock

import pytest

from zero.comm import traffic
from zero.comm.world import Group


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    for name in ("MOVED", "_busy", "_running"):
        monkeypatch.setattr(traffic, name, Counter())
    return traffic.MOVED


def test_an_accelerators_collectives_send_equal_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shards, replicas = Group(0, [0, 1]), Group(0, [0, 2])
    traffic.send_natively("all_gather", 80, shards)
    assert traffic.MOVED == {traffic.NETWORK: 40}
    # An all-reduce of two: each sends all of it.
    traffic.send_natively("reduce_replicas", 40, replicas)
    assert traffic.MOVED == {traffic.NETWORK: 80, traffic.BETWEEN: 40}
    traffic.send_natively("all_reduce", 8, shards)  # a norm: nothing that grows with the model
    assert traffic.MOVED[traffic.NETWORK] == 80


def test_a_disk_is_busy_while_any_request_runs():
    # Of the changes between idle and busy, and of the last question.
    times = iter([1.0, 4.0, 10.0, 10.5, 11.0])
    with mock.patch.object(traffic.time, "perf_counter", lambda: next(times)):
        with traffic.transfer(traffic.READ, 3), traffic.transfer(traffic.READ, 4):
            pass
        assert traffic.busy_seconds(traffic.READ) == 3.0
        with pytest.raises(OSError), traffic.transfer(traffic.READ, 100):
            assert traffic.busy_seconds(traffic.READ) == 3.5
            raise OSError
        assert traffic.busy_seconds(traffic.READ) == 4.0
    assert traffic.MOVED == {traffic.READ: 7}
