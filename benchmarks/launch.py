"""Starts one benchmark worker on N processes in a chosen Python environment and collects what each rank reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
REPORT_FOLDER = "BENCHMARK_REPORT_FOLDER"


def report(result: dict[str, Any]) -> None:
    """Called by a worker, once: hands this rank's result to the process that called `run_ranks`."""
    path = Path(os.environ[REPORT_FOLDER]) / f"{int(os.environ['RANK']):04d}.json"
    path.write_text(json.dumps(result))


def run_ranks(
    python: str, command: Sequence[str], nproc: int, timeout: float, env: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run `torchrun --nproc_per_node nproc command...` by the interpreter `python`, from the repository's root.

    Returns what each rank gave to `report`, in the order of the ranks. Every process has one compute thread. Raises
    RuntimeError with the end of the job's output when it fails, does not report, or takes more than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {}), REPORT_FOLDER: folder}
        launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
        output = _run([*launcher, *command], timeout, variables)
        reports = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if len(reports) != nproc:
        raise RuntimeError(f"{len(reports)} of {nproc} ranks reported: {' '.join(command)}\n{output[-4000:]}")
    return reports


def _run(command: list[str], timeout: float, env: dict[str, str]) -> str:
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # SIGTERM lets torchrun end the workers, which have process groups of their own.
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
        raise RuntimeError(f"not finished after {timeout:g} s: {' '.join(command)}\n{output[-4000:]}") from None
    if process.returncode != 0:
        raise RuntimeError(f"exit code {process.returncode}: {' '.join(command)}\n{output[-4000:]}")
    return output
