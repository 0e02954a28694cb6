"""PEFT attaches adapters to a sharded model. They are trained, saved and loaded again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import peft
import pytest
import torch

import zero
from tests.dist.toys import toy, toy_batches
from tests.dist.training import LR, ds_config, relative, start, train_plain, train_zero
from tests.processes import run_on
from tests.tolerance import rounding

# PEFT copies the head and trains the copy.
ADAPTERS = {"target_modules": ["up", "down"], "modules_to_save": ["head"], "r": 3, "lora_alpha": 5}


def with_adapters(model: torch.nn.Module, **options: object) -> peft.PeftModel:
    torch.manual_seed(4)
    return peft.get_peft_model(model, peft.LoraConfig(**ADAPTERS, **options))


def attached_and_trained(
    rank: int, world_size: int, stage: int, folder: Path, options: dict
) -> None:
    batches = toy_batches(3)
    plain = with_adapters(toy(), **options)
    expected = train_plain(plain, batches)
    shapes = {
        name: (param.shape, param.numel(), param.dtype) for name, param in plain.named_parameters()
    }

    with zero.Init(enabled=stage == 3, config=ds_config(stage=stage)):
        base = toy()
    calls = zero.comm.communicator.communicator().calls
    before = Counter(calls)
    # PEFT gathers what it reads only if the Trainer's configuration is alive.
    read = base.parameters() if options else []
    with zero.GatheredParameters(read, modifier_rank=0):
        model = with_adapters(base, **options)
    gathers = calls["all_gather"] - before["all_gather"]
    if not options:
        assert gathers == (stage == 3), "only the copy of the head needs an all-gather"
    assert {
        name: (param.shape, param.numel(), param.dtype) for name, param in model.named_parameters()
    } == shapes

    engine, _ = start(model, ds_config(stage=stage, stage3_param_persistence_threshold=0))
    assert relative(train_zero(engine, batches).norms, expected.norms) <= rounding(
        torch.float32, 50, len(batches)
    )
    assert {
        name: (param.shape, param.numel(), param.dtype) for name, param in model.named_parameters()
    } == shapes

    with zero.GatheredParameters(model.parameters()):
        if rank == 0:
            model.save_pretrained(folder)
    torch.distributed.barrier()
    reloaded = peft.PeftModel.from_pretrained(toy(), folder)
    for name, value in reloaded.state_dict().items():
        assert torch.allclose(value, expected.weights[name], rtol=0, atol=LR / 1000), name
        assert "lora_B" not in name or value.abs().max() > 1e-4, "it was not trained"


# PiSSA takes its factors out of the weight, and assigns the rest to `weight.data`.
PISSA = {"init_lora_weights": "pissa", "use_rslora": True}


@pytest.mark.parametrize(("stage", "options"), [(2, {}), (3, {}), (3, PISSA)])
def test_adapters_on_a_sharded_model(stage: int, options: dict, tmp_path: Path) -> None:
    run_on(2, attached_and_trained, stage, tmp_path, options)
