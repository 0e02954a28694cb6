"""Runs the numeric tests with the instructions of other CPUs, with more threads, and without a C++
compiler.

    python -m tests.every_cpu                                     # all settings, all numeric tests
    python -m tests.every_cpu --settings best,avx2 tests/parity   # what follows goes to pytest

torch, MKL and oneDNN choose their kernels by the CPU's instructions, and kernels round differently.
All three can be told not to use some instructions (x86 only). Exits with 1 if a test failed under
any setting."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

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
    "no-compiler": {"CXX": ""},  # and a PATH of its own
}


def path_without_compilers(folder: Path) -> str:
    """Return a PATH with links to all commands of the present one, except C and C++ compilers."""
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if not COMPILERS.fullmatch(program.name):
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    return str(folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", default=",".join(SETTINGS), help="default: %(default)s")
    args, rest = parser.parse_known_args()
    if not any((REPOSITORY / word.partition("::")[0]).exists() for word in rest):
        rest += NUMERIC
    codes = {}
    for setting in args.settings.split(","):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **SETTINGS[setting]}
        with tempfile.TemporaryDirectory() as folder:
            if setting == "no-compiler":
                environment["PATH"] = path_without_compilers(Path(folder))
            print(f"== {setting} {SETTINGS[setting]}", flush=True)
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *rest]
            codes[setting] = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
    print("pytest's exit codes:", codes)
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
