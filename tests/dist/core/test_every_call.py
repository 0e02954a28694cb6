"""Faults in any call of a step, and those that are planted on some rank, or on all: an engine that
has met one can be destroyed or goes on, and no rank waits in vain.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero
from tests.dist.toys import Toy, toy, toy_batches
from tests.dist.training import adamw, ds_config, noise, start, step
from tests.processes import on_ranks, run_on
from zero.comm.communicator import apart, communicator
from zero.config import load_config
from zero.core.param_group import ParamGroup
from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.monitor import monitor
from zero.offload.pinned import PAGE, HostMemory

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


def one_step(engine: ZeroEngine, seed: int) -> None:
    engine.backward(engine(noise(seed, 0, 2, 8)).square().mean())
    engine.step()


def made(model: nn.Module, settings: dict) -> ZeroEngine:
    return start(model, ds_config(**settings))[0]


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
@on_ranks()
def test_an_exception_in_any_call_of_a_step(rank, world_size, settings):
    planted = 0
    while True:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        model = nn.Sequential(*blocks, nn.Linear(8, 1))
        engine = made(model, settings)
        one_step(engine, 1)
        plant = Plant(FIRST + planted * EVERY)
        sys.setprofile(plant)
        try:
            one_step(engine, 2)
        except (Planted, RuntimeError) as error:  # in an exchange it is one of all ranks
            assert "Planted" in f"{type(error).__name__} {error}", error
        finally:
            sys.setprofile(None)
        engine.destroy()
        if plant.left > 0:
            break
        planted += 1
        engine = made(model, settings)
        one_step(engine, 3)
        with zero.GatheredParameters(list(model.parameters())):
            assert all(param.isfinite().all() for param in model.parameters())
        engine.destroy()
    assert planted > 10


# -- faults on some rank, or on all


SHARDED = {"stage3_param_persistence_threshold": 0}
LIMIT = 60.0


class _Planned(Exception):
    """Raised by a test inside of the engine."""


@contextlib.contextmanager
def fails_at(owner: Any, name: str, call: int) -> Iterator[None]:
    """Context in which the method `name` raises MemoryError in that call, counted from 1."""
    original, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise MemoryError("planted")
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, failing):
        yield


def trained(engine: zero.ZeroEngine, steps: int = 2) -> list[float]:
    """The losses of some steps."""
    return step(engine, toy_batches(steps))


@pytest.mark.parametrize("mistake", ["the ranks disagree", "not the model's"])
@on_ranks(2, timeout=LIMIT)
def test_initialize_can_be_called_again_after_a_mistake(rank, world_size, mistake):
    """As in a notebook, the traceback of the first try lives."""
    model, config = toy(), ds_config(**SHARDED)
    stranger = torch.nn.Parameter(torch.ones(3))
    optimizer = adamw([{"params": [*model.parameters()]}])
    if mistake == "not the model's":
        optimizer.add_param_group({"params": [stranger]})
    else:
        optimizer.param_groups[0]["lr"] += rank
    with pytest.raises(ValueError, match=mistake) as raised:
        zero.initialize(model=model, optimizer=optimizer, config=config)
    engine, _ = start(model, config)
    found = trained(engine)
    assert raised.value.__traceback__ is not None
    assert found == trained(start(toy(), config)[0])


@on_ranks(2, timeout=LIMIT)
def test_an_engine_that_is_refused_leaves_no_hooks(rank, world_size):
    """The hooks on a model whose engine was refused after the model had been sharded."""
    model, config = toy(), ds_config(**SHARDED)
    optimizer = adamw([{"params": [*toy().parameters()]}])
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    unknown = {"compile": {"enabled": True, "backend": "none"}}
    not_adapting = ds_config(**SHARDED | {"stage": 0}) | {"on_out_of_memory": "adapt"}
    for mistake, settings, others in (
        ("another optimizer", config, {"lr_scheduler": scheduler}),
        ("no backend", config | unknown, {}),
        ("not with several processes", not_adapting, {}),
        ("has no len", config, {"training_data": object()}),
    ):
        with pytest.raises((UsageError, TypeError), match=mistake):
            zero.initialize(
                model=model,
                optimizer=adamw([{"params": [*model.parameters()]}]),
                config=settings,
                **others,
            )
    modules = model.modules()
    assert sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules) == 0


def gathering_fails(rank: int, world_size: int) -> list[float]:
    engine, _ = start(toy(), ds_config(**SHARDED))
    model = engine.module
    assert isinstance(model, Toy)
    for modifier in (0, None):
        with fails_at(ParamGroup, "_start_all_gather", 3), pytest.raises(MemoryError):
            with zero.GatheredParameters(model, modifier_rank=modifier):
                pass
    few = [model.stem.weight, model.blocks[0].norm.weight, model.blocks[1].norm.weight]
    with fails_at(ParamGroup, "gather_range", 2), pytest.raises(MemoryError):
        with zero.GatheredParameters(few):
            pass
    with mock.patch("zero.gathered_parameters.checksums", side_effect=MemoryError):
        # As in a notebook, the traceback lives.
        with pytest.raises(MemoryError) as raised, zero.GatheredParameters(model):
            pass
    assert raised.value.__traceback__ is not None
    assert not any(group.is_in_use for group in engine.groups) and engine.residency.live == 0
    return trained(engine)


def test_a_gather_that_fails_leaves_no_user():
    first, second = run_on(2, gathering_fails, timeout=LIMIT)
    assert first == second


def test_two_threads_may_use_the_pool_of_host_memory():
    pool = HostMemory()

    class Racing(list):
        """Another thread trims the pool when this one has looked through it."""

        def __iter__(self) -> Iterator[memoryview]:
            yield from list(super().__iter__())
            thread = threading.Thread(target=pool.trim)
            thread.start()
            thread.join(0.1)

    pool._free = Racing([memoryview(bytearray(PAGE))])
    assert pool.take(PAGE).numel() == PAGE


@on_ranks(2, timeout=LIMIT)
def test_an_engine_apart_splits_into_groups_of_its_own(rank, world_size):
    worlds, models = [[0], [1]], [[0, 1]]
    own = communicator().split(worlds, models)
    with apart():
        other = communicator().split(worlds, models)
    assert other.model is not None and own.model is not None
    assert other.model._group is not own.model._group and other._group is not own._group


def test_tensors_outside_of_an_engine_may_have_any_attributes():
    param = torch.nn.Parameter(torch.ones(2))
    assert not hasattr(param, "ds_id")
    for name in ("ds_id", "ds_status", "ds_tensor", "ds_shape", "ds_numel", "ds_persist"):
        setattr(param, name, 1)
        assert getattr(param, name) == 1
        delattr(param, name)
    assert not hasattr(param, "ds_id")


@on_ranks(2, timeout=LIMIT)
def test_ranks_still_exchange_in_the_same_backwards_after_a_missing_one(rank, world_size):
    """In the second step, rank 1 alone has no second backward."""
    engine, _ = start(toy(), ds_config(stage=1, accumulation=3))
    trained(engine, 3)
    for number, batch in enumerate(toy_batches(3)):
        if (rank, number) != (1, 1):
            engine.backward(engine(**batch))
        if number < 2:
            engine.step()
    with pytest.raises(UsageError, match="backwards since the last step: 3 on rank 0, 2 on"):
        engine.step()
    engine.zero_grad()
    trained(engine, 1)
    trained(engine, 9)


@pytest.mark.parametrize(
    "settings", [{}, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}]
)
@on_ranks(2, timeout=LIMIT)
def test_a_step_that_failed_does_not_count_and_can_be_repeated(rank, world_size, settings):
    def started() -> zero.ZeroEngine:
        return start(toy(), ds_config(accumulation=2, **SHARDED) | settings)[0]

    def counters(engine: zero.ZeroEngine) -> tuple[int, ...]:
        return engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps

    engine, reference = started(), started()
    trained(engine)
    expected = trained(reference, 4)
    assert counters(engine) == (2, 1, 4, 0)
    for number, batch in enumerate(toy_batches(4)[2:]):
        engine.backward(engine(**batch))
        if number:
            on_all = mock.patch.object(engine.optimizer, "_global_norm", side_effect=_Planned)
            with on_all, pytest.raises(_Planned):
                engine.step()
            assert counters(engine) == (3, 1, 4, 0) and engine.ends_step
            with fails_at(engine.optimizer, "_prepare_step", 1 + (rank == 0)):
                with pytest.raises(RuntimeError, match="an optimizer step: rank 1: MemoryError"):
                    engine.step()
            assert counters(engine) == (3, 1, 4, 0) and engine.ends_step
        engine.step()
    assert counters(engine) == counters(reference) == (4, 2, 8, 0)
    assert trained(engine, 2) == trained(reference, 2) != expected[:2]


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, timeout=LIMIT)
def test_one_rank_alone_may_use_reentrant_checkpointing(rank, world_size, stage):
    def engine(checkpointing: str | None) -> zero.ZeroEngine:
        return start(toy(checkpointing=checkpointing), ds_config(**SHARDED | {"stage": stage}))[0]

    found = trained(engine("reentrant" if rank == 0 else None), 3)
    assert found == trained(engine(None), 3)


@on_ranks(2, timeout=LIMIT)
def test_a_gradient_that_one_rank_puts_on_a_parameter_counts(rank, world_size):
    """Only rank 1 puts a gradient on a parameter before the step."""
    engine, _ = start(toy(), ds_config(stage=2))
    model = engine.module
    assert isinstance(model, Toy)
    engine.backward(engine(**toy_batches(1)[0]))
    before = zero.fragments.safe_get_full_grad(model.head.weight)
    if rank == 1:
        model.head.weight.grad = torch.ones_like(model.head.weight)
    added = []
    engine.optimizer.before_norm.append(
        lambda: added.append(zero.fragments.safe_get_full_grad(model.head.weight) - before)
    )
    engine.step()
    found = added[0].mean()
    assert found == pytest.approx(0.5, abs=1e-6)


def without_a_compiler(rank: int, world_size: int) -> list[torch.Tensor]:
    with mock.patch("zero.optim.adam_cpu.is_compiled", return_value=rank == 0):
        engine, _ = start(toy(), ds_config(stage=0))
    trained(engine, 5)
    assert not engine.optimizer._has_kernel
    return [param.detach().clone() for param in engine.module.parameters()]


def test_replicas_have_one_kernel_or_none():
    first, second = run_on(2, without_a_compiler, timeout=LIMIT)
    assert all(map(torch.equal, first, second))


@on_ranks(2, timeout=LIMIT)
def test_a_monitor_that_cannot_be_opened_is_an_error_on_all_ranks(rank, world_size):
    """Ranks of one tensor-parallel group have worlds of their own."""
    comm = communicator().split([[0], [1]], [[0, 1]])
    settings = load_config({"csv_monitor": {"enabled": True}, "train_batch_size": 1})
    engine: Any = SimpleNamespace(comm=comm, settings=settings)
    with mock.patch("zero.monitor.monitor.writers", side_effect=UsageError("planted")):
        with pytest.raises(UsageError, match="planted"):
            monitor.make(engine)
