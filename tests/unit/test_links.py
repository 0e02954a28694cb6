"""Bytes by link: which receivers are on other machines, and what a busy disk is."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest

from zero import links
from zero.world import Group


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    for name in ("MOVED", "_busy", "_running"):
        monkeypatch.setattr(links, name, Counter())
    return links.MOVED


def test_receivers_on_other_machines_are_counted_apart(monkeypatch: pytest.MonkeyPatch):
    ranks = [0, 1, 2, 3]
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    links.send(Group(1, ranks), [1, 10, 100, 1000])
    assert links.MOVED == {links.NETWORK: 1101}  # it is not known which machine a rank is on
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    links.send(Group(1, ranks), [1, 10, 100, 1000])
    assert links.MOVED == {links.NETWORK: 2202, links.BETWEEN: 1100}


def test_an_accelerators_collectives_send_equal_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shards, replicas = Group(0, [0, 1]), Group(0, [0, 2])
    links.send_natively("all_gather", 80, shards)
    assert links.MOVED == {links.NETWORK: 40}
    links.send_natively("reduce_replicas", 40, replicas)  # an all-reduce of two: each sends all of it
    assert links.MOVED == {links.NETWORK: 80, links.BETWEEN: 40}
    links.send_natively("all_reduce", 8, shards)  # a norm: nothing that grows with the model
    assert links.MOVED[links.NETWORK] == 80


def test_a_disk_is_busy_while_any_request_runs():
    times = iter([1.0, 4.0, 10.0, 10.5, 11.0])  # of the changes between idle and busy, and of the last question
    with mock.patch.object(links.time, "perf_counter", lambda: next(times)):
        with links.transfer(links.READ, 3), links.transfer(links.READ, 4):
            pass
        assert links.busy_seconds(links.READ) == 3.0
        with pytest.raises(OSError), links.transfer(links.READ, 100):
            assert links.busy_seconds(links.READ) == 3.5
            raise OSError
        assert links.busy_seconds(links.READ) == 4.0
    assert links.MOVED == {links.READ: 7}
