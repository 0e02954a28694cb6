"""The command `zero verify`: starts the user's command three times, shows progress, and prints what
was found.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path

from zero.errors import UsageError
from zero.tools.arguments import Parser, Working, check_command, count
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
    parser = Parser(
        "verify",
        "Run the first steps of a script on the engine and on plain torch, and compare losses, "
        "gradients, settings, optimizer states and updated parameters. A third run measures "
        "rounding. In the runs on plain torch, each process holds the whole model.",
        "--steps 3 torchrun --nproc_per_node 2 train.py --deepspeed ds_config.json",
        json="the result",
    )
    parser.add_argument(
        "--steps", type=count, default=3, help="number of optimizer steps to compare (3)"
    )
    kept = "keep the recordings in this folder; with Adam, 48 bytes per parameter and step"
    parser.add_argument("--folder", type=Path, help=kept)
    parser.add_command()
    options = parser.parse(arguments)
    check_command("verify", options.command)
    if options.folder is not None and options.folder.exists() and not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: not a folder")
    with tempfile.TemporaryDirectory(prefix="zero-verify-") as temporary:
        folders = [(options.folder or Path(temporary)) / mode for mode in MODES]
        for folder in folders:
            _record(folder, options.steps, options.command)
        with Working("verify: comparing"):
            result = compare(*folders)
            steps = steps_in(*folders)
    if result.unsure:
        raise UsageError(
            f"verify: rounding alone decides whether step {result.unsure} overflows: lower "
            "fp16.initial_scale_power"
        )
    if result.difference is None and result.skipped == steps:
        raise UsageError(
            f"verify: no update was compared, because gradients were not finite in any of {steps} "
            "step(s): lower fp16.initial_scale_power, or raise --steps"
        )
    print(as_json(result) if options.json else as_text(result))
    if steps < options.steps and result.difference is None:
        print(f"verify: --steps {options.steps}: the script took only {steps}", file=sys.stderr)
    return int(result.difference is not None)


def _record(folder: Path, steps: int, command: list[str]) -> None:
    """Run the command to its last recorded step, in the mode that the folder is named after."""
    if folder.exists():
        raise UsageError(f"--folder: {folder} exists: name a new folder")
    name = f"verify: the run {MODES[folder.name]}"
    run(command, "zero.tools.verify.record", folder, steps, name)
    if not steps_in(folder):
        raise UsageError(
            f"{name} took no optimizer step with deepspeed.initialize or the Trainer:\n"
            f"{what_went_wrong(folder)}"
        )


def as_text(result: Result) -> str:
    lines = [
        f"{'step':>4}  {'compared':<10}{'tensors':>8}{'noise':>7}{'largest difference':>20}  in"
    ]
    for step, kind, compared, noise, largest, name in result.rows:
        lines.append(f"{step:>4}  {kind:<10}{compared:>8}{noise:>7}{largest:>20.2e}  {name}")
    steps = result.rows[-1][0] if result.rows else 0
    if result.difference is None:
        lines.append(f"equal within rounding for {steps} step(s)")
    else:
        lines.append(f"DIFFERENT, {result.difference}")
    if result.skipped:
        skipped = f"Both runs skipped {result.skipped} step(s)"
        lines.append(f"{skipped}, because gradients were not finite.")
    return "\n".join(lines)


def as_json(result: Result) -> str:
    """JSON has no infinity: null stands for it, and for a difference that has no size."""

    def finite(number: float) -> float | None:
        return number if math.isfinite(number) else None

    difference = None
    if result.difference is not None:
        relative = finite(result.difference.relative)
        difference = vars(result.difference) | {"relative": relative}
    rows = [row._asdict() | {"largest": finite(row.largest)} for row in result.rows]
    found = {"equal": difference is None, "difference": difference}
    return json.dumps(found | {"skipped": result.skipped, "rows": rows}, indent=2)
