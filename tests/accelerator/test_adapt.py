"""`"on_out_of_memory": "adapt"`: a run whose device is too small for its micro-batches ends, with
the losses of a run that had enough memory.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from tests.accelerator import device
from tests.dist.training import Batch, ds_config, relative, split, start, step
from tests.parity.models import ROWS, batches, build
from tests.parity.test_fp32 import SMALL
from tests.processes import run_on
from zero.errors import UsageError
from zero.monitor.memory_usage import DEVICE, OPTIMIZER, bytes_by_kind

STEPS = 3
# The first step with a cap, and how much of what cutting saves it leaves. `memory_caps` draws many.
CAPS = [(0, 0.2), (2, 0.6)]
HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
ENOUGH = 1 << 30
Losses = list[list[float]]


def data(name: str) -> list[Batch]:
    """Batches whose rows have unequal numbers of labels."""
    found = batches(name, STEPS)
    for batch in found:
        batch["labels"] = batch["labels"].clone()
        for row in range(len(batch["labels"])):
            batch["labels"][row, : row % 4] = -100
        batch["labels"][5] = -100
    return found


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "ran out of memory, so" in record.getMessage():
            self.texts.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """Context in which what is said of a lack of memory is added to the list."""
    messages = _Messages()
    logging.getLogger("zero").addHandler(messages)
    try:
        yield messages.texts
    finally:
        logging.getLogger("zero").removeHandler(messages)


def train(
    name: str,
    section: dict,
    accumulation: int,
    act: str,
    limits: list[int],
    recomputes: bool = False,
) -> tuple[Losses, int, list[str]]:
    """Train with a limit for each step.

    Returns the losses, the most memory that was in use, and what was said.
    """
    gc.collect()  # earlier engines
    device.set_limit(ENOUGH)
    config = ds_config(accumulation=accumulation, **SMALL | section) | {"on_out_of_memory": act}
    model: Any = build(name).to(device.NAME)
    if recomputes:
        model.gradient_checkpointing_enable()
    engine, _ = start(model, config)
    losses = []
    torch.accelerator.reset_peak_memory_stats()
    # A micro-batch of one sample needs labels.
    is_cut = engine.comm.world_size * accumulation == ROWS
    given = batches(name, STEPS) if is_cut else data(name)
    with listening() as said:
        for batch, limit in zip(given, limits, strict=True):
            device.set_limit(limit)
            parts = split(batch, engine.comm.world_size * accumulation)
            parts = parts[engine.comm.rank :: engine.comm.world_size]
            losses.append(step(engine, parts))
    most = torch.accelerator.max_memory_allocated()
    device.set_limit(ENOUGH)
    engine.destroy()
    return losses, most, said


def capped(
    rank: int, world_size: int, name: str, section: dict, accumulation: int
) -> tuple[Losses, list[tuple[int, Losses, list[str]]]]:
    """Losses with enough memory; and with caps for the last rank, each from some step on: the
    number of that step, the losses, and what was said.
    """
    usual, most, _ = train(name, section, accumulation, "explain", [ENOUGH] * STEPS)
    # What is left to cut to is one sample.
    _, least, _ = train(name, section, ROWS // world_size, "explain", [ENOUGH] * STEPS)
    found = []
    for first, part in CAPS:
        cap = least + int(part * (most - least))
        limits = [ENOUGH] * first + [cap if rank == world_size - 1 else ENOUGH] * (STEPS - first)
        losses, _, said = train(name, section, accumulation, "adapt", limits)
        found.append((first, losses, said))
    return usual, found


def one_sample(rank: int, world_size: int) -> tuple[Losses, Losses, list[str]]:
    """Losses of micro-batches of one sample with enough memory, and with as much for the last rank
    as they take if activations are recomputed; and what was said.
    """
    given = "llama", {}, ROWS // world_size
    usual, _, _ = train(*given, "explain", [ENOUGH] * STEPS)
    _, most, _ = train(*given, "adapt", [ENOUGH] * STEPS, recomputes=True)
    limits = [most if rank == world_size - 1 else ENOUGH] * STEPS
    losses, _, said = train(*given, "adapt", limits)
    return usual, losses, said


def test_activations_are_recomputed_if_there_is_one_sample():
    for rank, (usual, losses, said) in enumerate(run_on(2, one_sample, simulated=True)):
        assert losses == usual
        assert rank or ["activations are now recomputed" in text for text in said] == [True]


class SquareOfLoss(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.loss = output.loss**2
        return output


class MeanOfSamples(LlamaForCausalLM):
    """Each sample counts the same, however many labels it has."""

    def forward(self, *args, labels, **kwargs):
        output = super().forward(*args, **kwargs)
        losses = [
            self.loss_function(logits[None], own[None], self.vocab_size)
            for logits, own in zip(output.logits, labels, strict=True)
        ]
        return {"loss": torch.stack(losses).mean()}


class SpreadOfSamples(LlamaForCausalLM):
    """Adds a term that no two samples show."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if len(output.logits) > 2:
            output.loss = output.loss + output.logits.mean((1, 2)).std()
        return output


class MeanOfLogits(LlamaForCausalLM):
    """Has an output from which the script takes a gradient, although it has no row per sample."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        return {"loss": output.loss, "mean": output.logits.mean()}


def losses_that_are_no_mean(rank: int, world_size: int) -> list[list[str]]:
    """What is said where a backward runs out of memory, with as many labels in each sample."""
    found = []
    batch = {name: value.to(device.NAME) for name, value in batches("llama", 1)[0].items()}
    for kind in (MeanOfSamples, SpreadOfSamples, MeanOfLogits):
        model = build("llama").to(device.NAME)
        model.__class__ = kind
        engine, _ = start(model, ds_config() | {"on_out_of_memory": "adapt"})
        output = engine(**batch)
        loss = output["loss"] + output.get("mean", 0.0)
        del output
        device.set_limit(torch.accelerator.memory_allocated() + 1000)
        with listening() as said:
            engine.backward(loss)
        device.set_limit(ENOUGH)
        found.append(said)
        engine.destroy()
    return found


def test_a_loss_that_is_no_mean_over_labels_is_not_cut():
    for said in run_on(1, losses_that_are_no_mean, simulated=True)[0]:
        assert ["activations are now recomputed" in text for text in said] == [True]


def errors(rank: int, world_size: int) -> list[str]:
    """Return what is said where the step cannot be repeated, and after a backward by the script."""
    found = []
    for kind in (SquareOfLoss, LlamaForCausalLM):
        model = build("llama").to(device.NAME)
        model.__class__ = kind
        engine, _ = start(model, ds_config() | {"on_out_of_memory": "adapt"})
        batch = {name: value.to(device.NAME) for name, value in data("llama")[0].items()}
        if kind is SquareOfLoss:
            device.set_limit(torch.accelerator.memory_allocated() + 100_000)
        with pytest.raises((torch.OutOfMemoryError, UsageError)) as raised:
            engine(**batch).loss.backward()
            engine.step()
        device.set_limit(ENOUGH)
        found.append(str(raised.value))
        engine.destroy()
    return found


def test_what_cannot_be_repeated_is_said():
    lack, other = run_on(1, errors, simulated=True)[0]
    assert "its loss is not the mean over its labels" in lack
    assert "call engine.backward(loss) instead of loss.backward()" in other


def losses_of_logits(rank: int, world_size: int) -> tuple[list[float], list[float], list[str]]:
    """Losses that the script computes of the logits too, as TRL does: with enough memory, and with
    half as much for the last rank; and what is said.
    """
    found, limits = [], [ENOUGH, ENOUGH]
    batch, last = data("llama")[:2]
    with listening() as said:
        for act in "explain", "adapt":
            gc.collect()
            config = ds_config() | {"on_out_of_memory": act}
            engine, _ = start(build("llama").to(device.NAME), config)
            losses = []
            for given, limit in zip((batch, last), limits, strict=True):
                part = {name: value.to(device.NAME) for name, value in given.items()}
                torch.accelerator.reset_peak_memory_stats()
                before = torch.accelerator.memory_allocated()
                device.set_limit(limit)
                output = engine(**part)
                loss = output.loss + output.logits.square().mean()
                engine.backward(loss)
                most = torch.accelerator.max_memory_allocated()
                device.set_limit(ENOUGH)
                engine.step()
                losses.append(loss.item())
            if rank == world_size - 1:
                limits[1] = (before + most) // 2
            with torch.no_grad():
                losses.append(engine(**part).loss.item())
            found.append(losses)
            engine.destroy()
    return *found, said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_script_may_compute_its_loss_from_other_outputs(world_size):
    ranks = run_on(world_size, losses_of_logits, simulated=True)
    assert all(relative(losses, usual) < 1e-6 for usual, losses, _ in ranks)
    said = ranks[0][2]
    assert said and all("is now split into" in text for text in said)


def evaluations(rank: int, world_size: int) -> list[tuple[list[float], torch.Tensor, list[str]]]:
    """Losses, logits and what was said: of a batch with enough memory, and with too little for the
    last rank; then the same without labels.
    """
    config = ds_config(**SMALL) | {"on_out_of_memory": "adapt"}
    engine, _ = start(build("t5").to(device.NAME), config)
    batch = {name: value.to(device.NAME) for name, value in data("t5")[0].items()}
    step(engine, [{name: value[:1] for name, value in batch.items()}])
    engine.eval()
    ids = {"input_ids": batch["input_ids"], "decoder_input_ids": batch["labels"].relu()}
    found = []
    for inputs in batch, ids:
        peaks = []
        for rows, is_capped in (ROWS // 2, False), (ROWS, False), (ROWS, True):
            gc.collect()
            engine.reshard()
            if is_capped and rank == world_size - 1:
                device.set_limit(sum(peaks) // 2)
            torch.accelerator.reset_peak_memory_stats()
            with torch.no_grad(), listening() as said:
                some = {name: value[:rows] for name, value in inputs.items()}
                output = engine(**some, use_cache=False)
            peaks.append(torch.accelerator.max_memory_allocated())
            device.set_limit(ENOUGH)
            losses = [] if output.loss is None else [output.loss.item()]
            if rows == ROWS:
                found.append((losses, output.logits.cpu(), said))
            del output
    engine.destroy()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_is_cut(world_size):
    ranks = run_on(world_size, evaluations, simulated=True)
    for (usual, usual_logits, _), (losses, logits, _) in itertools.chain(
        *((found[:2], found[2:]) for found in ranks)
    ):
        assert relative(losses, usual) < 1e-6
        torch.testing.assert_close(logits, usual_logits)
    (_, _, nothing), (_, _, said), *_ = ranks[0]
    assert (nothing, ["now split into" in text for text in said][:1]) == ([], [True])


def continue_a_cache(rank: int, world_size: int) -> str:
    """Return the error of a forward that is given a cache, where memory runs out."""
    engine, _ = start(build("llama").to(device.NAME), ds_config() | {"on_out_of_memory": "adapt"})
    engine.eval()
    ids = data("llama")[0]["input_ids"].to(device.NAME)
    is_renamed = "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    name = "cache" if is_renamed else "past_key_values"
    device.set_limit(torch.accelerator.memory_allocated() + 1000)
    with torch.no_grad(), pytest.raises(RuntimeError) as raised:
        engine(ids, **{name: DynamicCache()})
    device.set_limit(ENOUGH)
    engine.destroy()
    return str(raised.value)


def test_an_evaluation_that_continues_a_cache_is_not_cut():
    assert "the forward continues a cache" in run_on(1, continue_a_cache, simulated=True)[0]


def states_on_host(rank: int, world_size: int) -> list[tuple[Losses, dict[str, dict[str, int]]]]:
    """Losses, and bytes by place and kind after a backward: with enough memory, and with too little
    for the optimizer's state beside a sample's activations, which are recomputed.
    """
    found, most = [], ENOUGH
    for act in "explain", "adapt":
        gc.collect()
        model: Any = build("llama").to(device.NAME)
        model.gradient_checkpointing_enable()
        sections = SMALL | {"bf16": {"enabled": True}, "stage3_max_live_parameters": 0}
        engine, _ = start(model, ds_config(**sections) | {"on_out_of_memory": act})
        batch = {name: value[:1].to(device.NAME) for name, value in batches("llama", 1)[0].items()}
        losses = [step(engine, [batch])]
        torch.accelerator.reset_peak_memory_stats()
        device.set_limit(most - 1000)
        loss = engine(**batch).loss
        engine.backward(loss)
        most = torch.accelerator.max_memory_allocated()
        kinds = bytes_by_kind(engine)
        device.set_limit(ENOUGH)
        engine.step()
        found.append(([*losses, [loss.item()], step(engine, [batch])], kinds))
        engine.destroy()
        del engine, model, loss
    return found


def test_the_optimizer_s_state_is_moved_if_nothing_else_helps():
    (usual, before), (losses, after) = run_on(1, states_on_host, simulated=True)[0]
    assert losses == usual
    # Of each sub-group its count of steps stays, because a fused step reads it on its device.
    counts = after[DEVICE].get(OPTIMIZER, 0)
    assert counts < before[DEVICE][OPTIMIZER] / 1000
    assert after["host"][OPTIMIZER] >= before[DEVICE][OPTIMIZER] - counts


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


def settings_after_a_resume(
    rank: int, world_size: int, folder: str, changed: dict
) -> tuple[dict, dict, dict]:
    found = []
    for resumes in (False, True):
        engine, _ = start(build("t5").to(device.NAME), ds_config() | {"on_out_of_memory": "adapt"})
        if resumes:
            _, client_state = engine.load_checkpoint(folder)
        else:
            engine.adaptation.restore(changed)
            engine.save_checkpoint(folder, client_state={"mine": 1})
        found.append(engine.adaptation.settings())
        engine.destroy()
    return *found, client_state


def test_a_checkpoint_remembers_what_was_changed(tmp_path):
    changed = {"parts": 4, "recomputes": 1, "max_live": 0, "states_on_host": 1}
    found = run_on(1, settings_after_a_resume, str(tmp_path), changed, simulated=True)[0]
    assert found == (changed, changed, {"mine": 1})


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
    ("name", "section", "accumulation"),
    [("llama", {}, 2), ("t5", HOST, 1), ("mixtral", {}, 1), ("t5", {"stage": 1}, 1)],
    ids=["stage 3", "on the host", "experts", "stage 1"],
)
def test_a_step_that_runs_out_of_memory_is_repeated(name, section, accumulation):
    ranks = run_on(2, capped, name, section, accumulation, simulated=True, timeout=300)
    for rank, (usual, runs) in enumerate(ranks):
        assert any(said for _, _, said in runs) or rank > 0
        for first, losses, said in runs:
            # Not cut: the same bits, also after an update.
            assert losses[:first] == usual[:first]
            assert all(relative(*pair) < 1e-6 for pair in zip(losses, usual, strict=True))
            assert all("is now split into" in text for text in said) and len(said) <= 3
