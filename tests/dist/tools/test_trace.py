"""`zero trace`: one step of all ranks as a trace in which every kind of work has a track, and
events nest.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests import recorded
from tests.dist.tools.test_verify import MODEL
from tests.dist.training import ds_config, start
from tests.processes import REPOSITORY, on_ranks, run_on
from zero.comm.communicator import communicator
from zero.comm.traffic import Operation, set_observer
from zero.tools.cli import main
from zero.tools.profile import command, trace
from zero.tools.profile.trace import TraceRun, merge

WIDTH = 800
STEPS = 4  # in backwards 1, 2, 4, 8... the ranks agree on an order, by a broadcast
WEIGHTS = {f"{number}.0.weight" for number in range(3)}


class Traced(TraceRun):
    def _end(self, *_: object, **__: object) -> None:
        """The process goes on, so that the test gets a result."""


def train(rank: int, world_size: int, folder: Path, device: str = "nvme") -> None:
    layers = (torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(3))
    model = torch.nn.Sequential(*layers)
    place = {"device": device, "nvme_path": str(folder / "nvme")}
    config = ds_config(
        stage3_param_persistence_threshold=0,
        offload_param=place | {"max_in_cpu": 0},
        offload_optimizer=place | {"overlap_step": True},
    )
    engine, _ = start(model, config)
    Traced(engine, folder, STEPS)
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(4, WIDTH, device=engine.comm.device)).sum())
        engine.step()


@on_ranks(2)
def test_every_broadcast_and_the_ranks_of_a_sum_are_told(rank, world_size):
    told: list[tuple[Operation, list[bool]]] = []

    class Recorder:
        def begin(self, operation: Operation) -> Callable[[], None]:
            ended: list[bool] = []
            told.append((operation, ended))
            return lambda: ended.append(True)

    comm = communicator()
    set_observer(Recorder().begin)
    parts = [(src, torch.full((3,), float(rank))) for src in range(world_size)]
    comm.start_broadcasts(parts).wait()
    comm.within(1).all_reduce(torch.ones(1), of_shards=True)
    set_observer(None)
    assert [values.tolist() for _, values in parts] == [[0.0] * 3, [1.0] * 3]
    seen = [(operation.name, operation.ranks, ended) for operation, ended in told]
    assert seen == [*[("broadcast", 2, [True])] * 2, ("all_reduce", 1, [True])]


def assert_nested(events: list[dict]) -> None:
    """Of two events in one track, one contains the other, or they are apart."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    for place, spans in tracks.items():
        outer: list[float] = []
        for begin, minus_duration, name in sorted(spans):
            while outer and outer[-1] <= begin + 1e-3:
                outer.pop()
            end = begin - minus_duration
            assert not outer or end <= outer[-1] + 1e-3, (place, name)
            outer.append(end)


def test_a_step_of_two_ranks(tmp_path: Path):
    run_on(2, train, tmp_path)
    events = json.loads(json.dumps(merge(tmp_path.glob("rank*.json"))))["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for pid in (0, 100):
        found = {name.partition(" (")[0] for (process, _), name in tracks.items() if process == pid}
        assert found >= {"main thread", "messages"}
    of_track = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            track = tracks[event["pid"], event["tid"]].partition(" (")[0]
            of_track[event["pid"], track].append(event["name"])
    names = of_track[0, "main thread"]
    phases = [name for name in names if name in ("forward", "backward", "step")]
    assert phases == ["forward", "backward", "step"]
    assert {f"all-gather of {name}" for name in WEIGHTS} <= {*names}
    assert "aten::addmm" in names
    assert any(name.startswith("wait for ") for name in names)
    threads = [track for process, track in of_track if process == 0 and track.startswith("thread ")]
    in_threads = {name for track in threads for name in of_track[0, track]}
    # Some of the step before may be over when the recording begins, and some of this step may come
    # after its end.
    assert in_threads & {f"update of {name}" for name in WEIGHTS}
    assert {name.partition(",")[0] for name in in_threads} >= {"disk read", "disk written"}
    assert_nested(events)


SCRIPT = f"""{MODEL}
engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(3):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
print("the script is over")
"""


def test_the_command(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    script, out = tmp_path / "script.py", tmp_path / "trace.json.gz"
    script.write_text(SCRIPT)
    code, stdout, stderr = call(capsys, "--step", "3", "--out", str(out), str(script))
    assert "trace: the run: step " in stderr
    assert code == 0 and stdout.startswith(f"{out}: open it")
    assert '"name": "backward"' in gzip.decompress(out.read_bytes()).decode()
    out.unlink()
    monkeypatch.setattr(command, "run", recorded.run)
    code, _, stderr = call(capsys, "--step", "4", "--out", str(out), str(script))
    assert code == 2 and not out.exists()
    assert "took fewer than 4 optimizer steps" in stderr and "the script is over" in stderr


def test_the_allocations_of_a_gpu_are_copied_beside_the_trace(tmp_path: Path, monkeypatch, capsys):
    def run(command: list[str], recorder: str, folder: Path, *rest: object) -> None:
        (folder / "rank0.pickle").write_text("allocations")
        empty = {"baseTimeNanoseconds": 0, "host": "3", "traceEvents": []}
        (folder / "rank0.json").write_text(json.dumps(empty))

    monkeypatch.setattr(command, "run", run)
    (script := tmp_path / "script.py").write_text("")
    code, stdout, _ = call(capsys, "--out", str(tmp_path / "trace.json"), str(script))
    assert (code, (tmp_path / "trace.pickle").read_text()) == (0, "allocations")
    assert f"{tmp_path / 'trace.pickle'}: allocations of rank0" in stdout


def record_a_gpu(rank: int, world_size: int, folder: Path) -> None:
    def dump(file: str) -> None:
        Path(file).write_text("allocations")

    with (
        mock.patch.object(trace, "_has_history", lambda device: True),
        mock.patch.object(torch.cuda.memory, "_record_memory_history") as record,
        mock.patch.object(torch.cuda.memory, "_dump_snapshot", dump),
    ):
        train(rank, world_size, folder, "cpu")
    assert record.call_args_list == [mock.call(stacks="python"), mock.call(enabled=None)]


def test_the_allocations_of_a_gpu_are_recorded(tmp_path: Path):
    run_on(1, record_a_gpu, tmp_path)
    assert (tmp_path / "rank0.pickle").read_text() == "allocations"


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["trace", *arguments])
    return ended.value.code, *capsys.readouterr()


def test_ranks_lie_on_one_clock_and_streams_are_devices(tmp_path: Path):
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 1, "tid": 7, "ts": 2.5, "dur": 1.0}
    flow = {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 1, "tid": 7, "ts": 2.5}
    for rank, begin in ((0, 9_000), (1, 5_000)):
        recorded = {"baseTimeNanoseconds": begin, "host": "3", "traceEvents": [kernel, flow]}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(recorded))
    events = merge(tmp_path.glob("rank*.json"))["traceEvents"]
    assert [(e["pid"], e["ts"]) for e in events if e["ph"] == "X"] == [(2, 6.5), (102, 2.5)]
    assert [e["id"] for e in events if e["ph"] == "f"] == ["0.5", "1.5"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert names == {"rank 0, device 1", "rank 1, device 1", "stream 7"}


def test_messages_in_flight_at_the_same_time_have_tracks(tmp_path: Path):
    sent = [
        {"ph": "X", "name": f"gloo:{name}", "pid": 3, "tid": 3, "ts": start, "dur": end - start}
        for name, start, end in (("a", 0, 9), ("b", 4, 6), ("c", 6, 20))
    ]
    recorded = {"baseTimeNanoseconds": 0, "host": "3", "traceEvents": sent}
    (tmp_path / "rank0.json").write_text(json.dumps(recorded))
    events = merge([tmp_path / "rank0.json"])["traceEvents"]
    assert [(e["name"], e["tid"]) for e in events if e["ph"] == "X"] == [
        ("gloo:a", 0), ("gloo:b", 1), ("gloo:c", 1),
    ]  # fmt: skip
    assert_nested(events)
