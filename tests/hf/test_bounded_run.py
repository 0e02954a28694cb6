"""`zero trace` of a Trainer on two ranks, which saves before the step that is asked for."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests import recorded
from tests.hf.trainer_runs import AUTO, SCRIPTS, write_jobs
from zero.tools.cli import main
from zero.tools.profile import command


@pytest.mark.parametrize(("step", "code"), [(4, 2), (2, 0)])
def test_the_trainer_saves_nothing_and_all_ranks_end(step, code, tmp_path, monkeypatch, capsys):
    """At stage 2 only rank 0 makes the checkpoint's folder, before the others call the engine."""
    run = partial(recorded.run, nproc=2, imported="transformers on zero")
    monkeypatch.setattr(command, "run", run)
    output = {"output_dir": str(tmp_path / "output"), "save_steps": 2, "max_steps": 4}
    arguments = {"deepspeed": {"zero_optimization": {"stage": 2}, **AUTO}, "use_cpu": True}
    path = write_jobs([{"model": "llama", "arguments": arguments | output}], tmp_path)
    trace = tmp_path / "trace.json"
    with pytest.raises(SystemExit) as ended:
        main(["trace", "--step", str(step), "--out", str(trace), f"{SCRIPTS}/jobs.py", str(path)])
    stderr = capsys.readouterr().err
    assert ended.value.code == code and not list(tmp_path.glob("output/checkpoint-*")), stderr
    if code:
        assert "took fewer than 4 optimizer steps" in stderr
    else:
        events = json.loads(Path(trace).read_text(encoding="utf-8"))["traceEvents"]
        busy = {each["pid"] for each in events if each.get("dur", 0) > 0}
        names = [each for each in events if each["name"] == "process_name" and each["pid"] in busy]
        assert {each["args"]["name"] for each in names} == {"rank 0", "rank 1"}
