"""What all benchmarks have in common: a command line, ranks, rounds, tables and a JSON file.

A benchmark parses its command line with `Parser`, measures in `ranks`, which are new processes, and
calls `finish` with its tables, which are printed and written. Those that compare variants let them
take turns (`take_turns`), so that a busy machine disturbs all of them alike. Then `summary` checks
their losses and gives the medians over the rounds, with ratios that are formed within a round."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from zero.tools.arguments import output_file

REPOSITORY = Path(__file__).resolve().parent.parent
OUT = REPOSITORY / "benchmarks" / "out"
# The folder in which `benchmarks.worker` leaves what a rank has found.
REPORT_FOLDER = "BENCHMARK_REPORT_FOLDER"
Row = dict[str, Any]


# -- the command line


def interpreter(text: str) -> str:
    """The type of an option: a Python interpreter."""
    if shutil.which(text) is None:
        raise ArgumentTypeError(f"{text}: no such program")
    return text


def result_file(text: str) -> Path:
    """The type of an option: a file that can be written, checked before the work.

    Missing folders are made later.
    """
    return output_file(
        text, next(folder for folder in Path(text).resolve().parents if folder.exists())
    )


def existing_folder(text: str) -> Path:
    """The type of an option: a folder that exists and can be written to."""
    try:
        tempfile.TemporaryFile(dir=text).close()
    except OSError as error:
        raise ArgumentTypeError(f"{text}: no folder to write to: {error.strerror}") from None
    return Path(text)


class Parser(ArgumentParser):
    """Of `python -m benchmarks.NAME`: the help is the module's docstring with its examples; a
    mistake is one line.
    """

    def __init__(self, doc: str | None):
        spec = sys.modules["__main__"].__spec__
        prog = spec and f"python -m {spec.name.removesuffix('.__main__')}"
        super().__init__(prog=prog, description=doc, formatter_class=RawDescriptionHelpFormatter)

    def add_output(self) -> None:
        """Add `--output`, a file for `finish`."""
        default = OUT / f"{self.prog.rpartition('.')[2]}.json"
        self.add_argument("--output", type=result_file, default=default)

    def add_deepspeed(self, required: bool = False) -> None:
        self.add_argument(
            "--deepspeed-python",
            type=interpreter,
            required=required,
            help="interpreter of an environment that has deepspeed",
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


# -- processes


def ranks(
    function: Callable,
    nproc: int,
    *,
    timeout: float = 1800,
    python: str = sys.executable,
    env: dict[str, str] | None = None,
    **task: Any,
) -> list[Any]:
    """Call `function(**task)` in `nproc` new processes, and return the results in order of ranks.

    The function must be one of a module. What it takes and returns goes through JSON. Raises
    RuntimeError as `run_job` does.
    """
    module = function.__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name
    command = ["-m", "benchmarks.worker", module, function.__name__, json.dumps(task, default=str)]
    with tempfile.TemporaryDirectory() as folder:
        run_job(python, command, nproc, timeout, {**(env or {}), REPORT_FOLDER: folder})
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def environment(system: str, args: Namespace) -> dict[str, Any]:
    """Return `python` and `env` for `ranks` in which a system runs: DeepSpeed has its own."""
    if not system.lower().startswith("deepspeed"):
        return {}
    # Without a GPU, its launcher would look for one.
    env = {} if Path("/dev/nvidia0").exists() else {"DS_ACCELERATOR": "cpu"}
    # It builds its operations at first use, with the ninja of its environment.
    folder = Path(shutil.which(args.deepspeed_python) or args.deepspeed_python).absolute().parent
    env["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {"python": args.deepspeed_python, "env": env}


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
    shown = " ".join(command)
    print(f"on {nproc} processes: {shown[:200]}", file=sys.stderr, flush=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    variables |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), **(env or {})}
    with tempfile.TemporaryFile("w+") as log:
        processes = [
            subprocess.Popen(
                [python, *command],
                env=variables | {"RANK": rank, "LOCAL_RANK": rank},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
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
        late = f"TimeoutError: not finished after {timeout:.3g} s"
        raise RuntimeError(f"{shown}\n{output[-4000:]}\n{late}")
    if code:
        raise RuntimeError(f"exit code {code}: {shown}\n{output[-4000:]}")
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


# -- rounds


def take_turns(
    variants: Iterable[str], rounds: int, run: Callable[[str], Row]
) -> tuple[list[dict[str, Row]], dict[str, str]]:
    """Run each variant once in every round. `run` returns a row of numbers.

    Returns the rows of each round by variant, and the reasons of those that failed: a job's
    RuntimeError ends a variant's turn, and the others go on.
    """
    found: list[dict[str, Row]] = []
    missing: dict[str, str] = {}
    for number in range(1, rounds + 1):
        found.append({})
        for variant in variants:
            try:
                row = found[-1][variant] = run(variant)
            except RuntimeError as error:
                missing[variant] = cause(str(error))
                print(f"round {number}: {variant}: failed: {missing[variant]}", flush=True)
                continue
            seconds = f"{row['seconds']:.4g} s" if "seconds" in row else "done"
            load = os.getloadavg()[0]
            print(f"round {number}: {variant}: {seconds}, load {load:.1f}", flush=True)
    return found, missing


def cause(output: str) -> str:
    """Return the line of a failed job's output that names the exception, or the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (named or lines)[-1][:300]


def medians(rows: Sequence[Row]) -> Row:
    """Return medians of the numbers. Other values are those of the last row."""
    return {
        name: statistics.median(row[name] for row in rows)
        if isinstance(value, int | float)
        else value
        for name, value in rows[-1].items()
    }


def relative(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of a loss; NaN if one is NaN."""
    pairs = zip(losses, reference, strict=True)
    each = [abs(loss - expected) / abs(expected) for loss, expected in pairs]
    return math.nan if any(map(math.isnan, each)) else max(each)


def fall_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return how far the decrease from the first to the last loss is from the reference's.

    Where that does not fall, nothing is near it.
    """
    fall, expected = losses[0] - losses[-1], reference[0] - reference[-1]
    return abs(fall - expected) / expected if expected > 0 else math.inf


# What is compared with the losses of the base, by the name of the column.
DISTANCES = {"loss diff": relative, "fall diff": fall_difference}


def summary(
    rounds: Sequence[dict[str, Row]],
    variants: Sequence[str],
    missing: dict[str, str],
    tolerances: dict[str, float],
    compared: Sequence[str] = ("seconds",),
) -> tuple[str, dict[str, Row]]:
    """Return the base, which is the first variant that finished in each round, and each variant's
    medians, with `KEY ratio`, its ratio to the base, for each key in `compared`.

    Variants whose losses are not those of the base get a reason in `missing`: `tolerances` has
    limits for some of `DISTANCES`. Exits if there is no base."""
    base = next((name for name in variants if all(name in found for found in rounds)), None)
    if base is None:
        reasons = "\n".join(f"{variant}: {reason}" for variant, reason in missing.items())
        sys.exit(
            f"no variant finished in all {len(rounds)} rounds, so nothing can be "
            f"compared\n{reasons}"
        )
    rows: dict[str, Row] = {}
    for variant in variants:
        each = []
        for found in (found for found in rounds if variant in found):
            row, first = found[variant], found[base]
            each.append(row | {f"{key} ratio": row[key] / first[key] for key in compared})
            for name, limit in tolerances.items():
                distance = each[-1][name] = DISTANCES[name](row["losses"], first["losses"])
                if not distance <= limit:  # NaN is not within
                    missing[variant] = (
                        f"not the same training as {base}: {name} {distance:.1e}, allowed {limit:g}"
                    )
        if each:
            rows[variant] = medians(each)
    return base, rows


# -- results


class Table(NamedTuple):
    caption: str
    columns: list[str]
    rows: list[list[Any]]


def table(caption: str, columns: dict[str, str | tuple[str, float]], rows: Iterable[Row]) -> Table:
    """Return a table of some values of each row.

    `columns`: for each title a key, or a key and what its values are divided by. A row may lack
    values.
    """
    lines = []
    for row in rows:
        line = []
        for key in columns.values():
            name, unit = (key, None) if isinstance(key, str) else key
            value = row.get(name)
            line.append(value if unit is None or value is None else value / unit)
        lines.append(line)
    return Table(caption, list(columns), lines)


def by_variant(rows: dict[str, Row]) -> list[Row]:
    """Return the rows with their names under the key "variant"."""
    return [{"variant": name, **row} for name, row in rows.items()]


def cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value).replace("|", "\\|")


def show(found: Table) -> str:
    """Return a table in Markdown, with its caption above it."""
    lines = [found.columns, *([cell(value) for value in row] for row in found.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    text = [
        f"| {' | '.join(word.ljust(width) for word, width in zip(line, widths, strict=True))} |"
        for line in lines
    ]
    return "\n".join([found.caption, "", *text])


def finish(
    args: Namespace, *tables: Table, missing: dict[str, str] | None = None, **others: Any
) -> None:
    """Print the tables, and write them to `--output`, with the settings and all that is given.

    missing: variants that failed, which are printed. Then the exit code is 1.
    """
    for each in tables:
        print(f"\n{show(each)}")
    write(args, *tables, missing=missing or {}, **others)
    print(f"\nwritten: {args.output}")
    for variant, reason in (missing or {}).items():
        print(f"{variant}: {reason}")
    if missing:
        sys.exit(1)


def write(args: Namespace, *tables: Table, **others: Any) -> None:
    """Write the tables and all that is given to `--output`. A run that is killed meanwhile leaves
    the file as it was.
    """
    settings = {name: value for name, value in vars(args).items() if "python" not in name}
    result: dict[str, Any] = {"settings": settings, "machine": machine()}
    result |= {"tables": [each._asdict() for each in tables], **others}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    fresh = args.output.with_name(f"{args.output.name}.new")
    fresh.write_text(json.dumps(result, indent=1, default=str) + "\n")
    fresh.replace(args.output)


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def draw(
    path: Path,
    title: str,
    axes: tuple[str, str],
    lines: dict[str, tuple[Sequence[float], Sequence[float]]],
) -> None:
    """Draw lines of (x, y) by their names.

    Later ones are thinner, because equal ones lie on each other.
    """
    import matplotlib  # imported here, so that tables need no matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (name, (x, y)) in enumerate(lines.items()):
        axis.plot(x, y, marker=".", linewidth=max(1.0, 5.0 - number), label=name)
    axis.set(xlabel=axes[0], ylabel=axes[1], title=title)
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
