"""Experts that stay on their ranks, over data-parallel ranks, against plain torch in one process on
the same global batches.

As in `test_expert_parallel`, plain torch computes in float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.training import Curve, ds_config, relative, together, train_zero
from tests.parity.models import ROWS
from tests.parity.test_expert_parallel import (
    CLIP,
    NOTHING_PERSISTS,
    build,
    data,
    plain,
    start,
)
from tests.processes import run_on

pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="transformers has it since 5.22"
)


def configuration(world_size: int, size: int, accumulation: int = 1, **keys: Any) -> dict[str, Any]:
    config = ds_config(accumulation=accumulation, clip=CLIP, **NOTHING_PERSISTS, **keys)
    config["train_micro_batch_size_per_gpu"] = ROWS // accumulation // world_size
    return config | {"expert_parallel": {"enabled": True, "autoep_size": size}}


def trained(rank: int, world_size: int, cases: list[tuple[str, str, int, dict]]) -> list[Curve]:
    found = []
    for name, implementation, size, keys in cases:
        model = build(name)
        model.set_experts_implementation(implementation)
        engine = start(model, configuration(world_size, size, **keys))
        found.append(train_zero(engine, data()))
        engine.destroy()
    return found


def compare(found: Curve, expected: Curve) -> None:
    assert min(found.norms) > CLIP, "clipping must be at work"
    print(relative(found.mean_losses(), expected.mean_losses()), relative(found.norms, expected.norms), max((found.weights[k]-v).abs().max().item() for k,v in expected.weights.items()))
    assert relative(found.mean_losses(), expected.mean_losses()) < 1e-6
    assert relative(found.norms, expected.norms) < 1e-6
    assert found.weights.keys() == expected.weights.keys()
    for key, value in expected.weights.items():
        pytest.importorskip("torch").testing.assert_close(
            found.weights[key], value.float(), rtol=0, atol=1e-5, msg=key
        )


ON_TWO = [
    ("mixtral", "eager", 2, {"stage": 0}),
    ("qwen3", "grouped_mm", 2, {"stage": 1}),
    ("mixtral", "batched_mm", 2, {"stage": 2}),
    ("qwen3", "eager", 2, {"stage": 3}),
    ("mixtral", "grouped_mm", 2, {"stage": 3}),
]


@pytest.mark.parametrize(("ranks", "cases"), [(2, ON_TWO)])
def test_losses_norms_and_weights_are_those_of_plain_torch(ranks, cases):
    of_ranks = run_on(ranks, trained, cases)
    for number, (name, *_) in enumerate(cases):
        compare(together([curves[number] for curves in of_ranks]), plain(name))
