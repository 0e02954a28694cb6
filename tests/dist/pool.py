"""Worker processes that outlive a test: they are started once and serve every test of `dist/` and `parity/`.

Importing torch and transformers takes longer than most of the tests. Each call gets a process group of its own, of the
size it asks for, so one test's messages never reach another one. After a failure or a timeout all processes are killed,
and the next call starts fresh ones.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.launch import THREADS
from zero import comm

SIZE = 4
# Forked from a server that has imported everything, a process starts in a fraction of a second.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.dist.training", "tests.parity.models"])


class _Pool:
    """`SIZE` idle processes and the store through which their groups are formed."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.connections, self.processes = [], []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            # Daemons: they end with this process. If it is killed they end too, at the end of their pipe.
            process = context.Process(target=_serve, args=(rank, self.store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        self.calls = 0

    def close(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.kill()
            process.join()
            connection.close()


_pool: _Pool | None = None


def run_on(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `fn(rank, world_size, *args)` in `world_size` processes of a gloo group; the results in order of rank.

    `fn` is a function at the top level of a module. Raises `RuntimeError` with the first failing rank's traceback, or
    `TimeoutError` naming the ranks not done after `timeout` seconds.
    """
    global _pool
    if _pool is None:
        _pool = _Pool()
    pool = _pool
    pool.calls += 1
    task = pickle.dumps((fn, args))
    try:
        for connection in pool.connections[:world_size]:
            connection.send((pool.calls, world_size, timeout, task))
        return _collect(pool, world_size, timeout)
    except BaseException:
        pool.close()
        _pool = None
        raise


def _collect(pool: _Pool, world_size: int, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < world_size:
        waiting = {pool.connections[rank]: rank for rank in range(world_size) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} not finished after {timeout:g} s")
        for connection in ready:
            rank = waiting[connection]
            try:
                succeeded, payload = pickle.loads(connection.recv_bytes())
            except EOFError:
                pool.processes[rank].join()
                raise RuntimeError(f"rank {rank} died, exit code {pool.processes[rank].exitcode}") from None
            if not succeeded:
                raise RuntimeError(f"rank {rank} of {world_size} failed:\n{payload}")
            results[rank] = payload
    return [results[rank] for rank in range(world_size)]


def _serve(rank: int, port: int, connection: multiprocessing.connection.Connection) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(OMP_NUM_THREADS=THREADS, HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true")
    torch.set_num_threads(int(THREADS))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            number, world_size, timeout, task = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(max(1.0, timeout - 2.0))
        try:
            result = _call(rank, world_size, dist.PrefixStore(str(number), store), timeout, task)
            encoded = pickle.dumps((True, result))
        except BaseException:
            encoded = pickle.dumps((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(encoded)


def _call(rank: int, world_size: int, store: dist.Store, timeout: float, task: bytes) -> Any:
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), DEEPSPEED_TIMEOUT="2")
    try:
        fn, args = pickle.loads(task)
        torch.manual_seed(0)
        result = fn(rank, world_size, *args)
        dist.barrier()  # a rank that leaves early would break the connections of those still at work
        return result
    finally:
        # A later group may get the former one's id(), by which communicators are found.
        comm._communicators.clear()
        dist.destroy_process_group()
        gc.collect()
