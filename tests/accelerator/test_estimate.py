"""`zero estimate` beside the simulated accelerator's counter.

`benchmarks.estimate` has larger models.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.estimate.__main__ import (
    BF16,
    CODED_GRADIENTS,
    CODED_WEIGHTS,
    CPU,
    FEW,
    FILES,
    FOUR_BITS,
    MUON,
    NVME,
    ON_HOST,
    PIPELINE,
    SECOND,
    TWO,
    run,
)
from zero.tools.estimate.machine import DEVICE, DISK, HOST

STAGE3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 100,
    "stage3_prefetch_bucket_size": 30000,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, bool]] = {
    "stage 0, many tokens": ({"stage": 0}, {}, 32, False),
    "stage 2, few tokens": ({"stage": 2, "reduce_bucket_size": 60000}, BF16, 1, False),
    "stage 3, few tokens": (STAGE3, BF16, 1, True),
    "stage 3, checkpointing": (STAGE3, {}, 4, True),
    "both offloaded": (STAGE3 | {"offload_optimizer": CPU, "offload_param": CPU}, BF16, 8, False),
    "half of the optimizer offloaded": (
        STAGE3 | {"offload_optimizer": CPU | {"ratio": 0.5}},
        BF16,
        4,
        False,
    ),
    "stage 1": ({"stage": 1}, BF16 | TWO, 1, False),
    "few live": (STAGE3 | FEW, BF16, 1, False),
    "no reuse": (STAGE3 | {"stage3_max_reuse_distance": 0}, BF16, 1, False),
    "groups of 1": (STAGE3 | {"mics_shard_size": 1}, BF16, 1, False),
    "sums of micro-batches": ({"stage": 0}, BF16 | TWO, 1, False),
    "whole tensors": ({"stage": 2}, BF16 | MUON, 1, False),
    "whole tensors, stage 0": ({"stage": 0}, MUON, 1, False),
    "8-bit moments": ({"stage": 1, "zero_quantized_moments": True}, BF16, 1, False),
    "codes": (STAGE3 | CODED_WEIGHTS | FOUR_BITS, BF16, 1, False),
    "codes between machines": (STAGE3 | CODED_WEIGHTS | CODED_GRADIENTS | SECOND, BF16, 1, False),
    "activations on the host": (STAGE3, BF16 | ON_HOST, 64, False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_what_the_device_counts(case):
    section, others, batch, checkpointing = CASES[case]
    row = run(("tiny", section, others, batch, 16, checkpointing))
    assert row[DEVICE]["predicted"] == pytest.approx(row[DEVICE]["measured"], rel=0.03)
    # Buffers for copies are whole pages.
    assert row[HOST]["predicted"] == pytest.approx(row[HOST]["measured"], rel=0.02, abs=1 << 16)


def test_a_quantized_base_is_gathered_block_by_block():
    row = run(("llama-qlora", STAGE3 | FEW, BF16, 1, 16, True))
    assert row[DEVICE]["parts"]["gathered parameters"] < 4 << 20  # all blocks have 8 MiB
    assert row[DEVICE]["predicted"] == pytest.approx(row[DEVICE]["measured"], rel=0.01)


def test_buffers_between_files_and_memory():
    """What is in files has at least 1 MiB, so this model is larger."""
    optimizer = NVME | PIPELINE | {"max_in_cpu": 0}  # else gradients are in memory
    section = {"stage": 3, "offload_optimizer": optimizer, "offload_param": FILES}
    row = run(("llama", section, BF16, 1, 16, False))
    assert row[DISK]["predicted"] == row[DISK]["measured"] > 0
    buffers = sum(
        nbytes for part, nbytes in row[HOST]["parts"].items() if part.startswith("buffers")
    )
    assert buffers > 0.9 * row[HOST]["predicted"]
    # Copies, reads and writes end earlier or later: that costs buffers, or saves them.
    assert row[HOST]["predicted"] == pytest.approx(row[HOST]["measured"], rel=0.25)
