"""Start processes for tests: always with a time limit, never leaving a child behind.

Three ways, from the outside in: `run` (any command), `torchrun` (a script under torch's launcher) and `run_workers`
(a function of a test module in N gloo processes, results handed back). None of them uses a port chosen in advance,
so any number of them may run at once.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).resolve().parent.parent

# A launcher's variables in the shell that runs the tests must not reach what the tests start.
_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED",
)  # fmt: skip


def test_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment for a child: this repository importable, one thread, no network, no launcher's variables."""
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    env["OMP_NUM_THREADS"] = "1"
    env["HF_HUB_OFFLINE"] = "1"
    env["HF_DATASETS_OFFLINE"] = "1"
    return env | (extra or {})


test_environment.__test__ = False  # the name starts with "test", and pytest would take an import of it for a test


def run(
    cmd: Sequence[str | os.PathLike[str]],
    *,
    timeout: float,
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command and return it with its exit code, stdout and stderr; the exit code is not checked.

    `timeout` is in seconds; `env` is laid over `test_environment()`. Raises `TimeoutError` with the output so far
    when the time is up, after the command and all its descendants have been killed.
    """
    command = [os.fspath(part) for part in cmd]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=test_environment(env),
        cwd=cwd,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill_tree(process.pid)
        stdout, stderr = process.communicate()
        raise TimeoutError(
            f"not finished after {timeout:g} s: {' '.join(command)}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
        ) from None
    except BaseException:
        _kill_tree(process.pid)
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def torchrun(
    script: str | os.PathLike[str],
    *args: str | os.PathLike[str],
    nproc: int,
    timeout: float,
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc_per_node nproc script args...` on this machine; see `run` for the rest.

    For a module, `script` is "-m" and the module's name comes first in `args`.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
    return run([*launcher, script, *args], timeout=timeout, env=env, cwd=cwd)


def run_workers(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call `fn(rank, world_size, *args)` in `world_size` fresh processes that share a gloo group.

    `fn` is a function at the top level of a module; `args` and the results are pickled. The processes see the
    environment of a torchrun job (`RANK`, `WORLD_SIZE`, `MASTER_PORT`, ...), and the default group exists already.

    Returns the results in the order of the ranks. Raises `RuntimeError` with the first failing rank's traceback, or
    `TimeoutError` naming the ranks not done after `timeout` seconds; either way no process is left.
    """
    context = multiprocessing.get_context("spawn")
    # The store lives here and takes any free port, so there is no moment when another job could take that port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    rank_of: dict[multiprocessing.connection.Connection, int] = {}
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_worker, args=(fn, rank, world_size, args, store.port, sender, timeout))
            process.start()
            sender.close()
            processes.append(process)
            rank_of[receiver] = rank
        return _collect(rank_of, processes, timeout)
    finally:
        for process in processes:
            if process.is_alive() and process.pid is not None:
                _kill_tree(process.pid)
            process.join()
        for receiver in rank_of:
            receiver.close()


def _collect(
    rank_of: dict[multiprocessing.connection.Connection, int],
    processes: Sequence[multiprocessing.process.BaseProcess],
    timeout: float,
) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(rank_of):
        waiting = [connection for connection, rank in rank_of.items() if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {[rank_of[c] for c in waiting]} not finished after {timeout:g} s")
        for connection in ready:
            rank = rank_of[connection]
            try:
                succeeded, payload = pickle.loads(connection.recv_bytes())
            except EOFError:
                processes[rank].join()
                raise RuntimeError(f"rank {rank} died, exit code {processes[rank].exitcode}") from None
            if not succeeded:
                raise RuntimeError(f"rank {rank} failed:\n{payload}")
            results[rank] = payload
    return [results[rank] for rank in range(len(rank_of))]


def _worker(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    port: int,
    sender: multiprocessing.connection.Connection,
    timeout: float,
) -> None:
    # Just before the parent gives up, show where this rank is stuck.
    faulthandler.dump_traceback_later(max(1.0, timeout - 2.0))
    for name in _LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        message = (True, fn(rank, world_size, *args))
        encoded = pickle.dumps(message)
        dist.barrier()  # a rank that leaves early would break the connections of those still at work
    except BaseException:
        encoded = pickle.dumps((False, traceback.format_exc()))
    # Plain bytes: torch would otherwise pass tensors by a file descriptor that ends with this process.
    sender.send_bytes(encoded)
    sender.close()
    faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized():
        dist.destroy_process_group()


def _kill_tree(pid: int) -> None:
    """Kill a process and its descendants, those in sessions of their own (torchrun's workers) included."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue  # ended by itself between the listing and now
