"""zero.GatheredParameters: reading and writing sharded values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero
from tests.dist.toys import gathered, recorded, toy, toy_batches
from tests.dist.training import (
    ds_config,
    loss_of,
    start,
    step,
    weights_of,
)
from tests.processes import on_ranks, run_on
from zero.core.param_group import ParamGroup
from zero.core.sharded_param import ShardedParameter
from zero.errors import UsageError
from zero.fragments import safe_get_full_fp32_param
from zero.offload import tiers

SOME_PERSISTENT = ds_config(stage3_param_persistence_threshold=30)


@on_ranks(2)
def test_reading(rank, world_size):
    true, model = weights_of(toy()), toy()
    engine, _ = start(model, SOME_PERSISTENT)

    def shows(*names: str) -> bool:
        return all(torch.equal(model.get_parameter(name), true[name]) for name in names)

    with zero.GatheredParameters(model):
        assert shows(*true)
    with zero.GatheredParameters(model.head.weight):
        assert shows("head.weight") and isinstance(model.stem.weight, ShardedParameter)
    with zero.GatheredParameters(iter([model.blocks[0].up.weight, nn.Parameter(torch.ones(3))])):
        assert shows("blocks.0.up.weight")
        with zero.GatheredParameters(model.blocks[0].parameters()):
            assert shows("blocks.0.down.weight")
        assert shows("blocks.0.up.weight")
    with zero.GatheredParameters(model.parameters(), enabled=False):
        assert isinstance(model.head.weight, ShardedParameter)
    with zero.GatheredParameters([]):
        pass
    with torch.no_grad(), zero.GatheredParameters(model.head.weight):
        model.head.weight.zero_()
    with zero.GatheredParameters(model.head.weight):
        assert shows("head.weight"), "a change without a modifier rank is discarded"
    assert engine.residency.live == gathered(engine) == 0


@on_ranks(2)
def test_all_ranks_gather_in_one_order_whatever_that_of_the_argument(rank, world_size):
    """A set of parameters, and a list of them, which has another order on each rank."""
    model, found = toy(), []
    start(model, SOME_PERSISTENT)
    params = list(model.parameters())[:: -1 if rank else 1]
    for given in (set(params), params):
        with recorded(ParamGroup, "all_gather") as events, zero.GatheredParameters(given):
            found.append([group.name for _, group in events])
    order = ["stem.weight", *(f"blocks.{i}" for i in range(4)), "head.weight"]
    assert found == [order, order]


@on_ranks(2)
def test_a_step_while_values_are_shown_is_refused_and_can_be_made_after(rank, world_size):
    engine, _ = start(toy(), SOME_PERSISTENT)
    engine.backward(loss_of(engine(**toy_batches(1)[0])))
    refused = pytest.raises(ValueError, match="group 'head.weight' .* leave that context before")
    with zero.GatheredParameters(engine.module.head.weight), refused:
        engine.step()
    engine.step()
    assert [engine.global_steps, gathered(engine)] == [1, 0]


def doubled(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)


def masters_beside_a_write(rank: int, world_size: int, folder: str) -> dict[str, list[str]]:
    """By place of the masters: the parameters whose fp32 values a write after a step left wrong."""
    tiers.LEAST_BYTES_IN_A_FILE = 1
    places = {
        "none": {},
        "cpu": {"overlap_step": True},
        "nvme": {"nvme_path": folder, "overlap_step": True},
    }
    found = {}
    for device, options in places.items():
        sections = {"offload_optimizer": {"device": device, **options}, "bf16": {"enabled": True}}
        values = []
        for writes in (False, True):
            model = toy()
            engine, _ = start(model, ds_config(stage3_param_persistence_threshold=30, **sections))
            step(engine, toy_batches(1))
            # Of a sharded and a persistent group.
            written = model.blocks[1].up.weight, model.blocks[1].norm.bias
            with torch.no_grad(), zero.GatheredParameters(written, modifier_rank=0, enabled=writes):
                if rank == 0 and writes:
                    for param in written:
                        param[..., 1] = 0.3
            values.append(
                {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
            )
        expected, actual = values
        for name in ("blocks.1.up.weight", "blocks.1.norm.bias"):
            expected[name][..., 1] = torch.tensor(0.3).bfloat16()
        found[device] = [
            name for name, value in actual.items() if not torch.equal(value, expected[name])
        ]
    return found


def test_a_write_leaves_the_fp32_values_of_all_other_elements(tmp_path):
    found, _ = run_on(2, masters_beside_a_write, str(tmp_path))
    assert found == {"none": [], "cpu": [], "nvme": []}


@on_ranks(2)
def test_an_exception_leaves_the_values_and_nothing_gathered(rank, world_size):
    true, model = weights_of(toy()), toy()
    engine, _ = start(model, SOME_PERSISTENT)
    with pytest.raises(KeyError), zero.GatheredParameters(model.parameters(), modifier_rank=0):
        doubled(model.blocks[2])
        raise KeyError("in the middle")
    assert engine.residency.live == gathered(engine) == 0
    with zero.GatheredParameters(model.parameters()):
        assert torch.equal(model.blocks[2].up.weight, true["blocks.2.up.weight"])
    (loss,) = step(engine, toy_batches(1))
    assert loss == loss


def different_writers(rank: int, world_size: int, whole: bool) -> str:
    model = toy()
    start(model, ds_config(stage3_param_persistence_threshold=0))
    params = model if whole else model.stem.weight
    with pytest.raises(UsageError) as error:
        with zero.GatheredParameters(params, modifier_rank=0 if rank == 0 else None):
            pass
    with zero.GatheredParameters(params), zero.GatheredParameters(params, enabled=rank == 0):
        pass
    return str(error.value)


@pytest.mark.parametrize("whole", [True, False])
def test_different_modifier_ranks_are_an_error_of_all(whole):
    first, second = run_on(2, different_writers, whole, timeout=60.0)
    assert first == second and "modifier_rank: 0 on rank 0, None on rank 1" in first


def refused_on_one_rank(rank: int, world_size: int) -> str:
    model = toy()
    start(model, ds_config(stage3_param_persistence_threshold=0))
    with pytest.raises(UsageError) as error:
        with zero.GatheredParameters([model.head.weight], modifier_rank=1):
            if rank == 1:
                model.head.weight.data = torch.zeros(2, 2)
    return str(error.value)


def test_what_one_rank_may_not_write_is_an_error_of_all():
    first, second = run_on(2, refused_on_one_rank)
    assert first == second and "rank 1: parameter 'head.weight' had shape" in first
