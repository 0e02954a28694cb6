"""The monitors: the numbers of each step, and the files that they are written to."""

from __future__ import annotations

import contextlib
import csv
import gc
import io
import json
import logging
import os
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero
from tests.dist.messages import counted_messages
from tests.dist.toys import ROWS, toy, toy_batches
from tests.dist.training import ds_config, loss_of, start, step, train_zero
from tests.parity.models import batches, build
from tests.processes import on_ranks, run_on
from zero.comm import traffic
from zero.config import load_config
from zero.errors import UsageError
from zero.monitor import log_summary, monitor, run_info
from zero.monitor.writers import writers
from zero.offload import tiers
from zero.tools.report.runs import read

RANKS, STEPS, ACCUMULATION = 2, 3, 2
# The toy's matrix products at 2 operations a product: forward and both gradients, without that of
# the model's input.
FLOPS_A_ROW = 6 * (2 * 13 * 13 + 4 * 2 * 13 * 39) - 2 * 13 * 13


def place(folder: Path) -> dict[str, Any]:
    return {"enabled": True, "output_path": str(folder), "job_name": "job"}


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The records of json_monitor."""
    lines = (folder / "job" / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def monitored(rank: int, world_size: int, folder: Path) -> list[list[float]]:
    """Train with monitors. Return this rank's losses, step by step."""
    flops = {"enabled": True, "profile_step": 2, "output_file": str(folder / "flops")}
    config = ds_config(
        accumulation=ACCUMULATION,
        stage3_param_persistence_threshold=0,
        json_monitor=place(folder),
        csv_monitor=place(folder),
        steps_per_print=2,
        wall_clock_breakdown=True,
        flops_profiler=flops,
    )
    engine, _ = start(toy(), config)
    logger = logging.getLogger("zero")
    logger.warning("rank %d warns", rank)
    assert not logger.handlers  # else Python would not print warnings any more
    batches = [{name: value + rank for name, value in each.items()} for each in toy_batches(STEPS)]
    return [step(engine, [own] * ACCUMULATION) for own in batches]


def test_each_step_is_measured_and_written(tmp_path: Path):
    by_rank = run_on(RANKS, monitored, tmp_path)
    records = recorded(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert [record["samples"] for record in records] == [4, 8, 12]
    steps = zip(*by_rank, strict=True)
    means = [sum(map(sum, of_ranks)) / (RANKS * ACCUMULATION) for of_ranks in steps]
    assert [record["loss"] for record in records] == pytest.approx(means, rel=1e-6)
    for record in records:
        assert record["bytes"]["reduce_scatter"] == 4 * record["elements"]["reduce_scatter"] > 0
        assert record["lr"] == 1e-3 and record["grad_norm"] > 0
        assert set(record["seconds"]) == {"forward", "backward", "step"}
        memory = record["memory"]
        assert memory["host_bytes_peak"] > 0 and memory["gathered_elements_peak"] > 0
        assert len(record["ranks"]["working_seconds"]) == RANKS
    run = records[0]["run"]
    assert [("run" in each, "warnings" in each) for each in records[:2]] == [
        (True, True),
        (False, False),
    ]
    assert records[0]["warnings"] == ["rank 0 warns"]
    effective = {row["key"]: row["effective"] for row in run["configuration"]}
    assert effective["zero_optimization.stage"] == "3" and effective["gradient_clipping"] == "0.0"
    assert run["environment"]["ranks"] == "2" and run["environment"]["torch"] == torch.__version__
    elements = sum(param.numel() for param in toy().parameters())
    assert run["parameters"] == elements
    # fp32 weights are their own masters; AdamW has two moments and a counter. Small shards have
    # much padding.
    kinds = run["memory"]["host"]
    assert 4 * elements / RANKS <= kinds["parameters"] <= 5 * elements / RANKS
    assert 2 * kinds["parameters"] <= kinds["optimizer"] <= 2 * kinds["parameters"] + 100
    # Counters start again in each step: equal work has equal traffic.
    assert records[1]["elements"]["reduce_scatter"] == records[2]["elements"]["reduce_scatter"]

    found = read(tmp_path / "job")
    assert found.curve("loss")[1] == [record["loss"] for record in records]
    assert min(found.time_by_part().values()) >= 0 and found.warnings == [(1, "rank 0 warns")]

    text = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text()
    head, *rows = csv.reader(text.splitlines())
    assert head == ["step", "train_loss"]
    assert [(int(x), float(y)) for x, y in rows] == [(r["samples"], r["loss"]) for r in records]
    operations = f"at step 2: {FLOPS_A_ROW * ROWS * ACCUMULATION / 1000:.2f} KFLOPS in"
    assert operations in (tmp_path / "flops").read_text()


PEAK = 1e9


def language(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    """Train a small model of language with its optimizer in files.

    Return the bytes that this rank has sent.
    """
    tiers.LEAST_BYTES_IN_A_FILE = 1
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # the other rank is on another machine
    files = {"device": "nvme", "nvme_path": str(folder), "overlap_step": False}
    config = ds_config(offload_optimizer=files, json_monitor=place(folder))
    with mock.patch.object(monitor, "peak", lambda device, dtype: PEAK):
        engine, _ = start(build("t5"), config)
    with counted_messages() as sent:
        train_zero(engine, batches("t5", 2))
    return {
        "sent": 4 * sent.total(),
        "elements": sum(u.layout.numel for u in engine.groups),
    }


def multiplied(module: nn.Module) -> int:
    return sum(
        param.numel()
        for each in module.modules()
        if not isinstance(each, nn.Embedding)
        for param in each.parameters(recurse=False)
    )


def test_tokens_files_and_memory_of_ranks(tmp_path: Path):
    found = run_on(2, language, tmp_path)[0]
    records = recorded(tmp_path)
    batch, record = batches("t5", 2)[-1], records[-1]
    tokens = batch["input_ids"].numel() + batch["labels"].numel()
    steps_per_second = record["samples_per_second"] * record["step"] / record["samples"]
    assert record["tokens_per_second"] == pytest.approx(tokens * steps_per_second)
    # A token of the source meets the weights of the encoder alone, one of the target those of the
    # decoder.
    model = build("t5")
    encoder, decoder = (
        multiplied(part) for part in (model.encoder, nn.ModuleList([model.decoder, model.lm_head]))
    )
    operations = 6 * (encoder * batch["input_ids"].numel() + decoder * batch["labels"].numel())
    assert record["model_flops_per_second"] == pytest.approx(operations / 2 * steps_per_second)
    assert record["mfu"] == pytest.approx(record["model_flops_per_second"] / PEAK)
    assert sum(each["links"]["network"] for each in records) == found["sent"] > 0
    assert record["links"]["network between machines"] == record["links"]["network"]
    assert record["links"]["host to device"] == record["links"]["device to host"] == 0
    # Masters share memory with fp32 weights here, and gradients are in memory: files have moments.
    shard = 4 * found["elements"] / 2
    assert min(record["links"][name] for name in ("disk read", "disk written")) > 2 * shard
    assert min(record["disk_bytes_per_second"][name] for name in ("read", "written")) > 0
    of_ranks = record["ranks"]
    for now, peak in zip(of_ranks["host_bytes"], of_ranks["host_bytes_peak"], strict=True):
        assert 0 < now <= peak
    assert of_ranks["device_bytes"] == [0, 0]


@on_ranks(1)
def test_late_updates_end_before_memory_is_counted(rank, world_size):
    """The first one makes the optimizer's state."""
    engine, _ = start(toy(), ds_config())
    seen: list[str] = []
    with (
        mock.patch.object(run_info, "bytes_by_kind", lambda engine: seen.append("counted")),
        mock.patch.object(engine.optimizer, "wait", lambda: seen.append("wait")),
    ):
        run_info.describe_run(engine)
    assert seen == ["wait", "counted"]


def logged(rank: int, world_size: int, section: dict[str, Any]) -> str:
    """Train with the log of collectives. Return what this rank prints."""
    sections = {"comms_logger": section, "memory_breakdown": True}
    config = ds_config(stage3_param_persistence_threshold=0, **sections)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        engine, optimizer = start(toy(), config)
        train_zero(engine, toy_batches(2))
        log_summary(show_straggler=True)
    calls = engine.comm.calls["all_gather"]
    del engine, optimizer
    gc.collect()
    with pytest.raises(UsageError, match="comms_logger.enabled"):
        log_summary()
    assert traffic.begin("load", torch.ones(1)) is traffic._nothing
    return f"{calls}\n{printed.getvalue()}"


def test_collectives_and_memory_are_printed_on_rank_0():
    first, second = run_on(RANKS, logged, {"enabled": True, "prof_ops": [], "verbose": True})
    calls, *lines = first.splitlines()
    assert len(second.splitlines()) == 1
    shown = [line for line in lines if line.startswith("step ")]
    assert len(shown) == 2
    assert all("host parameters " in line and ", optimizer " in line for line in shown)
    ended = [line for line in lines if line.startswith("comm op: all_gather ")]
    head = next(number for number, line in enumerate(lines) if line.startswith("Comm. Op "))
    assert lines[head].split("  ")[-1].strip() == "Straggler(ms)"
    name, table = "", list[tuple[str, list[str]]]()
    for line in lines[head + 1 :]:
        if line.startswith(" "):
            table.append((name, line.split()[2:]))  # without the size
        else:
            name = line
    assert {"all_gather", "reduce_scatter"} <= {name for name, _ in table}
    gathers = sum(int(row[0]) for name, row in table if name == "all_gather")
    assert gathers == len(ended) <= int(calls)
    for name, (count, *numbers) in table:
        total, average, rate, bus, straggler = map(float, numbers)
        assert total == pytest.approx(int(count) * average, abs=0.01 * (1 + int(count)))
        # Two ranks: an all-reduce moves its buffer once over the bus, the other two half of it.
        factor = {"all_reduce": 1, "broadcast": 1}.get(name, 0.5)
        assert bus == pytest.approx(factor * rate, abs=0.02) and straggler >= 0


def test_chosen_collectives_have_rows_for_each_group():
    section = {"enabled": True, "prof_all": False, "debug": True}
    section["prof_ops"] = ["all_gather_into_tensor"]
    first, _ = run_on(RANKS, logged, section)
    names = [line for line in first.splitlines() if line.startswith(("all_", "reduce"))]
    assert all(name.startswith("all_gather") for name in names)
    assert sum(" | " in name for name in names) > 2


def with_divided_losses(rank: int, world_size: int, folder: Path) -> list[float]:
    """As the Trainer does: it divides the loss itself.

    The learning rate is a tensor. The folder goes away.
    """
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    config = ds_config(accumulation=ACCUMULATION, json_monitor=place(folder))
    engine = zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    losses = []
    for number, batch in enumerate(toy_batches(2)):
        losses.append(0.0)
        for _ in range(ACCUMULATION):
            loss = loss_of(engine(**batch)) / ACCUMULATION
            losses[-1] += loss.item()
            engine.backward(loss, scale_wrt_gas=False)
            if number == 1 and rank == 0:
                shutil.rmtree(folder / "job", ignore_errors=True)
            engine.step()
        if number == 0 and rank == 0:
            (record,) = recorded(folder)
            assert record["loss"] == pytest.approx(losses[0], rel=1e-6)
            assert record["lr"] == pytest.approx(1e-2)
    return losses


def test_a_loss_that_the_script_divides_and_a_folder_that_goes_away(tmp_path: Path):
    first, second = run_on(RANKS, with_divided_losses, tmp_path)
    assert first == second


@on_ranks(RANKS)
def test_what_cannot_be_written_is_refused_on_all_ranks_before_training(rank, world_size, tmp_path):
    (tmp_path / "file").write_text("")
    csv = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "file")}}
    flops = {"flops_profiler": {"enabled": True, "output_file": str(tmp_path / "none" / "table")}}
    for section, says in (
        (csv, "csv_monitor.output_path: cannot write to"),
        (flops, "flops_profiler.output_file: .* there is no such folder"),
    ):
        with pytest.raises(UsageError, match=says):
            start(toy(), ds_config(**section))


@pytest.mark.parametrize("section", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(section: str):
    config = load_config(ds_config(**{section: {"enabled": True}}))
    missing = dict.fromkeys(("tensorboard", "torch.utils.tensorboard", "wandb"))
    says = pytest.raises(UsageError, match=f"package {section} is missing")
    with mock.patch.dict(sys.modules, missing), says:
        writers(config)


def test_wandb_gets_the_numbers_under_deepspeeds_names():
    fake = mock.Mock()
    config = load_config(ds_config(wandb={"enabled": True, "project": "mine"}))
    with mock.patch.dict(sys.modules, {"wandb": fake}):
        (writer,) = writers(config)
    numbers = {"step": 1, "samples": 4, "loss": 2.0, "lr": 0.1, "loss_scale": None}
    writer.write(numbers | {"seconds": {"forward": 0.5}})
    expected = {
        "Train/Samples/train_loss": 2.0,
        "Train/Samples/lr": 0.1,
        "Train/Seconds/forward": 0.5,
    }
    fake.init.assert_called_once_with(project="mine", group=None, entity=None)
    fake.log.assert_called_once_with(expected, step=4)


@pytest.mark.parametrize("again", [False, True])
@on_ranks(1)
def test_a_monitor_does_not_keep_an_engine_alive(rank, world_size, tmp_path, again):
    """Its optimizer's moments take 8 bytes a parameter. The model lives on; `again`: another engine
    takes it over.
    """
    config = ds_config(json_monitor=place(tmp_path), comms_logger={"enabled": True})
    model, own = toy(), len(logging.getLogger("zero").filters)
    engine, optimizer = start(model, config)
    train_zero(engine, toy_batches(1))
    parts = {"engine": engine, "optimizer": optimizer, "monitor": engine.monitor}
    parts["moments"] = engine.optimizer.optimizer
    alive = {name: weakref.ref(part) for name, part in parts.items()}
    del engine, optimizer, parts
    following = start(model, config) if again else None
    gc.collect()
    assert again == (following is not None)
    hooks = [hook for hook in model._forward_pre_hooks.values() if "_before_forward" in str(hook)]
    assert len(hooks) == len(logging.getLogger("zero").filters) - own == again
    assert not [name for name, part in alive.items() if part() is not None]
