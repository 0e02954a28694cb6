"""The command `zero trace`: starts the user's command for a few steps, and writes a trace."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from pathlib import Path

from zero.errors import UsageError
from zero.tools.arguments import Parser, check_command
from zero.tools.profile.running import SNAPSHOT, run, what_went_wrong

MEMORY_VIZ = "https://pytorch.org/memory_viz"


def trace(arguments: list[str]) -> int:
    """Run `zero trace ARGUMENTS`. Returns the exit code."""
    from zero.tools.profile.trace import merge  # it imports torch's profiler

    parser = Parser("trace")
    options = parser.parse(arguments)
    if options.out.suffix not in (".json", ".gz"):
        parser.error(f"--out {options.out}: its name must end in .json or .gz")
    check_command("trace", options.command)
    name = "trace: the run"
    with tempfile.TemporaryDirectory(prefix="zero-trace-") as temporary:
        folder = Path(temporary)
        run(options.command, "zero.tools.profile.trace", folder, options.step, name)
        files = sorted(folder.glob("rank*.json"))
        if not files:
            raise UsageError(
                f"{name} took fewer than {options.step} optimizer steps with deepspeed.initialize "
                "or the Trainer before it ended or saved: choose an earlier one with --step. Its "
                f"last lines:\n{what_went_wrong(folder)}"
            )
        content = json.dumps(merge(files)).encode()
        written = {options.out: "open it in https://ui.perfetto.dev"}
        if (snapshot := files[0].with_suffix(SNAPSHOT)).exists():
            copy = Path(shutil.copy(snapshot, options.out.with_suffix(SNAPSHOT)))
            written[copy] = f"allocations of {files[0].stem}; open it in {MEMORY_VIZ}"
    options.out.write_bytes(gzip.compress(content) if options.out.suffix == ".gz" else content)
    print("\n".join(f"{file}: {text}" for file, text in written.items()))
    return 0
