"""The simulated accelerator finds each kind of mistake.

It finds none in the correct version of the same code.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.accelerator import device
from tests.processes import run_on

N = 1000


def now() -> torch.Stream:
    return torch.accelerator.current_stream()


def side_stream(waits: bool = True) -> torch.Stream:
    side = torch.Stream(device.NAME)
    if waits:
        side.wait_stream(now())
    return side


def ones() -> torch.Tensor:
    return torch.ones(N, device=device.NAME)


def side_stream_waits_for_its_source(right: bool) -> None:
    source, copy, side = ones(), torch.empty(N, device=device.NAME), side_stream(waits=right)
    with side:
        copy.copy_(source)
    now().wait_stream(side)


def compute_waits_for_the_side_stream(right: bool) -> None:
    source, copy, side = ones(), torch.zeros(N, device=device.NAME), side_stream()
    with side:
        copy.copy_(source)
    if right:
        now().wait_stream(side)
    result = copy + 1
    assert result[0].item() == (2 if right else 1), "the copy is late"
    now().wait_stream(side)


def source_is_not_overwritten_early(right: bool) -> None:
    source, side = ones(), side_stream()
    with side:
        source.clone()
    if right:
        now().wait_stream(side)
    source.zero_()
    now().wait_stream(side)


def freed_memory_is_recorded(right: bool) -> None:
    source, target, side = ones(), torch.empty(N, pin_memory=True), side_stream()
    with side:
        target.copy_(source, non_blocking=True)
    if right:
        source.record_stream(side)
    del source
    side.synchronize()
    assert target.isnan().all().item() is not right
    assert (target == 1).all().item() is right


def new_memory_is_used_in_order(right: bool) -> None:
    """New memory may be memory that the default stream has just freed."""
    side = side_stream()
    fresh = torch.empty(N, device=device.NAME)
    if right:
        side.wait_stream(now())
    with side:
        fresh.fill_(1)
    now().wait_stream(side)


def pinned_memory_is_not_reused_early(right: bool) -> None:
    source = torch.ones(N, pin_memory=True)
    target = torch.empty(N, device=device.NAME)
    target.copy_(source, non_blocking=True)
    if right:
        now().synchronize()
    source.fill_(2)
    now().synchronize()


def registered_memory_is_not_given_back_early(right: bool) -> None:
    source = torch.ones(N)
    device.cudart().cudaHostRegister(source.data_ptr(), source.nbytes, 0)
    target = torch.empty(N, device=device.NAME)
    target.copy_(source, non_blocking=True)
    if right:
        now().synchronize()
    device.cudart().cudaHostUnregister(source.data_ptr())
    assert not source.is_pinned()


def gathered_values_are_waited_for(right: bool) -> None:
    shard, full = ones(), torch.zeros(2 * N, device=device.NAME)
    work = dist.all_gather_single(full, shard, async_op=True)
    if right:
        work.wait()
    assert full.sum().item() == (2 * N if right else 0), "collectives are late"
    work.wait()


def received_values_are_waited_for(right: bool) -> None:
    if dist.get_rank() == 0:
        dist.send(ones(), 1)
        return
    received = torch.zeros(N, device=device.NAME)
    work = dist.irecv(received, 0)
    if right:
        work.wait()
    assert received.sum().item() == (N if right else 0), "messages are late"
    work.wait()


def sent_values_are_not_overwritten_early(right: bool) -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.empty(N, device=device.NAME), 0)
        return
    sent = ones()
    work = dist.isend(sent, 1)
    if right:
        work.wait()
    sent.zero_()
    work.wait()


CASES: list[tuple[Callable[[bool], None], str]] = [
    (side_stream_waits_for_its_source, "nothing orders them"),
    (compute_waits_for_the_side_stream, "nothing orders them"),
    (source_is_not_overwritten_early, "nothing orders them"),
    (freed_memory_is_recorded, "there was no record_stream"),
    (new_memory_is_used_in_order, "an earlier use of that memory"),
    (pinned_memory_is_not_reused_early, "changed pinned memory before it knew"),
    (registered_memory_is_not_given_back_early, "pinned memory is given back before"),
    (gathered_values_are_waited_for, "nothing orders them"),
    (received_values_are_waited_for, "nothing orders them"),
    (sent_values_are_not_overwritten_early, "nothing orders them"),
]


def found_in_each(rank: int, world_size: int, right: bool) -> list[list[str]]:
    found = []
    for case, _ in CASES:
        case(right)
        torch.accelerator.synchronize()
        found.append(device.mistakes())
    return found


@pytest.mark.parametrize("right", [True, False])
def test_each_planted_mistake_is_found(right):
    of_ranks = run_on(2, found_in_each, right, simulated=True)
    for (case, expected), *mistakes in zip(CASES, *of_ranks, strict=True):
        assert (expected in str(mistakes)) != right, (case, mistakes)
        assert not (right and any(mistakes)), (case, mistakes)


def read_before_the_event(rank: int, world_size: int) -> None:
    """A host that reads before the event finds no values, on a side stream and on the default
    one.
    """
    for stream in (now(), side_stream()):
        host = torch.zeros(N, pin_memory=True)
        with stream:
            host.copy_(ones(), non_blocking=True)
            event = now().record_event()
        assert host.isnan().all(), "read too early"
        assert device.pending() > 0
        event.synchronize()
        assert (host == 1).all()
    polled = side_stream()
    with polled:
        host.copy_(ones(), non_blocking=True)
    event = polled.record_event()
    assert not event.query(), "nothing has run yet"
    while not event.query():  # a host that polls must reach the end
        pass
    assert (host == 1).all() and device.mistakes() == []


def test_a_host_that_reads_before_the_event_finds_nan():
    run_on(1, read_before_the_event, simulated=True)
