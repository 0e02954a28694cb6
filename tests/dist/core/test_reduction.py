"""Reductions of gradients and the update: buckets, overlap, buffers, dtypes, sub-groups,
clipping.
"""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from tests.dist.toys import BLOCK, after_each, toy, toy_batches
from tests.dist.training import assert_same_weights, ds_config, sgd_engine, start, step, train_zero
from tests.processes import on_ranks, run_on
from zero.comm.communicator import Communicator
from zero.comm.work import Pending
from zero.core.reduction import GradientReducer
from zero.fragments import safe_get_full_grad, safe_set_full_grad
from zero.offload import tiers

WHOLE = {"stage3_param_persistence_threshold": 0}
GROUPS = 6


def reductions(rank: int, world_size: int, settings: dict) -> tuple[list[int], int, dict]:
    """Return of two steps: the elements of each collective, the most elements in flight, and the
    weights.
    """
    engine, _ = start(toy(), ds_config(**WHOLE, **settings))
    sizes: list[int] = []
    in_flight = [0]
    count = Communicator._count

    def counted(self, name, numel, *param_group):
        if name == "reduce_scatter":
            sizes.append(numel)
        count(self, name, numel, *param_group)

    def look(reducer):
        in_flight.append(sum(reduction.numel for reduction in reducer._in_flight))

    with (
        mock.patch.object(Communicator, "_count", counted),
        after_each(GradientReducer, "reduce", look),
    ):
        weights = train_zero(engine, toy_batches(2)).weights
    return sizes, max(in_flight), weights


def test_the_bucket_bounds_what_is_on_its_way():
    results = {
        size: run_on(2, reductions, {"reduce_bucket_size": size})[0]
        for size in (101, 3 * BLOCK, 10**9)
    }
    assert all(len(sizes) == 2 * GROUPS for sizes, _, _ in results.values())
    _, in_flight, weights = results[101]
    assert in_flight < 2 * BLOCK, "a group larger than the bucket is reduced alone"
    _, in_flight, _ = results[3 * BLOCK]
    assert BLOCK < in_flight <= 3 * BLOCK
    _, everything, _ = results[10**9]
    assert everything >= 4 * BLOCK
    for _, _, others in results.values():
        assert_same_weights(others, weights)


def waits(rank: int, world_size: int, overlap: bool) -> tuple[str, dict]:
    """Return the reductions of the second step as letters ("s": start, "w": wait), and the
    weights.
    """
    engine, _ = start(toy(), ds_config(**WHOLE, overlap_comm=overlap))
    step(engine, toy_batches(1))
    letters, started = [], []
    reduce_scatter, wait = Communicator.reduce_scatter, Pending.wait

    def starting(self, *args, **kwargs):
        pending = reduce_scatter(self, *args, **kwargs)
        started.append(pending)
        letters.append("s")
        return pending

    def waiting(self):
        if any(self is pending for pending in started):
            letters.append("w")
        wait(self)

    with (
        mock.patch.object(Communicator, "reduce_scatter", starting),
        mock.patch.object(Pending, "wait", waiting),
    ):
        step(engine, toy_batches(1))
    return "".join(letters), engine._zero3_consolidated_16bit_state_dict()


def test_overlap_waits_for_a_reduction_only_when_backward_is_over():
    overlapped, weights = run_on(2, waits, True)[0]
    immediate, others = run_on(2, waits, False)[0]
    assert overlapped == "s" * GROUPS + "w" * GROUPS
    assert immediate == "sw" * GROUPS
    assert_same_weights(others, weights)


def buffers(rank: int, world_size: int, contiguous: bool) -> tuple[list[bool], dict]:
    """Return for each gradient whether its own memory is already free after `collect`, and the
    weights.
    """
    engine, _ = start(toy(), ds_config(**WHOLE, contiguous_gradients=contiguous))
    seen: list[bool] = []
    collect = GradientReducer.collect

    def collected(self, param_group, index):
        grad = weakref.ref(param_group.params[index].grad)
        collect(self, param_group, index)
        seen.append(grad() is None)

    with (
        mock.patch.object(GradientReducer, "collect", collected),
        mock.patch("zero.core.reduction.MOST_APART", 0),
    ):
        weights = train_zero(engine, toy_batches(2)).weights
    return seen, weights


def test_contiguous_gradients_are_copied_before_the_group_has_all():
    copied, weights = run_on(2, buffers, True)[0]
    apart, others = run_on(2, buffers, False)[0]
    assert copied and all(copied)
    assert not any(apart)
    assert_same_weights(others, weights)


IN_BF16 = {"bf16": {"enabled": True}}
SUMS = IN_BF16 | {"stage": 1, "accumulation": 2}


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float32),
        (IN_BF16, torch.bfloat16),
        (IN_BF16 | {"communication_data_type": "fp32"}, torch.float32),
        ({"communication_data_type": "bf16"}, torch.bfloat16),
        (SUMS, torch.float32),
        (SUMS | {"communication_data_type": "bf16"}, torch.bfloat16),
    ],
)
@on_ranks(2)
def test_the_dtype_in_which_gradients_and_their_sums_travel(rank, world_size, settings, dtype):
    engine, _ = start(toy(), ds_config(**settings))
    found, reduce_scatter = set(), Communicator.reduce_scatter

    def reduced(self, out, full, *args):
        found.add(full.dtype)
        assert out.dtype == torch.float32
        return reduce_scatter(self, out, full, *args)

    with mock.patch.object(Communicator, "reduce_scatter", reduced):
        step(engine, toy_batches(engine.settings.gradient_accumulation_steps))
    assert found == {dtype}


@on_ranks(2)
def test_a_sum_of_micro_batches_is_rounded_once(rank, world_size):
    """Of 2^-8 and 1 + 2^-8, before division by 2: bf16 has 1 + 2^-7, but not 1 + 2^-8, which
    becomes 1.
    """
    model = torch.nn.Linear(world_size, 1, bias=False)
    engine, _ = start(model, ds_config(stage=1, accumulation=2, communication_data_type="bf16"))
    for gradient in (2.0**-8, 1 + 2.0**-8):
        engine.backward(engine(torch.full((1, world_size), gradient)).sum())
        if gradient < 1:
            engine.step()
    assert safe_get_full_grad(model.weight)[0, 0].item() == (1 + 2.0**-7) / 2


def sub_groups(rank: int, world_size: int, size: int) -> tuple[list[list[int]], list[int], dict]:
    """Return the sizes that each call of the optimizer updates, the sizes of this rank's shards,
    and the weights.
    """
    engine, optimizer = start(toy(), ds_config(sub_group_size=size, **WHOLE))
    calls: list[list[int]] = []

    def note(inner: torch.optim.Optimizer, *_: object) -> None:
        calls.append([p.numel() for group in inner.param_groups for p in group["params"]])

    optimizer.optimizer.register_step_pre_hook(note)
    weights = train_zero(engine, toy_batches(2)).weights
    own = [param_group.layout.shard_numel for param_group in engine.groups]
    return calls[: len(calls) // 2], own, weights


def test_the_optimizer_never_sees_more_than_a_sub_group():
    results = {size: run_on(2, sub_groups, size)[0] for size in (100, BLOCK, 10**9)}
    for size, (calls, own, weights) in results.items():
        assert max(sum(call) for call in calls) <= size
        assert sum(sum(call) for call in calls) == sum(own)
        # torch's fused AdamW rounds the last elements of what it gets in its own way.
        torch.testing.assert_close(weights, results[100][2], rtol=1e-6, atol=1e-8)
    calls, own, _ = results[10**9]
    assert calls == [[numel] for numel in own], "a group at a time"
    assert len(results[100][0]) >= 2 * BLOCK // 100


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: float) -> torch.Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks()
def test_gradients_are_summed_in_the_configured_dtype(rank, world_size, stage):
    """The gradients are 1/2 and 2^-9: half of a bf16 ulp of 1/2."""
    config = ds_config(accumulation=2, stage=stage, **IN_BF16, **WHOLE)
    wide = 0.5 + 2.0**-9, torch.float32
    for name, expected in ((None, wide), ("fp32", wide), ("bf16", (0.5, torch.bfloat16))):
        engine, _ = start(Weighted(), config | {"data_types": {"grad_accum_dtype": name}})
        for value in (1.0, 2.0**-8):
            engine.backward(engine(value))
            if value == 1.0:
                engine.step()
        grad = safe_get_full_grad(engine.module.weight)
        kept = engine.optimizer.shards[engine.groups[0]].grad.dtype
        assert (grad.unique().item(), kept) == expected
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(grad.norm().item())


def kept(rank: int, world_size: int, folder: str | None) -> list[tuple[list[float], torch.dtype]]:
    """Return the gradient and the dtype in which it is kept: after one backward, after two, and
    when it was set.
    """
    tiers.LEAST_BYTES_IN_A_FILE = 1
    away = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}} if folder else {}
    engine, _ = start(Weighted(), ds_config(bf16={"enabled": True}, **WHOLE, **away))
    weight, found = engine.module.weight, []

    def look() -> None:
        values = safe_get_full_grad(weight).unique().tolist()
        found.append((values, engine.optimizer.shards[engine.groups[0]].grad.dtype))

    for value in (1.0, 2.0**-8):
        engine.backward(engine(value))
        look()
    engine.step()
    engine.backward(engine(1.0))
    look()
    safe_set_full_grad(weight, torch.full((6,), 1 + 2.0**-9))
    look()
    return found


@pytest.mark.parametrize("in_files", [False, True])
def test_16_bit_gradients_are_widened_when_something_is_added_to_them(tmp_path, in_files):
    """One process: nothing is added in a reduction, so 16 bits lose nothing.

    On gloo, sums over ranks are in fp32.
    """
    path = str(tmp_path) if in_files else None
    single, summed = ([1.0], torch.bfloat16), ([1 + 2.0**-8], torch.float32)
    wide = [1 + 2.0**-9], torch.float32
    assert run_on(1, kept, path)[0] == [single, summed, single, wide]
    assert [dtype for _, dtype in run_on(2, kept, path)[0]] == [torch.float32] * 4


# -- `sub_group_size`: how many elements are updated at a time


@on_ranks(2)
def test_tiny_sub_groups_are_merged(rank, world_size):
    """A rank has 16,512 elements in one or two groups."""
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
    assert len(sgd_engine(model, sub_group_size=8).optimizer.sub_groups) <= 2 * 65
