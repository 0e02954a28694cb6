"""Start processes for tests: always with a time limit, never leaving a child behind.

`run` takes any command, `torchrun` a script for torch's launcher. Neither uses a port chosen in advance, so any number
of them may run at once. `tests/warm.py` runs scripts without a launch, `tests/dist/pool.py` functions of test modules.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent

# Of each process of a test; `tests/every_cpu.py` asks for other numbers.
THREADS = os.environ.get("ZERO_TEST_THREADS", "1")

# A launcher's variables in the shell that runs the tests must not reach what the tests start.
_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED",
)  # fmt: skip


def test_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """A child's environment: this repository importable, `THREADS` threads, no network, no launcher's variables."""
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    env["OMP_NUM_THREADS"] = THREADS
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
        kill_tree(process.pid)
        stdout, stderr = process.communicate()
        raise TimeoutError(
            f"not finished after {timeout:g} s: {' '.join(command)}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
        ) from None
    except BaseException:
        kill_tree(process.pid)
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


def kill_tree(pid: int) -> None:
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
