"""`python -m benchmarks.gpu --all` on the simulated accelerator, with tiny models: all but its
numbers, DDP, FSDP2 and compiled blocks, which do not run there.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu.rows import ROWS, Rows, measure
from benchmarks.models import MODELS, llama, t5
from benchmarks.runner import Row, ranks
from benchmarks.step.worker import train
from tests.processes import run_on
from zero.slicing import blocks

TINY: Row = {"model": "llama-1b", "batch": 4, "length": 32, "warmup": 1, "steps": 1}


def trained(rank: int, world_size: int, task: Row) -> Row:
    # bitsandbytes would compile its operators for this device, in vain.
    torch._dynamo.config.disable, blocks.TOKENS = True, 64
    MODELS.update({name: lambda: llama(64, 128, 2, 4, 256) for name in MODELS if "llama" in name})
    MODELS["t5-3b"] = lambda: t5(64, 128, 2, 2, 32, 256)
    return train(**json.loads(json.dumps(task, default=str)))


def forked(function: Any, nproc: int, timeout: float, env: Row, **task: Any) -> list[Row]:
    """As `ranks`, on the simulated accelerator, from a process that has imported torch.

    The variants of the other engines stand for one that takes too long, and for Ctrl-C.
    """
    if task["variant"] == "fsdp2":
        return ranks(function, nproc, timeout=timeout, env=env, **task)
    if task["variant"] == "ddp":
        raise KeyboardInterrupt
    return run_on(nproc, trained, task, simulated=True)


def written(rows: dict[str, Rows], folder: Path, ends: type, minutes: float = 8.0) -> Row:
    """What is written until the run ends with this exception."""
    args = Namespace(**TINY, checkpointing=False, dtype="bf16", minutes=minutes)
    args.ranks, args.threads, args.folder, args.deepspeed_python = 1, 1, folder, None
    args.output = folder / "rows.json"
    with mock.patch("benchmarks.step.comparison.ranks", forked), pytest.raises(ends):
        measure(rows, args)
        raise EOFError
    return json.loads(args.output.read_text())


@pytest.mark.parametrize("title", ROWS)
def test_each_row_has_its_columns(title, tmp_path):
    settings, own = ROWS[title].settings | TINY, ROWS[title].variants
    own = {key: own[key] for key in own if not any(x in key for x in ("ddp", "fsdp2", "compiled"))}
    if title == "tests":
        own = {"pytest": {"command": ["-c", "print('7 passed')"]}}
    if title == "qlora":
        pytest.importorskip("bitsandbytes")
        settings["dtype"] = "fp32"  # this device has no autocast
    if title == "adapt":
        settings["length"] = 512  # activations take most of the memory
    settings["model"] = ROWS[title].settings.get("model", "llama-1b")
    found = written({title: Rows(60, settings, own)}, tmp_path, EOFError)
    assert [row["variant"] for row in found["rows"]] == list(own) and found["missing"] == {}
    for name, row in zip(own, found["rows"], strict=True):
        if name == "pytest":
            assert row["note"] == "7 passed"
        elif name.startswith("deepspeed"):
            assert row["note"] == "left out: no --deepspeed-python"
        else:
            assert min(row[key] for key in ("seconds", "speed", "ratio", "device", "host")) > 0
            assert row["loss diff"] < 1e-2
            assert name == "plain" or (row["slices"] > 1) == ("keys" in own[name])


def test_what_fails_is_named_and_what_is_known_is_written(tmp_path):
    variants: dict[str, Row] = {"zero3": {"model": "none"}, "fsdp2": {}, "zero3 again": {}}
    rows = {"first": Rows(1, TINY, variants), "last": Rows(1, TINY, {"zero2": {}, "ddp": {}})}
    found = written(rows, tmp_path, KeyboardInterrupt)
    assert ["seconds" in row for row in found["rows"]] == [False, False, True, True]
    errors = {
        "first, zero3": "[rank0]: KeyError: 'none'",
        "first, fsdp2": "TimeoutError: not finished after 1 s",
    }
    assert found["missing"] == errors
    del rows["last"].variants["ddp"]
    found = written(rows, tmp_path, SystemExit, minutes=1e-9)
    assert set(found["missing"].values()) == {"not begun: the minutes are over"}
    assert len(found["missing"]) == 4 == len(found["tables"][0]["rows"])
