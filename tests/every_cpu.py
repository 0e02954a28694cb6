"""Runs the numeric tests with the instructions of other CPUs, with more threads, and without a C++
compiler.

    python -m tests.every_cpu                                     # all settings, all numeric tests
    python -m tests.every_cpu --settings best,avx2 tests/parity   # what follows goes to pytest

torch, MKL and oneDNN choose their kernels by the CPU's instructions, and kernels round differently.
All three can be told not to use some instructions (x86 only). Prints a table, writes JSON, and
exits with 1 if a test failed under any setting."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).parents[1]
NUMERIC = ["tests/unit", "tests/parity", "tests/distill", "tests/dist"]
COMPILERS = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|clang|clang\+\+|c89|c99)(-\d+)?")
SETTINGS = {
    "best": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "sse4": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    # Threads sleep while they wait: ranks that spin take each other's cores.
    "two-threads": {"OMP_NUM_THREADS": "2", "ZERO_TEST_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
    "no-compiler": {},  # on a PATH of its own
}


def path_without_compilers(folder: Path) -> str:
    """Return a PATH with links to all commands of the present one, except C and C++ compilers."""
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if not COMPILERS.fullmatch(program.name):
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    return str(folder)


def run(setting: str, arguments: list[str], scratch: Path) -> dict[str, object]:
    """Run pytest under one setting.

    Returns counts by outcome, seconds, the exit code and the failed tests' names.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **SETTINGS[setting]}
    if setting == "no-compiler":
        (scratch / "bin").mkdir()
        environment["PATH"] = path_without_compilers(scratch / "bin")
        environment.pop("CXX", None)
    report = scratch / f"{setting}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *arguments,
    ]
    start = time.monotonic()
    code = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
    seconds = round(time.monotonic() - start)
    if not report.exists():
        raise SystemExit(
            f"pytest ended with {code} before it wrote its report: {' '.join(command)}"
        )
    counts, failures = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ElementTree.parse(report).iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        counts[
            "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        ] += 1
        if bad:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    return {
        "setting": setting,
        **counts,
        "seconds": seconds,
        "exit_code": code,
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--settings", default=",".join(SETTINGS), help="comma-separated; default: %(default)s"
    )
    parser.add_argument(
        "--output", type=Path, default=REPOSITORY / "benchmarks" / "out" / "every_cpu.json"
    )
    args, rest = parser.parse_known_args()
    settings = args.settings.split(",")
    if unknown := set(settings) - set(SETTINGS):
        parser.error(f"--settings: {', '.join(sorted(unknown))} is none of {', '.join(SETTINGS)}")
    if not any(
        (REPOSITORY / argument.partition("::")[0]).exists()
        for argument in rest
        if argument[0] != "-"
    ):
        rest += NUMERIC
    rows = []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for number, setting in enumerate(settings, 1):
            print(
                f"== {number} of {len(settings)}: {setting} {SETTINGS[setting] or ''}", flush=True
            )
            rows.append(run(setting, rest, Path(scratch)))
            args.output.write_text(json.dumps({"arguments": rest, "rows": rows}, indent=2))
    columns = ["setting", "passed", "failed", "skipped", "seconds"]
    for row in [dict(zip(columns, columns, strict=True)), *rows]:
        print(f"{row['setting']:<16}" + "".join(f"{row[name]:>9}" for name in columns[1:]))
    for row in rows:
        for name in row["failures"]:
            print(f"failed under {row['setting']}: {name}")
    return int(any(row["exit_code"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
