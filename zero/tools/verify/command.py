"""The command `zero verify`: starts the user's command twice, shows progress, and prints what was
found.
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

# The names that `zero.tools.verify.record` reads; importing it here would take seconds.
MODES = {"engine": "on the engine", "plain": "on plain torch"}


def verify(arguments: list[str]) -> int:
    """Run `zero verify ARGUMENTS`.

    Returns the exit code: 0 if everything is equal, 1 if something differs.
    """
    parser = Parser(
        "verify",
        "Run the first steps of a script twice, on the engine and on plain torch, and compare "
        "losses, gradients, "
        "settings, optimizer states and updated parameters. The plain run holds the whole model on "
        "each process.",
        "--steps 3 torchrun --nproc_per_node 2 train.py --deepspeed ds_config.json",
        json="the result",
    )
    parser.add_argument("--steps", type=count, default=3, help="optimizer steps to compare (3)")
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep the recordings here; with Adam they take 16 bytes a parameter and step",
    )
    parser.add_command()
    options = parser.parse(arguments)
    check_command("verify", options.command)
    if options.folder is not None and options.folder.exists() and not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: not a folder")
    with tempfile.TemporaryDirectory(prefix="zero-verify-") as temporary:
        folder = options.folder or Path(temporary)
        for mode in MODES:
            _record(mode, folder, options.steps, options.command)
        with Working("verify: comparing"):
            result = compare(*(folder / mode for mode in MODES))
            steps = steps_in(*(folder / mode for mode in MODES))
    if result.difference is None and result.skipped == steps:
        raise UsageError(
            f"verify: no update was compared, because gradients were not finite in any of {steps} "
            "step(s): lower "
            "fp16.initial_scale_power, or raise --steps"
        )
    print(as_json(result) if options.json else as_text(result))
    if steps < options.steps and result.difference is None:
        print(f"verify: --steps {options.steps}: the script made {steps}", file=sys.stderr)
    return int(result.difference is not None)


def _record(mode: str, folder: Path, steps: int, command: list[str]) -> None:
    """Run the command to its last recorded step.

    What it prints goes to a file, the end of it into an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / mode).exists():
        raise UsageError(f"--folder: {folder / mode} exists: name a new folder")
    variables = {
        "ZERO_VERIFY_MODE": mode,
        "ZERO_VERIFY_FOLDER": str(folder / mode),
        "ZERO_VERIFY_STEPS": str(steps),
    }
    log = folder / f"{mode}.log"

    def progress() -> str | None:
        done = steps_in(folder / mode, folder / mode)
        return f"{MODES[mode]}: step {done} of {steps}" if done else None

    name = f"verify: the run {MODES[mode]}"
    run(command, "zero.tools.verify.record", variables, log, name, progress)
    if not steps_in(folder / mode, folder / mode):
        raise UsageError(
            f"verify: the run {MODES[mode]} made no optimizer step by deepspeed.initialize or the "
            "Trainer:\n"
            f"{what_went_wrong(log)}"
        )


def as_text(result: Result) -> str:
    lines = [
        f"{'step':>4}  {'compared':<10}{'tensors':>8}{'noise':>7}{'largest difference':>20}  in"
    ]
    for step, kind, compared, noise, largest, name in result.rows:
        lines.append(f"{step:>4}  {kind:<10}{compared:>8}{noise:>7}{largest:>20.2e}  {name}")
    steps = result.rows[-1][0] if result.rows else 0
    found = result.difference
    lines.append(
        f"equal within rounding for {steps} step(s)" if found is None else f"DIFFERENT, {found}"
    )
    if result.skipped:
        lines.append(
            f"Both runs skipped {result.skipped} step(s), because gradients were not finite."
        )
    return "\n".join(lines)


def as_json(result: Result) -> str:
    """JSON has no infinity: null stands for it, and for a difference that has no size."""
    names = ("step", "kind", "tensors", "noise", "largest", "tensor")
    found = None if result.difference is None else vars(result.difference)
    rows = [dict(zip(names, row, strict=True)) for row in result.rows]
    for each, key in ((found or {}, "relative"), *((row, "largest") for row in rows)):
        if key in each and not math.isfinite(each[key]):
            each[key] = None
    return json.dumps(
        {"equal": found is None, "difference": found, "skipped": result.skipped, "rows": rows},
        indent=2,
    )
