"""Parses the command lines of `zero`. If something cannot be read or started, it prints one line
and exits with code 2.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from zero.errors import UsageError, nearest

# The commands, by what one wants to do. "home" is the function that gets the arguments and returns
# the exit code or None, "line" is what `zero` says about the command. Options have the keywords of
# argparse's `add_argument`; their types are functions of this file, by name; what has no "help" is
# not shown.
GOALS = json.loads(Path(__file__).with_name("commands.json").read_text(encoding="utf-8"))
COMMANDS = {name: about for commands in GOALS.values() for name, about in commands.items()}
# DeepSpeed's commands, by the module of its that the facade has in its place.
_OF_DEEPSPEED = {
    "deepspeed": "deepspeed.launcher.runner",
    "ds": "deepspeed.launcher.runner",
    "ds_report": "deepspeed.env_report",
}
# Programs whose first argument that ends in .py is a script.
LAUNCHERS = ("torchrun", "accelerate", "python", "python3")
# Their options after which no script follows.
_NO_SCRIPT = {"-m", "--module", "-c", "--no-python", "--no_python"}
NOT_PYTHON = (".json", ".yaml", ".yml", ".toml", ".sh", ".txt", ".md", ".ipynb")


class Parser(ArgumentParser):
    """As argparse's, with the options that `commands.json` has of a command. A mistake raises
    UsageError with one line.
    """

    def __init__(self, command: str):
        about = COMMANDS[command]
        super().__init__(
            prog=f"zero {command}",
            description=about["description"],
            epilog=f"Example: zero {command} {about['example']}",
        )
        self._takes_launchers = command != "launch"  # which is one
        for names, options in about["options"].items():
            if "type" in options:
                options = options | {"type": TYPES[options["type"]]}
            self.add_argument(*names.split(), **{"help": SUPPRESS} | options)

    def parse(self, arguments: list[str]) -> Namespace:
        """As `parse_args`, for a command whose options end with the user's command."""
        # argparse would look for its own option -m
        module = arguments.index("-m") if "-m" in arguments else len(arguments)
        options = self.parse_args(arguments[:module])
        options.command += arguments[module:]
        if not options.command:
            what = "script or a launcher" if self._takes_launchers else "script or -m MODULE"
            self.error(f"name a {what} to run")
        if options.command[0].startswith("-") and options.command[0] != "-m":
            self.error(f"unrecognized arguments: {options.command[0]}")
        target, *rest = options.command
        if self._takes_launchers and target in _OF_DEEPSPEED and not os.path.exists(target):
            options.command = ["-m", _OF_DEEPSPEED[target], *rest]
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = args or []
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        remedy = f"see {self.prog} --help"
        # argparse says what is missing before it says that an option is unknown.
        if message.startswith(("unrecognized arguments", "the following arguments are required")):
            options = (word.partition("=")[0] for word in self._words if word.startswith("-"))
            known = re.findall(r"(?<!\S)--?\w[\w-]*", self.format_help().partition("Example:")[0])
            for option in options:
                if not any(name.startswith(option) for name in known):
                    message = f"unknown option {option}"
                    meant = nearest(option, known) if option.startswith("--") else ""
                    remedy = f"did you mean {meant}?" if meant else remedy
                    break
        raise UsageError(f"{self.prog.removeprefix('zero ')}: {message}; {remedy}")


def judged(text: str, verdict: bool | None) -> str:
    """`text` in green, red, or, for None, yellow: on a terminal, unless NO_COLOR is set
    (https://no-color.org).
    """
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    code = {True: 32, False: 31, None: 33}[verdict]
    return f"\x1b[{code}m{text}\x1b[0m"


@contextmanager
def working(text: str = "", interval: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Context that shows on stderr that a long step is running: on a terminal as a line with the
    elapsed time. It yields a function that replaces the text; without a terminal, that prints new
    texts, at most one in `interval` seconds.
    """
    from rich.console import Console  # here: most commands do without
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    # do not let rich decide: in CI logs, FORCE_COLOR makes it assume a terminal
    is_terminal = sys.stderr.isatty()
    console = Console(file=sys.stderr, force_terminal=is_terminal)
    columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    line = Progress(*columns, console=console, transient=True, disable=not is_terminal)
    task, following = line.add_task(text), time.monotonic() + interval

    def show(new: str) -> None:
        nonlocal text, following
        if new != text and not is_terminal and time.monotonic() >= following:
            print(new, file=sys.stderr, flush=True)
            following = time.monotonic() + interval
        text = new
        line.update(task, description=new)

    with line:
        yield show


def program(target: str) -> str | None:
    """The path of a command, or None for a Python script.

    The virtual environment need not be activated.
    """
    beside = os.path.dirname(sys.executable)
    path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    return None if target.endswith(".py") else shutil.which(target, path=path)


def check_command(name: str, command: list[str]) -> None:
    """Raise UsageError in one line if the user's command cannot start: no such script or
    configuration.

    name: of the command of `zero`, for the message.
    """
    target, *rest = command
    if target == "-m":
        if rest[:1] in ([], [""]):
            raise UsageError(f"{name}: -m: name a module")
    elif program(target) is None:
        _check_script(name, target)
    elif Path(target).name in LAUNCHERS and not _NO_SCRIPT & {*rest}:
        for script in [word for word in rest if word.endswith(".py")][:1]:
            _check_script(name, script)
    for config in _configurations(rest):
        from zero.config import load_config  # here: the other commands do without

        load_config(config, allow_auto=True)


def _check_script(name: str, script: str) -> None:
    path = Path(script)
    if not path.exists():
        raise UsageError(f"{name}: {script}: no such file, and no such command")
    if not path.is_file():
        raise UsageError(f"{name}: {script}: not a file; name the script in it")
    if path.suffix in NOT_PYTHON or not os.access(path, os.R_OK):
        raise UsageError(
            f"{name}: {script}: neither a Python script nor a command that you may execute"
        )


def _configurations(arguments: list[str]) -> Iterator[str]:
    """The values of the options that name a configuration; to some scripts `--deepspeed` alone is a
    switch.
    """
    for argument, following in pairwise([*arguments, "-"]):
        option, equals, value = argument.partition("=")
        if option in ("--deepspeed", "--deepspeed_config", "--deepspeed_config_file"):
            if equals:
                yield value
            elif not following.startswith("-"):
                yield following


def output_file(text: str, folder: Path | None = None) -> Path:
    """The type of an option that names a file to write. The file is checked before the work
    begins, but not created yet.

    `folder` must be writable. Default: the folder of the file.
    """
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder; name a file")
    try:
        tempfile.TemporaryFile(dir=folder or path.resolve().parent).close()
    except OSError as error:
        raise ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return path


def count(text: str) -> int:
    """The type of an option: a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text} is not a number above 0")
    return int(text)


def port(text: str) -> int:
    """The type of an option: a TCP port."""
    if (number := count(text)) > 65535:
        raise ArgumentTypeError(f"{text} is not a port: the largest is 65535")
    return number


def count_or_all(text: str) -> int | None:
    """The type of an option: a number above 0, or DeepSpeed's -1, which stands for all."""
    return None if text == "-1" else count(text)


def numbers(text: str) -> list[int]:
    """The type of an option: numbers and ranges of at most four digits."""
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text, re.ASCII):
        raise ArgumentTypeError(f"{text[:80]} is not a list of numbers, such as 0,2-5")
    ranges = [[int(number) for number in part.split("-")] for part in text.split(",")]
    if any(each[0] > each[-1] for each in ranges):
        raise ArgumentTypeError(f"{text}: a range ends before it begins")
    return [number for each in ranges for number in range(each[0], each[-1] + 1)]


def gibibytes(text: str) -> float:
    """The type of an option: memory in GiB, as a number or with a unit: 24, 24G, 24GiB, 512M."""
    found = re.fullmatch(r"([\d.]+)([MGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ArgumentTypeError(f"{text} is not an amount of memory, such as 24, 24G or 512M")
    return above_zero(found[1]) * {"M": 2.0**-10, "T": 2.0**10}.get(found[2].upper(), 1.0)


def above_zero(text: str) -> float:
    """The type of an option: a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise ArgumentTypeError(f"{text} is not a number above 0")
    return number


def gigabytes(text: str) -> float:
    """The type of an option: GB, of a text such as 5GB or 500MB."""
    if not (found := re.fullmatch(r"(\d+)\s*([KMG])i?B", text.strip(), re.IGNORECASE)):
        raise ArgumentTypeError(f"{text} is not a size, such as 5GB or 500MB")
    return above_zero(found[1]) * {"K": 1e-6, "M": 1e-3, "G": 1.0}[found[2].upper()]


_OWN = above_zero, count, count_or_all, gibibytes, gigabytes, numbers, output_file, port
TYPES: dict[str, Any] = {each.__name__: each for each in _OWN}
TYPES |= {"int": int, "lower": str.lower, "path": Path}
