"""The engine on the simulated accelerator: no mistake is found, and the losses are those of plain
torch on that device.

Without offload, torch updates the weights, so the bits are equal. Offloaded state is updated by
`adam_cpu`, which computes the last elements of tensors otherwise. So its numbers equal plain
torch's within rounding, and have the same bits on every tier."""

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero
from tests.accelerator import device
from tests.accelerator.test_scenarios import on_own_device
from tests.dist.checkpoint.test_checkpoint import load_train, train_save_train
from tests.dist.training import (
    Curve,
    Make,
    adamw,
    assert_equal,
    assert_same_training,
    curve_on,
    ds_config,
    relative,
    start,
    step,
    train_in_slices,
    train_zero,
)
from tests.parity.models import VOCABULARY, batches, build, sharded
from tests.parity.test_fp32 import SMALL
from tests.parity.test_mixed_precision import SECTIONS
from tests.parity.test_offload import BOTH, NVME
from tests.parity.test_whole_tensor import MAKE
from tests.processes import run_on
from tests.tolerance import rounding
from zero.checkpoint.training import wait_for_background_saves
from zero.comm import communicator as comm
from zero.offload import pinned, tiers

STEPS = 4
# A function that changes something in the process before the engine is made.
Prepare = Callable[[], None]


def t5(prepare: Prepare | None = None) -> nn.Module:
    """On the device, after `prepare` has been called."""
    tiers.LEAST_BYTES_IN_A_FILE = 1
    if prepare is not None:
        prepare()
    return build("t5").to(device.NAME)


def plain(rank: int, world_size: int, ranks: int, options: dict) -> Curve:
    data = [
        {name: value.to(device.NAME) for name, value in batch.items()}
        for batch in batches("t5", STEPS)
    ]
    curve = train_in_slices(t5(), data, ranks, **options)
    curve.weights = {name: value.cpu() for name, value in curve.weights.items()}
    return curve


def config_of(folder: object, accumulation: int = 1, **sections: Any) -> dict[str, Any]:
    sections = {
        key: value | {"nvme_path": str(folder)} if "offload" in key else value
        for key, value in sections.items()
    }
    return ds_config(accumulation=accumulation, **{**SMALL, "sub_group_size": 20000, **sections})


def engine_with(folder: str, sections: dict, make: Make = adamw) -> zero.ZeroEngine:
    engine, _ = start(t5(), config_of(folder, **sections), make=make)
    assert engine.comm.device == torch.device(device.NAME, engine.comm.rank)
    return engine


@cache
def expected(ranks: int, accumulation: int, dtype: torch.dtype | None = None) -> Curve:
    options = {"accumulation": accumulation, "dtype": dtype}
    return curve_on(1, plain, ranks, options, simulated=True)


def found(
    ranks: int, folder: object, accumulation: int = 1, prepare: Prepare | None = None, **keys: Any
) -> Curve:
    given = partial(t5, prepare), batches("t5", STEPS), config_of(folder, accumulation, **keys), {}
    return curve_on(ranks, on_own_device, sharded, *given, simulated=True)


@pytest.mark.parametrize(
    ("world_size", "accumulation", "dtype", "stage"),
    [(1, 1, None, 3), (2, 1, None, 3), (2, 1, None, 2), (1, 2, torch.bfloat16, 3)],
)
def test_training_is_that_of_plain_torch(tmp_path, world_size, accumulation, dtype, stage):
    sections = SECTIONS.get(dtype, {}) | {"stage": stage}
    curve = found(world_size, tmp_path, accumulation, **sections)
    assert_same_training(curve, expected(world_size, accumulation, dtype))


def beside_gloo(rank: int, world_size: int) -> Curve:
    """The script has made a process group of gloo, which has no backend for the device."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return train_zero(engine_with("", {}), batches("t5", STEPS))


def test_a_process_group_of_gloo_does_not_keep_the_engine_from_its_device(tmp_path):
    assert_same_training(curve_on(2, beside_gloo, simulated=True), expected(2, 1))


def on_apple(rank: int, world_size: int) -> list[str]:
    texts: list[str] = []
    with mock.patch.object(comm, "accelerator", lambda number=0: torch.device("mps", 0)):
        with mock.patch.object(
            comm.logger, "warning", lambda text, *values: texts.append(text % values)
        ):
            assert comm.communicator().device == torch.device("cpu")
            comm.communicator()
    return texts


def test_an_accelerator_that_cannot_be_used_is_named_once():
    assert run_on(1, on_apple) == [
        ["torch has no collectives for mps:0: the engine computes on the CPU"]
    ]


HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
OFFLOADS = {
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "both": HOST,
    "files": {"offload_param": NVME, "offload_optimizer": {"device": "nvme", **BOTH}},
}


@pytest.mark.parametrize(("world_size", "case"), [(1, "optimizer"), (2, "both"), (2, "files")])
def test_offload_is_free_of_mistakes_and_changes_nothing(tmp_path, world_size, case):
    """With one rank, `test_offload` has the other places."""
    curve, plain = found(world_size, tmp_path, 2, **OFFLOADS[case]), expected(world_size, 2)
    longest = max(value.numel() for value in plain.weights.values())
    assert relative(curve.mean_losses(), plain.mean_losses()) <= rounding(
        torch.float32, VOCABULARY, STEPS
    )
    assert relative(curve.norms, plain.norms) <= rounding(torch.float32, longest, STEPS)


def host_memory(rank: int, world_size: int) -> None:
    """Forked processes do not inherit registered memory.

    It is unregistered only when all copies from it have ended.
    """
    block = pinned.new_block(pinned.PAGE, pin=True)
    values = torch.frombuffer(block, dtype=torch.float32).fill_(1)
    address = f"{values.data_ptr():x}-"
    assert address in Path("/proc/self/maps").read_text()
    child = os.fork()
    if child == 0:
        os._exit(int(address in Path("/proc/self/maps").read_text()))
    assert os.waitpid(child, 0)[1] == 0
    target = torch.zeros(pinned.PAGE // 4, device=device.NAME)
    target.copy_(values, non_blocking=True)
    assert device.pending() > 0
    del values, block
    assert (target == 1).all().item()


def test_registered_memory_is_this_processes_alone_and_outlives_copies():
    run_on(1, host_memory, simulated=True)


def whole(rank: int, world_size: int, folder: str, name: str, sections: dict) -> Curve:
    engine = engine_with(folder, sections, make=MAKE[name])
    curve = train_zero(engine, batches("t5", STEPS))
    state = [each for tensor in engine.optimizer.whole.own for each in tensor.state.values()]
    places = {value.device.type for value in state if torch.is_tensor(value) and value.dim()}
    assert places == {"cpu" if "offload_optimizer" in sections else device.NAME}
    engine.destroy()
    torch.accelerator.synchronize()
    assert device.mistakes() == []
    return curve


@pytest.mark.parametrize(
    ("world_size", "name", "case"),
    [
        (2, "Muon", "both"),
        (1, "Muon", "files"),
        (2, "torch's Adafactor", "files"),
        (1, "Adafactor, lr", "optimizer"),
    ],
)
def test_whole_tensors_are_updated_on_the_device_wherever_they_live(
    tmp_path, world_size, name, case
):
    curves = [
        curve_on(world_size, whole, str(tmp_path), name, sections, simulated=True)
        for sections in ({}, OFFLOADS[case])
    ]
    assert_equal(*curves)
    assert relative(curves[0].losses[-1], curves[0].losses[0]) > 0.01


def test_a_checkpoint_continues_bit_for_bit(tmp_path):
    config = ds_config(clip=1.0, bf16={"enabled": True}, **HOST)
    straight = curve_on(2, train_save_train, "llama", config, str(tmp_path), simulated=True)
    assert_equal(curve_on(2, load_train, "llama", config, str(tmp_path), simulated=True), straight)


def out_of_memory(rank: int, world_size: int) -> list[float]:
    """Return the losses of a script that runs out of memory at the third batch, catches the error
    and tries again.
    """
    engine, losses = engine_with("", {"offload_param": {"device": "cpu"}}), []
    _free, total = torch.accelerator.get_memory_info()
    for number, batch in enumerate(batches("t5", STEPS)):
        if number == 2:
            device.set_limit(torch.accelerator.memory_allocated() + 30_000)
            with pytest.raises(torch.OutOfMemoryError, match="sim out of memory") as raised:
                step(engine, [batch])
            # activations are there, and what the engine keeps
            explained = str(raised.value).splitlines()[-1]
            assert "activations and temporary tensors" in explained and "optimizer" in explained
            assert "Try first: " in explained and "zero estimate MODEL" in explained
            device.set_limit(total)
            engine.zero_grad()
        losses += step(engine, [batch])
    engine.destroy()
    return losses


def test_after_an_error_for_lack_of_memory_training_goes_on(tmp_path):
    losses = run_on(1, out_of_memory, simulated=True)[0]
    assert [[loss] for loss in losses] == expected(1, 1).losses


def without_registration() -> None:
    """Take away the call that pins existing memory. Then torch's own pinned allocator is used."""
    del device.cudart


ACTIVATIONS = {"activation_checkpointing": {"cpu_checkpointing": True}}


@pytest.mark.parametrize(("prepare", "keys"), [(without_registration, {}), (None, ACTIVATIONS)])
def test_other_pinned_memory_and_activations_on_the_host_change_no_bit(tmp_path, prepare, keys):
    assert_equal(found(1, tmp_path, prepare=prepare, **HOST, **keys), found(1, tmp_path, **HOST))


def saved_on_the_way(
    rank: int, world_size: int, folder: str, sections: dict
) -> tuple[list[float], list[float]]:
    """Return the losses with an asynchronous save after each step, and the last of them again,
    resumed from a save.
    """
    saves = {"checkpoint": {"async_save": True}}
    engine, losses = engine_with(folder, sections | saves), []
    for number, batch in enumerate(batches("t5", STEPS)):
        losses += step(engine, [batch])
        engine.save_checkpoint(folder, tag=str(number))
    wait_for_background_saves()
    engine.destroy()
    again = engine_with(folder, sections)
    again.load_checkpoint(folder, tag="1")
    repeated = [loss for batch in batches("t5", STEPS)[2:] for loss in step(again, [batch])]
    again.destroy()
    return losses, repeated


@pytest.mark.parametrize("sections", [{}, HOST], ids=["on the device", "offloaded"])
def test_asynchronous_saves_hold_their_step_and_change_nothing(tmp_path, sections):
    losses, repeated = run_on(1, saved_on_the_way, str(tmp_path), sections, simulated=True)[0]
    assert [[loss] for loss in losses] == found(1, tmp_path, **sections).losses
    assert repeated == losses[2:]
