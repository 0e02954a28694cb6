"""`zero launch` on hosts with networks of their own: real ssh, addresses, limited links, and a link
that breaks.

Each host's name is 127.0.1.1 for itself, as on Debian, and each has a `docker0` that leads nowhere.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.hosts import PORT, Host, hosts, why_not
from tests.processes import child_environment, fork_ranks, kill_tree
from tests.tolerance import rounding

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(420),
]

STEPS, CUT = 7, 5
WIDTH, ROWS = 16, 12
TERMS = 6 * WIDTH + ROWS
# The global batch is the same on any number of ranks: accumulation follows. A checkpoint is made
# after steps 2, 4, 6. Where there is a file `cut`, the job waits after step CUT until that file is
# gone.
SCRIPT = f"""
import os, sys, time
from pathlib import Path
os.environ["CUDA_VISIBLE_DEVICES"] = ""
folder = Path(sys.argv[1])
log = os.open(folder / (os.uname().nodename + ".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 2)
import torch, zero, zero.comm.watchdog

zero.comm.watchdog.GRACE = 2.0
config = {{
    "train_batch_size": {ROWS},
    "train_micro_batch_size_per_gpu": 2,
    "watchdog_timeout": 10,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01}}}},
    "zero_optimization": {{"stage": 3, "stage3_param_persistence_threshold": 0}},
}}
torch.manual_seed(0)
first, last = torch.nn.Linear({WIDTH}, {WIDTH}), torch.nn.Linear({WIDTH}, 1)
model = torch.nn.Sequential(first, torch.nn.Tanh(), last)
engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=config)
rank, ranks, parts = engine.global_rank, engine.world_size, engine.gradient_accumulation_steps()
if (folder / "latest").exists():
    engine.load_checkpoint(folder)
text = f"rank {{rank}} of {{ranks}}: {{parts}} micro-batches, after step {{engine.global_steps}}"
print(text, flush=True)
while engine.global_steps < {STEPS}:
    generator = torch.Generator().manual_seed(engine.global_steps)
    rows = torch.randn({ROWS}, {WIDTH}, generator=generator).chunk({ROWS} // 2)
    total = torch.zeros(())
    for part in range(parts):
        own = rows[part * ranks + rank]
        loss = (engine(own) - own.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    torch.distributed.all_reduce(total)
    if rank == 0:
        print(f"step {{engine.global_steps}}: {{total.item() / len(rows)!r}}", flush=True)
    if engine.global_steps % 2 == 0:
        engine.save_checkpoint(folder)
    if engine.global_steps == {CUT} and (folder / "cut").exists():
        (folder / f"reached{{rank}}").touch()
        while (folder / "cut").exists():
            time.sleep(0.1)
"""


@contextlib.contextmanager
def job(on: Host, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`zero launch` of the script on a host. Its lines go to the file `out`."""
    launch = [sys.executable, "-m", "zero", "launch", "--hostfile", folder / "hosts"]
    words = [*launch, "--ssh_port", str(PORT), "--no_local_rank", *options]
    with open(folder / "out", "w") as out:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        command = on.command(*words, folder / "script.py", folder)
        started = subprocess.Popen(command, env=child_environment(), **pipes)
    try:
        yield started
    finally:
        kill_tree(started.pid)
        started.wait()


def until(condition: Callable[[], bool], folder: Path, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (folder / "out").read_text()
        time.sleep(0.1)


def cut(host: Host, folder: Path, ranks: int) -> None:
    """Pull the cable of a host after step CUT."""
    until(lambda: all((folder / f"reached{rank}").exists() for rank in range(ranks)), folder)
    host.set_link("down")
    (folder / "cut").unlink()


def losses(text: str) -> dict[int, float]:
    """By step; of a step that was made twice, the later one."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): (\S+)", text)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the job.

    A file in it gives torchrun on all hosts shorter times than its own, 15 and 30 seconds.
    """
    monkeypatch.chdir(tmp_path)
    times = {"keep_alive_interval": 2, "keep_alive_max_attempt": 3, "last_call_timeout": 5}
    settings = ",".join(f"{name}={seconds}" for name, seconds in times.items())
    (tmp_path / ".deepspeed_env").write_text(f"PET_RDZV_CONF={settings}\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("node0 slots=2\nnode1 slots=1\nnode2 slots=1\n")
    (tmp_path / "cut").touch()
    return tmp_path


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "script.py").write_text(SCRIPT)
    done = fork_ranks(folder / "script.py", folder, nproc=1, timeout=60, imported="zero")
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(done.stdout)


def test_a_broken_link_ends_the_job_on_both_sides(folder: Path, alone: dict[int, float]):
    with hosts(2, folder, rate="200mbit") as (first, second):
        with job(first, folder, "--exclude", "node0:1@node2") as started:
            cut(second, folder, ranks=2)
            assert started.wait(timeout=120) == 1
        until(lambda: "torch.distributed.run" not in processes(second), folder)
    lines = (folder / "out").read_text().splitlines()
    for rank in (0, 1):
        assert f"[node{rank}] [default0]:rank {rank} of 2: 3 micro-batches, after step 0" in lines
    assert "zero launch: node0 ended with code 1" in lines
    found = losses("\n".join(line for line in lines if line.startswith("[node0] [default0]:")))
    expected = [alone[step] for step in range(1, CUT + 1)]
    assert list(found.values()) == pytest.approx(expected, rel=rounding_of(CUT))
    assert "rank 1 does not answer" in (folder / "node0.log").read_text()
    log = (folder / "node1.log").read_text()
    assert "[rank 1] ranks wait for each other, and the machine of rank 0" in log


def test_an_elastic_job_goes_on_without_a_lost_host(folder: Path, alone: dict[int, float]):
    options = "--num_gpus 1 --elastic_training --min_elastic_nodes 2".split()
    with (
        hosts(3, folder, rate="200mbit") as (first, _, third),
        job(first, folder, *options) as started,
    ):
        cut(third, folder, ranks=3)
        third.kill()
        assert started.wait(timeout=250) == 0, (folder / "out").read_text()
    text = (folder / "out").read_text()
    assert "rank 2 of 3: 2 micro-batches, after step 0" in text
    assert "rank 1 of 2: 3 micro-batches, after step 4" in text
    assert "zero launch: node2 ended with code 255" in text
    assert losses(text) == pytest.approx(alone, rel=rounding_of(STEPS))


def processes(host: Host) -> str:
    command = host.command("ps", "ax")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def rounding_of(steps: int) -> float:
    return rounding(torch.float32, TERMS, steps)
