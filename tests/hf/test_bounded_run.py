"""`zero trace` of a Trainer on several ranks, which saves before the step that is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests import recorded
from tests.hf.trainer_runs import AUTO, SCRIPTS, write_jobs
from zero.tools.cli import main
from zero.tools.profile import command

Trace = Callable[..., str]


@pytest.fixture
def trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Trace:
    """Trace a step of two ranks, and return what was printed."""
    run = partial(recorded.run, nproc=2, imported="transformers on zero")
    monkeypatch.setattr(command, "run", run)

    def trace(step: int, code: int) -> str:
        config = {"zero_optimization": {"stage": 2}, **AUTO}
        output = {"output_dir": str(tmp_path / "output"), "save_steps": 2}
        arguments = {"deepspeed": config, "max_steps": 4, "use_cpu": True, **output}
        path = write_jobs([{"model": "llama", "arguments": arguments}], tmp_path)
        words = ("--step", step, "--out", tmp_path / "trace.json", SCRIPTS / "jobs.py", path)
        with pytest.raises(SystemExit) as ended:
            main(["trace", *map(str, words)])
        stderr = capsys.readouterr().err
        assert ended.value.code == code, stderr
        assert not list(tmp_path.glob("output/checkpoint-*"))
        return stderr

    return trace


def ranks_in(path: Path) -> set[str]:
    """The ranks of a trace in which something lasted."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    return {names[each["pid"]] for each in events if each.get("dur", 0) > 0}


def test_the_trainer_saves_nothing_and_all_ranks_end(trace: Trace, tmp_path: Path):
    """At stage 2 only rank 0 makes the checkpoint's folder, before the others call the engine."""
    assert "took fewer than 4 optimizer steps" in trace(step=4, code=2)
    trace(step=2, code=0)
    assert ranks_in(tmp_path / "trace.json") == {"rank 0", "rank 1"}
