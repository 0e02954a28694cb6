"""`zero estimate` beside the simulated accelerator's counter. `benchmarks.estimate` has larger models."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.estimate import BF16, CPU, run
from zero.estimate import DEVICE, HOST

STAGE3 = {"stage": 3, "stage3_param_persistence_threshold": 100, "stage3_prefetch_bucket_size": 30000}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, bool]] = {
    "stage 0, many tokens": ({"stage": 0}, {}, 32, False),
    "stage 2, few tokens": ({"stage": 2, "reduce_bucket_size": 60000}, BF16, 1, False),
    "stage 3, few tokens": (STAGE3, BF16, 1, True),
    "stage 3, checkpointing": (STAGE3, {}, 4, True),
    "both offloaded": (STAGE3 | {"offload_optimizer": CPU, "offload_param": CPU}, BF16, 8, False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_what_the_device_counts(case):
    section, others, batch, checkpointing = CASES[case]
    row = run(("tiny", section, others, batch, 16, checkpointing))
    assert row[DEVICE]["predicted"] == pytest.approx(row[DEVICE]["measured"], rel=0.03)
    # Buffers for copies are whole pages.
    assert row[HOST]["predicted"] == pytest.approx(row[HOST]["measured"], rel=0.02, abs=1 << 16)
