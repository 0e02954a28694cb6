"""Small faults in the product, each with a test that notices it: proof that these tests still see
what they are for after they have been merged or shortened.

    python -m tests.mutants            all of them: half a minute each
    python -m tests.mutants layout     those of files whose path contains this word

`mutants.txt` has them: under each test the file, the text that is there (`-`) and the text that
takes its place (`+`). The faults are made in a copy of the repository."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.processes import REPOSITORY, run

LIST = Path(__file__).with_name("mutants.txt")
TIMEOUT = 900.0


class Mutant(NamedTuple):
    test: str
    file: str
    old: str
    new: str


def listed() -> Iterator[Mutant]:
    for section in LIST.read_text(encoding="utf-8").strip().split("\n\ntest "):
        test, _, text = section.removeprefix("test ").partition("\n")
        for file, *lines in re.findall(r"^file (.*)\n((?:-.*\n)+)((?:\+.*\n)*)", f"{text}\n", re.M):
            old, new = (re.sub("^.", "", each, flags=re.M).removesuffix("\n") for each in lines)
            yield Mutant(test, file, old, new)


def fails(folder: Path, *tests: str) -> bool:
    """Whether a test fails in the copy; SystemExit if pytest could not run them."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = run(command, timeout=TIMEOUT, env={"PYTHONPATH": str(folder)}, cwd=folder)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout + done.stderr)
    return done.returncode == 1


def is_noticed(mutant: Mutant, folder: Path) -> bool:
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.file} must have this once: {mutant.old}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return fails(folder, mutant.test)
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> int:
    words = sys.argv[1:] or [""]
    chosen = [each for each in listed() if any(word in each.file for word in words)]
    unnoticed = 0
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "copy"
        hidden = shutil.ignore_patterns(".*", "__pycache__")
        shutil.copytree(REPOSITORY, folder, ignore=hidden)
        if fails(folder, *dict.fromkeys(each.test for each in chosen)):
            raise SystemExit("a test fails without a fault")
        for each in chosen:
            noticed = is_noticed(each, folder)
            unnoticed += not noticed
            where = f"{each.file}: {each.old.strip()}"
            print(f"{'noticed' if noticed else 'NOT NOTICED'} by {each.test}: {where}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} are noticed")
    return unnoticed > 0


if __name__ == "__main__":
    sys.exit(main())
