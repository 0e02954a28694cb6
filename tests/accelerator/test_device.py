"""The simulated accelerator finds each kind of mistake.

It finds none in the correct version of the same code.
"""

import math
import time
from collections.abc import Callable

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
    shard, full = ones(), torch.zeros(N, device=device.NAME)
    work = dist.all_gather_single(full, shard, async_op=True)
    if right:
        work.wait()
    assert full.sum().item() == (N if right else 0), "collectives are late"
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
]


def found_in_each(rank: int, world_size: int) -> list[tuple[list[str], list[str]]]:
    found = []
    for case, _ in CASES:
        of_case = []
        for right in (True, False):
            case(right)
            torch.accelerator.synchronize()
            of_case.append(device.mistakes())
        found.append(tuple(of_case))
    return found


def test_each_planted_mistake_is_found():
    found = run_on(1, found_in_each, simulated=True)[0]
    for (case, expected), (in_right_code, in_wrong_code) in zip(CASES, found, strict=True):
        assert in_right_code == [], case.__name__
        assert [text for text in in_wrong_code if expected in text], (case.__name__, in_wrong_code)


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


def other_orders(rank: int, world_size: int) -> tuple[list[float], bool, float]:
    """Return what each rank gets if the ranks start two gathers in different orders, and if kinds
    or sizes differ.
    """
    found = {}
    for value in (1.0, 2.0) if rank == 0 else (2.0, 1.0):
        full = torch.zeros(world_size, device=device.NAME)
        dist.all_gather_single(full, torch.full((1,), value, device=device.NAME))
        found[value] = full.tolist()
    tensor = ones()
    if rank == 0:
        dist.all_reduce(tensor)
    else:
        dist.broadcast(tensor, src=0)
    mixed = tensor.isnan().all().item()
    total = torch.ones(1, device=device.NAME)
    dist.all_reduce(total)  # the orders are the same again
    assert device.mistakes() == [], "nothing tells a rank"
    return found[1.0], mixed, total.item()


def test_collectives_match_by_their_order():
    assert run_on(2, other_orders, simulated=True) == [
        ([1.0, 2.0], True, 2.0),
        ([2.0, 1.0], True, 2.0),
    ]


def received_values_are_waited_for(rank: int, right: bool) -> None:
    if rank == 0:
        dist.send(ones(), 1)
        return
    received = torch.zeros(N, device=device.NAME)
    work = dist.irecv(received, 0)
    if right:
        work.wait()
    assert received.sum().item() == (N if right else 0), "messages are late"
    work.wait()


def sent_values_are_not_overwritten_early(rank: int, right: bool) -> None:
    if rank == 1:
        dist.recv(torch.empty(N, device=device.NAME), 0)
        return
    sent = ones()
    work = dist.isend(sent, 1)
    if right:
        work.wait()
    sent.zero_()
    work.wait()


def found_in_messages(rank: int, world_size: int) -> list[list[str]]:
    """Return the mistakes of right and wrong code, of the one function and the other."""
    found = []
    for case in (received_values_are_waited_for, sent_values_are_not_overwritten_early):
        for right in (True, False):
            case(rank, right)
            torch.accelerator.synchronize()
            found.append(device.mistakes())
    return found


def test_messages_are_waited_for():
    of_sender, of_receiver = run_on(2, found_in_messages, simulated=True)
    for number, mistakes in enumerate([*of_receiver[:2], *of_sender[2:]]):
        assert ["nothing orders them" in text for text in mistakes] == [True] * (number % 2), (
            mistakes
        )


def two_messages(rank: int, world_size: int) -> list[float]:
    """Rank 0 sends 1, then 2 and 2.

    Rank 1 returns what it gets with exchanged tags and with room for one value.
    """
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        dist.send(torch.full((1,), 1.0, device=device.NAME), 1, tag=1)
        torch.accelerator.synchronize()
        assert store.check(["receiving"]), "a send ends when the other side receives, not before"
        dist.send(torch.full((2,), 2.0, device=device.NAME), 1, tag=2)
        return []
    time.sleep(0.5)
    store.set("receiving", "")
    found = torch.zeros(2, device=device.NAME)
    dist.recv(found[:1], 0, tag=2)
    dist.recv(found[1:], 0, tag=1)
    return found.tolist()


def test_messages_match_by_their_order():
    _, (first, second) = run_on(2, two_messages, simulated=True)
    assert first == 1.0 and math.isnan(second), "a wrong size hangs or gives any values on hardware"
