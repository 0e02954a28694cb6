"""How much is gathered at any moment.

The tests measure storages, and compare the engine's own counter with them.
"""

from __future__ import annotations

import pytest

from tests.dist.toys import BLOCK, after_each, bytes_of, gathered, toy, toy_batches
from tests.dist.training import ds_config, start, train_zero
from tests.parity.test_variants import data, variant
from tests.processes import on_ranks, run_on
from zero.core.param_group import ParamGroup, State
from zero.core.sharded_param import ShardedParameter
from zero.engine import ZeroEngine

LIMITS = [0, 1500, 12000, 10**9]


@pytest.mark.parametrize(
    ("kind", "accumulation"),
    [
        ("toy", 1),
        ("toy", 2),
        ("plain", 2),
        ("reentrant", 1),
        ("non-reentrant", 2),
        ("frozen encoder", 1),
        ("frozen embedding", 2),
        ("untied", 1),
    ],
)
@on_ranks(2)
def test_live_elements_stay_within_the_limit_or_one_group(rank, world_size, kind, accumulation):
    """With settings that push the engine to exceed the limit."""
    for limit in LIMITS:
        settings = {
            "stage3_param_persistence_threshold": 50,
            "stage3_max_live_parameters": limit,
            "stage3_prefetch_bucket_size": 6000,
        }
        is_toy = kind == "toy"
        model, batches = (toy(), toy_batches(3)) if is_toy else (variant(kind), data(kind)[:3])
        engine, _ = start(model, ds_config(accumulation=accumulation, **settings))
        loose = [group.layout for group in engine.groups if not group.persistent]
        most = max(limit, *(layout.numel for layout in loose))
        padding = sum(layout.padded - layout.numel for layout in loose)

        def look(_: ParamGroup, engine: ZeroEngine = engine, most: int = most + padding) -> None:
            assert gathered(engine) <= most

        with after_each(ParamGroup, "all_gather", look):
            train_zero(engine, batches)
        assert engine.residency.peak <= most
        assert engine.residency.live == gathered(engine) == 0
    # Without a limit most of the model is kept until its backward.
    assert engine.residency.peak > sum(layout.numel for layout in loose) // 2


def states(rank: int, world_size: int) -> list[str]:
    """Look at every group's memory in each forward and before each gradient.

    Return what is wrong.
    """
    engine, _ = start(
        toy(), ds_config(stage3_param_persistence_threshold=0, stage3_max_live_parameters=2 * BLOCK)
    )
    wrong = []

    def look(*_) -> None:
        for group in engine.groups:
            size = group.full.untyped_storage().nbytes()
            if size != (0 if group.state is State.SHARDED else group.layout.padded * 4):
                wrong.append(f"{group.describe()} and holds {size} bytes")
            is_hidden = any(isinstance(param, ShardedParameter) for param in group.params)
            if (group.state is State.UNSHARDED) == is_hidden:
                wrong.append(f"{group.describe()} and shows the wrong values")

    for block in engine.module.blocks:
        block.register_forward_hook(look)
    for param in engine.module.parameters():
        param.register_post_accumulate_grad_hook(look)
    train_zero(engine, toy_batches(3))
    look()
    return wrong


def test_a_sharded_group_holds_no_byte_and_shows_no_values():
    assert run_on(2, states) == [[], []]


def state_bytes(engine: ZeroEngine) -> int:
    """Return the bytes of shards, masters, gradients and moments. Each storage counts once."""
    tensors = [group.shard for group in engine.groups]
    for shard in engine.optimizer.shards.values():
        tensors += [shard.master, shard.grad]
    states = engine.optimizer.state.values()
    return bytes_of([*tensors, *(t for state in states for t in state.values() if t.dim())])


def state_of_a_rank(rank: int, world_size: int, sections: dict) -> tuple[int, int]:
    engine, _ = start(toy(), ds_config(stage3_param_persistence_threshold=0, **sections))
    train_zero(engine, toy_batches(1))
    numel = sum(param.numel() for param in engine.module.parameters())
    padding = sum(group.layout.padded - group.layout.numel for group in engine.groups)
    # Between steps the buffer of a sharded gradient may be kept or freed.
    return state_bytes(engine), 4 * (numel + padding) * (4 if not sections else 4.5) / world_size


@pytest.mark.parametrize("sections", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_state_of_a_rank_is_its_share(sections):
    """fp32: weight, gradient, two moments. bf16: the weight in 2 bytes; master, gradient and
    moments in fp32.
    """
    for world_size in (1, 2, 4):
        for held, share in run_on(world_size, state_of_a_rank, sections):
            assert held <= share
    assert held > 0.7 * share


@on_ranks(2)
def test_the_model_itself_holds_nothing_once_it_is_sharded(rank, world_size):
    model = toy()
    start(model, ds_config(stage3_param_persistence_threshold=0))
    assert bytes_of(model.parameters()) // 4 == 1
