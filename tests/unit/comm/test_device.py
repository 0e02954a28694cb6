"""Which device a rank computes on, and how much memory it has used."""

import pytest
import torch

from zero import device
from zero.comm import world


@pytest.mark.parametrize(
    ("found", "used"),
    [(None, "cpu"), ("cuda:1", "cuda:1"), ("xpu:0", "xpu:0"), ("mps:0", "cpu")],
)
def test_an_accelerator_is_used_if_it_has_collectives(found, used, monkeypatch):
    monkeypatch.setattr(
        world, "accelerator", lambda number: None if found is None else torch.device(found)
    )
    assert world.compute_device() == torch.device(used)


def test_asking_for_room_does_not_forget_the_peak():
    """`room` resets the process's counter, which `offload_optimizer.ratio: auto` does each step."""
    filled = torch.ones(64 << 20, dtype=torch.uint8)
    present = device.memory_in_use(device.CPU)
    del filled
    device.room(device.CPU)
    # The kernel counts some pages late.
    assert device.peak_memory(device.CPU) >= present - (4 << 20)
