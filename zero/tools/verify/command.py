"""The command `zero verify`: starts the user's command three times, shows progress, and prints what
was found.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from zero.errors import UsageError
from zero.tools.arguments import Parser, check_command, judged, working
from zero.tools.profile.running import run, what_went_wrong
from zero.tools.verify.compare import Result, compare, steps_in

# The names of the folders, which tell `zero.tools.verify.record` what to run.
ENGINE, PLAIN, DISTURBED = "engine", "plain", "disturbed"
MODES = {
    ENGINE: "on the engine",
    PLAIN: "on plain torch",
    DISTURBED: "on plain torch with disturbed weights",
}


def verify(arguments: list[str]) -> int:
    """Run `zero verify ARGUMENTS`.

    Returns the exit code: 0 if everything is equal, 1 if something differs.
    """
    options = Parser("verify").parse(arguments)
    check_command("verify", options.command)
    with tempfile.TemporaryDirectory(prefix="zero-verify-") as temporary:
        folders = [Path(temporary, mode) for mode in MODES]
        for folder in folders:
            _record(folder, options.steps, options.command)
        with working() as show:
            show("verify: comparing")
            result = compare(*folders)
            steps = steps_in(*folders)
    print(as_text(result))
    if steps < options.steps and result.difference is None:
        print(f"verify: --steps {options.steps}: the script took only {steps}", file=sys.stderr)
    return int(result.difference is not None)


def _record(folder: Path, steps: int, command: list[str]) -> None:
    """Run the command to its last recorded step, in the mode that the folder is named after."""
    name = f"verify: the run {MODES[folder.name]}"
    run(command, "zero.tools.verify.record", folder, steps, name)
    if not steps_in(folder):
        raise UsageError(
            f"{name} took no optimizer step with deepspeed.initialize or the Trainer:\n"
            f"{what_went_wrong(folder)}"
        )


def as_text(result: Result) -> str:
    """The verdict, and below it a table of what was compared."""
    steps = result.rows[-1].step if result.rows else 0
    lines = [judged(f"Equal within rounding for {steps} step(s).", True)]
    if result.difference is not None:
        lines = [judged(f"DIFFERENT, {result.difference}", False)]
    if result.skipped:
        skipped = f"Both runs skipped {result.skipped} step(s)"
        lines.append(f"{skipped}, because gradients were not finite.")
    columns = f"{'step':>4}  {'compared':<10}{'tensors':>8}{'noise':>7}{'largest difference':>20}"
    lines += ["", f"{columns}  in"]
    for row in result.rows:
        worst = row.worst
        largest = f"{worst.relative:.1e}" if worst.relative else "0"
        tensors, noise = len(row.tensors), row.noise or 0
        counts = f"{row.step:>4}  {row.kind:<10}{tensors:>8}{noise:>7}"
        lines.append(f"{counts}{largest:>20}  {worst.name}")
    return "\n".join(lines)
