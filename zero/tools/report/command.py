"""The command `zero report`."""

from __future__ import annotations

import os
from pathlib import Path

from zero.errors import UsageError
from zero.tools.arguments import Parser, output_file, working
from zero.tools.report.page import page
from zero.tools.report.runs import file_of, read


def report(arguments: list[str]) -> None:
    """Run `zero report ARGUMENTS`."""
    parser = Parser(
        "report",
        "Make an HTML page, which needs no network, from the records of json_monitor about one "
        "run, or about two runs side by side.",
        "output/run1 output/run2 --out report.html",
    )
    is_run = "folder of json_monitor, or its file steps.jsonl"
    parser.add_argument("run", type=Path, help=is_run)
    parser.add_argument("other", type=Path, nargs="?", help="a second run to compare with")
    out = "report.html"
    about = f"the page ({out})"
    parser.add_argument("--out", type=output_file, default=out, metavar="F", help=about)
    options = parser.parse_args(arguments)
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
