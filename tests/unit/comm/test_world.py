"""What is asked of a default process group that the script has made, and the variables of a process
without a launcher.
"""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from zero.comm import world


class PythonGroup(dist.ProcessGroup):
    """As torchft's: a subclass in Python, which names no device."""

    def __init__(self) -> None:
        super().__init__(0, 1)


def test_a_group_in_python_has_the_default_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "7")
    monkeypatch.setattr(world.dist, "group", SimpleNamespace(WORLD=PythonGroup()))
    assert world.group_timeout() == timedelta(minutes=7)


def test_a_process_alone_has_a_port_that_a_launcher_it_starts_can_use(monkeypatch):
    """`llamafactory-cli` gives it to torchrun."""
    monkeypatch.setattr(os, "environ", {"RANK": "0"})
    assert world.become_world_of_one() == ["LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    assert int(os.environ["MASTER_PORT"]) > 0
