"""An exception in any call of a step leaves an engine that can be destroyed, and a model of which
another engine can be made.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import ds_config, noise, start
from tests.processes import run_on
from zero.engine import ZeroEngine

ROOT = os.path.dirname(zero.__file__)
# What runs while an exception is handled, or must not raise.
SPARED = {"__exit__", "__del__", "__repr__", "__str__", "<genexpr>"}
# Between a message's start and the wait for it. Only a signal could raise there, and gloo does not
# recover from a message that nobody waits for.
SPARED |= {"work.py", "watchdog.py"}
# Every call would take minutes.
FIRST, EVERY = 7, 53


class Planted(Exception):
    pass


class Plant:
    """A profile function that raises in the k-th call below `zero/`."""

    def __init__(self, k: int):
        self.left = k

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        names = {code.co_name, os.path.basename(code.co_filename)}
        if event != "call" or names & SPARED or not code.co_filename.startswith(ROOT):
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            raise Planted(f"{code.co_filename}: {code.co_name}")


def step(engine: ZeroEngine, seed: int) -> None:
    engine.backward(engine(noise(seed, 0, 2, 8)).square().mean())
    engine.step()


def made(model: nn.Module, settings: dict) -> ZeroEngine:
    return start(model, ds_config(**settings))[0]


def every_call(rank: int, world_size: int, settings: dict) -> int:
    """Returns the number of exceptions that were planted."""
    planted = 0
    while True:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        model = nn.Sequential(*blocks, nn.Linear(8, 1))
        engine = made(model, settings)
        step(engine, 1)
        plant = Plant(FIRST + planted * EVERY)
        sys.setprofile(plant)
        try:
            step(engine, 2)
        except (Planted, RuntimeError) as error:  # in an exchange it is one of all ranks
            assert "Planted" in f"{type(error).__name__} {error}", error
        finally:
            sys.setprofile(None)
        engine.destroy()
        if plant.left > 0:
            return planted
        planted += 1
        engine = made(model, settings)
        step(engine, 3)
        with zero.GatheredParameters(list(model.parameters())):
            assert all(param.isfinite().all() for param in model.parameters())
        engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 1},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "stage3_param_persistence_threshold": 0},
    ],
    ids=["1", "2-offload", "3"],
)
def test_an_exception_in_any_call_of_a_step(settings: dict, world_size: int):
    assert min(run_on(world_size, every_call, settings)) > 10
