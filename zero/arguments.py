"""Command lines of the command `zero`: what cannot be read is one line on stderr and exit code 2."""

from __future__ import annotations

import math
import re
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from typing import NoReturn

from zero.errors import UsageError


class Parser(ArgumentParser):
    """As argparse's, but a mistake raises UsageError with one line. Each command has an example under `--help`."""

    def __init__(self, command: str, description: str, example: str, json: str | None = None):
        """`json`: what the option `--json` prints as a JSON object; None: there is no such option."""
        super().__init__(prog=f"zero {command}", description=description, epilog=f"Example: zero {command} {example}")
        if json is not None:
            self.add_argument("--json", action="store_true", help=f"print {json} as a JSON object")

    def add_command(self) -> None:
        """The rest of the line is a command of the user, kept as `command`."""
        self.add_argument("command", nargs=REMAINDER, help="a script or launcher with its arguments, as for `zero run`")

    def parse(self, arguments: list[str]) -> Namespace:
        """As `parse_args`, for a parser with `add_command`: there must be a command."""
        module = arguments.index("-m") if "-m" in arguments else len(arguments)
        options = self.parse_args(arguments[:module])  # argparse would look for an option -m of its own
        options.command += arguments[module:]
        if not options.command:
            self.error("name a script or a launcher to run")
        if options.command[0].startswith("-") and options.command[0] != "-m":
            self.error(f"unknown option {options.command[0]}")
        return options

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.removeprefix('zero ')}: {message}; see {self.prog} --help")


def count(text: str) -> int:
    """The type of an option: a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text} is not a number above 0")
    return int(text)


def gibibytes(text: str) -> float:
    """The type of an option: memory in GiB, as a number or with a unit: 24, 24G, 24GiB, 512M."""
    found = re.fullmatch(r"([\d.]+)([MGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ArgumentTypeError(f"{text} is no amount of memory, such as 24, 24G or 512M")
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
