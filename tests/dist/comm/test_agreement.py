"""Ranks with different settings, models or batches end with an error that names the rank, the key
and both values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import zero
from tests.dist.toys import toy, toy_batches
from tests.dist.training import ds_config, loss_of, start
from tests.processes import Done, fork_ranks, on_ranks, run_on

SGD, ADAM = torch.optim.SGD, torch.optim.AdamW
Options = dict[str, object]
# What differs on rank 1, and what the error says about it.
STEM = "parameter stem.weight: (13, 13) torch.float32 on rank 0, (13, 13) torch.bf"
HEAD = "parameter head.weight: (13, 13) torch.float32 on rank 0, (13, 13) torch.float32 fro"
DIFFERENT: list[tuple[Options, str]] = [
    ({"lr": 0.2}, "param group 0, lr: 0.1 on rank 0, 0.2 on rank 1"),
    ({"weight_decay": 0.5}, "param group 0, weight_decay: 0.0 on rank 0, 0.5 on rank 1"),
    ({"optimizer": ADAM}, "optimizer: SGD on rank 0, AdamW on rank 1"),
    ({"clip": 2.0}, "configuration, gradient_clipping: 0.0 on rank 0, 2.0 on rank 1"),
    ({"stage": 2}, "configuration, zero_optimization.stage: 3 on rank 0, 2 on rank 1"),
    ({"blocks": 3}, "blocks.3.up.weight: (39, 13) torch.float32 on rank 0, missing on rank 1"),
    ({"dtype": torch.bfloat16}, STEM),
    ({"frozen": True}, HEAD),
]


def start_with(
    optimizer: Callable = SGD,
    lr: float = 0.1,
    weight_decay: float = 0.0,
    clip: float = 0.0,
    stage: int = 3,
    blocks: int = 4,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
) -> zero.ZeroEngine:
    model = toy(blocks=blocks).to(dtype)
    model.head.requires_grad_(not frozen)
    make = partial(optimizer, lr=lr, weight_decay=weight_decay)
    return start(model, ds_config(clip=clip, stage=stage), make=make)[0]


@on_ranks(2)
def test_a_difference_is_named_by_initialize(rank, world_size):
    for options, says in DIFFERENT:
        with pytest.raises(ValueError, match="the ranks disagree") as raised:
            start_with(**options if rank == 1 else {})
        assert says in str(raised.value)


@on_ranks(2)
def test_another_width_is_named_while_the_model_is_built(rank, world_size):
    says = r"weight of a Linear: \(4, 4\) torch.float32 on rank 0, \(5, 4\) torch.float32 on rank 1"
    with pytest.raises(ValueError, match=says), zero.Init():
        torch.nn.Sequential(torch.nn.Linear(4, 4 + rank), torch.nn.Linear(4 + rank, 1))


def stepping(rank: int, world_size: int, stage: int, freezes: bool) -> str:
    """The learning rate or what is frozen differs on the last rank, and the step is refused."""
    engine = start_with(stage=stage)
    collectives = []
    for number, batch in enumerate(toy_batches(3)):
        if number == 2 and rank == world_size - 1:
            if freezes:
                engine.module.head.weight.requires_grad_(False)
            else:
                engine.optimizer.param_groups[0]["lr"] *= 1 + 1e-6
        engine.backward(loss_of(engine(**batch)))
        if number == 2:
            with pytest.raises(ValueError, match="the ranks disagree") as raised:
                engine.step()
        else:
            before = engine.comm.calls["all_reduce"], engine.comm._channel.count
            engine.step()
            after = engine.comm.calls["all_reduce"], engine.comm._channel.count
            collectives.append([now - then for now, then in zip(after, before, strict=True)])
    assert collectives == [[stage > 0, 1]] * 2, "one norm and one record"
    return str(raised.value)


LR = "param group 0, lr: 0.1 on rank 0, 0.1000001"
FROZEN = "frozen parameters: none on rank 0, head.weight"


@pytest.mark.parametrize(
    ("stage", "world_size", "says"),
    [(0, 2, LR), (2, 3, LR), (3, 2, LR), (0, 2, FROZEN), (3, 3, FROZEN)],
)
def test_another_learning_rate_or_frozen_parameter_is_named(stage, world_size, says):
    for message in run_on(world_size, stepping, stage, says is FROZEN):
        assert f"{says} on rank {world_size - 1}" in message


class Scaled(torch.nn.Linear):
    """A layer with a scale of one element, which is alone in its param group and group.

    Rank 1 has no part of it.
    """

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_a_rank_without_a_part_of_a_group_agrees(rank, world_size, stage):
    model = Scaled()
    groups = [{"params": [model.weight, model.bias]}, {"params": [model.scale]}]
    config = ds_config(stage=stage, stage3_param_persistence_threshold=0)
    engine, _ = start(model, config, lambda _: groups, partial(SGD, lr=0.1))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    assert engine.was_step_applied()


HEADER = """
import os, sys, time, zero
from tests.dist.comm.test_agreement import start_with
from tests.dist.toys import toy, toy_batches
from zero.comm import watchdog
zero.comm.world.init_distributed()
"""


def run_script(folder: Path, script: str, *words: str, **env: str) -> Done:
    path = folder / "script.py"
    path.write_text(HEADER + script)
    return fork_ranks(path, *words, nproc=2, timeout=120, imported="zero", cwd=folder, env=env)


UNEVEN = """
engine = start_with()
for batch in toy_batches(2 + engine.global_rank):
    engine.backward(engine(**batch))
    engine.step()
"""


DYING = """
engine = start_with()
if engine.global_rank == 1:
    os._exit(0)
engine.save_checkpoint("saved")
"""


def test_a_rank_that_died_before_the_first_save_is_noticed(tmp_path):
    done = run_script(tmp_path, DYING)
    assert done.returncode == 1
    assert "rank 0 lost the connection while it waited at saving a checkpoint" in done.stderr
    assert "another rank has died" in done.stderr, done.stderr


LONE_SAVE = """
watchdog.APART, zero.comm.control.LONE = 0.5, 0.1
engine = start_with()
if engine.global_rank == 0:
    if sys.argv[1] == "late":
        time.sleep(6)
    else:
        engine.save_checkpoint("saved")
if sys.argv[1] == "barrier":
    zero.comm.world.dist.barrier()
for batch in toy_batches(2):
    engine.backward(engine(**batch))
    engine.step()
print("trained")
"""


@pytest.mark.parametrize("others", ["train", "barrier"])
def test_a_job_ends_soon_in_which_rank_0_saves_alone(others, tmp_path):
    done = run_script(tmp_path, LONE_SAVE, others)
    assert done.returncode == 1
    early, last = done.stderr.split("zero: ranks wait for each other: at different places")
    place = "group" if others == "train" else "torch.distributed.barrier"
    assert "rank 0 at saving a checkpoint" in early and f"rank 1 at {place}" in early
    assert "rank 0 has waited" in last and "must save, load" in last
    assert re.search("saving a checkpoint to .*saved: rank 0 has been waiting", early), early


def test_a_rank_that_does_something_else_is_waited_for(tmp_path):
    done = run_script(tmp_path, LONE_SAVE, "late")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2 and "places" not in done.stderr


def test_uneven_numbers_of_batches_are_named(tmp_path):
    done = run_script(tmp_path, UNEVEN)
    assert done.returncode == 1
    assert "rank 1 lost the connection while it waited at group" in done.stderr
    assert "rank 0 has ended its work" in done.stderr and "same number of batches" in done.stderr


LONE_LOAD = """
watchdog.LONE = 1.0
if sys.argv[1] == "second model":
    zero.comm.communicator.communicator()
if zero.comm.world.dist.get_rank() == 0:
    with zero.Init():
        toy()
"""


@pytest.mark.parametrize("which", ["first model", "second model"])
def test_a_model_that_rank_0_loads_alone_is_named(which, tmp_path):
    done = run_script(tmp_path, LONE_LOAD, which, DEEPSPEED_TIMEOUT="0.1")
    assert done.returncode == 1
    assert "all ranks must create and load the model" in done.stderr, done.stderr
    assert "number of batches" not in done.stderr
    if which == "first model":
        assert "rank 0 has been waiting for the other ranks" in done.stderr
