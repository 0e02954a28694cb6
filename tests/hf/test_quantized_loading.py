"""Quantized models that `from_pretrained` loads at stage 3: no rank ever holds all of one, and
scripts see no difference.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.hf.trainer_runs import SCRIPTS
from tests.processes import fork_ranks

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")

KINDS = ["NF4", "NF4, bf16 storage", "int8", "NF4 experts", "NF4, saved"]
OTHERS = ["int8, saved", "torchao, saved"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of two ranks."""
    folder = tmp_path_factory.mktemp("quantized")
    done = fork_ranks(SCRIPTS / "quantized.py", folder, nproc=2, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"report{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS + OTHERS)
def test_no_rank_holds_more_than_its_share_and_one_parameter(
    reports: list[dict[str, Any]], kind: str
) -> None:
    """`needed`: what transformers and bitsandbytes allocate beyond the weights, for one of them."""
    for report in reports:
        whole, sharded = report[kind]["whole"]["memory"], report[kind]["sharded"]["memory"]
        needed = whole["peak"] - whole["end"]
        assert report[kind]["sharded"]["is sharded"]
        # Scales of fewer than 2,048 bytes are not sharded.
        assert sharded["end"] == pytest.approx(report[kind]["bytes"] / 2, rel=0.03)
        assert sharded["peak"] <= sharded["end"] + needed + report[kind]["largest"]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_a_model_that_was_loaded_whole(
    reports: list[dict[str, Any]], kind: str
) -> None:
    for report in reports:
        assert report[kind]["sharded"]["losses"] == report[kind]["whole"]["losses"]
        assert len(report[kind]["whole"]["losses"]) == 3


def test_experts_that_were_sharded_can_be_divided(reports: list[dict[str, Any]]) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    for report in reports:
        expected = report["NF4 experts"]["sharded"]["losses"]
        for found, values in zip(report["NF4 experts"]["divided"], expected, strict=True):
            assert found == pytest.approx(values, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_scripts_see_no_difference_before_training(
    reports: list[dict[str, Any]], kind: str
) -> None:
    for rank, report in enumerate(reports):
        whole, sharded = report[kind]["whole"]["uses"], report[kind]["sharded"]["uses"]
        if rank > 0 and "saved" in whole:
            del whole["saved"], sharded["saved"]
        assert sharded == whole


def test_dora_reads_the_weights_of_a_sharded_model(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["DoRA"]["sharded"] == report["DoRA"]["whole"] != {}
