"""Starts a benchmark worker on N processes of a chosen Python environment, and collects the ranks'
reports.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
REPORT_FOLDER = "BENCHMARK_REPORT_FOLDER"


def report(result: dict[str, Any]) -> None:
    """Send this rank's result to the process that called `run_ranks`. A worker calls this once."""
    path = Path(os.environ[REPORT_FOLDER]) / f"{int(os.environ['RANK']):04d}.json"
    path.write_text(json.dumps(result))


def run_ranks(
    python: str,
    command: Sequence[str],
    nproc: int,
    timeout: float,
    env: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run a job whose worker calls `report`. Return the reports in the order of ranks.

    Raises RuntimeError as `run_job` does, and if a rank did not report.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = run_job(python, command, nproc, timeout, {**(env or {}), REPORT_FOLDER: folder})
        reports = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if len(reports) != nproc:
        raise RuntimeError(
            f"{len(reports)} of {nproc} ranks reported: {' '.join(command)}\n{output[-4000:]}"
        )
    return reports


def run_job(
    python: str,
    command: Sequence[str],
    nproc: int,
    timeout: float,
    env: dict[str, str] | None = None,
) -> str:
    """Run `python command...` in `nproc` processes, as torchrun would, in the repository's root.

    torchrun itself would take three seconds more for each job. Every process has one compute thread
    and no network. Returns the job's output. Raises RuntimeError with the end of the output if a
    process fails, or if the job takes more than `timeout` seconds. Then all are ended."""
    print(
        f"on {nproc} processes: {' '.join(command)}", file=sys.stderr, flush=True
    )  # the only line for minutes
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(nproc),
    }
    variables |= {"LOCAL_WORLD_SIZE": str(nproc), **(env or {})}
    with tempfile.TemporaryFile("w+") as log:
        settings: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": log,
            "stderr": log,
            "cwd": REPOSITORY,
        }
        processes = [
            subprocess.Popen(
                [python, *command], env=variables | {"RANK": rank, "LOCAL_RANK": rank}, **settings
            )
            for rank in map(str, range(nproc))
        ]
        try:
            code = _wait(processes, timeout)
        finally:
            _end(processes)
        log.seek(0)
        output = log.read()
    if code is None:
        raise RuntimeError(
            f"not finished after {timeout:g} s: {' '.join(command)}\n{output[-4000:]}"
        )
    if code:
        raise RuntimeError(f"exit code {code}: {' '.join(command)}\n{output[-4000:]}")
    return output


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(processes: Sequence[subprocess.Popen], timeout: float) -> int | None:
    """The first exit code that is not 0, or 0 when all have ended; None after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return next(filter(None, codes), 0)
        time.sleep(0.05)
    return None


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """End those that still run: by SIGTERM, which lets them end their own children, then by
    SIGKILL.
    """
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + 10
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
