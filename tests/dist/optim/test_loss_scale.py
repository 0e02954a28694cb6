"""fp16: how the loss scale reacts to overflows.

All ranks react alike when one of them overflows. The sequences of scales are in
`tests/unit/optim/test_loss_scaler.py`."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import zero
from tests.dist.toys import toy, toy_batches
from tests.dist.training import LR, ds_config, split, start, step
from tests.processes import on_ranks
from zero.config import load_config
from zero.optim.loss_scaler import LossScaler
from zero.optim.sharded_optimizer import NonFiniteGradientError

SHARDED, PERSISTENT = "blocks.1.down.weight", "blocks.0.norm.weight"
SEVERAL = ("blocks.2.norm.bias", SHARDED, "blocks.3.up.weight")
AT_MINIMUM = "(?s)'blocks.1.down.weight'.*minimum loss scale 1.*bf16"


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("events", "fp16", "broken", "says"),
    [
        (
            "x.xx.....",
            {"initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 2},
            (SHARDED,),
            "",
        ),
        ("x.x", {"loss_scale": 64}, (SHARDED,), ""),
        (".x", {"initial_scale_power": 0, "hysteresis": 1}, SEVERAL, AT_MINIMUM),
        ("x.xx.xxx", {}, (PERSISTENT,), "3 steps in a row"),
    ],
)
@on_ranks()
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    rank, world_size, events, fp16, broken, says
):
    """At "x", gradients of the `broken` parameters are infinite on the last rank. `says`: the error
    in the last step, if there is one."""
    fp16 = {"enabled": bool(fp16), **fp16}
    warmup = {"warmup_min_lr": LR / 2, "warmup_max_lr": LR, "warmup_num_steps": 100}
    config = ds_config(
        fp16=fp16,
        optimizer={"type": "AdamW", "params": {"lr": LR}},
        scheduler={"type": "WarmupLR", "params": warmup},
        stage3_param_persistence_threshold=30,
    )
    model, scaler = toy(), LossScaler(load_config({"fp16": fp16}).fp16)
    engine, optimizer, _, scheduler = zero.initialize(model=model, config=config)
    masters = [shard.master for shard in engine.optimizer.shards.values()]
    for number, batch in enumerate(toy_batches(len(events))):
        overflows, handles = events[number] == "x", []
        for name in broken if overflows and rank == world_size - 1 else ():
            param = model.get_parameter(name)
            handles.append(param.register_hook(lambda grad: grad * float("inf")))
        before = [master.clone() for master in masters]
        ends = says and number == len(events) - 1
        with pytest.raises(NonFiniteGradientError, match=says) if ends else nullcontext():
            loss = engine(**split(batch, world_size)[rank])
            assert torch.equal(engine.backward(loss), loss), "the scale shows in the loss"
            engine.step()
        for handle in handles:
            handle.remove()
        scaler.update(overflows)
        assert optimizer.loss_scale == (scaler.scale if fp16["enabled"] else 1.0)
        assert optimizer.overflow == overflows == all(map(torch.equal, before, masters))
    assert says or engine.skipped_steps == events.count("x")
    assert scheduler.last_batch_iteration == events.count(".") - 1, "the learning rate waits"
    assert all(bool(master.isfinite().all()) for master in masters)


@on_ranks(1)
def test_a_step_with_overflow_is_taken_where_it_is_asked_for(rank, world_size):
    model = toy()
    engine, _ = start(model, ds_config(bf16={"enabled": True, "check_grad_overflow": False}))
    handle = model.blocks[1].down.weight.register_hook(lambda grad: grad * float("inf"))
    step(engine, toy_batches(1))
    handle.remove()
    assert engine.skipped_steps == 0
    assert not all(each.master.isfinite().all() for each in engine.optimizer.shards.values())
