"""Checkpoints that earlier versions wrote still load.

`format_2` was written by two ranks at stage 3 in bf16, for the model `Odd`: frozen, tied, scalar
and integer parameters, and a buffer. Here its tensors are read by the safetensors library alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.dist.checkpoint.test_checkpoint import Odd, stored
from tests.dist.training import assert_same_weights, ds_config, start
from tests.processes import run_on

EARLIER = Path(__file__).with_name("format_2")


def as_written() -> dict[str, torch.Tensor]:
    """The flattened tensors of the checkpoint, by key."""
    folder = EARLIER / "global_step2"
    manifest = json.loads((folder / "checkpoint.json").read_text())
    tensors = {}
    for key, entry in manifest["tensors"].items():
        tensors[key] = torch.zeros(entry["numel"], dtype=getattr(torch, entry["dtype"]))
        for first, numel, name, _ in entry["slices"]:
            with safe_open(folder / name, "pt") as file:
                tensors[key][first : first + numel] = file.get_tensor(f"{key}@{first}")
    return tensors


def load_and_save_again(rank: int, world_size: int, folder: str) -> None:
    torch.manual_seed(4)
    engine, _ = start(Odd(), ds_config(bf16={"enabled": True}))
    path, client = engine.load_checkpoint(EARLIER)
    assert path == str(EARLIER / "global_step2") and engine.global_steps == 2
    assert client["epoch"] == 3 and client["pair"] == (1, 2.5)
    assert torch.equal(client[7], torch.ones(2, 2).half())
    engine.save_checkpoint(folder)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_engine_goes_on_from_it(world_size, tmp_path):
    run_on(world_size, load_and_save_again, str(tmp_path))
    assert_same_weights(stored(tmp_path), as_written())
