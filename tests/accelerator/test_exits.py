"""A process whose last update or save is slow ends without an error, whichever way its script ends:
no thread is left for the interpreter to stop.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.accelerator.exits import CASES
from tests.accelerator.test_offload import ON_GPU
from tests.processes import run
from zero.checkpoint.folder import find_intact

SCRIPT = Path(__file__).with_name("exits.py")
# torch's own report of an interrupt may keep Python from ending by the signal.
CODES = {"exception": {1}, "Ctrl-C": {1, -signal.SIGINT}}


@pytest.mark.parametrize(
    ("device", "ranks"),
    [("cpu", 2), ("simulated", 1), pytest.param("gpu", 1, marks=ON_GPU)],
)
def test_no_thread_is_left_at_the_end(tmp_path, device, ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env = {"CUDA_VISIBLE_DEVICES": gpu} if device == "gpu" else {}
    command = [sys.executable, SCRIPT, tmp_path, device, str(ranks), str(store.port)]
    done = run(command, timeout=280, env=env)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[0])
    assert len(codes) == len(CASES) * ranks
    for rank, code in codes.items():
        name, said = rank.rpartition(" ")[0], (tmp_path / f"{rank}.err").read_text()
        way, saves, _ = CASES[name]
        assert code in CODES.get(way, {0}), (rank, said)
        assert "terminate called" not in said and "Fatal Python error" not in said, rank
        assert "0 threads alive" in (tmp_path / f"{rank}.out").read_text(), (rank, said)
        assert not saves or find_intact(tmp_path / name) is not None, (rank, said)
