"""The command `zero report`."""

from __future__ import annotations

import os

from zero.errors import UsageError
from zero.tools.arguments import Parser, working
from zero.tools.report.page import page
from zero.tools.report.runs import file_of, read


def report(arguments: list[str]) -> None:
    """Run `zero report ARGUMENTS`."""
    options = Parser("report").parse_args(arguments)
    paths = [path for path in (options.run, options.other) if path is not None]
    if os.path.realpath(options.out) in [os.path.realpath(file_of(path)) for path in paths]:
        raise UsageError(
            f"report: --out {options.out} is the record of the run, which the page would replace: "
            "name another file"
        )
    with working("report: reading and drawing"):
        try:
            runs = [read(path) for path in paths]
            if len(runs) == 2 and runs[0].name == runs[1].name:
                for number, run in enumerate(runs, start=1):
                    run.name += f" ({number})"
            drawn = page(runs)
        except UsageError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            names = " or ".join(str(path) for path in paths)
            raise UsageError(f"report: {names}: a record is damaged: {error}") from error
        options.out.write_text(drawn, encoding="utf-8")
    print(f"{options.out}: open it in a browser")
