"""The control plane: how ranks agree on what is not data, such as settings, errors and names.

[Note: control plane] All ranks of a job make the same calls in the same order. In each call, every
rank first sends a header of fixed size: the kind of the call, its number, the size of what follows,
and whether this rank has failed. So ranks at different kinds are an error that names both, and an
error on one rank is raised on all, in its own words. Only then do values follow, and only where
there are any. A channel has connections of its own. A thread beside the main one needs a channel of
its own, too."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from zero.comm.watchdog import ADVICE, LONE, Watchdog, tells_if_alone
from zero.comm.world import default_timeout
from zero.errors import DamagedCheckpointError, UsageError
from zero.releases import installed

T = TypeVar("T")
Facts = Mapping[str, object]

# Differences that an error names.
SHOWN = 5
# Of the channels of this process, equal on all ranks.
_serials = itertools.count()
# Of two numbers on different machines: their mathematical functions differ in the last bit.
_ROUNDING = 1e-9
# Errors that every rank raises unchanged. All others become a RuntimeError.
_PORTABLE = (DamagedCheckpointError, UsageError, ValueError, OSError)
_HEADER = struct.Struct("<qq??8s8s64s")


class _Header(NamedTuple):
    """What a rank sends first: number and kind of the call, and the size of its value or error.

    `facts`, `of_part`: digests of what must be equal on all ranks, or on all of one world.
    """

    number: int
    size: int
    failed: bool
    flag: bool
    facts: bytes
    of_part: bytes
    kind: bytes


class Record(NamedTuple):
    """What a rank tells in a comparison: {name: text or number}.

    `facts` must be equal on all ranks, `of_part` on those of a part, such as a pipeline stage.
    """

    facts: Facts
    of_part: Facts = {}
    flag: bool = False


class _Outcome(NamedTuple):
    """What an action has returned, or its error as all ranks raise it; pickled."""

    content: bytes = b""
    failure: Exception | None = None


# For the watchdog: for what ranks wait, and for how many seconds they may at least.
_What = tuple[str, float]


class Channel:
    """Connections among all ranks of a job. All ranks must make it together.

    The watchdog covers the wait, because a rank may die before it connects; `what` names it. The
    connections are not registered with torch.distributed: a script may destroy its process groups
    while a thread uses them."""

    def __init__(self, watchdog: Watchdog, what: str):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.count = 0
        self._watchdog = watchdog
        # torch's stubs lack its collectives.
        self._connection: Any = self._connect(what) if self.world_size > 1 else None

    def _connect(self, what: str) -> dist.ProcessGroupGloo:
        # A clone: rank 0's own store would keep the server alive, and its port in use, after the
        # groups are destroyed.
        server: Any = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"zero/control/{next(_serials)}", server.clone())
        return self._watchdog.wait(
            lambda: dist.ProcessGroupGloo(store, self.rank, self.world_size, default_timeout()),
            f"connecting ({what})",
        )

    def all_gather(
        self, content: bytes, size: int, what: _What, to_all: bool = True
    ) -> list[bytes]:
        """Every rank's content, cut or filled up to `size` bytes; if not `to_all`, on rank 0, and
        nothing on the others.
        """
        if self.world_size == 1 or not size:
            return [content] * self.world_size
        own = torch.frombuffer(bytearray(content[:size].ljust(size, b"\0")), dtype=torch.uint8)
        receives = to_all or self.rank == 0
        received = [torch.empty_like(own) for _ in range(self.world_size * receives)]
        if to_all:
            work = self._connection.allgather([received], [own])
        else:
            # The shorter form, with tensor and rank, fails with gloo of torch 2.8.
            options = dist.GatherOptions()
            options.rootRank = 0
            work = self._connection.gather([received] if receives else [], [own], options)
        self._watchdog.wait(work.wait, *what)
        return [each.numpy().tobytes() for each in received]


class Control:
    """Calls of one kind over a channel.

    Errors begin with `kind` and `detail`, such as a path. `is_long`: the others may wait as long as
    a collective may, because one rank may be writing a whole model."""

    def __init__(self, channel: Channel, kind: str, detail: str = "", is_long: bool = False):
        self.rank, self.world_size = channel.rank, channel.world_size
        self._channel = channel
        self._kind = kind.encode()[:64]
        patience = 0.8 * default_timeout().total_seconds() if is_long else 0.0
        self._name = kind + detail
        self._what = self._name, patience

    def wait_for_all(self) -> Control:
        """Wait until all ranks are here. A rank that has waited for `LONE` seconds says so."""
        with tells_if_alone(self.rank, self._name, LONE):
            self._meet()
        return self

    def any(self, flag: bool, failure: Exception | None = None) -> bool:
        """Whether the flag is set on any rank: cheap enough for every step. If `failure` is given
        on any rank, all raise it.
        """
        outcome = _Outcome() if failure is None else self._failed(failure)
        return any(header.flag for header in self._share(outcome, flag))

    def together(self, act: Callable[[], T]) -> T:
        """Run `act` on every rank; each returns its own result, which may be of any type."""
        results: list[T] = []
        self._share(self._attempt(lambda: results.append(act())))
        return results[0]

    def exchange(self, act: Callable[[], T]) -> list[T]:
        """Run `act` on every rank; all return the results of all, in the order of ranks."""
        outcome = self._attempt(act)
        headers = self._share(outcome)
        contents = self._channel.all_gather(outcome.content, _largest(headers), self._what)
        return [_value(each) for each in contents]

    def lead(self, act: Callable[[], Any], conclude: Callable[[list[Any]], T]) -> T:
        """Run `act` on every rank, and `conclude` on rank 0 with all results, in the order of
        ranks. All return what `conclude` returns.
        """
        outcome = self._attempt(act)
        headers = self._share(outcome)
        contents = self._channel.all_gather(outcome.content, _largest(headers), self._what, False)
        told = _Outcome()
        if self.rank == 0:
            told = self._attempt(lambda: conclude([_value(each) for each in contents]))
        size = self._share(told)[0].size
        return _value(self._channel.all_gather(told.content, size, self._what)[0])

    def require_same(self, act: Callable[[], Record], parts: Sequence[Sequence[int]] = ()) -> bool:
        """Raise UsageError, on every rank, where there are `differences`. Returns whether the flag
        is set on any rank.
        """
        found, flag = self.differences(act, parts)
        if len(found) > SHOWN:
            found = [*found[:SHOWN], f"and {len(found) - SHOWN} more"]
        if found:
            raise UsageError(
                "the ranks disagree:\n  " + "\n  ".join(found) + "\nEvery rank must be started "
                "with the same script, arguments and files, and build the same model and optimizer"
            )
        return flag

    def differences(
        self, act: Callable[[], Record], parts: Sequence[Sequence[int]] = ()
    ) -> tuple[list[str], bool]:
        """Where the facts that `act` returns differ between ranks, and those of a part between the
        ranks of one of `parts`: name, values and ranks. The same on all ranks. Also whether the
        flag is set on any rank. Only digests are sent, unless these differ.
        """
        records = [Record({})]
        outcome = self._attempt(lambda: records.append(act()))
        facts, of_part = _comparable(records[-1].facts), _comparable(records[-1].of_part)
        headers = self._share(outcome, records[-1].flag, _digest(facts), _digest(of_part))
        is_same = len({header.facts for header in headers}) == 1 and all(
            len({headers[rank].of_part for rank in part}) == 1 for part in parts
        )
        found: list[str] = []
        if not is_same:
            told = self.exchange(lambda: (facts, of_part))
            found += _differences({rank: each[0] for rank, each in enumerate(told)})
            for part in parts:
                found += _differences({rank: told[rank][1] for rank in part})
        return found, any(header.flag for header in headers)

    def _meet(
        self,
        size: int = 0,
        failed: bool = False,
        flag: bool = False,
        facts: bytes = b"",
        of_part: bytes = b"",
    ) -> list[_Header]:
        """Every rank's header. Raises RuntimeError if ranks are at different calls."""
        channel = self._channel
        own = _HEADER.pack(channel.count, size, failed, flag, facts, of_part, self._kind)
        channel.count += 1
        received = channel.all_gather(own, _HEADER.size, self._what)
        headers = [_Header(*_HEADER.unpack(each)) for each in received]
        for rank, header in enumerate(headers):
            if (header.number, header.kind) != (headers[0].number, headers[0].kind):
                raise RuntimeError(
                    f"the ranks are at different calls: rank 0 at {_named(headers[0])}, rank "
                    f"{rank} at {_named(header)}. All ranks must make the same calls in the same "
                    f"order. {ADVICE}"
                )
        return headers

    def _share(self, outcome: _Outcome, flag: bool = False, *digests: bytes) -> list[_Header]:
        """Every rank's header. If an action has failed on any rank, raises the first such rank's
        error.
        """
        failure = outcome.failure
        headers = self._meet(len(outcome.content), failure is not None, flag, *digests)
        first = next((rank for rank, header in enumerate(headers) if header.failed), None)
        if first is None:
            return headers
        size = headers[first].size
        contents = self._channel.all_gather(outcome.content, size, self._what)
        kind, arguments = _value(contents[first])
        # A user's mistake is reported once, a system error with its rank and place.
        raise kind(*arguments) from (None if isinstance(failure, ValueError) else failure)

    def _attempt(self, act: Callable[[], object]) -> _Outcome:
        try:
            value = act()
            return _Outcome(b"" if value is None else pickle.dumps(value))
        except Exception as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> _Outcome:
        return _Outcome(pickle.dumps(self._portable(error)), error)

    def _portable(self, error: Exception) -> tuple[type[Exception], list]:
        """The error as all ranks raise it: its kind and its arguments."""
        where = self._name
        where += f": rank {self.rank}" if self.world_size > 1 else ""
        if isinstance(error, OSError) and error.errno is not None:
            file = f": {error.filename}" if error.filename else ""
            return OSError, [error.errno, f"{where}: {error.strerror}{file}"]
        for kind in _PORTABLE:
            if isinstance(error, kind):
                return kind, [f"{where}: {error}"]
        name = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
        return RuntimeError, [f"{where}: {name}{error}"]


def _value(content: bytes) -> Any:
    """What was pickled, filled up or not; None was not."""
    return pickle.loads(content) if content[:1] == pickle.PROTO else None


def _largest(headers: Sequence[_Header]) -> int:
    return max(header.size for header in headers)


def _named(header: _Header) -> str:
    kind = header.kind.rstrip(b"\0").decode(errors="ignore")
    return f"{kind!r} (call {header.number})"


def _comparable(facts: Facts) -> dict[str, str | float]:
    return {key: each if isinstance(each, float) else str(each) for key, each in facts.items()}


def _digest(facts: Facts) -> bytes:
    return hashlib.blake2b(repr(list(facts.items())).encode(), digest_size=8).digest()


def _differences(of_ranks: Mapping[int, Facts]) -> list[str]:
    """Where facts differ: name, values and ranks."""
    (first, own), *others = of_ranks.items()
    found = []
    for key in dict.fromkeys(key for facts in of_ranks.values() for key in facts):
        value = own.get(key, "missing")
        for rank, facts in others:
            other = facts.get(key, "missing")
            if not _is_same(value, other):
                found.append(f"{key}: {value} on rank {first}, {other} on rank {rank}")
                break
    if not found and any(list(facts) != list(own) for _, facts in others):
        found.append("parameters are in another order")
    return found


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_ROUNDING) or str(one) == str(other)
    return one == other


# -- facts that must be equal: settings, versions, and the numbers of an optimizer


def hyper_parameters(param_groups: Sequence[Mapping]) -> dict[str, float]:
    """The numbers in an optimizer's param groups, by name; parameters by their count, flags as 0
    and 1.
    """
    numbers: dict[str, float] = {}
    for index, group in enumerate(param_groups):
        for key, value in group.items():
            name = f"param group {index}, {key}"
            if key == "params":
                value = len(value)
            values = value if isinstance(value, (tuple, list)) else [value]
            for place, number in enumerate(values):
                is_scalar = isinstance(number, torch.Tensor) and number.numel() == 1
                if is_scalar or isinstance(number, (int, float)):
                    numbers[f"{name}[{place}]" if len(values) > 1 else name] = float(number)
    return numbers


def flat(nested: Mapping, prefix: str = "") -> dict[str, object]:
    """A nest of dicts as one dict with dotted keys."""
    result: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result


@functools.cache
def versions() -> dict[str, str]:
    """The versions of the installed libraries that affect results.

    Which of them are imported may differ by rank.
    """
    packages = ("zero-engine", "transformers", "accelerate", "peft")
    found = {f"version of {name}": installed(name) or "not installed" for name in packages}
    return {"version of torch": str(torch.__version__)} | found
