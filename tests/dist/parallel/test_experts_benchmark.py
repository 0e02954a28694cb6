"""The smallest form of `python -m benchmarks.experts`, on the processes of the tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import experts, runner
from tests.processes import run_on

pytest.importorskip("transformers.distributed.expert_parallel")


def measured(rank: int, world_size: int, variant: str) -> dict[str, Any]:
    return experts.measure(variant)


def test_experts_that_stay_train_as_gathered_ones(monkeypatch, tmp_path):
    def ranks(function: Callable, nproc: int, variant: str) -> list[dict[str, Any]]:
        assert function is experts.measure
        return run_on(nproc, measured, variant)

    monkeypatch.setattr(runner, "ranks", ranks)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # no namespace of its own
    file = tmp_path / "experts.json"
    words = ["--processes", "2", "--rounds", "1", "--output", str(file)]
    monkeypatch.setattr(sys, "argv", ["experts", *words])
    experts.main()  # exits if the losses differ
    found = json.loads(file.read_text())
    rows = found["rows"]["2"]
    assert rows.keys() == {"zero 1", "zero 2"} and found["missing"] == {}
    # Other tests use the same network, so that what was sent is not compared here.
    assert all(row["sent"] > 0 and row["peak"] > 0 for row in rows.values())
    assert len(found["tables"]) == 1
