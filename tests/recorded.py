"""The user's command under `zero verify` and `zero trace`, forked from a server of
`tests.processes`: an interpreter that starts takes five seconds for its imports, and `zero verify`
starts three. In a test:

    monkeypatch.setattr(command, "run", recorded.run)

What the commands themselves start is tested once for each."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

from tests.processes import fork_ranks
from zero.errors import UsageError
from zero.tools.profile.running import FOLDER, LOG, STEPS, what_went_wrong


def run(
    command: list[str],
    recorder: str,
    folder: Path,
    steps: int,
    what: str,
    nproc: int = 0,
    imported: str = "zero",
) -> None:
    """As `zero.tools.profile.running.run`, of a script. `nproc` and `imported`: as of
    `fork_ranks`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    variables = {FOLDER: str(folder), STEPS: str(steps)}
    words = ("-m", __name__, recorder, *command)
    done = fork_ranks(*words, nproc=nproc, timeout=120, imported=imported, env=variables)
    (folder / LOG).write_text(done.stdout + done.stderr)
    if done.returncode:
        raise UsageError(f"{what} failed with code {done.returncode}:\n{what_went_wrong(folder)}")


if __name__ == "__main__":
    _, recorder, *sys.argv = sys.argv
    importlib.import_module(recorder).set_up()
    runpy.run_path(sys.argv[0], run_name="__main__")
