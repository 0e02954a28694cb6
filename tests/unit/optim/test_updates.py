"""zero.optim.background: the order of background updates, and what happens to their errors."""

import threading
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from zero.comm.work import Pending
from zero.offload.tiers import Tier
from zero.optim.background import Updates
from zero.optim.subgroups import SubGroup

TIMEOUT = 20


class Shard:
    """The part of an optimizer's shard that an update uses."""

    def __init__(self, name):
        self.name = name
        self.grad = torch.ones(4)
        self.tier = Tier(torch.device("cpu"))
        self.master = torch.zeros(4)
        self.group = SimpleNamespace(tier=self.tier, name=name)
        self.sub_groups_left = 0
        self.update_end = None
        self.writes = []
        self.handed_out = 0
        self.new_weights = {}

    def keep_new_weights(self, start, values):
        self.new_weights[start] = values

    def round_into_shard(self, start, values):
        return Pending()


@pytest.fixture
def updates():
    return Updates(torch.device("cpu"), most=1 << 30, write_behind=True, shows=False)


def sub_groups_of(shards, each=1):
    optimizer = SimpleNamespace(state={})
    return [
        SubGroup(optimizer, shard, 0, 0, torch.zeros(4)) for shard in shards for _ in range(each)
    ]


def test_a_group_that_is_preferred_comes_next_and_nothing_else_is_waited_for(updates):
    shards, seen, gates = [Shard(name) for name in "abcd"], [], defaultdict(threading.Event)
    begun = threading.Event()

    def update(values):
        begun.set()
        assert gates[values.sub_group.shard.name].wait(TIMEOUT)
        seen.append(values.sub_group.shard.name)
        return values.master

    updates.start(sub_groups_of(shards, each=2), update)
    assert begun.wait(TIMEOUT)
    updates.prefer(shards[2])  # the thread is at a
    gates["a"].set()
    gates["c"].set()
    updates.wait(shards[2])
    assert seen[:3] == ["a", "c", "c"]
    gates["b"].set()
    gates["d"].set()
    updates.wait()
    assert seen == [*"accabbdd"]


def test_an_error_while_updates_are_sorted_leaves_none_of_them(updates):
    sub_groups = sub_groups_of([Shard("a"), Shard("b")])

    class Sorted:
        """A sub-group at whose place in the order another thread fails."""

        @property
        def shard(self):
            thread.start()
            thread.join(0.3)
            return None

    thread = threading.Thread(target=updates.fail, args=(OSError(28, "no space"),))
    updates._todo.extend([Sorted(), *sub_groups])
    updates.prefer(sub_groups[0].shard)
    thread.join(TIMEOUT)
    assert not updates._todo
    with pytest.raises(OSError, match="no space"):
        updates.wait()


def test_what_was_read_ahead_is_old_if_a_number_of_the_state_changes():
    (sub_group,) = sub_groups_of([Shard("a")])
    sub_group.put_state({"step": 3, "exp_avg": torch.zeros(4)})
    versions = [sub_group.version]
    sub_group.state["step"] = 0
    versions.append(sub_group.version)
    sub_group.state["exp_avg"].add_(1)
    versions.append(sub_group.version)
    sub_group.shard.handed_out += 1
    versions.append(sub_group.version)
    assert all(a != b for a, b in pairwise(versions))
