"""The control plane: in every kind of call, one rank fails or goes elsewhere, and all ranks hear of
it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.processes import run_on
from zero.comm.communicator import communicator
from zero.comm.control import Control, Record
from zero.errors import DamagedCheckpointError, UsageError


def fails(control: Control, rank: int) -> int:
    if control.rank == rank:
        raise KeyError("planted")
    return control.rank


# Each kind of call, where the function given fails on some rank.
FAILING: dict[str, Callable[[Control, Callable[[], int]], Any]] = {
    "exchange": lambda control, act: control.exchange(act),
    "together": lambda control, act: control.together(act),
    "lead": lambda control, act: control.lead(act, sum),
    "conclude": lambda control, act: control.lead(lambda: None, lambda _: act()),
    "any": lambda control, act: control.any(False, error_of(act)),
    "require_same": lambda control, act: control.require_same(lambda: Record({"rank": act()})),
}
# Calls that another one may meet.
CALLS: dict[str, Callable[[Control], Any]] = {
    "wait": lambda control: control.wait_for_all(),
    "any": lambda control: control.any(True),
    "together": lambda control: control.together(dict),
    "exchange": lambda control: control.exchange(lambda: (control.rank, "x" * control.rank)),
    "lead": lambda control: control.lead(
        lambda: [1.5] * 1000, lambda values: [*values[0], *values[1], *values[2]]
    ),
    "require_same": lambda control: control.require_same(
        lambda: Record({"lr": 0.1}, flag=control.rank == 1)
    ),
}
EXPECTED = {
    "any": True,
    "together": {},
    "exchange": [(0, ""), (1, "x"), (2, "xx")],
    "lead": [1.5] * 3000,
    "require_same": True,
}
DIFFERENT: list[tuple[dict[str, object], dict[str, object], str]] = [
    ({"lr": 0.1}, {"lr": 0.2}, "lr: 0.1 on rank 0, 0.2 on rank 1"),
    ({"lr": 0.1}, {"lr": 0.1, "initial_lr": 0.1}, "initial_lr: missing on rank 0, 0.1 on rank 1"),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "parameters are in another order"),
]


def error_of(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except Exception as error:
        return error
    return None


def every_kind(rank: int, world_size: int) -> list[str]:
    comm = communicator()
    said = []
    for kind, call in FAILING.items():
        for failing in range(world_size) if kind != "conclude" else (0,):
            control = comm.control(kind, " of the table")
            with pytest.raises(RuntimeError) as raised:
                call(control, lambda control=control, failing=failing: fails(control, failing))
            assert f"{kind} of the table: rank {failing}: KeyError: 'planted'" in str(raised.value)
    for name, call in CALLS.items():
        for other, diverging in CALLS.items():
            if other == name:
                continue
            with pytest.raises(RuntimeError, match="different calls") as raised:
                (call if rank != 1 else diverging)(comm.control(name if rank != 1 else other))
            assert f"rank 0 at '{name}'" in str(raised.value), str(raised.value)
            assert f"rank 1 at '{other}'" in str(raised.value)
    # nothing is left over from all that
    for name, call in CALLS.items():
        if name in EXPECTED:
            assert call(comm.control(name)) == EXPECTED[name]
    for facts, of_rank_1, text in DIFFERENT:
        own = of_rank_1 if rank == 1 else facts
        with pytest.raises(UsageError) as raised:
            comm.control("settings").require_same(partial(Record, own))
        assert text in str(raised.value)
        said.append(str(raised.value))
        parts = [[0], [1, 2]]
        with pytest.raises(UsageError) as raised:
            comm.control("settings").require_same(partial(Record, {}, own), parts)
        own = of_rank_1 if rank == 0 else facts
        comm.control("settings").require_same(partial(Record, {}, own), parts)
        said.append(str(raised.value))
    # as mathematical functions differ on other machines
    comm.control("settings").require_same(lambda: Record({"lr": 0.1 * (1 + 1e-15 * rank)}))
    kinds = (
        (UsageError("key"), UsageError),
        (DamagedCheckpointError("file"), DamagedCheckpointError),
        (OSError(errno.ENOSPC, "No space", "file"), OSError),
    )
    for error, kind in kinds:
        with pytest.raises(kind) as raised:
            comm.control("errors").any(False, error if rank == 2 else None)
        assert type(raised.value) is kind and "errors: rank 2: " in str(raised.value)
    assert getattr(raised.value, "errno", None) == errno.ENOSPC
    thread = Control(comm.new_channel("a thread"), "thread")
    assert thread.exchange(lambda: rank) == [0, 1, 2]
    return said


def test_every_kind_with_one_rank_failing_and_one_diverging():
    first, *others = run_on(3, every_kind, timeout=60.0)
    assert all(other == first for other in others)
