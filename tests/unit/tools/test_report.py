"""`zero report`: the page of one run and of two, in text and in a browser."""

import html
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.integrations.test_hook import assert_refused
from zero.errors import size
from zero.tools.cli import main
from zero.tools.report.page import page
from zero.tools.report.runs import REST, Run, read

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
SECTIONS = {
    "Summary", "Training", "Where a step's time goes", "Ranks", "Memory by kind", "Communication",
    "Bytes by link", "Effective configuration", "Environment", "Warnings",
}  # fmt: skip


def record(step: int, **changes: Any) -> dict[str, Any]:
    waits = {"forward_gather": 0.1, "backward_reduce": 0.2, "other_gather": 0.05}
    return {
        "step": step, "samples": 4 * step, "loss": 3.0 / step, "skipped": False, "grad_norm": 1.0,
        "lr": 0.01,
        "samples_per_second": 4.0, "seconds": {"forward": 0.3, "backward": 0.5, "step": 0.1},
        "waits": waits,
        "bytes": {"all_gather": 4096, "reduce_scatter": 2 << 20}, "mfu": 0.1 * step,
        "links": {"network": 1 << 20, "disk read": 512 * step, "host to device": 0},
        "disk_bytes_per_second": {"read": 1 << 30} if step > 1 else {},
        "memory": {"gathered_elements_peak": 9, "host_bytes_peak": 3 << 30, "device_bytes_peak": 0},
        "ranks": {"slowest": 1, "working_seconds": [0.65, 0.9]},
    } | changes  # fmt: skip


def first(stage: int = 3) -> dict[str, Any]:
    row = {"given": str(stage), "source": "configuration", "effect": "used"}
    keys = [
        row | {"key": f"zero_optimization.{key}", "effective": value, "at_default": at_default}
        for key, value, at_default in (("stage", str(stage), False), ("overlap_comm", "true", True))
    ]
    facts = {
        "configuration": keys,
        "environment": {"ranks": "2"},
        "memory": {"host": {"parameters": 1 << 20, "optimizer": 2 << 20}},
        "parameters": 1234,
    }
    return record(1, run=facts, warnings=["<script>alert(1)</script> was met"])


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "steps.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def curves_of(text: str) -> list[list[dict[str, Any]]]:
    """The lines of each curve that the page's script draws."""
    return [json.loads(html.unescape(each)) for each in re.findall('data-lines="(.*?)"', text)]


def test_what_the_page_computes():
    run = Run("a", [first(), record(2), record(3), record(2, loss=7.0), record(3, loss=None)])
    # A step trained again after a resume replaces the first.
    assert run.curve("loss") == ([1, 2], [3.0, 7.0])
    parts = run.time_by_part()
    assert parts["forward"] == pytest.approx(0.2) and parts["backward"] == pytest.approx(0.3)
    assert parts["wait: gather"] == pytest.approx(0.15)
    assert parts["wait: reduce"] == pytest.approx(0.2)
    # A step of rank 0 takes 0.65 s of work and 0.35 s of waits; the phases take 0.9 s of that, one
    # wait is outside.
    assert run.curve("duration") == ([1, 2, 3], [pytest.approx(1.0)] * 3)
    assert parts[REST] == pytest.approx(0.05) and sum(parts.values()) == pytest.approx(1.0)
    assert run.mean_of("bytes") == {"all_gather": 4096, "reduce_scatter": 2 << 20}
    assert run.mean_of("links") == {"network": 1 << 20, "disk read": 512 * 2.5}
    summary = run.summary()
    assert summary["MFU"] == "25.0%" and summary["disk, read a second"] == "1 GiB"
    assert "disk, written a second" not in summary
    assert run.seconds_by_rank() == [(0, pytest.approx(0.65)), (1, pytest.approx(0.9))]
    assert run.summary()["exposed waits"] == "35.0%" and run.summary()["last loss"] == "7"
    sizes = {0: "0", 1023: "1,023 B", 1024: "1 KiB", 3 << 30: "3 GiB", 5 << 50: "5,120 TiB"}
    assert {each: size(each) for each in sizes} == sizes


def test_the_page_of_two_runs_needs_no_network(tmp_path: Path, capsys):
    folders = [
        write(tmp_path / "a", [first(), record(2)]),
        write(tmp_path / "b<i>", [first(stage=1), record(2)]),
    ]
    out = tmp_path / "page.html"
    (tmp_path / "x").mkdir()
    others = [folders[0], write(tmp_path / "x" / "a", [first()])]
    main(["report", *map(str, others), "--out", str(out)])
    assert "<title>a (1) and a (2)</title>" in out.read_text()
    main(["report", *map(str, folders), "--out", str(out)])
    assert capsys.readouterr().out == 2 * f"{out}: open it in a browser\n"
    text = out.read_text()
    assert "1,234" in text
    assert set(map(html.unescape, re.findall("<h2>(.*?)</h2>", text))) >= SECTIONS
    assert text.count("<svg") == len(curves_of(text)) == 4
    assert [line["name"] for line in curves_of(text)[0]] == ["a", "b<i>"]
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"|@import|<script .', text) == []
    assert text.count("<script") == 1
    assert "&lt;script&gt;alert(1)" in text and "b&lt;i&gt;" in text and "b<i>" not in text
    assert '<tr class="differs"><td>zero_optimization.stage</td><td>3</td><td>1</td></tr>' in text


def test_evaluations_and_starts_from_a_checkpoint_are_shown(tmp_path: Path):
    """A Trainer's output folder has the records of json_monitor in it."""
    history = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "eval_loss": 2.5, "eval_runtime": 1.0, "eval_steps_per_second": 2.0},
        {"step": 4, "eval_loss": 1.5, "eval_note": "kept apart"},
    ]
    (tmp_path / "checkpoint-4").mkdir()
    state = json.dumps({"log_history": history})
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text(state)
    folder = write(tmp_path / "logs", [first(), record(2), first() | {"step": 3}, record(4)])
    with (folder / "steps.jsonl").open("a") as out:
        out.write('{"step": 5, "sam')  # cut off, so it is left out
    run = read(folder)
    assert run.metrics() == ["eval_loss"] and run.curve("eval_loss") == ([2, 4], [2.5, 1.5])
    assert run.resumed == [3] and run.summary()["last eval_loss"] == "1.5"
    text = page([run])
    assert [lines[0]["steps"] for lines in curves_of(text)].count([2, 4]) == 1
    assert all(lines[0]["resumed"] == [3] for lines in curves_of(text))


def test_a_run_that_diverged_has_a_page():
    records = [first(), record(2, loss=math.nan), record(3, loss=math.inf)]
    text = page([Run("a", records, [{"step": 2, "eval_loss": math.nan}])])
    assert curves_of(text)[0][0]["values"] == ["3", "nan", "inf"]


def test_all_that_a_run_says_is_escaped():
    """Whoever writes the file may not write the page."""
    bad = "<b>$\\x{\"'"
    start = first()
    start["run"] = {
        "configuration": [{"key": bad, "effective": bad, "effect": bad, "at_default": False}],
        "environment": {bad: bad, "ranks": 2},
        "memory": {bad: {"parameters": 1}},
    }
    start |= {"warnings": [bad, 7], "bytes": {bad: 1}, "links": {bad: 1}, "waits": {bad: 1}}
    text = page([Run(bad, [start])])
    assert "<b>" not in text and text.count("&lt;b&gt;") > 10


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("steps.jsonl", None, "there is no such file"),
        ("steps.jsonl", "", "it contains no steps"),
        ("steps.jsonl", json.dumps(first() | {"step": "<b>"}) + "\n", "line 1: this is not"),
        ("../trainer_state.json", "", "trainer_state.json: this is no record"),
        ("../trainer_state.json", '{"log_history": [1]}', "trainer_state.json: this is no record"),
    ],
)
def test_files_that_are_not_of_a_run_are_refused(name, content, said, tmp_path: Path, capsys):
    folder = write(tmp_path / "logs", [first()])
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    assert_refused(["report", str(folder)], said, capsys)


def test_the_page_does_not_replace_the_record(tmp_path: Path, capsys):
    file = write(tmp_path / "a", [first()]) / "steps.jsonl"
    before = file.read_bytes()
    words = ["report", str(file.parent), "--out", str(file)]
    assert_refused(words, "is the record of the run", capsys)
    assert file.read_bytes() == before


def test_a_run_that_went_on_with_more_ranks_has_a_page():
    ranks = {"slowest": 2, "working_seconds": [0.7, 0.9, 1.1]}
    run = Run("a", [first(), record(2), record(3, ranks=ranks)])
    assert [seconds for _, seconds in run.seconds_by_rank()] == pytest.approx([0.675, 0.9, 1.1])
    assert "rank 2" in page([run])


def browse(file: Path, folder: Path) -> tuple[str, list[str]]:
    """Return the document as the browser has built it, and what it says in its console."""
    options = ["--headless", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    command = [BROWSER, *options, f"--user-data-dir={folder}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:  # no page can do that
        pytest.skip(f"{BROWSER} does not start here: {done.stderr[-300:]}")
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_browser_shows_the_page_without_an_error(tmp_path: Path):
    text = page([Run("a", [first(), record(2)]), Run("b", [first(stage=1), record(2)])])
    file = tmp_path / "page.html"
    # The script writes down how large each line and bar is, after the browser has placed it.
    measure = (
        "document.title = [...document.querySelectorAll('svg, svg>path, .bar i')].map(e => "
        "e.getBoundingClientRect().width).join()"
    )
    file.write_text(text.replace("</body>", f"<script>{measure}</script></body>"), encoding="utf-8")
    built, said = browse(file, tmp_path / "profile")
    assert said == []
    widths = [float(width) for width in re.search("<title>(.*?)</title>", built)[1].split(",")]
    assert len(widths) >= 3 * text.count("<svg") and min(widths) > 5
    file.write_text(text.replace("</body>", "<script>nothing()</script></body>"), encoding="utf-8")
    assert "nothing is not defined" in browse(file, tmp_path / "profile")[1][0]
