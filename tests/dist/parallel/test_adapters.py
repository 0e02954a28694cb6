"""PEFT attaches adapters to a model that is sharded while it is built.

`tests/parity/test_adapters.py` trains, saves and loads them.
"""

from __future__ import annotations

import peft
import pytest
import torch

import zero
from tests.dist.toys import toy, toy_batches
from tests.dist.training import ds_config, relative, start, train_plain, train_zero
from tests.processes import on_ranks
from tests.tolerance import rounding

# PEFT copies the head and trains the copy.
ADAPTERS = {"target_modules": ["up", "down"], "modules_to_save": ["head"], "r": 3, "lora_alpha": 5}


def with_adapters(model: torch.nn.Module, **options: object) -> peft.PeftModel:
    torch.manual_seed(4)
    return peft.get_peft_model(model, peft.LoraConfig(**ADAPTERS, **options))


# PiSSA takes its factors out of the weight, and assigns the rest to `weight.data`.
PISSA = {"init_lora_weights": "pissa", "use_rslora": True}


@pytest.mark.parametrize("options", [{}, PISSA])
@on_ranks(2)
def test_adapters_on_a_sharded_model(rank, world_size, options):
    batches = toy_batches(3)
    expected = train_plain(with_adapters(toy(), **options), batches)
    with zero.Init(config=ds_config()):
        base = toy()
    comm = zero.comm.communicator.communicator()
    before = comm.calls["all_gather"]
    # PEFT gathers what it reads only if the Trainer's configuration is alive.
    read = base.parameters() if options else []
    with zero.GatheredParameters(read, modifier_rank=0):
        model = with_adapters(base, **options)
    if not options:
        assert comm.calls["all_gather"] == before + 1, "only the copy of the head needs one"
    engine, _ = start(model, ds_config(stage3_param_persistence_threshold=0))
    found = train_zero(engine, batches)
    assert relative(found.norms, expected.norms) <= rounding(torch.float32, 50, len(batches))
