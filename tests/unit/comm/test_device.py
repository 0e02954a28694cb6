"""Which device a rank computes on, and how much memory it has used."""

import pytest
import torch

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
