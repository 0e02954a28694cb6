"""The commands `zero trace` and `zero memory`: start the user's command for a few steps, and write
what it recorded.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
import textwrap
from argparse import Namespace
from pathlib import Path

from zero.errors import UsageError, size
from zero.tools.arguments import Parser, check_command, count, output_file
from zero.tools.profile.picture import draw, peaks
from zero.tools.profile.running import run, what_went_wrong
from zero.tools.report.pictures import pyplot

# The suffix of torch's own record of a GPU's allocations.
SNAPSHOT = ".pickle"


def trace(arguments: list[str]) -> int:
    """Run `zero trace ARGUMENTS`. Returns the exit code."""
    from zero.tools.profile.trace import merge  # it imports torch's profiler

    parser = Parser(
        "trace",
        "Run a script up to one optimizer step, write a trace of that step for "
        "https://ui.perfetto.dev, and stop. "
        "Nothing is saved. One file has all ranks of this machine, and those of other machines if "
        "TMPDIR is a folder that all machines share.",
        "--step 5 --out trace.json torchrun --nproc_per_node 2 train.py --deepspeed ds_config.json",
        json="the written file",
    )
    about = "the trace; .gz is compressed"
    options = _options(parser, arguments, "trace.json", about, (".json", ".gz"))
    with tempfile.TemporaryDirectory(prefix="zero-trace-") as temporary:
        merged = merge(_record("trace", options, Path(temporary)))
    content = json.dumps(merged).encode()
    options.out.write_bytes(gzip.compress(content) if options.out.suffix == ".gz" else content)
    shown = f"{options.out}: open it in https://ui.perfetto.dev"
    print(json.dumps({"file": str(options.out)}) if options.json else shown)
    return 0


def memory(arguments: list[str]) -> int:
    """Run `zero memory ARGUMENTS`. Returns the exit code."""
    parser = Parser(
        "memory",
        "Run a script up to one optimizer step, draw what rank 0 holds in it by kind, and stop. "
        "Nothing is saved.",
        "--out memory.png torchrun --nproc_per_node 2 train.py --deepspeed ds_config.json",
        json="each rank's peaks and samples",
    )
    options = _options(parser, arguments, "memory.png", "the picture", (".png", ".svg", ".pdf"))
    pyplot()  # before the run, because it may be missing
    snapshot = options.out.with_suffix(SNAPSHOT)
    with tempfile.TemporaryDirectory(prefix="zero-memory-") as temporary:
        files = _record("memory", options, Path(temporary))
        ranks = {file.stem: json.loads(file.read_text()) for file in files}
        recorded_on_gpu = files[0].with_suffix(SNAPSHOT).exists()
        if recorded_on_gpu:
            shutil.copy(files[0].with_suffix(SNAPSHOT), snapshot)
    first = ranks.get("rank0", next(iter(ranks.values())))
    draw(first, f"memory of rank 0 in step {options.step}", options.out)
    highest = {rank: peaks(samples) for rank, samples in ranks.items()}
    if options.json:
        print(json.dumps({"file": str(options.out), "peaks": highest, "samples": ranks}))
        return 0
    print(f"{options.out}: the picture of rank 0")
    for rank, places in highest.items():
        for place, kinds in places.items():
            listed = ", ".join(f"{kind} {size(most)}" for kind, most in kinds.items() if most)
            print(textwrap.fill(f"{rank}, {place}: {listed}", 100, subsequent_indent="  "))
    if recorded_on_gpu:
        print(f"{snapshot}: each allocation of rank 0; open it in https://pytorch.org/memory_viz")
    return 0


def _options(
    parser: Parser, arguments: list[str], out: str, about: str, formats: tuple[str, ...]
) -> Namespace:
    command = parser.prog.removeprefix("zero ")
    add, step = parser.add_argument, "the optimizer step to record, counted from 1 (5)"
    add("--step", type=count, default=5, help=step)
    add("--out", type=output_file, default=out, metavar="F", help=f"{about} ({out})")
    parser.add_command()
    options = parser.parse(arguments)
    if options.out.suffix not in formats:
        parser.error(f"--out {options.out}: its name must end in {' or '.join(formats)}")
    check_command(command, options.command)
    return options


def _record(kind: str, options: Namespace, folder: Path) -> list[Path]:
    """Run the command. Returns the ranks' files."""
    name = f"{kind}: the run"
    run(options.command, f"zero.tools.profile.{kind}", folder, options.step, name)
    files = sorted(folder.glob("rank*.json"))
    if not files:
        raise UsageError(
            f"{name} took fewer than {options.step} optimizer steps with deepspeed.initialize or "
            "the Trainer before it ended or saved: choose an earlier one with --step. Its last "
            f"lines:\n{what_went_wrong(folder)}"
        )
    return files
