"""zero.optim.updates: the order of updates behind a step, and what becomes of an error there."""

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from zero.comm import Pending
from zero.offload.tiers import Tier
from zero.optim.updates import Tile, Updates

TIMEOUT = 20


class Unit:
    """As much of a unit as an update sees."""

    def __init__(self, name):
        self.name, self.grad, self.optimizer_tier = name, torch.ones(4), Tier(torch.device("cpu"))
        self.master = torch.zeros(4)

    def is_stored_by(self, writes):
        writes.wait()


@pytest.fixture
def updates():
    return Updates(lambda tile: {}, read_ahead=True, write_behind=True, shows=False)


def tiles_of(units, each=1):
    return [Tile(unit, 0, 0, torch.zeros(4)) for unit in units for _ in range(each)]


def test_run_updates_in_the_given_order_before_it_returns(updates):
    units, seen = [Unit(name) for name in "abc"], []
    updates.run(tiles_of(units), lambda tile, grad: seen.append((tile.unit.name, grad.sum().item())) or Pending())
    assert seen == [("a", 4.0), ("b", 4.0), ("c", 4.0)]


def test_a_unit_that_is_waited_for_comes_next_and_nothing_else_is_waited_for(updates):
    units, seen, gates = [Unit(name) for name in "abcd"], [], defaultdict(threading.Event)

    def update(tile, grad):
        assert gates[tile.unit.name].wait(TIMEOUT)
        seen.append(tile.unit.name)
        return Pending()

    updates.start(tiles_of(units), update)
    with ThreadPoolExecutor(1) as pool:
        # The thread is at a; c is put before b.
        waiting = pool.submit(updates.wait, units[2])
        while not updates._todo or updates._todo[0].unit is not units[2]:
            assert not waiting.done()
        gates["a"].set()
        gates["c"].set()
        waiting.result(TIMEOUT)
    assert seen == ["a", "c"]
    gates["b"].set()
    gates["d"].set()
    updates.wait()
    assert seen == ["a", "c", "b", "d"]


def test_a_unit_is_done_with_its_last_tile(updates):
    units, seen = [Unit(name) for name in "ab"], []
    updates.start(tiles_of(units, each=3), lambda tile, grad: seen.append(tile.unit.name) or Pending())
    updates.wait(units[1])
    assert seen.count("b") == 3
    updates.wait()
    assert len(seen) == 6


def test_an_error_behind_the_step_is_raised_wherever_somebody_waits(updates):
    units = [Unit(name) for name in "ab"]

    def update(tile, grad):
        raise OSError(28, "no space")

    updates.start(tiles_of(units), update)
    for unit in (units[1], None, units[0]):
        with pytest.raises(OSError, match="no space"):
            updates.wait(unit)


def test_an_error_in_the_step_is_raised_until_the_values_are_given_up(updates):
    units = [Unit("a")]

    def update(tile, grad):
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        updates.run(tiles_of(units), update)
    with pytest.raises(ValueError, match="wrong"):
        updates.wait()
    updates.drop()
    updates.wait()
