"""Which device a rank computes on."""

from unittest import mock

import pytest
import torch

from tests.processes import run_on
from zero import comm


@pytest.mark.parametrize(
    ("found", "used"),
    [(None, "cpu"), ("cuda:1", "cuda:1"), ("xpu:0", "xpu:0"), ("mps:0", "cpu")],
)
def test_an_accelerator_is_used_if_it_has_collectives(found, used, monkeypatch):
    monkeypatch.setattr(comm, "accelerator", lambda number: None if found is None else torch.device(found))
    assert comm.compute_device() == torch.device(used)


def on_apple(rank: int, world_size: int) -> list[str]:
    texts: list[str] = []
    with mock.patch.object(comm, "accelerator", lambda number=0: torch.device("mps", 0)):
        with mock.patch.object(comm.logger, "warning", lambda text, *values: texts.append(text % values)):
            assert comm.communicator().device == torch.device("cpu")
    return texts


def test_an_accelerator_that_cannot_be_used_is_named_once():
    assert run_on(1, on_apple) == [["torch has no collectives for mps:0: the engine computes on the CPU"]]
