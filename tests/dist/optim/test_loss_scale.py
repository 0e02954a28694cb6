"""fp16: how the loss scale reacts to overflows.

All ranks react alike when one of them overflows.
"""

from __future__ import annotations

import pytest
import torch

import zero
from tests.dist.toys import toy, toy_batches
from tests.dist.training import LR, ds_config, split, start, step
from tests.processes import on_ranks, run_on
from zero.config import load_config
from zero.optim.loss_scaler import LossScaler
from zero.optim.sharded_optimizer import NonFiniteGradientError


def play(rank: int, world_size: int, events: str, fp16: dict, broken: tuple[str, ...]) -> dict:
    """Take one step for each letter.

    At "x", gradients of the `broken` parameters are infinite on the last rank.
    """
    model = toy()
    warmup = {"warmup_min_lr": LR / 2, "warmup_max_lr": LR, "warmup_num_steps": 100}
    config = ds_config(
        fp16={"enabled": True, **fp16} if fp16 else {"enabled": False},
        optimizer={"type": "AdamW", "params": {"lr": LR}},
        scheduler={"type": "WarmupLR", "params": warmup | {"warmup_type": "linear"}},
        stage3_param_persistence_threshold=30,
    )
    engine, _, _, scheduler = zero.initialize(model=model, config=config)
    masters = [shard.master for shard in engine.optimizer.shards.values()]
    names = dict(model.named_parameters())
    found = {"scales": [], "changed": [], "overflow": [], "error": None}
    for event, batch in zip(events, toy_batches(len(events)), strict=True):
        handles = []
        for name in broken if event == "x" and rank == world_size - 1 else ():
            handles.append(names[name].register_hook(lambda grad: grad * float("inf")))
        before = [master.clone() for master in masters]
        try:
            loss = engine(**split(batch, world_size)[rank])
            assert torch.equal(engine.backward(loss), loss), "the scale shows in the loss"
            engine.step()
        except NonFiniteGradientError as error:
            found["error"] = str(error)
        for handle in handles:
            handle.remove()
        found["scales"].append(engine.optimizer.loss_scale)
        found["overflow"].append(engine.optimizer.overflow)
        found["changed"].append(not all(map(torch.equal, before, masters)))
    found["skipped"] = engine.skipped_steps
    found["lr"] = scheduler.get_last_lr()[0]
    found["finite"] = all(bool(master.isfinite().all()) for master in masters)
    return found


def played(
    world_size: int, events: str, fp16: dict, broken: tuple[str, ...] = ("blocks.1.down.weight",)
) -> list[dict]:
    ranks = run_on(world_size, play, events, fp16, broken)
    for found in ranks:
        assert found["scales"] == ranks[0]["scales"], "ranks scale differently"
        assert found["finite"]
    return ranks


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("events", "fp16"),
    [
        ("x.xx.....", {"initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 3}),
        ("x.x", {"loss_scale": 64}),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(events, fp16, world_size):
    scaler = LossScaler(load_config({"fp16": {"enabled": True, **fp16}}).fp16)
    expected = []
    for event in events:
        scaler.update(event == "x")
        expected.append(scaler.scale)
    overflow = [event == "x" for event in events]
    for found in played(world_size, events, fp16):
        assert found["scales"] == expected
        assert found["overflow"] == overflow
        assert found["changed"] == [not one for one in overflow]
        assert found["skipped"] == sum(overflow) and found["error"] is None


def test_the_learning_rate_waits_where_the_step_is_skipped():
    rates = {
        events: played(2, events, {"initial_scale_power": 8})[0]["lr"]
        for events in ("..", ".xx.", "....")
    }
    assert rates[".."] == rates[".xx."] < rates["...."]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_overflow_at_the_minimum_names_the_first_broken_parameter_on_every_rank(world_size):
    fp16 = {"initial_scale_power": 0, "hysteresis": 1}
    broken = ("blocks.2.norm.bias", "blocks.1.down.weight", "blocks.3.up.weight")
    for found in played(world_size, ".x", fp16, broken):
        assert "'blocks.1.down.weight'" in found["error"]
        assert "minimum loss scale 1" in found["error"] and "bf16" in found["error"]
        assert found["changed"] == [True, False]


def test_without_loss_scaling_three_skipped_steps_in_a_row_end_the_run():
    """The gradient is one of a persistent parameter."""
    for found in played(2, "x.xx.xxx", {}, ("blocks.0.norm.weight",)):
        assert found["overflow"] == [True, False, True, True, False, True, True, True]
        assert found["changed"] == [not each for each in found["overflow"]]
        assert set(found["scales"]) == {1.0} and "3 steps in a row" in found["error"]


@on_ranks(1)
def test_a_step_with_overflow_is_taken_where_it_is_asked_for(rank, world_size):
    model = toy()
    engine, _ = start(model, ds_config(bf16={"enabled": True, "check_grad_overflow": False}))
    handle = model.blocks[1].down.weight.register_hook(lambda grad: grad * float("inf"))
    step(engine, toy_batches(1))
    handle.remove()
    assert engine.skipped_steps == 0
    assert not all(each.master.isfinite().all() for each in engine.optimizer.shards.values())
