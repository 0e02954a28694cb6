"""Runs all experiments of the published guides on this machine, one after the other, and writes a
report.

    python -m benchmarks.reproduce --quick
        # small sizes: under ten minutes on two cores
    python -m benchmarks.reproduce                               # the sizes of the guides: hours
    python -m benchmarks.reproduce --disk FOLDER_ON_A_FAST_DISK
        # with T5-3B, which needs 60 GB there
    python -m benchmarks.reproduce --quick --only three_d gathering

The report is `report.md`, with its pictures and JSON in the same folder (`--output`). Each
experiment is a separate benchmark, example or command; `benchmarks/reproduce/experiments.py` lists
them. A failure is shown in its section while the others still run, and the exit code is then 1.
`--only` runs some experiments, and keeps the other sections of an earlier report."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.reproduce.experiments import EXPERIMENTS, Experiment, Sizes
from benchmarks.runner import OUT, REPOSITORY, Parser, Table, machine, show

TIMEOUT = 4 * 3600  # seconds of one command
LAST_LINES = 15
Section = dict[str, Any]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    names = [experiment.name for experiment in EXPERIMENTS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument(
        "--disk", type=Path, help="folder on a fast disk, for what is offloaded to files"
    )
    parser.add_argument("--output", type=Path, default=OUT / "reproduction")
    return parser.parse_args(argv)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_command(command: list[str], log: Path) -> int:
    """Run one command with its output in `log`, and return its exit code.

    Says every minute how far it is.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        began = time.monotonic()
        try:
            while True:
                try:
                    return process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - began
                    say(f"    {seconds:.0f} s: {''.join(last_lines(log, 1))[:100]}")
                    if seconds > TIMEOUT:
                        raise
        finally:
            if process.poll() is None:  # it took too long, or Ctrl-C
                end(process)


def end(process: subprocess.Popen) -> None:
    """End a command with all that it started.

    SIGTERM first, so that torchrun ends its workers: it takes 30 seconds.
    """
    group, deadline = process.pid, time.monotonic() + 35
    number = signal.SIGTERM
    try:
        while True:
            os.killpg(group, number)
            number = 0 if time.monotonic() < deadline else signal.SIGKILL
            process.poll()  # otherwise it would stay in the group when it has ended
            time.sleep(0.1)
    except ProcessLookupError:  # the group is empty
        process.wait()


def last_lines(log: Path, count: int) -> list[str]:
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip()][-count:]


def cpu_seconds() -> float:
    """User and system seconds of all finished children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(experiment: Experiment, sizes: Sizes) -> Section:
    """Run the experiment's commands, and return its section of the report.

    `error` is there if something failed.
    """
    folder = sizes.folder / experiment.name
    if folder.exists():  # what an earlier run left could be taken for this one's
        shutil.rmtree(folder)
    folder.mkdir()
    sizes = sizes._replace(folder=folder)
    commands = experiment.commands(sizes)
    section: Section = {
        "title": experiment.title,
        "text": experiment.text,
        "commands": [shown(command) for command in commands],
        "quick": sizes.quick,
        "date": datetime.now().isoformat(" ", "minutes"),
        "load": os.getloadavg()[0],
        "state": "done",
        "tables": [],
        "pictures": [],
    }
    if not commands:
        return section | {"state": "not run", "seconds": 0.0, "cpu_seconds": 0.0}
    began, cpu = time.monotonic(), cpu_seconds()
    logs = []
    for number, command in enumerate(commands):
        log = folder / f"{number}.txt"
        logs.append(log)
        say(f"  {shown(command)}")
        try:
            code = run_command(command, log)
        except subprocess.TimeoutExpired:
            code = f"none after {TIMEOUT} s"
        if code:
            section["error"] = f"exit code {code}: {shown(command)}\n" + "\n".join(
                last_lines(log, LAST_LINES)
            )
            break
    else:
        try:
            section["tables"] = [table._asdict() for table in experiment.collect(folder, logs)]
        except (
            Exception
        ):  # a file that is missing, or has another form: it belongs into this section
            section["error"] = "the result cannot be read:\n" + traceback.format_exc(limit=-3)
    if "error" in section:
        section["state"] = "**failed**"
    section |= {"seconds": time.monotonic() - began, "cpu_seconds": cpu_seconds() - cpu}
    section["pictures"] = [
        str(path.relative_to(folder.parent)) for path in sorted(folder.glob("*.png"))
    ]
    return section


def shown(command: list[str]) -> str:
    """Return the command as a user would write it in the repository."""
    words = [
        "python" if word == sys.executable else word.replace(f"{REPOSITORY}/", "")
        for word in command
    ]
    return shlex.join(words).replace("python -m torch.distributed.run --standalone", "torchrun")


# -- the report


def section_lines(section: Section) -> list[str]:
    lines = ["", f"## {section['title']}", "", section["text"], ""]
    if section["commands"]:
        lines += ["```bash", *section["commands"], "```", ""]
    sizes = "quick" if section["quick"] else "full"
    lines.append(
        f"{section['state']}, {section['date']}, {sizes} sizes: {section['seconds']:.0f} s, "
        f"{section['cpu_seconds']:.0f} CPU seconds, load {section['load']:.1f} at the start"
    )
    if "error" in section:
        lines += ["", "```text", section["error"], "```"]
    for table in section["tables"]:
        lines += ["", show(Table(**table))]
    for picture in section["pictures"]:
        lines += ["", f"![{section['title']}]({picture})"]
    return lines


def report(result: dict[str, Any]) -> str:
    """Return the report in Markdown. `result` is what `report.json` has."""
    about = ", ".join(
        f"{name.replace('_gb', ' GB')} {value}" for name, value in result["machine"].items()
    )
    sections = result["sections"]
    lines = ["# Published experiments, run again", "", f"Machine: {about}.", ""]
    lines.append(
        "Times of a busy machine are long. Compare CPU seconds there. Bytes, losses and errors do "
        "not depend on it."
    )
    columns = ["experiment", "state", "seconds", "CPU seconds"]
    figures = [
        [each["title"], each["state"], round(each["seconds"]), round(each["cpu_seconds"])]
        for each in sections.values()
    ]
    together = [sum(row[column] for row in figures) for column in (2, 3)]
    lines += ["", show(Table("All of them", columns, [*figures, ["together", "", *together]]))]
    lines += [line for section in sections.values() for line in section_lines(section)]
    return "\n".join(lines) + "\n"


def earlier_sections(output: Path) -> dict[str, Section]:
    """Return an earlier report's sections.

    Exits with 2 if the folder has other things: they could be lost.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / "report.json"
    if path.exists():
        return json.loads(path.read_text())["sections"]
    if any(output.iterdir()):
        say(
            f"error: --output {output}: the folder has files, but no report.json; give a new or "
            "empty folder"
        )
        sys.exit(2)
    return {}


def write(output: Path, found: dict[str, Section]) -> None:
    ordered = {each.name: found[each.name] for each in EXPERIMENTS if each.name in found}
    result = {"machine": machine(), "sections": ordered}
    (output / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / "report.md").write_text(report(result))


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    args.output = args.output.resolve()
    found = earlier_sections(args.output)
    chosen = [experiment for experiment in EXPERIMENTS if experiment.name in args.only]
    began = time.monotonic()
    write(args.output, found)
    for number, experiment in enumerate(chosen, start=1):
        say(
            f"[{number}/{len(chosen)}, {time.monotonic() - began:.0f} s] {experiment.name}: "
            f"{experiment.title}"
        )
        found[experiment.name] = run(experiment, Sizes(args.output, args.quick, args.disk))
        if "error" in found[experiment.name]:
            say("  FAILED\n" + found[experiment.name]["error"])
        write(args.output, found)  # each time, so that an interrupted run leaves a report
    failed = [each.name for each in chosen if "error" in found[each.name]]
    say(
        f"written: {args.output / 'report.md'}, report.json"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    # As Ctrl-C: the command that runs is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    main()
