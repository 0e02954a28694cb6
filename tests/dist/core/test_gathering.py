"""When groups are gathered (prefetch, reuse, limits and persistence), and how much is gathered at
any moment. The tests read events, count all-gathers, and measure storages.

The groups of the toy model in the order of their use: stem, blocks.0 ... blocks.3, head.
"""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.dist.toys import (
    BLOCK,
    WIDTH,
    after_each,
    bytes_of,
    gathered,
    gathering,
    recorded,
    short,
    toy,
    toy_batches,
)
from tests.dist.training import ds_config, relative, sgd_engine, start, step, train_zero
from tests.parity.test_variants import data, variant
from tests.processes import on_ranks, run_on
from zero.core.param_group import ParamGroup, State
from zero.core.sharded_param import ShardedParameter
from zero.engine import ZeroEngine

STRAY = WIDTH * WIDTH
SIZES = [STRAY, BLOCK, BLOCK, BLOCK, BLOCK, STRAY]
# Elements used between a group's forward and its backward: all later groups, twice each.
REUSE_DISTANCES = [2 * sum(SIZES[i + 1 :]) for i in range(6)]
NOTHING_PERSISTENT = {"stage3_param_persistence_threshold": 0}


def traced(
    rank: int, world_size: int, settings: dict
) -> tuple[list[list[tuple[str, str]]], list[int], int]:
    """Return of three steps: the events, the number of all-gathers, and the most elements in flight
    at a time.
    """
    engine, _ = start(toy(), ds_config(**NOTHING_PERSISTENT | settings))
    events, gathers, in_flight = [], [], [0]
    with after_each(ParamGroup, "all_gather", lambda _: in_flight.append(gathering(engine))):
        for batch in toy_batches(3):
            before = engine.comm.calls["all_gather"]
            with recorded(ParamGroup, "all_gather", "unshard") as seen:
                step(engine, [batch])
            events.append(short(seen))
            gathers.append(engine.comm.calls["all_gather"] - before)
    return events, gathers, max(in_flight)


def trace(**settings: int) -> tuple[list[list[tuple[str, str]]], list[int], int]:
    return run_on(2, traced, {f"stage3_{name}": value for name, value in settings.items()})[0]


def lead_times(events: list[tuple[str, str]]) -> list[int]:
    """Return for each all-gather how many uses of other groups begin between its start and the use
    it serves.
    """
    found = []
    for position, (event, name) in enumerate(events):
        if event == "all_gather":
            uses = [group for kind, group in events[position:] if kind == "unshard"]
            found.append(uses.index(name))
    return found


def test_without_prefetch_every_gather_starts_when_it_is_needed():
    events, _, in_flight = trace(prefetch_bucket_size=0)
    assert [set(lead_times(of_step)) for of_step in events] == [{0}] * 3
    assert in_flight == BLOCK


def test_prefetch_starts_the_next_gather_before_the_group_at_hand_is_used():
    events, _, _ = trace(prefetch_bucket_size=1, max_reuse_distance=0)
    assert set(lead_times(events[0])) == {0}, "the first step is only recorded"
    for of_step in events[1:]:
        assert lead_times(of_step)[0] == 0 and set(lead_times(of_step)[1:]) == {1}


def test_a_larger_bucket_prefetches_farther():
    events, _, in_flight = trace(prefetch_bucket_size=2 * BLOCK, max_reuse_distance=0)
    begin = [
        ("all_gather", "stem.weight"),
        ("all_gather", "blocks.0"),
        ("all_gather", "blocks.1"),
        ("unshard", "stem.weight"),
    ]
    assert events[2][:4] == begin, "two blocks fill the bucket"
    assert 2 * BLOCK <= in_flight <= 3 * BLOCK + STRAY
    _, _, everything = trace(prefetch_bucket_size=10**9)
    assert everything == sum(SIZES)


@pytest.mark.parametrize(
    "distance", [0, REUSE_DISTANCES[4], REUSE_DISTANCES[3] - 1, REUSE_DISTANCES[2], 10**9]
)
def test_reuse_distance_decides_what_backward_gathers_again(distance):
    _, gathers, _ = trace(max_reuse_distance=distance, prefetch_bucket_size=0)
    again = sum(reuse > distance for reuse in REUSE_DISTANCES)
    assert gathers[1:] == [6 + again] * 2
    assert gathers[0] == 12, "before the order is known nothing is kept"


def persistence(rank: int, world_size: int, settings: dict) -> tuple[int, int, list[str], int]:
    engine, _ = start(toy(), ds_config(stage3_prefetch_bucket_size=0, **settings))
    train_zero(engine, toy_batches(2))
    readable = [
        name
        for name, param in engine.module.named_parameters()
        if not isinstance(param, ShardedParameter)
    ]
    with recorded(ParamGroup, "all_gather") as started:
        step(engine, toy_batches(1))
    return engine.residency.persistent, engine.residency.live, readable, len(started)


@pytest.mark.parametrize("threshold", [0, WIDTH - 1, WIDTH, 3 * WIDTH, STRAY, 10**6])
def test_parameters_up_to_the_persistence_threshold_stay_gathered(threshold):
    expected = {name: p.numel() for name, p in toy().named_parameters() if p.numel() <= threshold}
    for elements, live, readable, gathers in run_on(
        2, persistence, {"stage3_param_persistence_threshold": threshold}
    ):
        assert sorted(readable) == sorted(expected)
        assert elements == sum(expected.values()) and live == 0
        assert gathers == {STRAY: 4, 10**6: 0}.get(threshold, 6)


def accumulating(rank: int, world_size: int) -> list[int]:
    """Return the number of all-gathers of each micro-batch. A step has two."""
    engine, _ = start(
        toy(), ds_config(accumulation=2, stage3_prefetch_bucket_size=0, **NOTHING_PERSISTENT)
    )
    found = []
    for batch in toy_batches(8):
        before = engine.comm.calls["all_gather"]
        step(engine, [batch])
        found.append(engine.comm.calls["all_gather"] - before)
    return found


def test_what_is_gathered_serves_the_next_micro_batch_until_the_update():
    assert run_on(2, accumulating)[0][4:] == [6, 0, 6, 0]


class Experts(nn.Module):
    """A block of whose two experts some calls use one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.eye(WIDTH))
        self.second = nn.Parameter(torch.eye(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, uses_second: bool) -> torch.Tensor:
        added = self.inner(torch.tanh(hidden @ self.first))
        return hidden + (added @ self.second if uses_second else added)


class WithExperts(nn.Module):
    """`kind`: blocks are groups, or have groups inside of groups ("nested"), or run again in
    backward, or twice.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        blocks = {f"block{i}": Experts() for i in range(4)}
        if kind == "nested":
            for name, block in blocks.items():
                self.add_module(name, block)
        else:
            self.blocks = nn.ModuleList(blocks.values())

    def forward(self, x: torch.Tensor, used: list[bool]) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(1 + (self.kind == "twice")):
            for block, uses_second in zip(self.modules_in_order(), used, strict=True):
                if "reentrant" in self.kind:
                    again = self.kind == "reentrant"
                    x = checkpoint(block, x, uses_second, use_reentrant=again)
                else:
                    x = block(x, uses_second)
        return x.square().mean()

    def modules_in_order(self) -> list[nn.Module]:
        return [each for each in self.modules() if isinstance(each, Experts)]


def with_unused_experts(
    rank: int, world_size: int, kind: str, used: list[list[bool]]
) -> list[tuple[list[tuple[str, str]], int]]:
    """Return the all-gathers under limits from one block to three, and the most elements."""
    size, found = (3 * WIDTH + 1) * WIDTH, []
    for room, bucket in itertools.product([1, 2, 3], [0, size, 4 * size]):
        limits = {"max_live_parameters": room * size, "prefetch_bucket_size": bucket}
        settings = {f"stage3_{name}": value for name, value in limits.items()}
        # A rank must not wait for the reduction of a group whose gradients another rank lacks.
        settings |= {"reduce_bucket_size": size, "overlap_comm": room > 1}
        config = ds_config(accumulation=2, **NOTHING_PERSISTENT | settings)
        engine, _ = start(WithExperts(kind), config)
        with recorded(ParamGroup, "all_gather") as seen:
            for batch in toy_batches(6):
                engine.backward(engine(batch["x"], used[rank]))
                engine.step()
        assert engine.residency.live == 0
        assert kind == "twice" or engine.residency.peak <= room * size
        found.append((short(seen), engine.residency.peak))
    return found


@pytest.mark.parametrize("kind", ["blocks", "nested", "reentrant", "non-reentrant", "twice"])
def test_an_expert_that_one_rank_does_not_use_changes_no_all_gather(kind):
    """Its block does not get all gradients on that rank."""
    everything, some = [True] * 4, [True, False, False, False]
    expected = run_on(2, with_unused_experts, kind, [everything] * 2)
    for used in [everything, some], [[False] * 4, everything]:
        assert run_on(2, with_unused_experts, kind, used, timeout=90.0) == expected


class CallsItself(nn.Module):
    """Its weights are needed before and after calls inside of its call."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.other = [other]  # of another group

    def forward(self, hidden: torch.Tensor, kind: str, depth: int = 1) -> torch.Tensor:
        hidden = self.call_other(torch.tanh(hidden @ self.first), in_thread=kind == "thread")
        if depth and kind == "recursion":
            hidden = hidden + self(hidden, kind, depth - 1)
        elif depth and "reentrant" in kind:
            again = kind == "reentrant"
            hidden = hidden + checkpoint(self, hidden, kind, depth - 1, use_reentrant=again)
        return torch.tanh(hidden @ self.second)

    def call_other(self, hidden: torch.Tensor, in_thread: bool) -> torch.Tensor:
        results: list[torch.Tensor] = []
        if not in_thread:
            return self.other[0](hidden)
        # A thread numbers its operations from 0.
        thread = threading.Thread(target=lambda: results.append(self.other[0](hidden)))
        thread.start()
        thread.join()
        return results[0]


class WithCallsInside(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.stem, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = CallsItself(self.other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.stem(x), self.kind).square().mean()


def with_calls_inside(rank: int, world_size: int, kind: str) -> list[float]:
    limits = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    engine, losses = sgd_engine(WithCallsInside(kind), **limits), []
    for batch in toy_batches(3):
        losses.append(loss := engine(batch["x"]))
        engine.backward(loss)
        engine.step()
    assert engine.residency.live == 0
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("kind", ["recursion", "reentrant", "non-reentrant", "thread"])
def test_a_group_is_not_released_before_all_calls_inside_of_its_call_are_over(kind):
    model, expected = WithCallsInside(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in toy_batches(3):
        expected.append((loss := model(batch["x"])).item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for losses in run_on(2, with_calls_inside, kind):
        assert relative(losses, expected) <= 1e-5


# -- how much is gathered, by the engine's counter and in storages


LIMITS = [0, 1500, 12000, 10**9]


@pytest.mark.parametrize(
    ("kind", "accumulation"),
    [
        ("toy", 1),
        ("toy", 2),
        ("plain", 2),
        ("reentrant", 1),
        ("non-reentrant", 2),
        ("frozen encoder", 1),
        ("frozen embedding", 2),
        ("untied", 1),
    ],
)
@on_ranks(2)
def test_live_elements_stay_within_the_limit_or_one_group(rank, world_size, kind, accumulation):
    """With settings that push the engine to exceed the limit."""
    for limit in LIMITS:
        settings = {
            "stage3_param_persistence_threshold": 50,
            "stage3_max_live_parameters": limit,
            "stage3_prefetch_bucket_size": 6000,
        }
        is_toy = kind == "toy"
        model, batches = (toy(), toy_batches(3)) if is_toy else (variant(kind), data(kind)[:3])
        engine, _ = start(model, ds_config(accumulation=accumulation, **settings))
        loose = [group.layout for group in engine.groups if not group.persistent]
        most = max(limit, *(layout.numel for layout in loose))
        padding = sum(layout.padded - layout.numel for layout in loose)

        def look(_: ParamGroup, engine: ZeroEngine = engine, most: int = most + padding) -> None:
            assert gathered(engine) <= most

        with after_each(ParamGroup, "all_gather", look):
            train_zero(engine, batches)
        assert engine.residency.peak <= most
        assert engine.residency.live == gathered(engine) == 0
    # Without a limit most of the model is kept until its backward.
    assert engine.residency.peak > sum(layout.numel for layout in loose) // 2


def states(rank: int, world_size: int) -> list[str]:
    """Look at every group's memory in each forward and before each gradient.

    Return what is wrong.
    """
    engine, _ = start(
        toy(), ds_config(stage3_param_persistence_threshold=0, stage3_max_live_parameters=2 * BLOCK)
    )
    wrong = []

    def look(*_) -> None:
        for group in engine.groups:
            size = group.full.untyped_storage().nbytes()
            if size != (0 if group.state is State.SHARDED else group.layout.padded * 4):
                wrong.append(f"{group.describe()} and holds {size} bytes")
            is_hidden = any(isinstance(param, ShardedParameter) for param in group.params)
            if (group.state is State.UNSHARDED) == is_hidden:
                wrong.append(f"{group.describe()} and shows the wrong values")

    for block in engine.module.blocks:
        block.register_forward_hook(look)
    for param in engine.module.parameters():
        param.register_post_accumulate_grad_hook(look)
    train_zero(engine, toy_batches(3))
    look()
    return wrong


def test_a_sharded_group_holds_no_byte_and_shows_no_values():
    assert run_on(2, states) == [[], []]


def state_bytes(engine: ZeroEngine) -> int:
    """Return the bytes of shards, masters, gradients and moments. Each storage counts once."""
    tensors = [group.shard for group in engine.groups]
    for shard in engine.optimizer.shards.values():
        tensors += [shard.master, shard.grad]
    states = engine.optimizer.state.values()
    return bytes_of([*tensors, *(t for state in states for t in state.values() if t.dim())])


def state_of_a_rank(rank: int, world_size: int, sections: dict) -> tuple[int, int]:
    engine, _ = start(toy(), ds_config(stage3_param_persistence_threshold=0, **sections))
    train_zero(engine, toy_batches(1))
    numel = sum(param.numel() for param in engine.module.parameters())
    padding = sum(group.layout.padded - group.layout.numel for group in engine.groups)
    # Between steps the buffer of a sharded gradient may be kept or freed.
    return state_bytes(engine), 4 * (numel + padding) * (4 if not sections else 4.5) / world_size


@pytest.mark.parametrize("sections", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_state_of_a_rank_is_its_share(sections):
    """fp32: weight, gradient, two moments. bf16: the weight in 2 bytes; master, gradient and
    moments in fp32.
    """
    for world_size in (1, 2, 4):
        for held, share in run_on(world_size, state_of_a_rank, sections):
            assert held <= share
    assert held > 0.7 * share


@on_ranks(2)
def test_the_model_itself_holds_nothing_once_it_is_sharded(rank, world_size):
    model = toy()
    start(model, ds_config(stage3_param_persistence_threshold=0))
    assert bytes_of(model.parameters()) // 4 == 1
