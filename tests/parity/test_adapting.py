"""`"on_out_of_memory": "adapt"`: a backward that was interrupted does not count.
`tests/hunt/splits.py` plants memory errors.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.dist.training import ds_config, start
from tests.parity.models import build
from tests.processes import run_on


class Interrupted(torch.autograd.Function):
    """An error, or Ctrl-C, in the script's own part of a backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def left_out(rank: int, world_size: int, act: str) -> float:
    engine, _ = start(build("gpt2"), ds_config(stage=1, on_out_of_memory=act))
    ids = torch.arange(3, 15)[None]
    for added in (Interrupted.apply(torch.zeros((), requires_grad=True)), 0.0):
        try:
            engine.backward(engine(input_ids=ids, labels=ids).loss + added)
        except KeyboardInterrupt:
            engine.zero_grad()
    engine.step()
    return engine.get_global_grad_norm()


def test_a_backward_that_was_interrupted_does_not_count():
    assert run_on(1, left_out, "adapt") == run_on(1, left_out, "explain")
