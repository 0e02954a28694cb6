"""`offload_states` and `reload_states`: everything moves, and training goes on with the same
bits.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import ds_config, noise, start
from tests.processes import on_ranks, run_on
from zero.errors import UsageError
from zero.integrations.deepspeed.utilities import OffloadDeviceEnum, OffloadStateTypeEnum

WIDTH, ROWS = 16, 4
BF16 = {"bf16": {"enabled": True}}


def engine_of(stage: int, **sections: object) -> zero.ZeroEngine:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    options = {"stage": stage, "stage3_param_persistence_threshold": 2} | sections
    return start(model, ds_config(accumulation=2, **options))[0]


def places(engine: zero.ZeroEngine) -> dict[str, list[int]]:
    """Return the memory addresses of each kind of state."""
    groups, found = list(engine.optimizer.shards), {}
    found["lp_params"] = [
        (group.full if group.persistent else group.shard).data_ptr() for group in groups
    ]
    shards = engine.optimizer.shards.values()
    found["hp_params"] = [shard.master.data_ptr() for shard in shards if not shard.shares_weights]
    waiting = [engine.reducer.gradients[group].carried for group in groups]
    held = [*(shard.grad for shard in shards), *waiting]
    found["lp_grads"] = [grad.data_ptr() for grad in held if grad is not None]
    found["optim_states"] = [
        state["exp_avg"].data_ptr() for state in engine.optimizer.state.values() if state
    ]
    return found


def train(
    rank: int, world_size: int, stage: int, moves: bool, sections: dict, names: list | None
) -> list[float]:
    engine, losses = engine_of(stage, **sections), []
    for step in range(6):
        batch = noise(step, rank, ROWS, WIDTH)
        loss = engine(batch.to(engine.groups[0].dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if not moves:
            continue
        before = places(engine)  # in the middle of an accumulation, and after its end
        engine.offload_states(names, OffloadDeviceEnum.cpu)
        away = places(engine)
        for kind, addresses in before.items():
            moved = names is None or kind in names
            # Compare each tensor with itself: one tensor may move to memory that another one has
            # left.
            same = [there == here for here, there in zip(addresses, away[kind], strict=True)]
            assert (not any(same)) if moved else all(same), kind
        with pytest.raises(UsageError, match="reload_states"):
            engine(batch)
        engine.reload_states()
        assert engine.micro_batches.offloaded == set()
    return losses


@pytest.mark.parametrize(
    ("stage", "sections", "names"),
    [
        (1, BF16, None),
        (2, {}, None),
        (3, BF16, None),
        (3, {}, None),
        (3, BF16 | {"elementwise_optimizer": False}, None),  # by whole tensors
        (3, BF16, [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]),
        (0, BF16, ["lp_params"]),
    ],
)
def test_states_go_and_come_back(stage, sections, names):
    runs = [run_on(2, train, stage, moves, sections, names) for moves in (True, False)]
    assert runs[0] == runs[1]


@on_ranks(2)
def test_what_cannot_be_offloaded(rank, world_size):
    engine = engine_of(3)
    with pytest.raises(UsageError, match="'moments' is none of"):
        engine.offload_states(["moments"])
    with pytest.raises(UsageError, match="'nvme'"):
        engine.offload_states(device="nvme")
    engine.offload_states(device=OffloadDeviceEnum.none)
    assert engine.micro_batches.offloaded == set()
    with (
        zero.GatheredParameters(list(engine.parameters())),
        pytest.raises(UsageError, match="is gathered by"),
    ):
        engine.offload_states()
