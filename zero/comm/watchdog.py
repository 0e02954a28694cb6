"""Ends a job whose ranks block each other, and reports where each of them is.

Ranks that take different paths through a model wait for messages that never come. The timeout of
the process group (30 minutes) would end them with a message about sockets. A thread in each rank
notices that earlier. The first one to notice raises an alarm through the job's key-value store. In
every rank another thread listens to the store, and answers with what the main thread is doing. The
first one prints all answers, and all processes end with exit code 1. A rank that does not reach the
store says so and ends too. Long before that, where all ranks wait, and at different places, these
are named, and the job ends if that lasts. A rank that does anything else, such as reading data or
evaluating, is not waiting."""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from zero.threads import EngineThread

T = TypeVar("T")

logger = logging.getLogger("zero")

# Seconds after which a rank says that it is waiting for the others.
LONE = 10.0

# Seconds after which ranks that wait at different places say where, and how often they say it again
# before the job ends: a slow link may be sending, or a machine may have been stopped for a while.
APART = 30.0
REPEATS = 5

# Seconds that the other ranks have to answer an alarm.
GRACE = 10.0
ADVICE = (
    "Every rank must save, load and enter zero.GatheredParameters, not rank 0 alone. "
    "If ranks choose between modules, have their parent gathered as a whole: call "
    "zero.leaf.set_z3_leaf_modules(model, [TheirParent]) before zero.initialize."
)
GONE = "A rank that does not answer is on a machine that is gone, or behind a link that is down."
# What ranks must do alike, after their first engine was made and before it.
_ALIKE = "all ranks need the same number of batches and of forward calls"
_LOADS_ALIKE = (
    "all ranks must create and load the model, by from_pretrained or in zero.Init, and call "
    "zero.initialize; not rank 0 alone"
)
_SILENT = "does not answer"
_DIFFERENT = (
    "Ranks may run different modules: if only some have images, give the others a blank one; draw "
    "what a forward skips, as LayerDrop does, from one seed on all ranks."
)
_ALARM = "zero_watchdog/alarm"
_BETWEEN_GROUPS = "an exchange between groups"
_BARRIER = inspect.unwrap(dist.barrier).__code__
# In the messages of gloo and NCCL where the other process is gone.
_LOST = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")


class _Wait(NamedTuple):
    """A wait of a thread: since when, for what, and for how many seconds at most."""

    since: float
    what: object
    limit: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


@dataclass(eq=False, repr=False)
class Watchdog:
    """Watches the waits of one rank until `stop`; `timeout` in seconds.

    `has_engine`: an engine was made, so that what follows is training.

    `mark`, for an accelerator, whose collectives do not block the host: called in the thread, it
    returns a function that says whether the device has done all that it had been given."""

    rank: int
    world_size: int
    timeout: float
    mark: Callable[[], Callable[[], bool]] | None = None

    def __post_init__(self) -> None:
        self.has_engine = False
        self._position: Callable[[], object] = lambda: "no module yet"
        # The waits under way, by thread.
        self._waits: dict[int, _Wait] = {}
        # When the main thread started something the last time.
        self._moved = time.monotonic()
        self._is_past: Callable[[], bool] | None = None
        # Of the main thread: where it is in torch's barrier, the wait that the other ranks were
        # told, and when and how often.
        self._barrier: tuple[object, _Wait] | None = None
        self._told: _Wait | None = None
        self._told_at, self._repeats = 0.0, 0
        # On rank 0: the waits of all ranks when they were first read, and whether they were said.
        self._read: list = []
        self._has_said = False
        self._stopped = threading.Event()
        self._main = threading.get_ident()
        if self.world_size > 1:
            # A connection of its own: the main thread may be waiting on the other one.
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()
            self._watcher = threading.Thread(target=self._watch, name="zero-watchdog", daemon=True)
            self._listener = threading.Thread(
                target=self._listen, name="zero-watchdog-listener", daemon=True
            )
            self._watcher.start()
            self._listener.start()

    def stop(self) -> None:
        """End the threads.

        They must end before the interpreter does: one would abort inside the store's C++ code.
        """
        self._stopped.set()
        if self.world_size > 1 and self._watcher.is_alive():  # in a fork it is not
            self._watcher.join()
            self._listener.join(timeout=GRACE)
            if self._listener.is_alive():
                return  # the store does not answer
            try:
                self._store.set(self._ended_key(self.rank), "")
            except dist.DistError:
                return  # the store is gone: the job is at its end

    @property
    def position(self) -> object:
        """Where the main thread was last: an object with a useful `str()`, held by a weak
        reference.
        """
        return self._position() or "a module that is gone"

    def set_position(self, where: object) -> None:
        """The main thread is at `where` now."""
        self._position = weakref.ref(where)
        self._moved = time.monotonic()

    def wait(self, wait: Callable[[], T], what: object, at_least: float = 0.0) -> T:
        """Call `wait()`, which blocks until other ranks have done their part in `what`.

        After `timeout` seconds, or `at_least` if that is more, the job ends."""
        thread = threading.get_ident()
        around, self._moved = self._waits.get(thread), time.monotonic()
        limit = max(self.timeout, at_least)
        self._waits[thread] = _Wait(self._moved, what or _BETWEEN_GROUPS, limit)
        try:
            return wait()
        except RuntimeError as error:
            if any(sign in str(error) for sign in _LOST):
                raise RuntimeError(self._explain_lost(what)) from error
            raise
        finally:
            if around is None:
                del self._waits[thread]
            else:
                self._waits[thread] = around
            self._moved = time.monotonic()

    def _explain_lost(self, what: object) -> str:
        time.sleep(1.0)  # a rank that ends normally says so at its very end
        ended = [str(rank) for rank in range(self.world_size) if self._has_ended(rank)]
        who = (
            f"rank {', '.join(ended)} has ended its work"
            if ended
            else "another rank has died; its own error says why"
        )
        return (
            f"rank {self.rank} lost the connection while it waited at {what or _BETWEEN_GROUPS}: "
            f"{who}. If no rank has an error of its own: "
            f"{_ALIKE if self.has_engine else _LOADS_ALIKE}"
        )

    def _has_ended(self, rank: int) -> bool:
        try:
            return self._store.check([self._ended_key(rank)])
        except dist.DistError:
            return False  # the rank that kept the store is gone

    def _watch(self) -> None:
        """Never asks the store itself, which may be on a machine that does not answer."""
        while not self._is_stopped():
            is_blocked = any(each.seconds > each.limit for each in list(self._waits.values()))
            if is_blocked or self._device_is_blocked():
                EngineThread(self._alarm, name="zero-watchdog-alarm").start()
                if self._stopped.wait(3 * GRACE):  # the alarm ends this process before
                    return
                _say(
                    f"zero: [rank {self.rank}] ranks wait for each other, and the machine of rank "
                    "0 does not answer: it is gone, or a link is down. This rank "
                    f"{self._status()}. It ends."
                )
                os._exit(1)

    def _listen(self) -> None:
        try:
            while not self._is_stopped():
                if self._store.check([_ALARM]):
                    self._answer(first=False)
                self._compare_waits()
        except dist.DistError:
            return  # The store is gone. If this is not the end of the job, a wait will be too long.

    def _compare_waits(self) -> None:
        """If all ranks have waited for long, and not at one place, say once where. It is not yet
        certain that they wait for each other, so the job ends only if they say so again and again.
        """
        wait = self._waits.get(self._main) or self._wait_in_barrier()
        period = min(APART, self.timeout / 2)
        keys = [f"zero_watchdog/wait{rank}" for rank in range(self.world_size)]
        if wait is None or wait.seconds < period:
            if self._told is not None:
                self._told = None
                self._store.set(keys[self.rank], "null")
            return
        if wait is not self._told or time.monotonic() - self._told_at > period:
            # One more, however long that took: this process may have been stopped.
            self._repeats = self._repeats + 1 if wait is self._told else 0
            self._told, self._told_at = wait, time.monotonic()
            told = str(wait.what), wait.since, self._repeats
            self._store.set(keys[self.rank], json.dumps(told))
        if self.rank == 0 and self._store.check(keys):
            self._judge([json.loads(self._store.get(key)) for key in keys], REPEATS * period)

    def _judge(self, waits: list, limit: float) -> None:
        """Act on what each rank waits for: (place, since, repeats), or None."""
        if not all(waits) or len({place for place, *_ in waits}) == 1:
            return
        if [each[:2] for each in waits] != [each[:2] for each in self._read]:
            self._read = waits
        if not self._has_said:
            self._has_said = True
            lines = "\n".join(f"  rank {rank} at {each[0]}" for rank, each in enumerate(waits))
            text = f"zero: all ranks wait, at different places:\n{lines}\n{_DIFFERENT} {ADVICE}"
            _say(f"{text}\nIf nothing moves, the job ends in {min(limit, self.timeout):g} s.")
        if all(new[2] - old[2] >= REPEATS for new, old in zip(waits, self._read, strict=True)):
            self._alarm(f"at different places, and nothing has moved for {limit:g} s")

    def _wait_in_barrier(self) -> _Wait | None:
        """The main thread's wait in a barrier of the script."""
        frame = sys._current_frames().get(self._main)
        if frame is None or frame.f_code is not _BARRIER:
            self._barrier = None
        elif self._barrier is None or self._barrier[0] is not frame:
            self._barrier = frame, _Wait(time.monotonic(), "torch.distributed.barrier", 0.0)
        return self._barrier and self._barrier[1]

    def _alarm(self, reason: str = "") -> None:
        try:
            self._answer(self._store.add(_ALARM, 1) == 1, reason)
        except dist.DistError:
            return  # the store is gone

    def _is_stopped(self) -> bool:
        return self._stopped.wait(min(1.0, self.timeout / 10))

    def _device_is_blocked(self) -> bool:
        """Whether for `timeout` seconds the main thread has started nothing, and the device has not
        done the rest.
        """
        idle = time.monotonic() - self._moved
        if self.mark is None or self._main in self._waits or idle < self.timeout / 2:
            self._is_past = None
            return False
        if self._is_past is None:
            self._is_past = self.mark()
        return not self._is_past() and idle > self.timeout

    def _status(self) -> str:
        waits = list(self._waits.values())
        late = [each for each in waits if each.seconds > each.limit]
        if waits:
            waiting = (late or waits)[0]
            return f"has waited {waiting.seconds:.0f} s for the other ranks at {waiting.what}"
        here = traceback.extract_stack(sys._current_frames()[self._main])[-1]
        device = ""
        if self._is_past is not None and not self._is_past():
            seconds = time.monotonic() - self._moved
            device = f"; its device has not finished for {seconds:.0f} s"
        return (
            f"is at {here.filename}:{here.lineno} in {here.name}; last in the model: "
            f"{self.position}{device}"
        )

    def _answer(self, first: bool, reason: str = "") -> None:
        """Say where this rank is, and end it. The first one to notice prints what all say."""
        keys = [f"zero_watchdog/rank{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], self._status())
        if not first:
            time.sleep(2 * GRACE)
            os._exit(1)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and not self._store.check(keys):
            time.sleep(0.1)
        answers = [
            self._store.get(key).decode() if self._store.check([key]) else _SILENT for key in keys
        ]
        no_progress = (
            f"no progress for {self.timeout:g} s (`watchdog_timeout` in the configuration)"
        )
        _say(
            f"zero: ranks wait for each other: {reason or no_progress}.\n"
            + "\n".join(f"  rank {rank} {answer}" for rank, answer in enumerate(answers))
            + f"\n{GONE if _SILENT in answers else ADVICE}"
        )
        os._exit(1)

    @staticmethod
    def _ended_key(rank: int) -> str:
        return f"zero_watchdog/ended{rank}"


@contextmanager
def tells_if_alone(rank: int, what: str, seconds: float) -> Iterator[None]:
    """Context of what every rank must do: a rank that waits for others for `seconds` says so."""
    text = "%s: rank %d has been waiting for the other ranks: every rank must call this"
    notice = threading.Timer(seconds, logger.warning, (text, what, rank))
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
        notice.join()


@contextmanager
def names_lone_setup(rank: int) -> Iterator[None]:
    """Context in which the ranks meet for the first time. Raises RuntimeError if others stay away,
    as they do if a script loads its model on rank 0 alone.
    """
    try:
        with tells_if_alone(rank, "connecting the ranks, for a model or an engine", LONE):
            yield
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"rank {rank} has waited in vain for the other ranks: {_LOADS_ALIKE}"
        ) from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def end_with_launcher() -> None:
    """End this process when the torchrun that started it is killed.

    Otherwise it would continue to train.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        stop, name = threading.Event(), "zero-launcher"
        EngineThread(_watch_launcher, os.getppid(), stop, name=name, end=stop.set).start()


def _watch_launcher(launcher: int, stop: threading.Event) -> None:
    while os.getppid() == launcher:
        if stop.wait(1.0):
            return
    rank = os.environ.get("RANK", "0")
    _say(f"zero: [rank {rank}] the launcher (process {launcher}) is gone: this rank ends")
    os._exit(1)
