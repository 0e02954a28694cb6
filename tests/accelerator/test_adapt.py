"""`"on_out_of_memory": "adapt"`: a run whose device is too small for its micro-batches ends, with
the losses of a run that had enough memory.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.accelerator import device
from tests.dist.toys import messages
from tests.dist.training import Batch, ds_config, relative, split, start, step
from tests.parity.models import ROWS, batches, build
from tests.parity.test_fp32 import SMALL
from tests.processes import run_on
from zero.errors import UsageError
from zero.monitor.memory_usage import DEVICE, bytes_by_kind

STEPS, LONGER = 3, 6
# The first step with a cap, and how much of what cutting saves it leaves.
CAPS = [(0, 0.2), (2, 0.6)]
HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
ENOUGH = 1 << 30
Losses = list[list[float]]


def data(name: str) -> list[Batch]:
    """Batches whose rows have unequal numbers of labels. Long, so that activations fill most of the
    memory.
    """
    found = [
        {key: value.repeat(1, LONGER) for key, value in each.items()}
        for each in batches(name, STEPS)
    ]
    for batch in found:
        for row in range(len(batch["labels"])):
            batch["labels"][row, : row % 4] = -100
        batch["labels"][5] = -100
    return found


def train(
    name: str,
    section: dict,
    accumulation: int,
    act: str,
    limits: list[int],
    recomputes: bool = False,
    slices: int = 1,
) -> tuple[Losses, int, list[str]]:
    """Train with a limit for each step.

    Returns the losses, the most memory that was in use, and what was said.
    """
    gc.collect()  # earlier engines
    device.set_limit(ENOUGH)
    config = ds_config(accumulation=accumulation, **SMALL | section) | {"on_out_of_memory": act}
    config["activation_checkpointing"] = {"batch_slices": slices}
    model: Any = build(name).to(device.NAME)
    if recomputes:
        model.gradient_checkpointing_enable()
    engine, _ = start(model, config)
    losses = []
    torch.accelerator.reset_peak_memory_stats()
    # A micro-batch of one sample needs labels.
    is_cut = engine.comm.world_size * accumulation == ROWS
    given = batches(name, STEPS) if is_cut else data(name)
    said = messages()
    for batch, limit in zip(given, limits, strict=True):
        device.set_limit(limit)
        parts = split(batch, engine.comm.world_size * accumulation)
        parts = parts[engine.comm.rank :: engine.comm.world_size]
        losses.append(step(engine, parts))
    said = [text for text in said if "ran out of memory, so" in text]
    most = torch.accelerator.max_memory_allocated()
    device.set_limit(ENOUGH)
    engine.destroy()
    return losses, most, said


def capped(
    rank: int, world_size: int, name: str, section: dict, accumulation: int, recomputes: bool
) -> tuple[Losses, list[tuple[int, Losses, list[str]]]]:
    """Losses with enough memory; and with caps for the last rank, each from some step on: the
    number of that step, the losses, and what was said. `recomputes`: activations, from the start.
    """
    enough = [ENOUGH] * STEPS
    usual, most, _ = train(name, section, accumulation, "explain", enough, recomputes)
    _, least, _ = train(name, section, accumulation, "adapt", enough, recomputes, slices=ROWS)
    found = []
    for first, part in CAPS:
        cap = least + int(part * (most - least))
        limits = [ENOUGH] * first + [cap if rank == world_size - 1 else ENOUGH] * (STEPS - first)
        losses, _, said = train(name, section, accumulation, "adapt", limits, recomputes)
        found.append((first, losses, said))
    return usual, found


def errors(rank: int, world_size: int, kept: bool) -> list[str]:
    """What is said where the step cannot be repeated, in a forward or, with `kept`, in a backward;
    and after a backward by the script.
    """
    found = []
    for is_hooked in (True, False):
        model: Any = build("llama").to(device.NAME)
        if is_hooked:  # the sum of clipped gradients is not the clipped sum
            model.lm_head.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        config = ds_config(stage3_max_live_parameters=0) | {"on_out_of_memory": "adapt"}
        engine, _ = start(model, config)
        batch = {name: value.to(device.NAME) for name, value in batches("llama", 1)[0].items()}
        with pytest.raises((torch.OutOfMemoryError, UsageError)) as raised:
            if is_hooked and not kept:
                device.set_limit(torch.accelerator.memory_allocated() + 100_000)
            loss = engine(**batch).loss
            if not is_hooked:
                loss.backward()
                engine.step()
            device.set_limit(torch.accelerator.memory_allocated() + 1000)
            engine.backward(loss)
        device.set_limit(ENOUGH)
        found.append(str(raised.value))
        engine.destroy()
    return found


@pytest.mark.parametrize("kept", [False, True])
def test_what_cannot_be_repeated_is_said(kept):
    hooked, by_script = run_on(1, errors, kept, simulated=True)[0]
    assert "parameter 'lm_head.weight' has a hook of the script" in hooked
    assert "call engine.backward(loss) instead of loss.backward()" in by_script


def refusal(rank: int, world_size: int) -> str:
    config = ds_config(zero_quantized_weights=True) | {"on_out_of_memory": "adapt"}
    with pytest.raises(UsageError) as raised:
        start(build("llama").to(device.NAME), config)
    return str(raised.value)


def test_gathers_that_a_rank_cannot_join_are_refused():
    assert all(
        "not with several processes and zero_optimization.zero_quantized_weights" in text
        for text in run_on(2, refusal, simulated=True)
    )


def unexplained(rank: int, world_size: int) -> list[int]:
    """By stage, the bytes between two micro-batches that an error would call activations."""
    found = []
    for stage in range(4):
        sections = SMALL | {"stage": stage, "bf16": {"enabled": True}}
        engine, _ = start(build("llama").to(device.NAME), ds_config(accumulation=2, **sections))
        step(engine, split(data("llama")[0], ROWS)[:1])
        gc.collect()
        known = sum(bytes_by_kind(engine)[DEVICE].values())
        found.append(torch.accelerator.memory_allocated() - known)
        engine.destroy()
        del engine
        gc.collect()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_knows_what_fills_the_memory(world_size):
    for found in run_on(world_size, unexplained, simulated=True):
        assert all(0 <= each < 1000 for each in found), found  # a batch and some scalars


@pytest.mark.parametrize(
    ("name", "section", "accumulation", "change"),
    [
        ("llama", {"stage3_max_live_parameters": 0}, 2, "now runs its batch in"),
        ("t5", HOST | {"stage3_max_live_parameters": 0}, 1, "now runs its batch in"),
        ("mixtral", {}, 1, "stage3_max_live_parameters is now 0"),
        ("t5", {"stage": 1}, 1, "activations are now recomputed"),
    ],
    ids=["stage 3", "on the host", "experts", "stage 1"],
)
def test_a_step_that_runs_out_of_memory_is_repeated(name, section, accumulation, change):
    given = name, section, accumulation, "recomputed" not in change
    ranks = run_on(2, capped, *given, simulated=True, timeout=300)
    for rank, (usual, runs) in enumerate(ranks):
        assert any(said for _, _, said in runs) or rank > 0
        for first, losses, said in runs:
            # Not cut: the same bits, also after an update.
            assert losses[:first] == usual[:first]
            assert all(relative(*pair) < 1e-6 for pair in zip(losses, usual, strict=True))
            assert all(change in text for text in said[:1]) and len(said) <= ROWS.bit_length()
