"""Configuration classes under DeepSpeed's names."""

import pytest
import torch
from torch import nn

from zero.config import load_config
from zero.integrations.deepspeed.optimizers import build_optimizer
from zero.integrations.deepspeed.utilities import move_to_device


def test_tensors_of_nested_values_move():
    moved = move_to_device({"ids": [torch.ones(2)], "name": "a"}, "meta")
    assert moved["ids"][0].is_meta and moved["name"] == "a"


class Untested(torch.optim.SGD):
    pass


def test_an_untested_optimizer_is_refused_on_request():
    model = nn.Linear(2, 2)
    sharded = {"zero_optimization": {"stage": 1}}
    allowed = load_config({"zero_allow_untested_optimizer": True, **sharded})
    refused = load_config({"zero_allow_untested_optimizer": False, **sharded})
    for kind, config in ((Untested, allowed), (torch.optim.SGD, refused)):
        assert (
            type(build_optimizer(config, lambda params, kind=kind: kind(params), None, model))
            is kind
        )
    with pytest.raises(
        ValueError, match="Untested is untested, and zero_allow_untested_optimizer is false"
    ):
        build_optimizer(refused, Untested(model.parameters(), lr=1.0), None, model)
