"""Checkpoints written while training goes on (`"checkpoint": {"async_save": true}`).

save_checkpoint   waits for the save before -> copies this rank's slices to host memory -> starts a thread
thread            writes, verifies and renames as a save in the foreground does; talks to other ranks' threads only
                  through the store, never through a process group
step              asks, as long as a save is running, whether it has ended on all ranks; if it failed, all raise
exit              waits for the thread; the exit code is 1 if the save failed and nobody has been told
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from zero.checkpoint.ranks import Ranks
from zero.checkpoint.slices import Slices

if TYPE_CHECKING:
    from zero.engine import ZeroEngine

logger = logging.getLogger("zero")

# Where another rank has died, a thread waits for it in vain.
_SECONDS_AFTER_AN_EXCEPTION = 60.0


class BackgroundSaves:
    """The saves of one engine, at most one at a time, and the host memory that they are made from."""

    _of: WeakKeyDictionary[ZeroEngine, BackgroundSaves] = WeakKeyDictionary()

    def __init__(self, ranks: Ranks, device: torch.device):
        self._ranks, self._pin = ranks, device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._running: _Save | None = None

    @classmethod
    def all(cls) -> list[BackgroundSaves]:
        """Those of all engines of this process."""
        return list(cls._of.values())

    @classmethod
    def of(cls, engine: ZeroEngine) -> BackgroundSaves:
        if engine not in cls._of:
            cls._of[engine] = cls(Ranks.of(engine.comm), engine.comm.device)
        return cls._of[engine]

    def start(self, slices: dict[str, Slices], act: Callable[[dict[str, Slices]], None]) -> None:
        """Call `act` in a thread with copies of `slices` in host memory, which is kept for the next save."""
        nbytes = sum(_aligned(part.nbytes) for entry in slices.values() for part in entry.parts.values())
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin)
        position, later, copies = 0, [], {key: Slices(entry.numel) for key, entry in slices.items()}
        for key, entry in slices.items():
            for start, part in entry.parts.items():
                target = self._memory[position : position + part.nbytes].view(part.dtype)
                position += _aligned(part.nbytes)
                copies[key].parts[start] = target
                if key.startswith("optimizer/"):
                    later.append((target, part))
                else:
                    target.copy_(part)
        self._running = _Save(later, lambda: act(copies))

    def wait(self) -> None:
        """Until the running save, if there is one, has ended; raises its error, which is the same on all ranks.

        Every rank must wait at the same time: so each notices if another one has died.
        """
        while self._running is not None:
            self._running.join(0.01)
            self.check()

    def check(self) -> None:
        """Raise the error of a save that has failed; every rank must ask at the same time."""
        if self._running is None:
            return
        self._running.copied.wait()
        if not self._ranks.any(self._running.is_alive()):
            ended, self._running = self._running, None
            ended.result()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class _Save:
    """A thread that makes the copies which are left to make, and then writes a checkpoint."""

    def __init__(self, copies: list[tuple[torch.Tensor, torch.Tensor]], act: Callable[[], None]):
        self.copied, self._failure = threading.Event(), None
        self._thread = threading.Thread(target=self._run, args=(copies, act), name="zero checkpoint", daemon=True)
        atexit.register(self._at_exit)
        self._thread.start()

    def _run(self, copies: list[tuple[torch.Tensor, torch.Tensor]], act: Callable[[], None]) -> None:
        try:
            for target, values in copies:
                target.copy_(values)
            copies.clear()
            self.copied.set()
            act()
        except Exception as error:
            self._failure = error
        finally:
            self.copied.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> None:
        atexit.unregister(self._at_exit)
        if self._failure is not None:
            raise self._failure

    def _at_exit(self) -> None:
        self._thread.join(_SECONDS_AFTER_AN_EXCEPTION if hasattr(sys, "last_value") else None)
        if self._failure is not None:
            logger.error("%s", self._failure)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
