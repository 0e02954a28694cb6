"""The engine's own tensors have their own dtypes:

`torch.set_default_dtype` in a script changes nothing.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.dist.comm.test_compression import GRADIENTS
from tests.dist.training import Curve, adamw, assert_equal, curve_on, ds_config, start, train_zero
from tests.parity.models import batches, build
from tests.parity.test_whole_tensor import MAKE as MAKE_WHOLE
from zero.fragments import safe_get_full_fp32_param

MAKE = {"AdamW": adamw, "Muon": MAKE_WHOLE["Muon"]}


def trained(
    rank: int, world_size: int, section: dict[str, Any], optimizer: str, default: torch.dtype
) -> Curve:
    """As on machines of two ranks. The weights are read in fp32."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    engine, _ = start(build("llama"), ds_config(**section), make=MAKE[optimizer])
    torch.set_default_dtype(default)
    curve = train_zero(engine, batches("llama", 2))
    curve.weights = {
        name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()
    }
    return curve


@pytest.mark.parametrize(
    ("world_size", "section", "optimizer"),
    [(2, {}, "Muon"), (4, {"mics_shard_size": 2}, "AdamW"), (4, GRADIENTS, "AdamW")],
    ids=["whole tensors", "replicas", "codes between machines"],
)
def test_a_default_dtype_that_scripts_set_changes_nothing(world_size, section, optimizer):
    found, expected = (
        curve_on(world_size, trained, section, optimizer, default)
        for default in (torch.bfloat16, torch.float32)
    )
    assert_equal(found, expected)
