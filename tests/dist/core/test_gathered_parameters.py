"""zero.GatheredParameters: reading and writing sharded values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero
from tests.dist.toys import gathered, recorded, toy, toy_batches
from tests.dist.training import (
    Curve,
    assert_same_weights,
    curve_on,
    ds_config,
    loss_of,
    start,
    step,
    train_in_slices,
    train_zero,
    weights_of,
)
from tests.processes import run_on
from zero.core.param_group import ParamGroup
from zero.core.sharded_param import ShardedParameter
from zero.errors import UsageError
from zero.fragments import safe_get_full_fp32_param
from zero.offload import tiers

SOME_PERSISTENT = ds_config(stage3_param_persistence_threshold=30)


def reading(rank: int, world_size: int) -> dict:
    true = weights_of(toy())
    model = toy()
    engine, _ = start(model, SOME_PERSISTENT)
    found = {}
    with zero.GatheredParameters(model):
        found["module"] = all(torch.equal(p, true[name]) for name, p in model.named_parameters())
    with zero.GatheredParameters(model.head.weight):
        found["one parameter"] = torch.equal(model.head.weight, true["head.weight"])
        found["no other"] = isinstance(model.stem.weight, ShardedParameter)
    with zero.GatheredParameters(iter([model.blocks[0].up.weight, nn.Parameter(torch.ones(3))])):
        found["generator"] = torch.equal(model.blocks[0].up.weight, true["blocks.0.up.weight"])
        with zero.GatheredParameters(model.blocks[0].parameters()):
            found["nested"] = torch.equal(model.blocks[0].down.weight, true["blocks.0.down.weight"])
        found["after the inner one"] = torch.equal(
            model.blocks[0].up.weight, true["blocks.0.up.weight"]
        )
    with zero.GatheredParameters(model.parameters(), enabled=False):
        found["disabled"] = isinstance(model.head.weight, ShardedParameter)
    with zero.GatheredParameters([]):
        found["empty"] = True
    with torch.no_grad(), zero.GatheredParameters(model.head.weight):
        model.head.weight.zero_()
    with zero.GatheredParameters(model.head.weight):
        found["without a modifier rank"] = torch.equal(model.head.weight, true["head.weight"])
    found["freed"] = engine.residency.live == gathered(engine) == 0
    return found


def test_reading():
    for found in run_on(2, reading):
        assert found == dict.fromkeys(found, True)


def sets(rank: int, world_size: int) -> list[str]:
    """Return which groups are gathered for a set of parameters.

    A set has another order on each rank.
    """
    model = toy()
    start(model, SOME_PERSISTENT)
    params = list(model.parameters())
    with (
        recorded(ParamGroup, "all_gather") as events,
        zero.GatheredParameters(set(params[::-1] if rank else params)),
    ):
        pass
    with (
        recorded(ParamGroup, "all_gather") as again,
        zero.GatheredParameters(params[::-1] if rank else params),
    ):
        pass
    assert [group for _, group in again] == [group for _, group in events]
    return [group.name for _, group in events]


def test_all_ranks_gather_in_one_order_whatever_that_of_the_argument():
    first, second = run_on(2, sets)
    assert first == second == ["stem.weight", *(f"blocks.{i}" for i in range(4)), "head.weight"]


def stepping_inside(rank: int, world_size: int) -> list[int]:
    engine, _ = start(toy(), SOME_PERSISTENT)
    engine.backward(loss_of(engine(**toy_batches(1)[0])))
    with (
        zero.GatheredParameters(engine.module.head.weight),
        pytest.raises(
            ValueError, match="group 'head.weight' .* leave that context before the step"
        ),
    ):
        engine.step()
    engine.step()
    return [engine.global_steps, gathered(engine)]


def test_a_step_while_values_are_shown_is_refused_and_can_be_made_after():
    assert run_on(2, stepping_inside) == [[1, 0], [1, 0]]


def doubled(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)


def modified(rank: int, world_size: int, sections: dict, under_init: bool) -> Curve:
    """Rank 1, the modifier rank, doubles all weights.

    Other ranks write wrong values. Then training goes on.
    """
    config = ds_config(stage3_param_persistence_threshold=30, **sections)
    torch.manual_seed(3)
    with zero.Init(config_dict_or_path=config, enabled=under_init):
        model = toy()
    engine, _ = (None, None) if under_init else start(model, config)
    with zero.GatheredParameters(model.parameters(), modifier_rank=1):
        doubled(model)
        if rank != 1:
            doubled(model)
    engine = engine or start(model, config)[0]
    return train_zero(engine, toy_batches(3))


def expected_after_doubling(
    rank: int, world_size: int, dtype: torch.dtype | None, rounded: bool
) -> Curve:
    model = toy()
    doubled(model)
    for param in model.parameters() if rounded else ():
        param.data = param.data.to(dtype).float()
    return train_in_slices(model, toy_batches(3), 2, dtype=dtype)


def test_what_the_modifier_rank_writes_is_every_ranks_and_the_masters():
    """An engine and `Init` show 16-bit values, and written values go to the masters."""
    bf16 = {"bf16": {"enabled": True}}
    for sections, dtype in (({}, None), (bf16, torch.bfloat16)):
        for under_init in (False, True):
            expected = curve_on(1, expected_after_doubling, dtype, dtype is not None)
            found = curve_on(2, modified, sections, under_init)
            assert found.losses == expected.losses
            assert_same_weights(found.weights, expected.weights)


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
            written = (
                model.blocks[1].up.weight,
                model.blocks[1].norm.bias,
            )  # of a sharded and a persistent group
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


def failing(rank: int, world_size: int) -> dict:
    true = weights_of(toy())
    model = toy()
    engine, _ = start(model, SOME_PERSISTENT)
    found = {}
    try:
        with zero.GatheredParameters(model.parameters(), modifier_rank=0):
            doubled(model.blocks[2])
            raise KeyError("in the middle")
    except KeyError:
        found["raised"] = True
    found["freed"] = engine.residency.live == gathered(engine) == 0
    with zero.GatheredParameters(model.parameters()):
        found["sharded values stay"] = torch.equal(
            model.blocks[2].up.weight, true["blocks.2.up.weight"]
        )
    losses = step(engine, toy_batches(1))
    found["goes on"] = losses[0] == losses[0]
    return found


def test_an_exception_leaves_the_values_and_nothing_gathered():
    for found in run_on(2, failing):
        assert found == dict.fromkeys(found, True)


def refused(rank: int, world_size: int) -> bool:
    """Whether a change is an error with `enable_sanity_checks`, under `Init` and in an engine, and
    is undone.
    """
    config = ds_config(stage3_param_persistence_threshold=30, enable_sanity_checks=True)
    with zero.Init(config_dict_or_path=config):
        model = toy()
    for _ in range(2):
        with (
            pytest.raises(RuntimeError, match=r"modification of (head\.)?weight"),
            torch.no_grad(),
            zero.GatheredParameters(model.head.weight),
        ):
            model.head.weight.zero_()
        start(model, config)
    with zero.GatheredParameters(model.head.weight):
        return bool(model.head.weight.any())


def test_changes_without_a_modifier_rank_are_refused_on_request():
    assert run_on(2, refused) == [True, True]


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
