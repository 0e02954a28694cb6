"""`benchmarks.reproduce`: one report of experiments that are subprocesses; a failed one does not
stop the others.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.reproduce import __main__ as reproduce
from benchmarks.reproduce.experiments import Experiment, Sizes
from benchmarks.runner import Table


def made(name: str, commands: Callable[[Sizes], list[str]]) -> Experiment:
    """An experiment whose commands are lines of Python."""
    title = name.capitalize()
    return Experiment(
        name, title, f"{title} says something.", collect=rows,
        commands=lambda sizes: [[sys.executable, "-c", code] for code in commands(sizes)],
    )  # fmt: skip


def of_sizes(sizes: Sizes) -> list[str]:
    files = {"x.json": f'{{"bytes": {2 if sizes.quick else 16}}}', "curve.png": ""}
    return [f"open({str(sizes.folder / name)!r}, 'w').write({files[name]!r})" for name in files]


def rows(folder: Path, logs: list[Path]) -> list[Table]:
    size = json.loads((folder / "x.json").read_text())["bytes"]
    return [Table("A table", ["bytes", "name"], [[size, "a|b"]])]


GOOD = made("good", of_sizes)
BAD = made("bad", lambda sizes: ["print('the last word'); raise SystemExit(3)"])
UNREAD = made("unread", lambda sizes: [""])
NOT_HERE = made("not_here", lambda sizes: [])


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the command with these experiments. Returns its exit code, the report and its JSON."""

    def call(experiments: list[Experiment], *arguments: str) -> tuple[int, str, dict]:
        monkeypatch.setattr(reproduce, "EXPERIMENTS", experiments)
        with pytest.raises(SystemExit) as ended:
            reproduce.main(["--output", str(tmp_path), *arguments])
        result = json.loads((tmp_path / "report.json").read_text())
        text = re.sub(" +", " ", (tmp_path / "report.md").read_text())  # cells are padded
        return ended.value.code, text, result["sections"]

    return call


def test_a_failed_experiment_is_shown_and_the_others_still_run(run, capsys):
    code, text, sections = run([BAD, UNREAD, GOOD, NOT_HERE])
    assert code == 1
    assert "![Good](good/curve.png)" in text and "| 16 | a\\|b |" in text
    assert sections["not_here"]["state"] == "not run"
    assert re.search("exit code 3: python -c(.|\n)*the last word", sections["bad"]["error"])
    assert "x.json" in sections["unread"]["error"] and sections["unread"]["state"] == "**failed**"
    assert sections["good"]["tables"][0]["rows"] == [[16, "a|b"]]
    assert text.index("## Bad") < text.index("the last word") < text.index("## Unread")
    assert "failed: bad, unread" in capsys.readouterr().err
    code, text, sections = run([BAD, GOOD], "--only", "good", "--quick")
    assert code == 0 and "the last word" in text
    assert {name: each["quick"] for name, each in sections.items()} == {"bad": False, "good": True}


def test_a_folder_with_other_things_is_refused(run, capsys, tmp_path):
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit) as ended:
        reproduce.main(["--output", str(tmp_path)])
    assert ended.value.code == 2 and "new or empty folder" in capsys.readouterr().err
    assert (tmp_path / "good" / "thesis.txt").exists() and not (tmp_path / "report.json").exists()


def test_every_experiment_says_a_command_that_exists(tmp_path):
    root = Path(__file__).parents[3]
    for experiment in reproduce.EXPERIMENTS:
        for quick in (True, False):
            for command in experiment.commands(Sizes(tmp_path, quick, tmp_path)):
                names = [word for word in command if word.startswith("benchmarks.")]
                files = [word for word in command if word.endswith(".py")]
                assert all((root / file).is_file() for file in files), command
                assert all(importlib.util.find_spec(name) for name in names), command
                assert command[0] == sys.executable
