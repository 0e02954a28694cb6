"""Starts a benchmark worker on N processes of a chosen Python environment, and collects the ranks' reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
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
    python: str, command: Sequence[str], nproc: int, timeout: float, env: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run a job whose worker calls `report`. Return the reports in the order of ranks.

    Raises RuntimeError as `run_job` does, and if a rank did not report.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = run_job(python, command, nproc, timeout, {**(env or {}), REPORT_FOLDER: folder})
        reports = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if len(reports) != nproc:
        raise RuntimeError(f"{len(reports)} of {nproc} ranks reported: {' '.join(command)}\n{output[-4000:]}")
    return reports


def run_job(python: str, command: Sequence[str], nproc: int, timeout: float, env: dict[str, str] | None = None) -> str:
    """Run `torchrun --nproc_per_node nproc command...` with the interpreter `python`, in the repository's root.

    Every process has one compute thread and no network. Returns the job's output. Raises RuntimeError with the end of
    the output if the job fails or takes more than `timeout` seconds.
    """
    print(f"on {nproc} processes: {' '.join(command)}", file=sys.stderr, flush=True)  # the only line for minutes
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})}
    process = subprocess.Popen(
        [*launcher, *command],
        cwd=REPOSITORY,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # SIGTERM, so that torchrun ends its workers.
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
        raise RuntimeError(f"not finished after {timeout:g} s: {' '.join(command)}\n{output[-4000:]}") from None
    if process.returncode != 0:
        raise RuntimeError(f"exit code {process.returncode}: {' '.join(command)}\n{output[-4000:]}")
    return output
