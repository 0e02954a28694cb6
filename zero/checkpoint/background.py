"""Writes checkpoints while training continues (`"checkpoint": {"async_save": true}`).

save_checkpoint   waits for the previous save -> copies this rank's slices to host memory -> starts
                  a thread
thread            writes, verifies and renames like a save in the foreground, over its own
                  connections
step              checks whether a running save has ended on all ranks; if it failed, all ranks
                  raise its error
exit              waits for the thread; the exit code is 1 if the save failed and no call has
                  raised its error
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from zero.checkpoint.files import Slice
from zero.comm.communicator import Communicator
from zero.core.layout import round_up
from zero.device import beside, is_accelerator, ready_for_thread
from zero.offload.tiers import Tier
from zero.optim.adam8bit import CodedSlice
from zero.optim.sharded_optimizer import ZeroOptimizer
from zero.threads import EngineThread

logger = logging.getLogger("zero")

# Of the running saves, in the order in which they have begun, which is the same on all ranks.
_running: list[BackgroundSaves] = []


class BackgroundSaves:
    """The saves of one engine, at most one at a time, and the host memory for their copies.

    Attributes:
        channel: over which ranks agree in the thread.
    """

    def __init__(self, comm: Communicator, optimizer: ZeroOptimizer | None):
        self._comm = comm
        self.channel = comm.new_channel("asynchronous saves")
        self._ended = comm.control("waiting for a checkpoint", is_long=True)
        self._device = comm.device
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copies: list[Slice] = []
        self._later: list[tuple[torch.Tensor, torch.Tensor | CodedSlice]] = []
        self._thread: EngineThread | None = None
        self._copied = threading.Event() if optimizer is None else optimizer.read_by_saves
        self._failure: Exception | None = None

    def copy(self, slices: Sequence[Slice]) -> None:
        """Copy `slices` to host memory, which is kept for the next save.

        The thread copies the optimizer's state later. Until then, `ZeroOptimizer.wait` blocks
        anything that would change it."""
        nbytes = sum(round_up(each.values.nbytes, 64) for each in slices)
        if self._memory.numel() < nbytes:
            # Free the old memory before allocating the new one.
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            host = Tier(torch.device("cpu"), pinned=is_accelerator(self._device))
            self._memory = host.empty(nbytes, torch.uint8)
        position = 0
        self._copies.clear()
        self._later.clear()
        for each in slices:
            memory = self._memory[position : position + each.values.nbytes]
            position += round_up(memory.nbytes, 64)
            target = memory.view(each.values.dtype)
            self._copies.append(each._replace(values=target))
            if isinstance(each.values, CodedSlice) or each.key.startswith("optimizer/"):
                self._later.append((target, each.values))
            else:
                target.copy_(each.values, non_blocking=True)

    def start(self, act: Callable[[Callable[[], list[Slice]]], None]) -> None:
        """Call `act` in a thread, with a function that completes the copies and returns them.

        If that fails, `act` must tell the other ranks, which wait for this one."""
        self._copied.clear()
        thread = EngineThread(
            self._run,
            act,
            ready_for_thread(self._device),
            name="zero checkpoint",
            # A process of `multiprocessing` calls no exit handlers.
            daemon=multiprocessing.parent_process() is None,
        )
        try:
            thread.start()
        except BaseException:
            self._copied.set()  # nothing else would, and the next update waits for it
            raise
        self._thread = thread
        atexit.register(self._at_exit)
        _running.append(self)

    def _run(
        self, act: Callable[[Callable[[], list[Slice]]], None], ready: torch.Event | None
    ) -> None:
        try:
            act(partial(self._complete, ready))
        except Exception as error:  # `check` raises it in the main thread
            self._failure = error
        finally:
            self._copied.set()

    def _complete(self, ready: torch.Event | None) -> list[Slice]:
        # On a separate stream, so that the copies overlap with the kernels of training.
        with beside(self._device, ready) as stream:
            for target, part in self._later:
                values = part.values() if isinstance(part, CodedSlice) else part
                target.copy_(values, non_blocking=True)
            if stream is not None:
                stream.synchronize()
        self._later.clear()
        self._copied.set()
        return self._copies

    def wait(self) -> None:
        """Wait for the running save, if there is one, and raise its error, which is the same on all
        ranks.

        Every rank must wait at the same time, so that each notices if another one has died.
        """
        while self._thread is not None:
            self._thread.join(0.01)
            self.check()

    def check(self) -> None:
        """Raise the error of a save that has failed; every rank must ask at the same time."""
        if self._thread is None:
            return
        if self._ended.any(self._thread.is_alive()):
            return
        _running.remove(self)
        atexit.unregister(self._at_exit)
        failure, self._thread, self._failure = self._failure, None, None
        if failure is not None:
            raise failure

    def _at_exit(self) -> None:
        if self._thread is not None:
            self._thread.finish()
        if self._failure is not None:
            logger.error("%s", self._failure)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def wait_for_background_saves() -> None:
    """Wait until all asynchronous saves of this process are complete.

    If one of them has failed, raises its error, the same on all ranks.
    """
    for saves in list(_running):
        saves.wait()
