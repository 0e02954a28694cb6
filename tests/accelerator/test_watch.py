"""`zero trace` beside an accelerator: copies on a track of their own."""

from __future__ import annotations

from pathlib import Path

from tests.dist.tools import test_trace
from tests.processes import run_on
from zero.tools.profile.trace import merge


def test_trace_of_a_device(tmp_path: Path):
    run_on(2, test_trace.train, tmp_path, "cpu", simulated=True)
    events = merge(tmp_path.glob("rank*.json"))["traceEvents"]
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert {"main thread", "messages"} <= {*threads}
    test_trace.assert_nested(events)
