"""Weights that a forward or a script changes in place: what becomes of masters, and what is
refused. The hunt compares their values with plain torch.

Writes that depend on a rank's batch are different on each rank. Then there is no right value, and
the step is refused."""

from __future__ import annotations

from itertools import product
from unittest import mock

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import noise, sgd_engine
from tests.processes import run_on
from zero.core import forward_writes
from zero.core.param_group import checksums
from zero.errors import UsageError

WIDTH, RATE = 8, 0.1


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Transposed(nn.Linear):
    """The new values are a view of the old ones, and begin at the same address."""

    def forward(self, x):
        self.weight.data = self.weight.data.t()
        return super().forward(x)


class PerRank(nn.Module):
    """An embedding that renormalizes the rows it looks up: those of its rank."""

    def __init__(self, *sizes: int):
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, max_norm=0.5)

    def forward(self, x):
        return self.table((x[:, 0] > 0).long() + 2 * torch.distributed.get_rank())


def build(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), kind(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )


def batch(step: int, rank: int) -> torch.Tensor:
    return noise(step, rank, 4, WIDTH)


def engine_of(model: nn.Module, **section: object) -> zero.ZeroEngine:
    return sgd_engine(model, RATE, 0.9, **section)


def train(engine: zero.ZeroEngine, rank: int, steps: int = 3) -> None:
    for step in range(steps):
        x = batch(step, rank).to(next(engine.parameters()).dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()


def keeps_masters(rank: int, world_size: int) -> None:
    """With bf16 the fp32 master takes over what the forward wrote, and nothing else."""
    for stage in (1, 3):
        model = build(Clamped)
        engine = engine_of(model, stage=stage, bf16={"enabled": True})
        train(engine, rank, steps=1)
        with torch.no_grad():
            engine(batch(1, rank).bfloat16())
        master = zero.fragments.safe_get_full_fp32_param(model[1].weight)
        assert master.abs().max() <= 0.101
        other = zero.fragments.safe_get_full_fp32_param(model[0].weight)
        assert not torch.equal(other, other.bfloat16().float())
        engine.destroy()


@pytest.mark.parametrize("world_size", [1, 2])
def test_masters_follow(world_size):
    run_on(world_size, keeps_masters)


def keeps_what_a_script_writes(rank: int, world_size: int) -> None:
    """Between backward and step, to a weight whose fp32 master is elsewhere."""
    for stage in (1, 2, 3):
        model, half = build(nn.Linear), {"enabled": True}
        section = {"stage": stage, "stage3_param_persistence_threshold": 1000, "bf16": half}
        engine = engine_of(model, **section)
        engine.backward(engine(batch(0, rank).bfloat16()).float().square().mean())
        with torch.no_grad():
            model[1].weight.zero_()
        engine.step()
        master = zero.fragments.safe_get_full_fp32_param(model[1].weight)
        grad = zero.fragments.safe_get_full_optimizer_state(model[1].weight, "momentum_buffer")
        assert grad.abs().max() > 0
        assert torch.equal(master, -RATE * grad)
        assert torch.equal(model[1].weight.detach(), master.bfloat16())
        engine.destroy()


def test_writes_between_backward_and_step():
    run_on(2, keeps_what_a_script_writes)


REFUSED = {
    PerRank: "forwards wrote to.*1.table.weight",
    Transposed: "'1.weight' has got data.*another view.*clone",
}


def refused(rank: int, world_size: int) -> None:
    """Other values on each rank, and another view of the old values."""
    for kind, says in REFUSED.items():
        for stage in (2, 3):
            engine = engine_of(build(kind), stage=stage)
            with pytest.raises(UsageError, match=says):
                train(engine, rank, steps=1)


def test_writes_that_have_no_right_value_are_refused():
    run_on(2, refused)


def is_no_write_of_a_forward(rank: int, world_size: int) -> None:
    """A forward is given up, and the weights are changed between it and the next one."""
    engine = engine_of(build(nn.Linear), stage=2, bf16={"enabled": True})
    engine(batch(0, rank).bfloat16())
    weight = engine.module[1].weight
    with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.fill_(0.5)
    train(engine, rank, steps=2)


def test_a_pass_that_was_given_up():
    run_on(2, is_no_write_of_a_forward)


def clamps_before_a_save(rank: int, world_size: int, folder: str) -> None:
    engine = engine_of(build(nn.Linear), stage=2, bf16={"enabled": True})
    train(engine, rank, steps=1)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.clamp_(-0.01, 0.01)
    engine.save_checkpoint(folder, tag="one")
    other = engine_of(build(nn.Linear), stage=2, bf16={"enabled": True})
    other.load_checkpoint(folder, tag="one")
    for param in other.module.parameters():
        assert zero.fragments.safe_get_full_fp32_param(param).abs().max() < 0.0101


def test_weights_that_are_clamped_before_a_save(tmp_path):
    run_on(2, clamps_before_a_save, str(tmp_path))


def data_is_refused(rank: int, world_size: int) -> None:
    """A write to `.data` would not reach the fp32 masters."""
    for stage, when in product((1, 2), ("at first", "before step", "after step")):
        model = build(nn.Linear)
        engine = engine_of(model, stage=stage, bf16={"enabled": True})

        def clamp(moment: str, weight: nn.Parameter = model[1].weight, when: str = when) -> None:
            if when == moment:
                weight.data.clamp_(-0.1, 0.1)

        with pytest.raises(UsageError, match=r"script changes '1.weight' through `.data`.*no_grad"):
            clamp("at first")
            loss = engine(batch(0, rank).bfloat16()).float().square().mean()
            engine.backward(loss)
            clamp("before step")
            engine.step()
            clamp("after step")
            engine(batch(1, rank).bfloat16())


def test_data_written_between_passes():
    run_on(2, data_is_refused)


def data_is_kept(rank: int, world_size: int) -> None:
    """In fp32 on the compute device the weights are the masters, so that `.data` may be written,
    as critics do that clip their weights.
    """
    for stage in (1, 2):
        model = build(nn.Linear)
        engine = engine_of(model, stage=stage)
        for step in range(3):
            train(engine, rank, steps=1)
            model[1].weight.data.clamp_(-0.1, 0.1)
            engine.eval()
            with torch.no_grad():
                engine(batch(step, rank))
            engine.train()
            assert zero.fragments.safe_get_full_fp32_param(model[1].weight).abs().max() <= 0.1


def test_clipped_critics():
    run_on(2, data_is_kept)


def counts_checksums(rank: int, world_size: int) -> None:
    """Checksums read all weights: generation before the first step must not pay for each token."""
    for stage in (2, 3):
        engine = engine_of(build(nn.Linear), stage=stage, bf16={"enabled": True})
        with mock.patch.object(forward_writes, "checksums", side_effect=checksums) as made:
            counts = []
            for step in range(4):
                with torch.no_grad():
                    engine(batch(step, rank).bfloat16())
                counts.append(made.call_count)
            train(engine, rank, steps=2)
            trained = made.call_count
            train(engine, rank, steps=2)
        assert counts[0] == counts[3] > 0, counts
        assert made.call_count == trained > counts[3], "none after the second step"
        engine.destroy()


def test_later_passes_compute_no_checksums():
    run_on(2, counts_checksums)
